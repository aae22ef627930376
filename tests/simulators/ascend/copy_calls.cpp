// Copies and fills.
#include <algorithm>
#include <cstring>

#include "copies.hpp"
#include "models.hpp"
#include "symbols.hpp"

namespace simulated_ascend {
namespace {

using simulator::Copy;
using simulator::Fill;
using simulator::LateWork;
using simulator::Runner;
using simulator::Side;
using simulator::Status;
using simulator::Work;

// A rectangle of bytes: a line, or lines at a distance of pitch bytes.
struct Request {
  void* destination;
  std::size_t destination_pitch;
  const void* source;
  std::size_t source_pitch;
  std::size_t width_bytes, n_lines;
  MemcpyKind kind;
};

bool is_host(Place place) { return place != Place::kDevice; }

// Errors: 107000 where an address is not in the memory that the kind states.
void require_places(const Request& request, Place source, Place destination) {
  bool fits = true;
  switch (request.kind) {
    case kHostToHost:
      fits = is_host(source) && is_host(destination);
      break;
    case kHostToBufferToDevice:
      refuse_unless(has_staged_copies(), kAclInvalidParam, "this kind of copy came with CANN 8.5");
      [[fallthrough]];
    case kHostToDevice:
      fits = is_host(source) && !is_host(destination);
      break;
    case kDeviceToHost:
      fits = !is_host(source) && is_host(destination);
      break;
    case kDeviceToDevice:
    case kInnerDeviceToDevice:
    case kInterDeviceToDevice:
      fits = !is_host(source) && !is_host(destination);
      break;
    case kMemcpyDefault:
      break;
    default:
      refuse(kRtParamInvalid, "no kind of copy has this number");
  }
  refuse_unless(fits, kRtParamInvalid, "an address does not lie where the kind of copy says");
}

Copy copy_of(const Request& request, Place source, Place destination) {
  Copy copy;
  const auto side = [](Place place) { return is_host(place) ? Side::kHost : Side::kDevice; };
  copy.source.side = side(source);
  copy.source.address = as_number(request.source);
  copy.source.pitch_bytes = request.source_pitch;
  copy.destination.side = side(destination);
  copy.destination.address = as_number(request.destination);
  copy.destination.pitch_bytes = request.destination_pitch;
  copy.width_bytes = request.width_bytes;
  copy.height = request.n_lines;
  return copy;
}

void require_request(const Request& request) {
  require_given(request.destination, "the destination");
  require_given(request.source, "the source");
  refuse_unless(request.width_bytes != 0 && request.n_lines != 0, kRtParamInvalid,
                "no bytes are copied");
  if (request.n_lines == 1) return;
  refuse_unless(request.width_bytes <= request.source_pitch &&
                    request.width_bytes <= request.destination_pitch,
                kRtParamInvalid, "a line is wider than its pitch");
}

// At once, without order to streams: callers that need an order wait for the stream first.
void copy_now(Runtime& state, const Request& request) {
  require_request(request);
  require_safe(state, kRtCaptureModeNotSupport);
  const Place source = place_of(state, as_number(request.source));
  const Place destination = place_of(state, as_number(request.destination));
  require_places(request, source, destination);
  if (request.source == request.destination) return;
  if (const auto fault = state.device.scheduler.fault()) throw simulator::DeviceError(*fault);
  const Copy copy = copy_of(request, source, destination);
  state.device.graphs.validate(Work(copy));
  simulator::run(copy);
}

// Memory registered as pinned by a driver that cannot pin it: its pages are not locked.
bool is_unlocked(const Runtime& state, const Request& request) {
  if (state.settings.locks_registered) return false;
  const auto is_registered = [&](const void* address) {
    return place_of(state, as_number(address)) == Place::kPinned &&
           state.device.memory.find(as_number(address)) == nullptr;
  };
  return is_registered(request.source) || is_registered(request.destination);
}

// The bytes are read now: the caller may overwrite them on return.
void stage(Copy& copy) {
  for (std::size_t line = 0; line < copy.height; ++line) {
    const auto* at = reinterpret_cast<const unsigned char*>(copy.source.at(line, 0));
    copy.staged.insert(copy.staged.end(), at, at + copy.width_bytes);
  }
}

void copy_later(Runtime& state, const std::shared_ptr<StreamState>& stream,
                const Request& request) {
  require_request(request);
  const Place source = place_of(state, as_number(request.source));
  const Place destination = place_of(state, as_number(request.destination));
  require_places(request, source, destination);
  if (request.source == request.destination) return;
  refuse_unless(!is_host(source) || !is_host(destination), kRtFeatureNotSupport,
                "copies from host to host are not asynchronous");
  const bool is_staged = request.kind == kHostToBufferToDevice;
  const bool is_pageable =
      !is_staged && (source == Place::kPageable || destination == Place::kPageable);
  if (is_pageable) {
    refuse_unless(stream->capture == nullptr && stream->model.expired(), kRtParamInvalid,
                  "a model cannot copy from or to pageable memory of the host");
    require_safe(state, kRtCaptureModeBlockAsync);
    patiently(state, -1, kRtStreamSyncTimeout, [&] { state.device.scheduler.run(stream->queue); });
    const Copy copy = copy_of(request, source, destination);
    state.device.graphs.validate(Work(copy));
    simulator::run(copy);
    return;
  }
  if (!is_staged && is_unlocked(state, request)) {
    return submit(state, stream,
                  LateWork{[](Runner& runner) { runner.fail(Status::kIllegalAddress); }});
  }
  Copy copy = copy_of(request, source, destination);
  if (is_staged) stage(copy);
  submit(state, stream, std::move(copy));
}

Request line(void* destination, std::size_t most_bytes, const void* source, std::size_t n_bytes,
             MemcpyKind kind) {
  refuse_unless(n_bytes <= most_bytes, kRtParamInvalid, "the destination is too small");
  return {destination, n_bytes, source, n_bytes, n_bytes, 1, kind};
}

void require_fill(const Runtime& state, const void* address, std::size_t most_bytes,
                  std::size_t n_bytes) {
  refuse_unless(n_bytes != 0 && n_bytes <= most_bytes, kRtParamInvalid,
                "no bytes, or more than the memory has");
  refuse_unless(!state.device.memory.covering(as_number(address), n_bytes).empty(), kRtParamInvalid,
                "the memory is not the device's, or too small");
}

Fill fill_of(void* address, std::int32_t value, std::size_t n_bytes) {
  Fill fill;
  fill.destination = as_number(address);
  fill.value = static_cast<unsigned char>(value);
  fill.width = n_bytes;
  return fill;
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclrtMemcpy(void* destination, std::size_t most_bytes, const void* source,
                           std::size_t n_bytes, MemcpyKind kind) {
  return call("aclrtMemcpy", Needs::kContext, [&](Runtime& state) {
    trace(state, "kind=%d bytes=%zu", kind, n_bytes);
    copy_now(state, line(destination, most_bytes, source, n_bytes, kind));
  });
}

ACL_EXPORT int aclrtMemcpyAsync(void* destination, std::size_t most_bytes, const void* source,
                                std::size_t n_bytes, MemcpyKind kind, Stream handle) {
  return call_on("aclrtMemcpyAsync", handle, [&](Runtime& state, const auto& stream) {
    trace(state, "kind=%d bytes=%zu stream=%d", kind, n_bytes, stream->id);
    copy_later(state, stream, line(destination, most_bytes, source, n_bytes, kind));
  });
}

ACL_EXPORT int aclrtMemcpy2d(void* destination, std::size_t destination_pitch, const void* source,
                             std::size_t source_pitch, std::size_t width_bytes, std::size_t n_lines,
                             MemcpyKind kind) {
  return call("aclrtMemcpy2d", Needs::kContext, [&](Runtime& state) {
    trace(state, "kind=%d bytes=%zu", kind, width_bytes * n_lines);
    copy_now(state,
             {destination, destination_pitch, source, source_pitch, width_bytes, n_lines, kind});
  });
}

ACL_EXPORT int aclrtMemcpy2dAsync(void* destination, std::size_t destination_pitch,
                                  const void* source, std::size_t source_pitch,
                                  std::size_t width_bytes, std::size_t n_lines, MemcpyKind kind,
                                  Stream handle) {
  return call_on("aclrtMemcpy2dAsync", handle, [&](Runtime& state, const auto& stream) {
    trace(state, "kind=%d bytes=%zu stream=%d", kind, width_bytes * n_lines, stream->id);
    copy_later(state, stream,
               {destination, destination_pitch, source, source_pitch, width_bytes, n_lines, kind});
  });
}

ACL_EXPORT int aclrtMemset(void* address, std::size_t most_bytes, std::int32_t value,
                           std::size_t n_bytes) {
  return call("aclrtMemset", Needs::kContext, [&](Runtime& state) {
    trace(state, "bytes=%zu", n_bytes);
    require_fill(state, address, most_bytes, n_bytes);
    require_safe(state, kRtCaptureModeNotSupport);
    simulator::run(fill_of(address, value, n_bytes));
  });
}

ACL_EXPORT int aclrtMemsetAsync(void* address, std::size_t most_bytes, std::int32_t value,
                                std::size_t n_bytes, Stream handle) {
  return call_on("aclrtMemsetAsync", handle, [&](Runtime& state, const auto& stream) {
    trace(state, "bytes=%zu stream=%d", n_bytes, stream->id);
    require_fill(state, address, most_bytes, n_bytes);
    submit(state, stream, fill_of(address, value, n_bytes));
  });
}

// The status is 64 bytes, zeros where nothing overflowed.
ACL_EXPORT int aclrtGetOverflowStatus(void* address, std::size_t n_bytes, Stream handle) {
  return call("aclrtGetOverflowStatus", Needs::kContext, [&](Runtime& state) {
    constexpr std::size_t kStatusBytes = 64;
    require_given(address, "the status");
    refuse_unless(n_bytes == kStatusBytes, kRtParamInvalid, "the status has 64 bytes");
    const auto stream = stream_of(state, handle);
    require_not_capturing(*stream);
    require_fill(state, address, n_bytes, n_bytes);
    submit(state, stream, fill_of(address, 0, n_bytes));
  });
}

namespace {

// Written by aclrtSetMemcpyDesc, and read by a copy with it when that runs.
struct CopyDescriptor {
  std::uint64_t magic, source, destination, n_bytes, reserved[4];
};
static_assert(sizeof(CopyDescriptor) == 64);
constexpr std::uint64_t kDescriptorMagic = 0x31'59'50'4F'43'4D'49'53;  // "SIMCOPY1"

void require_inner(MemcpyKind kind) {
  refuse_unless(kind == kInnerDeviceToDevice, kRtFeatureNotSupport,
                "only copies inside of one device");
}

void require_device(const Runtime& state, const void* address, std::size_t n_bytes) {
  refuse_unless(place_of(state, as_number(address)) == Place::kDevice &&
                    !state.device.memory.covering(as_number(address), n_bytes).empty(),
                kRtParamInvalid, "no device memory lies there");
}

bool is_readable(const Runtime& state, std::uint64_t address, std::size_t n_bytes) {
  return !state.device.memory.covering(address, n_bytes).empty();
}

Copy inner_copy(std::uint64_t destination, std::uint64_t source, std::size_t n_bytes) {
  return copy_of({reinterpret_cast<void*>(destination), n_bytes,
                  reinterpret_cast<const void*>(source), n_bytes, n_bytes, 1, kInnerDeviceToDevice},
                 Place::kDevice, Place::kDevice);
}

}  // namespace

ACL_EXPORT int aclrtGetMemcpyDescSize(MemcpyKind kind, std::size_t* n_bytes) {
  return call("aclrtGetMemcpyDescSize", Needs::kContext, [&](Runtime&) {
    require_given(n_bytes, "the result");
    require_inner(kind);
    *n_bytes = sizeof(CopyDescriptor);
  });
}

// Writes the descriptor at once.
ACL_EXPORT int aclrtSetMemcpyDesc(void* descriptor, MemcpyKind kind, void* source,
                                  void* destination, std::size_t n_bytes, void* configuration) {
  return call("aclrtSetMemcpyDesc", Needs::kContext, [&](Runtime& state) {
    trace(state, "bytes=%zu", n_bytes);
    require_inner(kind);
    refuse_unless(configuration == nullptr, kRtParamInvalid, "the configuration is reserved");
    require_device(state, descriptor, sizeof(CopyDescriptor));
    require_device(state, source, n_bytes);
    require_device(state, destination, n_bytes);
    const CopyDescriptor written{
        kDescriptorMagic, as_number(source), as_number(destination), n_bytes, {}};
    std::memcpy(descriptor, &written, sizeof written);
  });
}

ACL_EXPORT int aclrtMemcpyAsyncWithDesc(void* descriptor, MemcpyKind kind, Stream handle) {
  return call_on("aclrtMemcpyAsyncWithDesc", handle, [&](Runtime& state, const auto& stream) {
    require_inner(kind);
    require_device(state, descriptor, sizeof(CopyDescriptor));
    const std::uint64_t address = as_number(descriptor);
    submit(state, stream, LateWork{[&state, address](Runner& runner) {
             CopyDescriptor read{};
             if (is_readable(state, address, sizeof read)) {
               std::memcpy(&read, reinterpret_cast<const void*>(address), sizeof read);
             }
             if (read.magic != kDescriptorMagic) return runner.fail(Status::kIllegalAddress);
             runner.perform(inner_copy(read.destination, read.source, read.n_bytes));
           }});
  });
}

namespace {

// As rtMemcpyAsyncWithOffset and MemcpyAsyncCheckAddrCfg of hicann/runtime refuse them.
void require_copy_by_offset(const Runtime& state, std::size_t most_bytes,
                            std::size_t destination_offset, std::size_t n_bytes,
                            std::size_t source_offset, MemcpyKind kind) {
  constexpr std::size_t kMostBytes = std::size_t{4} << 30;
  constexpr std::size_t kMostOffset = 0xFFFFFFFFFFFF;
  refuse_unless(kind == kInnerDeviceToDevice, kRtParamInvalid, "only copies inside of one device");
  refuse_unless(state.settings.chip.copies_by_offset && state.settings.copies_by_offset,
                kRtFeatureNotSupport, "chip or firmware have no copies by offset");
  refuse_unless(n_bytes <= kMostBytes, kRtParamInvalid, "one such copy takes 4 GiB");
  refuse_unless(std::max(source_offset, destination_offset) <= kMostOffset, kRtParamInvalid,
                "an offset has 48 bits");
  refuse_unless(destination_offset < most_bytes && n_bytes <= most_bytes - destination_offset,
                kRtParamInvalid, "more than the destination has");
}

}  // namespace

// Both pointers lie in device memory, where they are read when the copy runs.
ACL_EXPORT int aclrtMemcpyAsyncWithOffset(void** destination, std::size_t most_bytes,
                                          std::size_t destination_offset, const void** source,
                                          std::size_t n_bytes, std::size_t source_offset,
                                          MemcpyKind kind, Stream handle) {
  return call_on("aclrtMemcpyAsyncWithOffset", handle, [&](Runtime& state, const auto& stream) {
    trace(state, "bytes=%zu stream=%d", n_bytes, stream->id);
    if (n_bytes == 0) return;
    require_copy_by_offset(state, most_bytes, destination_offset, n_bytes, source_offset, kind);
    require_device(state, destination, sizeof *destination);
    require_device(state, source, sizeof *source);
    submit(state, stream, LateWork{[=, &state](Runner& runner) {
             if (!is_readable(state, as_number(destination), sizeof *destination) ||
                 !is_readable(state, as_number(source), sizeof *source)) {
               return runner.fail(Status::kIllegalAddress);
             }
             runner.perform(inner_copy(as_number(*destination) + destination_offset,
                                       as_number(*source) + source_offset, n_bytes));
           }});
  });
}
