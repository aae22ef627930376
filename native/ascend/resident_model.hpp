// A model that runs on the device as one task: tasks on a stream, delivered once.
#pragma once

#include <functional>
#include <optional>

#include "ascend/runtime.hpp"

namespace offload::acl {

// How a model is made.
enum class ModelForm { kBuild, kCapture };

// What the runtime can do best: an explicit build where it has one, else a capture. Throws
// BackendUnavailable where it has neither.
ModelForm best_form(const Runtime& runtime);

// The executable model of what `launch` launches on the stream that it is given.
//
// Owner: one resident; needs the device's context current while it is made and destroyed, and
// nothing of it under way when it is destroyed. Errors: the constructor throws BackendUnavailable
// where the runtime lacks the form, ExecutionError where it fails, and what `launch` throws;
// nothing is left behind then.
class ResidentModel {
 public:
  ResidentModel(const Runtime& runtime, ModelForm form, const std::function<void(Stream)>& launch);
  ~ResidentModel();
  ResidentModel(const ResidentModel&) = delete;
  ResidentModel& operator=(const ResidentModel&) = delete;

  Model handle() const { return model_; }
  ModelForm form() const { return form_; }

 private:
  void build(const std::function<void(Stream)>& launch);
  void capture(const std::function<void(Stream)>& launch);
  void destroy() noexcept;

  const Runtime& runtime_;
  ModelForm form_;
  std::optional<OwnStream> stream_;          // bound to a built model for good
  std::optional<CountedStream> is_counted_;  // a captured model has one of its own
  bool is_bound_ = false;
  Model model_ = nullptr;
};

}  // namespace offload::acl
