"""`load(fuse="auto")`: regions become kernels where faster, and the decision is stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offload
from offload.compile import KernelCache
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.load import fusion_choice
from offload.timeline import Timeline

pytestmark = pytest.mark.slow

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> KernelCache:
    """A folder for the caches of one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return KernelCache()


@pytest.fixture
def n_timed(monkeypatch) -> list[int]:
    """The number of timed programs."""
    found: list[int] = []
    timed = fusion_choice._timed

    def counted(*args):
        found.append(1)
        return timed(*args)

    monkeypatch.setattr(fusion_choice, "_timed", counted)
    return found


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).eval()


def let_kernels_take(monkeypatch, times_ns: dict[str, float]) -> None:
    """Set durations of launches and kernels by name; all others take 10 ns."""

    def times(timeline: Timeline) -> dict[int, list[float]]:
        (first, *_) = timeline.executions
        return {
            span.launch: [next((ns for part, ns in times_ns.items() if part in span.name), 10.0)]
            for span in first.spans
            if span.launch is not None and span.launch >= 0
        }

    monkeypatch.setattr(fusion_choice, "launch_times_ns", times)


def let_calls_take(monkeypatch, recorded_ns: int, fused_ns: int) -> None:
    alternate = fusion_choice._alternate

    def taking(*runs):
        alternate(*runs)
        return [[fused_ns if one.fusion else recorded_ns] for one in runs]

    monkeypatch.setattr(fusion_choice, "_alternate", taking)


@torch.no_grad()
def test_it_is_near_eager_and_says_what_it_found(n_timed):
    net, x = model(), torch.randn(3, 8)
    run = offload.capture(net, x).load(fuse="auto")
    torch.testing.assert_close(run(x), net(x), rtol=1e-5, atol=1e-6)
    choice = run.fusion.choice
    assert choice.recorded_ns > 0
    assert choice.fused_ns > 0
    assert choice.n_threads == torch.get_num_threads()
    assert choice.explain() in run.explain()
    assert len(n_timed) == 1


@torch.no_grad()
def test_what_was_found_is_kept_for_as_many_threads(n_timed, monkeypatch):
    net, x = model(), torch.randn(3, 8)
    captured = offload.capture(net, x)
    first = captured.load(fuse="auto")
    second = offload.capture(model(), x).load(fuse="auto")
    assert second.fusion.choice == first.fusion.choice
    assert second.fusion.kept == first.fusion.kept
    assert len(n_timed) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert captured.load(fuse="auto").fusion.choice.n_threads == 7
    assert len(n_timed) == 2


@torch.no_grad()
def test_a_choice_that_is_damaged_is_made_again(n_timed, cache):
    captured = offload.capture(model(), torch.randn(3, 8))
    captured.load(fuse="auto")
    (path,) = cache.folder.glob("choice-*.json")
    for content in ("", "{}", '{"kept": 3}', path.read_text().replace("fused_ns", "other")):
        path.write_text(content)
        captured.load(fuse="auto")
        assert KernelCache().find_choice(path.stem) is not None
    assert len(n_timed) == 5


@torch.no_grad()
def test_slower_regions_stay_as_recorded(monkeypatch):
    net, x = model(), torch.randn(3, 8)
    captured = offload.capture(net, x)
    let_kernels_take(monkeypatch, {"native_layer_norm)": 5000.0})
    let_calls_take(monkeypatch, 3000, 2000)
    run = captured.load(fuse="auto")
    assert [count for (name, _), count in run.fusion.kept.items()] == [1]
    assert "aten::native_layer_norm as recorded: 0.0 us as recorded, 5.0 us as kernels" in (
        run.explain()
    )
    assert run.fusion.n_replaced == len(captured.program.launches) - 1
    torch.testing.assert_close(run(x), net(x), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_all_stays_where_whole_calls_are_no_quicker(monkeypatch):
    net, x = model(), torch.randn(3, 8)
    let_kernels_take(monkeypatch, {})
    let_calls_take(monkeypatch, 2000, 3000)
    run = offload.capture(net, x).load(fuse="auto")
    assert run.fusion.n_kernels == 0
    assert {why for _, why in run.fusion.kept} == {"whole calls are no quicker with kernels"}
    assert torch.equal(run(x), net(x))


@torch.no_grad()
def test_kernels_that_fail_their_proof_stay_as_recorded(monkeypatch):
    net, x = model(), torch.randn(3, 8)
    monkeypatch.setattr("offload.compile.proof._difference", lambda *_: "is wrong")
    run = offload.capture(net, x).load(fuse="auto")
    monkeypatch.undo()
    assert run.fusion.n_kernels == 0
    assert all("failed its proof on made-up inputs: result 0 is wrong" in why
               for _, why in run.fusion.kept)  # fmt: skip
    assert torch.equal(run(x), net(x))


class Counting(nn.Module):
    """Has its own state, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (x * 2).exp() + self.count + torch.rand(4)


@torch.no_grad()
def test_state_and_random_numbers_are_as_before():
    net, x = Counting(), torch.randn(3, 4)
    captured = offload.capture(net, x)
    count, state = net.count.clone(), torch.get_rng_state()
    run = captured.load(fuse="auto")
    assert run.fusion.choice.fused_ns > 0
    assert torch.equal(net.count, count)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.allclose(run(x), (x * 2).exp() + count + 1 + torch.rand(4).mul(0), atol=1.0)
    assert torch.equal(net.count, count + 1)


@torch.no_grad()
def test_what_refuses_made_up_inputs_stays_and_is_not_kept(n_timed, cache):
    def guarded(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp() if x.sum() == 10.5 else x

    x = torch.tensor([4.0, 6.5] * 2**19)  # longer than its stored part
    x[2:] = 0
    with offload.capture(guarded, host_reads="guard") as captured:
        captured(x)
    run = captured.load(fuse="auto")
    assert torch.equal(run(x), guarded(x))
    assert len(n_timed) == 1
    assert run.fusion.n_kernels == 0
    assert "fuse='auto' leaves all as recorded: it could not be timed" in run.explain()
    assert not list(cache.folder.glob("choice-*.json"))


@torch.no_grad()
def test_weights_in_memory_of_an_executables_own_are_refused(tmp_path):
    captured = offload.capture(model(), torch.randn(3, 8))
    with pytest.raises(offload.BindingError, match="give fuse=True or fuse=False"):
        captured.load(fuse="auto", weights_budget="1MiB")
    with pytest.raises(offload.BindingError, match="True, False or 'auto'"):
        captured.load(fuse="always")
    with pytest.raises(offload.BackendUnavailable, match="no compiled kernels"):
        captured.load("null", fuse="auto")
