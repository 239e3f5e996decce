// Command route says which of several servers has the longest prefix of a prompt.
//
//	route NAMESPACE TOKEN,TOKEN,... ADDRESS ADDRESS ...
//
// A router would go on following, and ask its indexes again for every prompt.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"github.com/kvdock/kvdock/examples/go/kvdock"
	pb "github.com/kvdock/kvdock/gen/go/kvdock/v1"
)

// prefix follows a server's events until its first snapshot is complete.
func prefix(ctx context.Context, address, name string, prompt []uint32) (int, error) {
	client, err := kvdock.Dial(address)
	if err != nil {
		return 0, err
	}
	defer client.Close()
	namespace, err := find(ctx, client, name)
	if err != nil {
		return 0, err
	}
	index, failed := new(kvdock.Index), make(chan error, 1)
	go func() { failed <- client.Follow(ctx, index) }()
	for {
		if epoch, _, _ := index.State(); epoch != 0 {
			keys := kvdock.Keys(kvdock.NoParent, prompt, int(namespace.ChunkTokens))
			return hit(index, namespace, keys), nil
		}
		select {
		case err := <-failed:
			return 0, err
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// hit says how many of a prompt's chunks, from the first on, a lookup would find; see docs/events.md.
func hit(index *kvdock.Index, namespace *pb.Namespace, keys [][]byte) int {
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
			case pb.GroupKind_GROUP_KIND_CHUNKED_LOCAL_ATTENTION:
				first = n * chunk / int(group.AttentionChunkTokens) * int(group.AttentionChunkTokens) / chunk
			}
			for i := n - 1; i >= first && i >= 0; i-- {
				if !index.Has(namespace.Name, keys[i], group.GroupIdx) {
					n, again = i, true
				}
			}
		}
	}
	return n
}

// find gives a registered namespace by its name.
func find(ctx context.Context, client *kvdock.Client, name string) (*pb.Namespace, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := client.ListNamespaces(ctx, &pb.ListNamespacesRequest{})
	for err == nil {
		var listed *pb.ListNamespacesResponse
		if listed, err = stream.Recv(); listed.GetNamespace().GetNamespace().GetName() == name {
			return listed.Namespace.Namespace, err
		}
	}
	if err == io.EOF {
		err = fmt.Errorf("no namespace %s", name)
	}
	return nil, err
}

func main() {
	log.SetFlags(0)
	if len(os.Args) < 4 {
		log.Fatal("usage: route NAMESPACE TOKEN,TOKEN,... ADDRESS ADDRESS ...")
	}
	var prompt []uint32
	for _, token := range strings.Split(os.Args[2], ",") {
		var id uint32
		if _, err := fmt.Sscan(token, &id); err != nil {
			log.Fatalf("%q is not a token: %v", token, err)
		}
		prompt = append(prompt, id)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	best, longest := "any", 0
	for _, address := range os.Args[3:] {
		chunks, err := prefix(ctx, address, os.Args[1], prompt)
		if err != nil {
			log.Printf("%s: %v", address, err) // one server less to choose from
		}
		fmt.Printf("%s has %d chunks\n", address, chunks)
		if chunks > longest {
			best, longest = address, chunks
		}
	}
	fmt.Printf("route to %s\n", best)
}
