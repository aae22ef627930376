"""Results on the CPU beside those on a device: no part of a Program unless used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from meta_recording import record, take_meta_for_an_accelerator

from offload import CaptureError


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    take_meta_for_an_accelerator(monkeypatch)


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    """`fused` returns a seed on the CPU beside its result, `only_host` only that seed."""
    with torch.library._scoped_library("offload_unused", "FRAGMENT") as library:
        library.define("fused(Tensor x) -> (Tensor, Tensor, Tensor)")
        library.define("only_host(Tensor x) -> Tensor")
        library.impl(
            "fused", lambda x: (torch.empty_like(x), torch.ones(1), torch.tensor(2.0)), "Meta"
        )
        library.impl("only_host", lambda x: torch.ones(1), "Meta")
        yield


def fused(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.ops.offload_unused.fused(x)


def test_they_are_left_out() -> None:
    program = record(lambda x: fused(fused(x)[0])[0], torch.empty(4, device="meta"))
    first, second = program.launches
    assert [result is not None for result in first.results] == [True, False, False]
    assert second.reads == (first.results[0].value,)
    assert not [value for value in program.values if value.on_host]


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "operand": lambda seed: seed * 2,
    "operand on the device": lambda seed: torch.empty(1, device="meta") * seed,
    "view": lambda seed: seed.view(1),
    "result": lambda seed: seed,
    "number": lambda seed: seed.item(),
    "list": lambda seed: seed.tolist(),
    "array": lambda seed: seed.numpy(),
    "written": lambda seed: seed.zero_(),
}


@pytest.mark.parametrize("host_reads", ["avoid", "guard"])
@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_their_use_is_refused(
    use: Callable[[torch.Tensor], object], place: int, host_reads: str
) -> None:
    def call(x: torch.Tensor) -> object:
        out = fused(x)
        return out[0], use(out[place])

    with pytest.raises(CaptureError, match=rf"test_unused.*: result {place} of offload_unused::"):
        record(call, torch.empty(4, device="meta"), host_reads=host_reads)


def test_a_launch_that_gives_nothing_else_is_refused() -> None:
    with pytest.raises(CaptureError, match="only tensors of no dimensions may be on the CPU"):
        record(
            lambda x: (torch.ops.offload_unused.only_host(x), x)[1], torch.empty(4, device="meta")
        )
