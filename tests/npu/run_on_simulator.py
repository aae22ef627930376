"""Runs the tests of this folder with torch_npu on the simulated NPU, in a separate environment.

    python tests/npu/run_on_simulator.py ENVIRONMENT REQUIREMENT [arguments of pytest]

torch_npu is never among the project's own packages: where CANN is missing it breaks `import torch`.
The environment therefore holds only its wheel, and takes torch and all else from the environment
whose Python runs this. Without a wheel for the platform nothing is run, and a message says so.
"""

from __future__ import annotations

import os
import platform
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

# Platforms of torch_npu 2.13.0 in the index: Linux with glibc 2.28 or later, CPython 3.10 to 3.14.
MACHINES = ("x86_64", "aarch64")
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)
OLDEST_GLIBC = (2, 28)

# Selects from the conformance suite; "npu" is in "input".
ON_NPU = "npu and not (simulated or cuda or cpu or null)"


def why_no_wheel() -> str:
    """Return why torch_npu has no wheel for this platform; empty if it has one."""
    python = sys.version_info[:2]
    name, version = platform.libc_ver()
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return f"torch_npu has no wheel for {platform.system()} on {platform.machine()}"
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < OLDEST_GLIBC:
        return f"torch_npu has no wheel for {name or 'this C library'} {version}"
    if (
        platform.python_implementation() != "CPython"
        or not OLDEST_PYTHON <= python <= NEWEST_PYTHON
    ):
        return f"torch_npu has no wheel for {platform.python_implementation()} {python}"
    return ""


def make_environment(directory: Path, requirement: str) -> Path:
    """Return the Python of an environment with the wheel, made unless it exists.

    CalledProcessError where pip fails, after pip's message.
    """
    python = directory / "bin" / "python"
    stamp = directory / f"{requirement.replace('==', '-')}-{sys.implementation.cache_tag}"
    if stamp.exists():
        return python
    venv.EnvBuilder(clear=True, with_pip=False, symlinks=True).create(directory)
    packages = {"base": str(directory), "platbase": str(directory)}
    own = Path(sysconfig.get_path("purelib", "venv", packages))
    lent = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in lent]
    (own / "lent_packages.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--progress-bar", "off", "--no-deps", requirement], check=True)
    stamp.touch()
    return python


def main() -> int:
    """Return pytest's exit status; 0 where there is no wheel."""
    directory, requirement, *arguments = sys.argv[1:]
    if reason := why_no_wheel():
        print(f"skipped: {reason}")
        return 0
    python = make_environment(Path(directory).absolute(), requirement)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    here = Path(__file__).parent
    status = 0
    for what in (
        [str(here)],
        [
            str(here.parent / "conformance"),
            "-k",
            ON_NPU,
            "-W",
            "default",
        ],
    ):
        command = [str(python), "-m", "pytest", *what, *arguments]
        status = subprocess.run(command, env=environment, check=False).returncode or status
    return status


if __name__ == "__main__":
    sys.exit(main())
