"""One resident for all sizes: numbers, constants, buckets, results and counts."""

import contextlib
import random
import threading

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from offload.backends import CpuBackend
from offload.backends.dispatched import DispatchBackend

N = Dim("n", min=0, max=4096)


# Two residents: one places results of launches, the other leaves that to operators, as on devices.
on_both = pytest.mark.parametrize(
    "device",
    [None, DispatchBackend("dispatched", CpuBackend().machine, "cpu")],
    ids=["placed", "dispatched"],
)


def load(function, *args, shapes=({0: N},), device=None, **sizes):
    with torch.no_grad():
        captured = offload.capture(function, *args, dynamic_shapes=shapes)
    return captured.load(device, sizes=offload.Sizes(**sizes))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype and one.shape == other.shape
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def positions(x):
    n = x.shape[0]
    mask = torch.full((n, n), float("-inf")).triu(1)
    return (x @ x.T + mask).softmax(-1) @ x + torch.arange(n).unsqueeze(1)


def returned_constants(x):
    n = x.shape[0]
    whole, part, fixed = torch.ones(n, 1) * n, torch.arange(n).unsqueeze(1), torch.ones(1, 4)
    return whole, part[1:], (whole * 2).exp() * x, part + fixed * 2 + x, fixed, fixed * n + x


def written_constants(x):
    ends = torch.ones(x.shape[0], 1)
    begun = ends * 2
    ends.add_(x[:, :1])
    ordered, order = torch.arange(x.shape[0]).flip(0).sort()
    return ends * begun, order, x[:, 0] + ordered * 2, begun.neg() - x


FUNCTIONS = {
    "constants": positions,
    "returned constants": returned_constants,
    "written constants": written_constants,
    "scalars": lambda x: x * x.shape[0] + x.shape[0] ** -0.5,
    "lists": lambda x: x.reshape(x.shape[0] * 2, -1).sum(0) / (x.shape[0] + 1),
    "pieces": lambda x: torch.cat([x[: x.shape[0] // 2].exp(), x[x.shape[0] // 2 :].sin()]),
    "offsets": lambda x: x[x.shape[0] // 3 :].clone().add_(1),
    "made by operators": lambda x: torch.sort(x, 0),
    "in place": lambda x: x.clone().mul_(2).t().relu_(),
    "input views": lambda x: (x[1:], x, x.t()),
    "integers": lambda x: (x + 1, x.shape[0], [2 * x.shape[0]]),
    "constant results": lambda x: (torch.arange(x.shape[0]), x + 1),
    "filled": lambda x: torch.full_like(x, x.shape[0]) + torch.ones(x.shape[0], 1),
    "padded": lambda x: nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 8)).view(-1, 8, 4).sum(0),
    "convolved": lambda x: nn.functional.conv1d(x.t().unsqueeze(0), torch.ones(2, 4, 3), padding=1),
    "random": lambda x: torch.rand(x.shape[0]) + x[:, 0],
}


@pytest.mark.slow
@on_both
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_size_gives_eagers_bits(name, device):
    function = FUNCTIONS[name]
    run = load(function, torch.randn(24, 4), device=device)
    n_seen = 0
    for size in (24, 9, 64, 5, 200, 24, 6, 65, 64, 500, 9, 3, 2, 1, 0):
        x = torch.randn(size, 4)
        torch.manual_seed(size)
        try:
            expected = function(x)
        except (RuntimeError, ArithmeticError):
            with pytest.raises(offload.OffloadError):
                run(x)
            continue
        torch.manual_seed(size)
        if size < 4:  # torch and users of parts may have guards
            with contextlib.suppress(offload.BindingError):
                assert same(run(x), expected)
                n_seen += 1
            continue
        assert same(run(x), expected), size
        n_seen += 1
    assert run.last_execution.n_executions == n_seen


@on_both
def test_an_integer_argument_is_a_size(device):
    def step(x, n, scale):
        return x[:n] * scale, n

    shapes = {"x": None, "n": N, "scale": None}
    run = load(step, torch.randn(64), 9, 2.0, shapes=shapes, device=device)
    x = torch.randn(64)
    for n in (9, 20, 64):
        assert same(run(x, n, 2.0), step(x, n, 2.0))
        assert same(run(x, n=n, scale=2.0), step(x, n, 2.0))
    assert run.instances.sizes == (("n", 64),)
    with pytest.raises(offload.BindingError, match="n: expected an integer, which is n, got a flo"):
        run(x, 3.0, 2.0)
    with pytest.raises(offload.BindingError, match=r"got a tensor of shape \[\]"):
        run(x, torch.tensor(3), 2.0)
    with pytest.raises(offload.BindingError, match=r"recorded with 2\.0, got 3\.0"):
        run(x, 9, 3.0)
    with pytest.raises(offload.BindingError, match="capture with a wider Dim"):
        run(x, 2**70, 2.0)


@pytest.mark.parametrize("size", [2**62 + 1, 2**63 - 1, 2**70])
def test_no_size_is_larger_than_a_tensor_can_be(size):
    shapes = {"x": None, "n": Dim("n")}
    run = load(lambda x, n: x + n % 7, torch.randn(64), 9, shapes=shapes)
    with pytest.raises(offload.BindingError, match=f"n: expected at most {2**62}, got {size}"):
        run(torch.randn(64), size)
    x = torch.randn(64)
    assert torch.equal(run(x, 2**62), x + 2**62 % 7)


def test_places_of_one_choice_of_sizes_alone_are_counted_and_stay_proved():
    """From n = 769 on, up to the maximum, no places hold for all of the bucket."""
    part = Dim("n", min=0, max=1000)
    run = load(
        lambda x, n: ((x[n:] * 2).exp() + 1).sum(),
        torch.randn(1000),
        9,
        shapes={"x": None, "n": part},
    )
    x = torch.randn(1000)
    counted, proved = [], []
    for n in (10, 800, 801, 10, 800):
        before = run.instances.kept_bytes
        assert torch.equal(run(x, n), ((x[n:] * 2).exp() + 1).sum())
        counted.append(run.instances.kept_bytes - before)
        proved.append(run.last_execution.launches_proved > 0)
    assert run.instances.buckets == 3
    assert proved == [True, True, True, False, False]
    assert counted[1] >= counted[0] + 16 * len(run.program.values)
    assert counted[3:] == [0, 0]


def test_two_tensors_that_tell_one_size_must_agree():
    run = load(
        lambda one, other: one @ other.t(),
        torch.randn(5, 3),
        torch.randn(3, 5).t(),
        shapes=(
            {0: N},
            {0: N},
        ),
    )
    assert run(torch.randn(7, 3), torch.randn(7, 3).t().contiguous().t()).shape == (7, 7)
    with pytest.raises(offload.BindingError, match="expected the same, as both are n"):
        run(torch.randn(7, 3), torch.randn(6, 3))
    with pytest.raises(offload.BindingError, match=r"expected float32\[7, 3\], got float32\[7\]"):
        run(torch.randn(7), torch.randn(7, 3))


@on_both
def test_what_follows_from_sizes_is_computed_once_for_each(device):
    run = load(positions, torch.randn(24, 4), device=device)
    assert len(run.program.launches) < 8  # without those that make the mask and the positions
    assert not any("arange" in one.name or "triu" in one.name for one in run.program.launches)
    first = run(torch.randn(30, 4))
    kept = run.instances.kept_bytes
    run(torch.randn(31, 4))
    assert run.instances.kept_bytes - kept >= 31 * 31 * 4 + 31 * 8
    assert first.shape == (30, 4)


def test_sizes_of_one_bucket_share_places_and_proofs():
    run = load(lambda x: (x * 2).exp().sum(1).sqrt() + 1, torch.randn(24, 4))
    proved = []
    for size in (17, 24, 20, 33, 48, 40, 24):
        run(torch.randn(size, 4))
        proved.append(run.last_execution.launches_proved)
    assert run.instances.buckets == 2
    assert [one > 0 for one in proved] == [True, False, False, True, False, False, False]


def test_the_memory_is_that_of_the_largest_sizes_so_far():
    run = load(lambda x: (x * 2).exp().sum(1), torch.randn(24, 4))
    assert run.memory_report().feature_map_bytes == run.plan.feature_map_bytes
    run(torch.randn(500, 4))
    largest = run.memory_report().feature_map_bytes
    run(torch.randn(9, 4))
    assert run.memory_report().feature_map_bytes == largest >= 500 * 4 * 4
    assert f"feature map {largest} bytes" in run.explain()


def test_buckets_end_where_they_are_said_to():
    run = load(lambda x: (x * 2).exp().sum(1), torch.randn(24, 4), buckets={"n": [100, 1000]})
    for size in (24, 99, 100, 3):
        run(torch.randn(size, 4))
    assert run.instances.buckets == 1
    run(torch.randn(101, 4))
    assert run.instances.buckets == 2
    assert run.feature_map_bytes_at({"n": 5}) == run.feature_map_bytes_at({"n": 100})
    with pytest.raises(offload.BindingError, match=r"run\.feature_map_bytes_at\(sizes\) of them"):
        run(torch.randn(999, 4), feature_map=torch.empty(64, dtype=torch.uint8))
    with pytest.raises(
        offload.BindingError, match=r"expected float32\[9\], got float32\[8\]; only"
    ):
        run(torch.randn(9, 4), out=torch.empty(8))
    for wrong, match in [({"m": [4]}, "is not a Dim"), ({"n": [-1]}, "whole numbers")]:
        with pytest.raises(offload.BindingError, match=match):
            load(lambda x: x * 2, torch.randn(24, 4), buckets=wrong)


def test_an_execution_says_what_became_of_its_sizes():
    run = load(lambda x: (x * 2).exp(), torch.randn(24, 4))
    run(torch.randn(9, 4))
    last = run.last_execution
    assert (last.sizes_were_ready, last.prepare_sizes_ns > 0, last.resize_ns > 0) == (
        False,
        True,
        True,
    )
    assert "sizes new, prepared in" in str(last)
    run(torch.randn(9, 4))
    last = run.last_execution
    assert (last.sizes_were_ready, last.prepare_sizes_ns, last.resize_ns) == (True, 0, 0)
    assert "sizes ready, kept" in str(last)
    run(torch.randn(8, 4))
    run(torch.randn(9, 4))
    assert run.last_execution.sizes_were_ready
    assert "sizes ready, resized in" in str(run.last_execution)


@on_both
def test_results_of_other_sizes_stay_as_they_are(device):
    run = load(lambda x: (x * 2).exp(), torch.randn(24, 4), device=device)
    inputs = [torch.randn(size, 4) for size in (9, 200, 5)]
    results = [run(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result, (x * 2).exp())


def test_host_scheduling_takes_other_sizes_too():
    with torch.no_grad():
        captured = offload.capture(positions, torch.randn(24, 4), dynamic_shapes=({0: N},))
    run = captured.load(sizes=offload.Sizes(), scheduling="host")
    for size in (9, 40, 9):
        x = torch.randn(size, 4)
        assert torch.equal(run(x), positions(x))


@on_both
def test_a_launch_that_fails_leaves_other_sizes_right(device):
    table = torch.randn(30, 4)

    def pick(x):
        return table[(x[:, 0] * 0 + x.shape[0]).long()] + x

    run = load(pick, torch.randn(24, 4), device=device)
    with pytest.raises(offload.ExecutionError, match="index"):
        run(torch.randn(40, 4))
    for size in (9, 24):
        x = torch.randn(size, 4)
        assert torch.equal(run(x), pick(x))


HOLD = threading.Event()


@torch.library.custom_op("resizing::held", mutates_args=())
def held(x: torch.Tensor) -> torch.Tensor:
    """Waits within a launch."""
    assert HOLD.wait(60)
    return x.clone()


@held.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_tickets_numbers_are_ready_before_the_executions_ahead_of_it_end():
    """The submitting thread computes them, while the lane executes."""
    HOLD.set()
    run = load(lambda x: held(x) * x.shape[0], torch.randn(24, 4))
    inputs = [torch.randn(size, 4) for size in (9, 40, 100)]
    HOLD.clear()
    try:
        tickets = [run.submit(x) for x in inputs]
        assert (run.instances.misses, run.instances.buckets) == (3, 3)
        assert not any(ticket.done() for ticket in tickets)
    finally:
        HOLD.set()
    for x, ticket in zip(inputs, tickets, strict=True):
        assert torch.equal(ticket.result(), x * x.shape[0])


@on_both
def test_threads_and_tickets_of_many_sizes(device):
    run = load(positions, torch.randn(24, 4), device=device, instances="64KiB")
    wrong = []

    def work(seed):
        choose = random.Random(seed)
        for _ in range(60):
            x = torch.randn(choose.randint(2, 90), 4)
            got = run(x) if choose.random() < 0.5 else run.submit(x).result()
            if not torch.equal(got, positions(x)):
                wrong.append(x.shape)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert run.last_execution.n_executions == 240
    assert run.instances.evicted > 0
