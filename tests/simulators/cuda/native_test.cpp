// The simulated driver from C++, so that it runs under the sanitizers: every kind of object is
// made, used, freed, and used once more.
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cuda/driver_abi.hpp"

using namespace offload::cuda;

extern "C" int cuGetProcAddress_v2(const char*, void**, int, unsigned long long, int*);
extern "C" std::uint64_t sim_kernel(const char*, std::size_t, const std::size_t*,
                                    const std::size_t*, int (*)(const void*, void*), void*);
extern "C" std::size_t sim_physical_bytes();
extern "C" int sim_reset();

namespace {

struct Functions {
#define MEMBER(name, symbol, version, signature) Result(*name) signature = nullptr;
  OFFLOAD_CUDA_FUNCTIONS(MEMBER)
#undef MEMBER
};

Functions resolve() {
  Functions found;
#define RESOLVE(name, symbol, version, signature)                                           \
  CHECK_THAT(cuGetProcAddress_v2(symbol, reinterpret_cast<void**>(&found.name), version, 0, \
                                 nullptr) == kSuccess);
  OFFLOAD_CUDA_FUNCTIONS(RESOLVE)
#undef RESOLVE
  return found;
}

constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;

struct Addition {
  DevicePointer address;
  int number;
};

int add(const void* arguments, void*) {
  Addition addition{};
  std::memcpy(&addition.address, arguments, sizeof(addition.address));
  std::memcpy(&addition.number, static_cast<const char*>(arguments) + 8, sizeof(int));
  if (addition.address == 0) return 1;
  *reinterpret_cast<int*>(addition.address) += addition.number;
  return 0;
}

Function addition_kernel() {
  const std::size_t sizes[] = {8, 4};
  return reinterpret_cast<Function>(sim_kernel("add", 2, sizes, nullptr, add, nullptr));
}

void launch(const Functions& cuda, Function kernel, Stream stream, Addition addition) {
  void* parameters[] = {&addition.address, &addition.number};
  CHECK_THAT(cuda.launch_kernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr) ==
             kSuccess);
}

int value_at(const Functions& cuda, DevicePointer address) {
  int value = 0;
  CHECK_THAT(cuda.copy_to_host(&value, address, sizeof(value)) == kSuccess);
  return value;
}

void test_memory(const Functions& cuda) {
  DevicePointer plain = 0, reserved = 0;
  CHECK_THAT(cuda.memory_allocate(&plain, 100) == kSuccess);
  AllocationProperties properties{};
  properties.type = 1;
  properties.location = {1, 0};
  MemoryHandle chunk = 0;
  CHECK_THAT(cuda.memory_create(&chunk, kGranularityBytes, &properties, 0) == kSuccess);
  CHECK_THAT(cuda.address_reserve(&reserved, 2 * kGranularityBytes, 0, 0, 0) == kSuccess);
  const AccessDescription access{{1, 0}, 3};
  for (const DevicePointer at : {reserved, reserved + kGranularityBytes}) {
    CHECK_THAT(cuda.memory_map(at, kGranularityBytes, 0, chunk, 0) == kSuccess);
    CHECK_THAT(cuda.memory_set_access(at, kGranularityBytes, &access, 1) == kSuccess);
  }
  const int written = 42;
  CHECK_THAT(cuda.copy_to_device(reserved, &written, sizeof(written)) == kSuccess);
  CHECK_THAT(value_at(cuda, reserved + kGranularityBytes) == written);
  CHECK_THAT(sim_physical_bytes() == kGranularityBytes + 100);
  CHECK_THAT(cuda.memory_unmap(reserved, 2 * kGranularityBytes) == kSuccess);
  CHECK_THAT(cuda.address_free(reserved, 2 * kGranularityBytes) == kSuccess);
  CHECK_THAT(cuda.memory_release(chunk) == kSuccess);
  CHECK_THAT(cuda.memory_free(plain) == kSuccess);
  CHECK_THAT(cuda.memory_free(plain) == kInvalidValue);
  CHECK_THAT(sim_physical_bytes() == 0);
}

Graph capture_two(const Functions& cuda, Function kernel, Stream stream, DevicePointer data) {
  Graph graph = nullptr;
  CHECK_THAT(cuda.stream_begin_capture(stream, kCaptureThreadLocal) == kSuccess);
  launch(cuda, kernel, stream, {data, 1});
  CHECK_THAT(cuda.memset_d32_async(data + 4, 7, 1, stream) == kSuccess);
  CHECK_THAT(cuda.stream_end_capture(stream, &graph) == kSuccess);
  return graph;
}

void test_graphs(const Functions& cuda) {
  const Function kernel = addition_kernel();
  Stream stream = nullptr;
  DevicePointer data = 0;
  CHECK_THAT(cuda.stream_create(&stream, 1) == kSuccess);
  CHECK_THAT(cuda.memory_allocate(&data, 8) == kSuccess);
  CHECK_THAT(cuda.memset_d8_async(data, 0, 8, stream) == kSuccess);
  Graph graph = capture_two(cuda, kernel, stream, data), clone = nullptr;
  CHECK_THAT(cuda.graph_clone(&clone, graph) == kSuccess);
  std::size_t n_nodes = 2;
  GraphNode nodes[2] = {}, twin = nullptr;
  CHECK_THAT(cuda.graph_get_nodes(graph, nodes, &n_nodes) == kSuccess);
  CHECK_THAT(cuda.graph_node_find_in_clone(&twin, nodes[0], clone) == kSuccess);
  CHECK_THAT(cuda.graph_destroy(graph) == kSuccess);
  GraphExec exec = nullptr;
  CHECK_THAT(cuda.graph_instantiate(&exec, clone, 0) == kSuccess);
  CHECK_THAT(cuda.graph_launch(exec, stream) == kSuccess);
  KernelNodeParams params{};
  CHECK_THAT(cuda.graph_kernel_get_params(twin, &params) == kSuccess);
  int number = 10;
  void* parameters[] = {&data, &number};
  params.parameters = parameters;
  CHECK_THAT(cuda.graph_exec_kernel_set_params(exec, twin, &params) == kSuccess);
  CHECK_THAT(cuda.graph_exec_kernel_set_params(exec, nodes[0], &params) == kInvalidValue);
  CHECK_THAT(cuda.graph_launch(exec, stream) == kSuccess);
  CHECK_THAT(cuda.graph_exec_destroy(exec) == kSuccess);
  CHECK_THAT(cuda.graph_destroy(clone) == kSuccess);
  CHECK_THAT(cuda.stream_destroy(stream) == kSuccess);
  CHECK_THAT(value_at(cuda, data) == 11 && value_at(cuda, data + 4) == 7);
  CHECK_THAT(cuda.stream_synchronize(stream) == kInvalidHandle);
}

void test_threads(const Functions& cuda, Context context) {
  constexpr int kThreads = 4, kLaunches = 100;
  const Function kernel = addition_kernel();
  DevicePointer data = 0;
  CHECK_THAT(cuda.memory_allocate(&data, kThreads * sizeof(int)) == kSuccess);
  CHECK_THAT(cuda.memset_d8_async(data, 0, kThreads * sizeof(int), nullptr) == kSuccess);
  CHECK_THAT(cuda.stream_synchronize(nullptr) == kSuccess);
  std::vector<std::thread> threads;
  for (int index = 0; index < kThreads; ++index) {
    threads.emplace_back([&, index] {
      Stream stream = nullptr;
      CHECK_THAT(cuda.context_set_current(context) == kSuccess);
      CHECK_THAT(cuda.stream_create(&stream, 1) == kSuccess);
      const DevicePointer at = data + static_cast<DevicePointer>(index) * sizeof(int);
      for (int count = 0; count < kLaunches; ++count) launch(cuda, kernel, stream, {at, 1});
      CHECK_THAT(cuda.stream_synchronize(stream) == kSuccess);
      CHECK_THAT(cuda.stream_destroy(stream) == kSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (DevicePointer index = 0; index < kThreads; ++index) {
    CHECK_THAT(value_at(cuda, data + index * sizeof(int)) == kLaunches);
  }
}

void test_fault(const Functions& cuda) {
  Stream stream = nullptr;
  Event event = nullptr;
  CHECK_THAT(cuda.stream_create(&stream, 1) == kSuccess);
  CHECK_THAT(cuda.event_create(&event, 0) == kSuccess);
  launch(cuda, addition_kernel(), stream, {0, 1});
  CHECK_THAT(cuda.event_record(event, stream) == kSuccess);
  CHECK_THAT(cuda.event_synchronize(event) == kLaunchFailed);
  CHECK_THAT(cuda.stream_destroy(stream) == kLaunchFailed);
}

}  // namespace

int main() {
  const Functions cuda = resolve();
  Context context = nullptr;
  CHECK_THAT(cuda.memory_release(1) == kNotInitialized);
  CHECK_THAT(cuda.init(0) == kSuccess);
  CHECK_THAT(cuda.primary_context_retain(&context, 0) == kSuccess);
  CHECK_THAT(cuda.context_set_current(context) == kSuccess);
  test_memory(cuda);
  test_graphs(cuda);
  test_threads(cuda, context);
  test_fault(cuda);
  CHECK_THAT(sim_reset() == 0);
  test_memory(cuda);
  return offload::test::result();
}
