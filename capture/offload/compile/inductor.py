"""C++ loops made by torch's Inductor, whose lines `inductor_lines` reads.

All used parts are private. Any difference from the releases that this was written for makes a
region unsupported, and never raises anything else.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from offload.compile.inductor_lines import defaults, guarded, lines_of, refusal_of
from offload.compile.line_reader import Lines, Reader
from offload.compile.loops import SIGNATURE, Loops, Word
from offload.compile.refusal import PassingRefusal, UnsupportedRegion
from offload.compile.toolchain import Options, find_compiler, most_threads
from offload.program import Program

_CONFIGURATION = {
    "cpp.min_chunk_size": 16384,  # elements per thread: half as many as in torch's operators
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

        with config.patch({**defaults(config), **_compiler()}):
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
        raise refusal_of(
            error, "this torch's Inductor differs from the expected one", "cpu"
        ) from error


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
    return guarded(lambda: _lowered(program), "cpu")


def _lowered(program: Program) -> Loops:
    """Loops with work divided among threads, where possible."""
    most = most_threads()
    if most > 1 and all(value.dtype in _SHARED_DTYPES for value in program.values):
        loops = _lower(program, most)
        if not any(_OF_ONE_THREAD.search(body) for body in loops.kernels.values()):
            return loops
    return _lower(program, 1)


def _lower(program: Program, n_threads: int) -> Loops:
    from torch._inductor.codegen import cpp  # noqa: PLC0415 - takes seconds

    before = cpp.TilingSelect
    cpp.TilingSelect = _deep_loops(cpp)  # type: ignore[misc]
    try:
        with _exact_near_zero(cpp.CppVecOverrides):
            configuration = _CONFIGURATION | _compiler() | {"cpp.threads": n_threads}
            found = lines_of(
                program, torch.device("cpu"), _CppReader, configuration, _check_divisions
            )
    finally:
        cpp.TilingSelect = before  # type: ignore[misc]
    return _loops(found)


def _loops(found: Lines) -> Loops:
    calls = tuple(
        (name, tuple(one for one in arguments if isinstance(one, Word)))
        for name, arguments in found.calls
    )
    return Loops(found.kernels, calls, found.copies, found.scratch_bytes)


def _check_divisions(graph: torch.fx.GraphModule) -> None:
    if not _notes_divisions() and any(map(_divides_integers, graph.graph.nodes)):
        raise UnsupportedRegion(
            "this torch's Inductor does not detect division of integers by zero"
        )


class _CppReader(Reader):
    """Reads kernels in C++."""

    def body(self, text: str) -> str:
        """The kernel's function, whose threads are those that torch would use."""
        found = _KERNEL.match(text)
        if found is None or not SIGNATURE.search(found[1]):
            raise UnsupportedRegion("Inductor defines a kernel in an unknown way")
        body = _DIVISION_FLAG.sub("", found[1].replace(_PREFIX, ""))
        body = _INDEX_ERROR.sub(r'"index out of bounds for a dimension of size \1"', body)
        return _SHARED.sub(_AS_MANY_AS_NOW, body)

    def argument(self, argument: Any, kind: Any, words: Mapping[str, int]) -> Word:
        """A pointer."""
        name, offset_bytes = self.root(argument) if isinstance(argument, str) else ("", 0)
        if name not in words or not kind.endswith("*"):
            raise UnsupportedRegion(f"Inductor passes a kernel {argument!r} as {kind}")
        return Word(words[name], offset_bytes, kind)


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
