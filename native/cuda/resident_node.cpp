#include "cuda/resident_node.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "offload/errors.hpp"

namespace offload::cuda {
namespace {

// The attributes that a kernel needs to run as captured. Relations to other work (programmatic
// launch, priority) are omitted when the kernel is issued by itself.
constexpr std::array<int, 3> kLaunchAttributes = {kAttributeCooperative, kAttributeClusterDimension,
                                                  kAttributeClusterScheduling};

bool is_zero(const unsigned char* bytes, std::size_t n_bytes) {
  for (std::size_t index = 0; index < n_bytes; ++index) {
    if (bytes[index] != 0) return false;
  }
  return true;
}

// The name of a function or kernel, for messages.
std::string name_of(const Driver& driver, const KernelNodeParams& params) {
  const char* name = nullptr;
  const Result result = params.function != nullptr
                            ? driver.function_get_name(&name, params.function)
                            : driver.kernel_get_name(&name, params.kernel);
  return result == kSuccess && name != nullptr ? name : "without a name";
}

class KernelNode final : public ResidentNode {
 public:
  KernelNode(const Driver& driver, GraphNode node) : ResidentNode(driver, node) {
    driver_.check(driver_.graph_kernel_get_params(node_, &params_), "reading a kernel node");
    function_ = params_.function;
    if (function_ == nullptr) {
      driver_.check(driver_.kernel_get_function(&function_, params_.kernel),
                    "finding a kernel's function");
    }
    if (params_.extra != nullptr) {
      read_packed();
    } else {
      read_parameters();
    }
    read_attributes();
  }

  std::string describe() const override { return "kernel " + name_of(driver_, params_); }

  std::optional<std::size_t> argument_offset(const unsigned char* word) const override {
    return static_cast<std::size_t>(word - image_.data());
  }

  Result set_template() override { return driver_.graph_kernel_set_params(node_, &params_); }

  Result set_exec(GraphExec exec, GraphNode node, Context) override {
    return driver_.graph_exec_kernel_set_params(exec, node, &params_);
  }

  Result issue(Stream stream) override {
    LaunchConfig config = {};
    config.grid_x = params_.grid_x;
    config.grid_y = params_.grid_y;
    config.grid_z = params_.grid_z;
    config.block_x = params_.block_x;
    config.block_y = params_.block_y;
    config.block_z = params_.block_z;
    config.shared_bytes = params_.shared_bytes;
    config.stream = stream;
    config.attributes = attributes_.data();
    config.n_attributes = static_cast<unsigned int>(attributes_.size());
    return driver_.launch_kernel_ex(&config, function_, params_.parameters, params_.extra);
  }

 private:
  // Arguments given one by one: the driver states the packed offset of each.
  void read_parameters() {
    std::vector<std::pair<std::size_t, std::size_t>> places;  // offset, bytes
    std::size_t n_bytes = 0;
    while (true) {
      std::size_t offset = 0;
      std::size_t size = 0;
      const Result result =
          driver_.function_get_param_info(function_, places.size(), &offset, &size);
      if (result == kInvalidValue) break;
      driver_.check(result, "reading a kernel's parameters");
      places.emplace_back(offset, size);
      n_bytes = std::max(n_bytes, offset + size);
    }
    image_.assign(n_bytes, 0);
    for (std::size_t index = 0; index < places.size(); ++index) {
      const auto& [offset, size] = places[index];
      std::memcpy(image_.data() + offset, params_.parameters[index], size);
      pointers_.push_back(image_.data() + offset);
    }
    params_.parameters = pointers_.data();
  }

  // Arguments given as one packed buffer.
  void read_packed() {
    const void* buffer = nullptr;
    for (void** item = params_.extra; *item != kLaunchEnd; item += 2) {
      if (*item == kLaunchBufferPointer) buffer = item[1];
      if (*item == kLaunchBufferSize) packed_bytes_ = *static_cast<std::size_t*>(item[1]);
    }
    if (buffer == nullptr) packed_bytes_ = 0;
    image_.assign(packed_bytes_, 0);
    if (packed_bytes_ > 0) std::memcpy(image_.data(), buffer, packed_bytes_);
    packed_ = {kLaunchBufferPointer, image_.data(), kLaunchBufferSize, &packed_bytes_, kLaunchEnd};
    params_.parameters = nullptr;
    params_.extra = packed_.data();
  }

  // A driver refuses to report an attribute that it, the device or the kernel does not have.
  void read_attributes() {
    for (const int id : kLaunchAttributes) {
      LaunchAttribute attribute = {};
      attribute.id = id;
      const Result result = driver_.graph_kernel_get_attribute(node_, id, attribute.value);
      if (result == kInvalidValue || result == kNotSupported) continue;
      driver_.check(result, "reading a kernel node's attributes");
      if (!is_zero(attribute.value, sizeof attribute.value)) attributes_.push_back(attribute);
    }
  }

  KernelNodeParams params_ = {};
  Function function_ = nullptr;
  std::vector<void*> pointers_;
  std::array<void*, 5> packed_ = {};
  std::size_t packed_bytes_ = 0;
  std::vector<LaunchAttribute> attributes_;
};

class MemcpyNode final : public ResidentNode {
 public:
  MemcpyNode(const Driver& driver, GraphNode node, const std::vector<unsigned char>* given_table,
             bool source_is_word)
      : ResidentNode(driver, node) {
    driver_.check(driver_.graph_memcpy_get_params(node_, &params_), "reading a copy node");
    if (params_.source_type == kMemoryArray || params_.destination_type == kMemoryArray) {
      throw CaptureError("a copy from or to a CUDA array (texture memory) cannot be resident");
    }
    image_.assign(2 * kWordBytes, 0);
    const std::uint64_t source = params_.source_type == kMemoryHost
                                     ? reinterpret_cast<std::uint64_t>(params_.source_host)
                                     : params_.source_device;
    const std::uint64_t destination =
        params_.destination_type == kMemoryHost
            ? reinterpret_cast<std::uint64_t>(params_.destination_host)
            : params_.destination_device;
    std::memcpy(image_.data(), &source, kWordBytes);
    std::memcpy(image_.data() + kWordBytes, &destination, kWordBytes);
    take_table(source, given_table, source_is_word);
  }

  std::string describe() const override {
    return "copy of " + std::to_string(params_.width_bytes * params_.height * params_.depth) +
           " bytes";
  }

  bool keeps_allocations() const override { return true; }
  bool can_move() const override { return params_.height == 1 && params_.depth == 1; }

  Result set_template() override {
    take_addresses();
    return driver_.graph_memcpy_set_params(node_, &params_);
  }

  Result set_exec(GraphExec exec, GraphNode node, Context context) override {
    take_addresses();
    return driver_.graph_exec_memcpy_set_params(exec, node, &params_, context);
  }

  Result issue(Stream stream) override {
    take_addresses();
    return driver_.copy_3d_async(&params_, stream);
  }

 private:
  void take_table(std::uint64_t source, const std::vector<unsigned char>* given,
                  bool source_is_word) {
    const std::size_t n_bytes = source_bytes();
    if (given != nullptr) {
      if (given->size() != n_bytes || source_is_word) {
        throw std::invalid_argument("a copy's host source has " + std::to_string(n_bytes) +
                                    " bytes and no address word, got " +
                                    std::to_string(given->size()) + " bytes");
      }
      table_ = *given;
    } else if (!source_is_word && lies_on_host(source)) {
      const auto* const begin = reinterpret_cast<const unsigned char*>(source);
      table_.assign(begin, begin + n_bytes);
    }
  }

  bool lies_on_host(std::uint64_t source) const {
    if (params_.source_type != kMemoryUnified) return params_.source_type == kMemoryHost;
    unsigned int type = 0;
    return driver_.pointer_get_attribute(&type, kMemoryTypeOfPointer, source) == kSuccess &&
           type == kMemoryHost;
  }

  // Bytes from the source's address to one past the last byte read.
  std::size_t source_bytes() const {
    const std::size_t rows = params_.source_y + params_.height - 1;
    const std::size_t planes = params_.source_z + params_.depth - 1;
    return params_.source_x_bytes + params_.width_bytes +
           params_.source_pitch * (rows + params_.source_height * planes);
  }

  void take_addresses() {
    std::uint64_t source = 0;
    std::uint64_t destination = 0;
    std::memcpy(&source, image_.data(), kWordBytes);
    std::memcpy(&destination, image_.data() + kWordBytes, kWordBytes);
    if (params_.source_type == kMemoryHost) {
      params_.source_host = reinterpret_cast<const void*>(source);
    } else {
      params_.source_device = source;
    }
    if (params_.destination_type == kMemoryHost) {
      params_.destination_host = reinterpret_cast<void*>(destination);
    } else {
      params_.destination_device = destination;
    }
  }

  Memcpy3D params_ = {};
};

class MemsetNode final : public ResidentNode {
 public:
  MemsetNode(const Driver& driver, GraphNode node) : ResidentNode(driver, node) {
    driver_.check(driver_.graph_memset_get_params(node_, &params_), "reading a memset node");
    const std::uint64_t destination = params_.destination;
    image_.assign(kWordBytes, 0);
    std::memcpy(image_.data(), &destination, kWordBytes);
  }

  std::string describe() const override {
    return "memset of " + std::to_string(params_.width * params_.height * params_.element_bytes) +
           " bytes";
  }

  bool keeps_allocations() const override { return true; }
  bool can_move() const override { return params_.height == 1; }

  Result set_template() override {
    take_address();
    return driver_.graph_memset_set_params(node_, &params_);
  }

  Result set_exec(GraphExec exec, GraphNode node, Context context) override {
    take_address();
    return driver_.graph_exec_memset_set_params(exec, node, &params_, context);
  }

  Result issue(Stream stream) override {
    take_address();
    Result result = kSuccess;
    for (std::size_t row = 0; row < params_.height && result == kSuccess; ++row) {
      const DevicePointer begin = params_.destination + row * params_.pitch;
      if (params_.element_bytes == 4) {
        result = driver_.memset_d32_async(begin, params_.value, params_.width, stream);
      } else if (params_.element_bytes == 2) {
        result = driver_.memset_d16_async(begin, static_cast<unsigned short>(params_.value),
                                          params_.width, stream);
      } else {
        result = driver_.memset_d8_async(begin, static_cast<unsigned char>(params_.value),
                                         params_.width, stream);
      }
    }
    return result;
  }

 private:
  void take_address() {
    std::uint64_t destination = 0;
    std::memcpy(&destination, image_.data(), kWordBytes);
    params_.destination = destination;
  }

  MemsetNodeParams params_ = {};
};

// Joins branches; executes nothing.
class EmptyNode final : public ResidentNode {
 public:
  using ResidentNode::ResidentNode;

  std::string describe() const override { return "empty node"; }
  bool does_work() const override { return false; }
  Result set_template() override { return kSuccess; }
  Result set_exec(GraphExec, GraphNode, Context) override { return kSuccess; }
  Result issue(Stream) override { return kSuccess; }
};

}  // namespace

unsigned char* ResidentNode::bytes_at(std::size_t part, std::size_t offset_bytes,
                                      std::size_t n_bytes) {
  std::vector<unsigned char>& bytes = part == 0 ? image_ : table_;
  if (part > 1 || offset_bytes > bytes.size() || bytes.size() - offset_bytes < n_bytes) {
    return nullptr;
  }
  return bytes.data() + offset_bytes;
}

std::unique_ptr<ResidentNode> make_node(const Driver& driver, GraphNode node,
                                        const std::vector<unsigned char>* given_table,
                                        bool source_is_word) {
  GraphNodeType type = kNodeEmpty;
  driver.check(driver.graph_node_get_type(node, &type), "reading a node's type");
  if (given_table != nullptr && type != kNodeMemcpy) {
    throw std::invalid_argument("only a copy has a host source");
  }
  switch (type) {
    case kNodeKernel:
      return std::make_unique<KernelNode>(driver, node);
    case kNodeMemcpy:
      return std::make_unique<MemcpyNode>(driver, node, given_table, source_is_word);
    case kNodeMemset:
      return std::make_unique<MemsetNode>(driver, node);
    case kNodeEmpty:
      return std::make_unique<EmptyNode>(driver, node);
    default:
      throw CaptureError("a graph node of type " + std::to_string(static_cast<int>(type)) +
                         " (CUgraphNodeType) cannot be resident: only kernels, copies and memsets");
  }
}

}  // namespace offload::cuda
