"""The demo as a command: runs the search and prints the result."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.table import Table

from offload.commands.demo.search import (
    QUERIES,
    Ranking,
    Search,
    load_encoder,
    read_page,
    search_page,
)
from offload.console.progress import reporting, stage
from offload.console.text import plain
from offload.observe.report import report_table
from offload.observe.timelines.summary import microseconds


def show_demo(*, as_json: bool) -> None:
    """Search the page, and print the result as tables or as JSON."""
    with reporting(after_s=0):
        with stage("loading transformers and the sentence encoder"):
            encoder = load_encoder()
        search = search_page(encoder, read_page(), QUERIES)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(search), indent=2))
    else:
        _print_search(Console(), search)


def _print_search(console: Console, search: Search) -> None:
    for ranking in search.rankings:
        console.print(_ranking_table(ranking))
    console.print(
        f"\nlargest difference from eager over {search.n_sentences} sentences and "
        f"{len(search.rankings)} queries: {search.largest_difference:.3g}"
    )
    ratio = search.eager_ns / search.replay_ns
    console.print(
        f"eager {microseconds(search.eager_ns)}, replay {microseconds(search.replay_ns)} per "
        f"sentence (medians): {ratio:.2f} times as fast\n"
    )
    console.print(report_table(search.report))


def _ranking_table(ranking: Ranking) -> Table:
    table = Table(
        title=plain(f"\n{ranking.query}"), title_justify="left", box=None, show_header=False
    )
    for hit in ranking.hits:
        table.add_row(f"{hit.score:.3f}", plain(hit.sentence))
    return table
