#include "streaming/weight_source.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <tuple>

#include "offload/errors.hpp"
#include "streaming/pages.hpp"

namespace offload {
namespace {

// The alignment of direct reads if the system states none: a block of every common device.
constexpr std::size_t kUsualBlockBytes = 4096;

std::size_t down(std::size_t value, std::size_t unit) { return value / unit * unit; }
std::size_t up(std::size_t value, std::size_t unit) { return down(value + unit - 1, unit); }

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw FileError(path + ": " + what);
}

[[noreturn]] void fail_short(const std::string& path, std::size_t offset_bytes,
                             std::size_t expected_bytes, std::size_t got_bytes) {
  fail(path, "expected " + std::to_string(expected_bytes) + " bytes at offset " +
                 std::to_string(offset_bytes) + ", got " + std::to_string(got_bytes) +
                 ": the file is too short; write it again");
}

constexpr std::int64_t kNsInSecond = 1'000'000'000;

std::int64_t ns_of(const struct timespec& time) {
  return static_cast<std::int64_t>(time.tv_sec) * kNsInSecond + time.tv_nsec;
}

}  // namespace

FileIdentity FileIdentity::of(const struct stat& status) {
  return {static_cast<std::uint64_t>(status.st_dev), static_cast<std::uint64_t>(status.st_ino),
          static_cast<std::int64_t>(status.st_size), ns_of(status.st_mtim), ns_of(status.st_ctim)};
}

bool FileIdentity::operator<(const FileIdentity& other) const {
  const auto tied = [](const FileIdentity& one) {
    return std::tie(one.device, one.inode, one.size_bytes, one.written_ns, one.changed_ns);
  };
  return tied(*this) < tied(other);
}

ReadBuffer::~ReadBuffer() {
  if (memory_ != nullptr) munmap(memory_, kSizeBytes);
}

std::byte* ReadBuffer::memory() {
  if (memory_ == nullptr) {
    memory_ = map_pages(kSizeBytes);
    if (memory_ == nullptr) {
      throw OutOfMemory("no memory for a buffer of " + std::to_string(kSizeBytes) +
                        " bytes to read weights");
    }
  }
  return memory_;
}

// O_NONBLOCK opens a pipe without waiting for its writer; it is then refused.
WeightFile::WeightFile(std::string path) : path_(std::move(path)) {
  int file = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT);
  bool direct = file >= 0;
  if (!direct && errno == EINVAL) file = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) fail(path_, std::string("cannot be opened: ") + std::strerror(errno));
  if (fstat(file, &opened_) != 0 || !S_ISREG(opened_.st_mode)) {
    close(file);
    fail(path_, "expected a regular file");
  }
  offset_alignment_ = memory_alignment_ = kUsualBlockBytes;
#if defined(STATX_DIOALIGN)
  struct statx details{};
  if (statx(file, "", AT_EMPTY_PATH, STATX_DIOALIGN, &details) == 0 &&
      (details.stx_mask & STATX_DIOALIGN) != 0) {
    direct = direct && details.stx_dio_offset_align != 0;  // 0: this file permits no direct reads
    if (direct) {
      offset_alignment_ = details.stx_dio_offset_align;
      memory_alignment_ = details.stx_dio_mem_align;
    }
  }
#endif
  file_ = file;
  direct_ = direct;
  if (!direct) leave_direct();
}

WeightFile::~WeightFile() {
  close(file_);
  if (cached_file_ >= 0) close(cached_file_);
}

// Through the open file, since its path may now name another file.
void WeightFile::open_cached() {
  const std::string path = "/proc/self/fd/" + std::to_string(file_);
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    fail(path_, "cannot be opened to be read through the page cache, by " + path + ": " +
                    std::strerror(errno));
  }
  posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
  cached_file_ = file;
}

// Some filesystems accept the flag and refuse the reads.
void WeightFile::leave_direct() {
  direct_ = false;
  fcntl(file_, F_SETFL, fcntl(file_, F_GETFL) & ~O_DIRECT);
  posix_fadvise(file_, 0, 0, POSIX_FADV_SEQUENTIAL);
}

std::size_t WeightFile::size_bytes() const {
  struct stat status{};
  if (fstat(file_, &status) != 0) fail(path_, std::string("no size: ") + std::strerror(errno));
  return static_cast<std::size_t>(status.st_size);
}

// Reads up to `span_bytes` and at least `needed_bytes`; a file may end between the two.
void WeightFile::read_in_place(std::size_t offset_bytes, std::byte* to, std::size_t span_bytes,
                               std::size_t needed_bytes) {
  std::size_t done_bytes = 0;
  while (done_bytes < needed_bytes) {
    const ssize_t got = pread(file_, to + done_bytes, span_bytes - done_bytes,
                              static_cast<off_t>(offset_bytes + done_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && direct_) {
      leave_direct();
      continue;
    }
    if (got < 0) {
      fail(path_, "reading " + std::to_string(needed_bytes) + " bytes at offset " +
                      std::to_string(offset_bytes) + ": " + std::strerror(errno));
    }
    const std::size_t reached_bytes = done_bytes + static_cast<std::size_t>(got);
    // A direct read continues at a block; if that is no progress, the file has ended.
    const std::size_t next_bytes = reached_bytes < needed_bytes && direct_
                                       ? down(reached_bytes, offset_alignment_)
                                       : reached_bytes;
    if (next_bytes <= done_bytes) {
      fail_short(path_, offset_bytes, needed_bytes, std::min(reached_bytes, needed_bytes));
    }
    done_bytes = next_bytes;
  }
}

// Reads the whole blocks around the bytes into the buffer, and copies.
void WeightFile::read_through(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                              std::byte* buffer) {
  std::size_t done_bytes = 0;
  while (done_bytes < size_bytes) {
    const std::size_t from = offset_bytes + done_bytes;
    const std::size_t block = down(from, offset_alignment_);
    const std::size_t before_bytes = from - block;
    const std::size_t part_bytes =
        std::min(size_bytes - done_bytes, ReadBuffer::kSizeBytes - before_bytes);
    read_in_place(block, buffer, up(before_bytes + part_bytes, offset_alignment_),
                  before_bytes + part_bytes);
    std::memcpy(to + done_bytes, buffer + before_bytes, part_bytes);
    done_bytes += part_bytes;
  }
}

void WeightFile::read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                      ReadBuffer& buffer) {
  read_all(offset_bytes, to, size_bytes, buffer);
  check_unchanged();
}

void WeightFile::read_runs(const std::vector<ByteRun>& runs, std::byte* to) {
  std::call_once(opens_cached_, [this] { open_cached(); });
  for (const ByteRun& run : runs) {
    posix_fadvise(cached_file_, static_cast<off_t>(run.offset_bytes),
                  static_cast<off_t>(run.size_bytes), POSIX_FADV_WILLNEED);
  }
  for (const ByteRun& run : runs) {
    std::size_t done_bytes = 0;
    while (done_bytes < run.size_bytes) {
      const ssize_t got = pread(cached_file_, to + done_bytes, run.size_bytes - done_bytes,
                                static_cast<off_t>(run.offset_bytes + done_bytes));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        fail(path_, "reading " + std::to_string(run.size_bytes) + " bytes at offset " +
                        std::to_string(run.offset_bytes) + ": " + std::strerror(errno));
      }
      if (got == 0) fail_short(path_, run.offset_bytes, run.size_bytes, done_bytes);
      done_bytes += static_cast<std::size_t>(got);
    }
    to += run.size_bytes;
  }
  check_unchanged();
}

void WeightFile::check_unchanged() const {
  struct stat now{};
  if (fstat(file_, &now) != 0) fail(path_, std::string("no state: ") + std::strerror(errno));
  if (now.st_size == opened_.st_size && now.st_mtim.tv_sec == opened_.st_mtim.tv_sec &&
      now.st_mtim.tv_nsec == opened_.st_mtim.tv_nsec) {
    return;
  }
  fail(path_,
       "it was written after it was opened: refresh the weights, so that all of them are read "
       "again");
}

void WeightFile::read_all(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                          ReadBuffer& buffer) {
  if (!direct_) return read_in_place(offset_bytes, to, size_bytes, size_bytes);
  std::size_t in_place_bytes = 0;
  if (offset_bytes % offset_alignment_ == 0 &&
      reinterpret_cast<std::uintptr_t>(to) % memory_alignment_ == 0) {
    in_place_bytes = down(size_bytes, offset_alignment_);
    read_in_place(offset_bytes, to, in_place_bytes, in_place_bytes);
  }
  if (in_place_bytes == size_bytes) return;
  read_through(offset_bytes + in_place_bytes, to + in_place_bytes, size_bytes - in_place_bytes,
               buffer.memory());
}

const std::shared_ptr<WeightFile>& WeightFiles::open(const std::string& path) {
  std::shared_ptr<WeightFile>& file = files_[path];
  if (!file) file = std::make_shared<WeightFile>(path);
  return file;
}

void WeightSource::read_runs(const std::vector<ByteRun>& runs, std::byte* to) {
  ReadBuffer buffer;
  for (const ByteRun& run : runs) {
    read(run.offset_bytes, to, run.size_bytes, buffer);
    to += run.size_bytes;
  }
}

void check_source(const WeightPlacement& weight, const WeightSource& source) {
  if (source.size_bytes() == weight.size_bytes) return;
  throw BindingError(weight.name + ": expected a source of " + std::to_string(weight.size_bytes) +
                     " bytes, got " + std::to_string(source.size_bytes()));
}

void check_sources(const StreamPlan& plan,
                   const std::vector<std::shared_ptr<WeightSource>>& sources) {
  if (sources.size() != plan.weights.size()) {
    throw BindingError("expected a source for each of " + std::to_string(plan.weights.size()) +
                       " weights, got " + std::to_string(sources.size()));
  }
  for (std::size_t weight = 0; weight < sources.size(); ++weight) {
    check_source(plan.weights[weight], *sources[weight]);
  }
}

void look_up_sources(const StreamPlan& plan,
                     const std::vector<std::shared_ptr<WeightSource>>& sources,
                     const std::vector<bool>& stale, WeightFiles& files) {
  for (const bool turn : {true, false}) {
    for (std::size_t weight = 0; weight < stale.size(); ++weight) {
      if (stale[weight] != turn || sources[weight] == nullptr) continue;
      try {
        sources[weight]->look_up(files, /*opens=*/turn);
      } catch (const BindingError& error) {
        throw BindingError(plan.weights[weight].name + ": " + error.what());
      } catch (const std::exception& error) {
        throw FileError(plan.weights[weight].name + ": " + error.what());
      }
    }
  }
}

FileSource::FileSource(std::shared_ptr<WeightFile> file, std::size_t offset_bytes,
                       std::size_t size_bytes)
    : file_(std::move(file)), offset_bytes_(offset_bytes), size_bytes_(size_bytes) {
  check_range(*file_);
}

void FileSource::check_range(const WeightFile& file) const {
  const std::size_t file_bytes = file.size_bytes();
  if (offset_bytes_ <= file_bytes && size_bytes_ <= file_bytes - offset_bytes_) return;
  fail_short(file.path(), offset_bytes_, size_bytes_,
             file_bytes - std::min(file_bytes, offset_bytes_));
}

void FileSource::look_up(WeightFiles& files, bool opens) {
  if (!opens && !files.has(file_->path())) return;
  const std::shared_ptr<WeightFile>& file = files.open(file_->path());
  check_range(*file);
  file_ = file;
}

void FileSource::read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                      ReadBuffer& buffer) {
  file_->read(offset_bytes_ + offset_bytes, to, size_bytes, buffer);
}

void FileSource::read_runs(const std::vector<ByteRun>& runs, std::byte* to) {
  std::vector<ByteRun> in_file(runs);
  for (ByteRun& run : in_file) run.offset_bytes += offset_bytes_;
  file_->read_runs(in_file, to);
}

void HeldSource::read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                      ReadBuffer&) {
  std::memcpy(to, memory_.get() + offset_bytes, size_bytes);
}

}  // namespace offload
