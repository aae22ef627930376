// Kernel nodes whose arguments a kernel writes: the kinds of launch that allow it, and its cost.
// Needs relocatable device code and libcudadevrt. Every function returns the code of the first call
// that failed, 0 if none did. Thread: one.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

namespace {

#define CHECK_CODE(call)                                      \
  do {                                                        \
    if (const int code = static_cast<int>(call)) return code; \
  } while (false)

constexpr int kWordsPerNode = 8;

struct Words {
  unsigned* target[kWordsPerNode];
};

__global__ void count(Words words) {
  if (threadIdx.x == 0 && blockIdx.x == 0)
    for (int word = 0; word < kWordsPerNode; ++word) atomicAdd(words.target[word], 1u);
}

__global__ void update(const cudaGraphDeviceNode_t* nodes, unsigned* const* bases, int n_words) {
  const int word = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (word < n_words)
    cudaGraphKernelNodeSetParam(nodes[word / kWordsPerNode],
                                sizeof(unsigned*) * (word % kWordsPerNode), bases[word]);
}

__global__ void update_one(cudaGraphDeviceNode_t node, size_t offset_bytes, void* address) {
  cudaGraphKernelNodeSetParam(node, offset_bytes, address);
}

// `kind`: 0 plain, 1 cluster of two blocks, 2 programmatic launch, 3 cooperative.
int launch_counted(cudaStream_t stream, int kind, Words words) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(2);
  config.blockDim = dim3(32);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  config.attrs = &attribute;
  config.numAttrs = kind == 0 ? 0 : 1;
  if (kind == 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  } else if (kind == 2) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  } else if (kind == 3) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  return cudaLaunchKernelEx(&config, count, words);
}

int make_updatable(cudaGraphNode_t node, cudaGraphDeviceNode_t* found) {
  cudaLaunchAttributeValue value{};
  value.deviceUpdatableKernelNode.deviceUpdatable = 1;
  CHECK_CODE(
      cudaGraphKernelNodeSetAttribute(node, cudaLaunchAttributeDeviceUpdatableKernelNode, &value));
  CHECK_CODE(
      cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributeDeviceUpdatableKernelNode, &value));
  *found = value.deviceUpdatableKernelNode.devNode;
  return *found == nullptr ? -2 : 0;
}

int captured(int kind, int n_nodes, unsigned* target, cudaGraph_t* graph) {
  cudaStream_t stream;
  CHECK_CODE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_CODE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  Words words;
  std::fill_n(words.target, kWordsPerNode, target);
  int code = 0;
  for (int node = 0; node < n_nodes && code == 0; ++node)
    code = launch_counted(stream, kind, words);
  const int ended = cudaStreamEndCapture(stream, graph);
  return code ? code : ended;
}

}  // namespace

extern "C" {

// Captures launches of a kind, lets a kernel move `n_words` words to another counter, and writes
// the kernel's time to `update_us`. The counters show whether the words arrived.
int probe_device_updates(int kind, int n_words, double* update_us) {
  const int n_nodes = (n_words + kWordsPerNode - 1) / kWordsPerNode;
  unsigned* counters = nullptr;
  CHECK_CODE(cudaMalloc(&counters, 2 * sizeof(unsigned)));
  CHECK_CODE(cudaMemset(counters, 0, 2 * sizeof(unsigned)));
  cudaGraph_t graph;
  CHECK_CODE(captured(kind, n_nodes, counters, &graph));
  std::vector<cudaGraphNode_t> nodes(static_cast<std::size_t>(n_nodes));
  std::size_t n_found = nodes.size();
  CHECK_CODE(cudaGraphGetNodes(graph, nodes.data(), &n_found));
  if (n_found != nodes.size()) return -3;
  std::vector<cudaGraphDeviceNode_t> handles(nodes.size());
  for (std::size_t node = 0; node < nodes.size(); ++node)
    CHECK_CODE(make_updatable(nodes[node], &handles[node]));
  cudaGraphExec_t exec;
  CHECK_CODE(cudaGraphInstantiate(&exec, graph, 0));
  CHECK_CODE(cudaGraphUpload(exec, nullptr));
  cudaGraphDeviceNode_t* device_handles = nullptr;
  unsigned** device_bases = nullptr;
  const std::vector<unsigned*> bases(static_cast<std::size_t>(n_words), counters + 1);
  CHECK_CODE(cudaMalloc(&device_handles, handles.size() * sizeof handles[0]));
  CHECK_CODE(cudaMalloc(&device_bases, bases.size() * sizeof bases[0]));
  CHECK_CODE(cudaMemcpy(device_handles, handles.data(), handles.size() * sizeof handles[0],
                        cudaMemcpyHostToDevice));
  CHECK_CODE(cudaMemcpy(device_bases, bases.data(), bases.size() * sizeof bases[0],
                        cudaMemcpyHostToDevice));
  cudaEvent_t begin, end;
  CHECK_CODE(cudaEventCreate(&begin));
  CHECK_CODE(cudaEventCreate(&end));
  float best_ms = 1e9f;
  for (int round = 0; round < 20; ++round) {
    float found_ms = 0;
    CHECK_CODE(cudaEventRecord(begin));
    update<<<(n_words + 63) / 64, 64>>>(device_handles, device_bases, n_words);
    CHECK_CODE(cudaEventRecord(end));
    CHECK_CODE(cudaDeviceSynchronize());
    CHECK_CODE(cudaEventElapsedTime(&found_ms, begin, end));
    best_ms = std::min(best_ms, found_ms);
  }
  *update_us = 1e3 * best_ms;
  CHECK_CODE(cudaGraphLaunch(exec, nullptr));
  CHECK_CODE(cudaDeviceSynchronize());
  unsigned found[2];
  CHECK_CODE(cudaMemcpy(found, counters, sizeof found, cudaMemcpyDeviceToHost));
  return found[1] == static_cast<unsigned>(n_words) ? 0 : -1;
}

// Lets a kernel move one word of a node of a foreign graph. The caller instantiates in between: the
// first call makes the node updatable, the second (with its device handle) writes.
int probe_make_updatable(void* node, void** handle) {
  cudaGraphDeviceNode_t found = nullptr;
  CHECK_CODE(make_updatable(static_cast<cudaGraphNode_t>(node), &found));
  *handle = found;
  return 0;
}

int probe_update_word(void* handle, std::size_t offset_bytes, void* address) {
  update_one<<<1, 1>>>(static_cast<cudaGraphDeviceNode_t>(handle), offset_bytes, address);
  CHECK_CODE(cudaGetLastError());
  return cudaDeviceSynchronize();
}

}  // extern "C"
