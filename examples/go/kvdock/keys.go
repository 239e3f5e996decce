// Package kvdock is a small client of a KVDock server: keys, sessions, and an index of its events.
package kvdock

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"sort"
)

// Extra is what keys commit to beside tokens.
type Extra struct {
	tag            byte
	offset, length int64 // of an item; length is 0 for what enters a prompt's first chunk only
	payload        []byte
}

// LoRA is a request's adapter. The source tells adapters of one name apart, and may be empty.
func LoRA(name, source string) Extra { return Extra{tag: 1, payload: text(text(nil, name), source)} }

// CacheSalt keeps a tenant's chunks apart.
func CacheSalt(salt string) Extra { return Extra{tag: 2, payload: text(nil, salt)} }

// MultiModalItem occupies some tokens, from the one at offset on among those given.
func MultiModalItem(identifier string, offset int64, length uint32) Extra {
	return Extra{3, offset, int64(length), text(nil, identifier)}
}

// PromptEmbeds stand in the place of some tokens.
func PromptEmbeds(digest []byte, offset int64, length uint32) Extra {
	return Extra{4, offset, int64(length), digest}
}

// record is the share of the extra in the key of the chunk [start, end), empty if it has none.
func (x Extra) record(start, end int64, first bool) string {
	payload := x.payload
	if x.length > 0 {
		place := u32(binary.LittleEndian.AppendUint64(nil, uint64(x.offset-start)), int(x.length))
		payload = append(place, payload...)
	}
	if x.length == 0 && !first || x.length > 0 && (x.offset >= end || x.offset+x.length <= start) {
		return ""
	}
	return string(append(u32([]byte{x.tag}, len(payload)), payload...))
}

func text(to []byte, s string) []byte { return append(u32(to, len(s)), s...) }

func u32(to []byte, n int) []byte { return binary.LittleEndian.AppendUint32(to, uint32(n)) }

// NoParent stands where a prompt's first chunk has no chunk before it.
var NoParent = make([]byte, sha256.Size)

// Keys gives the keys of all full chunks of the tokens, which follow the chunk with the key parent.
// A key names a chunk and everything before it; see docs/keys.md.
func Keys(parent []byte, tokens []uint32, chunkTokens int, extras ...Extra) (keys [][]byte) {
	for start := 0; start+chunkTokens <= len(tokens); start += chunkTokens {
		end := start + chunkTokens
		preimage := u32(append([]byte(nil), parent...), chunkTokens)
		for _, token := range tokens[start:end] {
			preimage = u32(preimage, int(token))
		}
		var records []string
		for _, extra := range extras {
			records = append(records, extra.record(int64(start), int64(end), bytes.Equal(parent, NoParent)))
		}
		sort.Strings(records)
		for i, record := range records {
			if i == 0 || record != records[i-1] {
				preimage = append(preimage, record...)
			}
		}
		key := sha256.Sum256(preimage)
		parent = key[:]
		keys = append(keys, parent)
	}
	return keys
}
