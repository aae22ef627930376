#include "cuda/copy_costs.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "cuda/held.hpp"
#include "cuda/resident_node.hpp"
#include "offload/resident.hpp"

namespace offload::cuda {
namespace {

constexpr std::size_t kNodes = 16;
constexpr std::size_t kCopies = 16;
constexpr std::size_t kRounds = 9;  // after a first round that is not counted
constexpr std::array<std::size_t, 4> kSizesBytes = {4 << 10, 64 << 10, 1 << 20, 4 << 20};
constexpr double kNsInMs = 1e6;

double per(std::uint64_t begin_ns, std::uint64_t end_ns, std::size_t count) {
  return static_cast<double>(end_ns - begin_ns) / static_cast<double>(count);
}

void sample_nodes(const Driver& driver, Context context, GraphNode kernel, std::size_t offset_bytes,
                  Stream stream, CopySamples& samples) {
  Held<Graph> graph(driver.graph_destroy);
  Held<GraphExec> exec(driver.graph_exec_destroy);
  driver.check(driver.graph_create(graph.fill(), 0), "making a graph to measure");
  KernelNodeParams params = {};
  driver.check(driver.graph_kernel_get_params(kernel, &params), "reading a kernel node");
  std::vector<std::unique_ptr<ResidentNode>> nodes;
  std::vector<unsigned char*> words;
  for (std::size_t index = 0; index < kNodes; ++index) {
    GraphNode node = nullptr;
    driver.check(driver.graph_add_kernel_node(&node, graph.get(), nullptr, 0, &params),
                 "adding a kernel node to measure");
    nodes.push_back(make_node(driver, node, nullptr, false));
    words.push_back(nodes.back()->word_at(0, offset_bytes));
    if (words.back() == nullptr) throw std::invalid_argument("the kernel has no such word");
  }
  driver.check(driver.graph_instantiate(exec.fill(), graph.get(), 0),
               "instantiating a graph to measure");
  driver.check(driver.graph_upload(exec.get(), stream), "uploading a graph to measure");
  driver.check(driver.stream_synchronize(stream), "uploading a graph to measure");
  for (std::size_t round = 0; round <= kRounds; ++round) {
    for (unsigned char* const word : words) {
      std::uint64_t address = 0;
      std::memcpy(&address, word, sizeof address);
      address ^= 0x1000;
      std::memcpy(word, &address, sizeof address);
    }
    Result result = kSuccess;
    const std::uint64_t begin_ns = now_ns();
    for (const auto& node : nodes) {
      const Result one = node->set_exec(exec.get(), node->handle(), context);
      if (one != kSuccess) result = one;
    }
    const std::uint64_t end_ns = now_ns();
    driver.check(result, "re-setting a kernel node to measure");
    if (round > 0) samples.set_node_ns.push_back(per(begin_ns, end_ns, kNodes));
  }
}

void sample_copies(const Driver& driver, Stream stream, CopySamples& samples) {
  Held<DevicePointer> memory(driver.memory_free);
  Held<Event> begin(driver.event_destroy);
  Held<Event> end(driver.event_destroy);
  constexpr std::size_t kHalfBytes = kSizesBytes.back();
  driver.check_memory(driver.memory_allocate(memory.fill(), 2 * kHalfBytes), 2 * kHalfBytes,
                      "allocating memory to measure copies");
  driver.check(driver.event_create(begin.fill(), kEventWithTimes), "making an event");
  driver.check(driver.event_create(end.fill(), kEventWithTimes), "making an event");
  for (const std::size_t size_bytes : kSizesBytes) {
    for (std::size_t round = 0; round <= kRounds; ++round) {
      Result result = kSuccess;
      driver.check(driver.event_record(begin.get(), stream), "measuring copies");
      const std::uint64_t begin_ns = now_ns();
      for (std::size_t copy = 0; copy < kCopies; ++copy) {
        const Result one =
            driver.copy_async(memory.get() + kHalfBytes, memory.get(), size_bytes, stream);
        if (one != kSuccess) result = one;
      }
      const std::uint64_t end_ns = now_ns();
      driver.check(result, "copying memory to measure it");
      driver.check(driver.event_record(end.get(), stream), "measuring copies");
      driver.check(driver.event_synchronize(end.get()), "measuring copies");
      float milliseconds = 0;
      driver.check(driver.event_elapsed_time(&milliseconds, begin.get(), end.get()),
                   "measuring copies");
      if (round == 0) continue;
      samples.submit_ns.push_back(per(begin_ns, end_ns, kCopies));
      samples.device_ns.emplace_back(
          size_bytes, static_cast<double>(milliseconds) * kNsInMs / static_cast<double>(kCopies));
    }
  }
}

}  // namespace

CopySamples sample_copy_costs(const Driver& driver, Context context, GraphNode kernel,
                              std::size_t offset_bytes) {
  Held<Stream> stream(driver.stream_destroy);
  driver.check(driver.stream_create(stream.fill(), kStreamNonBlocking),
               "making a stream to measure");
  CopySamples samples;
  sample_nodes(driver, context, kernel, offset_bytes, stream.get(), samples);
  sample_copies(driver, stream.get(), samples);
  return samples;
}

}  // namespace offload::cuda
