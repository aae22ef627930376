// State that must be unchanged at a call, compared without a Python frame.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace offload {

// The number of hooks on the accumulation of a leaf's gradient, which Python cannot see. Throws
// pybind11::type_error if it is not a tensor.
std::size_t n_accumulation_hooks(pybind11::handle tensor);

// The result of comparing a WatchedState.
enum class Found : std::uint8_t {
  kSame,
  kGradients,  // unchanged except for gradients, which `give_gradients` restores
  kOther,
};

// Containers and attributes as they are when it is made, and leaves with their gradients.
//
// Owner: the comparing caller. Keeps all watched objects alive, so that no address can stand for
// another object, and shows them to Python's garbage collector by `traverse`. Thread: everything
// needs the GIL.
class WatchedState {
 public:
  // Takes (containers, attributes, leaves, sees_all): dictionaries and lists whose items must stay;
  // pairs of a dictionary and a string key in it; for each leaf the tensor, the gradient that it
  // must have (or None), and whether that is accumulated into; and whether there is nothing else to
  // compare. Throws pybind11::cast_error or type_error for anything else.
  explicit WatchedState(pybind11::handle watched);

  bool sees_all() const noexcept { return sees_all_; }

  // Compares: gradients must be recorded on this thread, containers must hold the same objects or
  // equal numbers in the same order, and each leaf must have its gradient, the same `requires_grad`
  // and no other hooks than before. Runs no Python code.
  Found look() const noexcept;

  // Whether missing gradients include accumulated ones, which giving them sets to zero.
  bool has_sums_to_clear() const noexcept;

  // Restores gradients; accumulated ones become zero where the leaf had none.
  void give_gradients() const;

  int traverse(visitproc visit, void* arg) const;

 private:
  struct Container {
    pybind11::object owner;
    std::size_t begin = 0;  // of its items in `items_`
    std::size_t end = 0;
  };
  struct Item {
    pybind11::object key;  // null in a list
    pybind11::object value;
  };
  struct Attribute {
    pybind11::object owner;
    Item item;
  };
  struct Leaf {
    pybind11::object tensor;
    pybind11::object gradient;  // None: it has none
    bool is_added_to = false;
    bool requires_gradient = false;
    std::size_t n_hooks = 0;

    bool has_gradient() const noexcept;  // that it must have
    Found look() const noexcept;
  };

  void watch_container(pybind11::handle owner);
  bool holds_its_items(const Container& container) const noexcept;

  std::vector<pybind11::object> empty_;  // dictionaries without items
  std::vector<Container> containers_;
  std::vector<Item> items_;
  std::vector<Attribute> attributes_;
  std::vector<Leaf> leaves_;
  bool sees_all_ = true;
};

// State that is compared before each call, and restored or refused where it has changed.
//
// Owner: the called Python object, whose garbage collector sees it.
class CallGuard {
 public:
  // `before_execution` compares everything, restores what it can and raises for the rest; it
  // returns the arguments of a WatchedState. It is called only if that state has changed since.
  explicit CallGuard(pybind11::object before_execution)
      : before_execution_(std::move(before_execution)) {}

  // What has changed since that call; kOther if unknown.
  Found look() const noexcept {
    return watched_ && watched_->sees_all() ? watched_->look() : Found::kOther;
  }
  bool lacks_gradients() const noexcept { return watched_->look() == Found::kGradients; }
  bool has_sums_to_clear() const noexcept { return watched_ && watched_->has_sums_to_clear(); }
  void call();
  void give_gradients() const { watched_->give_gradients(); }  // if some are missing
  int traverse(visitproc visit, void* arg) const;

 private:
  pybind11::object before_execution_;
  std::optional<WatchedState> watched_;  // no value before the first call
};

}  // namespace offload
