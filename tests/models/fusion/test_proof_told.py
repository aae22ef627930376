"""Reports of the proof that the first execution makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.api.captured import Captured
from offload.timeline import Scheduling


class Net(nn.Module):
    """A convolution has no out-variant; the other launches do."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 1)
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.linear(torch.relu(self.convolution(x))))


@pytest.fixture
def captured() -> Captured:
    with torch.no_grad():
        return offload.capture(Net().eval(), torch.randn(1, 1, 8))


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_the_first_execution_says_that_it_proved(captured: Captured, scheduling: str) -> None:
    with captured.load(scheduling=scheduling) as run:
        modes = [one.mode for one in run.launch_reports()]
        n_proved = modes.count("unproved")
        assert 0 < n_proved < len(modes)
        assert run.proof is None
        assert f"the first execution will prove {n_proved} launches" in run.explain()
        assert (run.last_execution.launches_proved, run.last_execution.proof_ns) == (0, 0)
        run(torch.randn(1, 1, 8))
        first, proof = run.last_execution, run.proof
        assert first.launches_proved == n_proved
        assert 0 < first.proof_ns <= first.device_ns
        assert f"proved {n_proved} launches" in str(first)
        assert proof is not None
        assert (proof.n_launches, proof.n_failed, proof.ns) == (n_proved, 0, first.proof_ns)
        run(torch.randn(1, 1, 8))
        later = run.last_execution
        assert (later.launches_proved, later.proof_ns) == (0, 0)
        assert "proved" not in str(later)
        assert run.proof == proof
        said = f"the first execution proved {n_proved} launches in {proof.ns / 1e6:.3f} ms; 0 of"
        assert said in run.explain()
        assert "will prove" not in run.explain()


def test_calls_of_the_captured_are_explained_likewise(captured: Captured) -> None:
    assert "the first execution will prove" in captured.explain()
    captured(torch.randn(1, 1, 8))
    assert "the first execution proved" in captured.explain()


def test_a_program_from_a_file_is_proved_anew(captured: Captured, tmp_path: Path) -> None:
    captured.save(tmp_path / "net.offload")
    with captured.load() as one, offload.open(tmp_path / "net.offload").load() as other:
        for run in (one, other):
            run(torch.randn(1, 1, 8))
        assert other.proof is not None
        assert other.proof.n_launches == one.proof.n_launches


def test_an_execution_that_fails_has_proved_nothing() -> None:
    def function(table: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.sigmoid(table)[row])

    with offload.capture(function, torch.ones(4), torch.tensor([1])).load() as run:
        n_unproved = [one.mode for one in run.launch_reports()].count("unproved")
        with pytest.raises(offload.ExecutionError):
            run(torch.ones(4), torch.tensor([9]))
        assert run.proof is None
        left = [one.mode for one in run.launch_reports()].count("unproved")
        assert left < n_unproved  # those before the failing one are proved
        assert f"the first execution will prove {left} launches" in run.explain()
        run(torch.ones(4), torch.tensor([3]))
        assert run.last_execution.launches_proved == left


def test_variants_that_fail_are_told() -> None:
    """binary_cross_entropy.out uses its one-element output as scratch of the inputs' size."""

    def loss(probability: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(probability, target) * 1

    given = torch.rand(64), torch.rand(64)
    with offload.capture(loss, *given).load() as run:
        run(*given)
        assert run.proof is not None
        assert (run.proof.n_launches, run.proof.n_failed) == (2, 1)
        assert "1 of them failed and run as recorded" in run.explain()
