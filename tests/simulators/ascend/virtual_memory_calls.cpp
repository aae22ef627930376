// Addresses without memory, physical memory, and mappings of one onto the other.
//
// Contract: CANN's reference of virtual memory management. One kind of page, of 2 MiB.
#include "runtime.hpp"

using namespace simulated_ascend;

namespace {

constexpr std::size_t kGranularityBytes = simulator::kGranularityBytes;

// aclrtMemAttr of physical memory that a device may have.
bool is_of_device(int attribute) {
  constexpr int kHbmHuge = 4, kHbmNormal = 5, kHbmHuge1G = 10, kNormal = 12, kP2pHuge1G = 17;
  return attribute == kHbmHuge || attribute == kHbmNormal || attribute == kHbmHuge1G ||
         (attribute >= kNormal && attribute <= kP2pHuge1G);
}

std::size_t whole_pages(std::size_t n_bytes) {
  return (n_bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
}

void require_properties(const Runtime& state, const PhysicalMemoryProperties& properties) {
  constexpr int kNone = 0, kPinned = 0;
  refuse_unless(properties.handle_type == kNone && properties.allocation_type == kPinned,
                kRtParamInvalid, "only pinned memory without a handle to share");
  refuse_unless(properties.location.type == kLocationDevice, kRtFeatureNotSupport,
                "only memory of a device");
  refuse_unless(properties.location.id < static_cast<std::uint32_t>(state.settings.n_devices),
                kRtInvalidDeviceid, "there is no such device");
  refuse_unless(is_of_device(properties.attribute), kRtParamInvalid,
                "a device has no memory of this kind");
}

}  // namespace

ACL_EXPORT int aclrtReserveMemAddress(void** address, std::size_t n_bytes, std::size_t alignment,
                                      void* expected, std::uint64_t flags) {
  return call("aclrtReserveMemAddress", Needs::kInitialised, [&](Runtime& state) {
    constexpr std::uint64_t kHugePages = 1;  // of older releases; reserved since
    require_given(address, "the result");
    refuse_unless(n_bytes != 0 && n_bytes <= SIZE_MAX - kGranularityBytes, kRtParamInvalid,
                  "no bytes, or more than there are addresses");
    refuse_unless(alignment == 0 && flags <= kHugePages, kRtParamInvalid,
                  "the alignment and the flags are reserved");
    refuse_unless(expected == nullptr, kRtFeatureNotSupport,
                  "the simulated device chooses addresses itself");
    trace(state, "bytes=%zu", n_bytes);
    *address = reinterpret_cast<void*>(state.device.memory.reserve(whole_pages(n_bytes), 0, 0));
  });
}

// Errors: 107000 while something is mapped in it.
ACL_EXPORT int aclrtReleaseMemAddress(void* address) {
  return call("aclrtReleaseMemAddress", Needs::kInitialised, [&](Runtime& state) {
    auto& memory = state.device.memory;
    memory.unreserve(as_number(address), memory.reserved_bytes(as_number(address)));
  });
}

ACL_EXPORT int aclrtMallocPhysical(void** handle, std::size_t n_bytes,
                                   const PhysicalMemoryProperties* properties,
                                   std::uint64_t flags) {
  return call("aclrtMallocPhysical", Needs::kInitialised, [&](Runtime& state) {
    require_given(handle, "the result");
    require_given(properties, "the properties");
    refuse_unless(flags == 0, kRtParamInvalid, "the flags are reserved");
    require_properties(state, *properties);
    refuse_unless(n_bytes != 0, kRtParamInvalid, "no bytes are asked for");
    refuse_unless(n_bytes <= state.device.memory.limit_bytes(), kRtMemoryAllocation,
                  "more than the device has");
    trace(state, "bytes=%zu", n_bytes);
    *handle = reinterpret_cast<void*>(state.device.memory.create(whole_pages(n_bytes))->handle);
  });
}

// The memory is freed with its last mapping.
ACL_EXPORT int aclrtFreePhysical(void* handle) {
  return call("aclrtFreePhysical", Needs::kInitialised,
              [&](Runtime& state) { state.device.memory.release(as_number(handle)); });
}

ACL_EXPORT int aclrtMapMem(void* address, std::size_t n_bytes, std::size_t offset, void* handle,
                           std::uint64_t flags) {
  return call("aclrtMapMem", Needs::kInitialised, [&](Runtime& state) {
    auto& memory = state.device.memory;
    refuse_unless(offset == 0 && flags == 0, kRtParamInvalid,
                  "the offset and the flags are reserved");
    refuse_unless(n_bytes == memory.chunk_bytes(as_number(handle)), kRtParamInvalid,
                  "physical memory is mapped as a whole");
    memory.map(as_number(address), n_bytes, 0, as_number(handle));
    memory.set_access(as_number(address), n_bytes, /*readable=*/true, /*writable=*/true);
    trace(state, "bytes=%zu", n_bytes);
  });
}

ACL_EXPORT int aclrtUnmapMem(void* address) {
  return call("aclrtUnmapMem", Needs::kInitialised, [&](Runtime& state) {
    auto& memory = state.device.memory;
    const auto* const found = memory.find(as_number(address));
    refuse_unless(found != nullptr && found->begin == as_number(address), kRtParamInvalid,
                  "nothing is mapped there");
    memory.unmap(as_number(address), found->n_bytes);
  });
}
