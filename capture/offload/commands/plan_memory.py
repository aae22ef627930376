"""`offload plan-memory`: buffers of a CSV file, placed in one arena."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from pathlib import Path

import click

from offload.console.progress import reporting, stage
from offload.errors import FileError
from offload.plan.memory import Interval, Placement, place_intervals

_CSV_COLUMNS = ("id", "lower", "upper", "size")


def plan_memory(
    file: Path, capacity: int | None, alignment: int, steps: int, output_file: Path | None
) -> None:
    """Place the buffers of a CSV file, and write their offsets."""
    names, intervals = _read_intervals(file)
    begin_ns = time.perf_counter_ns()
    with reporting(after_s=0), stage("searching for a placement"):
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
        FileError: it is not such a CSV file; the message names the line.
    """
    lines_of: dict[str, int] = {}
    intervals = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            header = tuple(cell.strip() for cell in next(reader, []))
            if header != _CSV_COLUMNS:
                raise FileError(
                    f"{path}: expected the header {','.join(_CSV_COLUMNS)}, got "
                    f"{','.join(header) or 'an empty file'}"
                )
            for row in filter(None, reader):
                where = f"{path}, line {reader.line_num}"
                first_line = lines_of.setdefault(row[0], reader.line_num)
                if first_line != reader.line_num:
                    raise FileError(f"{where}: the id {row[0]!r} is also that of line {first_line}")
                intervals.append(_interval(row, where))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path}: cannot be read as CSV: {error}") from error
    return list(lines_of), intervals


def _interval(row: Sequence[str], where: str) -> Interval:
    try:
        first, last, size_bytes = (int(cell) for cell in row[1:])
    except ValueError:
        raise FileError(
            f"{where}: expected an id and the three integers lower, upper, size, got "
            f"{','.join(row)}"
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
        raise FileError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
