"""Asks a CUDA device what the design of relocation counts on: probes P0 to P10.

Each probe runs in a process of its own, and all are told in one JSON file: question, expected
answer, figures and outcome (`as expected`, `otherwise`, `failed: ...`). Needs a CUDA build of torch
2.11 or later, cuda-bindings, and nvcc; no network. Takes less than eight minutes.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent / "cuda"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

from probe_library import LIBRARY_VARIABLE, build_library  # noqa: E402
from probing import Probe, ProbeFailed, read_told  # noqa: E402

BUDGET_SECONDS = 450
PART_SECONDS = 75

_MODELS = ("operators", "bert", "llama", "resnet50")
_KINDS = ("plain", "cluster", "programmatic", "cooperative", "triton")

PROBES = (
    Probe(
        "P0",
        "Are the driver's functions, no_split, the raw exec, libcudadevrt.a and pluggable "
        "allocators in private pools there?",
        "all there",
        "real memory for discovery, or no device mode",
        "probes_launching:what_is_there",
    ),
    Probe(
        "P1",
        "What do a launch and each update cost the host, for 1 to 3000 nodes, chained and forked, "
        "0 to 100 updates, arguments of 32 B, 4 KB and 32 KB?",
        "1.6 to 3.5 us for chains to 1000 nodes, and 0.5 to 1.1 us for each update",
        "if an update forces an upload, prefer device mode or copies",
        "probes_launching:launch_costs",
        ("32", "4096", "32760"),
    ),
    Probe(
        "P2",
        "Which words differ between two captures in one layout, and are all others explained by "
        "three layouts?",
        "only tails of TensorIterator's and foreach's arguments",
        "see by kernel what differs",
        "probes_discovery:noise",
        _MODELS,
    ),
    Probe(
        "P3",
        "Does a graph captured at aliased addresses compute when it is patched to real memory?",
        "bit for bit",
        "if copy or memset nodes refuse aliases, make them kernels",
        "probes_discovery:aliased_capture",
        ("mlp", "encoder", "bert"),
    ),
    Probe(
        "P4",
        "Do ordinary captures put outputs where an earlier allocation was?",
        "many",
        "nothing: discovery does without reuse either way",
        "probes_discovery:recycled_blocks",
        ("operators", "bert"),
    ),
    Probe(
        "P5",
        "Do two executables compute in turns over one physical memory, mapped at two ranges?",
        "bit for bit, mapped in milliseconds",
        "relocate the words of the arena instead",
        "probes_discovery:shared_memory",
        ("encoder", "bert"),
    ),
    Probe(
        "P6",
        "May a kernel write the arguments of plain, cluster, programmatic, cooperative and Triton "
        "launches, and how fast?",
        "10 to 25 ns per word",
        "host mode for a kind that refuses",
        "probes_launching:device_updates",
        _KINDS,
    ),
    Probe(
        "P7",
        "At which offsets (128, 32, 16, 8, 4 B) from an aligned address do kernels still work?",
        "16 B and more",
        "the contract of new bases is set by what is found",
        "probes_state:alignment",
        ("elementwise", "cublaslt", "attention", "triton"),
    ),
    Probe(
        "P8",
        "Do copy and memset nodes take addresses of plain and mapped memory, also after memory was "
        "freed and made anew at its address?",
        "when they are set again",
        "make them kernels",
        "probes_launching:operand_nodes",
        ("copy", "memset"),
    ),
    Probe(
        "P9",
        "May a graph draw by a seed and an offset of its own, on two streams at once?",
        "equal to eager from the same seed",
        "torch's own replay for programs that draw",
        "probes_state:random_cells",
    ),
    Probe(
        "P10",
        "What do captured copies of 8 to 256 MiB reach beside products, what does each node add, "
        "what does a fork add to a launch?",
        "about 50 GB/s, 8 us for a node",
        "larger units",
        "probes_launching:captured_copies",
    ),
)


def run_part(probe: Probe, part: str, limit_s: float) -> dict[str, Any]:
    """Run one part in a process of its own; what it told, and its outcome."""
    begin = time.monotonic()
    command = [sys.executable, __file__, "--part", probe.name, part]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        output, errors, problem = done.stdout, done.stderr, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, errors = (_text(one) for one in (error.stdout, error.stderr))
        problem = f"not done after {limit_s:.0f} s"
    figures, outcome, because = read_told(output)
    if outcome is None:
        last = [line for line in errors.splitlines() if line.strip()][-1:]
        outcome, because = f"failed: {'; '.join([problem, *last])}"[:600], ""
    return {
        "outcome": outcome,
        "because": because,
        "figures": figures,
        "wall_s": round(time.monotonic() - begin, 1),
    }


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def run_probe(probe: Probe, deadline: float) -> dict[str, Any]:
    """Run all parts of a probe before the deadline."""
    parts = {}
    for part in probe.parts:
        left_s = min(PART_SECONDS, deadline - time.monotonic())
        if left_s < 5:
            parts[part] = {"outcome": "failed: no time was left", "because": "", "figures": {}}
        else:
            parts[part] = run_part(probe, part, left_s)
    return {
        "name": probe.name,
        "question": probe.question,
        "expected": probe.expected,
        "otherwise": probe.otherwise,
        "outcome": outcome_of([one["outcome"] for one in parts.values()]),
        "parts": parts,
    }


def outcome_of(outcomes: list[str]) -> str:
    """The outcome of a probe from those of its parts: a failure counts before a surprise."""
    failed = [one for one in outcomes if one.startswith("failed")]
    return failed[0] if failed else "otherwise" if "otherwise" in outcomes else "as expected"


def machine_facts() -> dict[str, Any]:
    """The device, the driver and the versions.

    Raises:
        ProbeFailed: there is no CUDA device, or a library is missing.
    """
    try:
        import torch
        from cuda.bindings import driver
    except ImportError as error:
        raise ProbeFailed(f"{error}: the probes need torch and cuda-bindings") from error
    if not torch.cuda.is_available():
        raise ProbeFailed(f"torch {torch.__version__} finds no CUDA device")
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    _, version = driver.cuDriverGetVersion()
    return {
        "gpu": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "driver_cuda_version": version,
        "driver": _driver_release(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("cuda-bindings", "triton", "transformers")},
    }


def _driver_release() -> str:
    """The driver's release as its kernel module tells it; empty where it does not."""
    path = Path("/proc/driver/nvidia/version")
    try:
        first = path.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """What came of each probe."""
    table = Table(title=f"{report['machine']['gpu']}, driver {report['machine']['driver']}")
    for heading in ("probe", "part", "outcome", "because", "s"):
        table.add_column(heading, overflow="fold")
    for probe in report["probes"]:
        table.add_section()
        for part, found in probe["parts"].items():
            seconds = str(found.get("wall_s", ""))
            table.add_row(probe["name"], part, found["outcome"], found["because"], seconds)
    console.print(table)


def chosen(only: str | None) -> tuple[Probe, ...]:
    """The probes that `--only` names, in order.

    Raises:
        click.BadParameter: there is none of such a name.
    """
    if only is None:
        return PROBES
    names = [name.strip().upper() for name in only.split(",") if name.strip()]
    known = {probe.name: probe for probe in PROBES}
    if not names or not set(names) <= known.keys():
        raise click.BadParameter(f"expected some of {', '.join(known)}, got {only!r}")
    return tuple(probe for probe in PROBES if probe.name in names)


def _run_here(name: str, part: str) -> None:
    """Answer a part of a probe in this process."""
    probe = next(probe for probe in PROBES if probe.name == name)
    module, _, function = probe.function.partition(":")
    answer = getattr(importlib.import_module(module), function)
    answer(*([part] if part else []))


@click.command(help=__doc__)
@click.argument(
    "report_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path(__file__).parents[1] / "docs" / "measurements" / "cuda_probes.json",
)
@click.option("--only", metavar="P1,P3", help="Run these probes alone.")
@click.option("--part", nargs=2, hidden=True, help="Answer one part in this process.")
def main(report_file: Path, only: str | None, part: tuple[str, str] | None) -> None:
    """Run the probes and write the report."""
    if part is not None:
        _run_here(*part)
        return
    begin = time.monotonic()
    probes = chosen(only)
    try:
        machine = machine_facts()
    except ProbeFailed as error:
        raise click.ClickException(str(error)) from error
    report: dict[str, Any] = {
        "what": "probes of relocation on CUDA",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "probes": [],
    }
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        architecture = "sm_" + machine["compute_capability"].replace(".", "")
        try:
            library, without = build_library(Path(folder), architecture)
            os.environ[LIBRARY_VARIABLE] = str(library)
            report["built_without_device_updates"] = without
        except (ProbeFailed, subprocess.TimeoutExpired) as error:
            report["not_built"] = str(error)
        for probe in probes:
            report["probes"].append(run_probe(probe, begin + BUDGET_SECONDS))
            console.print(f"{probe.name}: {report['probes'][-1]['outcome']}")
            _write(report_file, report, begin)
    print_report(console, report)
    console.print(f"wrote {report_file}")


def _write(path: Path, report: dict[str, Any], begin: float) -> None:
    """Write what there is so far, so that a run that is cut off leaves it."""
    report["wall_s"] = round(time.monotonic() - begin, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
