// Sources of the bytes of weights: a range of a file, or held memory.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "streaming/stream_plan.hpp"

namespace offload {

// The buffer of unaligned direct reads, allocated at first use.
//
// Owner: the reader. Thread: one at a time. Errors: OutOfMemory.
class ReadBuffer {
 public:
  static constexpr std::size_t kSizeBytes = std::size_t{4} << 20;

  ReadBuffer() = default;
  ~ReadBuffer();
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  // Page-aligned, kSizeBytes.
  std::byte* memory();

 private:
  std::byte* memory_ = nullptr;
};

// How a source is read.
enum class ReadMode {
  kMemory,    // copied from memory
  kDirect,    // from the file's device, past the page cache
  kBuffered,  // through the page cache: runs of bytes, or no direct reads on this filesystem
};

// Contiguous bytes of a weight.
struct ByteRun {
  std::size_t offset_bytes = 0;
  std::size_t size_bytes = 0;
};

class WeightFile;
class WeightFiles;

// Identifies a file and its content: another file under its path has another identity, and so has
// the same file once it was written. The time of the latest change counts too, as that of the
// latest write can be set.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t size_bytes = 0;
  std::int64_t written_ns = 0;
  std::int64_t changed_ns = 0;

  static FileIdentity of(const struct stat& status);
  bool operator<(const FileIdentity& other) const;
};

// The position of a weight in an open file.
struct FilePlace {
  std::shared_ptr<WeightFile> file;
  std::size_t offset_bytes = 0;
};

// Where a weight's bytes come from.
//
// Owner: the stream. Thread: any; a source may be read by several threads at once, but not during
// look_up. Errors: read throws FileError; look_up too, and BindingError for memory that does not
// fit.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // Copies [offset_bytes, offset_bytes + size_bytes) of the weight.
  virtual void read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                    ReadBuffer& buffer) = 0;

  // Copies runs of the weight, one after the other: small runs, of which many recur.
  virtual void read_runs(const std::vector<ByteRun>& runs, std::byte* to);

  // Looks up its file or memory, which may have been replaced, among `files`: at its path, or,
  // unless `opens`, only if a file is open there. If it throws, the source is unchanged.
  virtual void look_up(WeightFiles&, bool /*opens*/) {}

  // Whether has_changed can ever return true.
  virtual bool tells_changes() const noexcept { return false; }

  // Whether its file or memory has changed since look_up.
  virtual bool has_changed() const noexcept { return false; }

  virtual std::size_t size_bytes() const noexcept = 0;
  virtual ReadMode mode() const noexcept = 0;

  // Its place in a file; no value if it is not in one.
  virtual std::optional<FilePlace> place() const { return std::nullopt; }
};

// The message of streams once they are closed.
inline constexpr const char* kStreamClosed =
    "the executable is closed, or the interpreter is exiting";

// Throws BindingError unless the source has the weight's size.
void check_source(const WeightPlacement& weight, const WeightSource& source);

// Throws BindingError unless each weight has a source of its size.
void check_sources(const StreamPlan& plan,
                   const std::vector<std::shared_ptr<WeightSource>>& sources);

// Looks up the sources of stale weights, then those of others in the same files. A null source is
// skipped. Throws FileError, and BindingError for memory that does not fit, naming the weight.
void look_up_sources(const StreamPlan& plan,
                     const std::vector<std::shared_ptr<WeightSource>>& sources,
                     const std::vector<bool>& stale, WeightFiles& files);

// An open file, read with pread: past the page cache (O_DIRECT) if the filesystem permits it,
// otherwise through the cache, chosen automatically. Reads go straight to their destination if
// offset and address are multiples of what the device requires, otherwise through a buffer.
//
// bench/streaming/read_rates.cpp measured these ways beside a computing thread (figures in
// docs/design/weight_streaming.md): direct reads into huge pages were the quickest and left the
// processor to the launches; several reads in flight, by threads or io_uring, added nothing.
//
// A file that is written while it is open is refused from then on, since some of its weights would
// be old and others new.
//
// Owner: shared by the sources that read from it. Thread: any. Errors: FileError with the path, the
// offset, what was expected and what was read.
class WeightFile {
 public:
  explicit WeightFile(std::string path);
  ~WeightFile();
  WeightFile(const WeightFile&) = delete;
  WeightFile& operator=(const WeightFile&) = delete;

  void read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes, ReadBuffer& buffer);

  // Reads ranges of the file, one after the other, through the page cache: rows of a table are
  // smaller than a block, and the same rows recur. No other bytes are read. All ranges are
  // requested before the first is waited for.
  void read_runs(const std::vector<ByteRun>& runs, std::byte* to);

  // The current size of the file.
  std::size_t size_bytes() const;

  // Its identity when it was opened.
  FileIdentity identity() const { return FileIdentity::of(opened_); }

  const std::string& path() const noexcept { return path_; }
  bool is_direct() const noexcept { return direct_; }

 private:
  void leave_direct();
  void open_cached();
  void read_all(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                ReadBuffer& buffer);
  void check_unchanged() const;
  void read_in_place(std::size_t offset_bytes, std::byte* to, std::size_t span_bytes,
                     std::size_t needed_bytes);
  void read_through(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                    std::byte* buffer);

  std::string path_;
  int file_ = -1;
  std::once_flag opens_cached_;
  int cached_file_ = -1;  // the same file, read through the page cache; opened on demand
  struct stat opened_{};  // as it was when it was opened
  std::atomic<bool> direct_ = false;
  std::size_t offset_alignment_ = 1;  // of direct reads
  std::size_t memory_alignment_ = 1;
};

// Files by path, each opened once for all its weights; and what sources release during look_up,
// since freeing Python's memory takes the GIL, during which no lock may be held.
//
// Owner: the caller that makes or finds sources. Thread: one at a time. Errors: as WeightFile.
class WeightFiles {
 public:
  const std::shared_ptr<WeightFile>& open(const std::string& path);
  bool has(const std::string& path) const { return files_.count(path) != 0; }
  void keep(std::shared_ptr<const void> memory) { kept_.push_back(std::move(memory)); }

 private:
  std::map<std::string, std::shared_ptr<WeightFile>> files_;
  std::vector<std::shared_ptr<const void>> kept_;
};

// A range of a file. The constructor and look_up throw FileError for a range beyond the end of the
// file.
class FileSource final : public WeightSource {
 public:
  FileSource(std::shared_ptr<WeightFile> file, std::size_t offset_bytes, std::size_t size_bytes);

  void read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
            ReadBuffer& buffer) override;
  void read_runs(const std::vector<ByteRun>& runs, std::byte* to) override;
  void look_up(WeightFiles& files, bool opens) override;
  std::size_t size_bytes() const noexcept override { return size_bytes_; }
  std::optional<FilePlace> place() const override { return FilePlace{file_, offset_bytes_}; }
  ReadMode mode() const noexcept override {
    return file_->is_direct() ? ReadMode::kDirect : ReadMode::kBuffered;
  }

 private:
  void check_range(const WeightFile& file) const;

  std::shared_ptr<WeightFile> file_;
  std::size_t offset_bytes_;
  std::size_t size_bytes_;
};

// Memory that the shared pointer keeps alive. Its bytes must not change while they are read.
class HeldSource final : public WeightSource {
 public:
  HeldSource(std::shared_ptr<const std::byte> memory, std::size_t size_bytes)
      : memory_(std::move(memory)), size_bytes_(size_bytes) {}

  void read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
            ReadBuffer& buffer) override;
  std::size_t size_bytes() const noexcept override { return size_bytes_; }
  ReadMode mode() const noexcept override { return ReadMode::kMemory; }

 private:
  std::shared_ptr<const std::byte> memory_;
  std::size_t size_bytes_;
};

}  // namespace offload
