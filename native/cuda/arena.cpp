#include "cuda/arena.hpp"

namespace offload::cuda {

CudaArena::CudaArena(int device)
    : driver_(Driver::get()),
      context_(driver_, device),
      granularity_bytes_(cuda::granularity_bytes(driver_, context_.device())) {}

CudaArena::~CudaArena() {
  const ContextScope scope(driver_, context_);
  order_.reset();
}

std::shared_ptr<ArenaMapping> CudaArena::map(std::size_t size_bytes) {
  auto mapping = std::make_shared<ArenaMapping>(shared_from_this(), size_bytes);
  if (size_bytes == 0) return mapping;
  const std::lock_guard lock(mutex_);
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  std::size_t n_bytes = 0;
  for (const auto& chunk : chunks_) {
    if (n_bytes >= size_bytes) break;
    mapping->chunks_.push_back(chunk);
    n_bytes += chunk->size_bytes();
  }
  std::shared_ptr<PhysicalMemory> grown;
  if (n_bytes < size_bytes) {
    const std::size_t missing_bytes = round_up(size_bytes - n_bytes, granularity_bytes_);
    grown = std::make_shared<PhysicalMemory>(driver_, context_.device(), missing_bytes);
    mapping->chunks_.push_back(grown);
    n_bytes += missing_bytes;
  }
  mapping->range_.emplace(driver_, n_bytes);
  DevicePointer at = mapping->range_->address();
  for (const auto& chunk : mapping->chunks_) {
    mapping->range_->map(at, *chunk);
    at += chunk->size_bytes();
  }
  mapping->range_->allow_access(mapping->range_->address(), n_bytes, context_.device());
  if (grown) chunks_.push_back(std::move(grown));
  return mapping;
}

// Releases the chunks at the end that no mapping holds.
void CudaArena::release_unused() noexcept {
  const std::lock_guard lock(mutex_);
  while (!chunks_.empty() && chunks_.back().use_count() == 1) chunks_.pop_back();
}

ArenaMapping::~ArenaMapping() {
  const ContextScope scope(arena_->driver(), arena_->context());
  const RelaxedCapture relaxed(arena_->driver());
  range_.reset();  // a chunk is released once no mapping shows it
  chunks_.clear();
  arena_->release_unused();
}

std::size_t CudaArena::size_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t n_bytes = 0;
  for (const auto& chunk : chunks_) n_bytes += chunk->size_bytes();
  return n_bytes;
}

void CudaArena::enter(Stream stream) {
  const std::lock_guard lock(mutex_);
  if (last_stream_ && *last_stream_ != stream) {
    const ContextScope scope(driver_, context_);
    refuse_capturing(driver_, *last_stream_, "the stream that used the arena last");
    if (!order_) order_.emplace(driver_);
    driver_.check(driver_.event_record(order_->handle(), *last_stream_),
                  "recording what uses the arena");
    driver_.check(driver_.stream_wait_event(stream, order_->handle(), 0),
                  "waiting for what uses the arena");
  }
  last_stream_ = stream;
}

}  // namespace offload::cuda
