"""The demo: semantic search over a page of text with a captured sentence encoder."""

from offload.commands.demo.search import (
    QUERIES,
    DemoUnavailable,
    Encoder,
    Hit,
    Ranking,
    Search,
    load_encoder,
    read_page,
    search_page,
)

__all__ = [
    "QUERIES",
    "DemoUnavailable",
    "Encoder",
    "Hit",
    "Ranking",
    "Search",
    "load_encoder",
    "read_page",
    "search_page",
]
