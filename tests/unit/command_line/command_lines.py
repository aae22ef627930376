"""Runs of the command line, in this process."""

from __future__ import annotations

from typing import Any

import torch
from click.testing import CliRunner, Result

from offload import cli


def offload_command(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def failure_of(result: Result) -> str:
    """The single paragraph on stderr of a command that failed without a traceback."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


class Scorer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x).relu() * mask
        return {"scores": scores, "first": scores[0]}
