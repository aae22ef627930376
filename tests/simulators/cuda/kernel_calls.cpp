// Modules, kernels and their launches.
#include <algorithm>

#include "convert.hpp"
#include "driver.hpp"

namespace simulated_cuda {

using simulator::Status;

Result module_load_data(Module* module, const void* image) {
  return call("cuModuleLoadData", Needs::kContext, [&](simulator::Device& device) {
    require_given(module);
    require_given(image);
    device.captures.require_safe();
    *module = as_handle<Module>(device.modules.add(std::make_shared<simulator::Module>())->handle);
  });
}

Result module_unload(Module module) {
  return call("cuModuleUnload", Needs::kContext, [&](simulator::Device& device) {
    device.captures.require_safe();
    device.modules.get(as_number(module), Status::kInvalidHandle);
    device.modules.remove(as_number(module));
  });
}

Result module_get_function(Function* function, Module module, const char* name) {
  Result result = kNotFound;
  const Result refused =
      call("cuModuleGetFunction", Needs::kContext, [&](simulator::Device& device) {
        require_given(function);
        require_given(name);
        device.modules.get(as_number(module), Status::kInvalidHandle);
        for (const auto& kernel : device.kernels.all()) {
          if (kernel->name != name) continue;
          device.load(*kernel);
          *function = as_handle<Function>(kernel->handle);
          result = kSuccess;
        }
      });
  return refused != kSuccess ? refused : result;
}

Result function_get_name(const char** name, Function function) {
  return call("cuFuncGetName", Needs::kDriver, [&](simulator::Device& device) {
    require_given(name);
    *name = device.kernel(as_number(function))->name.c_str();
  });
}

namespace {

// Of CUfunction_attribute in cuda.h: the threads of a block, and the dynamic shared memory that a
// launch may ask for.
constexpr int kMostThreads = 0, kMostDynamicSharedBytes = 8;

// Of a block on compute capability 9.0, if a kernel asks for it; less, 1 KiB of each block is the
// system's (CUDA programming guide, compute capability 9.x, "Shared Memory").
constexpr int kMostSharedBytes = 227 << 10;

}  // namespace

Result function_get_attribute(int* value, int attribute, Function function) {
  // Of the other queried ones none is used: static shared, constant and local memory.
  return call("cuFuncGetAttribute", Needs::kContext, [&](simulator::Device& device) {
    require_given(value);
    const auto found = device.kernel(as_number(function));
    simulator::require(attribute >= kMostThreads && attribute <= kMostDynamicSharedBytes,
                       Status::kInvalidValue);
    *value = attribute == kMostThreads              ? 1024
             : attribute == kMostDynamicSharedBytes ? static_cast<int>(found->most_shared_bytes)
                                                    : 0;
  });
}

Result function_set_attribute(Function function, int attribute, int value) {
  return call("cuFuncSetAttribute", Needs::kContext, [&](simulator::Device& device) {
    const auto found = device.kernel(as_number(function));
    simulator::require(
        attribute == kMostDynamicSharedBytes && value >= 0 && value <= kMostSharedBytes,
        Status::kInvalidValue);
    found->most_shared_bytes = static_cast<unsigned int>(value);
  });
}

namespace {

void put_parameter(simulator::Device& device, std::uint64_t kernel, std::size_t index,
                   std::size_t* offset, std::size_t* n_bytes) {
  require_given(offset);
  const auto found = device.kernel(kernel);
  simulator::require(index < found->parameters.size(), Status::kInvalidValue);
  *offset = found->parameters[index].offset_bytes;
  if (n_bytes != nullptr) *n_bytes = found->parameters[index].n_bytes;
}

}  // namespace

Result function_get_param_info(Function function, std::size_t index, std::size_t* offset,
                               std::size_t* n_bytes) {
  return call("cuFuncGetParamInfo", Needs::kDriver, [&](simulator::Device& device) {
    put_parameter(device, as_number(function), index, offset, n_bytes);
  });
}

Result kernel_get_function(Function* function, Kernel kernel) {
  return call("cuKernelGetFunction", Needs::kContext, [&](simulator::Device& device) {
    require_given(function);
    const auto found = device.kernel(as_number(kernel));
    device.load(*found);
    *function = as_handle<Function>(found->handle);
  });
}

Result kernel_get_name(const char** name, Kernel kernel) {
  return call("cuKernelGetName", Needs::kDriver, [&](simulator::Device& device) {
    require_given(name);
    *name = device.kernel(as_number(kernel))->name.c_str();
  });
}

Result kernel_get_param_info(Kernel kernel, std::size_t index, std::size_t* offset,
                             std::size_t* n_bytes) {
  return call("cuKernelGetParamInfo", Needs::kDriver, [&](simulator::Device& device) {
    put_parameter(device, as_number(kernel), index, offset, n_bytes);
  });
}

Result launch_kernel(Function function, unsigned int grid_x, unsigned int grid_y,
                     unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                     unsigned int block_z, unsigned int shared_bytes, Stream stream,
                     void** parameters, void** extra) {
  return call("cuLaunchKernel", Needs::kContext, [&](simulator::Device& device) {
    const KernelNodeParams params{function, grid_x,       grid_y,     grid_z, block_x, block_y,
                                  block_z,  shared_bytes, parameters, extra,  nullptr, nullptr};
    const auto on = device.scheduler.get(as_number(stream));
    auto launched = to_call(device, params);
    device.load(*device.kernel(launched.kernel->handle));
    device.submit(*on, std::move(launched));
  });
}

namespace {

// Programmatic launches by cuda.h: by the order of the stream; by events, which the simulator does
// not have and therefore refuses.
constexpr int kProgrammaticSerialisation = 6, kProgrammaticEvent = 7, kLaunchCompletionEvent = 12;

bool is_set(const LaunchAttribute& attribute) {
  return std::any_of(attribute.value, attribute.value + 4, [](unsigned char one) { return one; });
}

}  // namespace

Result launch_kernel_ex(const LaunchConfig* config, Function function, void** parameters,
                        void** extra) {
  bool is_unknown = false;
  const Result result = call("cuLaunchKernelEx", Needs::kContext, [&](simulator::Device& device) {
    require_given(config);
    for (unsigned int index = 0; index < config->n_attributes; ++index) {
      const int id = config->attributes[index].id;
      is_unknown |= id == kProgrammaticEvent || id == kLaunchCompletionEvent;
    }
    if (is_unknown) return;
    const KernelNodeParams params{
        function,        config->grid_x,  config->grid_y,  config->grid_z,
        config->block_x, config->block_y, config->block_z, config->shared_bytes,
        parameters,      extra,           nullptr,         nullptr};
    auto launched = to_call(device, params);
    for (unsigned int index = 0; index < config->n_attributes; ++index) {
      const LaunchAttribute& attribute = config->attributes[index];
      if (attribute.id == kProgrammaticSerialisation) launched.overlaps = is_set(attribute);
      auto& value = launched.attributes[attribute.id];
      std::copy(std::begin(attribute.value), std::end(attribute.value), value.begin());
    }
    device.load(*device.kernel(launched.kernel->handle));
    const auto on = device.scheduler.get(as_number(config->stream));
    device.submit(*on, std::move(launched));
  });
  return is_unknown ? kNotSupported : result;
}

Result launch_host_function(Stream stream, void (*function)(void*), void* user_data) {
  return call("cuLaunchHostFunc", Needs::kContext, [&](simulator::Device& device) {
    simulator::require(function != nullptr, Status::kInvalidValue);
    const auto on = device.scheduler.get(as_number(stream));
    device.submit(*on, simulator::HostCall{function, user_data});
  });
}

}  // namespace simulated_cuda
