"""What torch's Inductor makes of a region: its kernels and their calls, read as data.

`compile_fx.compile_fx_inner` is driven with offload's wrapper in place of the one that writes calls
of kernels (`codegen.wrapper_fxir.WrapperFxCodegen`); its lines (`codegen.wrapper`) are read. All
used parts are private. `inductor` and `triton_loops` use it, and share its lock.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from offload.compile.graph import STRICT_INDICES, trace
from offload.compile.line_reader import Lines, Reader, place_of
from offload.compile.moments import MOMENTS
from offload.compile.refusal import PassingRefusal, UnsupportedRegion
from offload.interpreter.torch_names import dtype_name
from offload.program import ITEM_BYTES, Program

T = TypeVar("T")

_LOCK = threading.Lock()  # guards the registered wrapper, and what it leaves
_worked: set[str] = set()  # device types for which some region was lowered in this process

_TALKATIVE = ("torch._subclasses.fake_tensor",)

COMMON_CONFIGURATION: Mapping[str, Any] = {
    "allow_buffer_reuse": False,
    "comprehensive_padding": False,
    "emulate_precision_casts": True,  # round where the launches round
    "freezing": False,
    "fx_graph_cache": False,
    "graph_partition": False,
    "max_autotune": False,
    "memory_planning": False,
    "pattern_matcher": False,  # its patterns are traced, which affects other threads
    "size_asserts": False,
}


def guarded(work: Callable[[], T], device_type: str) -> T:
    """Run work that lowers for a type of device, one thread at a time, without messages.

    Raises:
        UnsupportedRegion: whatever it raises, with the reason.
    """
    try:
        with _LOCK, warnings.catch_warnings(), _silenced():
            warnings.simplefilter("ignore")  # torch's, about its deprecated parts
            found = work()
    except UnsupportedRegion:
        raise
    except Exception as error:
        raise refusal_of(error, "Inductor", device_type) from error
    _worked.add(device_type)
    return found


def refusal_of(error: Exception, who: str, device_type: str) -> UnsupportedRegion:
    """The refusal of a region after an unexpected error.

    It is lasting only if other regions are lowered: an Inductor that is broken in this process, or
    has no room for its files, refuses all.
    """
    chain: list[BaseException] = [error]
    while (behind := chain[-1].__cause__ or chain[-1].__context__) and behind not in chain:
        chain.append(behind)
    is_passing = any(isinstance(one, (OSError, MemoryError, RecursionError)) for one in chain)
    kind = PassingRefusal if is_passing or device_type not in _worked else UnsupportedRegion
    return kind(f"{who}: {_first_line(error)}")


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress torch's log messages of this thread about a refused region: `explain` reports it."""
    owner = threading.get_ident()

    def is_others(_: logging.LogRecord) -> bool:
        return threading.get_ident() != owner

    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    for logger in loggers:
        logger.addFilter(is_others)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_others)


def lines_of(
    program: Program,
    device: torch.device,
    new_reader: Callable[[Program, list[str]], Reader],
    configuration: Mapping[str, Any],
    check: Callable[[torch.fx.GraphModule], None] = lambda _: None,
) -> Lines:
    """Let Inductor lower a region; within `guarded`.

    Args:
        program: the region as a Program.
        device: of its tensors.
        new_reader: makes the reader of lines, of the program and the names of its inputs.
        configuration: Inductor's settings besides COMMON_CONFIGURATION.
        check: refuses the region's graph.

    Raises:
        UnsupportedRegion: Inductor makes kernels of only a part.
    """
    from torch._inductor import decomposition  # noqa: PLC0415 - takes seconds
    from torch._inductor.codegen import common, wrapper_fxir  # noqa: PLC0415

    found: list[Lines | UnsupportedRegion] = []

    class Wrapper(wrapper_fxir.WrapperFxCodegen):
        """Reads the lines that would become calls."""

        def _generate(self, is_inference: bool) -> Any:
            self.run_wrapper_ir_passes(is_inference)
            try:
                found.append(_read(self, new_reader(program, list(self.get_fx_graph_inputs()))))
            except UnsupportedRegion as error:  # if raised here, it would be wrapped
                found.append(error)
            nothing = torch.fx.GraphModule({}, torch.fx.Graph())
            return types.SimpleNamespace(gm=nothing), None

    decompositions = {**decomposition.select_decomp_table(), **STRICT_INDICES, **MOMENTS}
    graph, inputs = trace(program, decompositions, device)
    if not inputs:
        raise UnsupportedRegion("it has no input")
    check(graph)
    common.init_backend_registration()
    registered = common.device_codegens[device.type]
    before = registered.fx_wrapper_codegen
    registered.fx_wrapper_codegen = Wrapper
    try:
        _compile(graph, inputs, {**COMMON_CONFIGURATION, **configuration})
    finally:
        registered.fx_wrapper_codegen = before
    if isinstance(found[0], UnsupportedRegion):
        raise found[0]
    return found[0]


def _compile(
    graph: torch.fx.GraphModule, inputs: list[Any], configuration: Mapping[str, Any]
) -> None:
    """Let Inductor lower a graph of fake inputs by the registered wrapper."""
    from torch._inductor import config  # noqa: PLC0415 - takes seconds
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415
    from torch._inductor.utils import BoxedBool  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    mode = inputs[0].fake_mode
    with (
        _untraced(),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        V.set_fake_mode(mode),
        V.set_aot_compilation(True),
        config.patch({**defaults(config), **configuration}),
    ):
        compile_fx_inner(
            graph,
            inputs,
            fx_wrapper=True,
            aot_mode=True,
            is_inference=True,
            cudagraphs=BoxedBool(False),
            static_input_idxs=[],
        )


def defaults(config: Any) -> dict[str, Any]:
    """What Inductor's settings would be if this thread's user had changed none.

    Kernels are kept under a digest of what they compute, and must not depend on the passes and
    settings that a user has for compiled models. Private parts of torch/utils/_config_module.py.
    """
    return {
        name: entry.default
        for name, entry in config._config.items()
        if entry.alias is None and not config._is_default(name)
    }


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Avoid the function that Inductor traces symbolically once per process.

    Tracing is a flag for all threads: compiled functions of other threads refuse calls meanwhile.
    """
    from torch._inductor import loop_body  # noqa: PLC0415 - takes seconds

    shim: Any = getattr(loop_body, "InterpreterShim", None)
    before = vars(shim).get("_dummy_gm") if isinstance(shim, type) else None
    if before is None:
        yield
        return
    shim._dummy_gm = staticmethod(_identity)
    try:
        yield
    finally:
        shim._dummy_gm = before


@functools.cache
def _identity() -> torch.fx.GraphModule:
    """The equivalent of `torch.fx.symbolic_trace(lambda x: x)`."""
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    return torch.fx.GraphModule({}, graph)


_WITHOUT_WORK = ("LineContext", "EnterDeviceContextManagerLine", "ExitDeviceContextManagerLine")
"""Lines about which nothing needs to be known: a region has one device."""


def _read(wrapper: Any, reader: Reader) -> Lines:
    """Return the wrapper's lines as plain data."""
    from torch._inductor.codegen import wrapper as lines  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    if V.graph.constants:
        raise UnsupportedRegion("Inductor makes constants of it")
    for line in wrapper.lines:
        match line:
            case lines.KernelDefinitionLine():
                reader.define(line.kernel_name, line.kernel_body)
            case lines.KernelCallLine():
                reader.call(line.kernel_name, line.call_args, line.arg_types)
            case lines.AllocateLine():
                reader.allocate(line.node)
            case lines.ReuseLine():
                reader.alias(line.reused_as.get_name(), line.node.get_name(), 0)
            case lines.ReinterpretLine():
                layout = line.layout.view.get_layout()  # type: ignore[attr-defined]
                offset_bytes = int(layout.offset) * ITEM_BYTES[dtype_name(layout.dtype)]
                reader.alias(line.reused_as.get_name(), line.node.get_name(), offset_bytes)
            case lines.FreeLine() | lines.FreeIfNotReusedLine() | lines.NullLine():
                pass
            case lines.CommentLine():
                pass
            case _ if type(line).__name__ in _WITHOUT_WORK:
                pass
            case _:
                raise UnsupportedRegion(f"Inductor makes no loops of it alone: {_described(line)}")
    outputs = zip(V.graph.get_output_names(), V.graph.graph_outputs, strict=True)
    return reader.lines([(name, place_of(output)) for name, output in outputs])


def _described(line: object) -> str:
    kernel = getattr(getattr(line, "node", None), "python_kernel_name", None)
    return str(kernel or type(line).__name__)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
