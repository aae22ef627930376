// A model that runs on the device as one task: tasks on a stream, delivered once.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "ascend/model_tasks.hpp"
#include "ascend/runtime.hpp"
#include "offload/errors.hpp"

namespace offload::acl {

// How a model is made.
enum class ModelForm { kBuild, kCapture };

// A stream of a model under construction takes no more tasks.
class StreamIsFull final : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

// The error's message, with advice.
std::string full_stream(const Runtime& runtime, const std::string& what);

// The best form of the runtime: an explicit build where it has one, else a capture. Throws
// BackendUnavailable where it has neither.
ModelForm best_form(const Runtime& runtime);

// The executable model of what `launch` launches on its stream arguments. The second is `side`,
// which joins a capture where events make it wait for the first; it is null without `side`. A build
// has no `side`: on streams that are bound to a model the runtime refuses (207000) the events that
// order streams.
//
// Owner: one resident; needs the device's context current while it is made and destroyed, and no
// running execution when it is destroyed. Errors: the constructor throws BackendUnavailable where
// the runtime lacks the form, or a build has a side, ExecutionError where it fails, and what
// `launch` throws; nothing is left behind then. A build whose stream has no room for its last task
// throws StreamIsFull.
class ResidentModel {
 public:
  using Launch = std::function<void(Stream, Stream)>;

  ResidentModel(const Runtime& runtime, ModelForm form, const Launch& launch,
                std::optional<Stream> side = std::nullopt);
  ~ResidentModel();
  ResidentModel(const ResidentModel&) = delete;
  ResidentModel& operator=(const ResidentModel&) = delete;

  Model handle() const { return model_; }
  ModelForm form() const { return form_; }
  ModelStreams streams() const { return streams_; }

 private:
  void build(const Launch& launch);
  void capture(const Launch& launch, std::optional<Stream> side);
  void count_streams(int n_known);
  void destroy() noexcept;

  const Runtime& runtime_;
  ModelForm form_;
  std::optional<OwnStream> stream_;        // permanently bound to a built model
  std::optional<CountedStreams> counted_;  // a captured model has separate streams
  ModelStreams streams_;
  bool is_bound_ = false;
  Model model_ = nullptr;
};

}  // namespace offload::acl
