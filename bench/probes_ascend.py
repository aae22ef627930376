"""Asks an Ascend device what its backend relies on: probes A0 to A12.

Each probe runs in a separate process, and all are reported in one JSON file: question, expected
answer, figures and outcome (`as expected`, `otherwise`, `not answered`, `failed: ...`). Needs torch
and torch_npu with CANN 8.1 or later; no network. Questions that need newer software are left
unanswered on older. A7 needs an offline model: by --offline-model, or made by CANN's compiler atc
where that is on the PATH. Takes less than eight minutes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import click

FOLDER = Path(__file__).parent / "ascend"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))

from probe_runs import answer_here, chosen, new_report, run_all, version_of  # noqa: E402
from probing import Probe, ProbeFailed  # noqa: E402

_CANN, _DRIVER = 0, 7
_VERSION_BYTES, _WHOLE_BYTES = 128, 512
_DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")

PROBES = (
    Probe(
        "A0",
        "Which functions does the runtime have, and can tasks of a captured model be read?",
        "all of CANN 9.1, and firmware with software SQ",
        "what needs a newer runtime is refused by name, or replaced by copies",
        "probes_rules:what_is_there",
    ),
    Probe(
        "A1",
        "Does a model read a table that copies on the executions' stream wrote behind its making, "
        "each execution its own?",
        "yes, captured and built",
        "no separate table: copies into fixed memory",
        "probes_tables:table_behind_the_making",
        ("capture", "build"),
    ),
    Probe(
        "A2",
        "May argument blocks lie at any multiple of 64 bytes?",
        "yes",
        "align blocks of the table to what works",
        "probes_tables:alignment_of_blocks",
    ),
    Probe(
        "A3",
        "Does an explicit build run whose only stream is bound as its head?",
        "yes, and nothing of it runs while it is built",
        "bind it with the default flag, or capture",
        "probes_tables:only_stream_as_head",
    ),
    Probe(
        "A4",
        "May the source of a copy of kind 5 change once the call has returned?",
        "yes, of pageable and of pinned memory",
        "keep a ring of host tables, freed by events",
        "probes_copies:staged_copies",
        ("pageable", "pinned"),
    ),
    Probe(
        "A5",
        "Can copies that read both addresses from memory be captured, and take addresses that are "
        "odd multiples of 512 and of 32 bytes?",
        "yes",
        "the host enqueues copies around the model",
        "probes_copies:readdressed_copies",
        ("512", "32"),
    ),
    Probe(
        "A6",
        "May copies write the argument block that a captured task reads, without aclmdlRIUpdate?",
        "yes",
        "relocate by parameters of tasks and an update, or by copies",
        "probes_tables:blocks_of_the_runtime",
    ),
    Probe(
        "A7",
        "May a data buffer change once aclmdlExecuteAsync has returned?",
        "yes",
        "a dataset for each execution in flight",
        "probes_offline:data_buffers",
    ),
    Probe(
        "A8",
        "Which codes do calls give that a capture forbids, and does it go on?",
        "those of the open runtime's source, and yes",
        "write the codes into the simulator, by release",
        "probes_rules:refusals",
    ),
    Probe(
        "A9",
        "What do a refresh of 8 bytes to 64 KiB and an execution cost the host?",
        "figures; nothing is promised",
        "choose the refresh by them",
        "probes_rules:costs",
    ),
    Probe(
        "A10",
        "May aclnnAdd write the table that the kernels of a model read, on the executions' stream?",
        "yes",
        "the host refreshes the table",
        "probes_operators:operators_write_the_table",
    ),
    Probe(
        "A11",
        "Can executors of aclnnIndexSelect and aclnnAdd be made repeatable and run again on the "
        "same addresses without setting them, and may one that was only planned be destroyed?",
        "yes",
        "operators are planned at each gather",
        "probes_operators:executors_run_again",
    ),
    Probe(
        "A12",
        "May a kernel of a captured model be given arguments once, in memory of offload, which "
        "its executions then read?",
        "yes",
        "its block is the runtime's, and each is copied",
        "probes_tables:blocks_of_ours",
    ),
)


def machine_facts() -> dict[str, Any]:
    """The device, driver, CANN and the versions.

    Raises:
        ProbeFailed: there is no NPU, or torch_npu is missing.
    """
    try:
        import torch
        import torch_npu
    except ImportError as error:
        raise ProbeFailed(f"{error}: the probes need torch and torch_npu") from error
    if not torch.npu.is_available():
        raise ProbeFailed(f"torch_npu {torch_npu.__version__} finds no NPU")
    runtime = ctypes.CDLL("libascendcl.so")
    return {
        "device": torch.npu.get_device_name(0),
        "memory_bytes": torch.npu.get_device_properties(0).total_memory,
        "cann": package_version(runtime, _CANN),
        "driver": package_version(runtime, _DRIVER) or driver_release(_DRIVER_FILE),
        "torch": torch.__version__,
        "torch_npu": torch_npu.__version__,
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in ("transformers",)},
    }


def package_version(runtime: ctypes.CDLL, package: int) -> str:
    """The version of a CANN package by its number; empty where the runtime does not report it."""
    if not hasattr(runtime, "aclsysGetCANNVersion"):
        return ""
    content = ctypes.create_string_buffer(_WHOLE_BYTES)
    if runtime.aclsysGetCANNVersion(package, content) != 0:
        return ""
    return content.raw[:_VERSION_BYTES].split(b"\0")[0].decode(errors="replace")


def driver_release(path: Path) -> str:
    """The driver's release from the file that it installs; empty where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found = (line.partition("=")[2].strip() for line in lines if line.startswith("Version="))
    return next(found, "")


@click.command(help=__doc__)
@click.argument(
    "report_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path(__file__).parents[1] / "docs" / "measurements" / "npu_probes.json",
)
@click.option("--only", metavar="A1,A3", help="Run these probes alone.")
@click.option(
    "--offline-model",
    type=click.Path(exists=True, dir_okay=False),
    help="An .om model with one input and one output of floats, for A7.",
)
@click.option("--part", nargs=2, hidden=True, help="Answer one part in this process.")
def main(
    report_file: Path, only: str | None, offline_model: str | None, part: tuple[str, str] | None
) -> None:
    """Run the probes and write the report."""
    if part is not None:
        answer_here(PROBES, *part)
        return
    begin = time.monotonic()
    probes = chosen(PROBES, only)
    report = new_report("probes of the Ascend backend", machine_facts)
    if offline_model is not None:
        os.environ["OFFLINE_MODEL"] = offline_model
    run_all(Path(__file__), probes, report, report_file, begin)


if __name__ == "__main__":
    main()
