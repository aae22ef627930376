"""Host stages on a virtual clock: the simulated device's waiting time, against the prediction.

Each thread has its own time. A stage begins at the later of that and the hand-over of its launch,
which the pipeline reports (`watch`). A kernel begins when the device has run the preceding one and
its launch has been made. The assignment of work to threads and the orders of stages and kernels are
the actual ones of offload and the simulated runtime.
"""

from __future__ import annotations

import ctypes
import random
import struct
import threading

import numpy as np
import pytest
import torch
from binary_kernels import FLOAT, n_made
from simulated_ascend import SimulatedAscendBackend, install
from torch.export import Dim

import offload
from offload.backends.ascend import BinaryCapturer, BinaryKernel, Given, Made, Number
from offload.plan.host_stages import LaunchCosts, predict_host_stages

N_LAUNCHES = 24


class VirtualClock:
    """Times of the host's threads and of the device, in ns."""

    def __init__(self, costs: list[LaunchCosts]) -> None:
        self.costs = costs
        self.lock = threading.Lock()
        self.threads: dict[int, float] = {}
        self.handed: dict[int, float] = {}  # by launch, the end of its latest stage
        self.launched: dict[int, float] = {}
        self.tiled_by: dict[int, int] = {}  # by launch, the thread
        self.device = self.busy = 0.0
        self.ran: list[int] = []  # launches in the order of their kernels

    def watch(self, stage: str, launch: int, begins: bool) -> None:
        """A stage begins or ends on the calling thread."""
        with self.lock:
            me = threading.get_ident()
            if not begins:
                self.handed[launch] = self.threads[me]
                return
            taken = getattr(self.costs[launch], f"{stage}_ns")
            at = max(self.threads.get(me, 0.0), self.handed.get(launch, 0.0))
            self.threads[me] = at + taken
            if stage == "launch":  # the kernel may run before its launch call returns
                self.launched[launch] = at + taken
            if stage == "tile":
                self.tiled_by[launch] = me

    def run(self, launch: int) -> None:
        """A kernel runs on the device."""
        with self.lock:
            taken = self.costs[launch].kernel_ns
            self.device = max(self.device, self.launched[launch]) + taken
            self.busy += taken
            self.ran.append(launch)

    @property
    def idle(self) -> float:
        """The total time that the device has waited."""
        return self.device - self.busy


def flips(x: torch.Tensor) -> torch.Tensor:
    for _ in range(N_LAUNCHES):
        x = -x
    return x


class Flips:
    """The model on the simulated device, whose kernels report to a clock."""

    def __init__(self, ascend, monkeypatch, host_cores: int) -> None:
        self.clock = VirtualClock([])
        self.gates: dict[int, threading.Event] = {}  # by launch, what its tiling awaits
        kernel = BinaryKernel(
            "flip",
            1,
            (Given(0, FLOAT), Made(0, FLOAT), Number("I", n_made), Number("I", self._index)),
        )
        image = ascend.binary({"flip": (24, self._flip)})
        backend = SimulatedAscendBackend(BinaryCapturer(image, {"aten::neg": kernel}))
        install(ascend, monkeypatch, backend)
        n = Dim("n", min=2, max=4096)
        captured = offload.capture(flips, torch.ones(6), dynamic_shapes=({0: n},))
        self.on_kernel = lambda launch: None
        self.run = captured.load(device=backend.name, sizes=offload.Sizes(), host_cores=host_cores)

    def _index(self, launch) -> int:
        if launch.index in self.gates:
            assert self.gates[launch.index].wait(60)
        return launch.index

    def _flip(self, block: bytes, n_blocks: int) -> None:
        source, destination, count, launch = struct.unpack("<QQII", block)
        given, made = (
            np.ctypeslib.as_array((ctypes.c_float * count).from_address(one))
            for one in (source, destination)
        )
        made[:] = -given
        if self.clock.costs:
            self.clock.run(launch)
        self.on_kernel(launch)

    def measure(self, n: int, costs: list[LaunchCosts]) -> VirtualClock:
        """Execute at a size and measure it."""
        self.clock = VirtualClock(costs)
        self.run._loaded.resident.watch(self.clock.watch)
        x = torch.randn(n)
        assert torch.equal(self.run(x), flips(x))
        return self.clock


def costs_of(seed: int) -> list[LaunchCosts]:
    """Costs at which each stage, or the device, may be the slowest."""
    rng = random.Random(seed)
    scale = [rng.choice((2_000, 8_000, 30_000)) for _ in range(4)]
    return [LaunchCosts(*(rng.uniform(0.2, 2.0) * one for one in scale)) for _ in range(N_LAUNCHES)]


@pytest.mark.slow
@pytest.mark.parametrize("host_cores", [1, 2, 3, 5])
def test_the_device_waits_as_long_as_predicted(host_cores, ascend, monkeypatch):
    """The requirement is 15 %; as the hand-overs are known exactly, the wait is exact."""
    flips_on_device = Flips(ascend, monkeypatch, host_cores)
    others = {1, 2, 3} - {host_cores}
    differs = dict.fromkeys(others, False)
    with flips_on_device.run:
        for seed in range(12):
            costs = costs_of(seed)
            clock = flips_on_device.measure(10 + seed, costs)
            predicted = predict_host_stages(costs, host_cores)
            assert clock.idle == pytest.approx(predicted.idle_ns, rel=1e-6)
            assert clock.device == pytest.approx(predicted.total_ns, rel=1e-6)
            assert clock.ran == [*range(N_LAUNCHES)]
            for other in others:  # other arrangements have distinct times
                idle_ns = predict_host_stages(costs, other).idle_ns
                differs[other] |= abs(clock.idle - idle_ns) > 0.15 * idle_ns
    assert all(differs.values())


def test_sizes_that_are_kept_hand_nothing_over(ascend, monkeypatch):
    """No stage is reported, as none runs: the calling thread launches the kept instance."""
    flips_on_device = Flips(ascend, monkeypatch, 3)
    with flips_on_device.run as run:
        flips_on_device.measure(9, costs_of(0))
        n_staged = run._loaded.resident.n_staged
        flips_on_device.clock = clock = VirtualClock([])
        run._loaded.resident.watch(clock.watch)
        x = torch.randn(9)
        assert torch.equal(run(x), flips(x))
        assert not clock.threads
        assert run._loaded.resident.n_staged == n_staged


@pytest.mark.parametrize("host_cores", [1, 2, 3, 4])
def test_no_stage_waits_for_a_later_launch(host_cores, ascend, monkeypatch):
    """Each launch is tiled only once the preceding kernel has run."""
    flips_on_device = Flips(ascend, monkeypatch, host_cores)
    gates = {launch: threading.Event() for launch in range(1, N_LAUNCHES)}
    flips_on_device.on_kernel = lambda launch: (
        gates[launch + 1].set() if launch + 1 in gates else None
    )
    with flips_on_device.run as run:
        flips_on_device.gates = gates
        x = torch.randn(9)
        assert torch.equal(run(x), flips(x))


@pytest.mark.parametrize("host_cores", [3, 5])
def test_tiling_goes_on_while_the_first_launch_waits(host_cores, ascend, monkeypatch):
    """The kernel of launch 0 runs only once the last launch has been tiled."""
    flips_on_device = Flips(ascend, monkeypatch, host_cores)
    costs = costs_of(1)
    last_is_tiled = threading.Event()

    def watch(stage: str, launch: int, begins: bool) -> None:
        flips_on_device.clock.watch(stage, launch, begins)
        if (stage, launch, begins) == ("tile", N_LAUNCHES - 1, False):
            last_is_tiled.set()

    flips_on_device.on_kernel = lambda launch: last_is_tiled.wait(60) if launch == 0 else None
    with flips_on_device.run as run:
        flips_on_device.clock = VirtualClock(costs)
        run._loaded.resident.watch(watch)
        x = torch.randn(9)
        assert torch.equal(run(x), flips(x))
        clock = flips_on_device.clock
        assert len({clock.tiled_by[launch] for launch in range(N_LAUNCHES)}) == host_cores - 2
        assert threading.get_ident() not in clock.tiled_by.values()
