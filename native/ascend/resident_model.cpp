#include "ascend/resident_model.hpp"

namespace offload::acl {

ModelForm best_form(const Runtime& runtime) {
  if (runtime.has(Capability::kExplicitBuild)) return ModelForm::kBuild;
  runtime.require(Capability::kCapture, "making a model that stays on the device");
  return ModelForm::kCapture;
}

ResidentModel::ResidentModel(const Runtime& runtime, ModelForm form, const Launch& launch,
                             std::optional<Stream> side)
    : runtime_(runtime), form_(form) {
  try {
    if (form == ModelForm::kBuild) {
      runtime.require(Capability::kExplicitBuild, "building a model");
      build(launch, side.has_value());
    } else {
      runtime.require(Capability::kCapture, "capturing a model");
      capture(launch, side);
    }
  } catch (...) {
    destroy();
    throw;
  }
}

ResidentModel::~ResidentModel() { destroy(); }

void ResidentModel::build(const Launch& launch, bool has_side) {
  stream_.emplace(runtime_, kStreamPersistent);
  const int n_known = has_side ? 2 : 1;
  counted_.emplace(n_known);
  if (has_side) side_.emplace(runtime_, kStreamPersistent);
  runtime_.check(runtime_.build_begin(&model_, 0), "beginning to build a model");
  bind(*stream_);
  if (side_) bind(*side_);
  launch(stream_->handle(), side_ ? side_->handle() : nullptr);
  runtime_.check(runtime_.end_task(model_, stream_->handle()), "ending a model's stream");
  runtime_.check(runtime_.build_end(model_, nullptr), "ending the build of a model");
  count_streams(n_known);
}

// Each begins with the model.
void ResidentModel::bind(const OwnStream& stream) {
  runtime_.check(runtime_.bind_stream(model_, stream.handle(), kModelStreamHead),
                 "binding a stream to a model");
  bound_.push_back(stream.handle());
}

// Relaxed, since what other threads do has nothing to do with these launches.
void ResidentModel::capture(const Launch& launch, std::optional<Stream> side) {
  stream_.emplace(runtime_, 0);
  const int n_known = side ? 2 : 1;
  counted_.emplace(n_known);
  runtime_.check(runtime_.capture_begin(stream_->handle(), kCaptureRelaxed),
                 "beginning to capture a model");
  try {
    launch(stream_->handle(), side.value_or(nullptr));
  } catch (...) {
    runtime_.capture_end(stream_->handle(), &model_);
    throw;
  }
  const Error error = runtime_.capture_end(stream_->handle(), &model_);
  if (error == kSuccess) {
    stream_.reset();
    return count_streams(n_known);
  }
  // A capture that failed to end may go on, and its model could not be destroyed then.
  if (runtime_.capture_end(stream_->handle(), &model_) != kSuccess) model_ = nullptr;
  runtime_.fail(error, "ending the capture of a model");
}

void ResidentModel::count_streams(int n_known) {
  streams_ = streams_held(runtime_, model_, n_known);
  counted_.emplace(streams_.count);
}

void ResidentModel::destroy() noexcept {
  for (const Stream stream : bound_) runtime_.unbind_stream(model_, stream);
  bound_.clear();
  if (model_ != nullptr) runtime_.model_destroy(model_);
  model_ = nullptr;
  side_.reset();
  stream_.reset();
  counted_.reset();
}

}  // namespace offload::acl
