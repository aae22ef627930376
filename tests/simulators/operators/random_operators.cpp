// Operators that draw random numbers. Every number is a function of seed, offset and position, so
// that a replay whose generator advanced draws others, and the same state draws the same again.
#include <algorithm>
#include <numeric>
#include <vector>

#include "elementwise.hpp"
#include "executor.hpp"

namespace simulated_operators {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
// OOPSLA 2014).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Draws numbers in sequence for one launch.
class Generator {
 public:
  Generator(std::int64_t seed, std::int64_t offset)
      : state_(mix(mix(static_cast<std::uint64_t>(seed)) + static_cast<std::uint64_t>(offset))) {}

  std::uint64_t bits() { return mix(state_ += 0x9e3779b97f4a7c15ULL); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // in [0, 1)
  double normal() {                                                         // Box and Muller 1958
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(6.28318530717958647692 * uniform());
  }

 private:
  std::uint64_t state_;
};

std::int64_t integer_in(const Operand& operand) {
  return loader<std::int64_t>(operand.type)(operand.data);
}

// The state is in the attributes from `first`: seed and offset; or, for graphs, in memory: the
// first two operands, and the attribute is the offset of this launch within the graph.
Generator generator_of(const Launch& launch, std::size_t first) {
  if (launch.operands.size() == 1) {
    return {launch.attributes.at(first).integer(), launch.attributes.at(first + 1).integer()};
  }
  return {integer_in(launch.operands.at(0)),
          integer_in(launch.operands.at(1)) + launch.attributes.at(first).integer()};
}

// Fills the last operand.
template <class Draw>
void fill_with(const Launch& launch, const Draw& draw) {
  const Operand& output = launch.operands.back();
  const auto store_element = storer<double>(output.type);
  const std::array<std::array<std::int64_t, kMaxRank>, 1> strides = {
      broadcast_strides(output, output)};
  walk(output, strides,
       [&](const Offsets<1>& offsets) { store_element(output.data + offsets[0], draw()); });
}

// Attributes: lowest, bound.
void uniform(const Launch& launch) {
  const double lowest = launch.attributes.at(0).real;
  const double range = launch.attributes.at(1).real - lowest;
  Generator generator = generator_of(launch, 2);
  fill_with(launch, [&] { return lowest + range * generator.uniform(); });
}
const Kernel kUniform = {"Uniform", uniform};

const Kernel kIntegers = {
    "Integers", [](const Launch& launch) {
      const std::int64_t lowest = launch.attributes.at(0).integer();
      const auto range = static_cast<std::uint64_t>(launch.attributes.at(1).integer() - lowest);
      Generator generator = generator_of(launch, 2);
      fill_with(launch, [&] {
        return static_cast<double>(lowest + static_cast<std::int64_t>(generator.bits() % range));
      });
    }};

const Kernel kNormal = {"Normal", [](const Launch& launch) {
                          Generator generator = generator_of(launch, 2);
                          fill_with(launch, [&] {
                            return launch.attributes.at(0).real +
                                   launch.attributes.at(1).real * generator.normal();
                          });
                        }};

const Kernel kBernoulli = {
    "Bernoulli", [](const Launch& launch) {
      Generator generator = generator_of(launch, 1);
      fill_with(launch,
                [&] { return generator.uniform() < launch.attributes.at(0).real ? 1.0 : 0.0; });
    }};

// Attributes: n, seed, offset (Fisher and Yates).
void permute(const Launch& launch) {
  Generator generator = generator_of(launch, 1);
  std::vector<double> numbers(static_cast<std::size_t>(launch.attributes.at(0).integer()));
  std::iota(numbers.begin(), numbers.end(), 0.0);
  for (std::size_t i = numbers.size(); i > 1; --i) {
    std::swap(numbers[i - 1], numbers[generator.bits() % i]);
  }
  auto next = numbers.begin();
  fill_with(launch, [&] { return *next++; });
}
const Kernel kRandperm = {"Randperm", permute};

// One bit for every element, set if it is kept, eight to the byte, the first in the lowest.
// Attribute 0: the probability that an element is dropped.
const Kernel kDropoutMask = {"DropoutMask", [](const Launch& launch) {
                               Generator generator = generator_of(launch, 1);
                               fill_with(launch, [&] {
                                 int byte = 0;
                                 for (int bit = 0; bit < 8; ++bit) {
                                   const bool keep =
                                       generator.uniform() >= launch.attributes.at(0).real;
                                   byte |= keep << bit;
                                 }
                                 return static_cast<double>(byte);
                               });
                             }};

// Operands: input, mask, output. Attribute 0: the probability.
void apply_mask(const Launch& launch) {
  const Operand& mask = launch.operands.at(1);
  const double scale = 1 / (1 - launch.attributes.at(0).real);
  Launch elements;
  elements.operands = {launch.operands.at(0), launch.operands.at(2)};
  if (mask.n_elements() * 8 < elements.operands[1].n_elements()) {
    throw std::runtime_error("a mask of too few bits");
  }
  std::int64_t n = 0;
  map<1>(elements, [&](auto x) {
    const auto byte = static_cast<unsigned char>(mask.data[n / 8]);
    const bool keep = ((byte >> (n % 8)) & 1) != 0;
    ++n;
    return keep ? static_cast<double>(x) * scale : 0.0;
  });
}
const Kernel kDropout = {"Dropout", apply_mask};

}  // namespace

OPERATOR(InplaceUniform, kUniform,
         (aclTensor * self, double lowest, double bound, std::uint64_t seed, std::uint64_t offset),
         lowest, bound, seed, offset, self)
OPERATOR(InplaceUniformTensor, kUniform,
         (aclTensor * self, double lowest, double bound, const aclTensor* seed,
          const aclTensor* offset, std::int64_t offset_in_graph),
         seed, offset, lowest, bound, offset_in_graph, self)
OPERATOR(InplaceNormal, kNormal,
         (aclTensor * self, float mean, float deviation, std::int64_t seed, std::int64_t offset),
         mean, deviation, seed, offset, self)
OPERATOR(InplaceNormalTensor, kNormal,
         (aclTensor * self, float mean, float deviation, const aclTensor* seed,
          const aclTensor* offset, std::int64_t offset_in_graph),
         seed, offset, mean, deviation, offset_in_graph, self)
OPERATOR(InplaceRandom, kIntegers,
         (aclTensor * self, std::int64_t lowest, std::int64_t bound, std::int64_t seed,
          std::int64_t offset),
         lowest, bound, seed, offset, self)
OPERATOR(InplaceRandomTensor, kIntegers,
         (aclTensor * self, std::int64_t lowest, std::int64_t bound, const aclTensor* seed,
          const aclTensor* offset, std::int64_t offset_in_graph),
         seed, offset, lowest, bound, offset_in_graph, self)
OPERATOR(InplaceBernoulli, kBernoulli,
         (aclTensor * self, const aclScalar* probability, std::int64_t seed, std::int64_t offset),
         probability, seed, offset, self)
OPERATOR(Randperm, kRandperm,
         (std::int64_t n, std::int64_t seed, std::int64_t offset, aclTensor* out), n, seed, offset,
         out)
OPERATOR(DropoutGenMaskV2, kDropoutMask,
         (const aclIntArray*, double probability, std::int64_t seed, std::int64_t offset, DataType,
          aclTensor* mask),
         probability, seed, offset, mask)
OPERATOR(DropoutGenMaskV2Tensor, kDropoutMask,
         (const aclIntArray*, double probability, const aclTensor* seed, const aclTensor* offset,
          std::int64_t offset_in_graph, DataType, aclTensor* mask),
         seed, offset, probability, offset_in_graph, mask)
OPERATOR(DropoutDoMask, kDropout,
         (const aclTensor* self, const aclTensor* mask, double probability, aclTensor* out), self,
         mask, probability, out)

}  // namespace simulated_operators
