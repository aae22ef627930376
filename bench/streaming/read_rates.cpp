// Rates of reading weights from a file into memory, by several methods, while another thread
// computes. The method of native/streaming was chosen by it.
//
//   g++ -O2 -std=c++17 -pthread bench/streaming/read_rates.cpp -o /tmp/read_rates
//   /tmp/read_rates FILE          makes FILE (2 GiB) where it does not exist
//
// Prints one line for each method, piece size and number of reads in flight: GB/s (pieces in
// sequence; unless they are read in place, at offsets that are no multiple of a block), and its
// processor time beside the computing thread, in seconds per GB. The fastest of some turns and the
// median of processor time, since other load on the machine only slows it.

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kBlock = 4096;
constexpr std::size_t kFileBytes = std::size_t{2} << 30;
constexpr int kTurns = 5;
constexpr double kTurnSeconds = 0.4;
constexpr std::size_t kHeaderBytes = 1736;  // as a safetensors header may leave the data

std::size_t down(std::size_t value) { return value / kBlock * kBlock; }
std::size_t up(std::size_t value) { return down(value + kBlock - 1); }

// As the weights' own memory: huge pages, where the system provides them, are fewer to describe to
// the device.
char* pages(std::size_t size, bool huge) {
  void* const memory =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  madvise(memory, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::memset(memory, 0, size);
  return static_cast<char*>(memory);
}

void need(bool holds, const char* what) {
  if (holds) return;
  std::perror(what);
  std::exit(1);
}

// Threads that each read a chunk, several at a time.
class Readers {
 public:
  explicit Readers(int n_threads) {
    for (int index = 0; index < n_threads; ++index) {
      threads_.emplace_back([this, index] { run(index); });
    }
  }
  ~Readers() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& one : threads_) one.join();
  }
  void read(std::size_t n_chunks, std::function<void(std::size_t)> read_chunk) {
    std::unique_lock lock(mutex_);
    read_chunk_ = std::move(read_chunk);
    n_chunks_ = n_left_ = n_chunks;
    next_ = 0;
    changed_.notify_all();
    done_.wait(lock, [this] { return n_left_ == 0; });
  }

  // The calling thread's.
  std::size_t number() const { return mine(); }

 private:
  static std::size_t& mine() {
    thread_local std::size_t number = 0;
    return number;
  }
  void run(int index) {
    mine() = static_cast<std::size_t>(index);
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || next_ < n_chunks_; });
      if (closed_) return;
      const std::size_t chunk = next_++;
      lock.unlock();
      read_chunk_(chunk);
      lock.lock();
      if (--n_left_ == 0) done_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_, done_;
  std::function<void(std::size_t)> read_chunk_;
  std::size_t n_chunks_ = 0, n_left_ = 0, next_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

// One io_uring, driven by one thread, without a library.
class Ring {
 public:
  explicit Ring(unsigned n_entries) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, n_entries, &params));
    need(fd_ >= 0, "io_uring_setup");
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    sq_ = map(sq_bytes, IORING_OFF_SQ_RING);
    cq_ = map(cq_bytes, IORING_OFF_CQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(
        map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
    p_ = params;
  }
  ~Ring() { close(fd_); }
  void submit(int file, char* to, std::size_t size, std::size_t offset, std::uint64_t tag) {
    unsigned* const tail = at(sq_, p_.sq_off.tail);
    const unsigned index = *tail & *at(sq_, p_.sq_off.ring_mask);
    io_uring_sqe entry{};
    entry.opcode = IORING_OP_READ;
    entry.fd = file;
    entry.addr = reinterpret_cast<std::uint64_t>(to);
    entry.len = static_cast<unsigned>(size);
    entry.off = offset;
    entry.user_data = tag;
    entries_[index] = entry;
    at(sq_, p_.sq_off.array)[index] = index;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    need(syscall(SYS_io_uring_enter, fd_, 1, 0, 0, nullptr, 0) == 1, "io_uring_enter");
  }
  std::uint64_t wait() {
    unsigned* const head = at(cq_, p_.cq_off.head);
    while (*head == __atomic_load_n(at(cq_, p_.cq_off.tail), __ATOMIC_ACQUIRE)) {
      syscall(SYS_io_uring_enter, fd_, 0, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    }
    const auto* const done = reinterpret_cast<io_uring_cqe*>(cq_ + p_.cq_off.cqes) +
                             (*head & *at(cq_, p_.cq_off.ring_mask));
    need(done->res > 0, "read");
    const std::uint64_t tag = done->user_data;
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return tag;
  }

 private:
  char* map(std::size_t size, std::uint64_t where) {
    void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                              static_cast<off_t>(where));
    need(memory != MAP_FAILED, "mmap");
    return static_cast<char*>(memory);
  }
  static unsigned* at(char* base, unsigned offset) {
    return reinterpret_cast<unsigned*>(base + offset);
  }
  int fd_;
  char *sq_, *cq_;
  io_uring_sqe* entries_;
  io_uring_params p_{};
};

struct Way {
  const char* name;
  bool direct, bounced, uring, ahead, huge;
};

std::atomic<bool> computing = true;

// Reads weights within its caches' reach and beyond, as a matrix-vector product does.
void compute() {
  std::vector<float> matrix(std::size_t{1} << 20, 1.0f);
  volatile float sink = 0;
  while (computing) {
    float sum[16] = {};
    for (std::size_t at = 0; at < matrix.size(); at += 16) {
      for (std::size_t lane = 0; lane < 16; ++lane) sum[lane] += matrix[at + lane] * 1.5f;
    }
    sink = sum[0];
  }
  (void)sink;
}

void read_fully(int file, char* to, std::size_t size, std::size_t offset) {
  while (size > 0) {
    const ssize_t got = pread(file, to, size, static_cast<off_t>(offset));
    need(got > 0, "pread");
    to += got, offset += static_cast<std::size_t>(got);
    size -= std::min(size, static_cast<std::size_t>(got));
  }
}

// The work of a reading method.
struct Job {
  int file = -1;
  std::size_t piece, chunk;
  char* to = nullptr;
  std::vector<char*> bounce;  // one for each read in flight

  std::size_t n_chunks() const { return piece / chunk; }
};

void copy_out(const Job& job, const char* bounce, std::size_t from, std::size_t index) {
  std::memcpy(job.to + index * job.chunk, bounce + (from - down(from)), job.chunk);
}

void read_by_ring(const Job& job, std::size_t offset, Ring& ring) {
  std::size_t sent = 0;
  std::vector<std::size_t> chunk_of(job.bounce.size());
  const auto send = [&](std::size_t slot) {
    const std::size_t from = offset + sent * job.chunk;
    chunk_of[slot] = sent++;
    ring.submit(job.file, job.bounce[slot], up(from + job.chunk) - down(from), down(from), slot);
  };
  for (std::size_t slot = 0; slot < job.bounce.size() && sent < job.n_chunks(); ++slot) send(slot);
  for (std::size_t done = 0; done < job.n_chunks(); ++done) {
    const std::size_t slot = ring.wait();
    copy_out(job, job.bounce[slot], offset + chunk_of[slot] * job.chunk, chunk_of[slot]);
    if (sent < job.n_chunks()) send(slot);
  }
}

void read_by_threads(const Job& job, std::size_t offset, bool bounced, Readers& readers) {
  readers.read(job.n_chunks(), [&](std::size_t index) {
    const std::size_t from = offset + index * job.chunk;
    if (!bounced) return read_fully(job.file, job.to + index * job.chunk, job.chunk, from);
    char* const bounce = job.bounce[readers.number()];
    read_fully(job.file, bounce, up(from + job.chunk) - down(from), down(from));
    copy_out(job, bounce, from, index);
  });
}

// Processor seconds of all threads but the computing one.
double processor_seconds(clockid_t computing_clock) {
  timespec all{}, computing_time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &all);
  clock_gettime(computing_clock, &computing_time);
  return static_cast<double>(all.tv_sec - computing_time.tv_sec) +
         static_cast<double>(all.tv_nsec - computing_time.tv_nsec) / 1e9;
}

struct Rate {
  double gigabytes_per_second, processor_seconds;  // per GB
};

// One turn.
Rate measure(const char* path, const Way& way, std::size_t piece, int depth, clockid_t computing) {
  Job job{open(path, O_RDONLY | (way.direct ? O_DIRECT : 0)),
          piece,
          std::min(piece, std::size_t{4} << 20),
          pages(piece, way.huge),
          {}};
  need(job.file >= 0, "open");
  posix_fadvise(job.file, 0, 0, POSIX_FADV_DONTNEED);
  for (int index = 0; index < depth; ++index)
    job.bounce.push_back(pages(job.chunk + 2 * kBlock, way.huge));
  Readers readers(way.uring ? 0 : depth);
  std::optional<Ring> ring;
  if (way.uring) ring.emplace(64);
  std::size_t moved = 0, offset = way.bounced || !way.direct ? kHeaderBytes : 0;
  const double before = processor_seconds(computing);
  const auto begin = std::chrono::steady_clock::now();
  double seconds = 0;
  while (seconds < kTurnSeconds && offset + 2 * piece <= kFileBytes) {
    if (way.ahead) {
      posix_fadvise(job.file, static_cast<off_t>(offset + piece), static_cast<off_t>(piece),
                    POSIX_FADV_WILLNEED);
    }
    if (ring) {
      read_by_ring(job, offset, *ring);
    } else {
      read_by_threads(job, offset, way.bounced, readers);
    }
    moved += piece, offset += piece;
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  const double taken = processor_seconds(computing) - before;
  close(job.file);
  munmap(job.to, piece);
  for (char* const one : job.bounce) munmap(one, job.chunk + 2 * kBlock);
  const double gigabytes = static_cast<double>(moved) / 1e9;
  return {gigabytes / seconds, taken / gigabytes};
}

void make_file(const char* path) {
  struct stat status{};
  if (stat(path, &status) == 0) return;
  std::FILE* const file = std::fopen(path, "wb");
  need(file != nullptr, "open");
  std::vector<std::uint64_t> block(std::size_t{1} << 17);
  std::uint64_t state = 1;
  for (std::size_t written = 0; written < kFileBytes; written += block.size() * 8) {
    for (auto& word : block) word = state = state * 6364136223846793005u + 1442695040888963407u;
    need(std::fwrite(block.data(), 8, block.size(), file) == block.size(), "write");
  }
  std::fclose(file);
  sync();
}

}  // namespace

int main(int n_arguments, char** arguments) {
  need(n_arguments == 2, "usage: read_rates FILE");
  make_file(arguments[1]);
  std::thread computer(compute);
  clockid_t clock{};
  need(pthread_getcpuclockid(computer.native_handle(), &clock) == 0, "clock");
  const Way ways[] = {{"pread, direct, in place", true, false, false, false, true},
                      {"  the same, small pages", true, false, false, false, false},
                      {"pread, direct, bounced", true, true, false, false, true},
                      {"  the same, small pages", true, true, false, false, false},
                      {"io_uring, direct, bounced", true, true, true, false, true},
                      {"pread, buffered", false, false, false, false, true},
                      {"pread, buffered, ahead", false, false, false, true, true}};
  struct Case {
    Way way;
    std::size_t mebibytes;
    int depth;
    std::vector<double> rates, taken;
  };
  std::vector<Case> cases;
  for (const Way& way : ways) {
    for (const std::size_t mebibytes : {1, 8, 32}) {
      cases.push_back({way, mebibytes, 1, {}, {}});
      if (mebibytes > 1) cases.push_back({way, mebibytes, 4, {}, {}});
    }
  }
  for (int turn = 0; turn < kTurns; ++turn) {
    for (Case& one : cases) {
      const Rate rate = measure(arguments[1], one.way, one.mebibytes << 20, one.depth, clock);
      one.rates.push_back(rate.gigabytes_per_second);
      one.taken.push_back(rate.processor_seconds);
    }
  }
  for (Case& one : cases) {
    std::sort(one.rates.begin(), one.rates.end());
    std::sort(one.taken.begin(), one.taken.end());
    std::printf("%-26s %2zu MiB, %d in flight: %5.2f GB/s, %.2f s of a processor for a GB\n",
                one.way.name, one.mebibytes, one.depth, one.rates.back(), one.taken[kTurns / 2]);
  }
  computing = false;
  computer.join();
}
