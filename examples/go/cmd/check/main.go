// Command check runs the client against real servers, in the ways that tests/clients/interop.py asks for.
package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kvdock/kvdock/examples/go/kvdock"
	pb "github.com/kvdock/kvdock/gen/go/kvdock/v1"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 3 {
		log.Fatal("usage: check ADDRESS all | check-keys FILE | put|get NAMESPACE LIST | follow NAMESPACE COUNT")
	}
	client, err := kvdock.Dial(os.Args[1])
	must(err)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	switch verb, rest := os.Args[2], os.Args[3:]; {
	case verb == "all" && len(rest) == 0:
		all(ctx, os.Args[1], client)
	case verb == "check-keys" && len(rest) == 1:
		checkKeys(rest[0])
	case verb == "put" && len(rest) == 2:
		keys, files := readList(rest[1])
		var chunks [][]byte
		for _, file := range files {
			data, err := os.ReadFile(file)
			must(err)
			chunks = append(chunks, data)
		}
		statuses, err := client.PutChunks(ctx, &pb.PutOpen{Namespace: rest[0], Keys: keys}, chunks)
		must(err)
		for _, status := range statuses {
			check("", status, pb.ChunkStatus_CHUNK_STATUS_STORED)
		}
	case verb == "get" && len(rest) == 2:
		keys, files := readList(rest[1])
		chunks, err := client.GetChunks(ctx, &pb.GetRequest{Namespace: rest[0], Keys: keys})
		must(err)
		check("", len(chunks), len(keys))
		for i, data := range chunks {
			must(os.WriteFile(files[i], data, 0o600))
		}
	case verb == "follow" && len(rest) == 2:
		count, err := strconv.Atoi(rest[1])
		must(err)
		index := new(kvdock.Index)
		go func() { must(client.Follow(ctx, index)) }()
		parts := partsOf(index, rest[0])
		for ; len(parts) < count; parts = partsOf(index, rest[0]) {
			time.Sleep(10 * time.Millisecond)
		}
		for _, part := range parts {
			fmt.Println(hex.EncodeToString([]byte(part.Key)))
		}
	default:
		log.Fatalf("no such verb with so many arguments: %s", strings.Join(os.Args[2:], " "))
	}
}

// partsOf gives the parts of one namespace.
func partsOf(index *kvdock.Index, namespace string) (parts []kvdock.Part) {
	_, held, _ := index.State()
	for _, part := range held {
		if part.Namespace == namespace {
			parts = append(parts, part)
		}
	}
	return parts
}

// readList reads lines of a key and the path of the file with its bytes.
func readList(path string) (keys [][]byte, files []string) {
	list, err := os.ReadFile(path)
	must(err)
	for _, line := range strings.Split(strings.TrimSpace(string(list)), "\n") {
		key, file, _ := strings.Cut(line, " ")
		keys, files = append(keys, unhex(key)), append(files, file)
	}
	return keys, files
}

func unhex(text string) []byte {
	raw, err := hex.DecodeString(text)
	must(err)
	check("", len(raw), 32)
	return raw
}

func checkKeys(path string) {
	var document struct {
		Vectors []struct {
			Name        string
			ChunkTokens int `json:"chunk_tokens"`
			Parent      string
			TokenIDs    []uint32 `json:"token_ids"`
			Keys        []string
			Extras      []struct {
				Kind, Name, Source, Salt, Identifier, Digest string
				Offset                                       int64
				Length                                       uint32
			}
		}
	}
	file, err := os.ReadFile(path)
	must(err)
	must(json.Unmarshal(file, &document))
	total := 0
	for _, vector := range document.Vectors {
		var extras []kvdock.Extra
		for _, x := range vector.Extras {
			switch x.Kind {
			case "lora":
				extras = append(extras, kvdock.LoRA(x.Name, x.Source))
			case "cache_salt":
				extras = append(extras, kvdock.CacheSalt(x.Salt))
			case "multimodal_item":
				extras = append(extras, kvdock.MultiModalItem(x.Identifier, x.Offset, x.Length))
			case "prompt_embeds":
				extras = append(extras, kvdock.PromptEmbeds(unhex(x.Digest), x.Offset, x.Length))
			default:
				log.Fatalf("%s: unknown extra %s", vector.Name, x.Kind)
			}
		}
		var keys []string
		for _, key := range kvdock.Keys(unhex(vector.Parent), vector.TokenIDs, vector.ChunkTokens, extras...) {
			keys = append(keys, hex.EncodeToString(key))
		}
		if got, want := strings.Join(keys, " "), strings.Join(vector.Keys, " "); got != want {
			log.Fatalf("keys of %q are %s, not %s", vector.Name, got, want)
		}
		total += len(keys)
	}
	check("vectors there are any", total > 0, true)
	row("keys", fmt.Sprintf("%d keys of %d vectors", total, len(document.Vectors)))
}
