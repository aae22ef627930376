"""Asks a CUDA device what the design of relocation relies on: probes P0 to P14.

Each probe runs in a separate process, and all are reported in one JSON file: question, expected
answer, figures and outcome (`as expected`, `otherwise`, `failed: ...`). Needs a CUDA build of torch
2.11 or later, cuda-bindings, and nvcc; no network. Takes less than eight minutes.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).parent / "cuda"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

from probe_library import LIBRARY_VARIABLE, build_library  # noqa: E402
from probe_runs import answer_here, chosen, new_report, run_all, version_of  # noqa: E402
from probing import Probe, ProbeFailed  # noqa: E402

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
        "What rate do captured copies of 8 to 256 MiB reach beside products, and what do each "
        "node and a fork add to a launch?",
        "about 50 GB/s, 8 us for a node",
        "larger units",
        "probes_launching:captured_copies",
    ),
    Probe(
        "P11",
        "What do address areas of 64 GiB cost, and each address at which one chunk is shown? Do "
        "areas lie where they are asked for?",
        "all are there and lie there, and 100 us or less for a chunk, mapped and unmapped",
        "larger chunks, or smaller areas; numbers side by side may look like addresses",
        "probes_driver:aliased_addresses",
    ),
    Probe(
        "P12",
        "Does a stream wait for an event that a graph records, from the graph's launch on?",
        "it waits for the event, and not for what the graph does after it",
        "the caller waits for all of a graph with streamed weights",
        "probes_driver:event_in_graph",
    ),
    Probe(
        "P13",
        "May a kernel or a library be used for the first time under capture?",
        "it may: modules are loaded when they are needed",
        "nothing: the warm-up runs every launch before",
        "probes_driver:first_launch",
        ("kernel", "cublas", "cudnn"),
    ),
    Probe(
        "P14",
        "Is the first word of a TMA descriptor its address, and the only word that depends on it? "
        "Does a graph accept another address there?",
        "both, and every word of kernels that take descriptors is named",
        "set whole descriptors, as cuTensorMapReplaceAddress makes them",
        "probes_descriptors:descriptors",
        ("encoding", "graph", "product", "attention", "convolution"),
    ),
)


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
        "device": found.name,
        "compute_capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "driver_cuda_version": version,
        "driver": _driver_release(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {
            name: version_of(name) for name in ("cuda-bindings", "triton", "transformers")
        },
    }


def _driver_release() -> str:
    """The driver's release as its kernel module reports it; empty where it does not."""
    path = Path("/proc/driver/nvidia/version")
    try:
        first = path.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in first.split() if word[:1].isdigit() and "." in word), "")


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
        answer_here(PROBES, *part)
        return
    begin = time.monotonic()
    probes = chosen(PROBES, only)
    report = new_report("probes of relocation on CUDA", machine_facts)
    with tempfile.TemporaryDirectory() as folder:
        architecture = "sm_" + report["machine"]["compute_capability"].replace(".", "")
        try:
            library, without = build_library(Path(folder), architecture)
            os.environ[LIBRARY_VARIABLE] = str(library)
            report["built_without_device_updates"] = without
        except (ProbeFailed, subprocess.TimeoutExpired) as error:
            report["not_built"] = str(error)
        run_all(Path(__file__), probes, report, report_file, begin)


if __name__ == "__main__":
    main()
