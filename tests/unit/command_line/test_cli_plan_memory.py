"""`offload plan-memory`: tables of buffers, their places, and rows that are wrong."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from command_lines import failure_of, offload_command

from offload.commands import plan_memory
from offload.plan import Placement

LAST_LINE = r"arena (\d+) bytes, lower bound (\d+) bytes, \d+\.\d+ seconds"

ROWS = "id,lower,upper,size\na,0,2,100\nb,1,3,50\nc,2,4,100\nd,9,9,7\n"


def test_plan_memory_places_every_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    result = offload_command(
        "plan-memory", tmp_path / "rows.csv", "--output", tmp_path / "out.csv", "--alignment", 16
    )
    assert result.exit_code == 0, result.stderr
    arena, bound = map(int, re.fullmatch(LAST_LINE, result.output.splitlines()[-1]).groups())
    assert 150 <= bound <= arena < 250
    with (tmp_path / "out.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [tuple(row.values())[:4] for row in rows] == [
        tuple(line.split(",")) for line in ROWS.split()[1:]
    ]
    placed = [(int(row["offset"]), int(row["size"])) for row in rows]
    assert all(offset % 16 == 0 and offset + size <= arena for offset, size in placed)
    (a, _), (b, _), (c, _), _ = placed
    assert b >= max(a, c) + 100 or b + 50 <= min(a, c)


def test_plan_memory_fails_above_the_capacity(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    assert offload_command("plan-memory", tmp_path / "rows.csv", "--capacity", 200).exit_code == 0
    result = offload_command("plan-memory", tmp_path / "rows.csv", "--capacity", 149)
    assert "--capacity" in failure_of(result)
    assert re.fullmatch(LAST_LINE, result.stdout.splitlines()[-1])


def test_plan_memory_hands_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def place(intervals: Any, **options: Any) -> Placement:
        given.update(options, n=len(intervals))
        return Placement(tuple(0 for _ in intervals), 8, 8, "test", 1)

    monkeypatch.setattr(plan_memory, "place_intervals", place)
    (tmp_path / "rows.csv").write_text(ROWS)
    offload_command("plan-memory", tmp_path / "rows.csv", "--steps", 5, "--capacity", 9)
    assert given == {"n": 4, "alignment_bytes": 1, "capacity_bytes": 9, "search_steps": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the header id,lower,upper,size"),
        ("id,begin,end,size\n", "expected the header"),
        ("id,lower,upper,size\na,1,2\n", "line 2: expected an id and the three integers"),
        ("id,lower,upper,size\na,1,2,3\nb,1,x,3\n", "line 3: expected an id"),
        ("id,lower,upper,size\na,5,2,3\n", "line 2: expected 0 <= lower <= upper"),
        ("id,lower,upper,size\na,0,2,-3\n", "size >= 0, got 0,2,-3"),
        ("id,lower,upper,size,offset\na,1,2,3,0\n", "header id,lower,upper,size, got id,lower"),
        ("id,lower,upper,size\na,1,2,3,0\n", "line 2: expected an id and the three integers"),
        (
            "id,lower,upper,size\na,1,2,3\nb,1,2,3\na,2,3,4\n",
            "line 4: the id 'a'",
        ),
    ],
)
def test_plan_memory_names_the_line_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    assert message in failure_of(offload_command("plan-memory", tmp_path / "rows.csv"))


def test_plan_memory_reads_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbf" + ROWS.encode())
    assert offload_command("plan-memory", tmp_path / "rows.csv").exit_code == 0


def test_plan_memory_of_an_alignment_beyond_all_integers(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    result = offload_command("plan-memory", tmp_path / "rows.csv", "--alignment", 2**70)
    assert f"got {2**70}" in failure_of(result)


def test_plan_memory_of_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as CSV" in failure_of(
        offload_command("plan-memory", tmp_path / "rows.csv")
    )
