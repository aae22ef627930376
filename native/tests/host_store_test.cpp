#include "streaming/host_store.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"

namespace {

using offload::FileIdentity;
using offload::HostMemory;
using offload::HostRun;
using offload::HostSlab;
using offload::HostStore;
using offload::ReadBuffer;
using offload::StoreKey;
using offload::test::throws;

constexpr std::size_t kStep = HostSlab::kStepBytes;

std::atomic<std::size_t> n_live_bytes = 0;
std::atomic<int> n_made = 0;

class CountedMemory final : public HostMemory {
 public:
  explicit CountedMemory(std::size_t n_bytes) : n_bytes_(n_bytes), bytes_(n_bytes) {
    data_ = bytes_.data();
    n_live_bytes += n_bytes;
    ++n_made;
  }
  ~CountedMemory() override { n_live_bytes -= n_bytes_; }

 private:
  std::size_t n_bytes_;
  std::vector<std::byte> bytes_;
};

std::unique_ptr<HostMemory> make(std::size_t n_bytes) {
  return std::make_unique<CountedMemory>(n_bytes);
}

HostStore& store() { return HostStore::of_process(); }

StoreKey key_of(std::uint64_t inode, int device = 0) {
  FileIdentity file;
  file.inode = inode;
  return {{nullptr, device}, file};
}

std::byte pattern(std::size_t at) { return static_cast<std::byte>((at >> 3) * 131 & 0xFF); }

std::size_t total(const std::vector<HostRun>& runs) {
  std::size_t n_bytes = 0;
  for (const HostRun& run : runs) n_bytes += run.size_bytes;
  return n_bytes;
}

void test_a_range_is_held_once() {
  const StoreKey key = key_of(1);
  auto first = store().take(key, 100, 50, make);
  CHECK_THAT(first.size() == 1 && n_live_bytes == 50);
  auto second = store().take(key, 100, 50, make);
  CHECK_THAT(second.size() == 1 && second[0].slab == first[0].slab && n_live_bytes == 50);
  // The bytes around it are taken separately, in order.
  auto third = store().take(key, 80, 90, make);
  CHECK_THAT(third.size() == 3 && total(third) == 90 && n_live_bytes == 90);
  CHECK_THAT(third[1].slab == first[0].slab && third[1].offset_bytes == 0);
  auto inner = store().take(key, 120, 10, make);
  CHECK_THAT(inner.size() == 1 && inner[0].offset_bytes == 20 && n_live_bytes == 90);
  CHECK_THAT(store().held_bytes(key, 0, 1000) == 90 && store().held_bytes(key, 90, 20) == 20);
  CHECK_THAT(store().held_bytes(key_of(2), 0, 1000) == 0);
  CHECK_THAT(store().held_bytes(key_of(1, 1), 0, 1000) == 0);
  // The last user releases each, in either order.
  first.clear();
  second.clear();
  CHECK_THAT(n_live_bytes == 90);
  third.clear();
  CHECK_THAT(n_live_bytes == 50);
  inner.clear();
  CHECK_THAT(n_live_bytes == 0 && store().held_bytes(key, 0, 1000) == 0);
}

void test_what_fails_leaves_nothing() {
  const StoreKey key = key_of(1);
  const auto held = store().take(key, 10, 10, make);
  int n_calls = 0;
  const auto fails = [&](std::size_t n_bytes) {
    if (++n_calls == 2) throw std::runtime_error("no memory");
    return make(n_bytes);
  };
  CHECK_THAT(throws<std::runtime_error>([&] { store().take(key, 0, 30, fails); }) &&
             n_live_bytes == 10 && store().held_bytes(key, 0, 30) == 10);
}

void test_who_is_alone_may_write() {
  const StoreKey key = key_of(1);
  auto one = store().take(key, 0, 10, make);
  auto other = store().take(key, 0, 20, make);
  CHECK_THAT(store().claim({&one[0]}) == 0);
  CHECK_THAT(store().claim({&other[1], &other[0]}) == 1);
  CHECK_THAT(store().held_bytes(key, 0, 20) == 20);  // nothing was removed from the listing
  one.clear();
  CHECK_THAT(store().claim({&other[0]}) == -1);
  CHECK_THAT(store().held_bytes(key, 0, 20) == 10);
  CHECK_THAT(store().find(key, 0, 10).slab == nullptr);
  auto again = store().take(key, 0, 10, make);
  CHECK_THAT(again[0].slab != other[0].slab && n_live_bytes == 30);
  store().list(other[0].slab, key, 0);  // an existing slab remains
  CHECK_THAT(store().find(key, 0, 10).slab == again[0].slab);
  store().list(other[0].slab, key_of(3), 5);
  CHECK_THAT(store().find(key_of(3), 7, 3).offset_bytes == 2);
  CHECK_THAT(store().find(key_of(3), 7, 9).slab == nullptr);
}

void test_steps_are_read_once() {
  const std::size_t n_bytes = 2 * kStep + 100;
  const auto runs = store().take(key_of(1), 0, n_bytes, make);
  HostSlab& slab = *runs[0].slab;
  int n_reads = 0;
  const auto read = [&](std::size_t at, std::byte* to, std::size_t size) {
    ++n_reads;
    for (std::size_t index = 0; index < size; ++index) to[index] = pattern(at + index);
  };
  const auto fails = [](std::size_t, std::byte*, std::size_t) { throw std::runtime_error("gone"); };
  CHECK_THAT(throws<std::runtime_error>([&] { slab.fill(0, n_bytes, fails); }));
  CHECK_THAT(slab.fill(kStep - 10, n_bytes, read) == 10 && n_reads == 1);
  CHECK_THAT(slab.fill(0, n_bytes, fails) == kStep);  // already read
  CHECK_THAT(slab.fill(kStep, kStep + 7, read) == 7 && n_reads == 2);
  CHECK_THAT(slab.fill(2 * kStep, n_bytes, read) == 100 && n_reads == 3);
  for (std::size_t at = 0; at < n_bytes; at += 997) CHECK_THAT(slab.data()[at] == pattern(at));
  ReadBuffer again;
  std::size_t at = 0;
  while (at < n_bytes) at += slab.fill_or_compare(at, n_bytes, again, read);
  CHECK_THAT(at == n_bytes);
  const auto other = [&](std::size_t from, std::byte* to, std::size_t size) {
    read(from, to, size);
    to[size - 1] ^= std::byte{1};
  };
  CHECK_THAT(slab.fill_or_compare(2 * kStep, n_bytes, again, other) == 0);
  CHECK_THAT(slab.data()[n_bytes - 1] == pattern(n_bytes - 1));
}

// Threads that load at the same time: each byte is read once, and no thread waits for another's
// read.
void test_threads_fill_together() {
  constexpr std::size_t n_bytes = 5 * kStep;
  n_made = 0;
  std::atomic<int> n_reads = 0;
  const auto load = [&] {
    const auto runs = store().take(key_of(1), 0, n_bytes, make);
    const auto read = [&](std::size_t at, std::byte* to, std::size_t size) {
      ++n_reads;
      std::fill(to, to + size, pattern(at / kStep * 8));
    };
    for (std::size_t at = 0; at < n_bytes;) at += runs[0].slab->fill(at, n_bytes, read);
    for (std::size_t at = 0; at < n_bytes; at += kStep / 2) {
      CHECK_THAT(runs[0].slab->data()[at] == pattern(at / kStep * 8));
    }
  };
  const auto kept = store().take(key_of(1), 0, n_bytes, make);
  std::vector<std::thread> threads;
  for (int index = 0; index < 4; ++index) threads.emplace_back(load);
  for (std::thread& one : threads) one.join();
  CHECK_THAT(n_made == 1 && n_reads == 5);
}

// A slab is released while another thread requests its bytes: their memory is always a live slab's.
void test_threads_take_and_let_go() {
  std::vector<std::thread> threads;
  for (int index = 0; index < 4; ++index) {
    threads.emplace_back([index] {
      for (std::size_t round = 0; round < 300; ++round) {
        const std::size_t begin = 16 * (round % 5);
        const auto runs =
            store().take(key_of(1), begin, 64 + 16 * static_cast<std::size_t>(index), make);
        CHECK_THAT(total(runs) == 64 + 16 * static_cast<std::size_t>(index));
      }
    });
  }
  for (std::thread& one : threads) one.join();
  CHECK_THAT(n_live_bytes == 0 && store().held_bytes(key_of(1), 0, 1000) == 0);
}

}  // namespace

int main() {
  test_a_range_is_held_once();
  test_what_fails_leaves_nothing();
  test_who_is_alone_may_write();
  test_steps_are_read_once();
  test_threads_fill_together();
  test_threads_take_and_let_go();
  return offload::test::result();
}
