"""Helpers for the families of models: capture, replay without the model, and inputs."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from checks import tensors_in
from torch import nn

import offload

N_REPLAYS = 4
Batch = dict[str, torch.Tensor]


def assert_close(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    own, theirs = list(tensors_in(got)), list(tensors_in(expected))
    assert own
    assert len(own) == len(theirs)
    for one, other in zip(own, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def forward_must_not_run(*_: Any, **__: Any) -> None:
    raise AssertionError("the model ran")


def replay_without_model(
    build_model: Callable[[], nn.Module], make: Callable[[int], Batch], device: str | None = None
) -> offload.Executable:
    """Capture on the first batch, drop the model, and compare replays at new addresses with a copy.

    `make` gives the batch of a turn: other values, and other padding where the model takes masks.
    """
    model = build_model().eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = twin(**make(0))
        with offload.capture(model) as captured:
            recorded = model(**make(0))
    assert_close(recorded, expected)
    model.forward = forward_must_not_run
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    run = captured.load(device)
    kept = []  # so that no address is used twice
    for turn in range(1, N_REPLAYS + 1):
        batch = make(turn)
        before = {name: tensor.clone() for name, tensor in batch.items()}
        with torch.no_grad():
            expected = twin(**make(turn))
        out = out_for(run, turn)
        feature_map = torch.empty(run.feature_map_bytes, dtype=torch.uint8).fill_(255)
        got = run(**batch, out=out, feature_map=feature_map)
        assert_close(got, expected)
        for given in tensors_in(out):
            assert any(given is one for one in tensors_in(got))
        for name, tensor in batch.items():
            assert torch.equal(tensor, before[name]), name
        assert run.last_execution.policy == "all"
        kept.append((batch, out, feature_map, got))
    tickets = [run.submit(**make(turn)) for turn in (2, 3)]
    for turn, ticket in zip((2, 3), tickets, strict=True):
        with torch.no_grad():
            assert_close(ticket.result(), twin(**make(turn)))
    return run


def out_for(run: offload.Executable, turn: int) -> Any:
    """On every other turn, buffers for the results that can have one."""
    if turn % 2 == 0:
        return None
    values = run.program.values
    views = [result.view for result in run.program.results]
    fresh = [values[view.value].role == "output" for view in views]
    buffers = [
        torch.empty(view.shape, dtype=getattr(torch, view.dtype)) if own else None
        for view, own in zip(views, fresh, strict=True)
    ]
    return nested(run.program.result_structure, buffers)


def nested(structure: Any, buffers: list[torch.Tensor | None]) -> Any:
    """Buffers nested as the result, in plain containers."""
    if structure.kind == "tensor":
        return buffers[structure.leaf]
    if structure.kind == "constant":
        return None
    items = [nested(child, buffers) for child in structure.children]
    return dict(zip(structure.keys, items, strict=True)) if structure.keys else items


N_ROWS, N_TOKENS = 3, 12


def tokens(turn: int, *, left: bool = False, **more: torch.Tensor) -> Batch:
    """Token numbers, and a mask that is full when recorded and padded otherwise at every replay."""
    generator = torch.Generator().manual_seed(turn)
    ids = torch.randint(2, 64, (N_ROWS, N_TOKENS), generator=generator)
    lengths = torch.randint(1, N_TOKENS + 1, (N_ROWS, 1), generator=generator)
    lengths[turn % N_ROWS] = N_TOKENS
    if turn == 0:
        lengths.fill_(N_TOKENS)
    mask = (torch.arange(N_TOKENS).expand(N_ROWS, -1) < lengths).long()
    mask = mask.flip(1) if left else mask
    return {"input_ids": ids, "attention_mask": mask, **more}
