// Operators along dimensions: softmax, normalisation, sums and extremes.
#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "elementwise.hpp"
#include "executor.hpp"

namespace simulated_operators {
namespace {

// A tensor seen as rows along some of its dimensions: every row is read and written as doubles, so
// that its order of summation does not show in single precision.
class Rows {
 public:
  // `is_along[dim]`: the dimensions that one row runs along.
  Rows(const Operand& operand, const std::vector<bool>& is_along)
      : load_(loader<double>(operand.type)),
        store_(storer<double>(operand.type)),
        data_(operand.data),
        starts_(offsets(operand, is_along, false)),
        elements_(offsets(operand, is_along, true)) {}

  std::size_t n_rows() const { return starts_.size(); }
  std::size_t n_columns() const { return elements_.size(); }
  double at(std::size_t row, std::size_t column) const {
    return load_(data_ + starts_[row] + elements_[column]);
  }
  void set(std::size_t row, std::size_t column, double value) const {
    store_(data_ + starts_[row] + elements_[column], value);
  }

 private:
  static std::vector<std::int64_t> offsets(const Operand& operand,
                                           const std::vector<bool>& is_along, bool along) {
    std::vector<std::int64_t> result = {0};
    for (std::int64_t dim = 0; dim < operand.rank; ++dim) {
      if (is_along[static_cast<std::size_t>(dim)] != along) continue;
      std::vector<std::int64_t> next;
      for (const std::int64_t offset : result) {
        for (std::int64_t i = 0; i < operand.shape[dim]; ++i) {
          next.push_back(offset + i * operand.strides[dim] * element_bytes(operand.type));
        }
      }
      result = std::move(next);
    }
    return result;
  }

  Load<double> load_;
  Store<double> store_;
  char* data_;
  std::vector<std::int64_t> starts_;
  std::vector<std::int64_t> elements_;
};

// The dimensions that an attribute names; an empty list means all. Throws std::invalid_argument for
// a dimension that the operand does not have.
std::vector<bool> dimensions_of(const Operand& operand, const std::vector<std::int64_t>& dims) {
  std::vector<bool> is_along(static_cast<std::size_t>(operand.rank), dims.empty());
  for (const std::int64_t dim : dims) {
    const std::int64_t wrapped = dim < 0 ? dim + operand.rank : dim;
    if (operand.rank == 0 && (dim == 0 || dim == -1)) continue;
    if (wrapped < 0 || wrapped >= operand.rank) {
      throw std::invalid_argument("a dimension that the tensor does not have");
    }
    is_along[static_cast<std::size_t>(wrapped)] = true;
  }
  return is_along;
}

void softmax(const Launch& launch, bool logarithm) {
  const std::vector<bool> along =
      dimensions_of(launch.operands.at(0), launch.attributes.front().integers);
  const Rows input(launch.operands.at(0), along);
  const Rows output(launch.operands.at(1), along);
  for (std::size_t row = 0; row < input.n_rows(); ++row) {
    double largest = -std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < input.n_columns(); ++i)
      largest = std::max(largest, input.at(row, i));
    double sum = 0;
    for (std::size_t i = 0; i < input.n_columns(); ++i) sum += std::exp(input.at(row, i) - largest);
    for (std::size_t i = 0; i < input.n_columns(); ++i) {
      const double shifted = input.at(row, i) - largest;
      output.set(row, i, logarithm ? shifted - std::log(sum) : std::exp(shifted) / sum);
    }
  }
}

const Kernel kSoftmax = {"Softmax", [](const Launch& launch) { softmax(launch, false); },
                         check_broadcast};
const Kernel kLogSoftmax = {"LogSoftmax", [](const Launch& launch) { softmax(launch, true); },
                            check_broadcast};

// Operands: input, weight, bias, output, mean, reciprocal deviation; all but input and output may
// be left out. Attributes: the normalised shape, epsilon.
void layer_norm(const Launch& launch) {
  const Operand& input_operand = launch.operands.at(0);
  const auto n_normalised = launch.attributes.at(0).integers.size();
  std::vector<bool> along(static_cast<std::size_t>(input_operand.rank), false);
  std::fill(along.end() - static_cast<std::ptrdiff_t>(n_normalised), along.end(), true);
  const auto rows_of = [&](std::size_t index, const std::vector<bool>& dims) {
    const Operand& operand = launch.operands.at(index);
    return operand.is_given() ? std::make_unique<Rows>(operand, dims) : nullptr;
  };
  const std::vector<bool> all(kMaxRank, true), none(kMaxRank, false);
  const auto input = rows_of(0, along), weight = rows_of(1, all), bias = rows_of(2, all);
  const auto output = rows_of(3, along), mean_out = rows_of(4, none), scale_out = rows_of(5, none);
  const auto n = input->n_columns();
  for (std::size_t row = 0; row < input->n_rows(); ++row) {
    double sum = 0, squares = 0;
    for (std::size_t i = 0; i < n; ++i) sum += input->at(row, i);
    const double mean = sum / static_cast<double>(n);
    for (std::size_t i = 0; i < n; ++i) squares += std::pow(input->at(row, i) - mean, 2);
    const double scale =
        1 / std::sqrt(squares / static_cast<double>(n) + launch.attributes.at(1).real);
    for (std::size_t i = 0; i < n; ++i) {
      const double normalised = (input->at(row, i) - mean) * scale;
      output->set(row, i,
                  normalised * (weight ? weight->at(0, i) : 1) + (bias ? bias->at(0, i) : 0));
    }
    if (mean_out) mean_out->set(row, 0, mean);
    if (scale_out) scale_out->set(row, 0, scale);
  }
}

void check_layer_norm(const Launch& launch) {
  const auto n_normalised = static_cast<std::int64_t>(launch.attributes.at(0).integers.size());
  if (!launch.operands.at(0).is_given() || !launch.operands.at(3).is_given() ||
      n_normalised > launch.operands[0].rank) {
    throw std::invalid_argument("a norm without input, without output, or of too many dimensions");
  }
}
const Kernel kLayerNorm = {"LayerNorm", layer_norm, check_layer_norm, nullptr, true};

// Folds every row of the input into one element of the output. Attribute 0: the dimensions.
template <class Step, class Finish>
void reduce(const Launch& launch, double initial, const Step& step, const Finish& finish) {
  const Operand& input_operand = launch.operands.front();
  const Operand& output_operand = launch.operands.back();
  const Rows input(
      input_operand,
      dimensions_of(input_operand, launch.attributes.empty() ? std::vector<std::int64_t>()
                                                             : launch.attributes.front().integers));
  const Rows output(output_operand, std::vector<bool>(kMaxRank, false));
  if (output.n_rows() != input.n_rows()) throw std::runtime_error("a result of another size");
  for (std::size_t row = 0; row < input.n_rows(); ++row) {
    double value = initial;
    for (std::size_t i = 0; i < input.n_columns(); ++i) value = step(value, input.at(row, i));
    output.set(row, 0, finish(value, static_cast<double>(input.n_columns())));
  }
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kAsIs = [](double value, double) { return value; };

const Kernel kSum = {"Sum", [](const Launch& launch) {
                       reduce(launch, 0, [](double a, double x) { return a + x; }, kAsIs);
                     }};
const Kernel kMean = {"Mean", [](const Launch& launch) {
                        reduce(
                            launch, 0, [](double a, double x) { return a + x; },
                            [](double sum, double n) { return sum / n; });
                      }};
const Kernel kLargest = {
    "Largest", [](const Launch& launch) {
      reduce(launch, -kInfinity, [](double a, double x) { return x > a || x != x ? x : a; }, kAsIs);
    }};
const Kernel kSmallest = {
    "Smallest", [](const Launch& launch) {
      reduce(launch, kInfinity, [](double a, double x) { return x < a || x != x ? x : a; }, kAsIs);
    }};
const Kernel kAll = {"All", [](const Launch& launch) {
                       reduce(launch, 1, [](double a, double x) { return a * (x != 0); }, kAsIs);
                     }};
const Kernel kAny = {"Any", [](const Launch& launch) {
                       reduce(
                           launch, 0, [](double a, double x) { return a + (x != 0); },
                           [](double n, double) { return n > 0 ? 1.0 : 0.0; });
                     }};

// Operands: two inputs of one shape, whether all their elements are equal.
const Kernel kEqual = {
    "Equal", [](const Launch& launch) {
      const Operand &one = launch.operands.at(0), &other = launch.operands.at(1);
      bool equal = true;
      with_arithmetic(launch, [&](auto zero) {
        const auto load = loader<decltype(zero)>(one.type);
        walk<2>(one, {broadcast_strides(one, one), broadcast_strides(other, one)},
                [&](const Offsets<2>& at) {
                  equal = equal && load(one.data + at[0]) == load(other.data + at[1]);
                });
      });
      storer<double>(launch.operands.at(2).type)(launch.operands.at(2).data, equal ? 1.0 : 0.0);
    }};

// Operands: input, the extreme of each row unless the operator leaves it out, and its index in the
// row: the first of equal ones.
template <class Beats>
void find_extremes(const Launch& launch, const Beats& beats) {
  const Operand& input_operand = launch.operands.front();
  const Rows input(input_operand, dimensions_of(input_operand, launch.attributes.front().integers));
  const std::vector<bool> none(kMaxRank, false);
  const Rows places(launch.operands.back(), none);
  for (std::size_t row = 0; row < input.n_rows(); ++row) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < input.n_columns(); ++i) {
      if (beats(input.at(row, i), input.at(row, best))) best = i;
    }
    places.set(row, 0, static_cast<double>(best));
    if (launch.operands.size() == 3) {
      Rows(launch.operands[1], none).set(row, 0, input.at(row, best));
    }
  }
}
const Kernel kFindLargest = {"FindLargest", [](const Launch& launch) {
                               find_extremes(launch, [](double a, double b) { return a > b; });
                             }};
const Kernel kFindSmallest = {"FindSmallest", [](const Launch& launch) {
                                find_extremes(launch, [](double a, double b) { return a < b; });
                              }};

// Attributes: dimensions, and the number subtracted from the number of elements.
void variance(const Launch& launch) {
  const Operand& input_operand = launch.operands.front();
  const Rows input(input_operand, dimensions_of(input_operand, launch.attributes.front().integers));
  const Rows output(launch.operands.back(), std::vector<bool>(kMaxRank, false));
  const auto n = static_cast<double>(input.n_columns());
  for (std::size_t row = 0; row < input.n_rows(); ++row) {
    double sum = 0, squares = 0;
    for (std::size_t i = 0; i < input.n_columns(); ++i) sum += input.at(row, i);
    for (std::size_t i = 0; i < input.n_columns(); ++i) {
      squares += std::pow(input.at(row, i) - sum / n, 2);
    }
    output.set(row, 0, squares / (n - launch.attributes.at(1).real));
  }
}
const Kernel kVariance = {"Variance", variance};

const Kernel kCumulativeSum = {"CumulativeSum", [](const Launch& launch) {
                                 const auto along = dimensions_of(
                                     launch.operands[0], launch.attributes.front().integers);
                                 const Rows input(launch.operands.at(0), along);
                                 const Rows output(launch.operands.at(1), along);
                                 for (std::size_t row = 0; row < input.n_rows(); ++row) {
                                   double sum = 0;
                                   for (std::size_t i = 0; i < input.n_columns(); ++i) {
                                     output.set(row, i, sum += input.at(row, i));
                                   }
                                 }
                               }};

}  // namespace

OPERATOR(Softmax, kSoftmax, (const aclTensor* self, std::int64_t dim, aclTensor* out), self, dim,
         out)
OPERATOR(LogSoftmax, kLogSoftmax, (const aclTensor* self, std::int64_t dim, aclTensor* out), self,
         dim, out)
OPERATOR(LayerNorm, kLayerNorm,
         (const aclTensor* input, const aclIntArray* normalised_shape, const aclTensor* weight,
          const aclTensor* bias, double epsilon, aclTensor* out, aclTensor* mean,
          aclTensor* reciprocal_deviation),
         input, normalised_shape, weight, bias, epsilon, out, mean, reciprocal_deviation)
OPERATOR(ReduceSum, kSum,
         (const aclTensor* self, const aclIntArray* dims, bool, DataType, aclTensor* out), self,
         dims, out)
OPERATOR(Mean, kMean,
         (const aclTensor* self, const aclIntArray* dims, bool, DataType, aclTensor* out), self,
         dims, out)
OPERATOR(Amax, kLargest, (const aclTensor* self, const aclIntArray* dims, bool, aclTensor* out),
         self, dims, out)
OPERATOR(Amin, kSmallest, (const aclTensor* self, const aclIntArray* dims, bool, aclTensor* out),
         self, dims, out)
OPERATOR(All, kAll, (const aclTensor* self, const aclIntArray* dims, bool, aclTensor* out), self,
         dims, out)
OPERATOR(Any, kAny, (const aclTensor* self, const aclIntArray* dims, bool, aclTensor* out), self,
         dims, out)
OPERATOR(Equal, kEqual, (const aclTensor* self, const aclTensor* other, aclTensor* out), self,
         other, out)
OPERATOR(Max, kLargest, (const aclTensor* self, aclTensor* out), self, out)
OPERATOR(Min, kSmallest, (const aclTensor* self, aclTensor* out), self, out)
OPERATOR(ArgMax, kFindLargest, (const aclTensor* self, std::int64_t dim, bool, aclTensor* out),
         self, dim, out)
OPERATOR(MaxDim, kFindLargest,
         (const aclTensor* self, std::int64_t dim, bool, aclTensor* out, aclTensor* indices), self,
         dim, out, indices)
OPERATOR(MinDim, kFindSmallest,
         (const aclTensor* self, std::int64_t dim, bool, aclTensor* out, aclTensor* indices), self,
         dim, out, indices)
OPERATOR(VarCorrection, kVariance,
         (const aclTensor* self, const aclIntArray* dims, std::int64_t correction, bool,
          aclTensor* out),
         self, dims, correction, out)
OPERATOR(Cumsum, kCumulativeSum,
         (const aclTensor* self, std::int64_t dim, DataType, aclTensor* out), self, dim, out)

}  // namespace simulated_operators
