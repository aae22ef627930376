"""Fused models: near eager, at moved addresses, with changing weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fused_blocks import block, modes, near
from kernel_sources import needs_compiler
from torch import nn
from torch.nn import functional

import offload

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def captured():
    model, x = block()
    with torch.no_grad():
        return model, x, offload.capture(model, x)


@torch.no_grad()
def test_a_fused_model_is_near_eager(captured):
    model, x, recorded = captured
    run = recorded.load(fuse=True)
    assert modes(run) == {"unproved"}
    near(run(x), model(x))
    assert modes(run) == {"kernel"}
    for _ in range(3):
        other = torch.randn_like(x)
        near(run(other), model(other))
    assert run.fusion is not None
    assert run.fusion.n_replaced == len(recorded.program.launches)
    n_packed = len(run.fusion.packed_bytes)
    assert run.fusion.n_kernels + n_packed == len(run.program.launches)
    assert run.fusion.n_kernels < run.fusion.n_replaced
    assert run.proof is not None
    assert (run.proof.n_launches, run.proof.n_failed) == (len(run.program.launches), 0)
    assert "compiled code, proved" in run.explain()


@torch.no_grad()
def test_without_it_the_bits_are_eagers(captured):
    model, x, recorded = captured
    run = recorded.load()
    assert torch.equal(run(x), model(x))
    assert run.fusion is None


@torch.no_grad()
def test_addresses_may_be_new_at_every_execution(captured):
    model, x, recorded = captured
    run = recorded.load(fuse=True)
    run(x)
    out, other = torch.empty_like(x), x.clone()
    for turn in range(4):
        around = torch.full((run.feature_map_bytes + 64 * turn,), 255, dtype=torch.uint8)
        place = around[64 * turn :]
        result = run(other, out=out, feature_map=place)
        near(result, model(x))
        assert run.last_execution.words_patched <= 3
        assert run.last_execution.bytes_copied == 0
        assert bool((around[: 64 * turn] == 255).all())
        out, other = torch.empty_like(x), x.clone()


@torch.no_grad()
def test_a_misaligned_input_is_read_where_it_is(captured):
    model, x, recorded = captured
    run = recorded.load(fuse=True)
    for offset in (1, 3):
        moved = torch.empty(x.numel() + 4)[offset : offset + x.numel()].view(x.shape).copy_(x)
        near(run(moved), model(x))
        assert run.last_execution.bytes_copied == 0


@torch.no_grad()
def test_weights_are_read_where_they_are():
    model, x = block()
    run = offload.capture(model, x).load(fuse=True)
    near(run(x), model(x))
    model.up.weight.mul_(1.5)
    model.norm.bias.add_(0.25)
    near(run(x), model(x))
    model.out.weight.data = torch.randn(24, 24)
    with pytest.raises(offload.BindingError, match="rebind_weights"):
        run(x)
    run.rebind_weights()
    near(run(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("budget", ["12KiB", "1MiB"])
def test_weights_may_be_streamed_to_kernels(captured, budget):
    model, x, recorded = captured
    with recorded.load(fuse=True, weights_budget=budget) as run:
        for _ in range(3):
            near(run(x), model(x))
        assert run.fusion is not None
        assert "kernel" in modes(run)


@torch.no_grad()
def test_a_table_under_a_budget_is_still_gathered():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2000, 16), nn.LayerNorm(16), nn.Linear(16, 16)).eval()
    ids = torch.tensor([[3, 5, 1999]])
    recorded = offload.capture(model, ids)
    with recorded.load(fuse=True, weights_budget="16KiB") as run:
        near(run(ids), model(ids))
        assert modes(run) == {"gathered", "kernel"}


@torch.no_grad()
def test_an_index_out_of_range_is_an_error_as_in_eager():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.LayerNorm(16)).eval()
    run = offload.capture(model, torch.tensor([3, 5])).load(fuse=True)
    wrong = torch.tensor([3, 20])
    with pytest.raises(offload.ExecutionError, match="index out of range"):
        run(wrong)
    right = torch.tensor([19, 0])
    near(run(right), model(right))
    with pytest.raises(
        offload.ExecutionError, match=r"index out of bounds for a dimension of size \d+$"
    ):
        run(wrong)
    near(run(right), model(right))


class Deep(nn.Module):
    """More steps per element than a processor's lookahead, with truth values between them."""

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for x in inputs:
            y = x
            for step in range(16):
                y = torch.where(x > 0.1 * step, (y * 1.5).sigmoid() - 0.3, (y - x).tanh() + x)
            results.append(y)
        return results


@torch.no_grad()
def test_deep_loops_of_any_size_and_dtype():
    torch.manual_seed(0)
    sizes = ((15,), (48,), (64,), (5, 7, 128))
    inputs = [torch.randn(size) for size in sizes]
    inputs += [torch.randn(64).to(dtype) for dtype in (torch.float64, torch.bfloat16)]
    run = offload.capture(Deep(), *inputs).load(fuse=True)
    for got, expected in zip(run(*inputs), Deep()(*inputs), strict=True):
        tolerance = 4 * torch.finfo(expected.dtype).eps
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert not [one.failure for one in run.fusion.proofs if one.failure]


@torch.no_grad()
def test_launch_by_launch_by_the_host(captured):
    model, x, recorded = captured
    run = recorded.load(fuse=True, scheduling="host")
    for _ in range(2):
        near(run(x), model(x))


@torch.no_grad()
def test_in_place_writes_and_random_numbers_stay_as_recorded():
    def forward(x, state):
        state.add_(1)
        return functional.dropout(x.relu().exp(), 0.5) + state

    x, state = torch.randn(8), torch.zeros(8)
    recorded = offload.capture(forward, x, state.clone())
    run = recorded.load(fuse=True)
    torch.manual_seed(5)
    expected_state = state.clone()
    expected = forward(x, expected_state)
    torch.manual_seed(5)
    got = run(x, state)
    near(got, expected)
    assert torch.equal(state, expected_state)
    assert run.fusion is not None
    reasons = {reason for _, reason in run.fusion.kept}
    assert {"writes its arguments", "draws random numbers"} <= reasons


@torch.no_grad()
def test_what_fails_its_proof_runs_as_recorded(captured, monkeypatch):
    model, x, recorded = captured
    monkeypatch.setattr("offload.compile.proof.ERROR_RATIO", -1.0)
    monkeypatch.setattr("offload.compile.proof.ROUNDINGS", -1.0)
    run = recorded.load(fuse=True)
    for _ in range(2):
        assert torch.equal(run(x), model(x))
    assert run.fusion is not None
    assert run.proof is not None
    reports = Counter(report.mode for report in run.launch_reports())
    assert reports.keys() == {"replaced", "kernel"}
    assert reports["replaced"] == run.proof.n_failed > 0
    # A kernel with the same bits needs no tolerance, as one that packs weights.
    assert reports["kernel"] >= len(run.fusion.packed_bytes) > 0
    assert "failed its proof: result 0" in run.explain()


@torch.no_grad()
def test_what_has_no_reference_in_float64_is_compared_with_the_launches():
    """Divided integers give the default dtype, also in a wide program."""
    count = torch.arange(8)
    run = offload.capture(lambda n: (n / 3).exp() + 1, count).load(fuse=True)
    near(run(count), (count / 3).exp() + 1)
    assert modes(run) == {"kernel"}


@torch.no_grad()
def test_the_first_execution_may_be_submitted(captured):
    model, x, recorded = captured
    run = recorded.load(fuse=True)
    near(run.submit(x).result(), model(x))
    assert modes(run) == {"kernel"}


@torch.no_grad()
def test_nothing_of_it_is_saved(captured, tmp_path):
    model, x, recorded = captured
    recorded.load(fuse=True)(x)
    recorded.save(tmp_path / "model.offload")
    opened = offload.open(tmp_path / "model.offload")
    assert str(opened.program) == str(recorded.program)
    near(opened.load(fuse=True)(x), model(x))


@pytest.mark.parametrize("given", ["yes", 1, None, 0])
def test_fuse_is_true_or_false(captured, given):
    with pytest.raises(offload.BindingError, match="fuse: expected True, False or 'auto', got"):
        captured[2].load(fuse=given)


def test_other_devices_refuse(captured):
    with pytest.raises(offload.BackendUnavailable, match="runs no compiled kernels"):
        captured[2].load(device="null", fuse=True)


@torch.no_grad()
def test_timelines_name_kernels_by_what_they_replace(captured):
    _, x, recorded = captured
    run = recorded.load(fuse=True)
    run(x)
    with run.timeline(executions=1) as timeline:
        run(x)
    names = {span.name for span in timeline.executions[0].spans}
    assert "offload::fused(addmm, gelu)" in names
