"""Programs with nondeterministic kernels, on the simulated driver: loaded, with bounded error."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from offload.errors import CaptureError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from loading import ACT, IN, OUT, Device, N, add, on_device, result, scale
from small_graphs import floats, make_program, words


class Noisy:
    """Adds in any order: each result is off by up to `size`. It may keep the first address."""

    def __init__(self, device: Device, size: float, *, keeps: bool = False) -> None:
        self.kernel = device.simulator.kernel("noisy_add", [8, 8, 8], self.run)
        self.size = size
        self.keeps = keeps
        self.first: int | None = None
        self.draw = random.Random(0)

    def run(self, arguments: bytes) -> None:
        one, other, to = struct.unpack("<3Q", arguments)
        if self.keeps:
            self.first = one if self.first is None else self.first
            one = self.first
        for index in range(N):
            total = floats(one, N)[index] + floats(other, N)[index]
            floats(to, N)[index] = total + self.size * self.draw.uniform(-1, 1)

    def __call__(self, at, one: int, other: int, to: int) -> None:
        at.launch(self.kernel, words(one), words(other), words(to))


def noisy_program(device: Device, noisy: Noisy):
    """first = 2 x + x, in any order; second = 2 x."""
    program = make_program(
        [(IN, N), (ACT, N), (OUT, N), (OUT, N)], [("0", "1"), ("01", "2"), ("1", "3")]
    )
    steps = [
        lambda at: scale(at, device, at.at[0], at.at[1], 2.0),
        lambda at: noisy(at, at.at[0], at.at[1], at.at[2]),
        lambda at: scale(at, device, at.at[1], at.at[3], 1.0),
    ]
    return program, steps


def test_a_program_that_is_not_deterministic_loads_and_explain_says_by_how_much(device):
    noisy = Noisy(device, 1e-4)
    with device.load(*noisy_program(device, noisy)) as run:
        (note,) = [line for line in run.explain().splitlines() if "different bits" in line]
        assert note.startswith("output2 (block 0) has different bits at each execution (")
        assert "in 6 executions at the captured addresses); the proof allowed 8 times" in note
        assert device.simulator.calls("cuGraphLaunch") == 6 + 2
        x = on_device(torch.randn(N))
        first, second = run(x, out=(on_device(torch.zeros(N)), on_device(torch.zeros(N))))
        run._loaded.resident.finish()
        torch.testing.assert_close(first, x * 3, rtol=0, atol=2e-4)
        assert not torch.equal(first, x * 3)
        assert torch.equal(second, x * 2)


def test_a_steady_program_has_nothing_to_explain(device):
    program = make_program([(IN, N), (OUT, N)], [("0", "1")])
    with device.load(program, [lambda at: add(at, device, at.at[0], at.at[0], at.at[1])]) as run:
        assert "different bits" not in run.explain()
        assert torch.equal(result(run, on_device(torch.ones(N))), torch.full((N,), 2.0))


@pytest.mark.parametrize("size", [1e-6, 1e-3])
def test_a_wrong_address_in_a_noisy_kernel_is_refused(device, size):
    with pytest.raises(CaptureError, match="a different result at other addresses: output2"):
        device.load(*noisy_program(device, Noisy(device, size, keeps=True)))


def test_noise_that_hides_everything_is_refused(device):
    with pytest.raises(CaptureError, match=r"different bits of output.*differ too much"):
        device.load(*noisy_program(device, Noisy(device, 100.0)))
    with device.load(*noisy_program(device, Noisy(device, 100.0)), verify=False) as run:
        assert "different bits" not in run.explain()
