#include "convert.hpp"

#include <cstring>

namespace simulated_cuda {

using simulator::Copy;
using simulator::Fill;
using simulator::KernelCall;
using simulator::Operand;
using simulator::Side;
using simulator::Status;

namespace {

constexpr Status kInvalid = Status::kInvalidValue;

Side side_of(MemoryType type) {
  switch (type) {
    case kMemoryHost:
      return Side::kHost;
    case kMemoryDevice:
      return Side::kDevice;
    case kMemoryUnified:
      return Side::kUnified;
    default:
      throw simulator::DeviceError(kInvalid);
  }
}

MemoryType type_of(Side side) {
  if (side == Side::kHost) return kMemoryHost;
  return side == Side::kDevice ? kMemoryDevice : kMemoryUnified;
}

}  // namespace

Copy to_copy(const Memcpy3D& params) {
  Copy copy;
  copy.width_bytes = params.width_bytes;
  copy.height = params.height;
  copy.depth = params.depth;
  simulator::require(copy.width_bytes != 0 && copy.height != 0 && copy.depth != 0, kInvalid);
  Operand& source = copy.source;
  source.side = side_of(params.source_type);
  source.address = source.side == Side::kHost ? reinterpret_cast<std::uint64_t>(params.source_host)
                                              : params.source_device;
  source.x_bytes = params.source_x_bytes;
  source.y = params.source_y;
  source.z = params.source_z;
  source.pitch_bytes = params.source_pitch;
  source.height = params.source_height;
  Operand& destination = copy.destination;
  destination.side = side_of(params.destination_type);
  destination.address = destination.side == Side::kHost
                            ? reinterpret_cast<std::uint64_t>(params.destination_host)
                            : params.destination_device;
  destination.x_bytes = params.destination_x_bytes;
  destination.y = params.destination_y;
  destination.z = params.destination_z;
  destination.pitch_bytes = params.destination_pitch;
  destination.height = params.destination_height;
  return copy;
}

Memcpy3D to_params(const Copy& copy) {
  Memcpy3D params{};
  params.width_bytes = copy.width_bytes;
  params.height = copy.height;
  params.depth = copy.depth;
  params.source_type = type_of(copy.source.side);
  if (copy.source.side == Side::kHost) {
    params.source_host = reinterpret_cast<const void*>(copy.source.address);
  } else {
    params.source_device = copy.source.address;
  }
  params.source_x_bytes = copy.source.x_bytes;
  params.source_y = copy.source.y;
  params.source_z = copy.source.z;
  params.source_pitch = copy.source.pitch_bytes;
  params.source_height = copy.source.height;
  params.destination_type = type_of(copy.destination.side);
  if (copy.destination.side == Side::kHost) {
    params.destination_host = reinterpret_cast<void*>(copy.destination.address);
  } else {
    params.destination_device = copy.destination.address;
  }
  params.destination_x_bytes = copy.destination.x_bytes;
  params.destination_y = copy.destination.y;
  params.destination_z = copy.destination.z;
  params.destination_pitch = copy.destination.pitch_bytes;
  params.destination_height = copy.destination.height;
  return params;
}

Fill to_fill(const MemsetNodeParams& params) {
  const unsigned int n_bytes = params.element_bytes;
  simulator::require(n_bytes == 1 || n_bytes == 2 || n_bytes == 4, kInvalid);
  simulator::require(params.width != 0 && params.height != 0, kInvalid);
  simulator::require(params.destination % n_bytes == 0, kInvalid);
  Fill fill;
  fill.destination = params.destination;
  fill.pitch_bytes = params.pitch;
  fill.value = params.value;
  fill.element_bytes = n_bytes;
  fill.width = params.width;
  fill.height = params.height;
  return fill;
}

MemsetNodeParams to_params(const Fill& fill) {
  MemsetNodeParams params{};
  params.destination = fill.destination;
  params.pitch = fill.pitch_bytes;
  params.value = fill.value;
  params.element_bytes = fill.element_bytes;
  params.width = fill.width;
  params.height = fill.height;
  return params;
}

namespace {

void copy_packed(KernelCall& call, void** extra) {
  const void* buffer = nullptr;
  const std::size_t* n_bytes = nullptr;
  for (; *extra != kLaunchEnd; extra += 2) {
    if (extra[0] == kLaunchBufferPointer) {
      buffer = extra[1];
    } else {
      simulator::require(extra[0] == kLaunchBufferSize, kInvalid);
      n_bytes = static_cast<const std::size_t*>(extra[1]);
    }
  }
  simulator::require(buffer != nullptr && n_bytes != nullptr, kInvalid);
  simulator::require(*n_bytes >= call.kernel->packed_bytes, kInvalid);
  const auto* bytes = static_cast<const unsigned char*>(buffer);
  call.arguments.assign(bytes, bytes + *n_bytes);
  call.packed = true;
}

void copy_parameters(KernelCall& call, void* const* parameters) {
  call.arguments.resize(call.kernel->packed_bytes);
  for (const simulator::Parameter& parameter : call.kernel->parameters) {
    simulator::require(parameters != nullptr && *parameters != nullptr, kInvalid);
    std::memcpy(call.arguments.data() + parameter.offset_bytes, *parameters, parameter.n_bytes);
    ++parameters;
  }
}

}  // namespace

KernelCall to_call(simulator::Device& device, const KernelNodeParams& params) {
  constexpr std::uint64_t kMostThreads = 1024;
  KernelCall call;
  const bool by_kernel = params.function == nullptr;
  const std::uint64_t handle = by_kernel ? as_number(params.kernel) : as_number(params.function);
  call.kernel = device.kernel(handle);
  call.by_library_handle = handle == call.kernel->library_handle;
  call.grid = {params.grid_x, params.grid_y, params.grid_z};
  call.block = {params.block_x, params.block_y, params.block_z};
  call.shared_bytes = params.shared_bytes;
  const std::uint64_t n_threads = std::uint64_t{params.block_x} * params.block_y * params.block_z;
  simulator::require(n_threads != 0 && n_threads <= kMostThreads, kInvalid);
  simulator::require(std::uint64_t{params.grid_x} * params.grid_y * params.grid_z != 0, kInvalid);
  // "If the user-specified dynamic shared memory size is larger than this value, the launch will
  // fail" (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES in cuda.h).
  simulator::require(params.shared_bytes <= call.kernel->most_shared_bytes, kInvalid);
  simulator::require(params.parameters == nullptr || params.extra == nullptr, kInvalid);
  if (params.extra != nullptr) {
    copy_packed(call, params.extra);
  } else {
    copy_parameters(call, params.parameters);
  }
  return call;
}

KernelNodeParams to_params(simulator::Node& node) {
  auto& call = std::get<KernelCall>(node.work);
  KernelNodeParams params{};
  if (call.by_library_handle) {
    params.kernel = as_handle<Kernel>(call.kernel->library_handle);
  } else {
    params.function = as_handle<Function>(call.kernel->handle);
  }
  params.grid_x = call.grid.x;
  params.grid_y = call.grid.y;
  params.grid_z = call.grid.z;
  params.block_x = call.block.x;
  params.block_y = call.block.y;
  params.block_z = call.block.z;
  params.shared_bytes = call.shared_bytes;
  params.context = primary_context();
  if (call.packed) {
    node.packed_bytes = call.arguments.size();
    node.packing = {kLaunchBufferPointer, call.arguments.data(), kLaunchBufferSize,
                    &node.packed_bytes, kLaunchEnd};
    params.extra = node.packing.data();
    return params;
  }
  node.addresses.clear();
  for (const simulator::Parameter& parameter : call.kernel->parameters) {
    node.addresses.push_back(call.arguments.data() + parameter.offset_bytes);
  }
  params.parameters = node.addresses.data();
  return params;
}

}  // namespace simulated_cuda
