// The common bindings of residents on devices with streams: handles, lifetimes, and the methods of
// the seam, which are bound for tests and proofs. Executions go through a Replay.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "offload/resident.hpp"

namespace offload {

// Python passes handles as numbers.
template <typename Handle>
Handle to_handle(std::uint64_t number) {
  return reinterpret_cast<Handle>(number);
}

// Destroys a resident, on any thread, and then what it points into, which stays until the process
// ends if the device may still use it. It waits for the device without blocking other threads.
template <typename Kind>
class DeleteResident {
 public:
  explicit DeleteResident(pybind11::object keep) : keep_(keep.release().ptr()) {}

  void operator()(Kind* resident) const {
    bool is_unused = false;
    if (PyGILState_Check() == 0) {
      is_unused = end(resident);
    } else {
      const GilReleased release;
      is_unused = end(resident);
    }
    if (!is_unused) return;
    if (Py_IsInitialized() == 0) return;
    const GilHeld gil;
    Py_DECREF(keep_);
  }

 private:
  static bool end(Kind* resident) {
    const bool is_unused = resident->close_for_good();
    delete resident;
    return is_unused;
  }

  PyObject* keep_;  // released by the call, since copies of a deleter are destroyed without the GIL
};

// Calls Python from any thread; no-op once the interpreter has ended.
inline std::function<void()> release_by(pybind11::object function) {
  const std::shared_ptr<PyObject> held(function.release().ptr(), [](PyObject* object) {
    if (Py_IsInitialized() == 0) return;
    const GilHeld gil;
    Py_DECREF(object);
  });
  return [held] {
    if (Py_IsInitialized() == 0) return;
    const GilHeld gil;
    try {
      pybind11::reinterpret_borrow<pybind11::object>(held.get())();
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("giving back what an executable held");
    }
  };
}

// Patches words by their numbers. Throws std::invalid_argument for one that does not exist.
template <typename Kind>
void patch_words(Kind& resident,
                 const std::vector<std::pair<std::uint32_t, std::uint64_t>>& words) {
  const std::size_t n_words = resident.relocations().size();
  std::vector<Patch> patches;
  for (const auto& [word, address] : words) {
    if (word >= n_words) throw std::invalid_argument("a patch names a word that does not exist");
    patches.push_back({word, address});
  }
  resident.patch(patches);
}

template <typename Kind>
void execute_resident(Kind& resident) {
  Submission submission;
  resident.execute(submission, nullptr);
}

// 0: it has no arena, or was closed.
template <typename Kind>
std::uint64_t arena_address(const Kind& resident) {
  return resident.arena().value_or(OwnArena{}).address;
}

}  // namespace offload
