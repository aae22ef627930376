// A weight in memory: the content of the model's own tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "run/held_storages.hpp"
#include "streaming/weight_source.hpp"

namespace offload {

// Tensors of one storage, all of which is the weight. Detects when they were written, as
// `write_count` does, and when they have another storage. Torch refuses to resize the storage
// meanwhile.
//
// Owner: the stream. Thread: as WeightSource. Errors: if the storage is shorter than the weight,
// BindingError, and from read FileError.
class TensorSource final : public WeightSource {
 public:
  // `tensors`: at least one, on the CPU.
  TensorSource(std::vector<at::Tensor> tensors, std::size_t size_bytes);

  void read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
            ReadBuffer& buffer) override;
  void look_up(WeightFiles& files, bool opens) override;
  bool tells_changes() const noexcept override { return true; }
  bool has_changed() const noexcept override;
  std::size_t size_bytes() const noexcept override { return size_bytes_; }
  ReadMode mode() const noexcept override { return ReadMode::kMemory; }

 private:
  std::vector<at::Tensor> tensors_;
  std::size_t size_bytes_;
  std::shared_ptr<const c10::Storage> storage_;  // that of the tensors at look_up
  std::shared_ptr<const HeldStorages> held_;     // its memory may be read at any time
  std::uint64_t n_writes_ = 0;                   // before they were read
};

}  // namespace offload
