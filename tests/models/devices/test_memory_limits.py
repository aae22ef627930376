"""The memory that a user lets the CPU use, and what control groups let it use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offload
from offload.backends import CpuBackend
from offload.backends.host_memory import total_bytes

UNLIMITED_1 = str((1 << 63) - 4096)


def made_root(folder, own, limits):
    """A folder with the process's control groups, and the limits of some."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(own)
    for path, limit in limits.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{limit}\n")
    return folder


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("", {}, None),
        ("0::/\n", {}, None),
        ("0::/\n", {f"{V2}/memory.max": 4096}, 4096),
        ("0::/a/b\n", {f"{V2}/a/b/memory.max": "max", f"{V2}/a/memory.max": 8192}, 8192),
        ("0::/a/b\n", {f"{V2}/a/b/memory.max": 4096, f"{V2}/a/memory.max": 8192}, 4096),
        ("0::/a\n", {f"{V2}/a/memory.max": 1 << 60}, None),
        ("0::/../b\n", {f"{V2}/b/memory.max": 4096}, None),  # of another group
        ("0::/../b\n", {f"{V2}/memory.max": 4096}, 4096),
        ("7:cpu,memory:/a\n0::/\n", {f"{V1}/a/memory.limit_in_bytes": 4096}, 4096),
        ("7:memory:/a\n", {f"{V1}/a/memory.limit_in_bytes": UNLIMITED_1}, None),
        # In a container: its own group is mounted as the uppermost one.
        ("7:memory:/x/y\n", {f"{V1}/memory.limit_in_bytes": 4096}, 4096),
        ("7:cpu:/a\n", {f"{V1}/a/memory.limit_in_bytes": 4096}, None),
    ],
)
def test_the_least_limit_of_the_control_groups_counts(tmp_path, own, limits, expected):
    found = total_bytes(made_root(tmp_path, own, limits))
    assert found == (total_bytes(tmp_path / "empty") if expected is None else expected)


def test_a_limit_is_what_the_machine_then_has():
    assert CpuBackend(memory_bytes="1GiB").machine().memory_bytes == 1 << 30
    assert CpuBackend(memory_bytes=12345).machine().memory_bytes == 12345
    assert not CpuBackend().machine().is_limited
    for wrong in (0, -1, True, 1.5, "", "many", "0MiB", b"1"):
        with pytest.raises(offload.BindingError, match="memory_bytes: expected"):
            CpuBackend(memory_bytes=wrong)


@pytest.fixture(scope="module")
def stack():
    """A captured stack of layers, its input and result, and its bytes besides activations."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval()
    x = torch.randn(8, 64)
    with torch.no_grad():
        held_bytes = sum(one.nbytes for one in model.parameters()) + 2 * x.nbytes
        return offload.capture(model, x), x, model(x), held_bytes


@pytest.mark.parametrize("options", [{}, {"lanes": 2}, {"scheduling": "host"}], ids=str)
def test_a_load_on_the_device_alone_holds_the_limit(stack, options):
    captured, x, expected, held_bytes = stack
    with captured.load(**options) as run:
        needed_bytes = held_bytes + run.feature_map_bytes
    with pytest.raises(offload.OutOfMemory, match=r"takes .* of .* on cpu .*memory_bytes="):
        captured.load(CpuBackend(memory_bytes=needed_bytes - 1), **options)
    with captured.load(CpuBackend(memory_bytes=needed_bytes), **options) as run:
        torch.testing.assert_close(run(x), expected)


def test_a_budget_counts_instead_of_the_weights(stack):
    captured, x, expected, held_bytes = stack
    backend = CpuBackend(memory_bytes=held_bytes)
    with pytest.raises(offload.OutOfMemory, match="takes"):
        captured.load(backend)
    for budget in ("auto", held_bytes // 2):
        with captured.load(backend, weights_budget=budget) as run:
            assert run.streaming.plan.taken_bytes <= held_bytes
            assert torch.equal(run(x), expected)


def test_an_automatic_budget_leaves_room_for_inputs_and_results():
    layers = [nn.Linear(256, 256, bias=False) for _ in range(8)]  # 2 MiB
    model, x = nn.Sequential(*layers).eval(), torch.randn(256, 256)  # results of 256 KiB
    captured = offload.capture(model, x)
    with captured.load(CpuBackend(memory_bytes="2MiB"), weights_budget="auto") as run:
        assert not run.streaming.plan.is_resident
        assert torch.equal(run(x), model(x))


def test_placements_hold_the_least_limit_of_a_memory(stack):
    captured, x, expected, held_bytes = stack
    for limited in range(2):
        for limit, fits in ((held_bytes // 2, False), (2 * held_bytes, True), (10**30, True)):
            backends = [CpuBackend(threads=1), CpuBackend(threads=1)]
            backends[limited] = CpuBackend(threads=1, memory_bytes=limit)
            if fits:
                with captured.load(backends) as run:
                    torch.testing.assert_close(run(x), expected)
                continue
            with pytest.raises(offload.PlanError, match=r"takes .* of .* on cpu"):
                captured.load(backends)
