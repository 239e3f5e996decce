package main

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"time"

	"github.com/kvdock/kvdock/examples/go/kvdock"
	pb "github.com/kvdock/kvdock/gen/go/kvdock/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	chunkTokens = 16
	shardBytes  = 300_001 // more than two messages, and no multiple of anything
	logCount    = 20      // events
)

var (
	namespace = &pb.Namespace{Name: "go", ChunkTokens: chunkTokens, KvWorldSize: 1, Groups: []*pb.Group{
		{Kind: pb.GroupKind_GROUP_KIND_FULL_ATTENTION, ShardBytes: []uint64{shardBytes}}}}
	register = &pb.RegisterNamespaceRequest{Namespace: namespace}
	opening  = &pb.OpenRequest{EngineId: "go example", Role: pb.SessionRole_SESSION_ROLE_SCHEDULER, Client: "examples/go"}
	servers  = map[*exec.Cmd]bool{}
)

func start(address string) *exec.Cmd {
	command := strings.Fields(os.Getenv("KVDOCK_SERVER"))
	if len(command) == 0 {
		log.Fatal("KVDOCK_SERVER has no command")
	}
	command = append(command, "--listen", address, "--memory", "64MiB", "--event-log", "1MiB",
		"--event-log-count", fmt.Sprint(logCount), "--log-level", "warning")
	server := exec.Command(command[0], command[1:]...)
	server.Stdout, server.Stderr = os.Stderr, os.Stderr
	must(server.Start())
	servers[server] = true
	return server
}

func kill(server *exec.Cmd) {
	server.Process.Kill()
	server.Wait()
	delete(servers, server)
}

func row(what, seen string) { fmt.Printf("%-28s %s\n", what, seen) }

func fail(format string, args ...interface{}) {
	for server := range servers {
		kill(server)
	}
	log.Fatalf(format, args...)
}

func must(err error) {
	if err != nil {
		fail("%v", err)
	}
}

// check ends the program unless got is want, and otherwise prints what was seen if that has a name.
func check(what string, got, want interface{}) {
	if !reflect.DeepEqual(got, want) {
		fail("%s: got %v, want %v", what, got, want)
	}
	if what != "" {
		row(what, fmt.Sprint(got))
	}
}

// prompt gives the keys of a prompt of so many chunks, and their bytes.
func prompt(seed uint32, chunks int) (tokens []uint32, keys [][]byte, shards [][]byte) {
	for i := uint32(0); i < uint32(chunks)*chunkTokens; i++ {
		tokens = append(tokens, seed+i)
	}
	keys = kvdock.Keys(kvdock.NoParent, tokens, chunkTokens)
	for i := range keys {
		shards = append(shards, bytes.Repeat(keys[i], shardBytes/32+1)[:shardBytes])
	}
	return tokens, keys, shards
}

// prefix says how many chunks of a prompt, from the first on, the index has.
func prefix(index *kvdock.Index, keys [][]byte) int {
	for i, key := range keys {
		if !index.Has(namespace.Name, key, nil) {
			return i
		}
	}
	return len(keys)
}

// put stores the chunks from the first on and gives the statuses' names.
func put(ctx context.Context, client *kvdock.Client, keys [][]byte, shards [][]byte, first int) string {
	open := &pb.PutOpen{Namespace: namespace.Name, Keys: keys[first:]}
	if first > 0 {
		open.ParentKey = keys[first-1]
	}
	statuses, err := client.PutChunks(ctx, open, shards[first:])
	must(err)
	counts := map[string]int{}
	for _, s := range statuses {
		counts[strings.TrimPrefix(s.String(), "CHUNK_STATUS_")]++
	}
	return fmt.Sprint(counts)
}

func all(ctx context.Context, address string, client *kvdock.Client) {
	server := start(address)
	session, err := client.Open(ctx, opening)
	must(err)
	registered, err := client.RegisterNamespace(ctx, register)
	must(err)
	check("namespace is new", registered.Created, true)
	registered, err = client.RegisterNamespace(ctx, register)
	must(err)
	check("namespace is new again", registered.Created, false)

	_, keys, shards := prompt(1000, 6)
	check("put 5 chunks", put(ctx, client, keys[:5], shards[:5], 0), "map[STORED:5]")
	check("put them again", put(ctx, client, keys[:5], shards[:5], 0), "map[EXISTS:5]")
	_, orphans, orphanShards := prompt(2000, 2)
	check("put without parent", put(ctx, client, orphans, orphanShards, 1), "map[PARENT_MISSING:1]")

	found, err := session.Lookup(ctx, namespace.Name, keys)
	must(err)
	check("lookup of 6 chunks hits", found.HitChunks, uint32(5))
	check("locked parts", locked(ctx, client), uint64(5))
	got, err := client.GetChunks(ctx, &pb.GetRequest{Namespace: namespace.Name, Keys: keys})
	must(err)
	check("get of 6 chunks gives", len(got), 5)
	check("bytes are equal", bytes.Equal(bytes.Join(got, nil), bytes.Join(shards[:5], nil)), true)
	released, err := session.Free(ctx, found.LeaseId)
	must(err)
	check("locks freed", released, uint32(5))
	released, err = session.Free(ctx, found.LeaseId)
	must(err)
	check("locks freed again", released, uint32(0))
	check("locked parts then", locked(ctx, client), uint64(0))

	found, err = session.Lookup(ctx, namespace.Name, keys)
	must(err)
	free := &pb.FreeLocksRequest{Locks: []*pb.LockRange{{LeaseId: found.LeaseId}}}
	free.SessionToken = []byte(fmt.Sprint(session.SessionId)) // what everybody may see
	_, err = client.FreeLocks(ctx, free)
	check("a session's id as token", status.Code(err).String()+" "+kvdock.Reason(err), "NotFound UNKNOWN_SESSION")
	free.SessionToken = session.SessionToken
	freed, err := client.FreeLocks(ctx, free)
	must(err)
	check("its token frees locks", freed.Freed[0].Released, uint32(5))

	_, err = client.Lookup(ctx, &pb.LookupRequest{}, grpc.ForceCodec(noMessage{}))
	check("bytes that are no message", status.Code(err).String()+" "+kvdock.Reason(err), "InvalidArgument INVALID_ARGUMENT_VALUE")
	_, err = session.Lookup(ctx, "none", keys)
	check("error in a session", status.Code(err).String()+" "+kvdock.Reason(err), "NotFound UNKNOWN_NAMESPACE")
	_, err = client.Lookup(ctx, &pb.LookupRequest{Namespace: "none", Keys: keys})
	check("error of a call", status.Code(err).String()+" "+kvdock.Reason(err), "NotFound UNKNOWN_NAMESPACE")
	_, err = session.Lookup(ctx, namespace.Name, keys)
	must(err)
	session.Close()
	wait(func() bool { return locked(ctx, client) == 0 })
	row("a session's end frees", "its lease")
	session, err = client.Open(ctx, opening)
	must(err)
	gone, cancel := context.WithCancel(ctx)
	cancel()
	for found, err = session.Lookup(gone, namespace.Name, keys); err == nil; { // the answer was there at once
		_, err = session.Free(ctx, found.LeaseId)
		must(err)
		found, err = session.Lookup(gone, namespace.Name, keys)
	}
	check("lookup given up", status.Code(err), codes.Canceled)
	found, err = session.Lookup(ctx, namespace.Name, keys) // its answer comes behind the other
	must(err)
	_, err = session.Free(ctx, found.LeaseId)
	must(err)
	wait(func() bool { return locked(ctx, client) == 0 })
	row("whose answer frees", "its lease")

	long := &pb.PutOpen{Namespace: namespace.Name, Keys: keys[:5]}
	for range long.Keys {
		told := &pb.ChunkEventData{BlockHashes: [][]byte{make([]byte, 1<<20-100)}, BlockSize: chunkTokens}
		long.EventData = append(long.EventData, told)
	}
	stream, err := client.Put(ctx)
	must(err)
	must(stream.Send(&pb.PutRequest{Message: &pb.PutRequest_Open{Open: long}}))
	_, err = stream.Recv()
	check("5 MiB to open one Put", status.Code(err).String()+" "+kvdock.Reason(err), "ResourceExhausted MESSAGE_TOO_LARGE")
	statuses, err := client.PutChunks(ctx, long, shards[:5])
	must(err)
	check("several Puts", fmt.Sprint(statuses[4], len(statuses)), "CHUNK_STATUS_EXISTS 5")

	epoch := events(ctx, client, keys, shards)

	session, err = client.Open(ctx, opening)
	must(err)
	index := new(kvdock.Index)
	go client.Follow(ctx, index)
	wait(func() bool { return prefix(index, keys) == 6 })
	found, err = session.Lookup(ctx, namespace.Name, keys)
	must(err)
	kill(server)
	<-session.Done
	row("SIGKILL", "the session's stream ended")
	server = start(address)
	session, err = client.Open(ctx, opening)
	must(err)
	check("another epoch", session.Epoch != epoch, true)
	released, err = session.Free(ctx, found.LeaseId)
	must(err)
	check("locks left of the old life", released, uint32(0))
	wait(func() bool { life, parts, _ := index.State(); return life == session.Epoch && len(parts) == 0 })
	row("index of the new life", "empty, by a new snapshot")
	_, err = session.Call(ctx, &pb.SessionRequest{Request: &pb.SessionRequest_RegisterNamespace{RegisterNamespace: register}})
	must(err)
	check("put in the new life", put(ctx, client, keys, shards, 0), "map[STORED:6]")
	found, err = session.Lookup(ctx, namespace.Name, keys)
	must(err)
	check("lookup there hits", found.HitChunks, uint32(6))
	wait(func() bool { return prefix(index, keys) == 6 })
	row("index there", "6 chunks, without another snapshot")
	kill(server)
	route(ctx, address)
}

// noMessage is a codec that sends bytes which are no message.
type noMessage struct{}

func (noMessage) Marshal(interface{}) ([]byte, error) { return []byte{0xff}, nil }
func (noMessage) Unmarshal([]byte, interface{}) error { return nil }
func (noMessage) Name() string                        { return "proto" }

func locked(ctx context.Context, client *kvdock.Client) uint64 {
	answer, err := client.Status(ctx, &pb.StatusRequest{})
	must(err)
	return answer.Index.LockedParts
}

// wait waits until something is true, ten seconds at most.
func wait(done func() bool) {
	for began := time.Now(); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > 10*time.Second {
			_, _, line, _ := runtime.Caller(1)
			fail("all.go:%d waited in vain", line)
		}
	}
}

// events follows the server, on which there are 5 chunks of the prompt, and leaves 6 there.
func events(ctx context.Context, client *kvdock.Client, keys [][]byte, shards [][]byte) uint64 {
	index := new(kvdock.Index)
	follow := func() (stop func()) {
		following, cancel := context.WithCancel(ctx)
		ended := make(chan bool)
		go func() { client.Follow(following, index); close(ended) }()
		return func() { cancel(); <-ended }
	}
	stop := follow()
	wait(func() bool { return prefix(index, keys) == 5 })
	extraKeys(ctx, client)
	check("event: one chunk more", put(ctx, client, keys, shards, 5), "map[STORED:1]")
	wait(func() bool { return prefix(index, keys) == 6 })
	_, other, otherShards := prompt(3000, 2+logCount+1) // one more than the log keeps after the first 2
	stop()
	put(ctx, client, other[:2], otherShards[:2], 0)
	stop = follow()
	wait(func() bool { return prefix(index, other) == 2 })
	_, _, snapshots := index.State()
	check("snapshots after a resume", snapshots, 1)
	stop()
	put(ctx, client, other, otherShards, 2)
	stop = follow()
	wait(func() bool { return prefix(index, other) == len(other) })
	_, parts, snapshots := index.State()
	check("snapshots after compaction", snapshots, 2)
	check("parts then", len(parts), 7+len(other))
	_, err := client.Clear(ctx, &pb.ClearRequest{Scope: &pb.ClearRequest_Namespace{Namespace: namespace.Name}})
	must(err)
	wait(func() bool { _, parts, _ := index.State(); return len(parts) == 0 })
	check("event: cleared, put anew", put(ctx, client, keys, shards, 0), "map[STORED:6]")
	wait(func() bool { return prefix(index, keys) == 6 })
	epoch, _, snapshots := index.State()
	check("snapshots at the end", snapshots, 2)
	stop()
	return epoch
}

// extraKeys stores a chunk with what its block's hash commits to, and finds that in the event.
func extraKeys(ctx context.Context, client *kvdock.Client) {
	text := &pb.ExtraValue{Value: &pb.ExtraValue_Text{Text: "adapter"}}
	number := &pb.ExtraValue{Value: &pb.ExtraValue_Number{Number: -7}}
	raw := &pb.ExtraValue{Value: &pb.ExtraValue_Raw{Raw: []byte{0, 0xff}}}
	tuple := &pb.ExtraTuple{Values: []*pb.ExtraValue{text, number, raw}}
	extra := &pb.ExtraKeys{Keys: []*pb.ExtraKey{{Key: &pb.ExtraKey_Value{Value: text}}, {Key: &pb.ExtraKey_Value{Value: number}},
		{Key: &pb.ExtraKey_Value{Value: raw}}, {Key: &pb.ExtraKey_Tuple{Tuple: tuple}}}}
	told := &pb.ChunkEventData{BlockHashes: [][]byte{{1}}, BlockSize: chunkTokens, ExtraKeys: []*pb.ExtraKeys{extra}}
	_, keys, shards := prompt(4000, 1)
	start := &pb.StreamKVEventsRequest_Now{Now: &pb.StartNow{}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.StreamKVEvents(ctx, &pb.StreamKVEventsRequest{Start: start})
	must(err)
	message, err := stream.Recv() // a progress mark: the stream has begun
	must(err)
	open := &pb.PutOpen{Namespace: namespace.Name, Keys: keys, EventData: []*pb.ChunkEventData{told}}
	_, err = client.PutChunks(ctx, open, shards)
	must(err)
	for len(message.GetBatch().GetEvents()) == 0 {
		message, err = stream.Recv()
		must(err)
	}
	event := message.GetBatch().Events[0].GetStored()
	check("extra keys in its event", bytes.Equal(event.Key, keys[0]) && proto.Equal(event.Data, told), true)
}

// route starts three servers, of which the second has most of a prompt, and asks the router.
func route(ctx context.Context, address string) {
	tokens, keys, shards := prompt(5000, 8)
	addresses := []string{address + ".1", address + ".2", address + ".3"}
	var running []*exec.Cmd
	for i, chunks := range []int{3, 7, 0} {
		running = append(running, start(addresses[i]))
		client, err := kvdock.Dial(addresses[i])
		must(err)
		_, err = client.RegisterNamespace(ctx, register, grpc.WaitForReady(true))
		must(err)
		check(fmt.Sprintf("put to server %d", i+1), put(ctx, client, keys[:chunks], shards[:chunks], 0),
			[]string{"map[STORED:3]", "map[STORED:7]", "map[]"}[i])
		client.Close()
	}
	own, err := os.Executable()
	must(err)
	list := strings.ReplaceAll(strings.Trim(fmt.Sprint(tokens), "[]"), " ", ",")
	ask := func() string {
		command := exec.CommandContext(ctx, filepath.Join(filepath.Dir(own), "route"),
			append([]string{namespace.Name, list}, addresses...)...)
		out, err := command.Output()
		must(err)
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		return strings.TrimPrefix(lines[len(lines)-1], "route to "+address)
	}
	check("route among 3, 7 and 0", ask(), ".2")
	kill(running[1])
	check("route without that server", ask(), ".1")
	kill(running[0])
	kill(running[2])
}
