"""Reports of executions that fail or that are not waited for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from checks import normal

import offload

failing: list[Exception] = []


@torch.library.custom_op("offload_tests::fails_if_told", mutates_args=())
def fails_if_told(x: torch.Tensor) -> torch.Tensor:
    for error in failing:
        raise error
    return x + 1


@pytest.fixture
def told_to_fail():
    yield failing.append
    failing.clear()


def test_an_execution_error_has_the_operators_own_error_as_its_cause(told_to_fail):
    run = offload.capture(lambda x: fails_if_told(x) * 2, normal(3)).load()
    own = ValueError("first line\nsecond line")
    told_to_fail(own)
    x = normal(3)
    with pytest.raises(offload.ExecutionError, match=r"fails_if_told: .*first line") as raised:
        run(x)
    assert raised.value.__cause__ is own
    ticket = run.submit(x)
    errors = []
    for _ in range(2):
        with pytest.raises(offload.ExecutionError) as raised:
            ticket.result()
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert errors[0].__cause__ is errors[1].__cause__ is own
    failing.clear()
    assert torch.equal(run(x), (x + 1) * 2)


def test_the_cause_of_torchs_own_errors_is_whole():
    table = normal(4, 2)
    run = offload.capture(lambda index: table.index_select(0, index), torch.tensor([1, 2])).load()
    with pytest.raises(offload.ExecutionError, match="index_select") as raised:
        run(torch.tensor([1, 9]))
    with pytest.raises(IndexError) as eager:
        table.index_select(0, torch.tensor([1, 9]))
    assert type(raised.value.__cause__) is IndexError
    assert str(raised.value.__cause__).splitlines()[0] == str(eager.value).splitlines()[0]


INTERRUPTED = """
import os, signal, threading, time, torch, offload

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs begin with none
ended, waits, may_sleep = threading.Event(), threading.Event(), threading.Event()

@torch.library.custom_op("offload_tests::long", mutates_args=())
def long(x: torch.Tensor) -> torch.Tensor:
    if may_sleep.is_set():
        ended.wait(60)
    return x + 1

x = torch.ones(2)
run = offload.capture(lambda x: long(x) * 2, x).load()
assert torch.equal(run(x), (x + 1) * 2)
may_sleep.set()
ticket = run.submit(x)

def interrupt():
    waits.wait()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    waits.set()
    ticket.result()
except KeyboardInterrupt:
    assert not ticket.done()
else:
    raise AssertionError("nobody interrupted the wait")
ended.set()
assert torch.equal(ticket.result(), (x + 1) * 2)
assert torch.equal(run(x), (x + 1) * 2)
"""

LIMITED = """
import resource, torch, offload

x = torch.ones(2)
run = offload.capture(lambda x: x * 2, x).load()
assert torch.equal(run(x), x * 2)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 2**20, resource.RLIM_INFINITY))
try:
    run.submit(x)
except offload.ExecutionError as error:
    assert "no thread can be started to execute what is submitted" in str(error), error
    assert "ulimit" in str(error), error
else:
    raise AssertionError("a thread was started")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.equal(run.submit(x).result(), x * 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [INTERRUPTED, LIMITED], ids=["interrupted", "limited"])
def test_in_a_process_of_its_own(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
