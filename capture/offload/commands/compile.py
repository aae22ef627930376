"""`offload compile`: kernels, made ahead of time."""

from __future__ import annotations

import time
from pathlib import Path

import click

from offload.api.captured import open_model
from offload.api.offline_model import OfflineModel
from offload.compile.cache import CacheRefused, KernelCache
from offload.console.text import printable


def compile_kernels(file: Path, *, auto: bool) -> None:
    """Make the kernels of a saved program, and report on them."""
    opened = open_model(file, triton=True)  # none is compiled: the CPU refuses Triton kernels
    if isinstance(opened, OfflineModel):
        raise click.UsageError(f"{file} is an offline model (.om), which holds its kernels")
    begin = time.perf_counter()
    try:
        cache = KernelCache()
    except CacheRefused as error:
        raise click.ClickException(str(error)) from error
    if auto:
        cache.forget_choices(opened.program)
    with opened.load("cpu", fuse="auto" if auto else True) as executable:
        fusion = executable.fusion
    assert fusion is not None  # as loaded
    for line in fusion.explain():
        click.echo(printable(line))
    if not fusion.regions and fusion.choice is None:
        raise click.ClickException("no kernel was made")
    took = f"{time.perf_counter() - begin:.1f} s"
    click.echo(f"in {took}; kernels are in {printable(str(cache.folder))}")
