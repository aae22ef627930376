"""A copy of the working tree, in which mutants are tested: the tree itself is never changed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mutations.areas import ROOT

WORK = ROOT / "build" / "mutations"
TREE = WORK / "tree"
EXTENSIONS = TREE / "capture" / "offload" / "native"

# An editable install finds `offload` by a finder that precedes the path.
_SITE = """\
import sys

sys.meta_path[:] = [one for one in sys.meta_path if "ScikitBuild" not in type(one).__name__]
"""


def make() -> None:
    """Bring the copy up to date with the working tree and the installed extension modules.

    This process and its children then import `offload` from the copy.

    Raises:
        RuntimeError: `offload` is not installed.
    """
    files = _listed("--cached", "--others", "--exclude-standard")
    present = {path for path in files if (ROOT / path).is_file()}
    for path in present:
        _copy(ROOT / path, TREE / path)
    for path in _suffixed(TREE, {".py", ".cpp", ".hpp"}) - present:
        (TREE / path).unlink()
    spec = importlib.util.find_spec("offload.native._native")
    if spec is None or spec.origin is None:
        raise RuntimeError("offload is not installed in this environment: run make first")
    for module in Path(spec.origin).parent.iterdir():
        if module.suffix in (".so", ".py") and module.name != "__init__.py":
            _copy(module, EXTENSIONS / module.name)
    site = WORK / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (site, TREE / "capture", ROOT / "tests")))


def state_of_tree() -> str:
    """Return what git says of the product in the working tree, the same before and after."""
    command = ["git", "diff", "HEAD", "--", "capture", "native"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def mutated(path: str, content: str) -> Iterator[Path]:
    """Write `content` into the copy of a file, and restore it after the block."""
    original, copy = ROOT / path, TREE / path
    copy.write_text(content, encoding="utf-8")
    try:
        yield copy
    finally:
        shutil.copy2(original, copy)


def _listed(*options: str) -> list[str]:
    answer = subprocess.run(
        ["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for path in answer.stdout.split("\0") if path]


def _copy(original: Path, copy: Path) -> None:
    old, new = original.stat(), copy.stat() if copy.exists() else None
    if new is None or (old.st_size, old.st_mtime_ns) != (new.st_size, new.st_mtime_ns):
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(original, copy)


def _suffixed(folder: Path, suffixes: set[str]) -> set[str]:
    found = (path for path in folder.rglob("*") if path.suffix in suffixes)
    inside = (path.relative_to(folder) for path in found if path.parent != EXTENSIONS)
    return {str(path) for path in inside if path.parts[0] != "build"}
