// Chunk keys, as docs/keys.md defines them.
#pragma once
#include <openssl/sha.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace kvdock {

// What a key commits to beside the tokens. offset counts from the first token given to ChunkKeys.
struct Extra {
  enum Kind : char { kLora = 1, kCacheSalt = 2, kMultimodalItem = 3, kPromptEmbeds = 4 } kind;
  std::string text;    // name, salt or identifier, or the 32 bytes of the digest
  std::string source;  // of an adapter
  int64_t offset = 0;
  uint32_t length = 0;
};

inline std::string LittleEndian(uint64_t number, int bytes = 4) {
  std::string encoded;
  for (int i = 0; i < bytes; ++i) encoded += static_cast<char>(number >> 8 * i);
  return encoded;
}

inline std::string WithLength(const std::string& text) { return LittleEndian(text.size()) + text; }

// The share of an extra in the key of the chunk of the tokens [start, end), empty if it has none.
inline std::string Record(const Extra& extra, int64_t start, int64_t end, bool first) {
  std::string payload;
  if (extra.kind == Extra::kLora || extra.kind == Extra::kCacheSalt) {
    if (!first) return "";
    payload = WithLength(extra.text) + (extra.kind == Extra::kLora ? WithLength(extra.source) : "");
  } else {
    if (extra.offset >= end || extra.offset + extra.length <= start) return "";
    payload = LittleEndian(extra.offset - start, 8) + LittleEndian(extra.length) +
              (extra.kind == Extra::kMultimodalItem ? WithLength(extra.text) : extra.text);
  }
  return std::string(1, extra.kind) + WithLength(payload);
}

// The keys of all full chunks of a prompt, or of the tokens that follow the chunk `parent`.
inline std::vector<std::string> ChunkKeys(const std::vector<uint32_t>& token_ids, uint32_t chunk_tokens,
                                          const std::vector<Extra>& extras = {},
                                          std::string parent = std::string(32, '\0')) {
  std::vector<std::string> keys;
  for (size_t start = 0; start + chunk_tokens <= token_ids.size(); start += chunk_tokens) {
    const size_t end = start + chunk_tokens;
    const bool first = parent == std::string(32, '\0');
    std::string hashed = parent + LittleEndian(chunk_tokens);
    for (size_t i = start; i < end; ++i) hashed += LittleEndian(token_ids[i]);
    std::set<std::string> records;  // sorted as unsigned bytes, and equal ones once
    for (const Extra& extra : extras) records.insert(Record(extra, start, end, first));
    for (const std::string& record : records) hashed += record;
    SHA256(reinterpret_cast<const unsigned char*>(hashed.data()), hashed.size(),
           reinterpret_cast<unsigned char*>(parent.data()));
    keys.push_back(parent);
  }
  return keys;
}

}  // namespace kvdock
