// Driver handles with scope.
#pragma once

#include "cuda/driver.hpp"

namespace offload::cuda {

// A driver handle that is released at the end of its scope.
//
// Owner: a stack frame, with a current context where its kind needs one. Errors: none.
template <typename Handle>
class Held {
 public:
  explicit Held(Result (*give_back)(Handle)) : give_back_(give_back) {}
  ~Held() {
    if (handle_ != Handle()) give_back_(handle_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  Handle* fill() { return &handle_; }
  Handle get() const { return handle_; }

 private:
  Result (*give_back_)(Handle);
  Handle handle_ = Handle();
};

}  // namespace offload::cuda
