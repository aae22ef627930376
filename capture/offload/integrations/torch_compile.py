"""The backend of `torch.compile(model, backend="offload")`.

torch finds it by the entry point in pyproject.toml, so importing offload does not import torch's
compiler, which takes two seconds.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters

from offload.api import capture
from offload.api.recording_turn import refuse_nested
from offload.backends import find_backend
from offload.console.user_code import is_user_file, located_at, portable_location
from offload.errors import CaptureError
from offload.host import SizedExecutable, Sizes
from offload.integrations.dynamic_sizes import DynamicSizes, dynamic_sizes
from offload.interpreter.cuda_guard import keep_cuda_guard
from offload.run import Executable

# Captures per compiled graph; each holds an arena and its constants.
CAPTURE_LIMIT = 16

# The behaviour of a graph for sizes beyond its limit of captures.
BEYOND_LIMIT = ("eager", "raise")

OPTIONS = ("beyond_limit", "capture_limit", "fuse", "host_reads")

# If several threads call a graph with a new size, one of them records it.
_one_recording = threading.RLock()
_counting = threading.Lock()


def backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Capture and load a traced graph at its first call, and execute it afterwards.

    A graph of dynamic sizes is captured for the sizes of its first call, and at the second
    combination for all sizes, if the device's executables take other sizes, neither `fuse` nor
    `host_reads` is set, and the graph neither writes nor draws. If sizes may not vary, or break a
    guard, it is captured once for each combination, up to a limit. Calls with further sizes then
    run the graph eagerly, with one warning per graph; `torch._dynamo.utils.counters["offload"]`
    counts them as `calls_beyond_limit`, beside the `captures` of all graphs. Nothing is recorded or
    refused before the first call: torch would wrap an error raised here, or, with
    `suppress_errors`, run the model without offload.

    Args:
        graph_module: torch's traced graph, or any GraphModule of torch operators.
        example_inputs: inputs like those of the call; tensors may be fake and sizes symbolic.
        options: `capture_limit`, the number of combinations of sizes, by default CAPTURE_LIMIT;
            `beyond_limit`, the behaviour for further sizes: "eager" (the default) or "raise";
            `host_reads`, as for `offload.capture`; and `fuse`, as for `Captured.load`.
        mode: refused, as offload has no modes.

    Returns:
        The callable that replaces the graph. It raises CaptureError if the call cannot be recorded,
        gradients are needed, or with `beyond_limit="raise"` the limit is reached; BindingError and
        ExecutionError like an Executable.
    """
    keep_cuda_guard()  # Dynamo has entered a FakeTensorMode in this thread, which may end
    return CompiledGraph(graph_module, example_inputs, options or {}, mode)


class CompiledGraph:
    """A traced graph and its captures, one for each combination of sizes and numbers.

    Thread: any. Calls of the same capture run one at a time, like those of an Executable; calls of
    different captures run concurrently, and beside a recording. Recordings wait for one another.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Mapping[str, Any],
        mode: str | None,
    ) -> None:
        self._refusal = _refused_settings(options, mode)
        self._capture_limit = options.get("capture_limit", CAPTURE_LIMIT)
        self._raises_beyond_limit = options.get("beyond_limit") == "raise"
        self._is_warned = False
        self._host_reads = options.get("host_reads", "avoid")
        self._fuse = options.get("fuse", False)
        self._numbers = _take_numbers(graph_module)
        self._graph = _LocatedGraph(graph_module)
        self._state = [*graph_module.parameters(), *graph_module.buffers()]
        self._gradients = {enabled: _gradients(graph_module, enabled) for enabled in (False, True)}
        self._switches_on = self._gradients[False] != _Gradients(False, False)
        self._varying = tuple(
            position
            for position, given in enumerate(example_inputs)
            if position in self._numbers or _may_vary(given)
        )
        self._runs: dict[tuple[Any, ...], Executable] = {}
        self._families: dict[tuple[Any, ...], SizedExecutable] = {}  # by numbers that are not sizes
        plain = not self._fuse and self._host_reads == "avoid"
        self._sizes = dynamic_sizes(graph_module, example_inputs) if plain else None

    def __call__(self, *args: Any) -> Any:
        """Execute the capture for these sizes, or record it; beyond the limit run eagerly.

        Raises:
            CaptureError: gradients are needed; the call cannot be recorded; or the limit of
                captures is reached, with `beyond_limit="raise"`.
            BindingError: an argument does not fit the recorded call.
            ExecutionError: a launch failed.
        """
        if torch.is_grad_enabled() or self._switches_on:
            self._refuse_gradients(args)
        if self._numbers:
            args = tuple(
                given.item() if position in self._numbers else given
                for position, given in enumerate(args)
            )
        key = tuple(_size(args[position]) for position in self._varying)
        run = self._run_of(key, args)
        if run is None:
            return self._record(key, args)
        # `param.data = ...` triggers no guard of torch. An opaque launch keeps its addresses.
        if self._state and run.program.opaque is None:
            run.rebind_weights()
        return _without_gradients(run, args)

    def _refuse_gradients(self, args: tuple[Any, ...]) -> None:
        gradients = self._gradients[torch.is_grad_enabled()]
        needs = (
            one.requires_grad for one in chain(args, self._state) if isinstance(one, torch.Tensor)
        )
        if gradients.recorded and any(needs):
            raise CaptureError(
                "gradients would be recorded, and executions record none: call the compiled model "
                "under torch.no_grad(), without torch.enable_grad() in it, or train it uncompiled"
            )
        if gradients.left_enabled != torch.is_grad_enabled():
            raise CaptureError(
                "the compiled function leaves gradients switched "
                f"{'on' if gradients.left_enabled else 'off'}, which an execution would not: use "
                "`with torch.no_grad():` instead of torch.set_grad_enabled"
            )

    @property
    def _n_captures(self) -> int:
        return len(self._runs) + len(self._families)

    def _run_of(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Executable | None:
        """The executable for a call; None if there is none yet."""
        found = self._runs.get(key)
        if found is not None or not self._families or self._sizes is None:
            return found
        run = self._families.get(self._sizes.rest_of(args))
        return run if run is not None and self._sizes.fit(run, args) else None

    def _captured(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """Record a call, for its sizes or after a second combination for all; return its result."""
        sizes = self._sizes_to_capture(args)
        if sizes is not None:
            try:
                return self._captured_for_all(sizes, args)
            except CaptureError:  # sizes may not vary: permanent, so not tried again
                self._sizes = None
        with capture(self._graph, host_reads=self._host_reads) as captured, torch.no_grad():
            result = captured(*args)
        self._runs[key] = captured.load(fuse=self._fuse)
        _count("captures")
        return result

    def _sizes_to_capture(self, args: tuple[Any, ...]) -> DynamicSizes | None:
        """The sizes that a capture is to vary over; None: capture these sizes alone.

        A refused capture repeats the call, so a call that writes or draws is excluded.
        """
        if self._sizes is None or not self._runs:
            return None
        known = next(iter(self._runs.values()))
        if known.program.leaves_something or find_backend(known.device).sizes is None:
            self._sizes = None
            return None
        is_new = self._sizes.rest_of(args) not in self._families
        return self._sizes if is_new and self._sizes.are_plain(args) else None

    def _captured_for_all(self, sizes: DynamicSizes, args: tuple[Any, ...]) -> Any:
        with capture(self._graph, dynamic_shapes=sizes.shapes) as captured, torch.no_grad():
            result = captured(*args)
        run = captured.load(sizes=Sizes())
        assert isinstance(run, SizedExecutable)  # as the backend said
        self._families[sizes.rest_of(args)] = run
        _count("captures")
        return result

    def _record(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        if self._refusal is not None:
            raise CaptureError(self._refusal)
        if self._n_captures >= self._capture_limit:  # permanent, so no recording is waited for
            return self._call_beyond_limit(key, args)
        refuse_nested()  # instead of waiting for a thread that waits for this one's recording
        with _one_recording:
            run = self._run_of(key, args)
            if run is None and self._n_captures < self._capture_limit:
                return self._captured(key, args)
        if run is None:  # other threads reached the limit meanwhile
            return self._call_beyond_limit(key, args)
        return _without_gradients(run, args)  # another thread recorded it meanwhile

    def _call_beyond_limit(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        if (run := self._run_of(key, args)) is not None:  # the last capture, recorded meanwhile
            return _without_gradients(run, args)
        reached = (
            f"this compiled graph was captured for {self._n_captures} combinations of sizes and "
            f"numbers, its limit, and was called with another: {key}"
        )
        advice = (
            "Pad the inputs to fewer sizes, pass numbers as tensors, or compile with "
            f'options={{"capture_limit": {2 * self._capture_limit}}}'
        )
        if self._raises_beyond_limit:
            raise CaptureError(f"{reached}. {advice}")
        _count("calls_beyond_limit")
        with _counting:
            warns, self._is_warned = not self._is_warned, True
        if warns:
            warnings.warn(
                f"{reached}. Calls with further sizes run eagerly from now on, as "
                'torch._dynamo.utils.counters["offload"]["calls_beyond_limit"] counts. '
                f'{advice}; with "beyond_limit": "raise" such a call raises CaptureError',
                RuntimeWarning,
                stacklevel=2,
            )
        return self._graph.graph_module(*args)


def _count(what: str) -> None:
    """Count an event in `torch._dynamo.utils.counters`, as torch's other backends do."""
    with _counting:
        counters["offload"][what] += 1


def _without_gradients(run: Executable, args: tuple[Any, ...]) -> Any:
    """Execute for a caller that may be in grad mode, if its graph records no gradients."""
    if not torch.is_grad_enabled():
        return run(*args)
    with torch.no_grad():
        return run(*args)


# ---- what the graph shows -----------------------------------------------------------------------


def _refused_settings(options: Mapping[str, Any], mode: str | None) -> str | None:
    """The message about unsupported settings; None if all are supported."""
    if mode is not None:
        return (
            f"mode={mode!r} of torch.compile is not supported, since offload has no modes: leave "
            "it out"
        )
    if unknown := sorted(set(options) - set(OPTIONS)):
        return f"expected only the options {', '.join(OPTIONS)}, got {unknown}"
    beyond = options.get("beyond_limit", "eager")
    if beyond not in BEYOND_LIMIT:
        return f"beyond_limit: expected one of {', '.join(BEYOND_LIMIT)}, got {beyond!r}"
    fuse = options.get("fuse", False)
    if fuse != "auto" and not isinstance(fuse, bool):
        return f"fuse: expected True, False or 'auto', got {fuse!r}"
    limit = options.get("capture_limit", CAPTURE_LIMIT)
    if not isinstance(limit, int) or limit < 1:
        return f"capture_limit: expected a number of captures, 1 or more, got {limit!r}"
    return None


def _may_vary(given: Any) -> bool:
    """Whether calls may pass another size or number than the traced one."""
    if not isinstance(given, torch.Tensor):
        return True
    return any(isinstance(size, torch.SymInt) for size in (*given.shape, *given.stride()))


def _size(given: Any) -> Any:
    """The part of a varying argument that distinguishes captures; -0.0 is not 0.0."""
    if isinstance(given, torch.Tensor):
        return tuple(given.shape), given.stride()
    return given if type(given) is int else repr(given)


def _take_numbers(graph_module: fx.GraphModule) -> frozenset[int]:
    """Make the graph take Python's numbers where torch passes tensors that are read.

    torch passes a float that changed between calls as a tensor of one float64, and the graph begins
    with `item()`: a host read, which a replay cannot repeat.

    Returns:
        The positions of these inputs.
    """
    numbers = set()
    inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(inputs):
        reads = list(node.users)
        if reads and all(one.op == "call_method" and one.target == "item" for one in reads):
            numbers.add(position)
            for one in reads:
                one.replace_all_uses_with(node)
                graph_module.graph.erase_node(one)
    if numbers:
        graph_module.recompile()
    return frozenset(numbers)


@dataclasses.dataclass(frozen=True, slots=True)
class _Gradients:
    """A graph's effect on gradients, if called with them enabled or disabled.

    Attributes:
        recorded: some operator runs while they are enabled.
        left_enabled: they are enabled when the graph ends.
    """

    recorded: bool
    left_enabled: bool


def _gradients(graph_module: fx.GraphModule, enabled: bool) -> _Gradients:
    recorded = False
    for node in graph_module.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif node.op.startswith("call_"):
            recorded = recorded or enabled
    return _Gradients(recorded, enabled)


# ---- the graph, run so that each launch knows its line ------------------------------------------

_TRACE_LINE = re.compile(r'File "(.+?)", line (\d+)')


class _LocatedGraph(torch.nn.Module):
    """Runs a graph node by node, so that launches and refusals name the traced user's line."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__()
        self.graph_module = graph_module

    def forward(self, *args: Any) -> Any:
        return _LocatedInterpreter(self.graph_module).run(*args)


class _LocatedInterpreter(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False  # the operator's errors stay unchanged

    def run_node(self, n: fx.Node) -> Any:
        lines = _TRACE_LINE.findall(n.stack_trace or "")
        users = [portable_location(name, line) for name, line in lines if is_user_file(name)]
        with located_at(users[-1] if users else ""):
            return super().run_node(n)
