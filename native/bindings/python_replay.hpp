// A replay as Python calls it: how arguments are found, and results handed out. All needs the GIL.
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

#include "promotions.hpp"
#include "run/replay.hpp"
#include "watched_state.hpp"

namespace offload {

// Refuses executions on this thread while it records a call, where they cannot be seen.
void set_recording(bool is_recording) noexcept;

// The arguments of a call: `out` and `feature_map` are the executable's, all others the model's.
// Throws pybind11::type_error for a keyword that is no string.
//
// Owner: the interpreter; valid during the call.
class Arguments {
 public:
  // As PEP 590 gives them: the keywords' values behind the positional ones, their names a tuple or
  // null. `are_written`: no tensor among them is the result of an execution that has not ended.
  Arguments(PyObject* const* values, std::size_t n_positional, PyObject* names,
            bool are_written = true);

  // As a tuple, and a dict or null.
  Arguments(PyObject* args, PyObject* kwargs);

  PyObject* out() const { return out_; }                  // null: none is given
  PyObject* feature_map() const { return feature_map_; }  // likewise
  bool are_written() const { return are_written_; }       // whether what tensors hold may be read

  // Of the model.
  std::size_t n_positional() const { return n_positional_; }
  std::size_t n_keyword() const { return keyword_.size(); }
  PyObject* positional(std::size_t index) const { return positional_[index]; }
  PyObject* keyword(PyObject* name) const;  // null where there is none

  pybind11::tuple positional() const;
  pybind11::dict keyword() const;

 private:
  void take(PyObject* name, PyObject* value);

  PyObject* const* positional_;
  std::size_t n_positional_;
  c10::SmallVector<std::pair<PyObject*, PyObject*>, 4> keyword_;
  PyObject* out_ = nullptr;
  PyObject* feature_map_ = nullptr;
  bool are_written_ = true;
};

// Who called when the program was recorded, which later callers must be like.
struct RecordedCaller {
  std::uint64_t state = 0;  // of the program's device, as caller_state packs it
  pybind11::object root;    // a weak reference to the module that was called; None for a function
  bool training = false;    // the module's
};

// What Python code does for calls, where they are not of the frequent kind.
struct PythonSide {
  pybind11::object match;          // (args, kwargs): the tensors
  pybind11::object build_result;   // (tensors), or (tensors, sizes): what the model returns
  pybind11::object match_buffers;  // (out): the buffers, by result
  pybind11::object check_feature_map;
  pybind11::object current_stream;  // (device): the handle; or None, where torch's is the driver's
  pybind11::object draw;            // None: no kernel reads the state of a generator
  bool drains_queue = false;        // current_stream waits until torch has delivered what it queues
  std::optional<RecordedCaller> caller;  // none: calls are not compared with the recorded one
  pybind11::object warn_of_gradients;    // called once, at a call that would record them; or None
};

// Where a call tells a size: an axis of an input.
struct SizedAxis {
  std::size_t dim = 0;
  std::size_t input = 0;
  std::size_t axis = 0;
};

// What is known of calls whose sizes vary. An integer that is a size stands as such among the
// recorded arguments.
struct VaryingSizes {
  std::shared_ptr<Instances> instances;
  std::size_t n_dims = 0;
  std::vector<SizedAxis> axes;
  pybind11::object find;  // (args, kwargs): the sizes; raises where they are told otherwise
  std::shared_ptr<Promotions> promotions;  // null: no sizes have an executable of their own
};

class PythonReplay;

// A call whose arguments were checked, and who executes it.
struct BoundCall {
  pybind11::object keep;  // keeps `replay`; none: the replay that was called
  const PythonReplay* replay = nullptr;
  std::shared_ptr<Call> call;
};

// What a call takes from the thread that asks for it, kept where another thread binds it later.
struct Surroundings {
  bool in_grad_mode = true;
  int n_threads = 1;
  bool drains_queue = false;
  std::uint64_t stream = 0;
  std::optional<c10::Stream> torch_stream;
};

// A replay with the Python side of its calls.
//
// Owner: Python. Errors: as Replay, and what the Python side raises.
class PythonReplay {
 public:
  // `positional`, `keyword`: the recorded arguments as (is_tensor, constant), or None where only
  // `match` can compare; `result_form`: tensor, list or tuple, or other for `build_result`.
  // A size stands there as (false, None, its dim).
  PythonReplay(std::shared_ptr<Replay> replay, const pybind11::object& positional,
               const pybind11::object& keyword, const std::string& result_form, PythonSide python,
               std::optional<VaryingSizes> sizes);

  Replay& replay() const { return *replay_; }

  // Executes; what the model returns.
  pybind11::object execute(const Arguments& arguments, CallGuard* guard) const;

  // A call whose arguments were checked, by this replay or by that of its sizes alone: of this
  // thread, behind what `guard` compares (null: nothing); or of the one that was `asked` before,
  // where that was compared.
  BoundCall bound(const Arguments& arguments, CallGuard* guard,
                  const Surroundings* asked = nullptr) const;

  // Of this thread, for a call that is bound later, behind what `guard` compares. Throws as a call
  // would that is made here and now.
  Surroundings surroundings(CallGuard* guard) const;

  // Counts an execution of a call, where what sizes take is counted.
  void note_executed(const BoundCall& bound) const;

  // Whether what the model returns can be made before a call has ended.
  bool promises_results() const { return promises_results_; }

  // How many submissions wait to be bound which later calls must not overtake, and what to call
  // before these: it waits.
  void set_deferred(int n_deferred, pybind11::object await);

  // Of a call that has ended.
  pybind11::object result(Call& call) const;

 private:
  // The sizes of a call, by dim; none: nothing has told it yet.
  using Sizes = c10::SmallVector<std::optional<std::int64_t>, 4>;

  // One place in a call's arguments: a tensor, or a constant that must be the same again.
  struct Place {
    bool is_tensor = false;
    pybind11::object constant;
    std::optional<std::size_t> dim;  // an integer stands here, which is its size

    // Appends the tensor at this place, or sets a size; false if something else stands there.
    bool take(PyObject* given, Tensors& tensors, Sizes& sizes) const;
  };

  // How the results go back to the caller, and buffers for them come.
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
  void bind_on_stream(Call& call, const Surroundings* asked) const;
  BoundCall bound_here(const Arguments& arguments, CallGuard* guard,
                       const Surroundings* asked) const;

  std::shared_ptr<Replay> replay_;
  bool promises_results_ = true;
  int n_deferred_ = 0;  // under the GIL
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
