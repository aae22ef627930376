"""Intervals to place: published instances, and random ones."""

import csv
import hashlib
import random
from pathlib import Path

from offload.plan.memory import Interval, place_intervals

INSTANCES = sorted((Path(__file__).parents[2] / "data" / "minimalloc").glob("*.csv"))
CHALLENGING = [path for path in INSTANCES if path.name != "input.12.csv"]


def read_instance(path):
    with path.open(newline="") as lines:
        return [
            Interval(int(row["lower"]), int(row["upper"]), int(row["size"]))
            for row in csv.DictReader(lines)
        ]


def random_intervals(count, seed):
    numbers = random.Random(seed)
    return [
        Interval(step, step + numbers.randint(1, 12), 64 * numbers.randint(1, 99))
        for step in range(count)
    ]


def digest():
    """A digest of all that planning returns, for greedy and searched placements."""
    hasher = hashlib.sha256()
    for intervals in (random_intervals(500, seed=2), *map(read_instance, INSTANCES)):
        hasher.update(repr(place_intervals(intervals)).encode())
    return hasher.hexdigest()
