#include "device/captured_stream.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <utility>

namespace offload {
namespace {

template <typename TorchDevice>
auto asked_of(const TorchDevice& torch_device, const c10::Stream& stream, int)
    -> decltype(torch_device.isStreamCapturing(stream)) {
  return torch_device.isStreamCapturing(stream);
}

// Torch before 2.13 does not report it.
template <typename TorchDevice>
bool asked_of(const TorchDevice&, const c10::Stream&, long) {
  return false;
}

struct Questions {
  std::mutex mutex;
  std::map<c10::DeviceType, std::function<bool()>> by_type;
};

// Never destroyed: threads may ask while the process ends.
Questions& questions() {
  static auto* const found = new Questions;
  return *found;
}

}  // namespace

bool is_being_captured(const c10::Stream& stream) {
  if (asked_of(c10::impl::VirtualGuardImpl(stream.device_type()), stream, 0)) return true;
  std::function<bool()> ask;
  {
    const std::lock_guard lock(questions().mutex);
    const auto found = questions().by_type.find(stream.device_type());
    if (found == questions().by_type.end()) return false;
    ask = found->second;
  }
  return ask();
}

void ask_captures_by(c10::DeviceType type, std::function<bool()> ask) {
  const std::lock_guard lock(questions().mutex);
  questions().by_type.insert_or_assign(type, std::move(ask));
}

}  // namespace offload
