"""Stored durations of launches: means, outliers, files of several writers, other machines."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.costs import LaunchCost, LaunchCosts
from offload.errors import CostModelError

MACHINE, DEVICE = "a processor", "cpu, 1 thread"
FUNCTIONS = (torch.relu, torch.sigmoid, torch.tanh, torch.abs)


def program(*functions):
    def call(x):
        for function in functions or FUNCTIONS[:3]:
            x = function(x)
        return x

    return offload.capture(call, torch.zeros(4)).program


def taught(costs: LaunchCosts, n_times: int, ns: float = 1_000.0) -> LaunchCosts:
    for _ in range(n_times):
        costs.take(MACHINE, DEVICE, program(), [ns] * 3)
    return costs


@given(st.lists(st.floats(90, 110), min_size=1, max_size=30))
def test_mean_and_deviation_are_those_of_the_measurements(durations):
    cost = LaunchCost(1, durations[0])
    for one in durations[1:]:
        cost = cost.taking(one)
    assert cost.n_measurements == len(durations)
    assert math.isclose(cost.mean_ns, statistics.fmean(durations), rel_tol=1e-9)
    assert math.isclose(cost.deviation_ns, statistics.pstdev(durations), abs_tol=1e-6)


def test_an_outlier_is_in_no_mean():
    cost = LaunchCost(5, 100.0).taking(151.0)
    assert (cost.n_measurements, cost.mean_ns, cost.n_outliers) == (5, 100.0, 1)
    assert LaunchCost(5, 100.0).taking(66.0).n_outliers == 1
    assert LaunchCost(5, 100.0).taking(150.0).n_measurements == 6


def test_as_many_outliers_as_measurements_start_anew():
    cost = LaunchCost(3, 100.0)
    for _ in range(2):
        cost = cost.taking(300.0)
        assert cost.mean_ns == 100.0
    assert cost.taking(310.0) == LaunchCost(1, 310.0)


def test_known_after_three_measurements_of_every_launch():
    costs = taught(LaunchCosts(), 2)
    assert costs.known_ns(MACHINE, DEVICE, program()) is None
    taught(costs, 1)
    assert costs.known_ns(MACHINE, DEVICE, program()) == (1_000.0,) * 3
    assert costs.known_ns(MACHINE, "cpu, 2 threads", program()) is None
    assert (
        costs.known_ns(MACHINE, DEVICE, program(*FUNCTIONS)) is None
    )  # one launch was never measured


def test_equal_launches_count_once_by_their_mean():
    costs = LaunchCosts()
    twice = program(torch.relu, torch.relu)
    costs.take(MACHINE, DEVICE, twice, [900.0, 1_100.0])
    ((cost,),) = (known.values() for known in costs.costs.values())
    assert (cost.n_measurements, cost.mean_ns) == (1, 1_000.0)


def test_a_file_is_read_again(tmp_path):
    path = tmp_path / "costs.json"
    saved = taught(LaunchCosts(path), 3)
    assert saved.save() == path
    again = LaunchCosts(path)
    assert again.costs == saved.costs
    assert again.machine == MACHINE
    assert "3 of 3 signatures known" in str(again)


def test_a_device_without_measurements_is_described(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"format": 1, "machine": MACHINE, "devices": {DEVICE: {}}}))
    costs = LaunchCosts(path)
    assert str(costs).endswith(f"{DEVICE}: 0 of 0 signatures known")
    assert costs.known_ns(MACHINE, DEVICE, program()) is None


def test_writers_of_one_file_keep_what_the_others_measured(tmp_path):
    path = tmp_path / "costs.json"
    writers = [LaunchCosts(path) for _ in range(8)]

    def write(costs: LaunchCosts) -> None:
        taught(costs, 1)
        costs.save()

    threads = [threading.Thread(target=write, args=(one,)) for one in writers]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    (known,) = LaunchCosts(path).costs.values()
    assert {one.n_measurements for one in known.values()} == {8}
    writers[0].save()  # no new data: nothing is added twice
    (known,) = LaunchCosts(path).costs.values()
    assert {one.n_measurements for one in known.values()} == {8}


def test_processes_that_save_to_one_file_at_once_lose_nothing(tmp_path):
    path, recorded = tmp_path / "costs.json", program()
    children = []
    for _ in range(3):
        children.append(os.fork())
        if children[-1] == 0:
            with contextlib.suppress(BaseException):
                costs = LaunchCosts(path)
                for _ in range(10):
                    costs.take(MACHINE, DEVICE, recorded, [1_000.0] * 3)
                    costs.save()
                os._exit(0)
            os._exit(1)
    assert [os.waitpid(one, 0)[1] for one in children] == [0, 0, 0]
    (known,) = LaunchCosts(path).costs.values()
    assert {one.n_measurements for one in known.values()} == {30}


def test_durations_of_another_machine_are_refused_or_accepted(tmp_path):
    path = tmp_path / "costs.json"
    taught(LaunchCosts(path), 3).save()
    costs = LaunchCosts(path)
    with pytest.raises(CostModelError, match="expected durations of another, got those of a proc"):
        costs.known_ns("another", DEVICE, program())
    with pytest.raises(CostModelError, match="got those of a processor"):
        costs.take("another", DEVICE, program(), [1.0] * 3)
    with pytest.raises(CostModelError, match="expected durations of another"):
        LaunchCosts(path, machine="another")
    accepted = LaunchCosts(path, machine="*")
    assert accepted.known_ns("another", DEVICE, program()) == (1_000.0,) * 3


def test_a_file_says_which_machines_were_measured(tmp_path):
    path = tmp_path / "costs.json"
    taught(LaunchCosts(path), 3).save()
    LaunchCosts(path, machine="*").save()  # nothing is added: still of one machine
    assert LaunchCosts(path).machine == MACHINE
    both = LaunchCosts(path, machine="*")
    both.take("another", DEVICE, program(), [1_000.0] * 3)
    both.save()
    assert both.machine == "*"
    with pytest.raises(CostModelError, match="got those of several machines"):
        LaunchCosts(path).known_ns(MACHINE, DEVICE, program())
    assert LaunchCosts(path, machine="*").known_ns(MACHINE, DEVICE, program()) is not None


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    costs = taught(LaunchCosts(path), 1)

    def fail(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(type(path), "replace", fail)
        with pytest.raises(CostModelError, match="no space left"):
            costs.save()
    assert [one.name for one in tmp_path.iterdir()] == ["costs.lock"]
    costs.save()
    assert LaunchCosts(path).costs == costs.costs


@pytest.mark.parametrize("content", [b"\xff\xfe", bytes(range(256)), b"[" * 100_000, b"\x80"])
def test_a_file_that_is_no_text_is_refused(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(CostModelError, match=r"costs\.json is damaged"):
        LaunchCosts(path)
    with pytest.raises(CostModelError, match="cannot be read"):
        LaunchCosts("a\0b")


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"machine": None},
        {"machine": []},
        {"devices": {DEVICE: {"x": [math.inf, 1.0, 0.0, 0]}}},
        {"devices": {DEVICE: {"x": [10**400, 1.0, 0.0, 0]}}},
        {"devices": {DEVICE: {"x": [3, 1.0, math.inf, 0]}}},
        {"devices": {DEVICE: {"x": [3, 1.0, 0.0, math.inf]}}},
        {"devices": {DEVICE: {"x": [0, 1.0, 0.0, 0]}}},
        {"devices": {DEVICE: {"x": [1, -1.0, 0.0, 0]}}},
        {"devices": {DEVICE: {"x": [3, 1e18, 0.0, 0]}}},
        {"devices": {DEVICE: {"x": [1, 1.0]}}},
        {"devices": []},
        {"machine": None, "devices": {DEVICE: {"x": [1, float("nan"), 0.0, 0]}}},
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change):
    path = tmp_path / "costs.json"
    document = {"format": 1, "machine": MACHINE, "devices": {}}
    path.write_text(json.dumps({**document, **change}))
    with pytest.raises(CostModelError, match=r"costs\.json is damaged"):
        LaunchCosts(path)
    path.write_text("{")
    with pytest.raises(CostModelError, match="damaged"):
        LaunchCosts(path)


def test_without_a_path_nothing_is_saved():
    with pytest.raises(CostModelError, match=r"LaunchCosts\(path\)"):
        taught(LaunchCosts(), 1).save()


def test_a_file_that_cannot_be_written(tmp_path):
    costs = taught(LaunchCosts(tmp_path / "file" / "costs.json"), 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CostModelError, match="cannot be written"):
        costs.save()
