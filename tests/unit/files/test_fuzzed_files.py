"""Opening randomly changed files gives a FileError or a program that is whole."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hostile import archive, opened, tree, valid_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload
from offload.backends import NullBackend
from offload.plan import place_values

FUZZ = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def open_or_refuse(content: bytes, folder: Path) -> None:
    """Open; a program that opens must be whole enough to be printed and placed."""
    with contextlib.suppress(offload.FileError):
        program = opened(content, folder)
        str(program)
        place_values(program, NullBackend().machine())


def test_the_file_that_is_mutated_is_valid(tmp_path: Path) -> None:
    program = opened(valid_file(), tmp_path)
    assert len(program.launches) > 5
    assert opened(archive(), tmp_path).launches == program.launches


@FUZZ
@given(cut=st.integers(0, 10**9))
def test_truncated(tmp_path: Path, cut: int) -> None:
    content = valid_file()
    with pytest.raises(offload.FileError):
        opened(content[: cut % len(content)], tmp_path)


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 255)), max_size=8))
def test_bytes_changed(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    content = bytearray(valid_file())
    for position, byte in edits:
        content[position % len(content)] = byte
    open_or_refuse(bytes(content), tmp_path)


@FUZZ
@given(seed=st.integers(0, 10**9))
def test_central_directory_changed(tmp_path: Path, seed: int) -> None:
    """The last bytes of a zip are its sizes and offsets: change mainly these."""
    choice, content = random.Random(seed), bytearray(valid_file())
    for _ in range(choice.randint(1, 4)):
        at = len(content) - choice.randint(1, 220)
        content[at : at + 4] = struct.pack("<I", choice.choice([0, 1, 2**31, 2**32 - 1, 77]))
    open_or_refuse(bytes(content), tmp_path)


@pytest.mark.slow
@FUZZ
@given(junk=st.binary(max_size=200), junk_weights=st.binary(max_size=200))
def test_members_of_junk(tmp_path: Path, junk: bytes, junk_weights: bytes) -> None:
    with pytest.raises(offload.FileError):
        opened(archive(program=junk), tmp_path)
    with pytest.raises(offload.FileError):
        opened(archive(weights=junk_weights), tmp_path)


VALUES = [
    None, True, False, 0, 1, 2, -1, 7, 64, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, -(2**63), 0.5,
    1e300, "", "cpu", "cuda", "float32", "int64", "complex64", "quint8", "input", "weight",
    "activation", "output", "tensor", "object", "mapping", "aten::add.Tensor", "aten::relu",
    "aten::from_file", [], [0], [1, 1], [2**62, 2**62], {}, {"view": 1}, {"float": "nan"},
    {"complex": [0.0, 1.0]}, {"symbol": {"kind": "dtype", "name": "_dynamo"}}, {"dtype": "onnx"},
    {"device": "meta"}, {"symbol": {"kind": "generator", "name": "9"}}, {"tuple": [1]},
    "\ud800", "a" * 300,
]  # fmt: skip


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a JSON value."""
    keys = node.keys() if isinstance(node, dict) else range(len(node))
    found: list[tuple[Any, Any]] = [(node, key) for key in keys]
    for key in keys:
        if isinstance(node[key], (dict, list)):
            found += places(node[key])
    return found


@pytest.mark.slow
@settings(FUZZ, max_examples=1500)
@given(seed=st.integers(0, 10**9))
def test_json_values_changed(tmp_path: Path, seed: int) -> None:
    choice, root = random.Random(seed), tree()
    for _ in range(choice.randint(1, 3)):
        container, key = choice.choice(places(root))
        source, source_key = choice.choice(places(root))
        match choice.randint(0, 5):
            case 0:
                del container[key]
            case 1:
                container[key] = copy.deepcopy(source[source_key])
            case 2 if type(container[key]) is int:
                container[key] += choice.choice([-4, -1, 1, 4, 64])
            case 3 if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case _:
                container[key] = copy.deepcopy(choice.choice(VALUES))
    open_or_refuse(archive(program=json.dumps(root).encode()), tmp_path)
