"""The check of torch when offload is imported, before any module that is linked against it.

The package runs it first. A native module with another torch fails with an undefined symbol, or
later silently. The check does not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path

from offload.native._built_against import TORCH_VERSION

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_torch(found: str) -> None:
    """Compare a version of torch with the version that offload was built against.

    Args:
        found: the installed version, such as `2.13.0+cpu`.

    Raises:
        ImportError: another minor version, whose C++ interface differs; the message says how to
            build offload again.
    """
    if _minor(found) != _minor(TORCH_VERSION):
        raise ImportError(
            f"this build of offload is for torch {_minor(TORCH_VERSION)} (compiled against "
            f"{TORCH_VERSION}), and torch {found} is installed: build it again from its sources "
            f"({_REBUILD}), or install the torch that it is for "
            f"(pip install 'torch=={_minor(TORCH_VERSION)}.*')"
        )


def check_installed_torch() -> None:
    """Compare the installed torch with the version that offload was built against.

    Raises:
        ImportError: torch is not installed, or as `check_torch`.
        SystemExit: likewise, if this process is the command `offload`: the package is imported
            before the command's own code, which could report it without a traceback.
    """
    try:
        check_torch(installed_version())
    except ImportError as error:
        if _is_command():
            raise SystemExit(f"Error: {error}") from None
        raise


def _is_command() -> bool:
    """Whether this process is `offload`, by its script or as `python -m offload`."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None:
        return script == sys.argv[0] and Path(script).name.removesuffix(".exe") == "offload"
    # While Python looks for the module that -m names, the name is only among Python's arguments.
    given = " ".join(sys.orig_argv)
    return sys.argv[:1] == ["-m"] and re.search(r" -\w*m ?offload( |$)", given) is not None


def installed_version() -> str:
    """The version of the torch that `import torch` would find, or has found.

    Raises:
        ImportError: torch is not installed.
    """
    if (imported := sys.modules.get("torch")) is not None:
        return str(imported.__version__)
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise ImportError(
            f"offload needs torch {_minor(TORCH_VERSION)}, and no torch is installed: "
            f"pip install 'torch=={_minor(TORCH_VERSION)}.*'"
        )
    for folder in spec.submodule_search_locations or ():
        with contextlib.suppress(OSError):
            text = (Path(folder) / "version.py").read_text()
            if found := re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE):
                return found[1]
    return str(importlib.import_module("torch").__version__)
