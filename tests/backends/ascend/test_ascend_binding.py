"""Opening the Ascend runtime: each case in a separate process, as it is opened once."""

from __future__ import annotations

import _ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ascend_simulator
import pytest
from ascend_process import output_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

SHOW = "print(*sorted(k for k, v in _native.ascend_capabilities().items() if v))"
OLDEST = {"capture"}
OF_9_1 = {"task_params", "task_update"}
OF_8_5 = {
    *OLDEST,
    "exchange_mode",
    "host_args",
    "memcpy_offset",
    "explicit_build",
    "kernel_launch",
    "finalize_reference",
    "stream_count",
}


@pytest.mark.parametrize(
    ("version", "present", "absent"),
    [
        ("8.1", OLDEST, OF_8_5 - OLDEST - {"kernel_launch", "stream_count"} | OF_9_1),
        ("8.5", OF_8_5, OF_9_1),
        ("9.0", OF_8_5, OF_9_1),
        ("9.1", OF_8_5 | OF_9_1, set()),
    ],
)
def test_capabilities_follow_what_the_library_has(ascend, version, present, absent):
    found = set(output_of(f"ascend.set_personality({version!r})\n{SHOW}").split())
    assert present <= found
    assert not absent & found


@pytest.mark.parametrize(
    ("hidden", "has"),
    [
        (["aclrtGetMemcpyDescSize", "aclrtSetMemcpyDesc", "aclrtMemcpyAsyncWithDesc"], True),
        (["aclrtMemcpyAsyncWithOffset"], False),
    ],
)
def test_copies_whose_addresses_move_need_their_one_function_alone(ascend, hidden, has):
    found = output_of(f"for function in {hidden}: ascend.hide(function)\n{SHOW}").split()
    assert ("memcpy_offset" in found) == has


@pytest.fixture
def split(ascend) -> dict[str, str]:
    """Variables of a process with libacl_rt.so and libacl_mdl.so, and no libascendcl.so."""
    return {"ASCEND_SIMULATOR": "split", "LD_LIBRARY_PATH": str(ascend_simulator.SPLIT)}


def test_functions_are_found_in_each_of_the_split_libraries(ascend, split):
    """As in CANN 8.5 and later: each library lacks the other's functions."""
    says = output_of(
        f"""
{SHOW}
from pathlib import Path
import ctypes
loaded = {{Path(line.split()[-1]).name for line in open("/proc/self/maps") if ".so" in line}}
print(*sorted(one for one in loaded if one.startswith(("libacl", "libascend"))))
for name, has in (
    ("libacl_rt.so", "aclmdlRIExecuteAsync"),
    ("libacl_mdl.so", "aclmdlExecuteAsync"),
):
    library = ctypes.CDLL(name)
    print(hasattr(library, has))
""",
        environment=split,
    )
    capabilities, libraries, *has = says.splitlines()
    assert capabilities == output_of(SHOW)
    assert libraries == "libacl_mdl.so libacl_rt.so"
    assert has == ["True", "True"]


@pytest.mark.parametrize("module", ["test_ascend_offline.py", "test_ascend_captured.py"])
def test_models_run_on_the_split_libraries(split, module):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name(module)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **split},
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout


def test_without_the_library_of_offline_models_the_rest_works(split, tmp_path):
    found = set(output_of(SHOW, environment=split).split())
    assert "offline_model" in found
    without = {**split, "LD_LIBRARY_PATH": str(tmp_path)}
    assert set(output_of(SHOW, environment=without).split()) == found - {"offline_model"}


def test_a_function_that_is_needed_is_named(ascend):
    says = output_of("""
ascend.hide("aclrtMalloc")
try:
    _native.ascend_device_count()
except BackendUnavailable as error:
    print(error)
""")
    assert "the Ascend runtime has no aclrtMalloc in libascendcl.so" in says


def test_without_the_library_its_name_is_said():
    says = output_of(
        """
import offload
from offload.backends import find_backend
try:
    find_backend("npu").machine()
except offload.BackendUnavailable as error:
    print(error)
""",
        simulated=False,
    )
    for library in ("libascendcl.so", "libacl_rt.so", "libacl_mdl.so"):
        assert library in says


def test_a_runtime_that_somebody_has_initialised_is_used(ascend):
    """As torch_npu initialises it; the reference is released without ending the runtime."""
    says = output_of("""
assert ascend.code("aclInit", 0) == 0
print(_native.ascend_device_count(), ascend.calls("aclInit"))
_native.ascend_release()
print(ascend.calls("aclFinalizeReference"), ascend.calls("aclFinalize"))
ascend.call("aclrtSetDevice", 0)
print("works")
""")
    assert says.splitlines() == ["1 2", "1 0", "works"]


def test_a_runtime_that_does_not_start_is_said(ascend):
    says = output_of("""
ascend.fail("aclInit", 507033)
try:
    _native.ascend_device_count()
except BackendUnavailable as error:
    print(error)
print(_native.ascend_device_count())
""")
    first, second = says.splitlines()[0], says.splitlines()[-1]
    assert "the Ascend runtime does not start: 507033 ACL_ERROR_RT_DEV_SETUP_ERROR" in first
    assert second == "1"  # tried again


LOAD_BY_GATHER = """
import torch
import offload
from ascend_kernels import AtenCapturer
from simulated_ascend import SimulatedAscendBackend
from offload import backends
ascend.begin()
ascend.set_eager(True)
made = SimulatedAscendBackend(AtenCapturer(ascend, has_gather=False), refresh="gather")
backends._BACKENDS[made.name] = lambda: made
captured = offload.capture(torch.sin, torch.ones(3))
"""


def test_a_gather_without_a_kernel_and_operators_is_not_built(ascend):
    """Nothing is made; once the operators are available, they are found."""
    says = output_of(
        LOAD_BY_GATHER
        + """
print(not _native.ascend_missing_operators())
live_bytes = ascend.live_bytes
try:
    captured.load(made.name)
except BackendUnavailable as error:
    print(error)
print(ascend.live_bytes - live_bytes)
import npu_device
npu_device.operators()
with captured.load(made.name) as run:
    x = torch.randn(3)
    print(torch.equal(run(x), x.sin()), not _native.ascend_missing_operators())
"""
    )
    absent, error, n_bytes, there = says.splitlines()
    assert (absent, n_bytes, there) == ("False", "0", "True True")
    assert "addresses cannot be gathered on the device" in error
    assert "aclnnIndexSelectGetWorkspaceSize, aclnnIndexSelect" in error
    assert "refresh='host'" in error


def test_an_operator_library_that_lacks_the_operators_is_none(ascend, tmp_path):
    shutil.copy(_ctypes.__file__, tmp_path / "libopapi.so")
    says = output_of(
        "print(_native.ascend_missing_operators())", environment={"LD_LIBRARY_PATH": str(tmp_path)}
    )
    assert "aclCreateTensor" in says
    assert "aclnnAdd" in says.split(", ")
    assert "aclSetAclOpExecutorRepeatable" not in says  # planned each time without it


@pytest.mark.parametrize(
    ("names", "has"),
    [
        (["libopapi_math.so", "libopapi_nn.so"], True),  # where libopapi.so no longer exists
        (["libopapi.so"], True),
        (["libopapi_cv.so"], False),
    ],
)
def test_operators_come_from_the_libraries_of_old_and_new_releases(names, has, ascend, tmp_path):
    for name in names:
        (tmp_path / name).symlink_to(ascend_simulator.LIBRARY.with_name("libopapi.so"))
    says = output_of(
        "print(_native.ascend_missing_operators())", environment={"LD_LIBRARY_PATH": str(tmp_path)}
    )
    assert (says == "") is has


def test_an_old_runtime_says_what_a_model_needs(ascend):
    says = output_of("""
from offload.backends.ascend import AscendBackend
for name in ("aclrtLaunchKernel", "aclmdlRICaptureBegin", "aclmdlRIBuildBegin"):
    ascend.hide(name)
try:
    AscendBackend(object()).machine()
except BackendUnavailable as error:
    print(error)
""")
    assert "cannot launch custom kernels (aclrtLaunchKernel)" in says
    assert "cannot make a model by build or capture" in says


def test_a_library_that_cannot_be_opened_is_said_where_others_can(tmp_path):
    """Not that a function is missing in libraries that never have it."""
    (tmp_path / "libascendcl.so").write_text("no library")
    shutil.copy(_ctypes.__file__, tmp_path / "libnnopbase.so")
    code = """
from offload.native import _native
from offload.errors import BackendUnavailable
try:
    _native.ascend_device_count()
except BackendUnavailable as error:
    print(error)
"""
    says = output_of(code, simulated=False, environment={"LD_LIBRARY_PATH": str(tmp_path)})
    assert "has no aclInit" in says
    assert "libascendcl.so: " in says


def test_the_store_is_pinned_memory_of_the_runtime(ascend):
    """On a driver that cannot pin registered memory, and only notes it."""
    says = output_of("""
import torch
ascend.begin()
ascend.set_locks_registered(False)
memory = ascend.make("aclrtMalloc", 64, 0)
content = torch.full((64,), 7, dtype=torch.uint8)
stream = _native.AscendWeightStream(
    device=0,
    memory_bytes=64,
    granule_bytes=1,
    weights=[
        _native.StreamedWeight(
            name="w", size_bytes=64, pieces=[(0, 64, 0, True)], source=content
        )
    ],
    transfers=[(0, 0, 0, 0, 0, -1)],
    n_launches=1,
    memory=memory,
    release=lambda: print("released"),
)
print(ascend.live("host memory"), ascend.live("registration"))
stream.load()
stream.close()
stream.give_back()
print(ascend.host_bytes)
""")
    assert says.splitlines() == ["1 0", "released", "0"]


def test_where_a_thread_cannot_be_let_through_the_error_says_what_to_do(ascend):
    """As before CANN 8.5. A capture in RELAXED mode forbids nothing."""
    says = output_of("""
import ctypes
import npu_device
npu_device.operators()
from ascend_residents import Chain
from offload.errors import ExecutionError
ascend.begin()
ascend.hide("aclmdlRICaptureThreadExchangeMode")
for mode in (0, 2):
    stream = ascend.make("aclrtCreateStream")
    ascend.in_thread(lambda: ascend.call("aclmdlRICaptureBegin", stream, mode))
    try:
        Chain(ascend, refresh="operators")
        print("loaded")
    except ExecutionError as error:
        print(" ".join(str(error).split()))
    ascend.code("aclmdlRICaptureEnd", stream, ctypes.byref(ctypes.c_uint64()))
""")
    refused, loaded = says.splitlines()
    assert "107030" in refused
    assert 'begin it in RELAXED mode (capture_error_mode="relaxed")' in refused
    assert loaded == "loaded"
