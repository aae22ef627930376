// Leases: exclusive use of a range of memory that several executables may share.
#pragma once

#include <cstdint>

namespace offload {

// Holds [begin, end) for one execution; overlapping leases wait for each other.
//
// Owner: the execution. Thread: taken and given back on the executing thread, without the GIL.
// Errors: none. An empty range is free.
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
