#include "callable_replay.hpp"

#include <structmember.h>

#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

#include "offload/errors.hpp"
#include "python_replay.hpp"
#include "python_ticket.hpp"

namespace py = pybind11;

namespace offload {
namespace {

struct CallableReplay {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* keep;              // keeps `replay` alive
  const PythonReplay* replay;  // null: not bound
  CallGuard* guard;            // owned; null: nothing to compare
};

CallableReplay* of(PyObject* object) { return reinterpret_cast<CallableReplay*>(object); }

thread_local std::exception_ptr pending;
PyObject* rethrow = nullptr;  // made with the type

// Raises the current exception as pybind11 does at the end of its own functions.
PyObject* raise_current() {
  pending = std::current_exception();
  return PyObject_CallNoArgs(rethrow);
}

template <typename Function>
PyObject* guarded(PyObject* self, Function function) {
  try {
    if (of(self)->replay == nullptr) {
      throw ExecutionError("the executable was not loaded: make it with captured.load()");
    }
    return function(*of(self)->replay).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
#ifdef __GLIBCXX__
  } catch (abi::__forced_unwind&) {  // the interpreter ends the thread
    throw;
#endif
  } catch (...) {
    return raise_current();
  }
}

PyObject* call(PyObject* self, PyObject* const* values, std::size_t n_flagged, PyObject* names) {
  return guarded(self, [&](const PythonReplay& replay) {
    return replay.execute({values, static_cast<std::size_t>(PyVectorcall_NARGS(n_flagged)), names},
                          of(self)->guard);
  });
}

PyObject* call_with_tuple(PyObject* self, PyObject* args, PyObject* kwargs) {
  return guarded(self, [&](const PythonReplay& replay) {
    return replay.execute({args, kwargs}, of(self)->guard);
  });
}

// Values before the arguments of a submission.
constexpr std::size_t kBeforeArguments = 3;

// The arguments of a submission, with results in place of tickets.
struct Known {
  std::vector<PyObject*> values;
  std::vector<py::object> results;     // kept alive
  std::vector<PythonTicket*> tickets;  // dependencies
  bool are_written = true;             // all results are those of ended executions
};

// Null if it is not a ticket.
PythonTicket* as_ticket(PyObject* object) {
  static auto* const type =
      reinterpret_cast<PyTypeObject*>(py::type::of<PythonTicket>().release().ptr());
  return PyObject_TypeCheck(object, type) == 0 ? nullptr
                                               : &py::handle(object).cast<PythonTicket&>();
}

// A task that has not ended must not be waited for on the executable's thread, since the task may
// be waiting for that thread.
bool may_be_waited_for(const PythonTicket& ticket) {
  return ticket.is_placed() || ticket.ticket()->done();
}

// Finds the results of all tickets. Returns whether all are known.
bool find_results(PyObject* const* values, std::size_t n_values, PyObject* after, Known& known) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(after); ++index) {
    known.tickets.push_back(&py::handle(PyTuple_GET_ITEM(after, index)).cast<PythonTicket&>());
    if (!may_be_waited_for(*known.tickets.back())) return false;
  }
  known.values.assign(values, values + n_values);
  for (PyObject*& value : known.values) {
    PythonTicket* const ticket = as_ticket(value);
    if (ticket == nullptr) continue;
    py::object result = may_be_waited_for(*ticket) ? ticket->promised() : py::object();
    if (!result) return false;
    known.tickets.push_back(ticket);
    known.are_written &= ticket->ticket()->done();
    value = result.ptr();
    known.results.push_back(std::move(result));
  }
  return true;
}

// Takes (ticket, surroundings or None, tickets that it waits for, arguments...). Returns whether it
// is submitted; it is not if the result of a ticket among the arguments is unknown.
PyObject* submit(PyObject* self, PyObject* const* values, Py_ssize_t n_positional,
                 PyObject* names) {
  const auto n_given = static_cast<std::size_t>(n_positional);
  if (n_given < kBeforeArguments || as_ticket(values[0]) == nullptr ||
      !PyTuple_CheckExact(values[2])) {
    return PyErr_Format(PyExc_TypeError, "expected a ticket, surroundings and a tuple of tickets");
  }
  return guarded(self, [&](const PythonReplay& replay) -> py::object {
    PythonTicket& ticket = *as_ticket(values[0]);
    const auto* const asked =
        values[1] == Py_None ? nullptr : py::handle(values[1]).cast<const Surroundings*>();
    const std::size_t n_arguments = n_given - kBeforeArguments;
    const std::size_t n_named =
        names == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(names));
    Known known;
    if (!find_results(values + kBeforeArguments, n_arguments + n_named, values[2], known)) {
      return py::bool_(false);
    }
    BoundCall bound = replay.bound({known.values.data(), n_arguments, names, known.are_written},
                                   of(self)->guard, asked);
    const Replay& executing = bound.replay->replay();
    Dependencies after;
    for (const PythonTicket* one : known.tickets) {
      after.push_back(one->as_dependency(executing, *bound.call));
    }
    bound.replay->replay().submit(bound.call, ticket.ticket(), std::move(after));
    ticket.place(py::reinterpret_borrow<py::object>(of(self)->keep), replay, std::move(bound));
    return py::bool_(true);
  });
}

// The state of this thread and time that a submission bound later uses.
PyObject* surroundings(PyObject* self, PyObject*) {
  return guarded(self, [&](const PythonReplay& replay) {
    return py::cast(replay.surroundings(of(self)->guard));
  });
}

PyObject* bind(PyObject* self, PyObject* const* given, Py_ssize_t n_given) {
  if (n_given != 2) {
    return PyErr_Format(PyExc_TypeError, "expected a Replay, and what is called before executions");
  }
  PyObject* const replay = given[0];
  if (!py::isinstance<PythonReplay>(replay)) {
    return PyErr_Format(PyExc_TypeError, "expected a Replay, got a %s", Py_TYPE(replay)->tp_name);
  }
  if (of(self)->keep != nullptr) {  // a call may be using it
    return PyErr_Format(PyExc_RuntimeError, "it is bound to a Replay already");
  }
  of(self)->replay = py::handle(replay).cast<const PythonReplay*>();
  of(self)->keep = Py_NewRef(replay);
  if (given[1] != Py_None) {
    of(self)->guard = new CallGuard(py::reinterpret_borrow<py::object>(given[1]));
  }
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const self = type->tp_alloc(type, 0);
  if (self != nullptr) of(self)->vectorcall = call;
  return self;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(of(self)->keep);
  return of(self)->guard == nullptr ? 0 : of(self)->guard->traverse(visit, arg);
}

int clear(PyObject* self) {
  of(self)->replay = nullptr;
  delete std::exchange(of(self)->guard, nullptr);
  Py_CLEAR(of(self)->keep);
  return 0;
}

void deallocate(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

py::object make_callable_replay() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallableReplay, vectorcall), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyMethodDef methods[] = {
      {"_bind", as_method(bind), METH_FASTCALL, nullptr},
      {"_surroundings", surroundings, METH_NOARGS, nullptr},
      {"_submit", as_method(submit), METH_FASTCALL | METH_KEYWORDS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                {Py_tp_call, reinterpret_cast<void*>(call_with_tuple)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                                {Py_tp_members, members},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {
      "offload.native._native.CallableReplay", sizeof(CallableReplay), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
      slots};
  rethrow = py::cpp_function([] { std::rethrow_exception(std::exchange(pending, nullptr)); })
                .release()
                .ptr();
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(type);
}

}  // namespace offload
