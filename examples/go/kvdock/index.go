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

// part is one group's share of a chunk. A group without index is -1.
type part struct {
	namespace string
	key       Key
	group     int64
}

func partOf(namespace string, key []byte, group *uint32) part {
	p := part{namespace: namespace, group: -1}
	if copy(p.key[:], key); group != nil {
		p.group = int64(*group)
	}
	return p
}

// parts has a bit for each medium on which a part is.
type parts map[part]uint64

// set puts a part on a medium, or takes it off. Of a medium that we do not know nothing can be loaded.
func (p parts) set(one part, medium pb.Medium, there bool) {
	if _, known := pb.Medium_name[int32(medium)]; known && there {
		p[one] |= 1 << medium
	} else if p[one] &^= 1 << medium; p[one] == 0 {
		delete(p, one)
	}
}

func (p parts) take(event *pb.Event) {
	if e := event.GetStored(); e != nil {
		p.set(partOf(event.Namespace, e.Key, e.GroupIdx), e.Medium, true)
	} else if e := event.GetRemoved(); e != nil {
		p.set(partOf(event.Namespace, e.Key, e.GroupIdx), e.Medium, false)
	} else if event.GetCleared() != nil {
		for one := range p {
			if one.namespace == event.Namespace {
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

// State says which life of the server is mirrored (0: none yet), how many parts it holds, and how
// many snapshots were needed.
func (x *Index) State() (epoch uint64, parts, snapshots int) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.cursor.GetEpoch(), len(x.parts), x.snapshots
}

// Keys gives the keys of a namespace's chunks.
func (x *Index) Keys(namespace string) (keys []Key) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for one := range x.parts {
		if one.namespace == namespace {
			keys = append(keys, one.key)
		}
	}
	return keys
}

// Prefix says how many of a prompt's chunks, from the first on, a lookup would find.
func (x *Index) Prefix(namespace *pb.Namespace, keys []Key) int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	// Whatever its kind, a group without part i has no hit between i and a longer one that needs it.
	n, chunk := len(keys), int(namespace.ChunkTokens)
	for pass, again := 0, true; again; pass++ {
		again = false
		for _, group := range namespace.Groups {
			first := 0
			switch group.Kind {
			case pb.GroupKind_GROUP_KIND_FULL_ATTENTION:
				if pass > 0 {
					continue // what it has of n chunks, it has of fewer
				}
			case pb.GroupKind_GROUP_KIND_SLIDING_WINDOW:
				if first = (n*chunk - int(group.WindowTokens) + 1) / chunk; first == n {
					first = n - 1 // even a window of one token needs a part
				}
			case pb.GroupKind_GROUP_KIND_RECURRENT_STATE:
				first = n - 1
			}
			for i := n - 1; i >= first && i >= 0; i-- {
				if x.parts[partOf(namespace.Name, keys[i][:], group.GroupIdx)] == 0 {
					n, again = i, true
				}
			}
		}
	}
	return n
}

// apply takes in the next message of a stream. After an error the index wants a snapshot.
func (x *Index) apply(message *pb.StreamKVEventsResponse) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	if piece := message.GetSnapshot(); piece != nil {
		if x.pieces == nil {
			x.pieces = parts{}
		}
		for _, event := range piece.Stored {
			x.pieces.take(event)
		}
		if piece.Last {
			x.parts, x.pieces, x.cursor = x.pieces, nil, message.Cursor
			x.snapshots++
		}
		return nil
	}
	was, at := x.cursor, message.GetCursor()
	x.cursor = nil
	if message.GetCompacted() != nil || was == nil || at.GetEpoch() != was.Epoch {
		return fmt.Errorf("%v cannot be resumed", was)
	}
	last := was.Sequence
	for _, event := range message.GetBatch().GetEvents() {
		if event.Sequence <= last { // numbers between them may be of events that we are not told
			return fmt.Errorf("event %d after event %d", event.Sequence, last)
		}
		last = event.Sequence
		x.parts.take(event)
	}
	if at.Sequence < last {
		return fmt.Errorf("event %d in a batch up to %d", last, at.Sequence)
	}
	x.cursor = at
	return nil
}

// begin forgets a snapshot that was cut off and says where a stream has to begin.
func (x *Index) begin(request *pb.StreamKVEventsRequest) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.pieces = nil; x.cursor == nil {
		request.Start = &pb.StreamKVEventsRequest_Snapshot{Snapshot: &pb.StartSnapshot{}}
	} else {
		request.Start = &pb.StreamKVEventsRequest_After{After: x.cursor}
	}
}

// Follow keeps the index true until ctx ends, through lost connections and new lives of the server:
// it resumes where it was, and asks for a snapshot if it cannot. Without server the index stays as
// it is. An error means that the server has no events for us.
func (c *Client) Follow(ctx context.Context, x *Index) error {
	for {
		switch err := c.follow(ctx, x); status.Code(err) {
		case codes.Unimplemented, codes.PermissionDenied, codes.Unauthenticated:
			return err
		case codes.InvalidArgument: // the server has never been where we are
			x.mu.Lock()
			x.cursor = nil
			x.mu.Unlock()
		}
		if !sleep(ctx, 100*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// follow reads one stream until it ends.
func (c *Client) follow(ctx context.Context, x *Index) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	request := &pb.StreamKVEventsRequest{ProgressIntervalMs: 1000}
	x.begin(request)
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
