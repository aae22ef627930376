"""What a launch does while torch_npu captures it: pools that it drops, errors that it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_loading import live, load
from on_npu import check_same
from relocated_models import RELOCATED, notes

import offload
from offload.interpreter.memory_pools import MemoryPool

SYNCHRONIZE = "aclrtSynchronizeDeviceWithTimeout"


@pytest.fixture
def while_captured() -> Iterator[Callable[[Callable[[], None]], Callable[..., torch.Tensor]]]:
    """Makes an operator that doubles, and calls a function whenever it is captured."""
    library = torch.library.Library("offload_tests", "FRAGMENT")
    library.define("double_while_captured(Tensor x) -> Tensor")

    def make(act: Callable[[], None]) -> Callable[..., torch.Tensor]:
        def double(x: torch.Tensor) -> torch.Tensor:
            if torch.npu.is_current_stream_capturing():
                act()
            return x * 2

        library.impl("double_while_captured", double, "PrivateUse1")
        return torch.ops.offload_tests.double_while_captured

    yield make
    library._destroy()


def test_no_pool_goes_while_a_model_is_captured(
    while_captured: Callable[..., Any], simulated_npu: AscendSimulator
) -> None:
    """Before torch_npu destroys one it synchronizes the device, which a capture forbids."""
    x, other = torch.ones(8).npu(), torch.npu.Stream()
    synchronized: list[int] = []

    def drop_a_pool() -> None:
        with torch.npu.stream(other):  # which is not captured
            before = simulated_npu.calls(SYNCHRONIZE)
            MemoryPool(x.device).close()
            synchronized.append(simulated_npu.calls(SYNCHRONIZE) - before)

    with load(while_captured(drop_a_pool), x) as run:
        assert RELOCATED in notes(run)
        check_same(run(x), torch.full((8,), 2.0))
    assert synchronized == [0] * 3  # one for each capture
    drop_a_pool()
    assert synchronized[-1] > 0


@pytest.mark.parametrize("kind", [offload.CaptureError, offload.BindingError, offload.OutOfMemory])
def test_an_error_of_offload_in_a_captured_launch_stays_as_it_is(
    kind: type[offload.OffloadError],
    while_captured: Callable[..., Any],
    simulated_npu: AscendSimulator,
) -> None:
    refusal = kind("differed")

    def refuse() -> None:
        raise refusal

    captured = offload.capture(while_captured(refuse), torch.ones(8).npu())
    before = live(simulated_npu)
    with pytest.raises(kind) as raised:
        captured.load()
    assert raised.value is refusal
    (note,) = refusal.__notes__
    assert note.endswith("offload_tests::double_while_captured, in the capture")
    refusal.__traceback__ = None  # which holds what the load has made
    del raised
    assert live(simulated_npu) == before
