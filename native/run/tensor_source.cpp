#include "run/tensor_source.hpp"

#include <cstring>
#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "run/write_count.hpp"

namespace offload {

TensorSource::TensorSource(std::vector<at::Tensor> tensors, std::size_t size_bytes)
    : tensors_(std::move(tensors)), size_bytes_(size_bytes) {
  WeightFiles none;
  look_up(none, /*opens=*/true);
}

void TensorSource::look_up(WeightFiles& files, bool opens) {
  if (!opens) return;
  const c10::Storage& storage = tensors_.front().storage();
  if (storage.nbytes() < size_bytes_) {
    throw BindingError("expected " + std::to_string(size_bytes_) + " bytes of memory, got " +
                       std::to_string(storage.nbytes()) + ": it was freed or shrunk");
  }
  if (storage.data() == nullptr && size_bytes_ > 0) {
    throw BindingError(
        "expected memory, got a tensor without any, as of zeros that are never read");
  }
  std::shared_ptr<const c10::Storage> present = std::make_shared<const c10::Storage>(storage);
  StoragePins pins{StoragePin::of(storage)};
  auto held = std::make_shared<const HeldStorages>(Holder::kLasting, nullptr, std::move(pins));
  files.keep(held_);
  held_ = std::move(held);
  files.keep(storage_);
  storage_ = std::move(present);
  n_writes_ = write_count(tensors_);
}

bool TensorSource::has_changed() const noexcept {
  return write_count(tensors_) != n_writes_ ||
         tensors_.front().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() !=
             storage_->unsafeGetStorageImpl();
}

void TensorSource::read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes,
                        ReadBuffer&) {
  if (storage_->nbytes() < size_bytes_) throw FileError("its memory was freed or shrunk");
  std::memcpy(to, static_cast<const std::byte*>(storage_->data()) + offset_bytes, size_bytes);
}

}  // namespace offload
