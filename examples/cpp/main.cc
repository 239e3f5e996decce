// The verbs that tests/clients/interop.py describes, and `copy`.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <future>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <numeric>
#include <sstream>

#include "cache.h"
#include "index.h"
#include "kvdock/v1/admin.grpc.pb.h"

using namespace kvdock;
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string FromHex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return bytes;
}

std::string ToHex(const std::string& bytes) {
  std::ostringstream digits;
  for (const unsigned char byte : bytes) digits << std::hex << std::setw(2) << std::setfill('0') << int(byte);
  return digits.str();
}

// One row of the table: what was seen must be what was expected.
int failures = 0;
template <typename Seen, typename Expected>
void Check(const std::string& what, const Seen& seen, const Expected& expected) {
  const bool right = seen == static_cast<Seen>(expected);
  failures += !right;
  std::cout << std::left << std::setw(66) << what << std::right << std::setw(12) << seen << (right ? "  ok" : "  WRONG, not ");
  if (!right) std::cout << expected;
  std::cout << std::endl;
}

void CheckKeys(const std::string& path) {
  google::protobuf::Struct file;
  if (!google::protobuf::util::JsonStringToMessage(ReadFile(path), &file).ok())
    throw std::runtime_error("no JSON: " + path);
  size_t keys = 0, right = 0, vectors = 0;
  for (const auto& entry : file.fields().at("vectors").list_value().values()) {
    const auto& vector = entry.struct_value().fields();
    std::vector<Extra> extras;
    for (const auto& value : vector.at("extras").list_value().values()) {
      const auto& fields = value.struct_value().fields();
      const auto text = [&](const char* name) { return fields.count(name) ? fields.at(name).string_value() : ""; };
      const auto number = [&](const char* name) { return fields.count(name) ? fields.at(name).number_value() : 0; };
      const std::string kind = text("kind");
      if (kind == "lora") extras.push_back({Extra::kLora, text("name"), text("source")});
      else if (kind == "cache_salt") extras.push_back({Extra::kCacheSalt, text("salt")});
      else if (kind == "multimodal_item" || kind == "prompt_embeds")
        extras.push_back({kind == "prompt_embeds" ? Extra::kPromptEmbeds : Extra::kMultimodalItem,
                          kind == "prompt_embeds" ? FromHex(text("digest")) : text("identifier"), "",
                          int64_t(number("offset")), uint32_t(number("length"))});
      else throw std::runtime_error("extra of an unknown kind: " + kind);
    }
    std::vector<uint32_t> tokens;
    for (const auto& token : vector.at("token_ids").list_value().values()) tokens.push_back(token.number_value());
    const auto made = ChunkKeys(tokens, vector.at("chunk_tokens").number_value(), extras,
                                FromHex(vector.at("parent").string_value()));
    const auto& expected = vector.at("keys").list_value().values();
    ++vectors;
    keys += expected.size();
    if (int(made.size()) != expected.size()) ++failures;
    for (size_t i = 0; i < made.size() && int(i) < expected.size(); ++i)
      right += ToHex(made[i]) == expected[i].string_value();
  }
  if (vectors == 0) ++failures;
  Check("keys of " + std::to_string(vectors) + " vectors that match", right, keys);
}

v1::Namespace Space(const std::string& name, uint64_t shard_bytes) {
  v1::Namespace space;
  space.set_name(name);
  space.set_chunk_tokens(16);
  space.set_kv_world_size(1);
  space.add_groups()->set_kind(v1::GROUP_KIND_FULL_ATTENTION);
  space.mutable_groups(0)->add_shard_bytes(shard_bytes);
  return space;
}

// The server of $KVDOCK_SERVER, until it is killed.
class Server {
 public:
  Server(const std::string& address, const std::string& options) : address_(address) {
    const char* command = getenv("KVDOCK_SERVER");
    std::istringstream words((command ? command : "kvdock serve") + (" --log-level error --listen " + address + " ") + options);
    std::vector<std::string> arguments{std::istream_iterator<std::string>(words), {}};
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    if (posix_spawnp(&pid_, pointers[0], nullptr, nullptr, pointers.data(), environ) != 0)
      throw std::runtime_error("cannot start " + arguments[0]);
    for (int tries = 0;; ++tries) try {
        Connect(address);
        break;
      } catch (const CallError&) {
        if (tries == 600) throw;
        usleep(50'000);
      }
  }
  ~Server() { Kill(); }
  void Kill() {
    if (pid_ > 0 && kill(pid_, SIGKILL) == 0) waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  std::string address_;
  pid_t pid_ = 0;
};
}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 3 && words[1] == "check-keys") CheckKeys(words[2]);
  else return 2;
  return failures != 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
