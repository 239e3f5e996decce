package kvdock

import (
	"context"
	"fmt"
	"sync"
	"time"

	pb "github.com/kvdock/kvdock/gen/go/kvdock/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Part is one group's share of a chunk. A group without index is -1.
type Part struct {
	Namespace, Key string
	Group          int64
}

func partOf(namespace string, key []byte, group *uint32) Part {
	if group == nil {
		return Part{namespace, string(key), -1}
	}
	return Part{namespace, string(key), int64(*group)}
}

// parts has a bit for each medium on which a part is.
type parts map[Part]uint64

func (p parts) take(event *pb.Event) {
	if e := event.GetStored(); e != nil {
		if _, known := pb.Medium_name[int32(e.Medium)]; known { // nothing can be loaded from another
			p[partOf(event.Namespace, e.Key, e.GroupIdx)] |= 1 << uint32(e.Medium)
		}
	} else if e := event.GetRemoved(); e != nil {
		one := partOf(event.Namespace, e.Key, e.GroupIdx)
		if p[one] &^= 1 << uint32(e.Medium); p[one] == 0 {
			delete(p, one)
		}
	} else if event.GetCleared() != nil {
		for one := range p {
			if one.Namespace == event.Namespace {
				delete(p, one)
			}
		}
	}
}

// Index mirrors what a server holds.
type Index struct {
	mu        sync.RWMutex
	parts     parts
	cursor    *pb.Cursor // nil: a snapshot is wanted
	pieces    parts      // of a snapshot whose last piece has not come
	snapshots int
}

// State says which life of the server is mirrored (0: none yet), which parts it holds, and how many
// snapshots were needed.
func (x *Index) State() (epoch uint64, held []Part, snapshots int) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for one := range x.parts {
		held = append(held, one)
	}
	return x.cursor.GetEpoch(), held, x.snapshots
}

// Has says whether a chunk's part is there, on whichever medium. A group without index is nil.
func (x *Index) Has(namespace string, key []byte, group *uint32) bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.parts[partOf(namespace, key, group)] != 0
}

// apply takes in the next message of a stream. After an error the index wants a snapshot.
func (x *Index) apply(message *pb.StreamKVEventsResponse) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if piece := message.GetSnapshot(); piece != nil {
		for _, event := range piece.Stored {
			x.pieces.take(event)
		}
		if piece.Last {
			x.parts, x.pieces, x.cursor = x.pieces, parts{}, message.Cursor
			x.snapshots++
		}
		return nil
	}
	was, at := x.cursor, message.GetCursor()
	x.cursor = nil
	if message.GetCompacted() != nil || was == nil || at.GetEpoch() != was.Epoch || at.Sequence < was.Sequence {
		return fmt.Errorf("%v cannot be resumed", was)
	}
	last := was.Sequence
	for _, event := range message.GetBatch().GetEvents() {
		if event.Sequence <= last || event.Sequence > at.Sequence { // numbers grow, not always by one
			return fmt.Errorf("event %d after event %d, up to %d", event.Sequence, last, at.Sequence)
		}
		last = event.Sequence
		x.parts.take(event)
	}
	x.cursor = at
	return nil
}

// Follow keeps the index true until ctx ends, through lost connections and new lives of the server:
// it resumes where it was, and asks for a snapshot if it cannot. Without server the index stays as
// it is. An error means that the server has no events for us.
func (c *Client) Follow(ctx context.Context, x *Index) error {
	for ctx.Err() == nil {
		switch err := c.follow(ctx, x); status.Code(err) {
		case codes.Unimplemented, codes.PermissionDenied, codes.Unauthenticated:
			return err
		case codes.InvalidArgument: // the server has never been where we are
			x.apply(nil)
		}
		time.Sleep(100 * time.Millisecond)
	}
	return ctx.Err()
}

// follow reads one stream until it ends. Nobody else changes the index meanwhile.
func (c *Client) follow(ctx context.Context, x *Index) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	x.pieces = parts{} // of a snapshot that was cut off nothing counts
	snapshot := &pb.StreamKVEventsRequest_Snapshot{Snapshot: &pb.StartSnapshot{}}
	request := &pb.StreamKVEventsRequest{Start: snapshot, ProgressIntervalMs: 1000}
	if x.cursor != nil {
		request.Start = &pb.StreamKVEventsRequest_After{After: x.cursor}
	}
	stream, err := c.StreamKVEvents(ctx, request)
	for err == nil {
		silence := time.AfterFunc(5*time.Second, cancel) // the server, or the way to it, is lost
		var message *pb.StreamKVEventsResponse
		if message, err = stream.Recv(); err == nil {
			err = x.apply(message)
		}
		silence.Stop()
	}
	return err
}
