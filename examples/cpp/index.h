// What a server holds, as its events tell it.
#pragma once
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "kvdock/v1/events.grpc.pb.h"
#include "session.h"

namespace kvdock {

class Index {
 public:
  // Namespace, key, group (absent and 0 differ), medium: each of them is announced for itself.
  using Part = std::tuple<std::string, std::string, std::optional<uint32_t>, int>;

  void StreamBegins() { pieces_.clear(); }  // of a snapshot that was cut off nothing counts

  void Apply(const v1::StreamKVEventsResponse& message) {
    if (message.has_compacted()) {
      ++compactions;
      cursor.reset();  // the parts stay as they are until the next snapshot is complete
      return;
    }
    if (message.has_snapshot()) {
      for (const v1::Event& event : message.snapshot().stored()) pieces_.insert(PartOf(event, event.stored()));
      if (!message.snapshot().last()) return;
      ++snapshots;
      parts = std::move(pieces_);
      pieces_.clear();
      cursor = message.cursor();
      return;
    }
    if (!cursor || cursor->epoch() != message.cursor().epoch()) throw std::runtime_error("events without a place");
    for (const v1::Event& event : message.batch().events()) {  // numbers grow, not always by one
      if (event.sequence() <= cursor->sequence()) throw std::runtime_error("an event came twice");
      cursor->set_sequence(event.sequence());
      Apply(event);
    }
    if (message.cursor().sequence() < cursor->sequence()) throw std::runtime_error("a cursor before its events");
    cursor = message.cursor();
  }

  // How many chunks of a prompt, from the first on, are there on any medium.
  size_t Prefix(const std::string& name, const std::vector<std::string>& keys,
                std::optional<uint32_t> group = {}) const {
    size_t chunks = 0;
    for (const std::string& key : keys) {
      const auto found = parts.lower_bound({name, key, group, 0});
      if (found == parts.end() || Part{name, key, group, std::get<3>(*found)} != *found) break;
      ++chunks;
    }
    return chunks;
  }

  std::set<Part> parts;
  std::optional<v1::Cursor> cursor;  // where to resume; none: with a snapshot
  int snapshots = 0, compactions = 0, events = 0;

 private:
  template <typename Told>
  static Part PartOf(const v1::Event& event, const Told& told) {
    const auto group = told.has_group_idx() ? std::optional(told.group_idx()) : std::nullopt;
    return {event.namespace_(), told.key(), group, told.medium()};
  }

  void Apply(const v1::Event& event) {
    ++events;
    if (event.has_stored()) {
      parts.insert(PartOf(event, event.stored()));
    } else if (event.has_removed()) {
      parts.erase(PartOf(event, event.removed()));
    } else if (event.has_cleared()) {
      const auto first = parts.lower_bound({event.namespace_(), "", {}, 0});
      auto end = first;
      while (end != parts.end() && std::get<0>(*end) == event.namespace_()) ++end;
      parts.erase(first, end);
    }  // of a kind that only newer servers know, the number counts
  }

  std::set<Part> pieces_;
};

// Keeps the index up to date until done() says so, whatever becomes of the server meanwhile. False if that
// takes longer than the limit.
template <typename Done>
bool Follow(const std::string& address, Index& index, Done done, std::chrono::seconds limit) {
  using Clock = std::chrono::system_clock;
  constexpr std::chrono::milliseconds kProgress(200), kSilence(1000), kPause(50);
  for (const auto end = Clock::now() + limit; Clock::now() < end; std::this_thread::sleep_for(kPause)) try {
      const auto stub = v1::EventService::NewStub(Connect(address));
      v1::StreamKVEventsRequest request;
      request.set_progress_interval_ms(kProgress.count());
      if (index.cursor)
        *request.mutable_after() = *index.cursor;
      else
        request.mutable_snapshot();
      index.StreamBegins();

      grpc::ClientContext context;
      context.set_deadline(end);
      grpc::CompletionQueue queue;  // since only here can a wait for the next message have an end
      v1::StreamKVEventsResponse message;
      void* tag;
      bool there = false, followed = false;
      const auto stream = stub->AsyncStreamKVEvents(&context, request, &queue, nullptr);
      bool heard = queue.AsyncNext(&tag, &there, Clock::now() + kSilence) == grpc::CompletionQueue::GOT_EVENT;
      while (heard && there && !followed) {
        stream->Read(&message, nullptr);
        heard = queue.AsyncNext(&tag, &there, Clock::now() + kSilence) == grpc::CompletionQueue::GOT_EVENT;
        if (heard && there) index.Apply(message);
        followed = heard && there && index.cursor && done();
      }
      context.TryCancel();
      if (!heard) queue.Next(&tag, &there);
      grpc::Status status;
      stream->Finish(&status, nullptr);
      queue.Next(&tag, &there);
      queue.Shutdown();
      while (queue.Next(&tag, &there)) continue;
      if (followed) return true;
      if (status.error_code() == grpc::UNIMPLEMENTED || status.error_code() == grpc::INVALID_ARGUMENT)
        Require(status);
    } catch (const CallError& error) {
      if (error.code != grpc::UNAVAILABLE) throw;
    }
  return false;
}

}  // namespace kvdock
