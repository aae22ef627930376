"""The null backend: its words are those of a captured graph, and its clock is virtual."""

from __future__ import annotations

import torch

import offload
from offload.backends import NullBackend
from offload.plan import SlotKind


def two_layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) @ weight


def test_words_follow_bases_and_offsets():
    with offload.capture(two_layers) as captured:
        captured(torch.ones(4, 4), torch.ones(4, 4))
    run = captured.load(device="null")
    x, weight, y = torch.ones(4, 4), torch.ones(4, 4), torch.empty(4, 4)
    arena = torch.empty(run.feature_map_bytes, dtype=torch.uint8).fill_(0)
    run(x, weight, out=y, feature_map=arena)
    bases = {
        SlotKind.OUTPUT: y.data_ptr(),
        SlotKind.FEATURE_MAP: arena.data_ptr(),
    }
    inputs = iter([x.data_ptr(), weight.data_ptr()])
    slot_bases = [
        next(inputs) if slot.kind is SlotKind.INPUT else bases[slot.kind] for slot in run.plan.slots
    ]
    expected = []
    for launch in run.program.launches:
        for view in (*launch.views(), *launch.made()):
            place = run.plan.places[view.value]
            expected.append(slot_bases[place.slot] + place.offset_bytes + view.offset_bytes)
    assert run._loaded.resident.words == expected


def test_moving_one_input_patches_its_uses_only():
    with offload.capture(two_layers) as captured:
        captured(torch.ones(4, 4), torch.ones(4, 4))
    run = captured.load(device="null")
    x, weight, y = torch.ones(4, 4), torch.ones(4, 4), torch.empty(4, 4)
    run(x, weight, out=y)
    run(x, weight.clone(), out=y)
    assert run.last_execution.words_patched == 2


def test_virtual_clock_counts_words_and_launches():
    with offload.capture(two_layers) as captured:
        captured(torch.ones(4, 4), torch.ones(4, 4))
    run = captured.load(device="null")
    costs = NullBackend().machine().costs
    x, weight, y = torch.ones(4, 4), torch.ones(4, 4), torch.empty(4, 4)
    run(x, weight, out=y)
    first_ns = run._loaded.resident.clock_ns
    run(x, weight, out=y)
    execution_ns = costs.submit_ns + len(run.program.launches) * costs.launch_ns
    assert run._loaded.resident.clock_ns - first_ns == execution_ns
    assert first_ns == execution_ns + len(run._loaded.resident.words) * costs.word_ns
