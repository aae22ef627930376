// Leases: exclusive use of a memory range that several executables may share.
#pragma once

#include <cstdint>

namespace offload {

// Holds [begin, end) for one execution; overlapping leases exclude each other.
//
// Owner: the execution. Thread: acquired and released on the executing thread, without the GIL.
// Errors: none. An empty range is a no-op.
class Lease {
 public:
  Lease(std::uint64_t begin, std::uint64_t end);
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

 private:
  std::uint64_t begin_;
  std::uint64_t end_;
};

}  // namespace offload
