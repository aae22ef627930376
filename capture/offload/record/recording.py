"""A recorded call: its Program, its opaque form, and what is needed to check them once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

import torch

from offload.program import OPAQUE_OPERATOR, Launch, OpaqueCall, Program, Role
from offload.record.random_outcomes import RandomOutcome


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """A recorded call: the Program, and what is needed to check it once.

    Attributes:
        program: all launches, dead ones included.
        device: that it was recorded on.
        before: for each written storage of an input or weight, by identity, its bytes before the
            call.
        after: for the same storages the bytes of their Value after it.
        results: the tensors that the model returned.
        generator_states: for each of the program's generators its state before the call.
        outcomes: what the program's random launches gave, in their order.
        has_drawn: the state of a generator has moved, by the call or by another thread.
        has_unwritten: some Value began without content, so reads of it must be ruled out.
        observed: every launch as it was made, constants included, to compare with what the
            callable does; None where nobody asks.
        opaque: the call as one opaque launch; None on a device that runs none, and where it
            cannot be one, which `unchecked` says.
        unchecked: why there is no opaque form on a device that runs them.
        computed: what the call gave was computed; otherwise there is nothing to compare with.
    """

    program: Program
    device: torch.device
    before: Mapping[int, torch.Tensor]
    after: Mapping[int, torch.Tensor]
    results: tuple[torch.Tensor, ...]
    input_tensors: tuple[torch.Tensor, ...]
    generator_states: tuple[torch.Tensor, ...]
    outcomes: tuple[RandomOutcome, ...]
    has_drawn: bool
    has_unwritten: bool
    observed: Program | None = None
    opaque: Program | None = None
    unchecked: str = ""
    computed: bool = True

    def as_opaque(self, reason: str) -> Recording:
        """The same call recorded as one opaque launch.

        Args:
            reason: why, for people.
        """
        assert self.opaque is not None
        assert self.opaque.opaque is not None
        call = dataclasses.replace(self.opaque.opaque, reason=reason)
        program = dataclasses.replace(self.opaque, opaque=call)
        return dataclasses.replace(self, program=program, has_unwritten=False)


def opaque_form(
    program: Program,
    call: OpaqueCall,
    *,
    reads: Set[int],
    writes: Set[int],
    is_random: bool,
    source: str,
) -> Program:
    """A Program's call as one launch.

    Args:
        program: of the same call, with every Value that is read or written.
        call: what the launch is.
        reads: the inputs and weights that the callable may read.
        writes: those of them that it was observed to write.
        is_random: the state of a generator has moved.
        source: the user's `file:line`.
    """
    made: set[int] = set()
    results = []
    for result in program.results:
        index = result.view.value
        is_new = program.values[index].role is Role.OUTPUT and index not in made
        results.append(result.view if is_new else None)
        made.update({index} if is_new else ())
    launch = Launch(
        index=0,
        operator=OPAQUE_OPERATOR,
        arguments=program.inputs,
        results=tuple(results),
        reads=tuple(sorted(reads)),
        writes=tuple(sorted(writes | made)),
        random=is_random,
        guard=None,
        guards_shape=False,
        source=source,
    )
    return dataclasses.replace(program, launches=(launch,), opaque=call)
