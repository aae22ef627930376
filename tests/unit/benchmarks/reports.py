"""Benchmark reports with a known truth: true ratios, and rounds drawn around them."""

from __future__ import annotations

import json

import numpy as np

import measurements

MACHINE = {
    "cores": 2,
    "python_version": "3.11.7",
    "cpu": {"brand_raw": "Test Processor"},
    "packages": {"torch": "2.13.0", "openvino": "2026.4.1"},
}


def timed(true_ratio, rng, *, noise=0.2, rounds=60, disturbed=0.0, at_least=None):
    """Return a ratio measured in rounds: times are drawn, and some rounds are disturbed."""
    both = np.where(rng.random(rounds) < disturbed, 5.0, 1.0)
    ours = both * rng.lognormal(0, noise, rounds)
    theirs = both * true_ratio * rng.lognormal(0, noise, rounds)
    return measurements.ratio_of(list(theirs), list(ours), at_least=at_least)


def case(title="a model", **fields):
    return measurements.Case(title, **fields)


def write_report(path, claims, machine=MACHINE):
    """Write a file as pytest-benchmark does. `claims`: by name the claim's text and its cases."""
    benchmarks = [
        {"name": "test", "extra_info": {"measurements": measurements.as_json(name, text, one)}}
        for name, (text, cases) in claims.items()
        for one in cases
    ]
    benchmarks.append({"name": "test_that_recorded_no_case", "extra_info": {}})
    path.write_text(json.dumps({"machine_info": machine, "benchmarks": benchmarks}))
    return path


def read(path):
    return measurements.read_report(path)
