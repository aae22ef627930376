// Fused attention on tensors of batch, head, position and feature ("BNSD").
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "elementwise.hpp"
#include "executor.hpp"

namespace simulated_operators {
namespace {

// Operands in the order of the operator's parameters.
enum : std::size_t {
  kQuery,
  kKey,
  kValue,
  kShift,
  kDropMask,
  kPaddingMask,
  kMask,
  kLargest,
  kSum,
  kSoftmaxOut,
  kOut
};
// Attributes in that order, after the prefix.
enum : std::size_t {
  kPrefix,
  kScale,
  kKeepProbability,
  kTokensBefore,
  kTokensAfter,
  kHeads,
  kLayout,
  kInnerPrecision,
  kSparseMode
};

constexpr std::int64_t kLeftUpCausal = 2;  // later positions are masked out, whatever the mask says

void check(const Launch& launch) {
  std::int64_t layout = 0;
  std::memcpy(&layout, "BNSD", 4);
  const auto given = [&](std::size_t index) { return launch.operands.at(index).is_given(); };
  const std::int64_t sparse_mode = launch.attributes.at(kSparseMode).integer();
  const bool drops = launch.attributes.at(kKeepProbability).real != 1;
  if (launch.attributes.at(kLayout).integer() != layout || given(kShift) || given(kPaddingMask) ||
      given(kDropMask) != drops || (sparse_mode != 0 && sparse_mode != kLeftUpCausal)) {
    throw std::invalid_argument("attention of a kind that the simulator does not have");
  }
  for (const std::size_t index : {kQuery, kKey, kValue, kLargest, kSum, kOut}) {
    if (launch.operands.at(index).rank != 4) throw std::invalid_argument("not of four dimensions");
  }
}

// One element of a tensor of four dimensions.
struct Elements {
  explicit Elements(const Operand& elements)
      : operand(elements),
        load(loader<double>(elements.type)),
        store(storer<double>(elements.type)),
        size(element_bytes(elements.type)) {}
  char* at(std::int64_t b, std::int64_t n, std::int64_t s, std::int64_t d) const {
    const std::int64_t* const strides = operand.strides;
    return operand.data +
           (b * strides[0] + n * strides[1] + s * strides[2] + d * strides[3]) * size;
  }

  Operand operand;
  Load<double> load;
  Store<double> store;
  std::int64_t size;
};

bool is_masked(const Launch& launch, std::int64_t b, std::int64_t n, std::int64_t i,
               std::int64_t j) {
  if (launch.attributes[kSparseMode].integer() == kLeftUpCausal) return j > i;
  const Operand& mask = launch.operands[kMask];
  if (!mask.is_given()) return false;
  const std::int64_t position[4] = {b, n, i, j};
  std::int64_t offset = 0;
  for (std::int64_t dim = 0; dim < mask.rank; ++dim) {
    if (mask.shape[dim] > 1) offset += position[4 - mask.rank + dim] * mask.strides[dim];
  }
  return mask.data[offset] != 0;
}

// Whether dropout keeps a weight: its bit, eight to the byte, the first in the lowest.
bool is_kept(const Launch& launch, std::int64_t b, std::int64_t n, std::int64_t i, std::int64_t j) {
  const Operand& mask = launch.operands[kDropMask];
  if (!mask.is_given()) return true;
  const std::int64_t* const queries = launch.operands[kQuery].shape;
  const std::int64_t n_keys = launch.operands[kKey].shape[2];
  const std::int64_t place = ((b * queries[1] + n) * queries[2] + i) * n_keys + j;
  if (place >= 8 * mask.n_elements()) throw std::runtime_error("a mask of too few bits");
  return ((static_cast<unsigned char>(mask.data[place / 8]) >> (place % 8)) & 1) != 0;
}

// One row of the result: scores, softmax, weighted sum of values.
void attend(const Launch& launch, std::int64_t b, std::int64_t n, std::int64_t i) {
  const Elements query(launch.operands[kQuery]), key(launch.operands[kKey]);
  const Elements value(launch.operands[kValue]), out(launch.operands[kOut]);
  const std::int64_t n_features = query.operand.shape[3];
  const std::int64_t n_keys = key.operand.shape[2];
  const std::int64_t group = n / (query.operand.shape[1] / key.operand.shape[1]);
  std::vector<double> weights(static_cast<std::size_t>(n_keys));
  double largest = -std::numeric_limits<double>::infinity();
  for (std::int64_t j = 0; j < n_keys; ++j) {
    double score = 0;
    for (std::int64_t d = 0; d < n_features; ++d) {
      score += query.load(query.at(b, n, i, d)) * key.load(key.at(b, group, j, d));
    }
    score = is_masked(launch, b, n, i, j) ? -std::numeric_limits<double>::infinity()
                                          : score * launch.attributes[kScale].real;
    weights[static_cast<std::size_t>(j)] = score;
    largest = std::max(largest, score);
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - largest);
  for (std::int64_t j = 0; j < n_keys; ++j) {
    weights[static_cast<std::size_t>(j)] *=
        is_kept(launch, b, n, i, j) ? 1 / launch.attributes[kKeepProbability].real : 0;
  }
  for (std::int64_t d = 0; d < out.operand.shape[3]; ++d) {
    double result = 0;
    for (std::int64_t j = 0; j < n_keys; ++j) {
      result += weights[static_cast<std::size_t>(j)] * value.load(value.at(b, group, j, d));
    }
    out.store(out.at(b, n, i, d), result / sum);
  }
  const Elements largest_out(launch.operands[kLargest]), sum_out(launch.operands[kSum]);
  for (std::int64_t d = 0; d < largest_out.operand.shape[3]; ++d) {
    largest_out.store(largest_out.at(b, n, i, d), largest);
    sum_out.store(sum_out.at(b, n, i, d), sum);
  }
}

const Kernel kAttention = {"FlashAttentionScore",
                           [](const Launch& launch) {
                             const Operand& query = launch.operands.at(kQuery);
                             for (std::int64_t b = 0; b < query.shape[0]; ++b) {
                               for (std::int64_t n = 0; n < query.shape[1]; ++n) {
                                 for (std::int64_t i = 0; i < query.shape[2]; ++i) {
                                   attend(launch, b, n, i);
                                 }
                               }
                             }
                           },
                           check, nullptr, true};

}  // namespace

OPERATOR(FlashAttentionScore, kAttention,
         (const aclTensor* query, const aclTensor* key, const aclTensor* value,
          const aclTensor* shift, const aclTensor* drop_mask, const aclTensor* padding_mask,
          const aclTensor* mask, const aclIntArray* prefix, double scale, double keep_probability,
          std::int64_t tokens_before, std::int64_t tokens_after, std::int64_t n_heads,
          const char* layout, std::int64_t inner_precision, std::int64_t sparse_mode,
          aclTensor* softmax_largest, aclTensor* softmax_sum, aclTensor* softmax_out,
          aclTensor* out),
         query, key, value, shift, drop_mask, padding_mask, mask, prefix, scale, keep_probability,
         tokens_before, tokens_after, n_heads, layout, inner_precision, sparse_mode,
         softmax_largest, softmax_sum, softmax_out, out)

}  // namespace simulated_operators
