#include <pybind11/stl.h>

#include <array>

#include "cuda/arena.hpp"
#include "cuda/discovery_pool.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

using cuda::ArenaMapping;
using cuda::CudaArena;
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

// Each device's name and memory in bytes.
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

py::list pool_events(const DiscoveryPool& pool) {
  py::list events;
  for (const cuda::PoolEvent& event : pool.events()) {
    events.append(
        py::make_tuple(event.is_allocation ? "allocate" : "free", event.address, event.size_bytes));
  }
  return events;
}

void register_pool(py::module_& module) {
  py::class_<DiscoveryPool, std::shared_ptr<DiscoveryPool>>(
      module, "DiscoveryPool", "One layout without reuse; see native/cuda/discovery_pool.hpp.")
      .def(py::init<int, std::uint64_t>(), py::arg("device"), py::arg("seed"))
      .def("allocate", &DiscoveryPool::allocate, py::arg("size_bytes"))
      .def("free", &DiscoveryPool::free, py::arg("address"))
      .def("events", &pool_events)
      .def("rewind", &DiscoveryPool::rewind)
      .def_property_readonly("error", &DiscoveryPool::error)
      .def_static("set_current", &DiscoveryPool::set_current, py::arg("pool"));
}

}  // namespace

void register_cuda(py::module_& module) {
  module.def("cuda_driver_version", &driver_version,
             "The CUDA version of the driver, as 1000 * major + 10 * minor.");
  module.def("cuda_device_count", &device_count, "How many CUDA devices there are.");
  module.def("cuda_devices", &devices, "The name and memory in bytes of each CUDA device.");
  register_pool(module);
  py::class_<CudaArena, std::shared_ptr<CudaArena>>(module, "CudaArena")
      .def(py::init<int>(), py::arg("device"))
      .def("map", &CudaArena::map, py::arg("size_bytes"))
      .def_property_readonly("size_bytes", &CudaArena::size_bytes);
  py::class_<ArenaMapping, std::shared_ptr<ArenaMapping>>(module, "ArenaMapping")
      .def_property_readonly("address", &ArenaMapping::address)
      .def_property_readonly("size_bytes", &ArenaMapping::size_bytes);
}

}  // namespace offload
