"""Captured models for which no argument table is made, and the model's state afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from ascend_captured import Captured
from ascend_client import (
    FEATURE_NOT_SUPPORT,
    GLOBAL,
    INTERNAL_ERROR,
    MODEL_EXECUTE,
    Client,
    peek,
)
from ascend_process import output_of
from ascend_residents import live
from ascend_simulator import AscendSimulator

from model_tasks import parameters_of, tasks_of
from offload.errors import BackendUnavailable, ExecutionError, OutOfMemory
from offload.native import _native

SET, UPDATE = "aclmdlRITaskSetParams", "aclmdlRIUpdate"


@pytest.fixture
def stream(npu: Client) -> int:
    return npu.stream()


# ---- refused before anything of the model is changed ---------------------------------------------


def assert_intact(one: Captured, npu: Client, stream: int) -> None:
    npu.run(one.model, stream)
    assert peek(one.y) == (301,)
    one.bind_home()
    one.bind(input=npu.words(4))
    assert one.run() == (1, 8)
    assert peek(one.y) == (304,)


def in_a_group(npu: Client, stream: int) -> tuple[int, Callable[[], object]]:
    group = ctypes.c_uint64()
    with npu.capture(stream) as models:
        npu.ascend.call("aclmdlRICaptureTaskGrpBegin", stream)
        npu.note(stream, 1)
        npu.ascend.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(group))
    return models[0], lambda: npu.run(models[0], stream)


def test_a_task_of_a_group_is_refused(npu: Client, stream: int) -> None:
    model, run = in_a_group(npu, stream)
    (*_, address, arguments), *_ = _native.ascend_captured_tasks(0, model)
    with pytest.raises(BackendUnavailable, match=r"task 0 .*is in a task group"):
        _native.AscendCapturedTable(
            device=0, model=model, kernels=[(0, address, arguments)], words=[(0, 0, True)]
        )
    run()
    assert npu.order == ["note 1 of 1"]


@pytest.mark.parametrize(
    ("number", "shift", "why"),
    [(3, 0, "no task 3 any more"), (1, 8, "not the kernel that was read"), (1, 0, "")],
)
def test_another_task_than_was_read_is_refused(
    number: int, shift: int, why: str, npu: Client, stream: int
) -> None:
    one = Captured(npu, stream)
    *_, address, arguments = one.tasks[1]

    def make() -> None:
        _native.AscendCapturedTable(
            device=0,
            model=one.model,
            kernels=[(number, address + shift, arguments)],
            words=[(0, 0, True)],
        )

    if why:
        with pytest.raises(BackendUnavailable, match=why):
            make()
    else:
        make()
    assert_intact(one, npu, stream)


def test_without_software_sq_there_is_none(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    npu.ascend.set_software_sq(False)
    with pytest.raises(ExecutionError, match=str(FEATURE_NOT_SUPPORT)):
        one.make_table()
    npu.ascend.set_software_sq(True)
    assert_intact(one, npu, stream)


@pytest.mark.parametrize(
    "function", ["aclmdlRITaskGetParams", "aclmdlRIKernelTaskGetAttribute", "aclmdlRIGetStreams"]
)
def test_a_question_that_is_refused_changes_nothing(
    function: str, npu: Client, stream: int
) -> None:
    one = Captured(npu, stream)
    held = live(npu.ascend)
    npu.ascend.fail(function, INTERNAL_ERROR, 1)
    with pytest.raises(ExecutionError, match=str(INTERNAL_ERROR)):
        one.make_table()
    assert live(npu.ascend) == held
    assert_intact(one, npu, stream)


def test_an_attribute_that_the_chip_has_not_is_left_out(
    npu: Client, stream: int, ascend: AscendSimulator
) -> None:
    ascend.fail("aclmdlRIKernelTaskGetAttribute", FEATURE_NOT_SUPPORT, 1)
    one = Captured(npu, stream, has_table=True)
    one.bind_home()
    one.run()
    assert peek(one.y) == (301,)


def test_without_memory_nothing_is_changed(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    npu.ascend.set_memory_limit(npu.ascend.live_bytes)
    with pytest.raises(OutOfMemory, match="table of kernel arguments"):
        one.make_table()
    npu.ascend.set_memory_limit(1 << 30)
    assert_intact(one, npu, stream)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ((0, 4, 0), "lies in no block"),
        ((3, 0, 0), "lies in no block"),
        ((0, 0, 25), "points behind"),
    ],
)
def test_own_addresses_outside_of_blocks_are_refused(
    own: tuple[int, int, int], why: str, npu: Client, stream: int
) -> None:
    one = Captured(npu, stream)
    with pytest.raises(ValueError, match=why):
        _native.AscendCapturedTable(
            device=0,
            model=one.model,
            kernels=[(number, *task[4:]) for number, task in enumerate(one.tasks)],
            words=[(0, 0, True)],
            own=[own],
        )


def test_a_table_of_other_words_is_refused(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    *_, address, arguments = one.tasks[0]
    table = _native.AscendCapturedTable(
        device=0, model=one.model, kernels=[(0, address, arguments)], words=[(0, 0, True)]
    )
    with pytest.raises(ValueError, match="has other words"):
        _native.AscendCapturedResident(
            device=0,
            model=one.model,
            copies=_native.AscendMovingCopies(device=0, tensors=[]),
            slots=[],
            n_launches=3,
            release=lambda: None,
            table=table,
        )


OF_9_1 = """
from ascend_client import Client
from offload.native import _native
npu = Client(ascend)
stream, word = npu.stream(), npu.words(1)
with npu.capture(stream) as models:
    npu.note(stream, 1)
((*_, address, arguments),) = _native.ascend_captured_tasks(0, models[0])
try:
    _native.AscendCapturedTable(
        device=0, model=models[0], kernels=[(0, address, arguments)], words=[(0, 0, True)]
    )
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ascend")  # which is built
@pytest.mark.parametrize("function", [SET, UPDATE, "aclmdlRIKernelTaskGetAttribute"])
def test_a_runtime_without_one_of_the_functions_has_no_table(function: str) -> None:
    says = output_of(f"ascend.begin()\nascend.hide({function!r})\n{OF_9_1}")
    assert says.startswith("BackendUnavailable")
    assert function in says


# ---- refused when the model is changed -----------------------------------------------------------


@pytest.mark.parametrize(("function", "nth"), [(SET, 1), (SET, 2), (SET, 3), (UPDATE, 1)])
def test_a_change_that_is_refused_says_so(
    function: str, nth: int, npu: Client, stream: int
) -> None:
    """The model may no longer work: its owner captures another."""
    one = Captured(npu, stream)
    table = one.make_table()
    npu.ascend.forget_calls()
    npu.ascend.fail(function, INTERNAL_ERROR, nth)
    with pytest.raises(ExecutionError, match=str(INTERNAL_ERROR)):
        table.install(0)
    assert npu.ascend.code("aclmdlRIExecuteAsync", one.model, stream) in (0, MODEL_EXECUTE)
    npu.synchronize(stream)
    one.resident.close()


def test_a_model_that_runs_is_not_changed(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    table = one.make_table()
    npu.execute(one.model, stream)
    with pytest.raises(ExecutionError, match="107040"):
        table.install(0)
    npu.synchronize(stream)
    assert_intact(one, npu, stream)


def test_an_address_that_the_runtime_does_not_keep_is_found(npu: Client, stream: int) -> None:
    one = Captured(npu, stream)
    table = one.make_table()
    npu.ascend.set_keeps_addresses(False)
    with pytest.raises(ExecutionError, match="did not keep the address of the argument table"):
        table.install(0)
    assert npu.ascend.code("aclmdlRIExecuteAsync", one.model, stream) == MODEL_EXECUTE


def test_captures_of_other_threads_do_not_keep_a_table_from_being_made(
    npu: Client, stream: int, ascend: AscendSimulator
) -> None:
    """In GLOBAL mode they refuse copies of every thread that has not exchanged its mode."""
    one = Captured(npu, stream)
    ascend.in_thread(lambda: npu.begin(npu.stream(), GLOBAL))
    one.make_table().install(0)
    assert parameters_of(ascend, tasks_of(ascend, one.model)[0][0]).content.kernel.arguments
