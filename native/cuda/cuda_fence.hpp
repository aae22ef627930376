// The end of what a resident on a CUDA device had enqueued.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "cuda/arena.hpp"
#include "offload/resident.hpp"

namespace offload::cuda {

// Ends what a resident had enqueued so far, by an event of its own, and tells it when that is over.
//
// Owner, thread, errors: as Fence.
class CudaFence final : public Fence {
 public:
  CudaFence(std::shared_ptr<CudaArena> arena, std::unique_ptr<OrderEvent> event,
            std::uint64_t n_enqueued, std::shared_ptr<std::atomic<std::uint64_t>> n_ended)
      : arena_(std::move(arena)),
        event_(std::move(event)),
        n_enqueued_(n_enqueued),
        n_ended_(std::move(n_ended)) {}

  ~CudaFence() override {
    const ContextScope scope(arena_->driver(), arena_->context());
    event_.reset();
  }

  void wait() override {
    const Driver& driver = arena_->driver();
    const ContextScope scope(driver, arena_->context());
    const RelaxedCapture relaxed(driver);
    const Result result = driver.event_synchronize(event_->handle());
    // After a fault too: nothing runs any more.
    std::uint64_t n_known = *n_ended_;
    while (n_known < n_enqueued_ && !n_ended_->compare_exchange_weak(n_known, n_enqueued_)) {
    }
    driver.check(result, "executing the program");
  }

 private:
  std::shared_ptr<CudaArena> arena_;  // for its context
  std::unique_ptr<OrderEvent> event_;
  std::uint64_t n_enqueued_;
  std::shared_ptr<std::atomic<std::uint64_t>> n_ended_;
};

}  // namespace offload::cuda
