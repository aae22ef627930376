// A replay as Python calls it: finding arguments and building results. Everything needs the GIL.
#pragma once

#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call_arguments.hpp"
#include "promotions.hpp"
#include "run/replay.hpp"
#include "run/surroundings.hpp"
#include "watched_state.hpp"

namespace offload {

// Refuses executions on this thread while it records a call, since a recording would not see them.
void set_recording(bool is_recording) noexcept;

// The caller's state at the recording, which later calls must match.
struct RecordedCaller {
  std::uint64_t state = 0;  // of the program's device, as caller_state packs it
  pybind11::object root;    // a weak reference to the called module; None for a function
  bool training = false;    // the module's
};

// Python functions for calls that are not of the frequent kind.
struct PythonSide {
  pybind11::object match;          // (args, kwargs): the tensors
  pybind11::object build_result;   // (tensors), or (tensors, sizes): the model's result
  pybind11::object match_buffers;  // (out): the buffers, by result
  pybind11::object check_feature_map;
  pybind11::object current_stream;  // (device): the handle; or None, if torch's is the driver's
  pybind11::object draw;            // None: no kernel reads the state of a generator
  bool drains_queue = false;        // current_stream waits until torch has delivered its queue
  std::optional<RecordedCaller> caller;  // no value: calls are not compared with the recorded one
  pybind11::object warn_of_gradients;    // called once, at a call that would record them; or None
};

// The source of a size in a call: an axis of an input.
struct SizedAxis {
  std::size_t dim = 0;
  std::size_t input = 0;
  std::size_t axis = 0;
};

// Calls whose sizes vary. An integer argument that is a size is marked as such among the recorded
// arguments.
struct VaryingSizes {
  std::shared_ptr<Instances> instances;
  std::size_t n_dims = 0;
  std::vector<SizedAxis> axes;
  pybind11::object find;                   // (args, kwargs): the sizes; raises if they disagree
  std::shared_ptr<Promotions> promotions;  // null: no sizes have a separate executable
};

class PythonReplay;

// A call with checked arguments, and the replay that executes it.
struct BoundCall {
  pybind11::object keep;  // keeps `replay` alive; null: it is the replay that was called
  const PythonReplay* replay = nullptr;
  std::shared_ptr<Call> call;
};

// A replay with the Python side of its calls.
//
// Owner: Python. Errors: as Replay, and those of the Python side.
class PythonReplay {
 public:
  // `positional`, `keyword`: the recorded arguments as (is_tensor, constant), or None where only
  // `match` can compare; a size is (false, None, its dim). `result_form`: tensor, list or tuple, or
  // other for `build_result`.
  PythonReplay(std::shared_ptr<Replay> replay, const pybind11::object& positional,
               const pybind11::object& keyword, const std::string& result_form, PythonSide python,
               std::optional<VaryingSizes> sizes);

  Replay& replay() const { return *replay_; }

  // Executes, and returns the model's result.
  pybind11::object execute(const Arguments& arguments, CallGuard* guard) const;

  // Checks and binds a call, for this replay or for that of its sizes alone. Uses the state of this
  // thread after comparing by `guard` (null: no comparison), or the state `asked`, which was
  // compared when it was taken.
  BoundCall bound(const Arguments& arguments, CallGuard* guard,
                  const Surroundings* asked = nullptr) const;

  // The state of this thread, after comparing by `guard`, for a call that is bound later. Throws as
  // a call made here and now would.
  Surroundings surroundings(CallGuard* guard) const;

  // Checks a call as an execution of it would, in the state `asked`, and returns its tensors.
  // Nothing is executed and nothing copied, so each tensor must be laid out as recorded.
  pybind11::list checked(const Arguments& arguments, const Surroundings& asked) const;

  // Counts an execution of a call, if durations by sizes are counted.
  void note_executed(const BoundCall& bound) const;

  // Whether the model's result can be built before a call has ended.
  bool promises_results() const { return promises_results_; }

  // Sets how many submissions that later calls must not overtake are still to be bound, and the
  // function that waits for them, which is called before such calls.
  void set_deferred(int n_deferred, pybind11::object await);

  // The result of a call that has ended.
  pybind11::object result(Call& call) const;

 private:
  // The sizes of a call, by dim; no value: not known yet.
  using Sizes = c10::SmallVector<std::optional<std::int64_t>, 4>;

  // A place in a call's arguments: a tensor, or a constant that must be equal.
  struct Place {
    bool is_tensor = false;
    pybind11::object constant;
    std::optional<std::size_t> dim;  // the place holds an integer, the size of this dim

    // Appends the tensor at this place, or sets a size; returns false for anything else.
    bool take(PyObject* given, Tensors& tensors, Sizes& sizes) const;
  };

  // The form in which results are returned and buffers for them are given.
  enum class ResultForm : std::uint8_t { kTensor, kList, kTuple, kOther };

  static Place to_place(pybind11::handle place);
  std::vector<std::int64_t> take_tensors(const Arguments& arguments, Call& call) const;
  bool take_plain(const Arguments& arguments, Tensors& tensors, Sizes& sizes) const;
  std::vector<std::int64_t> sizes_of(const Arguments& arguments, Sizes sizes,
                                     const Call& call) const;
  void take_instance(const std::vector<std::int64_t>& sizes, Call& call) const;
  pybind11::object found_promoted(const std::vector<std::int64_t>& sizes,
                                  const Arguments& arguments, const Surroundings* asked,
                                  bool& is_due) const;
  std::optional<BoundCall> promoted(pybind11::object keep, const std::vector<std::int64_t>& sizes,
                                    const Arguments& arguments, const Surroundings* asked) const;
  bool read_axes(const Tensors& tensors, Sizes& sizes) const;
  void take_buffers(PyObject* out, Tensors& buffers) const;
  bool take_plain(PyObject* out, Tensors& buffers) const;
  void check_caller() const;
  void prepare(CallGuard* guard) const;
  void await_deferred() const;
  void keep_order(CallGuard& guard) const;
  void warn_of_gradients() const;
  void note_stream(Call& call) const;
  void take_stream(Surroundings& now) const;
  bool takes(PyObject* feature_map) const;
  bool refuses_capturing() const;
  void refuse_copies(const Call& call) const;
  void bind_on_stream(Call& call, const Surroundings* asked) const;
  BoundCall bound_here(const Arguments& arguments, CallGuard* guard,
                       const Surroundings* asked) const;

  std::shared_ptr<Replay> replay_;
  bool promises_results_ = true;
  int n_deferred_ = 0;  // guarded by the GIL
  pybind11::object await_deferred_;
  bool plain_ = false;
  std::vector<Place> positional_;
  std::vector<std::pair<pybind11::object, Place>> keyword_;
  ResultForm form_;
  PythonSide python_;
  std::optional<VaryingSizes> sizes_;
  mutable std::atomic<bool> warns_of_gradients_;
};

}  // namespace offload
