"""Compiles Triton kernels of Inductor or of a user, in a process of its own that needs no GPU.

`python triton_worker.py FOLDER`, with a JSON document on standard input; the kernels are those that
Inductor wrote, or have a signature:

    {"kernels": [{"name", "source", "architecture", "most_shared_bytes", "arguments": [int, ...]},
                 {"name", "source", "architecture", "most_shared_bytes", "function",
                  "signature": [[name, type], ...], "constants": [[name, value], ...],
                  "divisible": [name, ...], "options": [[name, value], ...]}]}

Prints a JSON document, as long as that list: each kernel as `_compiled` or `_compiled_user`
describes it, or `{"refusal": why}`. The code lies in FOLDER, in a file with the kernel's name.

A separate process, since Triton decides at its import whether kernels are interpreted, and since
its compiler needs no part of the caller's state. Private parts of torch: `CachingAutotuner`
in torch/_inductor/runtime/triton_heuristics.py, and what its `_precompile_config` gives Triton; the
analysis of what a kernel writes in torch/_higher_order_ops/triton_kernel_wrap.py.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from torch._higher_order_ops import triton_kernel_wrap as wrap
from torch._inductor.runtime.triton_heuristics import GridExpr
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

BYTES = {
    "u1": 1, "i1": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8,
    "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8,
}  # fmt: skip
"""Numbers as parameters: Triton's driver packs them so (`backends/nvidia/driver.c`)."""

WRITTEN = ("out_ptr", "in_out_ptr")
"""How Inductor names parameters that it writes (`KernelArgs` in codegen/common.py)."""


def main() -> None:
    """Compile what standard input names."""
    folder = Path(sys.argv[1])
    found = []
    for asked in json.load(sys.stdin)["kernels"]:
        try:
            make = _compiled_user if "signature" in asked else _compiled
            found.append(make(asked, folder))
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            text = " ".join(dict.fromkeys((lines[0], lines[-1])))  # the place, and what is wrong
            found.append({"refusal": f"Triton: {type(error).__name__}: {text}"})
    json.dump(found, sys.stdout)


def _compiled(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile one kernel in the first of Inductor's configurations.

    Returns:
        `n_threads` of a block, `shared_bytes`, `n_hidden` trailing parameters, the `grid`, the
        `parameters` as pairs of a position among the arguments and the bytes of a number (0: an
        address), their types as `kinds`, the positions of those that are `written`, and the
        `constants` by name.
    """
    tuner = _tuner(asked, folder)
    configuration = tuner.configs[0]
    meta = tuner._create_compile_meta(configuration)
    options = tuner._create_compile_options(configuration, meta)
    source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    target = GPUTarget("cuda", asked["architecture"], 32)
    binary = triton.compile(source, target=target, options=options)
    if binary.metadata.name != asked["name"]:
        raise ValueError(f"its function has the unexpected name {binary.metadata.name}")
    given = [name for name in tuner.triton_meta["signature"] if name not in configuration.kwargs]
    if len(given) != len(asked["arguments"]):
        raise ValueError(
            f"it takes {len(given)} arguments, and {len(asked['arguments'])} are given"
        )
    at = {name: position for position, name in enumerate(given)}
    kinds = _kinds(meta["signature"])
    if any(kind.startswith(("fp", "bf")) for kind in kinds.values()):
        raise ValueError("it takes floating-point numbers, and the caller knows integers")
    constants = meta["constants"]
    names = list(meta["signature"])
    return _described(binary, asked, kinds, folder) | {
        "grid": _grid(tuner, configuration, dict(zip(given, asked["arguments"], strict=True))),
        "parameters": [[at[name], BYTES.get(kind, 0)] for name, kind in kinds.items()],
        "written": [position for name, position in at.items() if name.startswith(WRITTEN)],
        "constants": {
            (names[one[0]] if isinstance(one, tuple) else str(one)): value
            for one, value in constants.items()
        },
    }


def _compiled_user(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile a user's kernel.

    Returns:
        `n_threads`, `shared_bytes`, `n_hidden` and `kinds` as `_compiled`, the `entry` in the code,
        and the names of the parameters that it has `written`.
    """
    kernel = getattr(_module(asked, folder), asked["function"])
    signature = dict(asked["signature"])
    at = {name: position for position, name in enumerate(signature)}
    target = GPUTarget("cuda", asked["architecture"], 32)
    backend = make_backend(target)
    divisible = backend.parse_attr("D")
    source = ASTSource(
        kernel,
        signature,
        {(at[name],): _value(one) for name, one in asked["constants"]},
        {(at[name],): divisible for name in asked["divisible"]},
    )
    options = backend.parse_options({name: _value(one) for name, one in asked["options"]})
    binary = triton.compile(source, target=target, options=options.__dict__)
    return _described(binary, asked, _kinds(signature), folder) | {
        "entry": binary.metadata.name,
        "written": _written(source, kernel, signature, target, options),
    }


_TYPES: dict[Any, str] = {"bool": "int1", "float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}
"""Triton's names of types that have another name in torch."""


def _value(encoded: Any) -> Any:
    """A constant of a Program (`offload.program.encode.encode_constant`) as Triton takes it."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, one),) = encoded.items()
    if kind == "tuple":
        return tuple(_value(item) for item in one)
    if kind == "dtype":
        return getattr(tl, _TYPES.get(one) or str(one))
    if kind == "float":
        return float(one)
    raise ValueError(f"a constant of the kind {kind}")


def _written(
    source: Any, kernel: Any, signature: dict[str, str], target: GPUTarget, options: Any
) -> list[str]:
    """The parameters through whose addresses a kernel may write, by torch's analysis and `_Flow`.

    All of them where torch's does not understand the kernel.
    """
    names = list(_kinds(signature))
    pointers = [name for name in names if signature[name].startswith("*")]
    try:
        backend = make_backend(target)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options)
        module = source.make_ir(target, options, functions, backend.get_module_map(), context)
        flow = _Flow(module)
        written = {names[index] for index in flow.written(flow.entry)}.intersection(pointers)
        return sorted(written.union(_written_by_torch(module, flow.entry, names, pointers)))
    except Exception:  # in torch too, which then takes all for written
        return pointers


def _written_by_torch(module: Any, name: str, names: list[str], pointers: list[str]) -> set[str]:
    """The same by torch's analysis; none where this torch, before 2.13, has it in another form."""
    if not hasattr(wrap, "analyze_kernel_access"):
        return set()
    wrap.analyze_kernel_access.reset()
    wrap.get_tma_stores.reset()
    tensors = frozenset(names.index(one) for one in pointers)
    functions = wrap.ttir_to_functions(module)
    found = wrap.analyze_kernel_access(functions, name, len(names), tuple(names), tensors)
    return {one.name for one in found.read_writes.writes}


_WRITES = frozenset(
    f"tt.{name}"
    for name in (
        "store", "atomic_cas", "atomic_rmw", "descriptor_store", "descriptor_reduce",
        "descriptor_scatter", "experimental_descriptor_store",
    )
)  # fmt: skip
"""Operations of Triton's IR that write memory through their first operand."""


class _Flow:
    """The values of a module in Triton's IR from which each of its values may be made.

    Torch 2.13 takes a value that a loop carries for what it is at first, and the argument of a
    block behind an early return for nothing: a pointer that becomes another one in a loop, as where
    two buffers are exchanged, is lost. A loaded value counts as made of nothing, as in torch.
    """

    def __init__(self, module: Any) -> None:
        """Walk the module; operations are met before those that enclose them."""
        self._sources: dict[int, list[int]] = defaultdict(list)
        self._blocks: dict[int, list[int]] = defaultdict(list)  # by region
        self._arguments: dict[int, list[int]] = {}  # by block
        self._ends: dict[int, list[int]] = {}  # by block, the operands of its last operation
        self._sinks: list[tuple[str, list[int]]] = []
        self._branches: list[int] = []
        self._functions: dict[str, tuple[list[int], list[tuple[str, list[int]]]]] = {}
        module.walk(self._meet)

    @property
    def entry(self) -> str:
        """The name of the kernel's function."""
        return next(iter(self._functions))

    def written(self, name: str) -> set[int]:
        """The positions of the parameters through which a function may write."""
        parameters, sinks = self._functions[name]
        found: set[int] = set()
        for callee, operands in sinks:
            inside = self.written(callee) if callee else range(len(operands))
            found |= self._roots([operands[index] for index in inside], parameters)
        return found

    def _roots(self, values: list[int], parameters: list[int]) -> set[int]:
        seen: set[int] = set()
        while values:
            value = values.pop()
            if value not in seen:
                seen.add(value)
                values += self._sources[value]
        return {index for index, value in enumerate(parameters) if value in seen}

    def _meet(self, operation: Any) -> None:
        name: str = operation.get_name()
        if name == "builtin.module":
            return
        operands = [operation.get_operand(i).id() for i in range(operation.get_num_operands())]
        results = [operation.get_result(i).id() for i in range(operation.get_num_results())]
        self._meet_block(operation.get_block(), operands)
        regions = [operation.get_region(i).id() for i in range(operation.get_num_regions())]
        blocks = [block for region in regions for block in self._blocks[region]]
        if name == "tt.func":
            self._functions[operation.get_str_attr("sym_name")] = (
                self._arguments[blocks[0]] if blocks else [],
                self._sinks,
            )
            for block in blocks[1:]:
                self._made_of(self._arguments[block], [self._branches])
            self._sinks, self._branches = [], []
        elif blocks:
            self._meet_blocks(name, operands, results, blocks)
        elif name != "tt.load":
            self._made_of(results, [operands])
            if name.startswith("cf."):
                self._branches += operands
            if name == "tt.elementwise_inline_asm" and not operation.get_bool_attr("pure"):
                raise ValueError("code in assembly language may write anything")
            if name == "tt.call":
                self._sinks.append((operation.get_flat_symbol_ref_attr("callee"), operands))
            elif name in _WRITES:
                self._sinks.append(("", operands[:1]))

    def _meet_block(self, block: Any, operands: list[int]) -> None:
        if block is None:
            return
        number = block.id()
        self._ends[number] = operands
        if number not in self._arguments:
            n_arguments = block.get_num_arguments()
            self._arguments[number] = [block.get_argument(i).id() for i in range(n_arguments)]
            self._blocks[block.get_parent().id()].append(number)

    def _meet_blocks(
        self, name: str, operands: list[int], results: list[int], blocks: list[int]
    ) -> None:
        ends = [self._ends[block] for block in blocks]
        arguments = [self._arguments[block] for block in blocks]
        if name == "scf.for":  # from, to, step, then what it carries
            for made in (arguments[0][1:], results):
                self._paired(made, operands[3:], ends[0])
        elif name == "scf.while":  # the block of the condition, then the body
            self._paired(arguments[0], operands, ends[1])
            for made in (arguments[1], results):
                self._paired(made, ends[0][1:])
        elif name == "scf.if":
            self._paired(results, *ends)
        else:  # reductions and scans
            for made in (results, *arguments):
                self._made_of(made, [operands, *ends])

    def _paired(self, made: list[int], *sources: list[int]) -> None:
        for given in sources:
            for value, source in zip(made, given, strict=False):
                self._sources[value].append(source)

    def _made_of(self, made: list[int], sources: list[list[int]]) -> None:
        for value in made:
            for given in sources:
                self._sources[value] += given


def _kinds(signature: dict[str, Any]) -> dict[str, str]:
    """The types of the parameters that are arguments."""
    found = {name: str(kind) for name, kind in signature.items() if kind != "constexpr"}
    for name, kind in found.items():
        if not kind.startswith("*") and kind not in BYTES:
            raise ValueError(f"its parameter {name} has the type {kind}")
    return found


def _described(
    binary: Any, asked: dict[str, Any], kinds: dict[str, str], folder: Path
) -> dict[str, Any]:
    """Keep the code of a compiled kernel, and describe it."""
    found = binary.metadata
    if found.num_ctas != 1 or found.launch_cooperative_grid or found.launch_pdl:
        raise ValueError("it needs clusters, a cooperative or a programmatic launch")
    if found.global_scratch_size or found.profile_scratch_size:
        raise ValueError("it needs scratch memory for each block")
    if found.shared > asked["most_shared_bytes"]:
        raise ValueError(
            f"a block takes {found.shared} bytes of shared memory, and the GPU has "
            f"{asked['most_shared_bytes']}"
        )
    (folder / asked["name"]).write_bytes(binary.asm["cubin"])
    return {
        "n_threads": 32 * found.num_warps,
        "shared_bytes": found.shared,
        "n_hidden": _n_hidden(binary.asm["ptx"], found.name, len(kinds)),
        "kinds": list(kinds.values()),
    }


def _n_hidden(ptx: str, name: str, n_parameters: int) -> int:
    """The parameters behind a kernel's own: two for scratch memory of blocks (`_launch`, driver.c).

    They are counted in the code, as earlier releases have fewer.
    """
    header = ptx[ptx.index(f".entry {name}(") :]
    n_hidden = header[: header.index(")")].count(".param ") - n_parameters
    if not 0 <= n_hidden <= 2:
        raise ValueError(f"its function has {n_hidden} parameters that are not in its signature")
    return n_hidden


def _grid(tuner: Any, configuration: Any, arguments: dict[str, int]) -> list[int]:
    grid = GridExpr.from_meta(tuner.inductor_meta, configuration).eval_slow(arguments)
    return [int(one) for one in grid]


def _tuner(asked: dict[str, Any], folder: Path) -> Any:
    """Inductor's object of the kernel."""
    return getattr(_module(asked, folder), asked["name"])


def _module(asked: dict[str, Any], folder: Path) -> Any:
    """The module of a kernel's source: Triton reads sources from files."""
    path = folder / f"{asked['name']}.py"
    path.write_text(asked["source"])
    spec = importlib.util.spec_from_file_location(asked["name"], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
