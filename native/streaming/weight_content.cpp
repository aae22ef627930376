#include "streaming/weight_content.hpp"

#include <new>

#include "offload/errors.hpp"

namespace offload {

WeightContent::WeightContent(const StreamPlan& plan,
                             std::vector<std::shared_ptr<WeightSource>> sources)
    : plan_(plan), sources_(std::move(sources)), stale_(plan.weights.size(), true) {
  check_sources(plan_, sources_);
}

void WeightContent::refuse_closed() const {
  if (closed_) throw ExecutionError(kStreamClosed);
}

void WeightContent::refresh(const std::vector<std::size_t>& weights) {
  for (const std::size_t weight : weights) check_weight(plan_, weight);
  const std::lock_guard lock(mutex_);
  refuse_closed();
  for (const std::size_t weight : weights) stale_[weight] = true;
  if (!weights.empty()) is_stale_ = true;
}

void WeightContent::replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources) {
  for (const auto& [weight, source] : sources) {
    check_weight(plan_, weight);
    check_source(plan_.weights[weight], *source);
  }
  const std::lock_guard lock(mutex_);
  refuse_closed();
  for (auto& [weight, source] : sources) {
    replaced_.emplace_back(weight, std::move(source));
    stale_[weight] = true;
    is_stale_ = true;
  }
}

ReadMode WeightContent::mode(std::size_t weight) const {
  check_weight(plan_, weight);
  const std::lock_guard lock(mutex_);
  refuse_closed();
  const ReadMode mode = sources_[weight] ? sources_[weight]->mode() : ReadMode::kMemory;
  return plan_.weights[weight].gathered && mode == ReadMode::kDirect ? ReadMode::kBuffered : mode;
}

void WeightContent::attach() {
  const std::lock_guard lock(mutex_);
  if (attached_) {
    throw ExecutionError("this weight stream belongs to another executable; make one for each");
  }
  attached_ = true;
}

void WeightContent::note_stale(std::size_t weight) {
  const std::lock_guard lock(mutex_);
  stale_[weight] = true;
  is_stale_ = true;
}

void WeightContent::note_all_stale() {
  const std::lock_guard lock(mutex_);
  stale_.assign(stale_.size(), true);
  is_stale_ = true;
}

std::vector<std::size_t> WeightContent::watched() const {
  std::vector<std::size_t> weights;
  for (std::size_t weight = 0; weight < sources_.size(); ++weight) {
    if (sources_[weight] && sources_[weight]->tells_changes()) weights.push_back(weight);
  }
  return weights;
}

bool WeightContent::close() noexcept {
  const std::lock_guard lock(mutex_);
  return !closed_.exchange(true);
}

void WeightContent::drop() noexcept {
  std::vector<std::shared_ptr<WeightSource>> let_go;  // destroyed after the lock is released
  std::vector<std::pair<std::size_t, std::shared_ptr<WeightSource>>> replaced;
  const std::lock_guard lock(mutex_);
  let_go.swap(sources_);
  replaced.swap(replaced_);
}

// A mutex that is held cannot be destroyed.
void WeightContent::restart() noexcept { new (&mutex_) std::mutex(); }

WeightRenewal::~WeightRenewal() {
  if (stale_.empty()) return;
  const std::lock_guard lock(content_.mutex_);
  for (std::size_t weight = 0; weight < stale_.size(); ++weight) {
    if (stale_[weight]) content_.stale_[weight] = true;
  }
  content_.is_stale_ = true;
}

void WeightRenewal::begin() {
  const std::lock_guard lock(content_.mutex_);
  content_.refuse_closed();
  content_.is_stale_ = false;
  stale_ = content_.stale_;
  content_.stale_.assign(stale_.size(), false);
  for (auto& [weight, source] : content_.replaced_) {
    content_.sources_[weight].swap(source);
    let_go_.push_back(std::move(source));
  }
  content_.replaced_.clear();
  look_up_sources(content_.plan_, content_.sources_, stale_, files_);
}

void WeightRenewal::let_go_of_memory(std::size_t weight) {
  const std::lock_guard lock(content_.mutex_);
  let_go_.push_back(std::move(content_.sources_[weight]));
}

}  // namespace offload
