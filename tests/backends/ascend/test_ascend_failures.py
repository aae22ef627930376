"""Failures on the simulated Ascend runtime: their messages, and that nothing is left behind."""

from __future__ import annotations

import pytest
from ascend_client import INTERNAL_ERROR, MEMORY_ALLOCATION
from ascend_residents import REFRESHES, Chain, live, plus, read

from offload.errors import BackendUnavailable, ExecutionError, OutOfMemory
from offload.native import _native

# Calls of loading, by form of the model and of its refresh; some are made several times.
LOADING = {
    "host": ["aclrtGetDeviceCount", "aclrtSetDevice", "aclrtMalloc", "aclrtCreateEventExWithFlag"],
    "kernel": ["aclrtMalloc", "aclrtMemcpy"],
    "operators": [
        "aclrtMalloc",
        "aclrtMemcpy",
        "aclnnIndexSelectGetWorkspaceSize",
        "aclnnAddGetWorkspaceSize",
    ],
    "capture": [
        "aclrtCreateStreamWithConfig",
        "aclmdlRICaptureBegin",
        "aclrtLaunchKernel",
        "aclmdlRICaptureEnd",
    ],
    "build": [
        "aclrtCreateStreamWithConfig",
        "aclmdlRIBuildBegin",
        "aclmdlRIBindStream",
        "aclrtLaunchKernel",
        "aclmdlRIEndTask",
        "aclmdlRIBuildEnd",
    ],
}


def calls_of(form: str, refresh: str) -> list[str]:
    return [*LOADING["host"], *LOADING[refresh], *LOADING[form]]


@pytest.mark.parametrize("refresh", REFRESHES)
@pytest.mark.parametrize("form", ["build", "capture"])
def test_a_failure_while_loading_leaves_nothing_behind(ascend, form, refresh):
    """Each call of a load fails in turn, at each of its occurrences."""
    if form == "build" and not _native.ascend_capabilities()["explicit_build"]:
        pytest.skip("the simulated runtime has no explicit build")
    Chain(ascend, form=form, refresh=refresh).resident.close()
    before = live(ascend)
    n_failures = 0
    for function in dict.fromkeys(calls_of(form, refresh)):
        ascend.forget_calls()
        chain = Chain(ascend, form=form, refresh=refresh)
        n_calls = ascend.calls(function)
        chain.resident.close()
        assert n_calls > 0, function
        for nth in range(1, n_calls + 1):
            ascend.forget_calls()
            ascend.fail(function, INTERNAL_ERROR, nth=nth)
            refused = pytest.raises(ExecutionError, match="507000 ACL_ERROR_RT_INTERNAL_ERROR")
            with refused:
                Chain(ascend, form=form, refresh=refresh)
            n_failures += 1
            assert live(ascend) == before, (function, nth)
    assert n_failures >= len(calls_of(form, refresh))
    chain = Chain(ascend, form=form, refresh=refresh)
    _, y = chain.bind_first()
    chain.run()
    assert read(y) == plus(3)


@pytest.mark.parametrize(
    ("refresh", "function", "says"),
    [
        ("host", "aclrtMemcpyAsync", "copying kernel arguments"),
        ("kernel", "aclrtLaunchKernelWithHostArgs", "launching the refresh of kernel arguments"),
        ("operators", "aclrtMemcpyAsync", "copying the base table"),
        ("operators", "aclnnIndexSelect", "refreshing kernel arguments by aclnnIndexSelect"),
        ("operators", "aclnnAdd", "refreshing kernel arguments by aclnnAdd"),
        ("operators", "aclrtLaunchKernelWithHostArgs", "arguments by aclnnIndexSelect"),
        ("host", "aclmdlRIExecuteAsync", "executing the model"),
        ("host", "aclrtRecordEvent", "ending an execution"),
        ("host", "aclrtSynchronizeEvent", "executing the program"),
    ],
)
def test_an_execution_that_fails_can_be_tried_again(ascend, refresh, function, says):
    chain = Chain(ascend, refresh=refresh)
    chain.bind_first()
    chain.run()
    before = live(ascend)
    y = chain.allocate()
    chain.bind(output=y)
    ascend.fail(function, INTERNAL_ERROR)
    with pytest.raises(ExecutionError, match=f"{says}: 507000 ACL_ERROR_RT_INTERNAL_ERROR"):
        chain.run()
    chain.run()
    assert read(y) == plus(3)
    after = live(ascend)
    assert after.pop("bytes") > before.pop("bytes")  # of the new output
    assert after == before


@pytest.mark.parametrize(
    ("refresh", "function"),
    [
        ("host", "aclrtMemcpyAsync"),
        ("operators", "aclrtMemcpyAsync"),
        ("operators", "aclnnIndexSelect"),
        ("operators", "aclnnAdd"),
    ],
)
def test_what_a_failed_refresh_lacked_comes_with_the_next(ascend, refresh, function):
    chain = Chain(ascend, refresh=refresh)
    chain.bind_first()
    chain.run()
    moved = chain.allocate(plus(5))
    chain.bind(input=moved)
    ascend.fail(function, INTERNAL_ERROR)
    with pytest.raises(ExecutionError):
        chain.resident.execute()
    y = chain.allocate()
    chain.bind(output=y)
    chain.run()
    assert read(y) == plus(8)


@pytest.mark.parametrize("function", ["aclrtSynchronizeEvent", "aclrtRecordEvent"])
@pytest.mark.parametrize("refresh", REFRESHES)
def test_after_a_wait_that_failed_the_whole_table_comes_again(ascend, refresh, function):
    """The refresh itself may have failed on the device."""
    chain = Chain(ascend, refresh=refresh)
    _, y = chain.bind_first()
    chain.run()
    first = chain.resident.refresh_counts
    n_plans = first.pop("plans")
    chain.resident.execute()
    assert chain.resident.refresh_counts == {**first, "plans": n_plans}
    ascend.fail(function, INTERNAL_ERROR)
    with pytest.raises(ExecutionError):
        chain.resident.finish()
    for _ in range(2):  # once
        chain.run()
        twice = {key: 2 * n for key, n in first.items()}
        assert chain.resident.refresh_counts == {**twice, "plans": n_plans}
    assert read(y) == plus(3)


@pytest.mark.parametrize("function", ["aclCreateTensor", "aclCreateScalar"])
def test_operands_that_cannot_be_described_leave_nothing_behind(ascend, function):
    Chain(ascend, refresh="operators").resident.close()
    before = live(ascend)
    for nth in range(1, 6 if function == "aclCreateTensor" else 2):
        ascend.forget_calls()
        ascend.fail(function, INTERNAL_ERROR, nth=nth)
        with pytest.raises(
            ExecutionError,
            match=f"operands of the refresh of kernel arguments: {function} returned nothing",
        ):
            Chain(ascend, refresh="operators")
        assert live(ascend) == before


@pytest.mark.parametrize("name", ["aclnnIndexSelect", "aclnnAdd"])
def test_an_operator_that_cannot_be_planned_again_can_be_tried_again(ascend, name):
    before = live(ascend)
    for nth in (1, 2):
        ascend.fail("aclSetAclOpExecutorRepeatable", INTERNAL_ERROR, nth=nth)
    chain = Chain(ascend, refresh="operators")
    _, y = chain.bind_first()
    for function, says in (
        (f"{name}GetWorkspaceSize", f"planning {name}"),
        (name, f"refreshing kernel arguments by {name}"),
    ):
        chain.bind(output=y)
        ascend.fail(function, INTERNAL_ERROR)
        with pytest.raises(ExecutionError, match=f"{says}.*: 507000 ACL_ERROR_RT_INTERNAL_ERROR"):
            chain.run()
        assert live(ascend)["executors"] == before["executors"]
        chain.run()
        assert read(y) == plus(3)
    chain.resident.close()
    assert {**live(ascend), "bytes": 0} == {**before, "bytes": 0}


def test_memory_that_ran_out_is_said_in_bytes(ascend):
    ascend.fail("aclrtMalloc", MEMORY_ALLOCATION)
    with pytest.raises(OutOfMemory, match=r"kernel arguments, 192 bytes: 207001 ACL_ERROR_RT_"):
        Chain(ascend)


def test_a_kernel_that_fails_surfaces_at_the_wait(ascend):
    def fail(block: bytes, _n_blocks: int) -> None:
        raise ValueError(block)

    before = live(ascend)
    chain = Chain(ascend, function=fail)
    chain.bind_first()
    chain.resident.execute()
    with pytest.raises(ExecutionError, match="507015 ACL_ERROR_RT_AICORE_EXCEPTION"):
        chain.resident.finish()
    assert isinstance(ascend.errors[0], ValueError)
    with pytest.raises(ExecutionError, match="507015"):
        chain.run()
    chain.resident.close()
    after = live(ascend)
    assert {**after, "bytes": 0} == {**before, "bytes": 0}


def test_a_device_that_does_not_exist_is_named(ascend):
    with pytest.raises(BackendUnavailable, match="npu:3 does not exist: there are 1 devices"):
        _native.ascend_device(3)
