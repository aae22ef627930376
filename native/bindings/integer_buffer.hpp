// Integers in a Python buffer, such as an array of typecode "q".
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace offload {

// Copies the integers. Needs the GIL. Errors: TypeError unless they are contiguous int64.
inline std::vector<std::int64_t> to_integers(const pybind11::buffer& buffer, const char* name) {
  const pybind11::buffer_info info = buffer.request();
  if (info.ndim != 1 || !info.item_type_is_equivalent_to<std::int64_t>() ||
      (info.size > 1 && info.strides[0] != info.itemsize)) {
    throw pybind11::type_error(std::string(name) + " must be contiguous and of int64");
  }
  const auto* const first = static_cast<const std::int64_t*>(info.ptr);
  return {first, first + info.size};
}

}  // namespace offload
