"""The Captured: a recorded call, to be executed, loaded, saved and explained."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from offload.api.loadable import Loadable
from offload.api.offline_model import OfflineModel
from offload.console.progress import reporting
from offload.console.switches import debug_level, say
from offload.errors import CaptureError, CopyError, FileError
from offload.files import open_saved, save_program
from offload.host import (
    ExecutableForEachSize,
    PaddedExecutable,
    Sizes,
)
from offload.interpreter.outside_graphs import outside_graphs
from offload.program import Bindings, BoundProgram, Program
from offload.program.family import BoundFamily, Family
from offload.run import Executable
from offload.run.debug_lines import program_line


class Captured(Loadable):
    """A model's recorded call. Call it with new tensors to execute.

    Attributes:
        program: the recorded Program, once the call in the with-block is done.
        bindings: its live objects.
        name: of the module's class, the function or the file, for messages.
    """

    def __init__(self, bound: BoundProgram | None = None, name: str = "program") -> None:
        """Begin with a Program, or without one until `offload.capture` has recorded a call.

        Args:
            bound: the recorded Program.
            name: for messages.
        """
        self.name = name
        self._bound_family: BoundFamily | None = None
        # Set by `capture`: how calls are recorded in its block, and the result.
        self._bound = bound
        self._record: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
        self._recorded_result: tuple[Any] | None = None
        self._default: Executable | PaddedExecutable | ExecutableForEachSize | None = None
        self._load_lock = threading.Lock()
        self._loads: weakref.WeakSet[Executable] = weakref.WeakSet()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "a captured program holds the model's weights and its executables, and cannot be "
            "copied or pickled: load it again; for another process, save it and open it there "
            "(captured.save, offload.open)"
        )

    @property
    def program(self) -> Program:
        """The recorded Program.

        Raises:
            CaptureError: nothing has been recorded yet.
        """
        return self.bound.program

    @property
    def family(self) -> Family | None:
        """The Family, which has the Program for other sizes; None: sizes do not vary."""
        return None if self._bound_family is None else self._bound_family.family

    @property
    def bindings(self) -> Bindings:
        """The live objects of the Program: weights, generators, opaque callables.

        Raises:
            CaptureError: nothing has been recorded yet.
        """
        return self.bound.bindings

    @property
    def bound(self) -> BoundProgram:
        """The recorded Program with its live objects.

        Raises:
            CaptureError: nothing has been recorded yet.
        """
        if self._bound is None:
            raise CaptureError("nothing is recorded yet: call the model once inside the with-block")
        return self._bound

    @property
    def recorded_result(self) -> Any:
        """The result of the recorded call; kept alive by this object.

        Raises:
            CaptureError: the call was made in a with-block, which returned its result there, or
                the Program was opened from a file.
        """
        if self._recorded_result is None:
            raise CaptureError(
                "only capture(model, *args) keeps the recorded call's result: in a with-block, "
                "keep what the call returns"
            )
        return self._recorded_result[0]

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute with new tensors; in the with-block, call the model and record it.

        Takes the model's arguments and returns its result, with the same nesting. After a capture
        with dynamic_shapes= of any sizes that the Family accepts.

        Raises:
            CaptureError: the call cannot be recorded.
            BindingError: an argument does not fit the recorded call; nothing has run.
            ExecutionError: a launch failed.
        """
        if self._default is not None:
            return self._default(*args, **kwargs)
        if self._record is not None:
            return self._record(args, kwargs)
        return self._loaded()(*args, **kwargs)

    def _loaded(self) -> Executable | PaddedExecutable | ExecutableForEachSize:
        with self._load_lock:
            if self._default is None:
                varies = self._bound_family is not None
                self._default = self.load(sizes=Sizes()) if varies else self.load()
            return self._default

    def rebind_weights(self) -> None:
        """Use the present storages of the parameters in calls of this object.

        Raises:
            BindingError: a new storage has another layout than the recorded one.
        """
        if self._default is not None:
            self._default.rebind_weights()

    @outside_graphs
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Program and its weights to one file; `offload.open` reads it without pickle.

        Weights are written with the present content of the model's tensors, which `load()` would
        also use: the new one after training, `load_state_dict` or `param.data = other`.

        If ranks exchange tensors, each rank writes a separate file: `path` with `.rank0of2`
        appended for the first of two. `offload.open(path)` reads the file of the rank that opens
        it.

        After a capture with dynamic_shapes= the file has the Family, and its Program with the
        launches that make constants.

        Types of results are written by name. A UserWarning names those that `offload.open` finds
        only through `types=`.

        Raises:
            CaptureError: nothing has been recorded yet.
            FileError: something in the program cannot be written, such as weights in files
                (`capture(weights=)`); a weight has another shape, dtype, strides or offset than
                recorded, or its memory was freed or shrunk; an open executable loaded from this
                object was given other weights by `streaming.replace`, which the model's tensors do
                not hold; or the path cannot be written to.
        """
        if self.bound.bindings.before_execution is not None:
            raise FileError(
                f"{os.fspath(path)}: the program is a training step, which compares an optimizer "
                "of this process at each execution: save the model's and the optimizer's "
                "state_dict, and capture the step again where they are loaded"
            )
        for run in list(self._loads):
            if not run.closed and run.streaming is not None and run.streaming.replaced:
                raise FileError(
                    f"{os.fspath(path)}: {', '.join(sorted(run.streaming.replaced))}: replaced in "
                    "an executable (run.streaming.replace), while the model's own tensors, which "
                    "would be saved, hold other content: copy the new content into the model's "
                    "tensors and close that executable, or close it to save the model's content"
                )
        family = self._bound_family
        with reporting():
            if family is None:
                save_program(self.bound, path)
            else:
                whole = BoundProgram(family.family.program, family.bindings)
                save_program(whole, path, family.family)

    @outside_graphs
    def explain(self) -> str:
        """`Executable.explain` of the executable that calls of this object use.

        Loads the Program if it is not loaded.
        """
        return self._loaded().explain()


def open_file(
    path: str | os.PathLike[str], types: Sequence[type] = (), *, triton: bool = False
) -> Captured:
    """Open a saved Program; the model's code is not needed, and nothing is executed.

    Args:
        path: of the file.
        types: classes of the result's containers: named tuples, dataclasses, mappings, and objects
            with attributes. Each stands for the container recorded under its qualified name; else,
            if its module has another name now, for the only one whose name ends in the class's
            name. `torch.return_types`, `torch.Size`, `OrderedDict` and the outputs of transformers'
            models with the caches in them are found without it, if transformers is installed. Any
            other container becomes a plain tuple, list or dictionary.
        triton: whether the file may hold sources of Triton kernels. Loading compiles them, which
            can run any code: give True only for a file that you trust as much as code.

    Raises:
        FileError: the file is missing, truncated, corrupted, newer than this version, holds
            sources of Triton kernels without `triton`, or uses an operator that is not on the list
            of safe ones; or one of `types` matches no container of the result, or does not fit it.
        BindingError: one of `types` is not a class, or OFFLOAD_DEBUG is not a level.
    """
    level = debug_level()
    with reporting():
        saved = open_saved(path, types, triton=triton)
        captured = Captured(saved.bound, Path(path).stem)
        if saved.family is not None:
            captured._bound_family = BoundFamily(saved.family, saved.bound.bindings)
    if level:
        say(program_line(captured.program, f"opened {os.fspath(path)}"))
    return captured


@outside_graphs
def open_model(
    path: str | os.PathLike[str], types: Sequence[type] = (), *, triton: bool = False
) -> Captured | OfflineModel:
    """Open a saved Program (see `open_file`), or by the ending `.om` an Ascend offline model.

    Args:
        path: of the file.
        types: as `open_file`; must be empty for an offline model, whose results are a tuple.
        triton: as `open_file`.

    Raises:
        FileError: as `open_file`; for an offline model: there is no such file, or `types` are
            given.
        BindingError: one of `types` is not a class.
    """
    if not os.fspath(path).endswith(".om"):
        return open_file(path, types, triton=triton)
    if types:
        raise FileError(
            f"{os.fspath(path)}: types= is for saved programs, and the results of an offline "
            "model are a tuple of tensors: open it without types="
        )
    return OfflineModel(path)
