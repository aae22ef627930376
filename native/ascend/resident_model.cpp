#include "ascend/resident_model.hpp"

#include <utility>

#include "offload/errors.hpp"

namespace offload::acl {
namespace {

constexpr const char* kNoSide =
    "a model that streams weights has to be captured: the runtime refuses (207000) the events that "
    "order copies and launches on streams of a model that is built; leave form= out, with a "
    "runtime that captures";

}  // namespace

std::string full_stream(const Runtime& runtime, const std::string& what) {
  return "building a model, " + what + ": " + runtime.describe(kRtStreamTaskFull) +
         ": the stream that it is bound to is full, and no other takes its place (most devices "
         "have "
         "room for 2,013 tasks, and a kernel is one): form=\"capture\" has no such limit";
}

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
      if (side) throw BackendUnavailable(kNoSide);
      build(launch);
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

void ResidentModel::build(const Launch& launch) {
  stream_.emplace(runtime_, kStreamPersistent);
  counted_.emplace();
  runtime_.check(runtime_.build_begin(&model_, 0), "beginning to build a model");
  runtime_.check(runtime_.bind_stream(model_, stream_->handle(), kModelStreamHead),
                 "binding a stream to a model");
  is_bound_ = true;
  launch(stream_->handle(), nullptr);
  const Error error = runtime_.end_task(model_, stream_->handle());
  if (error == kRtStreamTaskFull) throw StreamIsFull(full_stream(runtime_, "ending its stream"));
  runtime_.check(error, "ending a model's stream");
  runtime_.check(runtime_.build_end(model_, nullptr), "ending the build of a model");
  count_streams(1);
}

// Relaxed, since other threads' calls do not concern these launches.
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
  // A capture that failed to end may continue, and its model could not be destroyed then.
  if (runtime_.capture_end(stream_->handle(), &model_) != kSuccess) model_ = nullptr;
  runtime_.fail(error, "ending the capture of a model");
}

void ResidentModel::count_streams(int n_known) {
  streams_ = streams_held(runtime_, model_, n_known);
  counted_.emplace(streams_.count);
}

void ResidentModel::destroy() noexcept {
  if (std::exchange(is_bound_, false)) runtime_.unbind_stream(model_, stream_->handle());
  if (model_ != nullptr) runtime_.model_destroy(model_);
  model_ = nullptr;
  stream_.reset();
  counted_.reset();
}

}  // namespace offload::acl
