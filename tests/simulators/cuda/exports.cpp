// Exports of the library: the functions by which clients find all others, and those by which a test
// controls the device.
#include <algorithm>
#include <cstring>

#include "driver.hpp"

#define SIMULATOR_EXPORT extern "C" __attribute__((visibility("default")))

namespace simulated_cuda {
namespace {

struct Symbol {
  const char* name;
  int version;  // of the first driver with this ABI of the function
  void* function;
};

#define SIMULATED_SYMBOL(name, symbol, version, signature) \
  {symbol, version, reinterpret_cast<void*>(&name)},
const Symbol kSymbols[] = {
    OFFLOAD_CUDA_FUNCTIONS(SIMULATED_SYMBOL)
    // Others that clients request, and further versions.
    {"cuGetProcAddress", 11030, reinterpret_cast<void*>(&get_proc_address)},
    {"cuGetProcAddress", 12000, reinterpret_cast<void*>(&get_proc_address_v2)},
    {"cuCtxGetDevice", 2000, reinterpret_cast<void*>(&context_get_device)},
    {"cuGraphRemoveDependencies", 12030, reinterpret_cast<void*>(&graph_remove_dependencies)},
    {"cuGraphGetEdges", 10000, reinterpret_cast<void*>(&graph_get_edges_v1)},
    {"cuGraphNodeGetDependencies", 12030, reinterpret_cast<void*>(&graph_node_get_dependencies)},
    {"cuStreamGetCaptureInfo", 12030, reinterpret_cast<void*>(&stream_get_capture_info_v3)},
};
#undef SIMULATED_SYMBOL

// The newest ABI that is not newer than the requested one.
const Symbol* find_symbol(const char* name, int version) {
  const Symbol* best = nullptr;
  for (const Symbol& symbol : kSymbols) {
    if (std::strcmp(symbol.name, name) != 0 || symbol.version > version) continue;
    if (best == nullptr || symbol.version > best->version) best = &symbol;
  }
  return best;
}

}  // namespace

Result get_proc_address_v2(const char* symbol, void** function, int version,
                           unsigned long long flags, int* status) {
  constexpr int kFound = 0, kMissing = 1;
  constexpr unsigned long long kThreadDefaultStream = 2;
  if (symbol == nullptr || function == nullptr) return kInvalidValue;
  DriverState& state = driver();
  const std::lock_guard lock(state.device.mutex);
  const Symbol* const found = find_symbol(symbol, version);
  const bool usable = found != nullptr && version <= state.version &&
                      (flags & kThreadDefaultStream) == 0 && !state.device.ledger.is_hidden(symbol);
  *function = usable ? found->function : nullptr;
  if (status != nullptr) *status = usable ? kFound : kMissing;
  return usable ? kSuccess : kNotFound;
}

Result get_proc_address(const char* symbol, void** function, int version,
                        unsigned long long flags) {
  return get_proc_address_v2(symbol, function, version, flags, nullptr);
}

}  // namespace simulated_cuda

using simulated_cuda::driver;

SIMULATOR_EXPORT int cuGetProcAddress_v2(const char* symbol, void** function, int version,
                                         unsigned long long flags, int* status) {
  return simulated_cuda::get_proc_address_v2(symbol, function, version, flags, status);
}

SIMULATOR_EXPORT int cuGetProcAddress(const char* symbol, void** function, int version,
                                      unsigned long long flags) {
  return simulated_cuda::get_proc_address(symbol, function, version, flags);
}

// Makes a kernel and returns its handle as a CUfunction; 0 without a name or function. `function`
// runs on the thread that waits for the work; a result other than 0 fails the device. Parameters
// lie in its argument block as simulator::lay_out says, or at the given offsets.
SIMULATOR_EXPORT std::uint64_t sim_kernel(const char* name, std::size_t n_parameters,
                                          const std::size_t* sizes_bytes,
                                          const std::size_t* offsets_bytes,
                                          simulator::KernelFunction function, void* user) {
  if (name == nullptr || function == nullptr) return 0;
  const std::lock_guard lock(driver().device.mutex);
  auto kernel = std::make_shared<simulator::Kernel>();
  kernel->name = name;
  kernel->function = function;
  kernel->user = user;
  simulator::lay_out(*kernel, sizes_bytes, n_parameters);
  for (std::size_t index = 0; offsets_bytes != nullptr && index < n_parameters; ++index) {
    kernel->parameters[index].offset_bytes = offsets_bytes[index];
    kernel->packed_bytes =
        std::max(kernel->packed_bytes, offsets_bytes[index] + sizes_bytes[index]);
  }
  driver().device.add_kernel(kernel);
  return kernel->handle;
}

// Sets the work of a kernel before it waits for a kernel that it may overlap; it gets the same
// arguments. -1 for an unknown function.
SIMULATOR_EXPORT int sim_set_prologue(std::uint64_t function, simulator::KernelFunction prologue,
                                      void* user) {
  const std::lock_guard lock(driver().device.mutex);
  const auto kernel = driver().device.kernels.find(function);
  if (kernel == nullptr) return -1;
  kernel->prologue = prologue;
  kernel->prologue_user = user;
  return 0;
}

// Puts the grid of the kernel whose function runs on this thread: blocks in x, y and z.
SIMULATOR_EXPORT void sim_running_grid(unsigned int* sizes) {
  const simulator::Dimensions grid = simulator::running_grid();
  sizes[0] = grid.x;
  sizes[1] = grid.y;
  sizes[2] = grid.z;
}

// 1: kernels made from here on are loaded at their first use, as by CUDA_MODULE_LOADING=LAZY; 0:
// when they are made.
SIMULATOR_EXPORT void sim_set_lazy_loading(int lazy) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.loads_late = lazy != 0;
}

// 1: the kernel's code is on the device; 0: not yet; -1: an unknown function.
SIMULATOR_EXPORT int sim_is_loaded(std::uint64_t function) {
  const std::lock_guard lock(driver().device.mutex);
  const auto kernel = driver().device.kernels.find(function);
  return kernel == nullptr ? -1 : static_cast<int>(kernel->is_loaded);
}

// Sets the host time of each call of a function on the virtual clock: while the device is idle, and
// while work is in flight. -1, without any change, if there is no such clock.
SIMULATOR_EXPORT int sim_set_call_ns(const char* function, std::int64_t idle_ns,
                                     std::int64_t in_flight_ns) {
  const std::lock_guard lock(driver().device.mutex);
  if (!driver().device.scheduler.has_clock()) return -1;
  driver().costs[function] = {idle_ns, in_flight_ns};
  return 0;
}

// The host's time on the virtual clock: durations of its calls and waits.
SIMULATOR_EXPORT std::int64_t sim_host_ns() {
  const std::lock_guard lock(driver().device.mutex);
  return driver().device.scheduler.host_ns();
}

// The same kernel's handle as a CUkernel; 0 for an unknown function.
SIMULATOR_EXPORT std::uint64_t sim_library_kernel(std::uint64_t function) {
  const std::lock_guard lock(driver().device.mutex);
  const auto kernel = driver().device.kernels.find(function);
  return kernel == nullptr ? 0 : kernel->library_handle;
}

// 1: work runs as soon as it is issued; 0: when the host waits for it, or queries whether it is
// done.
SIMULATOR_EXPORT void sim_set_eager(int eager) {
  const std::lock_guard lock(driver().device.mutex);
  try {
    driver().device.scheduler.set_eager(eager != 0);
  } catch (const simulator::DeviceError&) {
    // The fault stays, and the next call reports it.
  }
}

// The nth call from now (1: the next) of a function, by its name without a version, does nothing
// and returns this error code.
SIMULATOR_EXPORT void sim_fail(const char* function, std::uint64_t nth, int code) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.ledger.fail(function, nth, code);
}

// How often a function was called since the start or the last reset, failures included.
SIMULATOR_EXPORT std::uint64_t sim_calls(const char* function) {
  const std::lock_guard lock(driver().device.mutex);
  return driver().device.ledger.count(function);
}

// Counts start at 0 again; planned failures and hidden functions are forgotten.
SIMULATOR_EXPORT void sim_forget_calls() {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.ledger.reset();
}

// From now on the driver lacks this function.
SIMULATOR_EXPORT void sim_hide(const char* function) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.ledger.hide(function);
}

// The device fails permanently, as after an illegal address.
SIMULATOR_EXPORT void sim_fault() {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.scheduler.set_fault(simulator::Status::kIllegalAddress);
}

// The device's memory: the maximum of plain allocations and physical chunks together.
SIMULATOR_EXPORT void sim_set_memory_limit(std::size_t n_bytes) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.memory.set_limit(n_bytes);
}

// The unit in which memory is made and mapped: by default 2 MiB. -1, without any change, unless it
// is a power of two and at least a page.
SIMULATOR_EXPORT int sim_set_granularity(std::size_t n_bytes) {
  const std::lock_guard lock(driver().device.mutex);
  try {
    driver().device.memory.set_granularity(n_bytes);
  } catch (const simulator::DeviceError&) {
    return -1;
  }
  return 0;
}

// The fate of freed plain memory: 0 it stays readable, poisoned; 1 it faults; 2 its address goes to
// the next allocation of as many pages.
SIMULATOR_EXPORT void sim_set_free_policy(int policy) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.memory.set_free_policy(static_cast<simulator::FreePolicy>(policy));
}

// 1: copy and fill nodes of an executable may not go from plain to mapped memory or back.
SIMULATOR_EXPORT void sim_set_strict_kinds(int strict) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.graphs.set_strict_kinds(strict != 0);
}

// 1: cuMemcpyAsync treats memory that was not allocated here as the device's.
SIMULATOR_EXPORT void sim_set_host_is_device(int is_device) {
  const std::lock_guard lock(driver().device.mutex);
  driver().host_is_device = is_device != 0;
}

// The order of graph nodes that edges leave unordered, from the next launch on: 0 last added first,
// 1 first added first, 2 random.
SIMULATOR_EXPORT void sim_set_node_order(int order, std::uint64_t seed) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.graphs.set_node_order(static_cast<simulator::NodeOrder>(order), seed);
}

// The nth copy that runs from now on (1: the next) is a fault of the device instead.
SIMULATOR_EXPORT void sim_fault_copy(std::uint64_t nth) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.scheduler.fault_copy(nth);
}

// From here on executable graphs take this much device memory for each of their nodes.
SIMULATOR_EXPORT void sim_set_node_bytes(std::size_t n_bytes) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.graphs.set_node_bytes(n_bytes);
}

// From here on events read a virtual clock, on which each kernel and each copy takes this many ns,
// and each copy to an address given to sim_set_copy_ns its stated time.
SIMULATOR_EXPORT void sim_set_clock(std::int64_t kernel_ns, std::int64_t copy_ns) {
  const std::lock_guard lock(driver().device.mutex);
  driver().device.scheduler.set_clock({kernel_ns, copy_ns, {}});
}

// -1, without any change, if there is no such clock.
SIMULATOR_EXPORT int sim_set_copy_ns(std::uint64_t to, std::int64_t duration_ns) {
  const std::lock_guard lock(driver().device.mutex);
  try {
    driver().device.scheduler.set_copy_ns(to, duration_ns);
  } catch (const simulator::DeviceError&) {
    return -1;
  }
  return 0;
}

// Bytes of executed copies from memory of the host; copies staged at issue do not count.
SIMULATOR_EXPORT std::uint64_t sim_bytes_from_host() {
  const std::lock_guard lock(driver().device.mutex);
  return driver().device.scheduler.bytes_from_host();
}

// The version that the driver reports; it has no newer functions.
SIMULATOR_EXPORT void sim_set_driver_version(int version) {
  const std::lock_guard lock(driver().device.mutex);
  driver().version = version;
}

// 0 or 1 devices.
SIMULATOR_EXPORT void sim_set_device_count(int count) {
  const std::lock_guard lock(driver().device.mutex);
  driver().n_devices = count;
}

// Bytes of plain device memory that are allocated.
SIMULATOR_EXPORT std::size_t sim_live_bytes() {
  const std::lock_guard lock(driver().device.mutex);
  return driver().device.memory.live_bytes();
}

// Bytes of plain device memory and of physical chunks that a handle or mapping still holds.
SIMULATOR_EXPORT std::size_t sim_physical_bytes() {
  const std::lock_guard lock(driver().device.mutex);
  return driver().device.memory.physical_bytes();
}

// Bytes of pinned host memory.
SIMULATOR_EXPORT std::size_t sim_host_bytes() {
  const std::lock_guard lock(driver().device.mutex);
  return driver().device.memory.host_bytes();
}

// The number of live "stream", "event", "graph", "executable", "module", "kernel", "reservation",
// "mapping" or "memory handle"; -1 for another word.
SIMULATOR_EXPORT std::int64_t sim_live_objects(const char* kind) {
  const std::lock_guard lock(driver().device.mutex);
  const simulator::Device& device = driver().device;
  const auto is = [kind](const char* word) { return std::strcmp(kind, word) == 0; };
  if (is("stream")) return static_cast<std::int64_t>(device.scheduler.size());
  if (is("event")) return static_cast<std::int64_t>(device.events.size());
  if (is("graph")) return static_cast<std::int64_t>(device.graphs.n_graphs());
  if (is("executable")) return static_cast<std::int64_t>(device.graphs.n_executables());
  if (is("module")) return static_cast<std::int64_t>(device.modules.size());
  if (is("kernel")) return static_cast<std::int64_t>(device.kernels.size());
  if (is("reservation")) return static_cast<std::int64_t>(device.memory.n_reservations());
  if (is("mapping")) return static_cast<std::int64_t>(device.memory.n_mappings());
  if (is("memory handle")) return static_cast<std::int64_t>(device.memory.n_chunks());
  return -1;
}

// 1 if the device may read all of [address, address + n_bytes): for kernels that fail rather than
// end the process.
SIMULATOR_EXPORT int sim_is_accessible(std::uint64_t address, std::size_t n_bytes) {
  const std::lock_guard lock(driver().device.mutex);
  return driver().device.memory.covering(address, n_bytes).empty() ? 0 : 1;
}

// Restores the initial state: memory, streams, graphs, kernels, counts, planned failures, faults
// and settings. The driver stays initialised and its context valid. 0; -1 without any change while
// work runs.
SIMULATOR_EXPORT int sim_reset() {
  const std::lock_guard lock(driver().device.mutex);
  if (!driver().device.reset()) return -1;
  driver().n_devices = 1;
  driver().version = 13000;
  driver().host_is_device = false;
  driver().costs.clear();
  return 0;
}
