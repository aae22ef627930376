// Memory of the device and of the host.
#include <cstring>

#include "copies.hpp"
#include "models.hpp"

namespace simulated_ascend {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr std::size_t kUnitBytes = 32;

std::size_t whole_units(std::size_t n_bytes) {
  return (n_bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
}

void allocate(Runtime& state, void** result, std::size_t n_bytes, std::size_t extra_bytes) {
  require_given(result, "the result");
  *result = nullptr;
  trace(state, "bytes=%zu", n_bytes);
  refuse_unless(n_bytes != 0, kRtParamInvalid, "no bytes are asked for");
  refuse_unless(n_bytes <= state.device.memory.limit_bytes(), kRtMemoryAllocation,
                "more than the device has");
  const std::size_t alignment = n_bytes >= kHugePageBytes ? kHugePageBytes : simulator::kPageBytes;
  const auto address = state.device.memory.allocate(whole_units(n_bytes) + extra_bytes, alignment);
  *result = reinterpret_cast<void*>(address);
}

void free_device(Runtime& state, void* address) { state.device.memory.free(as_number(address)); }

void allocate_host(Runtime& state, void** result, std::size_t n_bytes) {
  require_given(result, "the result");
  trace(state, "bytes=%zu", n_bytes);
  *result = reinterpret_cast<void*>(state.device.memory.allocate_host(n_bytes));
}

void register_host(Runtime& state, void* address, std::size_t n_bytes) {
  require_given(address, "the address");
  refuse_unless(n_bytes != 0, kRtParamInvalid, "no bytes are registered");
  refuse_unless(place_of(state, as_number(address)) == Place::kPageable,
                kRtHostMemoryAlreadyRegistered, "the memory is registered or was allocated pinned");
  state.registered_host[as_number(address)] = n_bytes;
}

}  // namespace

Place place_of(const Runtime& state, std::uint64_t address) {
  if (const auto* found = state.device.memory.find(address)) {
    return found->kind == simulator::MemoryKind::kHost ? Place::kPinned : Place::kDevice;
  }
  auto registered = state.registered_host.upper_bound(address);
  if (registered == state.registered_host.begin()) return Place::kPageable;
  --registered;
  return address - registered->first < registered->second ? Place::kPinned : Place::kPageable;
}

}  // namespace simulated_ascend

using namespace simulated_ascend;

// Rounds up to 32 bytes and adds 32 more.
ACL_EXPORT int aclrtMalloc(void** address, std::size_t n_bytes, MallocPolicy) {
  return call("aclrtMalloc", Needs::kContext,
              [&](Runtime& state) { allocate(state, address, n_bytes, kUnitBytes); });
}

ACL_EXPORT int aclrtMallocCached(void** address, std::size_t n_bytes, MallocPolicy) {
  return call("aclrtMallocCached", Needs::kContext,
              [&](Runtime& state) { allocate(state, address, n_bytes, kUnitBytes); });
}

ACL_EXPORT int aclrtMallocWithCfg(void** address, std::size_t n_bytes, MallocPolicy,
                                  MallocConfiguration*) {
  return call("aclrtMallocWithCfg", Needs::kContext,
              [&](Runtime& state) { allocate(state, address, n_bytes, kUnitBytes); });
}

ACL_EXPORT int aclrtMallocAlign32(void** address, std::size_t n_bytes, MallocPolicy) {
  return call("aclrtMallocAlign32", Needs::kContext,
              [&](Runtime& state) { allocate(state, address, n_bytes, 0); });
}

// Does not wait: pending users of the memory read poison.
ACL_EXPORT int aclrtFree(void* address) {
  return call("aclrtFree", Needs::kContext, [&](Runtime& state) { free_device(state, address); });
}

ACL_EXPORT int aclrtFreeWithDevSync(void* address) {
  return call("aclrtFreeWithDevSync", Needs::kContext, [&](Runtime& state) {
    require_no_capture(state, *current_context());
    patiently(state, -1, kRtStreamSyncTimeout, [&] { state.device.scheduler.run_all(); });
    free_device(state, address);
  });
}

ACL_EXPORT int aclrtMallocHost(void** address, std::size_t n_bytes) {
  return call("aclrtMallocHost", Needs::kContext,
              [&](Runtime& state) { allocate_host(state, address, n_bytes); });
}

ACL_EXPORT int aclrtMallocHostWithCfg(void** address, std::uint64_t n_bytes, MallocConfiguration*) {
  return call("aclrtMallocHostWithCfg", Needs::kContext,
              [&](Runtime& state) { allocate_host(state, address, n_bytes); });
}

ACL_EXPORT int aclrtFreeHost(void* address) {
  return call("aclrtFreeHost", Needs::kInitialised,
              [&](Runtime& state) { state.device.memory.free_host(as_number(address)); });
}

ACL_EXPORT int aclrtHostRegister(void* address, std::uint64_t n_bytes, int type,
                                 void** device_address) {
  return call("aclrtHostRegister", Needs::kContext, [&](Runtime& state) {
    require_given(device_address, "the result");
    refuse_unless(type == 0, kRtFeatureNotSupport, "only ACL_HOST_REGISTER_MAPPED");
    register_host(state, address, n_bytes);
    *device_address = address;
  });
}

ACL_EXPORT int aclrtHostRegisterV2(void* address, std::uint64_t n_bytes, std::uint32_t flags) {
  return call("aclrtHostRegisterV2", Needs::kContext, [&](Runtime& state) {
    refuse_unless((flags & (kHostRegisterMapped | kHostRegisterPinned)) != 0, kRtParamInvalid,
                  "neither MAPPED nor PINNED is asked for");
    trace(state, "bytes=%zu", static_cast<std::size_t>(n_bytes));
    register_host(state, address, n_bytes);
  });
}

ACL_EXPORT int aclrtHostUnregister(void* address) {
  return call("aclrtHostUnregister", Needs::kInitialised, [&](Runtime& state) {
    refuse_unless(state.registered_host.erase(as_number(address)) == 1, kRtHostMemoryNotRegistered,
                  "the memory is not registered");
  });
}

ACL_EXPORT int aclrtGetMemInfo(MemoryAttribute attribute, std::size_t* free, std::size_t* total) {
  return call("aclrtGetMemInfo", Needs::kContext, [&](Runtime& state) {
    require_given(free, "the result");
    require_given(total, "the result");
    refuse_unless(attribute >= kMemoryDdr && attribute <= kMemoryHbmNormal, kRtParamInvalid,
                  "no kind of memory has this number");
    const auto& memory = state.device.memory;
    *total = memory.limit_bytes();
    *free = *total - std::min(memory.physical_bytes(), *total);
  });
}

ACL_EXPORT int aclrtPointerGetAttributes(const void* address, PointerAttributes* attributes) {
  return call("aclrtPointerGetAttributes", Needs::kContext, [&](Runtime& state) {
    require_given(attributes, "the result");
    *attributes = PointerAttributes{};
    switch (place_of(state, as_number(address))) {
      case Place::kDevice:
        attributes->location.type = kLocationDevice;
        attributes->page_bytes = simulator::kPageBytes;
        break;
      case Place::kPinned:
        attributes->location.type = kLocationHost;
        break;
      case Place::kPageable:
        attributes->location.type = kLocationUnregistered;
        break;
    }
  });
}
