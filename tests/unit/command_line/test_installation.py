"""How an installation treats torch: the version it was built against, and those it refuses."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

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


@pytest.fixture
def other_torch(tmp_path):
    """An environment in which another torch is found first."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.1.2+cpu'\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


SCRIPT = Path(sysconfig.get_path("scripts")) / "offload"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [str(SCRIPT)],
        [sys.executable, "-m", "offload"],
        [sys.executable, "-moffload"],
        [sys.executable, "-W", "error", "-Bm", "offload"],
    ],
    ids=["script", "module", "joined", "options"],
)
@pytest.mark.parametrize("arguments", [["doctor"], ["--help"], []])
def test_the_command_refuses_another_torch_in_one_paragraph(other_torch, command, arguments):
    done = subprocess.run(
        [*command, *arguments], env=other_torch, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: this build of offload is for torch ")
    assert "torch 2.1.2+cpu is installed" in line


@pytest.mark.parametrize("option", ["-c", "-m", "file"])
def test_code_that_imports_offload_may_catch_the_refusal(other_torch, tmp_path, option):
    text = "try: import offload\nexcept ImportError as error: print(str(error)[:21])"
    (tmp_path / "mine.py").write_text(text)
    what = {"-c": ["-c", text], "-m": ["-m", "mine"], "file": [str(tmp_path / "mine.py")]}[option]
    done = subprocess.run(
        [sys.executable, *what, "-m", "offload"],
        env=other_torch,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "this build of offload\n"), done.stderr


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


@pytest.mark.slow
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
