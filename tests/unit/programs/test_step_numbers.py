"""Numbers that optimizers compute from step counters: as Python computes them, in tensors."""

from __future__ import annotations

import sys

import pytest
import torch

from offload.errors import CaptureError
from offload.record.step_numbers import StepNumbers


def adam(numbers: StepNumbers, counter: torch.Tensor, lr: float, beta: float) -> torch.Tensor:
    """Torch's Adam on a counter, with each call of a torch function as a mode sees it."""
    step = numbers._of(counter)
    power = numbers.call("__rpow__", (step, beta), {})
    correction = numbers.call("__rsub__", (power, 1), {})
    size = numbers.call("__rtruediv__", (correction, lr), {})
    return numbers.call("neg", (size,), {})


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.9, 0.99, 0.999])
def test_as_python_computes_them(beta):
    """In float64 `pow` may differ in the last place; scaling factors are float32."""
    counter = torch.zeros(())
    numbers = StepNumbers([counter])
    n_other = 0
    for _ in range(2000):
        counter += 1
        expected = -(1e-3 / (1 - beta ** counter.item()))
        got = adam(numbers, counter, 1e-3, beta)
        assert got.dtype == torch.float64
        assert got.item() == pytest.approx(expected, rel=1e-12)
        n_other += int(got.float().item() != torch.tensor(expected).item())
    assert n_other == 0


def test_what_concerns_no_number_is_left_alone():
    counter, other = torch.ones(()), torch.ones(3)
    numbers = StepNumbers([counter])
    assert numbers.call("item", (counter,), {}) is NotImplemented  # no optimizer calls this
    assert numbers.call("mul", (other, 2.0), {}) is NotImplemented
    step = numbers._of(counter)
    assert numbers._of(counter) is step
    counter += 1
    assert numbers._of(counter) is not step


def test_a_number_beside_a_tensor_leaves_its_dtype():
    counter = torch.full((), 3.0)
    numbers = StepNumbers([counter])
    for tensor in (torch.ones(2), torch.ones(()), torch.ones((), dtype=torch.bfloat16)):
        step = numbers._of(counter)
        scaled = numbers.call("div", (tensor, step), {})
        assert torch.equal(scaled, tensor / 3.0)
        assert scaled.dtype == tensor.dtype


def test_what_takes_numbers_alone():
    counter = torch.full((), 3.0)
    numbers = StepNumbers([counter])
    step = numbers._of(counter)
    first, second = torch.randn(5), torch.rand(5) + 1
    got, expected = torch.ones(5), torch.ones(5)
    assert numbers.call("addcdiv_", (got, first, second), {"value": step}) is got
    assert torch.equal(got, expected.addcdiv_(first, second, value=3.0))
    with numbers.followed():
        stack = vars(sys.modules["torch.optim.adam"])["_stack_if_compiling"]
        assert stack([step, step]).tolist() == [3.0, 3.0]
        assert stack([1.0]) == [1.0]


@pytest.mark.parametrize("name", ["gt", "__float__", "lerp_", "_foreach_mul"])
def test_whatever_else_is_refused(name):
    counter = torch.ones(())
    numbers = StepNumbers([counter])
    with pytest.raises(
        CaptureError, match=f"computes {name} from a step counter.*leave its step out"
    ):
        numbers.call(name, (numbers._of(counter), 5.0), {})


def test_what_counters_share_is_computed_once():
    counters = [torch.full((), 2.0) for _ in range(3)]
    numbers = StepNumbers(counters, lambda one: "alike" if one is not counters[2] else None)
    first, second, other = (adam(numbers, one, 1e-3, 0.9) for one in counters)
    assert first is second
    assert first is not other
    assert torch.equal(first, other)
