// An offline model (.om): loaded into memory of our own, executed on buffers that move.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ascend/stream_resident.hpp"
#include "ascend/substages.hpp"

namespace offload::acl {

// An input or output of an offline model, as the file describes it.
struct OfflineTensor {
  std::string name;
  DataType type = kDataTypeUndefined;
  std::vector<std::int64_t> shape;  // -1: known only at execution
  std::size_t size_bytes = 0;
  Format format = kFormatUndefined;
};

// An offline model as the resident object: its words are the addresses of its data buffers, the
// inputs' first, then the outputs'. Its feature map stays where it was loaded.
//
// Owner, thread, errors: as StreamResident. The constructor throws BackendUnavailable where the
// runtime loads no offline models, and ExecutionError where the file cannot be read or loaded;
// nothing is left behind then.
class OfflineResident final : public StreamResident {
 public:
  OfflineResident(int device, const std::string& path, bool copies_on_device);
  ~OfflineResident() override;

  const std::vector<OfflineTensor>& inputs() const { return inputs_; }
  const std::vector<OfflineTensor>& outputs() const { return outputs_; }
  std::size_t work_bytes() const { return work_bytes_; }
  std::size_t weight_bytes() const { return weight_bytes_; }

  // The slot of word i is i: slots are numbered as words.
  std::vector<Relocation> relocations() const override;
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return 1; }
  std::vector<std::string> substages() const override { return substage_names(); }
  void execute(Submission& submission, LaunchTimes* times) override;
  void issue(std::size_t launch) override;

  // The number of data buffers that received another address so far.
  std::uint64_t n_updates() const { return n_updates_; }

 private:
  struct Buffer {
    DataBuffer handle = nullptr;
    std::uint64_t address = 0;
    std::size_t size_bytes = 0;
    bool was_patched = false;
    bool is_changed = false;
  };

  void release() noexcept override;
  void abandon() noexcept override;
  void load(const std::string& path);
  void describe();
  OfflineTensor describe(ModelDescription description, bool is_input, std::size_t index) const;
  Dataset make_dataset(const std::vector<OfflineTensor>& tensors);
  void update_buffers(Submission& submission);

  std::vector<OfflineTensor> inputs_;
  std::vector<OfflineTensor> outputs_;
  std::size_t work_bytes_ = 0;
  std::size_t weight_bytes_ = 0;
  std::optional<DeviceMemory> work_;
  std::optional<DeviceMemory> weights_;
  std::optional<std::uint32_t> model_;
  Dataset input_set_ = nullptr;
  Dataset output_set_ = nullptr;
  std::vector<Buffer> buffers_;  // by word
  std::uint64_t n_updates_ = 0;
};

}  // namespace offload::acl
