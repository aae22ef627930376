// The Python name of a dtype, for messages.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace offload {

inline std::string dtype_name(c10::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace offload
