// Instances: a program whose sizes vary, at each choice of sizes; cached while there is room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "offload/expressions.hpp"
#include "offload/resident.hpp"
#include "offload/sizes.hpp"
#include "run/call.hpp"

namespace offload {

// All numbers of a program at one choice of sizes.
struct Instance {
  std::vector<std::int64_t> sizes;
  SizedProgram program;
  CallShapes shapes;
  std::size_t size_bytes = 0;
};

// A view with some varying numbers.
struct VaryingView {
  TensorLayout layout;
  std::int64_t offset_bytes = 0;
  std::vector<VaryingNumber> numbers;
};

// The bytes of a Value: fixed, given by an expression, or as many as an input of the call spans.
struct VaryingBytes {
  enum class Source : std::uint8_t { kFixed, kExpression, kInput };
  Source source = Source::kFixed;
  std::size_t number = 0;  // of bytes, of the expression, or of the input
};

struct VaryingResult {
  VaryingView view;
  std::optional<std::size_t> alone_on;  // the Value of an output that no other result shows
};

// The varying parts of a call.
struct VaryingCall {
  std::vector<VaryingView> inputs;
  std::vector<std::size_t> outputs;  // their Values
  std::vector<VaryingResult> results;
};

struct SizedDim {
  std::int64_t minimum = 0;
  std::int64_t maximum = 0;
  std::vector<std::int64_t> bucket_ends;  // ascending; the last is the maximum
};

// Launches that make what depends on sizes alone, as a separate program.
struct SizeConstants {
  std::shared_ptr<Resident> resident;  // with SizeChanges
  std::vector<VaryingBytes> values;
  std::vector<std::pair<std::size_t, std::size_t>> results;  // slot and Value of each, in order
  std::vector<at::Tensor> given;  // memory that the resident was given, which must stay
  // Constants that are made on the host and copied to the resident's device in one piece: its
  // results are the resident's constants. Null: none are.
  std::shared_ptr<const SizeConstants> on_host;
  c10::Device device = c10::kCPU;
};

// Counts of instances so far.
struct InstanceCounts {
  std::uint64_t n_hits = 0;
  std::uint64_t n_misses = 0;
  std::uint64_t n_evicted = 0;
  std::size_t n_kept = 0;
  std::size_t kept_bytes = 0;
  std::size_t n_places = 0;
};

// Makes instances, and keeps the most recently used. The key is the sizes themselves.
//
// Owner: shared by one replay and its calls. Thread: any; instances are made one at a time, and
// cached ones are found meanwhile. No method needs the GIL, and make must be called without it.
class Instances {
 public:
  struct Parts {
    std::vector<SizedDim> dims;
    Expressions numbers;
    std::vector<bool> reals;                       // by number: a real, not an integer
    Expressions conditions;                        // none may be 0
    std::set<std::vector<std::int64_t>> compared;  // sizes for which conditions need not hold
    std::vector<VaryingBytes> values;
    VaryingCall call;
    std::optional<SizeConstants> constants;
    std::shared_ptr<Resident> resident;  // with SizeChanges
    std::size_t budget_bytes = 0;
    // Throws the user's error for sizes that the program does not accept.
    std::function<void(const std::vector<std::int64_t>& sizes)> refuse;
    // Where Values lie for all sizes from `least` to `greatest`; for `sizes` alone if nothing is
    // known of all, as the flag states.
    std::function<std::pair<SizedPlaces, bool>(const std::vector<std::int64_t>& sizes,
                                               const std::vector<std::int64_t>& least,
                                               const std::vector<std::int64_t>& greatest)>
        place;
  };

  // Throws std::invalid_argument for parts that do not match one another.
  explicit Instances(Parts parts);

  // The cached instance of these sizes, or null.
  std::shared_ptr<const Instance> ready(const std::vector<std::int64_t>& sizes);

  // Like ready, but makes a missing instance; sets `found` to how it was obtained. Throws what
  // `refuse` and `place` throw, BindingError for sizes that `refuse` accepts but that cannot be
  // executed, and the errors of launches that make constants.
  std::shared_ptr<const Instance> make(const std::vector<std::int64_t>& sizes, SizesFound& found);

  std::size_t n_dims() const { return parts_.dims.size(); }

  InstanceCounts counts() const;

  // Drops all; calls with an instance continue.
  void clear();

 private:
  using Kept = std::list<std::shared_ptr<const Instance>>;

  std::shared_ptr<const Instance> made(const std::vector<std::int64_t>& sizes);
  bool accepts(const std::vector<std::int64_t>& sizes) const;
  std::vector<Number> evaluated(const std::vector<std::int64_t>& sizes) const;
  CallShapes shapes(const SizedProgram& program) const;
  std::shared_ptr<const SizedPlaces> places_for(const std::vector<std::int64_t>& sizes);
  SizedProgram made_by(const SizeConstants& constants, const std::vector<std::int64_t>& sizes,
                       const SizedProgram& program);
  void keep(std::shared_ptr<const Instance> instance);

  Parts parts_;
  SizeChanges* resident_;
  mutable std::mutex mutex_;
  Kept kept_;  // the latest first
  std::map<std::vector<std::int64_t>, Kept::iterator> found_;
  InstanceCounts counts_;
  std::mutex making_;  // taken before mutex_
  std::map<std::vector<std::size_t>, std::shared_ptr<const SizedPlaces>> places_;
  std::size_t n_places_ = 0;
};

// The layout and the offset in bytes of a view. Throws ExpressionError for negative sizes.
std::pair<TensorLayout, std::int64_t> evaluated(const VaryingView& view,
                                                const std::vector<Number>& numbers);

}  // namespace offload
