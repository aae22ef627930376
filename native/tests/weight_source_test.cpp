#include "streaming/weight_source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"
#include "offload/errors.hpp"

namespace {

using offload::FileSource;
using offload::ReadBuffer;
using offload::ReadMode;
using offload::WeightFiles;
using offload::test::error_of;

constexpr std::size_t kFileBytes = (std::size_t{9} << 20) + 1234;

std::byte pattern(std::size_t at) {
  return static_cast<std::byte>((at * 2654435761u + (at >> 13)) >> 7 & 0xFF);
}

// A file that is deleted at the end of the test.
class File {
 public:
  explicit File(std::size_t size_bytes) {
    const char* const folder = std::getenv("TMPDIR");
    path_ = std::string(folder == nullptr ? "/tmp" : folder) + "/offload_weights_XXXXXX";
    const int file = mkstemp(path_.data());
    std::vector<std::byte> bytes(size_bytes);
    for (std::size_t at = 0; at < size_bytes; ++at) bytes[at] = pattern(at);
    std::size_t written = 0;
    while (written < size_bytes) {
      const ssize_t now = write(file, bytes.data() + written, size_bytes - written);
      if (now <= 0) std::abort();
      written += static_cast<std::size_t>(now);
    }
    close(file);
  }
  ~File() { unlink(path_.c_str()); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Ranges of all alignments, through the device and the page cache, into memory of all alignments;
// nothing outside the range is written.
void ranges_are_read_exactly(const std::string& path, std::size_t file_bytes) {
  WeightFiles files;
  const auto file = files.open(path);
  CHECK_THAT(files.open(path) == file);
  ReadBuffer buffer;
  const std::size_t most_bytes = ReadBuffer::kSizeBytes + 3 * 4096;
  std::vector<std::byte> memory(most_bytes + 8192 + 64);
  auto* const pages = reinterpret_cast<std::byte*>(
      (reinterpret_cast<std::uintptr_t>(memory.data()) + 4095) / 4096 * 4096);
  for (const std::size_t offset : {0ul, 8ul, 511ul, 512ul, 4096ul, 5000ul, 8192ul}) {
    for (const std::size_t size : {1ul, 511ul, 512ul, 4096ul, 10000ul, 1ul << 20, most_bytes}) {
      for (const std::size_t shift : {0ul, 1ul, 64ul}) {
        if (offset + size > file_bytes) continue;
        std::fill(memory.begin(), memory.end(), std::byte{0x55});
        FileSource source(file, offset, size);
        CHECK_THAT(source.size_bytes() == size);
        source.read(0, pages + shift, size, buffer);
        bool equal = true;
        for (std::size_t at = 0; at < size; ++at) {
          equal = equal && pages[shift + at] == pattern(offset + at);
        }
        CHECK_THAT(equal);
        CHECK_THAT(pages[shift + size] == std::byte{0x55});
        if (shift > 0) CHECK_THAT(pages[shift - 1] == std::byte{0x55});
      }
    }
  }
  // The last bytes, which do not fill a block.
  FileSource tail(file, file_bytes - 100, 100);
  tail.read(0, pages, 100, buffer);
  CHECK_THAT(pages[0] == pattern(file_bytes - 100));
  CHECK_THAT(pages[99] == pattern(file_bytes - 1));
  tail.read(90, pages, 10, buffer);
  CHECK_THAT(pages[9] == pattern(file_bytes - 1));
}

void truncated_files_are_told() {
  const File file(100'000);
  WeightFiles files;
  const auto opened = files.open(file.path());
  FileSource source(opened, 8, 90'000);
  CHECK_THAT(has(error_of<offload::FileError>([&] { FileSource(opened, 20'000, 90'000); }),
                 "expected 90000 bytes at offset 20000, got 80000"));
  CHECK_THAT(has(error_of<offload::FileError>([&] { FileSource(opened, 200'000, 1); }), "got 0"));
  if (truncate(file.path().c_str(), 50'000) != 0) std::abort();
  ReadBuffer buffer;
  std::vector<std::byte> memory(90'000);
  const std::string error =
      error_of<offload::FileError>([&] { source.read(0, memory.data(), 90'000, buffer); });
  CHECK_THAT(has(error, file.path()));
  CHECK_THAT(has(error, "got 50000"));
  // What exists could be read, but may be newer than what was read before.
  const std::string later =
      error_of<offload::FileError>([&] { source.read(0, memory.data(), 49'992, buffer); });
  CHECK_THAT(has(later, file.path() + ": it was written after it was opened"));
  CHECK_THAT(has(error_of<offload::FileError>([&] {
                   WeightFiles anew;
                   source.look_up(anew, /*opens=*/true);
                 }),
                 "the file is too short"));
}

// Runs of bytes, one after the other, at any offset; nothing outside them is written.
void runs_are_read_exactly() {
  const File file(100'000);
  WeightFiles files;
  FileSource source(files.open(file.path()), 1000, 90'000);
  const std::vector<offload::ByteRun> runs{
      {5, 700}, {89'999, 1}, {5, 3}, {4096, 0}, {40'000, 9000}};
  std::vector<std::byte> memory(700 + 1 + 3 + 9000 + 1, std::byte{0x55});
  for (int turn = 0; turn < 2; ++turn) {
    source.read_runs(runs, memory.data());
    const std::byte* at = memory.data();
    bool equal = true;
    for (const offload::ByteRun& run : runs) {
      for (std::size_t byte = 0; byte < run.size_bytes; ++byte) {
        equal = equal && *at++ == pattern(1000 + run.offset_bytes + byte);
      }
    }
    CHECK_THAT(equal);
    CHECK_THAT(memory.back() == std::byte{0x55});
    unlink(file.path().c_str());  // from the second turn on the file has no path
  }
  offload::HeldSource held({memory.data(), [](const std::byte*) {}}, memory.size());
  std::byte to[4] = {};
  held.read_runs({{2, 2}, {0, 2}}, to);
  CHECK_THAT(to[0] == memory[2] && to[1] == memory[3] && to[2] == memory[0] && to[3] == memory[1]);
}

void runs_of_files_that_change_are_told() {
  const File file(100'000);
  WeightFiles files;
  FileSource source(files.open(file.path()), 8, 90'000);
  std::vector<std::byte> memory(1000);
  if (truncate(file.path().c_str(), 50'000) != 0) std::abort();
  const std::string error = error_of<offload::FileError>(
      [&] { source.read_runs({{8, 8}, {49'900, 500}}, memory.data()); });
  CHECK_THAT(has(error, file.path() + ": expected 500 bytes at offset 49908, got 92"));
  CHECK_THAT(has(error_of<offload::FileError>([&] { source.read_runs({{8, 8}}, memory.data()); }),
                 file.path() + ": it was written after it was opened"));
  if (truncate(file.path().c_str(), 100'000) != 0) std::abort();
  WeightFiles anew;
  source.look_up(anew, /*opens=*/true);
  source.read_runs({{49'900, 500}}, memory.data());
  CHECK_THAT(memory[0] == pattern(49'908) && memory[499] == std::byte{0});
}

void what_is_no_file_is_refused() {
  CHECK_THAT(has(error_of<offload::FileError>([] { WeightFiles().open("/nowhere/at/all"); }),
                 "cannot be opened"));
  CHECK_THAT(has(error_of<offload::FileError>([] { WeightFiles().open("/tmp"); }), "regular file"));
  CHECK_THAT(
      has(error_of<offload::FileError>([] { WeightFiles().open("/dev/null"); }), "regular file"));
}

// A path that names another file is looked up again on request.
void replaced_files_are_looked_up() {
  const File file(5000);
  WeightFiles files;
  FileSource source(files.open(file.path()), 0, 5000);
  const std::string other = file.path() + ".new";
  const int made = open(other.c_str(), O_WRONLY | O_CREAT, 0600);
  const std::vector<char> sevens(5000, 7);
  if (write(made, sevens.data(), sevens.size()) != 5000) std::abort();
  close(made);
  if (rename(other.c_str(), file.path().c_str()) != 0) std::abort();
  ReadBuffer buffer;
  std::vector<std::byte> memory(5000);
  source.read(0, memory.data(), 5000, buffer);
  CHECK_THAT(memory[1] == pattern(1));
  WeightFiles anew;
  source.look_up(anew, /*opens=*/true);
  source.read(0, memory.data(), 5000, buffer);
  CHECK_THAT(memory[1] == std::byte{7} && memory[4999] == std::byte{7});
}

void files_that_are_gone_are_told_with_their_weight() {
  offload::StreamPlan plan;
  plan.weights.push_back({"head", 5000, {{0, 5000, 0, false}}});
  std::vector<std::shared_ptr<offload::WeightSource>> sources;
  {
    const File file(5000);
    WeightFiles files;
    sources.push_back(std::make_shared<FileSource>(files.open(file.path()), 0, 5000));
    WeightFiles anew;
    offload::look_up_sources(plan, sources, {true}, anew);
  }
  WeightFiles anew;
  const std::string error =
      error_of<offload::FileError>([&] { offload::look_up_sources(plan, sources, {true}, anew); });
  CHECK_THAT(has(error, "head: ") && has(error, "cannot be opened"));
}

// The kernel's own files permit no direct reads.
void filesystems_without_direct_reads_work() {
  WeightFiles files;
  const auto file = files.open("/proc/self/maps");
  CHECK_THAT(!file->is_direct());
  ReadBuffer buffer;
  std::vector<std::byte> memory(100);
  file->read(10, memory.data(), 20, buffer);
  CHECK_THAT(memory[0] != std::byte{0});
  CHECK_THAT(FileSource(file, 0, 0).mode() == ReadMode::kBuffered);
}

void held_memory_is_copied() {
  const std::shared_ptr<const std::byte> memory(
      new std::byte[4]{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}},
      std::default_delete<std::byte[]>());
  offload::HeldSource source(memory, 4);
  ReadBuffer buffer;
  std::byte to[2] = {};
  source.read(1, to, 2, buffer);
  CHECK_THAT(to[0] == std::byte{2} && to[1] == std::byte{3});
  CHECK_THAT(source.mode() == ReadMode::kMemory);
}

}  // namespace

int main() {
  {
    const File file(kFileBytes);
    ranges_are_read_exactly(file.path(), kFileBytes);
  }
  truncated_files_are_told();
  runs_are_read_exactly();
  runs_of_files_that_change_are_told();
  what_is_no_file_is_refused();
  replaced_files_are_looked_up();
  files_that_are_gone_are_told_with_their_weight();
  filesystems_without_direct_reads_work();
  held_memory_is_copied();
  return offload::test::result();
}
