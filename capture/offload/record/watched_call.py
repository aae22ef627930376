"""A watched call: its preparation, and its watchers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from offload.distributed import Rendezvous
from offload.errors import CaptureError, OffloadError
from offload.interpreter.own_generators import default_generator
from offload.program.structure import (
    Structure,
    constants,
)
from offload.record.call_arguments import CallArguments
from offload.record.callables import Parameters
from offload.record.compiled_callables import (
    CompiledParts,
    by_settings,
    compiled_parts,
    refuse_compiled,
)
from offload.record.compiled_calls import CompiledCalls
from offload.record.device_formats import refuse_own_format
from offload.record.fake_weights import FakeWeights
from offload.record.host_constants import may_be_host_constant
from offload.record.input_overlaps import common_memory
from offload.record.input_samples import input_samples
from offload.record.kept_numbers import KeptNumbers
from offload.record.kernel_modes import KernelModes
from offload.record.launches import LaunchRecorder
from offload.record.model_state import ModelState
from offload.record.modes import (
    FunctionMode,
    dispatch_mode,
    executions_refused,
)
from offload.record.parallel_wrappers import refuse_parallel_wrappers
from offload.record.plain_call import PlainCall
from offload.record.python_random import PythonRandom
from offload.record.recording_device import Allocations, recording_device, refuse_capturing
from offload.record.repeatable_call import Surroundings, called_again
from offload.record.seeding import seeding_noticed, seeding_refused
from offload.record.sized_functions import SizedFunctions
from offload.record.storages import StorageTable, alias
from offload.record.surroundings import (
    LeafGradients,
    caller_of,
    not_training,
    refuse_gradients,
    root_module,
)
from offload.record.thread_lookups import CompilingAnswers, eager_paths_taken
from offload.record.trained_state import TrainedState
from offload.record.triton_launches import CompileTriton, TritonLaunches


class WatchedCall:
    """One call under torch's dispatch and function modes, between `begin` and its end.

    Owner: one with-block. Thread: the one that calls the model; work of other threads is not seen.
    Results that depend on it are refused, or on a device that runs opaque launches make the call
    such a launch.

    Attributes:
        rendezvous: where the ranks that record the call meet; None: there are no other ranks.
    """

    def __init__(
        self,
        *,
        host_reads: str,
        function: Callable[..., Any],
        parameters: Parameters,
        runs_opaque: Callable[[str], bool] = lambda _: False,
        fakes: FakeWeights | None = None,
        plain: PlainCall | None = None,
        avoided_read: str = "",
        keeps_seen: bool = False,
        trains: bool = False,
        rendezvous: Rendezvous | None = None,
        sized: SizedFunctions | None = None,
        triton_compiler: Callable[[str], CompileTriton | None] = lambda _: None,
    ) -> None:
        """Examine the callable.

        Args:
            host_reads: as `capture` takes it.
            function: the callable.
            parameters: its parameters' names.
            runs_opaque: whether a device of this type can run the call as one opaque launch.
            fakes: record under fake tensors; nothing is executed, and the result has no content.
            plain: the same call, made unrecorded because it read a tensor on the host. Now it
                sees `is_compiling()` true, and must have the same outcome.
            avoided_read: likewise under fake tensors, where nothing can be read or compared.
            keeps_seen: the Recording keeps the whole observed call.
            trains: the call may record gradients and step optimizers.
            rendezvous: where the ranks that record the call meet; None: there are no other ranks.
            sized: replacements of torch functions where sizes vary; None: no replacements.
            triton_compiler: compiles Triton kernels for a device type; None: their launches are not
                recorded there.
        """
        self._sized = sized
        self.rendezvous = rendezvous
        self._keeps_seen = keeps_seen
        self._returned: tuple[list[torch.Tensor], Structure] | None = None
        with torch.no_grad():
            self.table = StorageTable(ModelState(function, trains=trains))
        self._avoids_reads = host_reads == "avoid"
        self._fakes = fakes
        self._avoided_read = avoided_read if plain is None else plain.read
        self._answers = CompilingAnswers(answer=bool(self._avoided_read))
        self._plain = plain
        may_defer = self._avoids_reads and fakes is None
        self._log = LaunchRecorder(
            self.table,
            guards_reads=not self._avoids_reads,
            may_defer=self._answers.may_matter if may_defer else lambda: False,
            fakes=fakes,
            drawn=None if plain is None else plain.drawn,
            rendezvous=rendezvous,
        )
        self._function = function
        self._parameters = parameters
        self._runs_opaque = runs_opaque
        self._triton_compiler = triton_compiler
        self._compiled: tuple[str, ...] = ()
        self._parts = CompiledParts((), ())
        self._context = contextlib.ExitStack()
        self._seeding = contextlib.ExitStack()  # noticed until generators were checked
        self._inputs: list[torch.Tensor] = []
        self._samples: tuple[bytes, ...] = ()
        self._arguments = CallArguments((), {})
        self._call: tuple[Any, Any] = ((), {})
        self._host_state: torch.Tensor | None = None
        self._python_random = PythonRandom()

    # ---- the call ----------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Start recording a call with these arguments.

        Returns:
            The arguments to call with: aliases of the tensors, in the same nesting.

        Raises:
            CaptureError: an argument cannot be recorded, or the caller is capturing a graph.
        """
        refuse_parallel_wrappers(self.table.state.python_state.modules)
        self._arguments = CallArguments(args, kwargs)
        self._choose_device()
        refuse_gradients(self._arguments.tensors, self._arguments.names)
        if self._trained is not None:
            self._trained.begin()
            self._log.numbers = KeptNumbers(self.table)
        # A step's guard compares the mode of each module that the step can reach.
        root = None if self._trained is not None else root_module(self._function)
        self._caller = caller_of(root, self.table.device)
        self._root = None if root is None else weakref.ref(root)
        self._look_at_compiled()
        for tensor, name in zip(self._arguments.tensors, self._arguments.names, strict=True):
            refuse_own_format(tensor, name)
        with torch.no_grad(), self._deciding():
            self._look_at_inputs()
        if self._compiled:
            self._keep_state()
        own = [one for one in constants(self._arguments.live) if type(one) is torch.Generator]
        for generator in (default_generator(self.table.device), *own, *self.table.state.generators):
            self._log.generators.note(generator)
        self._call = self._arguments.nested(self._inputs)
        try:
            self._enter()
        except BaseException:
            self._end()
            raise
        return self._call

    @property
    def _trained(self) -> TrainedState | None:
        return self.table.state.trained

    def _look_at_inputs(self) -> None:
        """Track a twin of each argument; keep inputs of which one write may change two."""
        given = self._arguments
        self._samples = input_samples(given.tensors)
        self._inputs = [self._twin(*one) for one in enumerate(given.tensors)]
        for tensor, name in zip(self._inputs, given.names, strict=True):
            self.table.add_input(tensor, name)
        named = zip(given.names, self._inputs, strict=True)
        self._gradients = LeafGradients([*self.table.state.named_tensors(), *named])
        for first, second, _ in common_memory(self.table, given.tensors, self._inputs):
            for leaf in (first, second):  # if one is written, both may change
                self.table.of(self._inputs[leaf]).keep_before()

    def _twin(self, leaf: int, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in for an argument; host constants keep their value where all else is fake."""
        if self._fakes is None or tensor.device != self.table.device:
            return alias(tensor)
        return self._fakes.input(tensor, leaf)

    def _choose_device(self) -> None:
        given = self._arguments
        device = recording_device(given.tensors, self.table.state.tensors())
        refuse_capturing(device)
        for tensor, name in zip(given.tensors, given.names, strict=True):
            if tensor.device != device and not may_be_host_constant(tensor):
                others = (
                    "" if device.type == "cpu" else "; only tensors of no dimensions may differ"
                )
                raise CaptureError(
                    f"{name} is on {tensor.device}, and the model or another input on {device}: "
                    f"move the model and its inputs to one device{others}"
                )
        self.table.device = device
        self._log.guards.device_type = device.type
        self._log.allocations = Allocations(device)
        self._log.modes = KernelModes(device)

    def _look_at_compiled(self) -> None:
        """Find out whether torch.compile hides the launches, and whether that can be recorded.

        Raises:
            CaptureError: a compiler of the user's does, on a device that runs no opaque launches.
        """
        found = compiled_parts(self._function, self.table.state.python_state.compiled)
        self._compiled, self._parts = found.foreign, found
        device = self.table.device
        self._log.allows_unseen = self._fakes is None and self._runs_opaque(device.type)
        if self._fakes is not None:
            refuse_compiled(found, "with weights= nothing is computed, so it launches nothing")
        elif not self._log.allows_unseen:
            refuse_compiled(
                found,
                f"on {device.type} they would be one call of the compiled code, and a capture "
                "would gain nothing",
            )
        elif self._compiled:
            if device.type != "cpu":
                self._host_state = torch.default_generator.get_state()
            names = ", ".join(self._compiled)
            self._log.unseen = f"{names} is compiled by torch.compile{by_settings(found.settings)}"
        self._surroundings = Surroundings.of_caller(
            device,
            avoids_reads=self._answers.answer and not self._compiled,
        )

    def _keep_state(self) -> None:
        """Keep the state that a call may write unobserved."""
        with torch.no_grad():
            self.table.state.keep_before()
            for tracked in self.table:
                tracked.keep_before()

    def _enter(self) -> None:
        enter = self._context.enter_context
        enter(self._log.allocations)
        if not self._compiled:
            enter(self._answers.given())
        enter(not_training() if self._trained is None else self._trained.recording())
        enter(executions_refused())
        if self._fakes is not None:
            enter(self._fakes.recording())
        if self._compiled or self._fakes is not None:
            enter(seeding_noticed(self._log.note_refusal))
        if self._compiled:  # the modes would leave nothing of it
            return
        enter(CompiledCalls(self._log, self._parts, self._answers.may_matter).noticed())
        may_fork = self._trained is not None
        used = self._log.generators
        self._seeding.enter_context(seeding_refused(self._log, used, may_fork=may_fork))
        self._log.generators.begin()  # from now on setting them is noticed
        enter(eager_paths_taken())
        numbers = None if self._trained is None else self._trained.numbers(self._log)
        if numbers is not None:
            enter(numbers.followed())
        compile_triton = self._triton_compiler(self.table.device.type)
        if compile_triton is not None:
            self._log.sees_triton = True
            enter(TritonLaunches(self._log, compile_triton).noticed())
        enter(FunctionMode(self._log, numbers, self._sized))
        enter(dispatch_mode(self._log))

    def call_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin, and repeat an earlier call; return its result, to be finished.

        Raises:
            CaptureError: an argument cannot be recorded, or the first refusal. Other errors of the
                call pass through. Either ends the recording.
        """
        try:
            args, kwargs = self.begin(args, kwargs)
            with called_again():
                return self._function(*args, **kwargs)
        except Exception as error:
            refusal = self.abandon()
            if refusal is None or refusal is error:
                raise
            raise refusal from error
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> OffloadError | None:
        """Stop without a Program: the call raised.

        Returns:
            The recorder's first refusal, if the call raised because of it.
        """
        self._end()
        return self._log.take_refusal()

    @contextlib.contextmanager
    def _watched_no_more(self) -> Iterator[None]:
        try:
            self._log.collectives.finish()
            self._context.close()
            self._log.raise_refusal()  # if the forward swallowed it and took another path
            if not self._compiled:  # the compiler sets generators
                self._log.generators.check_unseeded()
                self._log.generators.refuse_forked()
            self._seeding.close()
            with torch.no_grad(), self._deciding():
                yield
        finally:
            self._end()

    @property
    def has_deferred(self) -> bool:
        """Whether the call made a host read that it may avoid with `is_compiling()` true."""
        return self._log.guards.deferred is not None

    @property
    def avoided_read(self) -> str:
        """The first refused read, if the call may avoid it with `is_compiling()` true."""
        return self._log.guards.refused_at if self._answers.may_matter() else ""

    def _end(self) -> None:
        try:
            self._context.close()
        finally:
            self._seeding.close()
            self._log.allocations.close()

    def _deciding(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._fakes is None else self._fakes.deciding()
