// The verbs that tests/clients/interop.py describes, and `copy`.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/message_differencer.h>
#include <grpcpp/generic/generic_stub.h>
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
  for (size_t i = 0; i + 1 < digits.size(); i += 2)
    bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
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
  std::cout << std::boolalpha << std::left << std::setw(62) << what << std::right << std::setw(20) << seen
            << (right ? "  ok" : "  WRONG, not ");
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
      else if (kind == "cache_salt") extras.push_back({Extra::kCacheSalt, text("salt"), ""});
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

// The server of $KVDOCK_SERVER, until it ends.
class Server {
 public:
  Server(const std::string& address, const std::string& options) {
    const char* command = getenv("KVDOCK_SERVER");
    std::istringstream words((command ? command : "kvdock serve") + (" --log-level error --listen " + address + " ") +
                              options);
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
  ~Server() { End(SIGTERM); }
  void End(int signal) {
    if (pid_ > 0 && kill(pid_, signal) == 0) waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
};

std::vector<std::string> KeysFrom(uint32_t first_token, size_t chunks) {
  std::vector<uint32_t> tokens(16 * chunks);
  std::iota(tokens.begin(), tokens.end(), first_token);
  return ChunkKeys(tokens, 16);
}

// Bytes that no other chunk has, in no order that a zeroed or shifted copy could have.
std::string BytesOf(const std::string& key, size_t size) {
  std::string bytes(size, '\0');
  uint64_t state;
  std::memcpy(&state, key.data(), sizeof state);
  for (char& byte : bytes) byte = static_cast<char>((state = state * 6364136223846793005 + 1) >> 56);
  return bytes;
}

// For example "4 STORED", or "1 STORED 1 FAILED".
std::string Names(const std::vector<v1::ChunkStatus>& statuses) {
  std::string names;
  for (auto run = statuses.begin(), next = run; run != statuses.end(); run = next) {
    next = std::find_if(run, statuses.end(), [&](auto status) { return status != *run; });
    names += (names.empty() ? "" : " ") + std::to_string(next - run) + " " + v1::ChunkStatus_Name(*run).substr(13);
  }
  return names;
}

template <typename Response>
std::string Outcomes(const Response& response) {
  std::vector<v1::ChunkStatus> statuses;
  for (const v1::ChunkResult& chunk : response.chunks()) statuses.push_back(chunk.status());
  return Names(statuses);
}

template <typename Call>
std::string ReasonOf(Call call) try {
  call();
  return "no error";
} catch (const CallError& error) {
  return error.reason.empty() ? "code " + std::to_string(error.code) : error.reason;
} catch (const std::runtime_error&) {
  return "refused";
}

// What becomes of a pool whose segments are not what they should be.
template <typename Spoil>
std::string Mapped(v1::OpenResponse opened, Spoil spoil) {
  spoil(*opened.mutable_segments(0));
  return ReasonOf([&] { Pool pool(opened); });
}

// Whether somebody, asked as the server asks, holds the guard of every segment.
bool Guarded(const v1::OpenResponse& opened) {
  int guarded = 0;
  for (const v1::Segment& segment : opened.segments()) {
    const int file = open(("/dev/shm" + segment.shm_name()).c_str(), O_RDWR | O_CLOEXEC);
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_start = static_cast<off_t>(opened.guard());
    lock.l_len = 1;
    guarded += fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_RDLCK;
    close(file);
  }
  return guarded > 0 && guarded == opened.segments_size();
}

// The visible parts of all namespaces, as the server lists them.
std::set<Index::Part> Listed(const std::string& address) {
  const auto admin = v1::AdminService::NewStub(Connect(address));
  grpc::ClientContext context;
  const auto spaces = admin->ListNamespaces(&context, {});
  std::set<Index::Part> listed;
  for (v1::ListNamespacesResponse space; spaces->Read(&space);) {
    v1::ListChunksRequest request;
    request.set_namespace_(space.namespace_().namespace_().name());
    grpc::ClientContext inner;
    const auto parts = admin->ListChunks(&inner, request);
    for (v1::ListChunksResponse some; parts->Read(&some);)
      for (const v1::PartStatus& part : some.parts())
        if (part.visible())
          listed.emplace(request.namespace_(), part.key(),
                         part.has_group_idx() ? std::optional(part.group_idx()) : std::nullopt, v1::MEDIUM_CPU);
    Require(parts->Finish());
  }
  Require(spaces->Finish());
  return listed;
}

uint64_t Clear(const std::string& address, const std::string& name) {
  v1::ClearRequest request;
  if (!name.empty()) request.set_namespace_(name);
  v1::ClearResponse response;
  grpc::ClientContext context;
  Require(v1::AdminService::NewStub(Connect(address))->Clear(&context, request, &response));
  return response.parts();
}

// Sends bytes that are no message to a method.
void SendNoMessage(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
  const grpc::Slice text("\xff");
  const grpc::ByteBuffer bytes(&text, 1);
  grpc::ByteBuffer answer;
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  grpc::Status status;
  void* tag;
  bool ok;
  const auto call = grpc::GenericStub(channel).PrepareUnaryCall(&context, method, bytes, &queue);
  call->StartCall();
  call->Finish(&answer, &status, nullptr);
  queue.Next(&tag, &ok);
  Require(status);
}

// Event data with extra keys of each kind.
v1::ChunkEventData Described() {
  v1::ExtraValue text, number, raw;
  text.set_text("adapter");
  number.set_number(-7);
  raw.set_raw(std::string("\0\xff", 2));
  v1::ChunkEventData data;
  data.add_block_hashes("hash");
  data.set_block_size(16);
  v1::ExtraKeys& extra = *data.add_extra_keys();
  v1::ExtraTuple tuple;
  for (const v1::ExtraValue& value : {text, number, raw}) {
    *extra.add_keys()->mutable_value() = value;
    *tuple.add_values() = value;
  }
  *extra.add_keys()->mutable_tuple() = tuple;
  return data;
}

// Reserves a chunk by a call outside of the session's stream.
v1::ReserveResponse Reserve(const Cache& cache, const std::string& key, const std::string& session_token) {
  v1::ReserveRequest request;
  request.set_namespace_("cpp");
  request.add_keys(key);
  *request.add_event_data() = Described();
  request.set_session_token(session_token);
  v1::ReserveResponse response;
  grpc::ClientContext context;
  Require(v1::CacheService::NewStub(cache.channel())->Reserve(&context, request, &response));
  return response;
}

// What a snapshot of the events tells of a chunk.
v1::ChunkEventData Told(const Cache& cache, const std::string& key) {
  v1::StreamKVEventsRequest request;
  request.mutable_snapshot();
  grpc::ClientContext context;
  const auto stream = v1::EventService::NewStub(cache.channel())->StreamKVEvents(&context, request);
  for (v1::StreamKVEventsResponse message; stream->Read(&message) && message.has_snapshot();)
    for (const v1::Event& event : message.snapshot().stored())
      if (event.stored().key() == key) return event.stored().data();
  throw std::runtime_error("no event");
}

void All(const std::string& address) {
  constexpr size_t kBytes = 300'000;  // three messages of a Put
  const std::string options = "--memory 256MiB --event-log 16MiB --event-log-count 100";
  const auto keys = KeysFrom(0, 7);
  const std::vector<std::string> first(keys.begin(), keys.begin() + 4), later(keys.begin() + 4, keys.begin() + 6);
  std::vector<std::string> bytes;
  for (const std::string& key : keys) bytes.push_back(BytesOf(key, kBytes));
  Server server(address, options);
  auto cache = std::make_unique<Cache>(address, "cpp", Space("cpp", kBytes));
  Check("the namespace is new", cache->created, true);
  Check("and known when it is registered again", Cache(address, "cpp-2", Space("cpp", kBytes)).created, false);

  const auto& opened = cache->opened();
  Check("the pool's segments are guarded", Guarded(opened), true);
  Session quiet(cache->channel(), "cpp-tool", v1::SESSION_ROLE_TOOL, 1000);
  const auto quiet_since = std::chrono::steady_clock::now();
  Check("  but not for a session that maps nothing", Guarded(quiet.opened()), false);
  Check("a pool with another proof", Mapped(opened, [](auto& of) { of.mutable_proof()->back() ^= 1; }), "refused");
  Check("  of another name", Mapped(opened, [](auto& of) { of.mutable_shm_name()->insert(0, "/."); }), "refused");
  Check("  larger than its file", Mapped(opened, [](auto& of) { of.set_bytes(of.bytes() + (1 << 20)); }), "refused");
  Check("  as it should be", Mapped(opened, [](auto&) {}), "no error");

  const auto reserved = cache->Reserve("", first);
  Check("Reserve of 4 chunks", Outcomes(reserved), "4 RESERVED");
  for (size_t i = 0; i < 4; ++i)
    std::memcpy(cache->At(reserved.chunks(i).location()), bytes[i].data(), reserved.chunks(i).location().length());
  Check("chunks that Lookup finds before Commit", cache->Lookup(keys).hit_chunks(), 0u);
  Check("Commit", Outcomes(cache->Commit(reserved.reservation_id())), "4 STORED");
  Check("Reserve of the same", Outcomes(cache->Reserve("", first)), "4 EXISTS");
  const auto given_back = cache->Reserve(first.back(), later);
  Check("chunks given back by Abort", cache->Abort(given_back.reservation_id()), 2u);
  Check("Commit after Abort", ReasonOf([&] { cache->Commit(given_back.reservation_id()); }), "UNKNOWN_RESERVATION");

  Check("Put of 2 chunks after them", Names(cache->Put(first.back(), later, {bytes[4], bytes[5]})), "2 STORED");
  Check("Put of the same", Names(cache->Put(first.back(), later, {bytes[4], bytes[5]})), "2 EXISTS");
  const auto orphan = KeysFrom(5000, 2);
  Check("Put of a chunk without parent", Names(cache->Put(orphan[0], {orphan[1]}, {bytes[0]})), "1 PARENT_MISSING");
  const auto inlined = cache->Get(keys);
  Check("chunks of Get before the one that is not there", inlined.size(), 6u);
  Check("of these with the bytes that were put", std::equal(inlined.begin(), inlined.end(), bytes.begin()), true);

  const auto too_long = [&] { cache->Put(keys[5], {keys[6]}, {bytes[6] + "more"}); };
  Check("Put of a shard that is too long", ReasonOf(too_long), "WRONG_LENGTH");

  const auto hit = cache->Lookup(keys);
  Check("chunks that Lookup finds and locks", hit.hit_chunks(), 6u);
  const auto held = cache->Retrieve(hit.lease_id());
  Check("Retrieve", Outcomes(held), "6 RETRIEVED");
  Check("parts that Clear removes while they are locked", Clear(address, "cpp"), 6u);
  Check("Clear that does not say what", ReasonOf([&] { Clear(address, ""); }), "INVALID_ARGUMENT_VALUE");
  Check("Lookup afterwards", cache->Lookup(keys).hit_chunks(), 0u);
  int equal = 0;
  for (int i = 0; i < held.chunks_size(); ++i)
    equal += held.chunks(i).location().length() == kBytes &&
             std::memcmp(cache->At(held.chunks(i).location()), bytes[i].data(), kBytes) == 0;
  Check("chunks whose bytes, read in place, are still right", equal, 6);
  Check("locks that FreeLocks of an empty range released", cache->FreeLocks(hit.lease_id(), 0), 0u);
  Check("  and without an end", cache->FreeLocks(hit.lease_id()), 6u);
  Check("  and when it is repeated", cache->FreeLocks(hit.lease_id()), 0u);
  Check("Retrieve without locks", ReasonOf([&] { cache->Retrieve(hit.lease_id()); }), "UNKNOWN_LEASE");
  Check("a size that contradicts", ReasonOf([&] { Cache(address, "cpp", Space("cpp", 1)); }), "NAMESPACE_CONFLICT");

  const std::string lone = KeysFrom(40'000, 1)[0];
  const auto shown = [&] { Reserve(*cache, lone, std::to_string(opened.session_id())); };
  Check("Reserve with the session's public id as token", ReasonOf(shown), "UNKNOWN_SESSION");
  const auto own = Reserve(*cache, lone, opened.session_token());
  Check("  with its token", Outcomes(own), "1 RESERVED");
  Check("  and Commit on its stream", Outcomes(cache->Commit(own.reservation_id())), "1 STORED");
  const auto same = google::protobuf::util::MessageDifferencer::Equals(Told(*cache, lone), Described());
  Check("the event has the same extra keys", same, true);
  const auto no_message = [&] { SendNoMessage(cache->channel(), "/kvdock.v1.CacheService/Lookup"); };
  Check("bytes that are no message", ReasonOf(no_message), "INVALID_ARGUMENT_VALUE");
  Clear(address, "cpp");

  using namespace std::chrono_literals;
  Index index;
  const auto matches = [&](size_t parts) { return [&index, parts] { return index.parts.size() == parts; }; };
  cache->Put("", keys, bytes);
  Check("events: a snapshot has all 7 chunks", Follow(address, index, matches(7), 10s), true);
  Check("  that the server lists", index.parts == Listed(address), true);
  const auto prompt = KeysFrom(0, 9);
  const auto known = [&](const std::string& key) { return index.Has("cpp", key); };
  const auto end = std::find_if_not(prompt.begin(), prompt.end(), known);
  Check("  chunks of a prompt that a router finds", end - prompt.begin(), 7);
  const auto more = KeysFrom(9000, 3);
  cache->Put("", more, {bytes[0], bytes[1], bytes[2]});
  Check("resumed after the cursor", Follow(address, index, matches(10), 10s), true);
  Check("  with 3 events", index.events, 3);
  Check("  and no other snapshot", index.snapshots, 1);
  const auto many = KeysFrom(20000, 120);
  Cache small(address, "cpp", Space("small", 16));
  small.Put("", many, std::vector<std::string>(120, std::string(16, 's')));
  Check("behind a log of 100 events", Follow(address, index, matches(130), 10s), true);
  Check("  the place was compacted", index.compactions, 1);
  Check("  and a snapshot has what the server lists", index.snapshots == 2 && index.parts == Listed(address), true);
  Clear(address, "cpp");
  Check("cleared is one of the namespaces", Follow(address, index, matches(120), 10s), true);

  std::this_thread::sleep_until(quiet_since + 2500ms);
  v1::SessionRequest question;
  question.mutable_lookup()->set_namespace_("cpp");
  question.mutable_lookup()->add_keys(keys[0]);
  Check("a session of 1 s, kept alive by heartbeats", ReasonOf([&] { quiet.Call(question); }), "no error");

  const auto lost = small.Lookup(many);
  const uint64_t epoch = opened.epoch();
  auto following = std::async(std::launch::async, [&] {
    return Follow(address, index, [&] { return index.cursor->epoch() != epoch && index.parts.size() == 2; }, 60s);
  });
  server.End(SIGKILL);
  Check("a call after the server's SIGKILL", ReasonOf([&] { cache->Lookup(keys); }), "code 14");
  Server restarted(address, options);
  cache = std::make_unique<Cache>(address, "cpp", Space("cpp", kBytes));
  Check("another epoch", cache->opened().epoch() != epoch, true);
  Check("the namespace is new again", cache->created, true);
  Check("chunks that are left", cache->Lookup(keys).hit_chunks(), 0u);
  Check("locks that are left of the old lease", cache->FreeLocks(lost.lease_id()), 0u);
  Check("Put to the new server", Names(cache->Put("", {keys[0], keys[1]}, {bytes[0], bytes[1]})), "2 STORED");
  Check("the follower is with the new server", following.get(), true);
  Check("  and knows what it lists", index.parts == Listed(address) && index.compactions == 2, true);
}

// The namespace as it was registered.
v1::Namespace Registered(const std::string& address, const std::string& name) {
  const auto admin = v1::AdminService::NewStub(Connect(address));
  grpc::ClientContext context;
  const auto spaces = admin->ListNamespaces(&context, {});
  for (v1::ListNamespacesResponse space; spaces->Read(&space);)
    if (space.namespace_().namespace_().name() == name) return space.namespace_().namespace_();
  throw std::runtime_error("no namespace " + name);
}

// Puts the chunks of a list inline, or gets them in place and compares them with what Get says.
void Transfer(const std::string& address, const std::string& verb, const std::string& name, const std::string& list) {
  Cache cache(address, "cpp-" + verb, Registered(address, name));
  std::vector<std::string> keys, paths, bytes;
  std::ifstream lines(list);
  for (std::string key, path; lines >> key >> path;) {
    keys.push_back(FromHex(key));
    paths.push_back(path);
  }
  if (verb == "put") {
    for (const std::string& path : paths) bytes.push_back(ReadFile(path));
    Check("Put", Names(cache.Put("", keys, bytes)), std::to_string(keys.size()) + " STORED");
    return;
  }
  const auto hit = cache.Lookup(keys);
  Check("chunks that Lookup finds", hit.hit_chunks(), keys.size());
  const auto held = cache.Retrieve(hit.lease_id());
  for (const v1::ChunkResult& chunk : held.chunks())
    bytes.emplace_back(cache.At(chunk.location()), chunk.location().length());
  Check("locks released", cache.FreeLocks(hit.lease_id()), keys.size());
  Check("Get has the same bytes", cache.Get(keys) == bytes, true);
  for (size_t i = 0; i < bytes.size(); ++i) std::ofstream(paths[i], std::ios::binary) << bytes[i];
}

// How fast bytes are stored and read in place, beside memcpy between two buffers of this process; whether
// that is enough, as a part of memcpy's rate.
void Copy(const std::string& address, size_t mebibytes, double enough = 0) {
  constexpr size_t kChunk = 16 << 20;
  constexpr int kRounds = 8;  // the first is not counted: it touches pages for the first time
  const size_t chunks = mebibytes * (1 << 20) / kChunk, total = chunks * kChunk;
  Server server(address, "--memory " + std::to_string(mebibytes + 64) + "MiB");
  Cache cache(address, "cpp", Space("copy", kChunk));
  const auto admin = v1::AdminService::NewStub(cache.channel());
  for (v1::StatusResponse status; !status.has_pool() || status.pool().ready_bytes() < status.pool().total_bytes();) {
    grpc::ClientContext context;
    Require(admin->Status(&context, {}, &status));
    usleep(20'000);
  }
  const std::string source = BytesOf(KeysFrom(1, 1)[0], total);
  std::string other(total, '\0');
  std::map<std::string, std::vector<double>> seconds;
  const auto timed = [&](const std::string& what, auto work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    seconds[what].push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  };
  size_t stored = 0, equal = 0, released = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<uint32_t> tokens(16 * chunks, round);
    const auto keys = ChunkKeys(tokens, 16);
    timed("memcpy", [&] { std::memcpy(other.data(), source.data(), total); });
    timed("store", [&] {
      const auto reserved = cache.Reserve("", keys);
      for (size_t i = 0; i < chunks; ++i)
        std::memcpy(cache.At(reserved.chunks(i).location()), source.data() + i * kChunk, kChunk);
      const auto sealed = cache.Commit(reserved.reservation_id());
      for (const v1::ChunkResult& chunk : sealed.chunks()) stored += chunk.status() == v1::CHUNK_STATUS_STORED;
    });
    timed("read", [&] {
      const auto hit = cache.Lookup(keys);
      const auto held = cache.Retrieve(hit.lease_id());
      for (int i = 0; i < held.chunks_size(); ++i)
        equal += std::memcmp(cache.At(held.chunks(i).location()), source.data() + i * kChunk, kChunk) == 0;
      released += cache.FreeLocks(hit.lease_id());
    });
    Clear(address, "copy");
  }
  Check("chunks of 16 MiB stored", stored, chunks * kRounds);
  Check("equal, read in place under their locks", equal, chunks * kRounds);
  Check("locks released", released, chunks * kRounds);
  const auto median = [&](const std::string& what, auto value) {
    std::vector<double> values;
    for (int round = 1; round < kRounds; ++round)
      values.push_back(value(seconds["memcpy"][round], seconds[what][round]));
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
  };
  for (const std::string what : {"memcpy", "store", "read"}) {
    const double part = median(what, [](double copy, double own) { return copy / own; });
    std::cout << mebibytes << " MiB, " << what << ": " << std::fixed << std::setprecision(2)
              << median(what, [&](double, double own) { return total / own / 1e9; }) << " GB/s, " << part
              << " of memcpy's rate" << std::endl;
    if (enough > 0) Check("  is enough", part >= enough, true);
  }
}
}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 3 && words[1] == "check-keys") CheckKeys(words[2]);
  else if (words.size() == 2 && words[1] == "all") All(words[0]), Copy(words[0], 64);
  else if (words.size() == 4 && words[1] == "copy") Copy(words[0], std::stoul(words[2]), std::stod(words[3]));
  else if (words.size() == 4 && words[1] == "follow") {
    Index index;
    const auto count = std::stol(words[3]);
    const auto done = [&] {
      return count == std::count_if(index.parts.begin(), index.parts.end(),
                                    [&](const Index::Part& part) { return std::get<0>(part) == words[2]; });
    };
    failures += !Follow(words[0], index, done, std::chrono::seconds(30));
    for (const Index::Part& part : index.parts)
      if (std::get<0>(part) == words[2]) std::cout << ToHex(std::get<1>(part)) << std::endl;
  } else if (words.size() == 4 && (words[1] == "put" || words[1] == "get")) {
    Transfer(words[0], words[1], words[2], words[3]);
  }
  else return 2;
  return failures != 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
