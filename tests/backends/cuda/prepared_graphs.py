"""Small graphs of simulated kernels, prepared by the CUDA backend."""

from __future__ import annotations

from small_graphs import StepCapturer, make_program

from offload.backends.cuda import CudaBackend
from offload.program import BoundProgram, Role

IN, ACT, OUT, WEIGHT = Role.INPUT, Role.ACTIVATION, Role.OUTPUT, Role.WEIGHT

TWO_STEPS = ([(IN, 256), (ACT, 256), (OUT, 256)], [("0", "1"), ("1", "2")])


def no_work(_: bytes) -> None:
    pass


def prepared(steps, program=None, **how):
    program = program or make_program(*TWO_STEPS)
    capturer = StepCapturer(steps, **how)
    return CudaBackend(capturer).prepare(BoundProgram(program)), capturer
