#include "run/instances.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "offload/clock.hpp"
#include "offload/errors.hpp"
#include "run/device_storages.hpp"
#include "run/kernel_scope.hpp"

namespace offload {
namespace {

std::int64_t number_at(const std::vector<Number>& numbers, std::size_t expression) {
  return numbers[expression].integer;
}

// By Value. `inputs` are those of the call, for Values that are inputs.
std::vector<std::size_t> values_bytes(const std::vector<VaryingBytes>& values,
                                      const std::vector<Number>& numbers,
                                      const std::vector<TensorLayout>& inputs) {
  std::vector<std::size_t> found;
  found.reserve(values.size());
  for (const auto& [source, number] : values) {
    if (source == VaryingBytes::Source::kExpression) {
      const std::int64_t n_bytes = number_at(numbers, number);
      if (n_bytes < 0) throw ExpressionError("a value has fewer than 0 bytes");
      found.push_back(static_cast<std::size_t>(n_bytes));
    } else {
      found.push_back(source == VaryingBytes::Source::kFixed ? number
                                                             : inputs.at(number).span_bytes());
    }
  }
  return found;
}

std::size_t bytes_of(const TensorLayout& layout) {
  std::int64_t n_items = 1;
  for (const std::int64_t size : layout.shape) n_items *= size;
  return static_cast<std::size_t>(n_items) * c10::elementSize(layout.dtype);
}

// For sizes that `refuse` has accepted.
[[noreturn]] void refuse_all(const ExpressionError& error) {
  throw BindingError(std::string("the program cannot be executed at these sizes: ") + error.what() +
                     "; capture the model for them alone, and report this");
}

// Copies the host tensors of constants to a device in one piece. Each begins at a multiple of the
// alignment that any device's operators require.
std::vector<c10::Storage> copied_to(c10::Device device, const SizedProgram& made) {
  constexpr std::size_t kAlignmentBytes = 512;
  std::vector<std::size_t> offsets_bytes;
  std::size_t size_bytes = 0;
  for (const c10::Storage& one : made.constants) {
    offsets_bytes.push_back(size_bytes);
    size_bytes += (one.nbytes() + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  }
  const KernelScope scope;
  const auto n_bytes = static_cast<std::int64_t>(size_bytes);
  const at::Tensor host = at::empty({n_bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  for (std::size_t index = 0; index < made.constants.size(); ++index) {
    std::memcpy(host.mutable_data_ptr<std::uint8_t>() + offsets_bytes[index],
                made.constants[index].data(), made.constants[index].nbytes());
  }
  const auto whole = std::make_shared<const at::Tensor>(
      at::empty({n_bytes}, at::TensorOptions(at::kByte).device(device)));
  whole->copy_(host, /*non_blocking=*/true);
  std::vector<c10::Storage> parts;
  for (std::size_t index = 0; index < made.constants.size(); ++index) {
    auto holder = std::make_unique<std::shared_ptr<const at::Tensor>>(whole);
    auto* const begin = static_cast<std::byte*>(whole->mutable_data_ptr()) + offsets_bytes[index];
    c10::DataPtr part(
        begin, holder.release(),
        [](void* held) { delete static_cast<std::shared_ptr<const at::Tensor>*>(held); }, device);
    parts.push_back(make_storage(device, made.constants[index].nbytes(), std::move(part)));
  }
  return parts;
}

std::size_t memory_of(const Instance& instance) {
  const SizedProgram& program = instance.program;
  std::size_t n_bytes = sizeof(Instance) + program.numbers.size() * sizeof(Number) +
                        program.values_bytes.size() * sizeof(std::size_t);
  for (const TensorLayout& input : instance.shapes.inputs) {
    n_bytes += sizeof input + 2 * sizeof(std::int64_t) * input.shape.size();
  }
  for (const ResultShape& result : instance.shapes.results) {
    n_bytes += sizeof result + 2 * sizeof(std::int64_t) * result.layout.shape.size();
  }
  if (program.places.use_count() == 1) {  // of no bucket, but of these sizes alone
    n_bytes += sizeof(SizedPlaces) + program.places->offsets_bytes.size() * sizeof(std::int64_t) +
               program.places->rooms_bytes.size() * sizeof(std::size_t);
  }
  if (program.work) n_bytes += program.work->size_bytes;
  return n_bytes;
}

}  // namespace

std::pair<TensorLayout, std::int64_t> evaluated(const VaryingView& view,
                                                const std::vector<Number>& numbers) {
  std::pair<TensorLayout, std::int64_t> found(view.layout, view.offset_bytes);
  auto& [layout, offset_bytes] = found;
  const std::size_t n_axes = layout.shape.size();
  for (const auto& [position, expression] : view.numbers) {
    const std::int64_t number = number_at(numbers, expression);
    if (number < 0) throw ExpressionError("a size, a stride or an offset is below 0");
    if (position < n_axes) {
      layout.shape[position] = number;
    } else if (position < 2 * n_axes) {
      layout.strides[position - n_axes] = number;
    } else {
      offset_bytes = number;
    }
  }
  const bool is_empty =
      std::find(layout.shape.begin(), layout.shape.end(), 0) != layout.shape.end();
  if (is_empty) offset_bytes = 0;
  return found;
}

Instances::Instances(Parts parts) : parts_(std::move(parts)) {
  const auto refuse = [](const char* what) { throw std::invalid_argument(what); };
  resident_ = parts_.resident->size_changes();
  if (resident_ == nullptr) refuse("sizes vary of a resident that does not take others");
  if (parts_.reals.size() != parts_.numbers.size()) refuse("each number is a real or not");
  for (const SizedDim& dim : parts_.dims) {
    if (dim.bucket_ends.empty() || dim.bucket_ends.back() < dim.maximum) {
      refuse("a size may be beyond the last bucket");
    }
  }
  for (const SizeConstants* one = parts_.constants ? &*parts_.constants : nullptr; one != nullptr;
       one = one->on_host.get()) {
    if (one->resident->size_changes() == nullptr) {
      refuse("constants of sizes come of a resident that takes no others");
    }
  }
}

std::shared_ptr<const Instance> Instances::ready(const std::vector<std::int64_t>& sizes) {
  const std::lock_guard lock(mutex_);
  const auto found = found_.find(sizes);
  if (found == found_.end()) return nullptr;
  kept_.splice(kept_.begin(), kept_, found->second);
  ++counts_.n_hits;
  return kept_.front();
}

std::shared_ptr<const Instance> Instances::make(const std::vector<std::int64_t>& sizes,
                                                SizesFound& found) {
  const std::lock_guard lock(making_);
  if (auto kept = ready(sizes)) {
    found = {true, 0};
    return kept;
  }
  const std::uint64_t begin_ns = now_ns();
  auto instance = made(sizes);
  keep(instance);
  found = {false, now_ns() - begin_ns};
  return instance;
}

std::shared_ptr<const Instance> Instances::made(const std::vector<std::int64_t>& sizes) {
  const auto instance = std::make_shared<Instance>();
  instance->sizes = sizes;
  SizedProgram& program = instance->program;
  try {
    if (!accepts(sizes)) throw ExpressionError("the sizes are not those of the program");
    program.numbers = evaluated(sizes);
    instance->shapes = shapes(program);
    program.values_bytes = values_bytes(parts_.values, program.numbers, instance->shapes.inputs);
    for (const std::size_t value : parts_.call.outputs) {
      instance->shapes.outputs_bytes.push_back(program.values_bytes.at(value));
    }
    for (std::size_t index = 0; index < parts_.call.results.size(); ++index) {
      const std::optional<std::size_t>& alone_on = parts_.call.results[index].alone_on;
      ResultShape& result = instance->shapes.results[index];
      result.covers_output = alone_on && result.offset_bytes == 0 &&
                             bytes_of(result.layout) == program.values_bytes.at(*alone_on);
    }
    program.places = places_for(sizes);
    resident_->check(program);
    program.work = resident_->work_of(sizes);
  } catch (const ExpressionError& error) {
    parts_.refuse(sizes);
    refuse_all(error);
  }
  instance->shapes.feature_map_bytes = program.places->feature_map_bytes;
  instance->size_bytes = memory_of(*instance);
  if (parts_.constants) {
    SizedProgram own = made_by(*parts_.constants, sizes, program);
    for (const auto& [_, value] : parts_.constants->results) {
      instance->size_bytes += own.values_bytes.at(value);
    }
    program.constants = std::move(own.constants);
    program.constants_stream = own.constants_stream;
    program.constants_end = std::move(own.constants_end);
  }
  return instance;
}

bool Instances::accepts(const std::vector<std::int64_t>& sizes) const {
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    const SizedDim& dim = parts_.dims.at(index);
    if (sizes[index] < dim.minimum || sizes[index] > dim.maximum) return false;
  }
  if (parts_.compared.count(sizes) != 0) return true;
  for (std::size_t index = 0; index < parts_.conditions.size(); ++index) {
    const Number holds = parts_.conditions.evaluate(index, sizes.data());
    if (holds.is_real ? holds.real == 0 : holds.integer == 0) return false;
  }
  return true;
}

std::vector<Number> Instances::evaluated(const std::vector<std::int64_t>& sizes) const {
  std::vector<Number> numbers;
  numbers.reserve(parts_.numbers.size());
  for (std::size_t index = 0; index < parts_.numbers.size(); ++index) {
    numbers.push_back(parts_.numbers.evaluate(index, sizes.data()));
    if (numbers.back().is_real != parts_.reals[index]) {
      throw ExpressionError("a number is of another kind than the recorded one");
    }
  }
  return numbers;
}

CallShapes Instances::shapes(const SizedProgram& program) const {
  CallShapes found;
  for (const VaryingView& input : parts_.call.inputs) {
    found.inputs.push_back(offload::evaluated(input, program.numbers).first);
  }
  for (const VaryingResult& result : parts_.call.results) {
    auto [layout, offset_bytes] = offload::evaluated(result.view, program.numbers);
    found.results.push_back({offset_bytes, std::move(layout), false});
  }
  return found;
}

// The places of the sizes' bucket or, if nothing is known of the whole bucket, of the sizes alone.
std::shared_ptr<const SizedPlaces> Instances::places_for(const std::vector<std::int64_t>& sizes) {
  std::vector<std::size_t> bucket;
  std::vector<std::int64_t> least, greatest;
  for (std::size_t index = 0; index < sizes.size(); ++index) {
    const SizedDim& dim = parts_.dims[index];
    const auto end = std::lower_bound(dim.bucket_ends.begin(), dim.bucket_ends.end(), sizes[index]);
    bucket.push_back(static_cast<std::size_t>(end - dim.bucket_ends.begin()));
    least.push_back(
        std::max(dim.minimum, end == dim.bucket_ends.begin() ? dim.minimum : *std::prev(end) + 1));
    greatest.push_back(std::min(*end, dim.maximum));
  }
  const auto found = places_.find(bucket);
  if (found != places_.end()) return found->second;
  auto [placed, is_of_bucket] = parts_.place(sizes, least, greatest);
  placed.number = n_places_++;
  auto shared = std::make_shared<const SizedPlaces>(std::move(placed));
  if (is_of_bucket) places_.emplace(std::move(bucket), shared);
  return shared;
}

// The numbers of these launches, with their results as constants.
SizedProgram Instances::made_by(const SizeConstants& constants,
                                const std::vector<std::int64_t>& sizes,
                                const SizedProgram& program) {
  SizedProgram own;
  own.numbers = program.numbers;
  own.values_bytes = values_bytes(constants.values, own.numbers, {});
  auto places = std::make_shared<SizedPlaces>();
  places->offsets_bytes.resize(own.values_bytes.size());
  places->rooms_bytes = own.values_bytes;
  own.places = std::move(places);
  Resident& resident = *constants.resident;
  try {
    resident.size_changes()->check(own);
  } catch (const ExpressionError& error) {
    parts_.refuse(sizes);
    refuse_all(error);
  }
  DeviceStreams* const streams = resident.device_streams();
  if (streams != nullptr) streams->set_stream(0);
  if (constants.on_host) {
    own.constants = copied_to(constants.device, made_by(*constants.on_host, sizes, program));
  }
  resident.size_changes()->resize(own);
  {
    const KernelScope scope;
    Submission submission;
    resident.execute(submission, nullptr);
  }
  std::vector<c10::Storage> made;
  for (const auto& [slot, _] : constants.results) made.push_back(resident.take(slot));
  own.constants = std::move(made);
  if (streams != nullptr) {
    own.constants_stream = streams->torch_stream();
    own.constants_end = streams->fence();
  }
  return own;
}

void Instances::keep(std::shared_ptr<const Instance> instance) {
  Kept evicted;  // outlives the lock
  const std::lock_guard lock(mutex_);
  ++counts_.n_misses;
  counts_.kept_bytes += instance->size_bytes;
  kept_.push_front(std::move(instance));
  found_[kept_.front()->sizes] = kept_.begin();
  while (counts_.kept_bytes > parts_.budget_bytes && kept_.size() > 1) {
    counts_.kept_bytes -= kept_.back()->size_bytes;
    found_.erase(kept_.back()->sizes);
    evicted.splice(evicted.begin(), kept_, std::prev(kept_.end()));
    ++counts_.n_evicted;
  }
  counts_.n_places = n_places_;
}

InstanceCounts Instances::counts() const {
  const std::lock_guard lock(mutex_);
  InstanceCounts counts = counts_;
  counts.n_kept = kept_.size();
  return counts;
}

void Instances::clear() {
  Kept all;  // outlives the lock
  const std::lock_guard lock(mutex_);
  found_.clear();
  all.swap(kept_);
  counts_.kept_bytes = 0;
}

}  // namespace offload
