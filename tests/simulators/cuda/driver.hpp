// The simulated CUDA driver: every function of driver_abi.hpp by its name there, on one simulated
// device.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "../device/device.hpp"
#include "cuda/driver_abi.hpp"

namespace simulated_cuda {

using namespace offload::cuda;

// Codes that only the simulator returns, by their documented values.
inline constexpr Result kIllegalState = static_cast<Result>(401);
inline constexpr Result kLossyQuery = static_cast<Result>(402);
inline constexpr Result kHostAlreadyRegistered = static_cast<Result>(712);
inline constexpr Result kHostNotRegistered = static_cast<Result>(713);
inline constexpr Result kNotPermitted = static_cast<Result>(800);
inline constexpr Result kStreamCaptureMerge = static_cast<Result>(902);
inline constexpr Result kStreamCaptureUnmatched = static_cast<Result>(903);
inline constexpr Result kStreamCaptureIsolation = static_cast<Result>(905);
inline constexpr Result kCapturedEvent = static_cast<Result>(907);

#define SIMULATED_DECLARATION(name, symbol, version, signature) Result name signature;
OFFLOAD_CUDA_FUNCTIONS(SIMULATED_DECLARATION)
#undef SIMULATED_DECLARATION

// Functions and ABI versions that other clients of the driver request.
Result get_proc_address(const char* symbol, void** function, int version, unsigned long long flags);
Result get_proc_address_v2(const char* symbol, void** function, int version,
                           unsigned long long flags, int* status);
Result context_get_device(Device* device);
Result graph_node_get_dependencies(GraphNode node, GraphNode* dependencies, EdgeData* data,
                                   std::size_t* n_dependencies);
Result graph_remove_dependencies(Graph graph, const GraphNode* from, const GraphNode* to,
                                 const EdgeData* data, std::size_t n_edges);
Result graph_get_edges_v1(Graph graph, GraphNode* from, GraphNode* to, std::size_t* n_edges);
Result stream_get_capture_info_v3(Stream stream, CaptureStatus* status, std::uint64_t* id,
                                  Graph* graph, const GraphNode** dependencies,
                                  const EdgeData** edges, std::size_t* n_dependencies);

// Requirements of a function at its call.
enum class Needs { kNothing, kDriver, kContext };

// The host time of a call on the virtual clock: while the device is idle, and while work is in
// flight.
struct CallCost {
  std::int64_t idle_ns = 0, in_flight_ns = 0;
};

struct DriverState {
  simulator::Device device;
  bool initialised = false;
  int n_devices = 1;
  int version = 13000;
  int n_retained = 0;           // of the primary context
  bool host_is_device = false;  // memory not allocated here counts as the device's
  std::map<std::string, CallCost> costs;
};

// One in the process, never destroyed: clients may call while they exit.
DriverState& driver();
// The thread's current context: null, or the only context.
Context& current_context();
// The primary context of the only device.
Context primary_context();

Result code_of(simulator::Status status);

// Counts the call, fails it if a test says so, and refuses it inside work, before cuInit, without a
// context, or after a fault. `body` runs under the device's mutex. Never throws.
template <class Body>
Result call(const char* symbol, Needs needs, const Body& body) noexcept {
  if (simulator::is_inside_work()) return kNotPermitted;
  try {
    DriverState& state = driver();
    const std::lock_guard lock(state.device.mutex);
    if (const auto code = state.device.ledger.note(symbol)) return static_cast<Result>(*code);
    if (needs != Needs::kNothing) {
      if (!state.initialised) return kNotInitialized;
      if (const auto fault = state.device.scheduler.fault()) return code_of(*fault);
    }
    if (needs == Needs::kContext && current_context() == nullptr) return kInvalidContext;
    if (const auto cost = state.costs.find(symbol); cost != state.costs.end()) {
      const bool in_flight = state.device.scheduler.is_busy();
      state.device.scheduler.host_takes(in_flight ? cost->second.in_flight_ns
                                                  : cost->second.idle_ns);
    }
    body(state.device);
    return kSuccess;
  } catch (const simulator::DeviceError& error) {
    return code_of(error.status);
  } catch (...) {
    return kUnknown;
  }
}

// Throws kInvalidValue unless the caller gave the address of a result.
inline void require_given(const void* result) {
  simulator::require(result != nullptr, simulator::Status::kInvalidValue);
}

template <class Handle>
Handle as_handle(std::uint64_t number) {
  return reinterpret_cast<Handle>(number);
}

template <class Handle>
std::uint64_t as_number(Handle handle) {
  return reinterpret_cast<std::uint64_t>(handle);
}

}  // namespace simulated_cuda
