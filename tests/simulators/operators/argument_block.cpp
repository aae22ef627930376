#include "argument_block.hpp"

#include <atomic>
#include <cstring>
#include <stdexcept>

namespace simulated_operators {
namespace {

constexpr std::uint64_t kWordBytes = sizeof(std::uint64_t);

std::atomic<std::uint64_t> look_alike{0};

std::atomic<std::uint64_t> padded_parameters{0};
std::atomic<std::uint64_t> n_padded{0};

std::uint64_t look_alike_of(const Launch& launch) {
  for (const Operand& operand : launch.operands) {
    if (operand.data == nullptr) continue;
    std::uint64_t unset = 0;
    look_alike.compare_exchange_strong(unset, reinterpret_cast<std::uint64_t>(operand.data));
    break;
  }
  return look_alike.load();
}

// FNV-1a over words.
std::uint64_t check_sum(const std::uint64_t* words, std::size_t n_words) {
  std::uint64_t sum = 0xcbf29ce484222325ULL;
  for (std::size_t i = 0; i < n_words; ++i) sum = (sum ^ words[i]) * 0x100000001b3ULL;
  return sum;
}

std::uint64_t bits_of(double value) {
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

double real_of(std::uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void append(std::vector<std::uint64_t>& words, const std::int64_t* values, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) words.push_back(static_cast<std::uint64_t>(values[i]));
}

std::vector<std::uint64_t> encode_tiling(const Launch& launch) {
  std::vector<std::uint64_t> words = {0, look_alike_of(launch), launch.workspace_bytes,
                                      launch.operands.size(), launch.attributes.size()};
  for (const Operand& operand : launch.operands) {
    words.push_back(static_cast<std::uint64_t>(operand.type));
    words.push_back(static_cast<std::uint64_t>(operand.rank));
    append(words, operand.shape, operand.rank);
    append(words, operand.strides, operand.rank);
    append(words, &operand.fractals.fractal_columns, 1);
    append(words, &operand.fractals.padded_rows, 1);
    append(words, &operand.fractals.n_columns, 1);
  }
  for (const Attribute& attribute : launch.attributes) {
    words.push_back(attribute.is_real ? 1 : 0);
    words.push_back(bits_of(attribute.real));
    words.push_back(attribute.integers.size());
    append(words, attribute.integers.data(), static_cast<std::int64_t>(attribute.integers.size()));
  }
  words[0] = words.size();  // the count, until the sum replaces it, which covers it
  std::vector<std::uint64_t> tiling = {check_sum(words.data(), words.size())};
  tiling.insert(tiling.end(), words.begin(), words.end());
  return tiling;
}

// Reads words in order, never beyond their end.
class Reader {
 public:
  Reader(const std::uint64_t* words, std::size_t n_words) : next_(words), end_(words + n_words) {}

  std::uint64_t word() {
    if (next_ == end_) throw std::runtime_error("tiling data that ends too early");
    return *next_++;
  }
  std::int64_t integer() { return static_cast<std::int64_t>(word()); }
  void integers(std::int64_t* values, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) values[i] = integer();
  }

 private:
  const std::uint64_t* next_;
  const std::uint64_t* end_;
};

Operand decode_operand(Reader& tiling, std::uint64_t address) {
  Operand operand;
  operand.data = reinterpret_cast<char*>(address);
  operand.type = static_cast<DataType>(tiling.integer());
  operand.rank = tiling.integer();
  if (operand.rank > kMaxRank) throw std::runtime_error("an operand of too many dimensions");
  tiling.integers(operand.shape, operand.rank);
  tiling.integers(operand.strides, operand.rank);
  operand.fractals.fractal_columns = tiling.integer();
  operand.fractals.padded_rows = tiling.integer();
  operand.fractals.n_columns = tiling.integer();
  return operand;
}

Attribute decode_attribute(Reader& tiling) {
  Attribute attribute;
  attribute.is_real = tiling.word() != 0;
  attribute.real = real_of(tiling.word());
  attribute.integers.resize(tiling.word());
  tiling.integers(attribute.integers.data(), static_cast<std::int64_t>(attribute.integers.size()));
  return attribute;
}

}  // namespace

std::int64_t Operand::n_elements() const {
  std::int64_t n = 1;
  for (std::int64_t dim = 0; dim < rank; ++dim) n *= shape[dim];
  return n;
}

std::vector<std::uint64_t> encode(const Launch& launch, std::size_t* tiling_offset_bytes) {
  std::vector<std::uint64_t> block = {0};  // the runtime fills in the address of the tiling data
  for (const Operand& operand : launch.operands) {
    block.push_back(reinterpret_cast<std::uint64_t>(operand.data));
  }
  block.push_back(reinterpret_cast<std::uint64_t>(launch.workspace));
  *tiling_offset_bytes = block.size() * kWordBytes;
  const std::vector<std::uint64_t> tiling = encode_tiling(launch);
  block.insert(block.end(), tiling.begin(), tiling.end());
  if (padded_parameters.load() == launch.operands.size()) {
    block.push_back(++n_padded * 0x9e3779b97f4a7c15ULL);  // stale content of the memory
  }
  return block;
}

Launch decode(const void* block, std::size_t n_bytes) {
  const auto* const words = static_cast<const std::uint64_t*>(block);
  const std::size_t n_words = n_bytes / kWordBytes;
  const auto* const tiling = reinterpret_cast<const std::uint64_t*>(words[0]);
  // The pointer is followed, as on a device: a block that was moved and not relocated is read at
  // its old address. Only the count is not trusted.
  const std::size_t n_tiling_words = tiling[1];
  if (n_tiling_words >= n_words) throw std::runtime_error("tiling data larger than its block");
  if (check_sum(tiling + 1, n_tiling_words) != tiling[0]) {
    throw std::runtime_error("tiling data that somebody changed");
  }
  Reader reader(tiling + 3, n_tiling_words - 2);  // after the count and the look-alike
  Launch launch;
  launch.workspace_bytes = reader.word();
  const std::uint64_t n_operands = reader.word();
  const std::uint64_t n_attributes = reader.word();
  for (std::uint64_t i = 0; i < n_operands; ++i) {
    launch.operands.push_back(decode_operand(reader, words[1 + i]));
  }
  for (std::uint64_t i = 0; i < n_attributes; ++i) {
    launch.attributes.push_back(decode_attribute(reader));
  }
  launch.workspace = reinterpret_cast<char*>(words[1 + n_operands]);
  return launch;
}

void set_padded(std::uint64_t n_operands) { padded_parameters.store(n_operands); }

void set_look_alike(std::uint64_t number) { look_alike.store(number); }

}  // namespace simulated_operators
