// One namespace of a server's cache, as an engine of one worker uses it.
#pragma once
#include "keys.h"
#include "kvdock/v1/cache.grpc.pb.h"
#include "pool.h"

namespace kvdock {

class Cache {
 public:
  using Keys = std::vector<std::string>;
  using Statuses = std::vector<v1::ChunkStatus>;

  // The engine's id tells its processes from other engines'.
  Cache(const std::string& address, const std::string& engine_id, v1::Namespace space)
      : space_(std::move(space)),
        channel_(Connect(address)),
        calls_(v1::CacheService::NewStub(channel_)),
        scheduler_(channel_, engine_id, v1::SESSION_ROLE_SCHEDULER),
        worker_(channel_, engine_id, v1::SESSION_ROLE_WORKER),
        pool_(worker_.opened()) {
    v1::SessionRequest request;
    *request.mutable_register_namespace()->mutable_namespace_() = space_;
    created = scheduler_.Call(std::move(request)).register_namespace().created();
  }

  const v1::OpenResponse& opened() const { return worker_.opened(); }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  char* At(const v1::Location& location) const { return pool_.At(location); }

  // How many chunks can be had, and a lease that locks them.
  v1::LookupResponse Lookup(const Keys& keys) {
    v1::SessionRequest request;
    request.mutable_lookup()->set_namespace_(space_.name());
    for (const std::string& key : keys) request.mutable_lookup()->add_keys(key);
    return scheduler_.Call(std::move(request)).lookup();
  }

  // Where the locked chunks lie. Read them in place, then free the locks.
  v1::RetrieveResponse Retrieve(uint64_t lease_id) {
    v1::SessionRequest request;
    request.mutable_retrieve()->set_lease_id(lease_id);
    return worker_.Call(std::move(request)).retrieve();
  }

  // How many locks were held until now. Bytes of a chunk whose lock was not may be another chunk's.
  uint32_t FreeLocks(uint64_t lease_id, std::optional<uint32_t> end_chunk = {}) {
    v1::SessionRequest request;
    v1::LockRange& range = *request.mutable_free_locks()->add_locks();
    range.set_lease_id(lease_id);
    if (end_chunk) range.set_end_chunk(*end_chunk);
    return worker_.Call(std::move(request)).free_locks().freed(0).released();
  }

  // Memory for chunks that follow `parent` (empty: begin a prompt). Write in place, then commit or abort.
  v1::ReserveResponse Reserve(const std::string& parent, const Keys& keys) {
    v1::SessionRequest request;
    request.mutable_reserve()->set_namespace_(space_.name());
    request.mutable_reserve()->set_parent_key(parent);
    for (const std::string& key : keys) request.mutable_reserve()->add_keys(key);
    return worker_.Call(std::move(request)).reserve();
  }

  v1::CommitResponse Commit(uint64_t reservation_id) {
    v1::SessionRequest request;
    request.mutable_commit()->set_reservation_id(reservation_id);
    return worker_.Call(std::move(request)).commit();
  }

  uint32_t Abort(uint64_t reservation_id) {
    v1::SessionRequest request;
    request.mutable_abort()->set_reservation_id(reservation_id);
    return worker_.Call(std::move(request)).abort().aborted();
  }

  // Stores chunks whose bytes travel in the stream; only what the server lacks is sent.
  Statuses Put(const std::string& parent, const Keys& keys, const std::vector<std::string>& bytes) {
    grpc::ClientContext context;
    const auto stream = calls_->Put(&context);
    v1::PutRequest request;
    request.mutable_open()->set_namespace_(space_.name());
    request.mutable_open()->set_parent_key(parent);
    for (const std::string& key : keys) request.mutable_open()->add_keys(key);
    v1::PutResponse response;
    Statuses statuses(keys.size(), v1::CHUNK_STATUS_FAILED);
    if (stream->Write(request) && stream->Read(&response)) {
      const v1::PutAdmission admission = response.admission();
      for (int i = 0; i < admission.chunks_size(); ++i)
        for (size_t at = 0; admission.chunks(i).status() == v1::CHUNK_STATUS_RESERVED && at < bytes[i].size();
             at += kPiece) {
          request.mutable_data()->set_chunk(i);
          request.mutable_data()->set_data(bytes[i].substr(at, kPiece));
          if (!stream->Write(request)) break;
        }
      stream->WritesDone();
      while (stream->Read(&response)) statuses[response.result().chunk()] = response.result().status();
    }
    Require(stream->Finish());
    return statuses;
  }

  // The bytes of the chunks up to the first that is not there.
  std::vector<std::string> Get(const Keys& keys) {
    grpc::ClientContext context;
    v1::GetRequest request;
    request.set_namespace_(space_.name());
    for (const std::string& key : keys) request.add_keys(key);
    const auto stream = calls_->Get(&context, request);
    std::vector<std::string> bytes;
    for (v1::GetResponse response; stream->Read(&response);)
      if (response.status() == v1::CHUNK_STATUS_RETRIEVED) {
        bytes.resize(response.chunk() + 1);
        bytes.back() += response.data();
      }
    Require(stream->Finish());
    return bytes;
  }

  bool created = false;  // the namespace was not known before

 private:
  static constexpr size_t kPiece = 128 << 10;

  v1::Namespace space_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> calls_;
  Session scheduler_, worker_;
  Pool pool_;
};

}  // namespace kvdock
