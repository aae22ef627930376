"""Cases that several processes run together, each as a rank, and their results."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_TIMEOUT_S = 900

Case = Callable[[], Any]


class Found:
    """Results of the ranks in each case, by its name."""

    def __init__(self, folder: Path, n_ranks: int, log: str) -> None:
        self._lines = [_read(folder / f"{rank}.jsonl") for rank in range(n_ranks)]
        self._log = log

    def of(self, case: str) -> list[Any]:
        """Return the result of each rank.

        Raises:
            AssertionError: a rank has not run the case, or raised.
        """
        return [self.of_rank(rank, case) for rank in range(len(self._lines))]

    def of_rank(self, rank: int, case: str) -> Any:
        """Return the result of one rank, where others may have ended.

        Raises:
            AssertionError: as `of`.
        """
        lines = self._lines[rank]
        assert case in lines, f"rank {rank} did not come to {case}:\n{self._log[-6000:]}"
        assert "raised" not in lines[case], f"rank {rank} in {case}:\n{lines[case]['raised']}"
        return lines[case]["returned"]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return {line["case"]: line for line in map(json.loads, text.splitlines())}


@functools.cache
def run_by_torchrun(module: str, n_ranks: int) -> Found:
    """Run all cases of a module in processes started by `torchrun`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(n_ranks), str(_FOLDER / f"{module}.py"), folder),
        ]
        done = subprocess.run(
            command,
            env=_environment({}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        return Found(Path(folder), n_ranks, done.stdout)


def run_alone(module: str, n_ranks: int, *cases: str) -> tuple[Found, list[int]]:
    """Run cases in unsupervised processes; return their results and exit statuses."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, str(_FOLDER / f"{module}.py"), folder, *cases],
                env=_environment(
                    {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(n_ranks),
                        "MASTER_ADDR": "localhost",
                    }
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(n_ranks)
        ]
        try:
            logs = [one.communicate(timeout=_TIMEOUT_S)[0] for one in processes]
        finally:
            for one in processes:
                one.kill()
                one.wait()
        return Found(Path(folder), n_ranks, "\n".join(logs)), [one.returncode for one in processes]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(map(str, (_FOLDER, _FOLDER.parent)))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def _meet(folder: Path) -> None:
    """Wait until all ranks are here: they may start later than the timeout of their groups.

    Then the first one chooses a port for the store, if none is given.
    """
    rank, n_ranks = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    (folder / f"{rank}.here").touch()
    _wait_for([folder / f"{one}.here" for one in range(n_ranks)])
    if "MASTER_PORT" in os.environ:
        return
    chosen = folder / "port"
    if rank == "0":
        with socket.create_server(("", 0)) as server:
            (folder / "new").write_text(str(server.getsockname()[1]))
        (folder / "new").rename(chosen)
    _wait_for([chosen])
    os.environ["MASTER_PORT"] = chosen.read_text()


def _wait_for(paths: Sequence[Path]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not all(one.exists() for one in paths):
        assert time.monotonic() < deadline, [one.name for one in paths if not one.exists()]
        time.sleep(0.01)


def main(cases: Mapping[str, Case], begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Run all cases, or the named one, as one rank."""
    folder, *named = sys.argv[1:]
    os.environ["RANKS_FOLDER"] = folder
    _meet(Path(folder))
    begin()
    with (Path(folder) / f"{os.environ['RANK']}.jsonl").open("w") as lines:
        for name in named or list(cases):
            line: dict[str, Any] = {"case": name}
            try:
                line["returned"] = cases[name]()
            except Exception:
                line["raised"] = traceback.format_exc()
            lines.write(json.dumps(line) + "\n")
            lines.flush()
    end()


def end_here() -> None:
    """End this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)
