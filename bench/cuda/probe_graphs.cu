// Host costs of graph launches and node updates, and operands that copy and memset nodes accept.
// Every function returns the code of the first call that failed, 0 if none did. Thread: one.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

#define CHECK_CODE(call)                                      \
  do {                                                        \
    if (const int code = static_cast<int>(call)) return code; \
  } while (false)

template <int kBytes>
struct Arguments {
  unsigned* target;
  char rest[kBytes - sizeof(unsigned*)];
};

template <int kBytes>
__global__ void count(const __grid_constant__ Arguments<kBytes> arguments) {
  atomicAdd(arguments.target, 1u);
}

double microseconds(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

template <int kBytes>
class Counted {
 public:
  // A chain, or four chains between a first and a last node.
  int build(int n_nodes, bool forked) {
    CHECK_CODE(cudaMalloc(&targets_, 2 * sizeof(unsigned)));
    CHECK_CODE(cudaMemset(targets_, 0, 2 * sizeof(unsigned)));
    CHECK_CODE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CHECK_CODE(cudaGraphCreate(&graph_, 0));
    nodes_.resize(static_cast<std::size_t>(n_nodes));
    for (int node = 0; node < n_nodes; ++node) {
      std::vector<cudaGraphNode_t> before;
      if (!forked || node < 2) {
        if (node > 0) before = {nodes_[node - 1]};
      } else if (node == n_nodes - 1) {
        for (int last = std::max(1, node - 4); last < node; ++last) before.push_back(nodes_[last]);
      } else {
        before = {nodes_[std::max(0, node - 4)]};
      }
      cudaKernelNodeParams params = parameters(0);
      CHECK_CODE(
          cudaGraphAddKernelNode(&nodes_[node], graph_, before.data(), before.size(), &params));
    }
    CHECK_CODE(cudaGraphInstantiate(&exec_, graph_, 0));
    return static_cast<int>(cudaGraphUpload(exec_, stream_));
  }

  // Patches `n_patched` nodes and launches, `n_rounds` times; figures are medians in us.
  int measure(int n_patched, int n_rounds, double* set_us, double* launch_us, double* whole_us) {
    std::vector<double> sets, launches, wholes;
    const int n_nodes = static_cast<int>(nodes_.size());
    for (int round = 0; round < n_rounds + 3; ++round) {
      CHECK_CODE(cudaStreamSynchronize(stream_));
      cudaKernelNodeParams params = parameters(round % 2);
      const auto begin = Clock::now();
      for (int patch = 0; patch < n_patched; ++patch) {
        const int node = static_cast<int>(std::int64_t{patch} * n_nodes / n_patched);
        CHECK_CODE(cudaGraphExecKernelNodeSetParams(exec_, nodes_[node], &params));
      }
      const double set = microseconds(begin);
      const auto launched = Clock::now();
      CHECK_CODE(cudaGraphLaunch(exec_, stream_));
      const double launch = microseconds(launched);
      CHECK_CODE(cudaStreamSynchronize(stream_));
      if (round < 3) continue;
      sets.push_back(set);
      launches.push_back(launch);
      wholes.push_back(microseconds(begin));
    }
    *set_us = median(sets);
    *launch_us = median(launches);
    *whole_us = median(wholes);
    return counted(n_rounds + 3);
  }

  ~Counted() {
    cudaGraphExecDestroy(exec_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
    cudaFree(targets_);
  }

 private:
  cudaKernelNodeParams parameters(int target) {
    arguments_.target = targets_ + target;
    pointer_ = &arguments_;
    cudaKernelNodeParams params{};
    params.func = reinterpret_cast<void*>(&count<kBytes>);
    params.gridDim = params.blockDim = dim3(1);
    params.kernelParams = &pointer_;
    return params;
  }

  // Each launch adds one for each node, wherever the nodes point.
  int counted(int n_launches) {
    unsigned found[2];
    CHECK_CODE(cudaMemcpy(found, targets_, sizeof found, cudaMemcpyDeviceToHost));
    CHECK_CODE(cudaMemset(targets_, 0, sizeof found));
    const std::uint64_t expected = std::uint64_t{nodes_.size()} * n_launches;
    return found[0] + std::uint64_t{found[1]} == expected ? 0 : -1;
  }

  unsigned* targets_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  std::vector<cudaGraphNode_t> nodes_;
  Arguments<kBytes> arguments_{};
  void* pointer_ = nullptr;
};

template <int kBytes>
int launch_costs(int n_nodes, int forked, const int* n_patched, int n_cases, int n_rounds,
                 double* figures) {
  Counted<kBytes> graph;
  CHECK_CODE(graph.build(n_nodes, forked != 0));
  for (int one = 0; one < n_cases; ++one) {
    double* found = figures + 3 * one;
    CHECK_CODE(graph.measure(n_patched[one], n_rounds, found, found + 1, found + 2));
  }
  return 0;
}

// Memory of both kinds, filled with a byte.
struct Memory {
  CUdeviceptr address = 0;
  CUmemGenericAllocationHandle handle = 0;
};

constexpr std::size_t kBytes = std::size_t{2} << 20;

int map_memory(CUdeviceptr wanted, Memory* memory, int fill) {
  CUdevice device;
  CHECK_CODE(cuCtxGetDevice(&device));
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  memory->address = wanted;
  if (wanted == 0) CHECK_CODE(cuMemAddressReserve(&memory->address, kBytes, 0, 0, 0));
  CHECK_CODE(cuMemCreate(&memory->handle, kBytes, &properties, 0));
  CHECK_CODE(cuMemMap(memory->address, kBytes, 0, memory->handle, 0));
  CHECK_CODE(cuMemSetAccess(memory->address, kBytes, &access, 1));
  return cuMemsetD8(memory->address, static_cast<unsigned char>(fill), kBytes);
}

int remap_memory(Memory* memory, int fill) {
  CHECK_CODE(cuMemUnmap(memory->address, kBytes));
  CHECK_CODE(cuMemRelease(memory->handle));
  return map_memory(memory->address, memory, fill);
}

// Launches and returns whether the destination then holds `expected`; -1 if it does not.
int launched(cudaGraphExec_t exec, CUdeviceptr destination, int expected) {
  CHECK_CODE(cudaGraphLaunch(exec, nullptr));
  CHECK_CODE(cudaDeviceSynchronize());
  std::vector<unsigned char> found(kBytes);
  CHECK_CODE(cudaMemcpy(found.data(), reinterpret_cast<void*>(destination), kBytes,
                        cudaMemcpyDeviceToHost));
  return std::all_of(found.begin(), found.end(), [&](int one) { return one == expected; }) ? 0 : -1;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

// For each number of patched nodes: us of the updates, of the launch, and until all is done.
int probe_launch_costs(int n_nodes, int forked, int argument_bytes, const int* n_patched,
                       int n_cases, int n_rounds, double* figures) {
  if (argument_bytes == 32)
    return launch_costs<32>(n_nodes, forked, n_patched, n_cases, n_rounds, figures);
  if (argument_bytes == 4096)
    return launch_costs<4096>(n_nodes, forked, n_patched, n_cases, n_rounds, figures);
  return launch_costs<32760>(n_nodes, forked, n_patched, n_cases, n_rounds, figures);
}

// Codes: copy between plain allocations; updated to mapped memory; launched so; mapped memory freed
// and mapped anew at its address, updated and launched; instantiated at mapped memory, updated to
// plain allocations; launched so; mapped anew once more, launched without an update.
int probe_copy_node(int* codes) {
  CUdeviceptr plain[2] = {};
  Memory mapped[2];
  CHECK_CODE(cudaFree(nullptr));
  for (auto& one : plain) CHECK_CODE(cuMemAlloc(&one, kBytes));
  CHECK_CODE(cuMemsetD8(plain[0], 1, kBytes));
  CHECK_CODE(map_memory(0, &mapped[0], 2));
  CHECK_CODE(map_memory(0, &mapped[1], 0));
  cudaGraph_t graph;
  cudaGraphNode_t node;
  cudaGraphExec_t exec;
  CHECK_CODE(cudaGraphCreate(&graph, 0));
  CHECK_CODE(cudaGraphAddMemcpyNode1D(&node, graph, nullptr, 0, pointer(plain[1]),
                                      pointer(plain[0]), kBytes, cudaMemcpyDeviceToDevice));
  CHECK_CODE(cudaGraphInstantiate(&exec, graph, 0));
  const auto set = [&] {
    return cudaGraphExecMemcpyNodeSetParams1D(exec, node, pointer(mapped[1].address),
                                              pointer(mapped[0].address), kBytes,
                                              cudaMemcpyDeviceToDevice);
  };
  codes[0] = launched(exec, plain[1], 1);
  codes[1] = set();
  codes[2] = launched(exec, mapped[1].address, 2);
  CHECK_CODE(remap_memory(&mapped[0], 3));
  CHECK_CODE(set());
  codes[3] = launched(exec, mapped[1].address, 3);
  cudaGraphExec_t mapped_first;
  CHECK_CODE(cuMemsetD8(plain[1], 0, kBytes));
  CHECK_CODE(cudaGraphMemcpyNodeSetParams1D(node, pointer(mapped[1].address),
                                            pointer(mapped[0].address), kBytes,
                                            cudaMemcpyDeviceToDevice));
  CHECK_CODE(cudaGraphInstantiate(&mapped_first, graph, 0));
  codes[4] = cudaGraphExecMemcpyNodeSetParams1D(
      mapped_first, node, pointer(plain[1]), pointer(plain[0]), kBytes, cudaMemcpyDeviceToDevice);
  if (codes[4] == 0) codes[5] = launched(mapped_first, plain[1], 1);
  CHECK_CODE(remap_memory(&mapped[0], 4));
  codes[6] = launched(exec, mapped[1].address, 4);
  return 0;
}

// The same for a memset node.
int probe_memset_node(int* codes) {
  CUdeviceptr plain = 0;
  Memory mapped;
  CHECK_CODE(cudaFree(nullptr));
  CHECK_CODE(cuMemAlloc(&plain, kBytes));
  CHECK_CODE(map_memory(0, &mapped, 0));
  cudaMemsetParams params{};
  params.dst = pointer(plain);
  params.value = 7;
  params.elementSize = 1;
  params.width = kBytes;
  params.height = 1;
  cudaGraph_t graph;
  cudaGraphNode_t node;
  cudaGraphExec_t exec;
  CHECK_CODE(cudaGraphCreate(&graph, 0));
  CHECK_CODE(cudaGraphAddMemsetNode(&node, graph, nullptr, 0, &params));
  CHECK_CODE(cudaGraphInstantiate(&exec, graph, 0));
  codes[0] = launched(exec, plain, 7);
  params.dst = pointer(mapped.address);
  codes[1] = cudaGraphExecMemsetNodeSetParams(exec, node, &params);
  codes[2] = launched(exec, mapped.address, 7);
  CHECK_CODE(remap_memory(&mapped, 0));
  CHECK_CODE(cudaGraphExecMemsetNodeSetParams(exec, node, &params));
  codes[3] = launched(exec, mapped.address, 7);
  cudaGraphExec_t mapped_first;
  CHECK_CODE(cuMemsetD8(plain, 0, kBytes));
  CHECK_CODE(cudaGraphMemsetNodeSetParams(node, &params));
  CHECK_CODE(cudaGraphInstantiate(&mapped_first, graph, 0));
  params.dst = pointer(plain);
  codes[4] = cudaGraphExecMemsetNodeSetParams(mapped_first, node, &params);
  if (codes[4] == 0) codes[5] = launched(mapped_first, plain, 7);
  CHECK_CODE(remap_memory(&mapped, 0));
  codes[6] = launched(exec, mapped.address, 7);
  return 0;
}

}  // extern "C"
