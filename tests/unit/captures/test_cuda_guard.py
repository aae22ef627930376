"""torch's guard of CUDA devices outlives the threads that enter a mode of fake tensors."""

import subprocess
import sys

import pytest
import torch

from offload.compile.uninterrupted import uninterrupted
from offload.interpreter.cuda_guard import keep_cuda_guard
from offload.native import _native

COUNTED = "print('guards', _native.n_guarded_cuda_devices())"
IMPORTS = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import offload
from offload.compile.uninterrupted import uninterrupted
from offload.interpreter.cuda_guard import keep_cuda_guard
from offload.native import _native

def enter():
    with FakeTensorMode():
        torch.empty(3)

def in_a_thread():
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return [bytearray(one) for one in range(8, 400)]  # where the thread's memory was
"""
N_FAKE = 8  # kFakeGuardImplMaxDevices of c10/core/impl/FakeGuardImpl.h
BEGINS = {
    "a thread of offload's": "uninterrupted(enter)",
    "a thread of the user's": "in_a_thread(); keep_cuda_guard()",
    "a user's thread after offload's": "keep_cuda_guard(); in_a_thread()",
    "a recording over sizes": """
offload.capture(
    torch.sin, torch.randn(4, 3), dynamic_shapes=({0: torch.export.Dim("n", min=2)},)
)
in_a_thread()
""",
    "a compiled function": """
torch.compile(torch.sin, backend="offload")(torch.randn(3))
in_a_thread()
""",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's guard counts this machine's devices")
@pytest.mark.parametrize("begin", BEGINS)
def test_the_guard_is_there_when_a_thread_has_ended(begin):
    code = f"{IMPORTS}\n{BEGINS[begin]}\nchurned = in_a_thread()\nenter()\n{COUNTED}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = -1 if torch.version.cuda is None else N_FAKE
    assert done.stdout == f"guards {expected}\n"


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_without_cuda_nothing_is_kept():
    assert _native.keep_cuda_guard() is False
    keep_cuda_guard()
    assert uninterrupted(lambda: 3) == 3
    assert _native.n_guarded_cuda_devices() == -1
