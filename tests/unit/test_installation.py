"""What an installation says of torch: what it was built against, and which others it refuses."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from offload.native import _native
from offload.native.installed_torch import TORCH_VERSION, check_torch


def import_offload(*before: str) -> subprocess.CompletedProcess[str]:
    lines = ["import sys", *before, "import offload"]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )


def test_the_requirement_is_the_torch_that_was_compiled_against():
    minor = ".".join(torch.__version__.split(".")[:2])
    required = importlib.metadata.requires("offload") or []
    assert f"torch=={minor}.*" in required
    assert [one for one in required if one.startswith("torch")] == [f"torch=={minor}.*"]
    assert _native.torch_version.split("+")[0] == TORCH_VERSION


def test_another_torch_is_refused_before_the_native_module_is_loaded(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.1.2+cpu'\n")
    done = import_offload(
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "sys.modules['offload.native._native'] = None  # whoever imports it fails otherwise",
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this build of offload is for torch ")
    assert f"compiled against {TORCH_VERSION}" in last
    assert "torch 2.1.2+cpu is installed" in last
    assert "pip install --no-build-isolation" in last


def test_a_missing_torch_is_named():
    done = import_offload("sys.modules['torch'] = None")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: offload needs torch ")
    assert "pip install 'torch==" in last


def test_builds_of_one_minor_version_fit():
    major, minor, *_ = TORCH_VERSION.split(".")
    check_torch(f"{major}.{minor}.9+cu130")
    with pytest.raises(ImportError, match="build it again"):
        check_torch(f"{major}.{int(minor) + 1}.0")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan-memory", "{csv}"]])
def test_commands_that_need_no_torch_do_not_import_it(arguments, tmp_path):
    buffers = tmp_path / "buffers.csv"
    buffers.write_text("id,lower,upper,size\n0,0,2,64\n1,1,3,32\n")
    lines = [
        "import sys",
        "import offload.cli",
        f"sys.argv[1:] = {[one.format(csv=buffers) for one in arguments]!r}",
        "try: offload.cli.main()",
        "except SystemExit as ended: assert ended.code == 0, ended.code",
        "assert 'torch' not in sys.modules",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if arguments[0] == "plan-memory":
        assert done.stdout.startswith("arena 96 bytes, lower bound 96 bytes")
