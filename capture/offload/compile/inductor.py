"""C++ loops out of torch's Inductor: the one module that knows its internals.

All that is used of it is private: `compile_fx.compile_fx_inner` drives it, with a wrapper of our
own in the place where it writes the calls of kernels (`codegen.wrapper_fxir.WrapperFxCodegen`), of
which the lines are read (`codegen.wrapper`). Whatever is not as in the releases that this was
written for makes a region unsupported, and never raises anything else.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import types
from typing import Any

import torch

from offload.compile.graph import trace
from offload.compile.refusal import UnsupportedRegion
from offload.compile.toolchain import Options
from offload.program import ITEM_BYTES, Program, TensorView
from offload.torch_names import dtype_name

_LOCK = threading.Lock()  # of the registered wrapper, and of what it leaves

_CONFIGURATION = {
    "allow_buffer_reuse": False,
    "comprehensive_padding": False,
    "cpp.threads": 1,
    "freezing": False,
    "fx_graph_cache": False,
    "graph_partition": False,
    "max_autotune": False,
    "memory_planning": False,
    "size_asserts": False,
}

_KERNEL = re.compile(r"^async_compile\.cpp_pybinding\(\[.*?\], r'''(.*)'''\)\s*$", re.DOTALL)
PRELUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"
"""What comes once before the sources of `Loops`."""

_SIGNATURE = re.compile(r'extern "C"\s+void\s+kernel\(')


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A pointer that a kernel takes: into an input, a result or scratch memory of the region.

    `number` counts all words of the region: its inputs, its results, its scratch memory.
    """

    number: int
    offset_bytes: int
    c_type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Loops:
    """A region as loops in C++.

    Attributes:
        kernels: the source of each, by name: a function `void kernel(...)`.
        calls: in order, which kernel and with which pointers.
        scratch_bytes: of each range of memory between kernels.
    """

    kernels: dict[str, str]
    calls: tuple[tuple[str, tuple[Word, ...]], ...]
    scratch_bytes: tuple[int, ...]

    def source(self, symbol: str) -> str:
        """The functions, and one `void symbol(void* const* words)` that calls them in order."""
        texts = [
            _SIGNATURE.sub(f"static void {symbol}_{name}(", body, count=1)
            for name, body in self.kernels.items()
        ]
        lines = [f'extern "C" void {symbol}(void* const* words) {{']
        for name, words in self.calls:
            pointers = ", ".join(
                f"({word.c_type})((char*)words[{word.number}] + {word.offset_bytes})"
                for word in words
            )
            lines.append(f"  {symbol}_{name}({pointers});")
        return "\n".join([*texts, *lines, "}"])


def build_options() -> Options:
    """What Inductor gives a compiler on this processor.

    Raises:
        UnsupportedRegion: this torch says it otherwise.
    """
    try:
        from torch._inductor import cpp_builder, cpu_vec_isa  # noqa: PLC0415 - takes seconds

        isa = cpu_vec_isa.pick_vec_isa()
        options = cpp_builder.CppTorchOptions(vec_isa=isa, warning_all=False)
        return Options(
            include_folders=tuple(options.get_include_dirs()),
            library_folders=tuple(options.get_libraries_dirs()),
            libraries=("torch_cpu", "c10"),
            definitions=("C10_USING_CUSTOM_GENERATED_MACROS", *isa.build_macro()),
            flags=tuple(isa.build_arch_flags().split()),
        )
    except Exception as error:
        raise UnsupportedRegion(
            f"this torch's Inductor is another: {_first_line(error)}"
        ) from error


def lower(program: Program) -> Loops:
    """Make loops of a region.

    Args:
        program: the region by itself: its inputs and results are whole Values, contiguous in some
            order of their dimensions.

    Raises:
        UnsupportedRegion: Inductor does not make loops of all of it, or is not as known.
    """
    try:
        with _LOCK:
            return _lower(program)
    except UnsupportedRegion:
        raise
    except Exception as error:
        raise UnsupportedRegion(f"Inductor: {_first_line(error)}") from error


def _lower(program: Program) -> Loops:
    from torch._inductor import config, decomposition  # noqa: PLC0415 - takes seconds
    from torch._inductor.codegen import common, wrapper_fxir  # noqa: PLC0415
    from torch._inductor.compile_fx import compile_fx_inner  # noqa: PLC0415
    from torch._inductor.utils import BoxedBool  # noqa: PLC0415
    from torch._inductor.virtualized import V  # noqa: PLC0415

    found: list[Loops] = []

    class Reader(wrapper_fxir.WrapperFxCodegen):
        """Reads the lines that would become calls."""

        def _generate(self, is_inference: bool) -> Any:
            self.run_wrapper_ir_passes(is_inference)
            found.append(_read(self, program))
            nothing = torch.fx.GraphModule({}, torch.fx.Graph())
            return types.SimpleNamespace(gm=nothing), None

    graph, inputs = trace(program, decomposition.select_decomp_table())
    if not inputs:
        raise UnsupportedRegion("it has no input")
    mode = inputs[0].fake_mode
    common.init_backend_registration()
    registered = common.device_codegens["cpu"]
    before, registered.fx_wrapper_codegen = registered.fx_wrapper_codegen, Reader
    try:
        with (
            torch._guards.tracing(torch._guards.TracingContext(mode)),
            V.set_fake_mode(mode),
            V.set_aot_compilation(True),
            config.patch(_CONFIGURATION),
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
        registered.fx_wrapper_codegen = before
    return found[0]


def _read(wrapper: Any, program: Program) -> Loops:
    """What the wrapper's lines say, as plain data."""
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
    return reader.loops(V.graph.get_output_names())


class _Reader:
    """Gathers kernels, their calls, and which buffer is which word."""

    def __init__(self, program: Program, inputs: list[str]) -> None:
        self._program = program
        self._inputs = {name: number for number, name in enumerate(inputs)}
        self._kernels: dict[str, str] = {}
        self._calls: list[tuple[str, list[str], list[str]]] = []
        self._buffers: dict[str, Any] = {}
        self._aliases: dict[str, tuple[str, int]] = {}

    def define(self, name: str, body: str) -> None:
        found = _KERNEL.match(body)
        if found is None or not _SIGNATURE.search(found[1]):
            raise UnsupportedRegion("Inductor defines a kernel otherwise than known")
        self._kernels[name] = found[1].replace(PRELUDE, "")

    def call(self, name: str, arguments: Any, c_types: list[str]) -> None:
        self._calls.append((name, list(arguments), list(c_types)))

    def allocate(self, node: Any) -> None:
        self._buffers[node.get_name()] = node

    def alias(self, name: str, of: str, offset_bytes: int) -> None:
        self._aliases[name] = (of, offset_bytes)

    def loops(self, outputs: list[str]) -> Loops:
        """What was gathered.

        Args:
            outputs: for each result the buffer that holds it.
        """
        roots = [self._root(name) for name in outputs]
        if len({name for name, _ in roots}) != len(roots):
            raise UnsupportedRegion("two results are one tensor")
        results = [result.view for result in self._program.results]
        for (name, offset_bytes), view in zip(roots, results, strict=True):
            if offset_bytes or name not in self._buffers or not self._fits(name, view):
                raise UnsupportedRegion("a result is a view of something else")
        numbers = dict(self._inputs)
        for name, _ in roots:
            numbers[name] = len(numbers)
        scratch = [name for name in self._buffers if name not in numbers]
        for name in scratch:
            numbers[name] = len(numbers)
        calls = tuple(
            (
                name,
                tuple(self._word(one, c_type, numbers) for one, c_type in zip(*rest, strict=True)),
            )
            for name, *rest in self._calls
        )
        return Loops(
            self._kernels, calls, tuple(self._size_bytes(self._buffers[one]) for one in scratch)
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
            raise UnsupportedRegion(f"Inductor gives a kernel {argument!r} as {c_type}")
        return Word(numbers[name], offset_bytes, c_type)

    def _fits(self, name: str, view: TensorView) -> bool:
        """Whether a buffer's bytes are those of a result, in the order of its memory."""
        node = self._buffers[name]
        expected = 1
        for size, stride in zip(
            reversed(node.get_size()), reversed(node.get_stride()), strict=True
        ):
            if size != 1 and stride != expected:
                return False
            expected *= int(size)
        return self._size_bytes(node) == view.end_bytes

    @staticmethod
    def _size_bytes(node: Any) -> int:
        from torch._inductor.virtualized import V  # noqa: PLC0415

        items = int(V.graph.get_allocation_storage_size(node))
        return items * ITEM_BYTES[dtype_name(node.get_dtype())]


def _described(line: object) -> str:
    kernel = getattr(getattr(line, "node", None), "python_kernel_name", None)
    return str(kernel or type(line).__name__)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]
