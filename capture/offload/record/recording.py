"""A recorded call: its Program, its opaque form, and the data to check them once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

import torch

from offload.interpreter.generator_states import own_state
from offload.program import BoundProgram, Opaque, Overlap
from offload.record.random_outcomes import RandomOutcome
from offload.record.whole_program import ObservedCall, WholeProgram


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """A recorded call: its Program, and the data to check it once.

    Attributes:
        bound: the BoundProgram of all launches, including dead ones.
        device: the device of the recording.
        before: for each written storage of an input or weight, by identity, its bytes before the
            call.
        after: for the same storages, the bytes of their Value after the call.
        results: the tensors that the model returned.
        generator_states: for each of the program's generators, its state before the call.
        outcomes: of the program's random launches, in order.
        has_drawn: the state of a generator has moved, by the call or by another thread.
        has_unwritten: some Value began without content, so reads of it must be excluded.
        observed: every launch as it was made, including constants, to compare with the callable's
            behaviour; None unless requested.
        opaque: the call as one opaque launch; None on a device that runs no opaque launches, and
            where the call cannot be one; then `unchecked` says why.
        unchecked: why there is no opaque form on a device that runs them.
        computed: the results were computed; otherwise there is nothing to compare with.
        seen: the whole observed call; None unless requested.
    """

    bound: BoundProgram
    device: torch.device
    before: Mapping[int, torch.Tensor]
    after: Mapping[int, torch.Tensor]
    results: tuple[torch.Tensor, ...]
    input_tensors: tuple[torch.Tensor, ...]
    generator_states: tuple[torch.Tensor, ...]
    outcomes: tuple[RandomOutcome, ...]
    has_drawn: bool
    has_unwritten: bool
    observed: BoundProgram | None = None
    opaque: BoundProgram | None = None
    unchecked: str = ""
    computed: bool = True
    seen: WholeProgram | None = None

    def as_opaque(self, reason: str) -> Recording:
        """The same call recorded as one opaque launch.

        Args:
            reason: why, for the user.
        """
        assert self.opaque is not None
        (launch,) = self.opaque.program.launches
        assert isinstance(launch.callee, Opaque)
        launch = dataclasses.replace(launch, callee=Opaque(launch.callee.index, reason))
        program = dataclasses.replace(self.opaque.program, launches=(launch,))
        bound = BoundProgram(program, self.opaque.bindings)
        return dataclasses.replace(self, bound=bound, has_unwritten=False)


def recording_of(
    seen: ObservedCall,
    overlaps: tuple[Overlap, ...],
    results: tuple[torch.Tensor, ...],
    overlapping: Set[int],
    *,
    keeps_seen: bool,
) -> Recording:
    """The Recording of a finished call.

    Args:
        seen: the observed call.
        overlaps: of the inputs.
        results: the tensors that the call returned.
        overlapping: the storages of inputs that overlap, by identity.
        keeps_seen: the whole observed call is kept.

    Raises:
        CaptureError: the call wrote state whose earlier content was not kept.
    """
    table, generators = seen.table, tuple(seen.log.generators)
    written = [
        one
        for one in table
        if one.is_state
        and one.storage.device.type != "meta"
        and (one.written or one.storage._cdata in overlapping)
    ]
    return Recording(
        seen.bound_program(overlaps),
        device=table.device,
        before={one.storage._cdata: one.kept() for one in written},
        after={one.storage._cdata: one.own_content().clone() for one in written},
        results=results,
        input_tensors=tuple(seen.inputs),
        generator_states=tuple(state for _, state in generators),
        outcomes=tuple(seen.log.outcomes),
        has_drawn=any(
            not torch.equal(own_state(generator), before) for generator, before in generators
        ),
        has_unwritten=any(one.unwritten_at_birth for one in table),
        computed=seen.fakes is None,
        seen=seen.launches(overlaps) if keeps_seen else None,
    )
