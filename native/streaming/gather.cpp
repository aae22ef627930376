// Gathering rows of weights that have no place in the weight memory.
#include "offload/clock.hpp"
#include "offload/errors.hpp"
#include "streaming/weight_stream.hpp"

namespace offload {
namespace {

// The offset of a row in its weight. The error uses the words of torch's kernel.
std::size_t row_offset(const std::string& name, const RowTable& table, std::int64_t index) {
  if (index < 0 || static_cast<std::uint64_t>(index) >= table.n_rows) {
    throw ExecutionError("index out of range in self: the table in " + name + " has " +
                         std::to_string(table.n_rows) + " rows, got index " +
                         std::to_string(index));
  }
  return table.offset_bytes + static_cast<std::size_t>(index) * table.row_bytes;
}

}  // namespace

void WeightStream::note_wait(std::size_t launch, std::uint64_t begin_ns, std::uint64_t end_ns) {
  report_.wait_ns += end_ns - begin_ns;
  wait_ns_ += end_ns - begin_ns;
  if (traced_pass_) report_.waits.push_back({launch, begin_ns, end_ns});
}

// A fork needs no lock here: it happens between passes, and the processor copies what is read
// through the page cache.
void WeightStream::gather(std::size_t launch, const RowTable& table,
                          const std::vector<std::int64_t>& indices, std::byte* to) {
  const std::string& name = plan_.weights[table.weight].name;
  const std::uint64_t begin_ns = now_ns();
  runs_.clear();
  for (const std::int64_t index : indices) {
    const std::size_t offset_bytes = row_offset(name, table, index);
    if (!runs_.empty() && runs_.back().offset_bytes + runs_.back().size_bytes == offset_bytes) {
      runs_.back().size_bytes += table.row_bytes;
    } else {
      runs_.push_back({offset_bytes, table.row_bytes});
    }
  }
  try {
    content_.source(table.weight)->read_runs(runs_, to);
  } catch (const std::exception& error) {
    throw ExecutionError(name + ": " + error.what());
  }
  const std::uint64_t end_ns = now_ns();
  const std::uint64_t size_bytes = indices.size() * table.row_bytes;
  gathered_bytes_ += size_bytes;
  gather_ns_ += end_ns - begin_ns;
  bytes_moved_ += size_bytes;
  busy_ns_ += end_ns - begin_ns;
  note_wait(launch, begin_ns, end_ns);
}

void WeightStream::read_rows(const RowTable& table, const std::vector<std::int64_t>& indices,
                             std::byte* to) {
  const std::string& name = plan_.weights[table.weight].name;
  ReadBuffer buffer;
  for (const std::int64_t index : indices) {
    const std::size_t offset_bytes = row_offset(name, table, index);
    const std::lock_guard lock(read_mutex_);
    try {
      content_.source(table.weight)->read(offset_bytes, to, table.row_bytes, buffer);
    } catch (const std::exception& error) {
      throw ExecutionError(name + ": " + error.what());
    }
    to += table.row_bytes;
  }
}

}  // namespace offload
