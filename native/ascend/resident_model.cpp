#include "ascend/resident_model.hpp"

namespace offload::acl {

ModelForm best_form(const Runtime& runtime) {
  if (runtime.has(Capability::kExplicitBuild)) return ModelForm::kBuild;
  runtime.require(Capability::kCapture, "making a model that stays on the device");
  return ModelForm::kCapture;
}

ResidentModel::ResidentModel(const Runtime& runtime, ModelForm form,
                             const std::function<void(Stream)>& launch)
    : runtime_(runtime), form_(form) {
  try {
    if (form == ModelForm::kBuild) {
      runtime.require(Capability::kExplicitBuild, "building a model");
      build(launch);
    } else {
      runtime.require(Capability::kCapture, "capturing a model");
      capture(launch);
    }
  } catch (...) {
    destroy();
    throw;
  }
}

ResidentModel::~ResidentModel() { destroy(); }

void ResidentModel::build(const std::function<void(Stream)>& launch) {
  stream_.emplace(runtime_, kStreamPersistent);
  is_counted_.emplace();
  runtime_.check(runtime_.build_begin(&model_, 0), "beginning to build a model");
  runtime_.check(runtime_.bind_stream(model_, stream_->handle(), kModelStreamHead),
                 "binding a stream to a model");
  is_bound_ = true;
  launch(stream_->handle());
  runtime_.check(runtime_.end_task(model_, stream_->handle()), "ending a model's stream");
  runtime_.check(runtime_.build_end(model_, nullptr), "ending the build of a model");
}

// Relaxed, since what other threads do has nothing to do with these launches.
void ResidentModel::capture(const std::function<void(Stream)>& launch) {
  stream_.emplace(runtime_, 0);
  is_counted_.emplace();
  runtime_.check(runtime_.capture_begin(stream_->handle(), kCaptureRelaxed),
                 "beginning to capture a model");
  try {
    launch(stream_->handle());
  } catch (...) {
    runtime_.capture_end(stream_->handle(), &model_);
    throw;
  }
  const Error error = runtime_.capture_end(stream_->handle(), &model_);
  if (error == kSuccess) return stream_.reset();
  // A capture that failed to end may go on, and its model could not be destroyed then.
  if (runtime_.capture_end(stream_->handle(), &model_) != kSuccess) model_ = nullptr;
  runtime_.fail(error, "ending the capture of a model");
}

void ResidentModel::destroy() noexcept {
  if (is_bound_) runtime_.unbind_stream(model_, stream_->handle());
  is_bound_ = false;
  if (model_ != nullptr) runtime_.model_destroy(model_);
  model_ = nullptr;
  stream_.reset();
  is_counted_.reset();
}

}  // namespace offload::acl
