"""C++ loops made by torch's Inductor: the one module that knows its internals.

All used parts are private: `compile_fx.compile_fx_inner` drives it, with a wrapper of ours in place
of the one that writes calls of kernels (`codegen.wrapper_fxir.WrapperFxCodegen`); its lines
(`codegen.wrapper`) are read. Any difference from the releases that this was written for makes a
region unsupported, and never raises anything else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import re
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from offload.compile.graph import STRICT_INDICES, trace
from offload.compile.loops import SIGNATURE, Copy, Loops, Word
from offload.compile.moments import MOMENTS
from offload.compile.refusal import PassingRefusal, UnsupportedRegion
from offload.compile.toolchain import Options, find_compiler, most_threads
from offload.interpreter.torch_names import dtype_name
from offload.program import ITEM_BYTES, Program

_LOCK = threading.Lock()  # guards the registered wrapper, and what it leaves
_worked = threading.Event()  # set once loops were made for some region in this process

_TALKATIVE = ("torch._subclasses.fake_tensor",)

_CONFIGURATION = {
    "allow_buffer_reuse": False,
    "comprehensive_padding": False,
    "cpp.min_chunk_size": 16384,  # elements per thread: half as many as in torch's operators
    "emulate_precision_casts": True,  # round where the launches round
    "freezing": False,
    "fx_graph_cache": False,
    "graph_partition": False,
    "max_autotune": False,
    "memory_planning": False,
    "pattern_matcher": False,  # its patterns are traced, which affects other threads
    "size_asserts": False,
}

_KERNEL = re.compile(r"^async_compile\.cpp_pybinding\(\[.*?\], r'''(.*)'''\)\s*$", re.DOTALL)
_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"
# Work is divided among the threads that torch would use now, at most as many as the code was made
# for. One thread runs code that may throw (integer division, integers as indices), which OpenMP
# threads must not, and code whose number of partial sums equals the number of threads.
_SHARED = re.compile(r"#pragma omp parallel num_threads\((\d+)\)")
_AS_MANY_AS_NOW = r"#pragma omp parallel num_threads(offload_threads(\1))"
_SHARED_DTYPES = ("float64", "float32", "bfloat16", "float16", "bool")
_OF_ONE_THREAD = re.compile(r"CHECK\(|\bthrow\b|_arr\[")
_THREADS = """
static int offload_threads(int most) {
#ifdef _OPENMP
  const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  return threads < most ? threads : most;
#else
  return 1;
#endif
}
"""
HEADERS = f"{_PREFIX}\n#include <cstring>\n#ifdef _OPENMP\n#include <omp.h>\n#endif\n"
"""The headers of the sources of `Loops`."""
PRELUDE = f"{HEADERS}{_THREADS}"
"""The common prelude of the sources of `Loops`."""

# A division by zero is noted in a flag visible to all threads, for the end of the kernel
# (cpp_prefix.h). Without the flag it throws at once, which is equivalent in one thread.
_DIVISION_FLAG = re.compile(
    r"^.*\binductor_cpu_(throw_if_)?integer_div_error\w*\b.*\n", re.MULTILINE
)
_INDEX_ERROR = re.compile(r'"index out of bounds: 0 <= \w+ < (\d+)L?"')  # it names a variable
_DIVISIONS = frozenset(("div", "floor_divide", "fmod", "remainder"))

_EXACT_NEAR_ZERO = ("atanh", "expm1")

_VECTORS_AT_ONCE = 4
_DEEP = 64
"""Steps per element from which a loop processes several vectors at once: a processor looks some
hundred instructions ahead, and would wait for the dependent steps of a single vector. 50 sigmoids
of 64 numbers took 2.5 us this way, and 4.7 us one vector after another (Zen 5).
"""


def build_options() -> Options:
    """The options that Inductor gives a compiler on this processor.

    Raises:
        UnsupportedRegion: this torch's interface differs; or it finds no vector instructions,
            without which loops are slower than torch's.
    """
    try:
        from torch._inductor import config, cpp_builder, cpu_vec_isa  # noqa: PLC0415 - seconds

        with config.patch(_compiler()):
            isa = cpu_vec_isa.pick_vec_isa()
            options = cpp_builder.CppTorchOptions(vec_isa=isa, warning_all=False)
        if not isa:
            raise PassingRefusal("Inductor finds no vector instructions of this processor")
        return Options(
            include_folders=tuple(options.get_include_dirs()),
            library_folders=tuple(options.get_libraries_dirs()),
            libraries=("torch_cpu", "c10"),
            definitions=("C10_USING_CUSTOM_GENERATED_MACROS", *isa.build_macro()),
            flags=tuple(isa.build_arch_flags().split()),
        )
    except UnsupportedRegion:
        raise
    except Exception as error:
        raise _refusal(error, "this torch's Inductor differs from the expected one") from error


def _compiler() -> dict[str, Any]:
    """The compiler of kernels as Inductor's setting; the default would be CXX."""
    return {"cpp.cxx": (None, find_compiler().as_one_path)}


def lower(program: Program) -> Loops:
    """Make loops of a region.

    Args:
        program: the region as a Program: its inputs and results are whole Values, contiguous in
            some order of their dimensions.

    Raises:
        UnsupportedRegion: Inductor makes loops of only a part, or differs from what is known.
    """
    try:
        with _LOCK, warnings.catch_warnings(), _silenced():
            warnings.simplefilter("ignore")  # torch's, about its deprecated parts
            loops = _lowered(program)
    except UnsupportedRegion:
        raise
    except Exception as error:
        raise _refusal(error, "Inductor") from error
    _worked.set()
    return loops


def _refusal(error: Exception, who: str) -> UnsupportedRegion:
    """The refusal of a region after an unexpected error.

    It is lasting only if other regions are lowered: an Inductor that is broken in this process, or
    has no room for its files, refuses all.
    """
    chain: list[BaseException] = [error]
    while (behind := chain[-1].__cause__ or chain[-1].__context__) and behind not in chain:
        chain.append(behind)
    is_passing = any(isinstance(one, (OSError, MemoryError, RecursionError)) for one in chain)
    kind = PassingRefusal if is_passing or not _worked.is_set() else UnsupportedRegion
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


def _lowered(program: Program) -> Loops:
    """Loops with work divided among threads, where possible."""
    most = most_threads()
    if most > 1 and all(value.dtype in _SHARED_DTYPES for value in program.values):
        loops = _lower(program, most)
        if not any(_OF_ONE_THREAD.search(body) for body in loops.kernels.values()):
            return loops
    return _lower(program, 1)


def _lower(program: Program, n_threads: int) -> Loops:
    from torch._inductor import config, decomposition  # noqa: PLC0415 - takes seconds
    from torch._inductor.codegen import common, cpp, wrapper_fxir  # noqa: PLC0415
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415
    from torch._inductor.utils import BoxedBool  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    found: list[Loops | UnsupportedRegion] = []

    class Reader(wrapper_fxir.WrapperFxCodegen):
        """Reads the lines that would become calls."""

        def _generate(self, is_inference: bool) -> Any:
            self.run_wrapper_ir_passes(is_inference)
            try:
                found.append(_read(self, program))
            except UnsupportedRegion as error:  # if raised here, it would be wrapped
                found.append(error)
            nothing = torch.fx.GraphModule({}, torch.fx.Graph())
            return types.SimpleNamespace(gm=nothing), None

    decompositions = {**decomposition.select_decomp_table(), **STRICT_INDICES, **MOMENTS}
    graph, inputs = trace(program, decompositions)
    if not inputs:
        raise UnsupportedRegion("it has no input")
    if not _notes_divisions() and any(map(_divides_integers, graph.graph.nodes)):
        raise UnsupportedRegion(
            "this torch's Inductor does not detect division of integers by zero"
        )
    mode = inputs[0].fake_mode
    common.init_backend_registration()
    registered = common.device_codegens["cpu"]
    before = registered.fx_wrapper_codegen, cpp.TilingSelect
    registered.fx_wrapper_codegen = Reader
    cpp.TilingSelect = _deep_loops(cpp)  # type: ignore[misc]
    try:
        with (
            _exact_near_zero(cpp.CppVecOverrides),
            _untraced(),
            torch._guards.tracing(torch._guards.TracingContext(mode)),
            V.set_fake_mode(mode),
            V.set_aot_compilation(True),
            config.patch(_CONFIGURATION | _compiler() | {"cpp.threads": n_threads}),
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
    finally:
        registered.fx_wrapper_codegen, cpp.TilingSelect = before  # type: ignore[misc]
    if isinstance(found[0], UnsupportedRegion):
        raise found[0]
    return found[0]


def _deep_loops(cpp: Any) -> Any:
    """Inductor's choice of vectors, with several at once for deep loops of this thread."""
    owner = threading.get_ident()

    class DeepLoops(cpp.TilingSelect):  # type: ignore[misc, unused-ignore]
        """Chooses the number of elements per step of a loop."""

        def select_tiling(self, fn_list: Any, var_sizes_list: Any) -> Any:
            factors, indices, *rest = super().select_tiling(fn_list, var_sizes_list)
            if threading.get_ident() == owner and len(factors) == 1:
                bodies = cpp._get_loop_body(fn_list)
                n_steps = sum(len(body.root_block.graph.nodes) for body in bodies)
                group, reduced = max(var_sizes_list, key=lambda sizes: len(sizes[1]))
                if n_steps >= _DEEP and not reduced:
                    most = math.gcd(_VECTORS_AT_ONCE * factors[0], int(group[indices[0]]))
                    factors = [max(factors[0], most)]  # so that no remainder is left
            return factors, indices, *rest

    return DeepLoops


@contextlib.contextmanager
def _exact_near_zero(vectors: Any) -> Iterator[None]:
    """Use torch's vector functions where Inductor's replacements are 0 near 0.

    It writes `exp(x) - 1` for `expm1(x)`, which elu and similar use, and `log((1 + x) / (1 - x)) /
    2` for `atanh(x)`. Another thread's loops are right with either.
    """
    before = {name: vars(vectors)[name] for name in _EXACT_NEAR_ZERO if name in vars(vectors)}
    for name in before:
        setattr(vectors, name, staticmethod(functools.partial(_call_of, name)))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(vectors, name, function)


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


def _call_of(name: str, x: object) -> str:
    return f"{x}.{name}()"


@functools.cache
def _notes_divisions() -> bool:
    """Whether integer division by zero is noted, as in torch 2.13 and not in 2.11."""
    prefix = Path(torch.__file__).parent / "include/torch/csrc/inductor/cpp_prefix.h"
    return "integer_div_error" in prefix.read_text()


def _divides_integers(node: torch.fx.Node) -> bool:
    made = node.meta.get("val")
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name.removeprefix("aten::") in _DIVISIONS
        and isinstance(made, torch.Tensor)
        and not made.is_floating_point()
    )


def _read(wrapper: Any, program: Program) -> Loops:
    """Return the wrapper's lines as plain data."""
    from torch._inductor.codegen import wrapper as lines  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    if V.graph.constants:
        raise UnsupportedRegion("Inductor makes constants of it")
    reader = _Reader(program, list(wrapper.get_fx_graph_inputs()))
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
            case _ if type(line).__name__ == "LineContext":
                pass
            case _:
                raise UnsupportedRegion(f"Inductor makes no loops of it alone: {_described(line)}")
    outputs = zip(V.graph.get_output_names(), V.graph.graph_outputs, strict=True)
    return reader.loops([(name, _place_of(output)) for name, output in outputs])


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """The bytes of a buffer that an output shows, and whether they are contiguous in its order."""

    offset_bytes: int
    size_bytes: int
    is_contiguous: bool


def _place_of(output: Any) -> _Place:
    layout = output.get_layout()
    item_bytes = ITEM_BYTES[dtype_name(layout.dtype)]
    expected, is_contiguous = 1, True
    for size, stride in zip(reversed(layout.size), reversed(layout.stride), strict=True):
        is_contiguous = is_contiguous and (size == 1 or stride == expected)
        expected *= int(size)
    return _Place(int(layout.offset) * item_bytes, expected * item_bytes, is_contiguous)


class _Reader:
    """Collects kernels, their calls, and the word of each buffer."""

    def __init__(self, program: Program, inputs: list[str]) -> None:
        self._program = program
        self._inputs = {name: number for number, name in enumerate(inputs)}
        self._kernels: dict[str, str] = {}
        self._calls: list[tuple[str, list[tuple[object, str]]]] = []
        self._buffers: dict[str, Any] = {}
        self._aliases: dict[str, tuple[str, int]] = {}

    def define(self, name: str, body: str) -> None:
        found = _KERNEL.match(body)
        if found is None or not SIGNATURE.search(found[1]):
            raise UnsupportedRegion("Inductor defines a kernel in an unknown way")
        body = _DIVISION_FLAG.sub("", found[1].replace(_PREFIX, ""))
        body = _INDEX_ERROR.sub(r'"index out of bounds for a dimension of size \1"', body)
        self._kernels[name] = _SHARED.sub(_AS_MANY_AS_NOW, body)

    def call(self, name: str, arguments: Any, c_types: list[str]) -> None:
        self._calls.append((name, list(zip(arguments, c_types, strict=True))))

    def allocate(self, node: Any) -> None:
        self._buffers[node.get_name()] = node

    def alias(self, name: str, of: str, offset_bytes: int) -> None:
        self._aliases[name] = (of, offset_bytes)

    def loops(self, outputs: list[tuple[str, _Place]]) -> Loops:
        """Return what was collected.

        Args:
            outputs: for each result its buffer and place. An output that is an input, a part of a
                buffer, or in a buffer with another result, is copied from there.
        """
        sizes_bytes = [result.view.end_bytes for result in self._program.results]
        numbers, copies = dict(self._inputs), []
        for at, ((name, place), size_bytes) in enumerate(zip(outputs, sizes_bytes, strict=True)):
            root, offset_bytes = self._root(name)
            if not place.is_contiguous or place.size_bytes != size_bytes:
                raise UnsupportedRegion("a result has another layout than recorded")
            word = len(self._inputs) + at
            offset_bytes += place.offset_bytes
            is_whole = root in self._buffers and self._size_bytes(root) == size_bytes
            if root not in numbers and is_whole and not offset_bytes:
                numbers[root] = word
            else:
                copies.append((word, root, offset_bytes, size_bytes))
        scratch = [name for name in self._buffers if name not in numbers]
        first_scratch = len(self._inputs) + len(outputs)
        numbers |= {name: first_scratch + at for at, name in enumerate(scratch)}
        return Loops(
            self._kernels,
            tuple(
                (name, tuple(self._word(one, c_type, numbers) for one, c_type in words))
                for name, words in self._calls
            ),
            tuple(
                Copy(to, Word(numbers[root], offset_bytes, "const char*"), size_bytes)
                for to, root, offset_bytes, size_bytes in copies
            ),
            tuple(self._size_bytes(one) for one in scratch),
        )

    def _root(self, name: str) -> tuple[str, int]:
        offset_bytes = 0
        while name in self._aliases:
            name, more = self._aliases[name]
            offset_bytes += more
        return name, offset_bytes

    def _word(self, argument: object, c_type: str, numbers: dict[str, int]) -> Word:
        name, offset_bytes = self._root(argument) if isinstance(argument, str) else ("", 0)
        if name not in numbers or not c_type.endswith("*"):
            raise UnsupportedRegion(f"Inductor passes a kernel {argument!r} as {c_type}")
        return Word(numbers[name], offset_bytes, c_type)

    def _size_bytes(self, name: str) -> int:
        from torch._inductor.virtualized import V  # noqa: PLC0415

        node = self._buffers[name]
        items = int(V.graph.get_allocation_storage_size(node))
        return items * ITEM_BYTES[dtype_name(node.get_dtype())]


def _described(line: object) -> str:
    kernel = getattr(getattr(line, "node", None), "python_kernel_name", None)
    return str(kernel or type(line).__name__)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
