// What a call must find around it as it was, compared without a frame of Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace offload {

// How many hooks the accumulation of a leaf's gradient has, which Python cannot see.
// Throws pybind11::type_error if it is no tensor.
std::size_t n_accumulation_hooks(pybind11::handle tensor);

// What a look at a WatchedState finds.
enum class Found : std::uint8_t {
  kSame,
  kGradients,  // all is the same but for gradients, which `give_gradients` puts in their places
  kOther,
};

// Containers and attributes as they are when it is made, and leaves with their gradients.
//
// Owner: who compares. All that it looks at is kept alive, so that no address can stand for another
// object, and is shown to Python's garbage collector by `traverse`. Thread: all needs the GIL.
class WatchedState {
 public:
  // Takes (containers, attributes, leaves, sees_all): dictionaries and lists whose items are to
  // stay; pairs of a dictionary and a key in it, which is a string; of each leaf the tensor, the
  // gradient that it is to have (or None), and whether that is added to; and whether there is
  // nothing else to look at. Throws pybind11::cast_error or type_error for anything else.
  explicit WatchedState(pybind11::handle watched);

  bool sees_all() const noexcept { return sees_all_; }

  // Whether gradients are recorded on this thread, containers hold the same objects or equal
  // numbers in the same order, and each leaf has its gradient, the same `requires_grad` and no
  // other hooks than before. Runs no code of Python's.
  Found look() const noexcept;

  // Whether gradients that are not in their places are added to, so that they become zeros.
  bool has_sums_to_clear() const noexcept;

  // Puts gradients in their places; what is added to becomes zero where there was none.
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

    bool has_gradient() const noexcept;  // the one that it is to have
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

// What is compared before each call, and put in order or refused where it is not as it was.
//
// Owner: the object of Python's that is called, whose garbage collector it is shown to.
class CallGuard {
 public:
  // `before_execution`: compares all, puts in order what it can and raises for the rest; gives what
  // a WatchedState takes. It is called only where that has changed since.
  explicit CallGuard(pybind11::object before_execution)
      : before_execution_(std::move(before_execution)) {}

  // What has changed since it was called; kOther where that is not known.
  Found look() const noexcept {
    return watched_ && watched_->sees_all() ? watched_->look() : Found::kOther;
  }
  bool lacks_gradients() const noexcept { return watched_->look() == Found::kGradients; }
  bool has_sums_to_clear() const noexcept { return watched_ && watched_->has_sums_to_clear(); }
  void call();
  void give_gradients() const { watched_->give_gradients(); }  // where it lacks some
  int traverse(visitproc visit, void* arg) const;

 private:
  pybind11::object before_execution_;
  std::optional<WatchedState> watched_;  // none before the first call
};

}  // namespace offload
