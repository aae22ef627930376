"""The interpreter exits while executions on several devices are under way: they end first.

Each device has separate memory and copies are slow, so that executions are in every phase. For each
case a fork of a process without threads begins anew, and exits.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = """
import atexit, json, os, sys, threading, time
import torch, offload
from apart import apart, movable_tasks
from offload.run import transfers
from offload.run.device_choice import Placement

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

torch.set_grad_enabled(False)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6))).eval()
x = torch.randn(4, 8)
captured = offload.capture(model, x)
expected = captured.load()(x)
kind = Placement(sys.argv[1])
where = {task: at % 2 for at, task in enumerate(movable_tasks(captured.program))}
copy = transfers._copy

def slowly(piece):
    time.sleep(0.003)
    copy(piece)

transfers._copy = slowly

def tell_end(ticket):
    tell(torch.equal(ticket.result(), expected))

def submitted(n):
    tickets = [run.submit(x) for _ in range(n)]
    for one in tickets:
        one.add_done_callback(tell_end)
    return tickets

def repeat(step):
    torch.set_grad_enabled(False)  # a thread's own
    try:
        while True:
            step()
    except offload.ExecutionError as error:
        tell("exiting" if "the interpreter is exiting" in str(error) else error)

def begin(kind, case):
    global run
    if kind == "static":
        run = apart(captured.bound, where)
    else:
        run = apart(captured.bound, {}, kind=Placement(kind), costs_ns=[1e5, 1e5])
    exec(case, globals())

found = {}
for name, case in json.loads(sys.argv[2]).items():
    from_child, to_parent = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(to_parent, 1)
        os.close(to_parent)
        begin(sys.argv[1], case)
        sys.exit()
    os.close(to_parent)
    with open(from_child) as told:
        found[name] = told.read(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(found))
"""

RIGHT = "True\n"

CASES = {
    "queued": ("submitted(4)", RIGHT * 4),
    "dropped": ("submitted(4)\ndel run", RIGHT * 4),
    "while another thread goes on calling": (
        """
def work():
    torch.set_grad_enabled(False)
    time.sleep(0.05)  # the main thread has ended then
    for _ in range(4):
        tell(torch.equal(run(x), expected))
threading.Thread(target=work).start()
""",
        RIGHT * 4,
    ),
    "waiting for the result of another executable": (
        """
other = captured.load()
twice = other(other(expected))
ticket = run.submit(other.submit(other.submit(x)))
ticket.add_done_callback(lambda one: tell(torch.allclose(one.result(), model(model(model(x))))))
""",
        RIGHT,
    ),
    "in a function that is called at exit": ("atexit.register(lambda: submitted(2))", RIGHT * 2),
    "closed at exit": ("submitted(2)\natexit.register(run.close)", RIGHT * 2),
    "after an exception": ("submitted(2)\nsys.exit(3)", RIGHT * 2),
    "while callbacks go on submitting": (
        """
def again(ticket):
    try:
        run.submit(x).add_done_callback(again)
    except offload.ExecutionError as error:
        tell("exiting" if "the interpreter is exiting" in str(error) else error)
run.submit(x).add_done_callback(again)
""",
        "exiting\n",
    ),
    "while a daemon goes on submitting": (
        """
begun = threading.Event()
def step():
    run.submit(x).wait()
    begun.set()
daemon = threading.Thread(target=repeat, args=(step,), daemon=True)
daemon.start()
begun.wait()
# A daemon that still executes when the interpreter is gone ends the process: torch's own limit.
import offload.native
atexit.unregister(offload.native._native.close_all_lanes)
atexit._run_exitfuncs()
daemon.join()
offload.native._native.close_all_lanes()  # a lane's thread may still be in a callback
""",
        "exiting\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_what_is_under_way_ends_before_the_interpreter(kind):
    cases = json.dumps({name: case for name, (case, _) in CASES.items()})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, cases],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=pathlib.Path(__file__).parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
    )
    assert (done.returncode, done.stderr) == (0, "")
    wanted = {
        name: [told, 3 if "sys.exit(3)" in case else 0] for name, (case, told) in CASES.items()
    }
    assert json.loads(done.stdout) == wanted
