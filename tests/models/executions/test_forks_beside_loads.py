"""A process is forked while other threads load, submit, record and drop: nothing waits forever.

A fork holds what executions need, and then waits for Python's lock. A thread that has Python's lock
must not wait for what the fork holds. In the child nothing may give up Python's lock before Python
has made it anew, since threads of the parent were waiting for it. Each case is a separate process,
which hangs where one of these happens.
"""

import contextlib
import gc
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

import offload
from offload.native import _native

N_FORKS = 200

SCRIPT = """
import os, sys, threading
import torch, offload
from offload.native import _native

torch.set_grad_enabled(False)
torch.set_num_threads(1)
sys.setswitchinterval(1e-5)  # threads take turns at every line
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))).eval()
x = torch.randn(1, 8)
is_over = threading.Event()

def replay():
    shapes = _native.CallShapes(inputs=[], outputs_bytes=[], results=[], feature_map_bytes=0)
    spec = _native.CallSpec(
        device="cpu", inputs=[], outputs=[], results=[], weights=[], overlaps=[],
        feature_map_slot=0, alignment_bytes=1, shapes=shapes,
    )
    return _native.Replay(
        spec=spec, triggers=[_native.Trigger.FEATURE_MAP],
        resident=_native.NullResident([], 0, 0, [5]), host_scheduled=False, positional=[],
        keyword={}, match=None, result_form="list", build_result=None, match_buffers=None,
        check_feature_map=None,
    )

def repeated(step):
    def work():
        torch.set_grad_enabled(False)  # a thread's own
        while not is_over.is_set():
            step()
    return work

def prepare_loads():
    return [replay, replay]

def prepare_joins():
    first = replay()
    return [lambda: replay().join(first)] * 2

def prepare_submissions():
    run = offload.capture(model, x).load()

    def submit():
        tickets = [run.submit(torch.ones(1, 8)) for _ in range(20)]
        tickets[-1].wait()

    return [submit, submit, lambda: None]  # of which one waits for Python's lock

def prepare_records():
    run = offload.open(sys.argv[2]).load()  # loaded before anything was recorded
    return [lambda: run(x), lambda: offload.capture(model, x)]

def fork():
    child = os.fork()
    if not child:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

if sys.argv[1] == "save":
    offload.capture(model, x).save(sys.argv[2])
    sys.exit()
threads = [
    threading.Thread(target=repeated(step)) for step in globals()["prepare_" + sys.argv[1]]()
]
for one in threads:
    one.start()
for _ in range(int(sys.argv[3])):
    fork()
is_over.set()
for one in threads:
    one.join()
"""


def carry_out(case: str, path: pathlib.Path) -> None:
    command = [sys.executable, "-c", SCRIPT, case, str(path), str(N_FORKS)]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            assert process.wait(timeout=600) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):  # the session has ended
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("case", ["loads", "joins", "submissions", "records"])
def test_forks_end_beside_other_threads(case: str, tmp_path: pathlib.Path) -> None:
    if case == "records":
        carry_out("save", tmp_path / "model.offload")
    carry_out(case, tmp_path / "model.offload")


IMPORTS = """
import os, sys, threading, time
import torch, offload

torch.set_grad_enabled(False)
begun = threading.Event()

@torch.library.custom_op("forks::imports", mutates_args=())
def imports(x: torch.Tensor) -> torch.Tensor:
    if is_slow:
        begun.set()
        time.sleep(0.5)  # the main thread forks
        import xml.dom.minidom
    return x + 1

@imports.register_fake
def _(x):
    return torch.empty_like(x)

is_slow = False
x = torch.ones(1, 4)

class Model(torch.nn.Module):
    def forward(self, x):
        return imports(x) * 2

run = offload.capture(Model().eval(), x).load()
run(x)
is_slow = "xml.dom.minidom" not in sys.modules
assert is_slow

def work():
    torch.set_grad_enabled(False)  # a thread's own
    run(x)

thread = threading.Thread(target=work)
thread.start()
begun.wait()
child = os.fork()
if not child:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
thread.join()
"""


def test_a_fork_ends_beside_a_launch_that_imports() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=600)


HANDLERS = """
import os, threading

asked, answered = threading.Event(), threading.Event()

def ask():
    asked.set()
    answered.wait()

os.register_at_fork(before=ask)  # Python calls the handler that was registered last first
import torch, offload

run = offload.capture(torch.neg, torch.ones(3)).load()

def answer():
    asked.wait()
    assert torch.equal(run(torch.ones(3)), -torch.ones(3))
    answered.set()

thread = threading.Thread(target=answer)
thread.start()
child = os.fork()
if not child:
    os._exit(7 if torch.equal(run(torch.ones(3)), -torch.ones(3)) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
thread.join()
assert torch.equal(run(torch.ones(3)), -torch.ones(3))
"""


def test_a_fork_ends_beside_a_handler_that_waits_for_an_execution() -> None:
    """Such as one that takes a lock under which a thread executes."""
    subprocess.run([sys.executable, "-c", HANDLERS], check=True, timeout=600)


@pytest.mark.parametrize("collects", [True, False])
def test_a_fork_leaves_the_collector_as_it_was(collects: bool) -> None:
    """It is off from the end of the wait for launches until the fork, which may wait again."""
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        _native.hold_for_fork()  # as a fork does, which then has nothing to wait for
        assert not gc.isenabled()
        lane = offload.capture(torch.neg, torch.ones(3)).load()  # gives up what is held
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() == collects else 1)
        assert os.waitpid(child, 0)[1] == 0
        _native.release_after_fork()
        assert gc.isenabled() == collects
        assert torch.equal(lane(torch.ones(3)), -torch.ones(3))
    finally:
        (gc.enable if before else gc.disable)()
