"""Compiles Triton kernels that Inductor wrote, in a process of its own that needs no GPU.

`python triton_worker.py FOLDER`, with a JSON document on standard input:

    {"kernels": [{"name", "inductor_name", "source", "architecture", "arguments": [int, ...]}]}

Prints a JSON document, as long as that list: each kernel as `_compiled` describes it, or
`{"refusal": why}`. The code lies in FOLDER, in a file with the kernel's name.

A separate process, since Triton decides at its import whether kernels are interpreted, and since
its compiler needs no part of the caller's state. Private parts of torch: `CachingAutotuner`
in torch/_inductor/runtime/triton_heuristics.py, and what its `_precompile_config` gives Triton.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import triton
from torch._inductor.runtime.triton_heuristics import GridExpr
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}
"""The integer types of parameters: Triton's driver packs them so (`backends/nvidia/driver.c`)."""

WRITTEN = ("out_ptr", "in_out_ptr")
"""How Inductor names parameters that it writes (`KernelArgs` in codegen/common.py)."""

MOST_SHARED_BYTES = 48 << 10
"""Of a block, without a request for more (CUDA programming guide, compute capability 7.x, "Shared
Memory"). Loops exchange partial sums there, which take less than a KiB.
"""


def main() -> None:
    """Compile what standard input names."""
    folder = Path(sys.argv[1])
    found = []
    for asked in json.load(sys.stdin)["kernels"]:
        try:
            found.append(_compiled(asked, folder))
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            found.append({"refusal": f"Triton: {type(error).__name__}: {text[0]}"})
    json.dump(found, sys.stdout)


def _compiled(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compile one kernel in the first of Inductor's configurations.

    Returns:
        `n_threads` of a block, `shared_bytes`, `n_hidden` trailing parameters, the `grid`, the
        `parameters` as pairs of a position among the arguments and the bytes of a number (0: an
        address), the positions of those that are `written`, and the `constants` by name.
    """
    tuner = _tuner(asked, folder)
    configuration = tuner.configs[0]
    meta = tuner._create_compile_meta(configuration)
    options = tuner._create_compile_options(configuration, meta)
    binary = triton.compile(
        ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]),
        target=GPUTarget("cuda", asked["architecture"], 32),
        options=options,
    )
    found = binary.metadata
    if found.num_ctas != 1 or found.launch_cooperative_grid or found.launch_pdl:
        raise ValueError("it needs clusters, a cooperative or a programmatic launch")
    if found.global_scratch_size or found.profile_scratch_size:
        raise ValueError("it needs scratch memory for each block")
    if found.shared > MOST_SHARED_BYTES:
        raise ValueError(f"a block takes {found.shared} bytes of shared memory")
    if found.name != asked["name"]:
        raise ValueError(f"its function has the unexpected name {found.name}")
    given = [name for name in tuner.triton_meta["signature"] if name not in configuration.kwargs]
    if len(given) != len(asked["arguments"]):
        raise ValueError(
            f"it takes {len(given)} arguments, and {len(asked['arguments'])} are given"
        )
    at = {name: position for position, name in enumerate(given)}
    parameters = []
    for name, kind in meta["signature"].items():
        if kind == "constexpr":
            continue
        is_pointer = str(kind).startswith("*")
        if not is_pointer and kind not in BYTES:
            raise ValueError(f"its parameter {name} has the type {kind}")
        parameters.append([at[name], 0 if is_pointer else BYTES[kind]])
    (folder / asked["name"]).write_bytes(binary.asm["cubin"])
    constants = meta["constants"]
    names = list(meta["signature"])
    return {
        "n_threads": 32 * found.num_warps,
        "shared_bytes": found.shared,
        "n_hidden": _n_hidden(binary.asm["ptx"], asked["name"], len(parameters)),
        "grid": _grid(tuner, configuration, dict(zip(given, asked["arguments"], strict=True))),
        "parameters": parameters,
        "written": [position for name, position in at.items() if name.startswith(WRITTEN)],
        "constants": {
            (names[one[0]] if isinstance(one, tuple) else str(one)): value
            for one, value in constants.items()
        },
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
    """Inductor's object of the kernel: Triton reads the source from a file."""
    path = folder / f"{asked['name']}.py"
    path.write_text(asked["source"])
    spec = importlib.util.spec_from_file_location(asked["name"], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, asked["name"])


if __name__ == "__main__":
    main()
