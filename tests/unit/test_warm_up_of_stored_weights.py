"""A warm-up of a model whose weights are in files has only those that launches need at once."""

from __future__ import annotations

from pathlib import Path

import torch
from stored import Wide, save_weights, without_memory

import offload
from offload.backends.torch_warm_up import _take_stored, last_uses_of
from offload.eager_run import EagerRun


def test_each_weight_is_zeros_from_its_first_launch_to_its_last(tmp_path: Path) -> None:
    save_weights(Wide(64, 8), tmp_path)
    given = torch.randn(2, 64)
    program = offload.capture(without_memory(lambda: Wide(64, 8)), given, weights=tmp_path).program
    run = EagerRun(program, {program.inputs[0].value: (given.untyped_storage(), 0)}, fill=0)
    last_uses = last_uses_of(program)
    seen: set[int] = set()
    for launch in program.launches:
        _take_stored(program, launch, run.bases, torch.device("cpu"))
        held = run.bases.keys() & program.stored.keys()
        seen |= held
        assert len(held) <= 1
        assert all(not torch.tensor(list(run.bases[one][0])).any() for one in held)
        run.keep(launch, run.call(launch)())
        for value in last_uses.get(launch.index, ()):
            run.bases.pop(value, None)
    assert seen == set(program.stored)
    assert not run.bases.keys() & program.stored.keys()
