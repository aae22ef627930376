#include "run/host_constants.hpp"

#include <ATen/ops/from_blob.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "offload/errors.hpp"
#include "run/kernel_scope.hpp"

namespace offload {
namespace {

constexpr const char* kAdvice =
    ": a device's launches took its value when they were captured; capture again, or move it to "
    "the device to have each execution read it";

std::string number_text(const std::string& content, c10::ScalarType dtype) {
  std::string copy = content;
  const KernelScope scope;
  const c10::Scalar number = at::from_blob(copy.data(), {}, at::TensorOptions(dtype)).item();
  std::ostringstream out;
  out.precision(std::numeric_limits<double>::max_digits10);
  if (number.isComplex()) {
    const c10::complex<double> value = number.toComplexDouble();
    out << value.real() << (std::signbit(value.imag()) ? "" : "+") << value.imag() << "j";
  } else if (number.isFloatingPoint()) {
    out << number.toDouble();
  } else if (number.isBoolean()) {
    out << (number.toBool() ? "True" : "False");
  } else if (dtype == c10::ScalarType::UInt64) {
    out << number.toUInt64();
  } else {
    out << number.toLong();
  }
  return out.str();
}

// The bytes in the order of a number's digits: NaNs and zeros differ only in bits.
std::string bits_text(const std::string& content) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string bits = " (0x";
  for (auto byte = content.rbegin(); byte != content.rend(); ++byte) {
    const auto number = static_cast<unsigned char>(*byte);
    bits += kDigits[number >> 4U];
    bits += kDigits[number & 15U];
  }
  return bits + ")";
}

[[noreturn]] void refuse_value(const HostConstantSpec& constant, const std::string& got) {
  if (!constant.layout.shape.empty()) {
    throw BindingError(constant.name + ": its content differs from what was recorded on the CPU" +
                       kAdvice);
  }
  const c10::ScalarType dtype = constant.layout.dtype;
  const std::string one = number_text(constant.content, dtype);
  const std::string other = number_text(got, dtype);
  const bool alike = one == other;
  throw BindingError(constant.name + ": it was recorded on the CPU as " + one +
                     (alike ? bits_text(constant.content) : "") + ", got " + other +
                     (alike ? bits_text(got) : "") + kAdvice);
}

bool is_laid_out_as_recorded(const at::Tensor& tensor, const TensorLayout& layout) {
  return tensor.layout() == c10::kStrided && tensor.scalar_type() == layout.dtype &&
         tensor.sizes() == c10::IntArrayRef(layout.shape) &&
         tensor.strides() == c10::IntArrayRef(layout.strides) &&
         tensor.is_conj() == layout.conjugate && tensor.is_neg() == layout.negative;
}

void check_tensor(const HostConstantSpec& constant, const at::Tensor& tensor) {
  const std::size_t n_bytes = constant.content.size();
  if (!tensor.device().is_cpu()) {
    throw BindingError(constant.name + ": expected a tensor on the CPU, got one on " +
                       tensor.device().str() + kAdvice);
  }
  if (!is_laid_out_as_recorded(tensor, constant.layout)) {
    throw BindingError(
        constant.name +
        ": it has another shape, dtype or strides, or is conjugated or negated otherwise, "
        "than when it was recorded on the CPU" +
        kAdvice);
  }
  const std::size_t begin =
      static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
  if (begin + n_bytes > tensor.storage().nbytes()) {
    throw BindingError(constant.name + ": its memory was freed or shrunk" + kAdvice);
  }
  const auto* const bytes = static_cast<const char*>(tensor.const_data_ptr());
  if (std::memcmp(bytes, constant.content.data(), n_bytes) != 0) {
    refuse_value(constant, std::string(bytes, n_bytes));
  }
}

}  // namespace

void check_host_constants(const CallSpec& spec, const Call& call) {
  for (const HostConstantSpec& constant : spec.host_constants) {
    check_tensor(constant, constant.input ? call.inputs[*constant.input] : constant.holder);
  }
}

}  // namespace offload
