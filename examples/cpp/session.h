// Who is the server, and one session with it.
#pragma once
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <mutex>
#include <optional>
#include <thread>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "kvdock/v1/session.grpc.pb.h"

namespace kvdock {

struct CallError : std::runtime_error {
  CallError(int code, const std::string& reason, const std::string& message)
      : std::runtime_error(reason + ": " + message), code(code), reason(reason) {}
  int code;            // a grpc::StatusCode
  std::string reason;  // of ErrorReason, without the prefix; empty where the server told none
};

// Throws if a call failed.
inline void Require(const grpc::Status& status) {
  if (status.ok()) return;
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  details.ParseFromString(status.error_details());
  for (const auto& detail : details.details())
    if (detail.Is<google::rpc::ErrorInfo>()) detail.UnpackTo(&info);
  throw CallError(status.error_code(), info.reason(), status.error_message());
}

inline bool Trusted(uid_t user) { return user == 0 || user == geteuid(); }

// A channel to unix:///PATH, unless another user could be the server (docs/configuration.md). Connect anew
// when the server was lost: another one may listen there now.
inline std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  const std::string path = address.substr(std::string("unix://").size());
  sockaddr_un name{AF_UNIX, {}};
  path.copy(name.sun_path, sizeof name.sun_path - 1);
  struct stat entry {}, folder {};
  ucred peer{};
  socklen_t size = sizeof peer;
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool seen = lstat(path.c_str(), &entry) == 0 &&
                    stat(std::filesystem::path(path).parent_path().c_str(), &folder) == 0 &&
                    connect(probe, reinterpret_cast<sockaddr*>(&name), sizeof name) == 0 &&
                    getsockopt(probe, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
  close(probe);
  if (!seen) throw CallError(grpc::UNAVAILABLE, "", "nobody listens at " + address);
  if (!Trusted(entry.st_uid) || !Trusted(folder.st_uid) || !Trusted(peer.uid) || (folder.st_mode & S_IWOTH))
    throw CallError(grpc::PERMISSION_DENIED, "", "another user may be the server at " + address);
  grpc::ChannelArguments own;
  own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // no connection, and no waiting time, of before
  own.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);     // pings show that a server stands still
  own.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
  own.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // as many as it takes, also while we send nothing
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), own);
}

// A session whose calls wait for their answers one after the other, and that keeps itself alive.
class Session {
 public:
  Session(const std::shared_ptr<grpc::Channel>& channel, const std::string& engine_id, v1::SessionRole role,
          uint32_t ttl_ms = 0)
      : stub_(v1::SessionService::NewStub(channel)), stream_(stub_->Session(&context_)) {
    v1::SessionRequest request;
    request.mutable_open()->set_engine_id(engine_id);
    request.mutable_open()->set_role(role);
    request.mutable_open()->set_ttl_ms(ttl_ms);
    request.mutable_open()->set_client("kvdock C++ example");
    opened_ = Call(std::move(request)).open();
    heart_ = std::thread([this, closed = closed_.get_future()] {
      v1::SessionRequest beat;
      beat.mutable_heartbeat();
      while (closed.wait_for(std::chrono::milliseconds(opened_.ttl_ms() / 3)) == std::future_status::timeout) try {
          Call(beat);
        } catch (const CallError&) {  // the next call will say so
        }
    });
  }
  ~Session() {
    context_.TryCancel();  // the server releases what the session holds
    closed_.set_value();
    heart_.join();
    if (!end_) stream_->Finish();
  }

  const v1::OpenResponse& opened() const { return opened_; }

  v1::SessionResponse Call(v1::SessionRequest request) {
    std::lock_guard lock(mutex_);
    request.set_id(++last_id_);
    v1::SessionResponse response;
    bool answered = !end_ && stream_->Write(request);
    do answered = answered && stream_->Read(&response);
    while (answered && response.id() != last_id_);  // the server may also tell what nobody has asked for
    if (!answered) {
      if (!end_) end_ = stream_->Finish();
      throw CallError(grpc::UNAVAILABLE, "", "the session has ended: " + end_->error_message());
    }
    if (response.has_error())
      throw CallError(response.error().code(), response.error().reason(), response.error().message());
    return response;
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::SessionService::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionResponse>> stream_;
  v1::OpenResponse opened_;
  std::mutex mutex_;
  std::promise<void> closed_;
  std::optional<grpc::Status> end_;  // of the stream
  uint64_t last_id_ = 0;
  std::thread heart_;
};

}  // namespace kvdock
