#include "elements.hpp"

namespace simulated_operators {

Half::Half(float value) {
  const std::uint32_t wide = float_to_bits(value);
  const std::uint32_t sign = (wide >> 16) & 0x8000U;
  const std::uint32_t magnitude = wide & 0x7fffffffU;
  std::uint32_t narrow;
  if (magnitude > 0x7f800000U) {
    narrow = 0x7e00U;  // NaN
  } else if (magnitude >= 0x477ff000U) {
    narrow = 0x7c00U;  // rounds to infinity
  } else if (magnitude < 0x38800000U) {
    // Subnormal: adding 0.5 makes the processor round at the last bit.
    narrow = float_to_bits(bits_to_float(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    narrow = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  }
  bits = static_cast<std::uint16_t>(sign | narrow);
}

Half::operator float() const {
  const std::uint32_t sign = (std::uint32_t{bits} & 0x8000U) << 16;
  const std::uint32_t magnitude = std::uint32_t{bits} & 0x7fffU;
  std::uint32_t wide;
  if (magnitude >= 0x7c00U) {
    wide = 0x7f800000U | ((magnitude & 0x3ffU) << 13);
  } else if (magnitude < 0x400U) {
    wide = float_to_bits(static_cast<float>(magnitude) * 0x1p-24F);
  } else {
    wide = (magnitude << 13) + 0x38000000U;
  }
  return bits_to_float(sign | wide);
}

bool is_supported(DataType type) {
  try {
    return element_bytes(type) > 0;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

bool is_real(DataType type) {
  return type == kFloat || type == kFloat16 || type == kBfloat16 || type == kDouble;
}

}  // namespace simulated_operators
