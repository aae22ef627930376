"""The weights that a call may write in place: those of an opaque Program."""

from __future__ import annotations

import torch

from offload.program import BoundProgram, Program, Role, Value


def weights_at_risk(bound: BoundProgram) -> list[Value]:
    """The weights of an opaque Program that a call may write; empty for any other Program.

    Those that were observed to be written, and all that are not parameters: a write of the same
    bytes, as to zeros, is not observed. (Parameters could take as much memory as the model.)
    """
    program, weights = bound.program, bound.bindings.weights
    if program.opaque is None:
        return []
    written = {index for launch in program.launches for index in launch.writes}
    return [
        value
        for value in device_weights(program)
        if value.index in written
        or not all(isinstance(one, torch.nn.Parameter) for one in weights[value.index])
    ]


def device_weights(program: Program) -> list[Value]:
    """All weights except host constants, which kernels cannot reach and launches cannot write."""
    return [value for value in program.of_role(Role.WEIGHT) if not value.on_host]
