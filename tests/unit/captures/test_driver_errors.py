"""Messages of CUDA driver errors: the operation, the call, and the driver's own text."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import pytest

import offload
from offload.backends.cuda import driver_errors, graph
from offload.backends.cuda.driver_errors import driver_error


class Code(enum.IntEnum):
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class Driver:
    def __init__(self, text: bytes | None = b"in words") -> None:
        self._text = text

    def cuGetErrorString(self, code: Code) -> tuple[int, bytes | None]:
        return (0, self._text) if self._text else (1, None)


def test_what_was_being_done_by_which_call_and_the_drivers_words():
    error = driver_error(Driver(), "cuMemFree", Code.CUDA_ERROR_INVALID_VALUE)
    assert type(error) is offload.ExecutionError
    assert str(error) == (
        "freeing memory of the device: cuMemFree: CUDA_ERROR_INVALID_VALUE (in words)"
    )


def test_memory_that_runs_out_is_a_kind_of_its_own():
    error = driver_error(Driver(), "cuMemAlloc", Code.CUDA_ERROR_OUT_OF_MEMORY)
    assert type(error) is offload.OutOfMemory


def test_a_fault_says_that_this_process_is_done_with_the_device():
    error = driver_error(Driver(), "cuStreamSynchronize", Code.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert str(error).endswith("; a device that has faulted can be used again in a new process")


def test_codes_that_the_driver_or_the_bindings_do_not_know():
    error = driver_error(Driver(None), "cuMemFree", 12345)
    assert str(error) == "freeing memory of the device: cuMemFree: CUDA error 12345"


NAMED = re.compile(r'(?:\bcall\(|driver_error\([^()]*?|get_\w+ = |, )"(cu[A-Z]\w+)"')


@pytest.mark.parametrize("module", sorted(Path(graph.__file__).parent.glob("*.py")))
def test_every_call_says_what_it_is_for(module):
    named = set(NAMED.findall(module.read_text()))
    assert named <= driver_errors._DOING.keys()
    if module.name == "graph.py":
        assert {"cuGraphGetNodes", "cuKernelGetParamInfo"} <= named
    if module.name == "driver.py":
        assert "cuPointerGetAttribute" in named
