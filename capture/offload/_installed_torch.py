"""The check of torch when offload is imported, before anything that is linked against it.

Imported first by the package. A native module that meets another torch fails with an undefined
symbol, or later without a word.
"""

from __future__ import annotations

import importlib.util

from offload._built_against import TORCH_VERSION

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_torch(found: str) -> None:
    """Compare a version of torch with the one that offload was built against.

    Args:
        found: the version that is installed, such as `2.13.0+cpu`.

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


if importlib.util.find_spec("torch") is None:
    raise ImportError(
        f"offload needs torch {_minor(TORCH_VERSION)}, and no torch is installed: "
        f"pip install 'torch=={_minor(TORCH_VERSION)}.*'"
    )

import torch  # noqa: E402

check_torch(torch.__version__)
