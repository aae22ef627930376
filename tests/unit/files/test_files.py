"""Saving and opening: a program comes back whole, also in another process."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import offload
from offload import Captured
from offload.files import open_saved, save_program
from offload.program import BoundProgram, Role
from offload.program.structure import Structure

Pair = collections.namedtuple("Pair", ["first", "second"])


Weights = Mapping[int, tuple[torch.Tensor, ...]]


def captured_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    with offload.capture(function) as captured:
        captured(*args, **kwargs)
    return captured


def reopened(captured: Captured, path: Path) -> Captured:
    captured.save(path)
    return offload.open(path)


def constants_of(structure: Structure) -> list[Any]:
    found = [structure.constant] if structure.kind == "constant" else list(structure.keys)
    return found + [one for child in structure.children for one in constants_of(child)]


def assert_same_program(mine: BoundProgram, yours: BoundProgram) -> None:
    """Equal in everything; weights by their bytes and by how they are held."""
    one, other = mine.program, yours.program
    assert one == other
    for mine_structure, yours_structure in (
        (one.arguments_structure, other.arguments_structure),
        (one.result_structure, other.result_structure),
    ):
        recorded = list(map(repr, constants_of(mine_structure)))
        assert recorded == list(map(repr, constants_of(yours_structure)))
    _assert_same_weights(mine.bindings.weights, yours.bindings.weights)


def _assert_same_weights(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    for index, holders in one.items():
        assert len({tensor.untyped_storage()._cdata for tensor in other[index]}) == 1
        for mine, yours in zip(holders, other[index], strict=True):
            assert bytes(mine.untyped_storage()) == bytes(yours.untyped_storage())
            assert (mine.shape, mine.stride(), mine.dtype) == (
                yours.shape,
                yours.stride(),
                yours.dtype,
            )
            assert mine.storage_offset() == yours.storage_offset()
            assert (mine.is_conj(), mine.is_neg()) == (yours.is_conj(), yours.is_neg())


class Tied(torch.nn.Module):
    """Weights that safetensors alone could not hold: shared, with gaps, lazily conjugated."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(8, 6)
        self.embedding = torch.nn.Parameter(table)
        self.head = torch.nn.Parameter(table.t())
        self.register_buffer("every_second", torch.arange(20.0)[1::2])
        self.register_buffer("wide", torch.randn(3, dtype=torch.complex128).conj())
        self.register_buffer("eighth", torch.ones(4).to(torch.float8_e4m3fn))
        self.register_buffer("nothing", torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mixed = x @ self.embedding @ self.head.t()[:8].t()
        second = self.every_second * 2
        return mixed, second, self.wide + 1, self.eighth.float(), self.nothing.clone()


def test_weights_that_share_memory_have_gaps_or_rare_dtypes(tmp_path: Path) -> None:
    model, x = Tied(), torch.randn(2, 8)
    with offload.capture(model) as captured:
        model(x)
    opened = reopened(captured, tmp_path / "tied.offload")
    assert_same_program(captured.bound, opened.bound)
    for mine, yours in zip(captured(x), opened(x), strict=True):
        assert torch.equal(mine, yours)


def test_one_storage_stays_one(tmp_path: Path) -> None:
    model, x = Tied(), torch.randn(2, 8)
    with offload.capture(model) as captured:
        model(x)
    bindings = reopened(captured, tmp_path / "tied.offload").bindings
    tied = next(held for held in bindings.weights.values() if len(held) == 2)
    tied[0].zero_()
    assert tied[1].abs().sum() == 0


def test_dropout_draws_what_eager_would_draw(tmp_path: Path) -> None:
    model, x = torch.nn.Dropout(0.5), torch.randn(64)
    with offload.capture(model) as captured:
        model(x)
    opened = reopened(captured, tmp_path / "dropout.offload")
    torch.manual_seed(7)
    expected = model(x)
    torch.manual_seed(7)
    assert torch.equal(opened(x), expected)
    assert opened.bindings.generators == (torch.default_generator,)


def test_state_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x + self.count

    model, x = Counter(), torch.zeros(3)
    with offload.capture(model) as captured:
        model(x)
    captured(x)
    opened = reopened(captured, tmp_path / "counter.offload")
    assert torch.equal(opened(x), torch.full((3,), 3.0))
    assert model.count == 2


NESTED: list[Any] = [
    None, True, 3, -(2**63), -0.0, math.inf, -math.inf, math.nan, complex(1.5, math.nan),
    "text\n\0", torch.float16, torch.device("cpu"), torch.device("cuda:1"), torch.strided,
    torch.channels_last, "\ud800",
]  # fmt: skip


def test_constants_of_every_kind_are_checked_again(tmp_path: Path) -> None:
    def function(x: torch.Tensor, options: list[Any], table: dict[Any, Any]) -> torch.Tensor:
        return x + table["y"] * options[2]

    table = {"y": torch.ones(2), (1, ("a", None)): 1, 2: "two", None: 0, 0.5: 1}
    captured = captured_call(function, torch.zeros(2), NESTED, table)
    opened = reopened(captured, tmp_path / "constants.offload")
    assert_same_program(captured.bound, opened.bound)
    assert torch.equal(opened(torch.zeros(2), NESTED, table), torch.full((2,), 3.0))
    with pytest.raises(offload.BindingError, match="recorded with 3"):
        opened(torch.zeros(2), [*NESTED[:2], 4, *NESTED[3:]], table)


def test_containers_without_a_class_are_plain(tmp_path: Path) -> None:
    def function(pair: Pair, cache: types.SimpleNamespace) -> dict[str, Any]:
        return {"pair": Pair(pair.first + 1, 5), "list": [cache.keys * 2], "none": None}

    arguments = Pair(torch.ones(2), None), types.SimpleNamespace(keys=torch.ones(3), size=3)
    captured = captured_call(function, *arguments)
    with pytest.warns(UserWarning, match=rf"{__name__}\.Pair\. .*types=\[Pair\]"):
        opened = reopened(captured, tmp_path / "containers.offload")
    assert_same_program(captured.bound, opened.bound)
    outcome = opened(*arguments)
    assert type(outcome["pair"]) is tuple
    assert torch.equal(outcome["pair"][0], torch.full((2,), 2.0))
    assert torch.equal(outcome["list"][0], torch.full((3,), 2.0))
    assert outcome["none"] is None


def test_results_that_alias(tmp_path: Path) -> None:
    weight = torch.randn(4)

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        y.add_(1)
        total = x + weight
        return [x, y[1:], weight, total, total.view(2, 2), total]

    captured = captured_call(function, torch.zeros(4), torch.zeros(4))
    opened = reopened(captured, tmp_path / "alias.offload")
    assert_same_program(captured.bound, opened.bound)
    x, y = torch.randn(4), torch.zeros(4)
    outcome = opened(x, y)
    assert outcome[0] is x
    assert outcome[1].data_ptr() == y[1:].data_ptr()
    assert torch.equal(y, torch.ones(4))
    assert outcome[3] is outcome[5]
    assert outcome[4].data_ptr() == outcome[3].data_ptr()


def test_overlaps_and_guards(tmp_path: Path) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if float(x[0]) > 0 else 3.0
        y.mul_(scale)
        return x + y

    both = torch.arange(1.0, 5.0)
    with offload.capture(function, host_reads="guard") as captured:
        captured(both, both)
    opened = reopened(captured, tmp_path / "overlap.offload")
    assert_same_program(captured.bound, opened.bound)
    assert len(opened.program.overlaps) == 1
    with pytest.raises(offload.BindingError, match="shared memory"):
        opened(both.clone(), both.clone())
    negative = -both
    with pytest.raises(offload.BindingError, match="the recorded value is"):
        opened(negative, negative)
    assert torch.equal(negative, -both)


def test_saving_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    captured = captured_call(lambda x: x + 1, torch.zeros(2))
    for name in ("one", "other"):
        save_program(captured.bound, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    reopened(captured, tmp_path / "opened")
    save_program(open_saved(tmp_path / "one").bound, tmp_path / "again")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.slow
def test_opens_in_a_process_without_the_model(tmp_path: Path) -> None:
    model, x = Tied().double().float(), torch.randn(2, 8)
    with offload.capture(model) as captured:
        model(x)
    save_program(captured.bound, tmp_path / "m.offload")
    safetensors.torch.save_file({"x": x}, tmp_path / "x.safetensors")
    script = (
        "import offload, sys, safetensors.torch as st\n"
        "x = st.load_file(sys.argv[2])['x']\n"
        "y = offload.open(sys.argv[1])(x)[0]\n"
        "st.save_file({'y': y}, sys.argv[3])\n"
    )
    files = [str(tmp_path / name) for name in ("m.offload", "x.safetensors", "y.safetensors")]
    subprocess.run([sys.executable, "-c", script, *files], check=True, cwd=tmp_path)
    assert torch.equal(safetensors.torch.load_file(files[2])["y"], captured(x)[0])


def test_the_members_are_what_their_names_say(tmp_path: Path) -> None:
    weight = torch.randn(3)
    captured = captured_call(lambda x: x * weight, torch.ones(3))
    save_program(captured.bound, tmp_path / "m.offload")
    with zipfile.ZipFile(tmp_path / "m.offload") as archive:
        program = json.loads(archive.read("program.json"))
        arrays = safetensors.torch.load(archive.read("weights.safetensors"))
    assert (program["format"], program["version"]) == ("offload program", 1)
    index = captured.program.of_role(Role.WEIGHT)[0].index
    assert arrays.keys() == {str(index)}
    assert torch.equal(arrays[str(index)].view(torch.float32), weight)


def test_opening_depends_on_no_mode_of_the_caller(tmp_path: Path) -> None:
    weight = torch.zeros(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        weight.add_(x)
        return weight * 2

    captured = captured_call(function, torch.ones(3))
    save_program(captured.bound, tmp_path / "m.offload")
    with torch.inference_mode(), torch.device("meta"):
        opened = offload.open(tmp_path / "m.offload")
    outcome = opened(torch.ones(3))
    assert torch.equal(outcome, torch.full((3,), 4.0))


@pytest.mark.parametrize(
    "function",
    [lambda x: x[torch.randperm(3)], lambda x: x + torch.randint(0, 5, (3,))],
    ids=["randperm", "randint"],
)
def test_dtypes_that_schemas_give_by_number_are_written_by_name(tmp_path, function):
    x = torch.randn(3)
    captured = captured_call(function, x)
    opened = reopened(captured, tmp_path / "m.offload")
    outcomes = []
    for call in (function, captured, opened):
        torch.manual_seed(7)
        outcomes.append(call(x))
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


@pytest.mark.parametrize("device", ["cuda", "no_such_device", "cuda:9", ""])
def test_programs_of_devices_that_are_not_here_can_be_looked_at(tmp_path, device):
    """Their weights are then on the CPU, and they are not loaded."""
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    model = torch.nn.Linear(2, 3)
    with torch.no_grad():
        captured = offload.capture(model, torch.ones(1, 2))
    program = dataclasses.replace(captured.program, device=device)
    bound = BoundProgram(program, captured.bindings)
    path = tmp_path / "model.offload"
    save_program(bound, path)
    opened = offload.open(path)
    assert opened.program.device == device
    (bias, weight) = sorted(
        (held[0] for held in opened.bindings.weights.values()), key=torch.Tensor.dim
    )
    assert torch.equal(weight, model.weight)
    assert torch.equal(bias, model.bias)
    with pytest.raises(offload.BackendUnavailable):
        opened.load()
