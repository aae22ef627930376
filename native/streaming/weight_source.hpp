// Where the bytes of weights come from: a range of a file, or memory that is held.
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

// Memory that unaligned direct reads go through; made when it is first asked for.
//
// Owner: whoever reads. Thread: one at a time. Errors: OutOfMemory.
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
  kBuffered,  // through the page cache: runs of bytes, or the filesystem takes no direct reads
};

// Bytes that lie together in a weight.
struct ByteRun {
  std::size_t offset_bytes = 0;
  std::size_t size_bytes = 0;
};

class WeightFile;
class WeightFiles;

// A file as it is: another one under its path, and itself once it was written, are others. The time
// of the latest change counts as well, as that of the latest write can be set.
struct FileIdentity {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t size_bytes = 0;
  std::int64_t written_ns = 0;
  std::int64_t changed_ns = 0;

  static FileIdentity of(const struct stat& status);
  bool operator<(const FileIdentity& other) const;
};

// Where a weight begins in an open file.
struct FilePlace {
  std::shared_ptr<WeightFile> file;
  std::size_t offset_bytes = 0;
};

// A weight's bytes in the host store.
//
// Owner: the stream. Thread: any; reads of one source may run at once, but not beside look_up.
// Errors: read throws FileError; look_up too, and BindingError for memory that does not fit.
class WeightSource {
 public:
  virtual ~WeightSource() = default;

  // Copies [offset_bytes, offset_bytes + size_bytes) of the weight.
  virtual void read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                    ReadBuffer& buffer) = 0;

  // Copies runs of the weight, one after the other: a few bytes each, which are asked for again and
  // again.
  virtual void read_runs(const std::vector<ByteRun>& runs, std::byte* to);

  // Looks up what it is read from, which may have been replaced, among `files`: at its path, or,
  // unless `opens`, only if that is open there. If it throws, the source stays as it was.
  virtual void look_up(WeightFiles&, bool /*opens*/) {}

  // Whether has_changed can ever say so.
  virtual bool tells_changes() const noexcept { return false; }

  // Whether what it is read from has changed since it was looked up.
  virtual bool has_changed() const noexcept { return false; }

  virtual std::size_t size_bytes() const noexcept = 0;
  virtual ReadMode mode() const noexcept = 0;

  // Where it lies in a file; nothing where it does not.
  virtual std::optional<FilePlace> place() const { return std::nullopt; }
};

// What streams say once they are closed.
inline constexpr const char* kStreamClosed =
    "the executable is closed, or the interpreter is exiting";

// Throws BindingError unless the source has the weight's size.
void check_source(const WeightPlacement& weight, const WeightSource& source);

// Throws BindingError unless each weight has a source of its size.
void check_sources(const StreamPlan& plan,
                   const std::vector<std::shared_ptr<WeightSource>>& sources);

// Looks up the sources of stale weights, and then those of others in the same files. A null source
// has nothing to look up. Throws FileError, and BindingError for memory that does not fit, naming
// the weight.
void look_up_sources(const StreamPlan& plan,
                     const std::vector<std::shared_ptr<WeightSource>>& sources,
                     const std::vector<bool>& stale, WeightFiles& files);

// An open file, read with pread: past the page cache (O_DIRECT) where the filesystem takes it, by
// itself through the cache where it does not. Straight into place where offset and address are
// multiples of what the device asks for, else by way of a buffer.
//
// bench/streaming/read_rates.cpp measured the ways beside a thread that computes (figures in
// docs/design/weight_streaming.md): direct reads into huge pages were the quickest and left the
// processor to the launches; several in flight, of threads or of io_uring, added nothing.
//
// A file that is written while it is open is refused from then on: some of its weights would be
// those of before, others those of now.
//
// Owner: shared by the sources that read from it. Thread: any. Errors: FileError with the path,
// the offset, what was expected and what came.
class WeightFile {
 public:
  explicit WeightFile(std::string path);
  ~WeightFile();
  WeightFile(const WeightFile&) = delete;
  WeightFile& operator=(const WeightFile&) = delete;

  void read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes, ReadBuffer& buffer);

  // Reads ranges of the file, one after the other, through the page cache: rows of a table are
  // smaller than a block, and the same ones come again. Nothing beside them is read. All are asked
  // for before the first is waited for.
  void read_runs(const std::vector<ByteRun>& runs, std::byte* to);

  // Bytes of the file when it is asked.
  std::size_t size_bytes() const;

  // As it was when it was opened.
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
  int cached_file_ = -1;  // the same file, read through the page cache; opened when it is needed
  struct stat opened_{};  // as it was when it was opened
  std::atomic<bool> direct_ = false;
  std::size_t offset_alignment_ = 1;  // of direct reads
  std::size_t memory_alignment_ = 1;
};

// Files by path, each opened once, however many weights it has; and what sources let go of while
// they are looked up, for freeing Python's memory takes the GIL, which no lock may be held for.
//
// Owner: whoever makes or looks up sources. Thread: one at a time. Errors: as WeightFile.
class WeightFiles {
 public:
  const std::shared_ptr<WeightFile>& open(const std::string& path);
  bool has(const std::string& path) const { return files_.count(path) != 0; }
  void keep(std::shared_ptr<const void> memory) { kept_.push_back(std::move(memory)); }

 private:
  std::map<std::string, std::shared_ptr<WeightFile>> files_;
  std::vector<std::shared_ptr<const void>> kept_;
};

// A range of a file. The constructor and look_up throw FileError for a range that ends behind the
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

// Memory that somebody keeps alive for it. Its bytes must not change while they are read.
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
