"""Programs with collectives: their invariants, their printed form, and files of ranks."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

import offload
from offload.backends import find_backend
from offload.errors import BackendUnavailable, BindingError, FileError, ProgramError
from offload.files.rank_paths import path_of_rank
from offload.load.options import checked
from offload.plan.launch_conflicts import launch_conflicts
from offload.plan.lifetimes import value_lifetimes
from offload.program import (
    BoundProgram,
    Group,
    Launch,
    Operator,
    Program,
    TensorView,
    check_program,
    decode_program,
    encode_program,
)
from offload.program.collectives import meeting_of
from offload.program.reader import parse

WORLD = Group("0", (0, 1), 1, 2)


def launch(index: int, name: str, arguments: tuple, results: tuple, touched: tuple) -> Launch:
    reads, writes = touched
    callee = Operator(name)
    return Launch(index, callee, arguments, results, reads, writes, False, None, False, "here:1")


@pytest.fixture
def program() -> Program:
    """Twice an input, summed over two ranks while another value is computed from it."""
    call = offload.capture(lambda x: (x * 2).relu() + x, torch.ones(4)).program
    double, relu, add = call.launches
    x, made, cut, total = (TensorView(one, 0, (4,), (1,), "float32") for one in range(4))
    summed = TensorView(4, 0, (4,), (1,), "float32")
    assert [view.value for view in double.made()] == [made.value]
    value = dataclasses.replace(call.values[made.value], index=4, name="summed")
    wait = "_c10d_functional::wait_tensor"
    launches = (
        double,
        launch(1, "_c10d_functional::all_reduce", (made, "sum", "0"), (summed,), ((1,), (4,))),
        dataclasses.replace(relu, index=2, arguments=(x,), reads=(0,)),
        launch(3, wait, (summed,), (None,), ((1, 4), (4,))),
        dataclasses.replace(add, index=4, arguments=(cut, summed, 1), reads=(2, 4)),
    )
    assert total.value == add.results[0].value
    return dataclasses.replace(
        call, values=(*call.values, value), launches=launches, groups=(WORLD,)
    )


def test_a_program_with_collectives_is_whole(program):
    check_program(program)


def test_what_a_collective_touches_lives_until_it_was_waited_for(program):
    lifetimes = value_lifetimes(program)
    assert (lifetimes[1].first, lifetimes[1].last) == (0, 4)
    assert (lifetimes[4].first, lifetimes[4].last) == (1, 5)


def test_a_wait_keeps_its_order_with_what_it_waits_for_alone(program):
    conflicts = launch_conflicts(program)
    assert (1, 3) in conflicts
    assert (2, 3) not in conflicts


@pytest.mark.parametrize("left_out", [1, 3])
def test_starts_and_waits_come_in_pairs(program, left_out):
    launches = [one for one in program.launches if one.index != left_out]
    launches = [dataclasses.replace(one, index=at) for at, one in enumerate(launches)]
    with pytest.raises(ProgramError, match="waits for"):
        check_program(dataclasses.replace(program, launches=tuple(launches)))


def test_a_wait_holds_all_that_its_collective_uses(program):
    """All but inputs that are copied at the start, which launches may write meanwhile."""
    launches = list(program.launches)
    launches[3] = dataclasses.replace(launches[3], reads=(4,))
    check_program(dataclasses.replace(program, launches=tuple(launches)))
    gathers = Operator("_c10d_functional::all_gather_into_tensor")
    launches[1] = dataclasses.replace(launches[1], callee=gathers)
    with pytest.raises(ProgramError, match=r"waits for %\d+, which no collective"):
        check_program(dataclasses.replace(program, launches=tuple(launches)))


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (dataclasses.replace(WORLD, name="1"),),
        (WORLD, dataclasses.replace(WORLD, name="1")),
        (dataclasses.replace(WORLD, ranks=(0, 0)),),
        (dataclasses.replace(WORLD, ranks=(0, 2)),),
        (dataclasses.replace(WORLD, rank=3),),
    ],
)
def test_groups_are_those_that_launches_name(program, groups):
    with pytest.raises(ProgramError, match="group"):
        check_program(dataclasses.replace(program, groups=groups))


def test_groups_are_written_and_read(program):
    text = json.dumps(encode_program(program)).encode()
    assert decode_program(parse(text, "program.json")).groups == (WORLD,)
    plain = dataclasses.replace(program, groups=())
    assert "groups" not in encode_program(plain)


def test_programs_of_ranks_are_loaded_where_their_groups_are(program):
    bound = offload.capture(torch.relu, torch.ones(4)).bound
    captured = offload.Captured(BoundProgram(program, bound.bindings))
    with pytest.raises(BindingError, match=r"torch\.distributed is not initialised"):
        captured.load()
    with pytest.raises(BindingError, match="none is called 'other'"):
        captured.load(groups={"other": None})


def test_groups_are_for_programs_that_have_some():
    captured = offload.capture(torch.relu, torch.ones(4))
    with pytest.raises(BindingError, match="none is called '0'"):
        captured.load(groups={"0": None})


def test_files_of_ranks_are_told_apart(program, tmp_path):
    path = tmp_path / "model.offload"
    own = path_of_rank(path, program)
    assert own.name == "model.offload.rank1of2"
    assert path_of_rank(path, dataclasses.replace(program, groups=())) == path
    own.touch()
    with pytest.raises(FileError, match=r"saved by ranks .*rank1of2.* this is rank 0 of 1"):
        offload.open(path)


def test_only_devices_with_process_groups_run_collectives(program):

    bound = BoundProgram(program, offload.capture(torch.relu, torch.ones(4)).bindings)
    with pytest.raises(BackendUnavailable, match="exchanges tensors with other ranks"):
        checked(bound, find_backend("null"), "offload", None, False)
    for asked in ({"weights_budget": "1MiB"}, {"fuse": "auto"}):
        given = {"weights_budget": None, "fuse": False, **asked}
        with pytest.raises(BindingError, match=next(iter(asked))):
            checked(bound, find_backend("cpu"), "offload", given["weights_budget"], given["fuse"])


def view(*shape: int) -> TensorView:
    return TensorView(0, 0, shape, tuple(1 for _ in shape), "float32")


def test_ranks_that_meet_say_the_same():
    functional = meeting_of("_c10d_functional::all_reduce", (view(2, 3), "sum", "tp"), 0)
    in_place = meeting_of("_c10d_functional::all_reduce_", (view(2, 3), "sum", "tp"), 1)
    assert functional == in_place
    assert functional.what == "all_reduce sum of float32[2, 3]"
    assert functional.channel == "tp"


def test_two_sides_of_a_message_meet():
    sent = meeting_of("_c10d_functional::isend", (view(5), 1, 7, "pp"), 0)
    received = meeting_of("_c10d_functional::irecv", (view(5), 0, 7, "pp"), 1)
    assert sent == received
    assert sent.channel == "pp/0>1"
    other = meeting_of("_c10d_functional::irecv", (view(6), 0, 7, "pp"), 1)
    assert other.what != sent.what


def test_rows_may_differ_where_each_rank_has_its_own():
    one = meeting_of("_c10d_functional::all_to_all_single", (view(3, 4), (1, 2), (2, 1), "0"), 0)
    other = meeting_of("_c10d_functional::all_to_all_single", (view(5, 4), (2, 3), (1, 4), "0"), 1)
    assert one == other
    assert one.what == "all_to_all_single of float32[*, 4]"


_ALONE = """
import sys
import torch

def of_groups():
    return {name for name in sys.modules if name.startswith("torch.distributed")}

before = of_groups()
import offload
from torch import nn

CALLED = ("/offload/distributed/", "/record/collectives.py", "/record/in_place_collectives.py")

def n_calls(n_layers):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(n_layers))).requires_grad_(False)
    called = []

    def count(frame, event, _):
        if event == "call" and any(one in frame.f_code.co_filename for one in CALLED):
            called.append(frame.f_code.co_name)

    sys.setprofile(count)
    captured = offload.capture(model, torch.ones(2, 4))
    sys.setprofile(None)
    assert len(captured.program.launches) >= n_layers
    assert torch.equal(captured.load()(torch.ones(2, 4)), model(torch.ones(2, 4)))
    return len(called)

n_calls(1)  # imports
print(n_calls(2), n_calls(40), sorted(of_groups() - before))
"""


@pytest.mark.slow
def test_a_process_alone_imports_no_groups_and_calls_nothing_for_them():
    """For any number of launches: recording a launch costs the same as without groups."""
    done = subprocess.run(
        [sys.executable, "-c", _ALONE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    few, many, imported = done.stdout.strip().split(" ", 2)
    assert imported == "[]"
    assert few == many
    assert int(few) < 20
