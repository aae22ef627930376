#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string_view>
#include <tuple>

#include "cuda/arena.hpp"
#include "cuda/cuda_resident.hpp"
#include "cuda/discovery_pool.hpp"
#include "gil.hpp"
#include "method_of.hpp"
#include "registers.hpp"
#include "resident_seam.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using cuda::ArenaMapping;
using cuda::CudaArena;
using cuda::CudaResident;
using cuda::DiscoveryPool;
using cuda::Driver;

int driver_version() {
  const Driver& driver = Driver::get();
  int version = 0;
  driver.check(driver.driver_get_version(&version), "asking for the driver's version");
  return version;
}

int device_count() {
  const Driver& driver = Driver::get();
  int count = 0;
  driver.check(driver.device_get_count(&count), "counting devices");
  return count;
}

// The name of each device and its memory in bytes.
std::vector<std::pair<std::string, std::size_t>> devices() {
  const Driver& driver = Driver::get();
  std::vector<std::pair<std::string, std::size_t>> found;
  const int count = device_count();
  for (int index = 0; index < count; ++index) {
    cuda::Device device = 0;
    std::array<char, 256> name = {};
    std::size_t memory_bytes = 0;
    driver.check(driver.device_get(&device, index), "finding the device");
    driver.check(driver.device_get_name(name.data(), static_cast<int>(name.size() - 1), device),
                 "asking for the device's name");
    driver.check(driver.device_total_mem(&memory_bytes, device), "asking for the device's memory");
    found.emplace_back(name.data(), memory_bytes);
  }
  return found;
}

// Fills `n_bytes` of the stack below the caller with a byte, by stores that are not optimised away.
[[gnu::noinline]] void paint_stack(std::size_t n_bytes, unsigned char byte) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // threads usually have stacks of 8 MiB
  if (n_bytes > kMostBytes) throw std::invalid_argument("at most 1 MiB of a stack is painted");
  auto* const bytes = static_cast<volatile unsigned char*>(__builtin_alloca(n_bytes));
  for (std::size_t index = 0; index < n_bytes; ++index) bytes[index] = byte;
}

py::list pool_events(const DiscoveryPool& pool, std::size_t begin) {
  py::list events;
  for (const cuda::PoolEvent& event : pool.events(begin)) {
    events.append(
        py::make_tuple(event.is_allocation ? "allocate" : "free", event.address, event.size_bytes));
  }
  return events;
}

void register_pool(py::module_& module) {
  py::class_<DiscoveryPool, std::shared_ptr<DiscoveryPool>>(
      module, "DiscoveryPool", "One layout without reuse; see native/cuda/discovery_pool.hpp.")
      .def(py::init<int, std::uint64_t, std::size_t>(), py::arg("device"), py::arg("seed"),
           py::arg("large_chunk_bytes") = 0)
      .def("allocate", &DiscoveryPool::allocate, py::arg("size_bytes"))
      .def("fix", &DiscoveryPool::fix, py::arg("number"), py::arg("address"))
      .def("free", &DiscoveryPool::free, py::arg("address"))
      .def("events", &pool_events, py::arg("begin") = 0)
      .def_property_readonly("n_events", &DiscoveryPool::n_events)
      .def("shown", &DiscoveryPool::shown)
      .def("rewind", &DiscoveryPool::rewind)
      .def_property_readonly("error", &DiscoveryPool::error)
      .def_static("set_current", &DiscoveryPool::set_current, py::arg("pool"));
}

// (node, part, offset in bytes)
using WordTuple = std::tuple<std::uint32_t, std::uint32_t, std::size_t>;

// (transfer, nodes before it, nodes after it, whether it is for the next pass)
using CopyTuple =
    std::tuple<std::size_t, std::vector<std::uint32_t>, std::vector<std::uint32_t>, bool>;

std::vector<cuda::NodeWord> to_words(const std::vector<WordTuple>& words) {
  std::vector<cuda::NodeWord> converted;
  for (const auto& [node, part, offset_bytes] : words) {
    converted.push_back({node, part, offset_bytes});
  }
  return converted;
}

std::shared_ptr<CudaResident> make_resident(
    int device, std::uint64_t graph, std::shared_ptr<CudaArena> arena, std::size_t arena_bytes,
    const std::vector<std::uint64_t>& node_handles, const std::vector<WordTuple>& words,
    const std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>>& relocations,
    std::vector<std::int64_t> launches, std::size_t n_launches,
    const std::map<std::size_t, py::bytes>& host_tables,
    const std::vector<std::pair<std::vector<WordTuple>, std::vector<WordTuple>>>& random_cells,
    std::shared_ptr<cuda::CudaWeightStream> weights, const std::vector<CopyTuple>& copies,
    std::vector<std::uint32_t> ready_after, const std::vector<std::size_t>& half_words,
    std::vector<std::string> launch_names, py::object keep) {
  cuda::CudaProgram program;
  program.device = device;
  program.graph = to_handle<cuda::Graph>(graph);
  program.arena = std::move(arena);
  program.arena_bytes = arena_bytes;
  for (const std::uint64_t node : node_handles) {
    program.nodes.push_back(to_handle<cuda::GraphNode>(node));
  }
  program.words = to_words(words);
  for (const std::size_t word : half_words) {
    program.words.at(word).is_half = true;
  }
  for (const auto& [seed_words, offset_words] : random_cells) {
    program.random_cells.push_back({to_words(seed_words), to_words(offset_words)});
  }
  for (const auto& [word, slot, offset_bytes] : relocations) {
    program.relocations.push_back({word, slot, offset_bytes});
  }
  program.launches = std::move(launches);
  program.n_launches = n_launches;
  program.launch_names = std::move(launch_names);
  for (const auto& [node, bytes] : host_tables) {
    const auto text = static_cast<std::string_view>(bytes);
    program.host_tables.emplace(node, std::vector<unsigned char>(text.begin(), text.end()));
  }
  program.weights = std::move(weights);
  for (const auto& [transfer, after, before, for_next_pass] : copies) {
    program.streamed.copies.push_back({transfer, after, before, for_next_pass});
  }
  program.streamed.ready_after = std::move(ready_after);
  return {new CudaResident(std::move(program)), DeleteResident<CudaResident>(std::move(keep))};
}

py::tuple copy_samples(const CudaResident& resident) {
  cuda::CopySamples samples;
  {
    const GilReleased release;
    samples = resident.sample_copy_costs();
  }
  return py::make_tuple(samples.set_node_ns, samples.submit_ns, samples.device_ns);
}

// The methods of the seam are bound for tests and proofs; executions go through a Replay.
void register_resident(py::module_& module) {
  using Unlocked = py::call_guard<GilReleased>;
  py::class_<CudaResident, Resident, std::shared_ptr<CudaResident>>(module, "CudaResident",
                                                                    py::multiple_inheritance())
      .def(py::init(&make_resident), py::kw_only(), py::arg("device"), py::arg("graph"),
           py::arg("arena"), py::arg("arena_bytes"), py::arg("node_handles"), py::arg("words"),
           py::arg("relocations"), py::arg("launches"), py::arg("n_launches"),
           py::arg("host_tables") = py::dict(), py::arg("random_cells") = py::list(),
           py::arg("weights") = py::none(), py::arg("copies") = py::list(),
           py::arg("ready_after") = py::list(), py::arg("half_words") = py::list(),
           py::arg("launch_names") = py::list(), py::arg("keep") = py::none())
      .def("load", &CudaResident::load, Unlocked())
      .def("patch", &patch_words<CudaResident>, py::arg("words"))
      .def("set_stream", &CudaResident::set_stream, py::arg("stream"), Unlocked())
      .def("set_random", &CudaResident::set_random, py::arg("seeds_and_offsets"), Unlocked())
      .def("execute", &execute_resident<CudaResident>, Unlocked())
      .def("issue", &CudaResident::issue, py::arg("launch"), Unlocked())
      .def("finish", &CudaResident::finish, Unlocked())
      .def(
          "overwrite",
          [](CudaResident& resident, const WordTuple& word, const py::bytes& content) {
            const auto bytes = static_cast<std::string_view>(content);
            resident.overwrite(to_words({word}).front(), {bytes.begin(), bytes.end()});
          },
          py::arg("word"), py::arg("content"))
      .def("sample_copy_costs", &copy_samples)
      .def("time_launches", &CudaResident::time_launches, Unlocked())
      .def("close", method_of<CudaResident, &CudaResident::close>, Unlocked())
      .def_property_readonly("arena_address", &arena_address<CudaResident>)
      .def_property_readonly("n_launches", &CudaResident::n_launches)
      .def_property_readonly("n_set_params", &CudaResident::n_set_params)
      .def_property_readonly("n_instantiations", &CudaResident::n_instantiations)
      .def_property_readonly("graph_bytes", &CudaResident::graph_bytes)
      .def_property_readonly("n_graph_launches", &CudaResident::n_graph_launches);
}

}  // namespace

void register_cuda(py::module_& module) {
  module.def("cuda_driver_version", &driver_version,
             "The CUDA version of the driver, as 1000 * major + 10 * minor.");
  module.def("cuda_device_count", &device_count, "How many CUDA devices there are.");
  module.def("cuda_devices", &devices, "The name and memory in bytes of each CUDA device.");
  module.def(
      "cuda_is_fault", [](int code) { return cuda::is_fault(static_cast<cuda::Result>(code)); },
      py::arg("code"), "Whether a context does nothing any more after this code of the driver.");
  module.def("paint_stack", &paint_stack, py::arg("size_bytes"), py::arg("byte"),
             "Fill so much of the stack below the caller with a byte.");
  register_pool(module);
  py::class_<CudaArena, std::shared_ptr<CudaArena>>(module, "CudaArena")
      .def(py::init<int>(), py::arg("device"))
      .def("map", &CudaArena::map, py::arg("size_bytes"))
      .def_property_readonly("size_bytes", &CudaArena::size_bytes);
  py::class_<ArenaMapping, std::shared_ptr<ArenaMapping>>(module, "ArenaMapping")
      .def_property_readonly("address", &ArenaMapping::address)
      .def_property_readonly("size_bytes", &ArenaMapping::size_bytes);
  register_resident(module);
}

}  // namespace offload
