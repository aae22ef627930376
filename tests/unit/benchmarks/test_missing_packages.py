"""Messages about a Python that lacks packages, before anything is built for it."""

from __future__ import annotations

import sys

import pytest

import missing_packages


def test_packages_that_are_there_are_not_missing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["missing_packages.py", "pytest", "numpy>=1.2"])
    assert missing_packages.main() == 0
    assert capsys.readouterr().err == ""


def test_missing_and_old_packages_are_named_all_at_once(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["missing_packages.py", "nobody-has-this", "torch>=999.1"])
    assert missing_packages.main() == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "needs nobody-has-this: not installed" in first
    assert "needs torch>=999.1: " in second
    assert second.endswith("is installed")


def test_versions_are_compared_by_their_numbers(monkeypatch):
    monkeypatch.setattr(missing_packages.metadata, "version", lambda name: "2.11.0+cu130")
    assert missing_packages.missing(["torch>=2.9", "torch>=2.11"]) == []
    assert missing_packages.missing(["torch>=2.12"]) == ["torch>=2.12: 2.11.0+cu130 is installed"]


def test_other_forms_are_refused():
    with pytest.raises(ValueError, match="expected NAME or NAME>=VERSION"):
        missing_packages.missing(["torch==2.11"])
