#include "cuda/cuda_weight_memory.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <string>

#include "offload/errors.hpp"

namespace offload::cuda {
namespace {

bool is_cut(const WeightPlacement& weight) { return weight.pieces.size() > 1; }

// Cut pieces begin at multiples of the plan's granule; mappings, at those of the device's unit.
void check_granule(const StreamPlan& plan, std::size_t unit_bytes) {
  if (plan.granule_bytes % unit_bytes == 0) return;
  if (std::none_of(plan.weights.begin(), plan.weights.end(), is_cut)) return;
  throw PlanError("streaming plan: granule: this device maps memory by " +
                  std::to_string(unit_bytes) + " bytes, got " + std::to_string(plan.granule_bytes));
}

// Where stretches of the memory begin, and the end of the last one.
std::set<std::size_t> borders_of(const StreamPlan& plan, std::size_t unit_bytes) {
  std::set<std::size_t> borders = {0, round_up(plan.memory_bytes, unit_bytes)};
  for (const WeightPlacement& weight : plan.weights) {
    if (!is_cut(weight)) continue;
    for (const WeightPiece& piece : weight.pieces) {
      borders.insert(piece.memory_offset_bytes);
      borders.insert(round_up(piece.memory_offset_bytes + piece.size_bytes, unit_bytes));
    }
  }
  return borders;
}

}  // namespace

CudaWeightMemory::CudaWeightMemory(const Driver& driver, Device device, const StreamPlan& plan)
    : driver_(driver), device_(device), addresses_(plan.weights.size()) {
  if (plan.memory_bytes == 0) return;
  const std::size_t unit_bytes = granularity_bytes(driver_, device_);
  check_granule(plan, unit_bytes);
  make_stretches(plan, unit_bytes);
  map_whole_weights(plan);
  map_pieces(plan, unit_bytes);
}

void CudaWeightMemory::make_stretches(const StreamPlan& plan, std::size_t unit_bytes) {
  const std::set<std::size_t> borders = borders_of(plan, unit_bytes);
  stretches_.reserve(borders.size() - 1);
  for (auto end = std::next(borders.begin()); end != borders.end(); ++end) {
    const std::size_t begin = *std::prev(end);
    stretches_.push_back({begin, PhysicalMemory(driver_, device_, *end - begin)});
  }
}

// The stretch that holds this byte.
std::size_t CudaWeightMemory::stretch_of(std::size_t memory_offset_bytes) const {
  const auto after =
      std::upper_bound(stretches_.begin(), stretches_.end(), memory_offset_bytes,
                       [](std::size_t at, const Stretch& one) { return at < one.begin; });
  return static_cast<std::size_t>(after - stretches_.begin()) - 1;
}

// Maps only stretches that hold some: those of weights in several pieces alone have no address
// here.
void CudaWeightMemory::map_whole_weights(const StreamPlan& plan) {
  std::vector<bool> is_shown(stretches_.size());
  for (const WeightPlacement& weight : plan.weights) {
    if (is_cut(weight) || weight.pieces.empty()) continue;
    const WeightPiece& piece = weight.pieces.front();
    const std::size_t end = piece.memory_offset_bytes + piece.size_bytes;
    std::size_t index = stretch_of(piece.memory_offset_bytes);
    for (; index < stretches_.size() && stretches_[index].begin < end; ++index) {
      is_shown[index] = true;
    }
  }
  if (std::find(is_shown.begin(), is_shown.end(), true) == is_shown.end()) return;
  const Stretch& last = stretches_.back();
  base_.emplace(driver_, last.begin + last.memory.size_bytes());
  for (std::size_t index = 0; index < stretches_.size(); ++index) {
    if (!is_shown[index]) continue;
    const Stretch& stretch = stretches_[index];
    base_->map(base_->address() + stretch.begin, stretch.memory);
    base_->allow_access(base_->address() + stretch.begin, stretch.memory.size_bytes(), device_);
  }
  for (std::size_t weight = 0; weight < plan.weights.size(); ++weight) {
    const WeightPlacement& placement = plan.weights[weight];
    if (is_cut(placement) || placement.pieces.empty()) continue;
    addresses_[weight] = base_->address() + placement.pieces.front().memory_offset_bytes;
  }
}

void CudaWeightMemory::map_pieces(const StreamPlan& plan, std::size_t unit_bytes) {
  for (std::size_t weight = 0; weight < plan.weights.size(); ++weight) {
    const WeightPlacement& placement = plan.weights[weight];
    if (!is_cut(placement)) continue;
    AddressRange& range = ranges_.emplace_back(driver_, round_up(placement.size_bytes, unit_bytes));
    for (const WeightPiece& piece : placement.pieces) {
      const std::size_t end = piece.memory_offset_bytes + piece.size_bytes;
      std::size_t index = stretch_of(piece.memory_offset_bytes);
      for (; index < stretches_.size() && stretches_[index].begin < end; ++index) {
        const std::size_t in_piece = stretches_[index].begin - piece.memory_offset_bytes;
        range.map(range.address() + piece.offset_bytes + in_piece, stretches_[index].memory);
      }
    }
    range.allow_access(range.address(), range.size_bytes(), device_);
    addresses_[weight] = range.address();
  }
}

}  // namespace offload::cuda
