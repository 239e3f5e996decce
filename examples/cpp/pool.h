// The server's memory in this process.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>

#include <map>
#include <regex>

#include "session.h"

namespace kvdock {

// Checks, guards and maps every segment that OpenResponse names. Make one before the first Reserve.
class Pool {
 public:
  explicit Pool(const v1::OpenResponse& opened) {
    for (const v1::Segment& segment : opened.segments())
      mappings_.try_emplace(segment.segment_id(), segment, opened.guard());
  }

  char* At(const v1::Location& at) const {
    const Mapping& in = mappings_.at(at.segment_id());
    if (at.offset() > in.bytes || at.length() > in.bytes - at.offset())
      throw std::out_of_range("a location outside of its segment");
    return static_cast<char*>(in.start) + at.offset();
  }

 private:
  // The guard lasts for as long as the mapping: no one else gets memory that this process may write into.
  struct Mapping {
    explicit Mapping(const v1::Segment& segment)
        : file(open(("/dev/shm" + segment.shm_name()).c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)),
          bytes(segment.bytes()) {}
    Mapping(const v1::Segment& segment, uint64_t guard) : Mapping(segment) {  // from here on, an error closes the file
      Check(segment);
      struct flock lock {};
      lock.l_type = F_RDLCK;
      lock.l_start = static_cast<off_t>(guard);
      lock.l_len = 1;
      if (fcntl(file, F_OFD_SETLK, &lock) == 0)
        start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (start == MAP_FAILED) throw std::system_error(errno, std::generic_category());
    }
    Mapping(const Mapping&) = delete;
    ~Mapping() {
      if (start != MAP_FAILED) munmap(start, bytes);
      close(file);
    }

    // Whoever answers could name any file: this one must be the server's, and the server trusted.
    void Check(const v1::Segment& segment) const {
      const std::regex form("/kvdock-([0-9]+)-[0-9a-f]{16}");
      std::smatch name;
      struct stat status {};
      std::string proof(32, '\0');
      if (!std::regex_match(segment.shm_name(), name, form) || fstat(file, &status) != 0 ||
          !S_ISREG(status.st_mode) || (status.st_mode & 07777) != 0600 || !Trusted(status.st_uid) ||
          name[1] != std::to_string(status.st_uid) || bytes + 32 > static_cast<uint64_t>(status.st_size) ||
          pread(file, proof.data(), 32, status.st_size - 32) != 32 || proof != segment.proof())
        throw std::runtime_error("not a segment of a trusted server: " + segment.shm_name());
    }

    int file;
    uint64_t bytes;
    void* start = MAP_FAILED;
  };

  std::map<uint32_t, Mapping> mappings_;
};

}  // namespace kvdock
