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

  // Whether a chunk's part is there, on whichever medium.
  bool Has(const std::string& name, const std::string& key, std::optional<uint32_t> group = {}) const {
    const auto found = parts.lower_bound({name, key, group, 0});
    return found != parts.end() && Part{name, key, group, std::get<3>(*found)} == *found;
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
      const std::string next = event.namespace_() + '\0';  // no name lies between
      parts.erase(parts.lower_bound({event.namespace_(), "", {}, 0}), parts.lower_bound({next, "", {}, 0}));
    }  // of a kind that only newer servers know, the number counts
  }

  std::set<Part> pieces_;
};

// Keeps the index up to date until done() says so, whatever becomes of the server meanwhile. False if that
// takes longer than the limit.
template <typename Done>
bool Follow(const std::string& address, Index& index, Done done, std::chrono::seconds limit) {
  using Clock = std::chrono::system_clock;
  const auto end = Clock::now() + limit;
  for (; Clock::now() < end; std::this_thread::sleep_for(std::chrono::milliseconds(50))) try {
      const auto stub = v1::EventService::NewStub(Connect(address));
      v1::StreamKVEventsRequest request;
      request.mutable_snapshot();
      if (index.cursor) *request.mutable_after() = *index.cursor;  // instead
      index.StreamBegins();

      grpc::ClientContext context;
      context.set_deadline(end);
      const auto stream = stub->StreamKVEvents(&context, request);
      for (v1::StreamKVEventsResponse message; stream->Read(&message);) {
        index.Apply(message);
        if (index.cursor && done()) return true;  // and the stream is cancelled
      }
      const grpc::Status status = stream->Finish();
      if (status.error_code() == grpc::UNIMPLEMENTED || status.error_code() == grpc::INVALID_ARGUMENT)
        Require(status);
    } catch (const CallError& error) {
      if (error.code != grpc::UNAVAILABLE) throw;
    }
  return false;
}

}  // namespace kvdock
