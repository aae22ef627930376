"""The requirements of a wheel: those of every build, and the torch that this build links against.

The build backend calls this module (`provider` in pyproject.toml). torch's C++ ABI holds within one
minor version, so that the wheel asks for the minor version that it was compiled against.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> list[str]:
    """List what the wheel requires.

    Args:
        field: what is asked for, which is `dependencies`.
        settings: `always`, the requirements that do not depend on the build.

    Returns:
        These, and the minor version of torch that is installed where the wheel is built.

    Raises:
        RuntimeError: another field is asked for, or no torch is installed.
    """
    if field != "dependencies":
        raise RuntimeError(f"expected the field dependencies, got {field}")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            "offload is compiled against the torch that is installed, and there is none: install "
            "torch first, or build without --no-build-isolation"
        ) from None
    major, minor = version.split(".")[:2]
    return [*settings["always"], f"torch=={major}.{minor}.*"]


def dynamic_wheel(field: str, settings: Mapping[str, Any]) -> bool:
    """Whether a wheel of the same sources may have another value: it depends on torch."""
    return field == "dependencies"
