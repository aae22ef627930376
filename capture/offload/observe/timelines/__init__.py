"""Timelines as a table, a trace file, a picture or a page."""
