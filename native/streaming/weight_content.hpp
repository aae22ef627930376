// The current sources of an executable's weights, and which weights must be read again.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "streaming/stream_plan.hpp"
#include "streaming/weight_source.hpp"

namespace offload {

// The sources of all weights of a plan. A weight whose content changed is stale until a
// WeightRenewal has taken it.
//
// Owner: one stream of weights. Thread: refresh, replace, mode, attach, note_stale, is_stale and
// close from any; renewals and readers of sources one at a time. Errors: the constructor throws
// BindingError for sources that do not fit; each method states its errors. Nothing needs the GIL.
// Releasing a source may take the GIL; no lock is held then.
class WeightContent {
 public:
  // `plan` has passed check_plan and must outlive it. All weights begin as stale.
  WeightContent(const StreamPlan& plan, std::vector<std::shared_ptr<WeightSource>> sources);

  // Marks these weights as changed in their sources, or by new files at their paths. Throws
  // BindingError for a weight that does not exist, and ExecutionError after close.
  void refresh(const std::vector<std::size_t>& weights);

  // Replaces the sources of these weights from now on. Throws BindingError for a weight that does
  // not exist or a source of another size, and ExecutionError after close; then no source is
  // replaced.
  void replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources);

  // How a weight's source is read; a released source was memory. Throws BindingError for a weight
  // that does not exist, and ExecutionError after close.
  ReadMode mode(std::size_t weight) const;

  // Assigns the weights to their executable. Throws ExecutionError if they have one.
  void attach();

  void note_stale(std::size_t weight);
  void note_all_stale();

  // Whether a weight must be read again.
  bool is_stale() const noexcept { return is_stale_; }

  // Between renewals; null if only a copy of it is left.
  WeightSource* source(std::size_t weight) const noexcept { return sources_[weight].get(); }

  // The weights whose sources detect changes, to be asked between renewals.
  std::vector<std::size_t> watched() const;

  // Refuses all further calls. Returns whether it was open.
  bool close() noexcept;
  bool is_closed() const noexcept { return closed_; }

  // Once closed: releases all sources. No thread may be reading one.
  void drop() noexcept;

  // Around a fork of the process, and in its child.
  void hold() noexcept { mutex_.lock(); }
  void release() noexcept { mutex_.unlock(); }
  void restart() noexcept;

 private:
  friend class WeightRenewal;

  void refuse_closed() const;

  const StreamPlan& plan_;
  std::atomic<bool> is_stale_ = true;
  std::atomic<bool> closed_ = false;
  mutable std::mutex mutex_;  // guards all below; only renewals change sources
  std::vector<std::shared_ptr<WeightSource>> sources_;
  std::vector<bool> stale_;
  std::vector<std::pair<std::size_t, std::shared_ptr<WeightSource>>> replaced_;
  bool attached_ = false;
};

// Takes the stale weights, to read them. Unless it is committed they are stale again when it ends.
//
// Owner: a stack frame, outside of all locks. Thread: one renewal at a time, and no thread reads
// sources during begin. Errors: begin throws FileError, BindingError for memory that does not fit,
// and ExecutionError after close.
class WeightRenewal {
 public:
  explicit WeightRenewal(WeightContent& content) : content_(content) {}
  ~WeightRenewal();
  WeightRenewal(const WeightRenewal&) = delete;
  WeightRenewal& operator=(const WeightRenewal&) = delete;

  // Replaces old sources by new ones, and looks up what they are read from. What is refreshed from
  // now on is left to the next renewal.
  void begin();

  // By weight, whether it must be read.
  const std::vector<bool>& stale() const noexcept { return stale_; }

  // Releases the source of a weight, memory of which a copy is kept and which is not read again.
  void let_go_of_memory(std::size_t weight);

  void commit() noexcept { stale_.clear(); }

 private:
  WeightContent& content_;
  WeightFiles files_;
  std::vector<bool> stale_;
  std::vector<std::shared_ptr<WeightSource>> let_go_;
};

}  // namespace offload
