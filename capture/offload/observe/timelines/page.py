"""The timeline as an HTML page that needs no other file, script or network."""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from offload.observe.timelines.figures import figures_svg
from offload.observe.timelines.summary import (
    SHOWN_EXECUTIONS,
    SHOWN_LAUNCHES,
    cost_sentence,
    heading,
    launch_groups,
    median_sentences,
    microseconds,
    sections_of,
)
from offload.observe.timelines.trace import trace_of

if TYPE_CHECKING:
    from offload.timeline.timeline import Timeline


def save_page(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write the page: the figures as SVG, the tables, and the trace as a compressed download.

    Args:
        timeline: at least one execution with spans.
        path: of the page.
    """
    source = importlib.resources.files("offload.observe.timelines").joinpath("page.html")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["microseconds"] = microseconds
    template = environment.from_string(source.read_text("utf-8"))
    groups = launch_groups(timeline.executions)
    trace = gzip.compress(json.dumps(trace_of(timeline)).encode(), mtime=0)
    page = template.render(
        heading=heading(timeline),
        medians=median_sentences(timeline),
        # Without the XML prolog, which names a DTD on the network.
        figures=Markup(figures_svg(timeline).partition("<svg")[2]),
        sections=sections_of(timeline.executions),
        shown_executions=SHOWN_EXECUTIONS,
        groups=groups,
        waited=any(group.wait_ns for group in groups),
        shown_launches=SHOWN_LAUNCHES,
        predicted=any(one.predicted for one in timeline.executions),
        cost=cost_sentence(timeline),
        trace=base64.b64encode(trace).decode(),
    )
    Path(path).write_text(page, "utf-8")
