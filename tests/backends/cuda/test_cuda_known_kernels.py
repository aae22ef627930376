"""Programs of kernels known from proved graphs: one capture instead of four."""

from __future__ import annotations

import os
import struct

import pytest
import torch

import offload

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")

from loading import ACT, IN, OUT, Device, on_device
from small_graphs import StepCapturer, floats, make_program, words

from offload.backends.cuda import OwnedRange
from offload.backends.cuda import backend as cuda_backend

SIZES = range(8, 8 + 32)


@pytest.fixture
def device(simulator, monkeypatch):
    """The simulator, without known kernels."""
    return Kernels(simulator, monkeypatch)


class Kernels(Device):
    """Kernels that get the number of elements."""

    def __init__(self, simulator, monkeypatch) -> None:
        super().__init__(simulator, monkeypatch)
        self.read_secret = False
        sizes = [8, 8, 8, 24]
        self.scale_n = simulator.kernel("scale_n", sizes, self._scale)
        self.other_n = simulator.kernel("other_n", sizes, self._scale)

    def _scale(self, block: bytes) -> None:
        source, target, n, factor = struct.unpack_from("<QQqf", block)
        secret = struct.unpack_from("<Q", block, 32)[0]
        if self.read_secret and secret:
            source = secret
        for index in range(n):
            floats(target, n)[index] = floats(source, n)[index] * factor


def arguments(source, target, n, factor, second=0, third=None):
    """Three words, and a structure whose last part is padding."""
    tail = os.urandom(8) if third is None else words(third)
    return (
        words(source),
        words(target),
        words(n),
        struct.pack("<f4x", factor) + words(second) + tail,
    )


def program(device, n, kernel=None, activation_items=1, **options):
    """out = (x * 2) * 3 on n numbers; the activation has spare room."""
    kernel = kernel or device.scale_n
    made = make_program([(IN, n), (ACT, n * activation_items), (OUT, n)], [("0", "1"), ("1", "2")])
    steps = [
        lambda at: at.launch(kernel, *arguments(at.at[0], at.at[1], n, 2.0, **options)),
        lambda at: at.launch(kernel, *arguments(at.at[1], at.at[2], n, 3.0, **options)),
    ]
    return made, steps


def result(run, x):
    (y,) = run(x, out=(on_device(torch.zeros(x.numel())),))
    run._loaded.resident.finish()
    return y


def check(run, n):
    for seed in range(2):
        torch.manual_seed(seed)
        x = on_device(torch.randn(n))
        assert torch.equal(result(run, x), x * 2 * 3)


def load(device, n, **options):
    """Load for n numbers; return how many captures that took."""
    made, steps = program(device, n, **options)
    capturer = StepCapturer(steps)
    run = device.load(made, steps, capturer)
    return run, capturer.n_captures


def test_many_sizes_take_one_capture_each_and_one_arena(device):
    """For 32 sizes: 4 + 31 captures, where each alone takes 4."""
    counts, runs = [], []
    for n in SIZES:
        run, n_captures = load(device, n)
        counts.append(n_captures)
        runs.append(run)
    assert counts == [4] + [1] * 31
    for run, n in zip(runs, SIZES, strict=True):
        check(run, n)
        assert ("one capture was enough" in run.explain()) == (n != SIZES[0])
    for run in runs:
        run.close()


def test_what_nobody_proves_is_found_by_comparing_captures(device):
    """A separate capture shows that all kernels are known."""
    load(device, 8)[0].close()
    made, steps = program(device, 9)
    capturer = StepCapturer(steps)
    with device.load(made, steps, capturer, verify=False) as run:
        assert capturer.n_captures == 5
        assert "one capture was enough" not in run.explain()
        check(run, 9)


def test_many_sizes_take_the_memory_of_the_largest(device, simulator, small_granules):
    """All open at once: at most 1.1 times the memory of the largest alone."""
    options = {"activation_items": 4096}
    largest, _ = load(device, SIZES[-1], **options)
    alone = simulator.physical_bytes
    runs = [load(device, n, **options)[0] for n in SIZES]
    assert simulator.physical_bytes <= 1.1 * alone
    assert sum(run.feature_map_bytes for run in runs) > 15 * largest.feature_map_bytes
    for run, n in zip(runs, SIZES, strict=True):
        check(run, n)


def test_a_kernel_that_is_not_known_has_all_captures_made(device):
    load(device, 16)[0].close()
    run, n_captures = load(device, 24, kernel=device.other_n)
    assert n_captures == 1 + 4
    check(run, 24)
    assert "one capture was enough" not in run.explain()


def test_what_was_not_proved_teaches_nothing(device):
    made, steps = program(device, 16)
    device.load(made, steps, verify=False).close()
    assert not cuda_backend._known.get(0)
    assert load(device, 24)[1] == 4


def test_an_address_where_none_was_has_all_captures_made(device):
    """In a parameter that was 0 before."""
    load(device, 16)[0].close()
    n = 24
    made = make_program([(IN, n), (ACT, n), (OUT, n)], [("0", "1"), ("01", "2")])
    steps = [
        lambda at: at.launch(device.scale_n, *arguments(at.at[0], at.at[1], n, 2.0)),
        lambda at: at.launch(
            device.scale_n, *arguments(at.at[1], at.at[2], n, 3.0, second=at.at[0])
        ),
    ]
    capturer = StepCapturer(steps)
    run = device.load(made, steps, capturer)
    assert capturer.n_captures == 1 + 4
    check(run, n)
    # From here on the address is known there, and may be absent.
    assert load(device, 40)[1] == 1


def test_an_address_in_what_nobody_wrote_before_is_followed(device):
    """As of a table with an empty end: readers find the right address."""
    load(device, 16)[0].close()
    device.read_secret = True
    n = 24
    made = make_program([(IN, n), (ACT, n), (OUT, n)], [("0", "1"), ("1", "2")])

    def step(source, target, factor):
        return lambda at: at.launch(
            device.scale_n,
            *(words(at.at[source]), words(at.at[target]), words(n)),
            struct.pack("<f4x", factor) + words(0) + words(at.at[source]),
        )

    capturer = StepCapturer([step(0, 1, 2.0), step(1, 2, 3.0)])
    run = device.load(made, capturer.steps, capturer)
    assert capturer.n_captures == 1
    check(run, n)


def test_half_an_address_is_never_known(device):
    def half(at, n, number):
        """The lower half of an address behind the whole one."""
        return at.launch(
            device.scale_n,
            *(words(at.at[number]), words(at.at[number + 1]), words(n)),
            struct.pack("<fI", 2.0, at.at[number] & 0xFFFF_FFFF) + words(0) + words(0),
        )

    for n in (16, 24):
        made = make_program([(IN, n), (OUT, n)], [("0", "1")])
        steps = [lambda at, n=n: half(at, n, 0)]
        capturer = StepCapturer(steps)
        run = device.load(made, steps, capturer)
        x = on_device(torch.randn(n))
        assert torch.equal(result(run, x), x * 2)
        assert capturer.n_captures == 4  # nothing is known, so nothing is tried
        run.close()


@pytest.mark.parametrize("is_owned", [True, False])
def test_addresses_of_owners_are_known_by_their_place(device, is_owned):
    """An address where a number was before is not inferred from them."""
    table = on_device(torch.ones(4)).data_ptr()
    owner = [OwnedRange(table, 16, "a table")]

    def loaded(n, second):
        made, steps = program(device, n, second=second)
        capturer = StepCapturer(steps, owner)
        return device.load(made, steps, capturer), capturer.n_captures

    run, _ = loaded(16, table if is_owned else 0)
    run.close()
    run, n_captures = loaded(24, table)
    assert n_captures == (1 if is_owned else 5)
    check(run, 24)


def test_a_proof_that_fails_has_all_captures_made(device, monkeypatch):
    """Where the knowledge of a kernel does not hold, the load continues without it."""
    load(device, 16)[0].close()
    (known,) = cuda_backend._known.values()
    (of_kernel,) = known._kernels.values()
    of_kernel.addresses.discard(8)  # where results go
    of_kernel.unread.update(range(8, 16))
    discovery_of = type(known).discovery_of

    def forgetful(self, *given):
        found = discovery_of(self, *given)
        words = tuple(one for one in found.words if one.offset_bytes != 8)
        return type(found)(words, (), found.constants, found.scratch_bytes)

    monkeypatch.setattr(type(known), "discovery_of", forgetful)
    made, steps = program(device, 24)
    capturer = StepCapturer(steps)
    run = device.load(made, steps, capturer)
    assert capturer.n_captures == 1 + 4
    check(run, 24)
    assert "one capture was enough" not in run.explain()


def test_copies_and_memsets_need_no_knowledge(device):
    """All their operands are addresses."""
    load(device, 16)[0].close()
    n = 24
    made = make_program([(IN, n), (ACT, n), (OUT, n)], [("0", "1"), ("1", "2")])

    def copy(at):
        from offload.backends.cuda.graph import call

        call("cuMemcpyDtoDAsync", at.at[1], at.at[0], 4 * n, at.stream)

    steps = [
        copy,
        lambda at: at.launch(device.scale_n, *arguments(at.at[1], at.at[2], n, 6.0)),
    ]
    capturer = StepCapturer(steps)
    run = device.load(made, steps, capturer)
    assert capturer.n_captures == 1
    check(run, n)


def test_a_model_that_is_loaded_again_gives_the_same_bits(backend):
    """With weights. Each kernel of the capturer belongs to one program."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).eval()
    captured = offload.capture(model, torch.randn(4, 8))
    with captured.load(device="cuda-simulated") as first:
        assert "one capture was enough" not in first.explain()
    with captured.load(device="cuda-simulated") as again:
        assert "one capture was enough" in again.explain()
        x = torch.randn(4, 8)
        with torch.no_grad():
            torch.testing.assert_close(again(x), model(x))
