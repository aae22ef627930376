"""Families in files: written, read again, and refused where their parts do not fit."""

from __future__ import annotations

import copy
import json
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import offload
from offload.errors import FileError, OffloadError, ProgramError
from offload.program import check_program, decode_program, encode_program
from offload.program.encode import FAMILY, with_family
from offload.program.family_data import decode_family, encode_family
from offload.program.reader import Node, parse

N = Dim("n", min=2, max=90)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, length):
        y = self.inner(x) + torch.arange(x.shape[0])[:, None] * 0.5
        return (y * 2 if x.shape[0] > 3 else y)[:length], length + 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("families") / "saved.offload"
    model = Positions().eval()
    shapes = {"x": {0: N}, "length": Dim("k", min=1, max=4)}
    with torch.no_grad():
        captured = offload.capture(model, torch.randn(7, 4), 2, dynamic_shapes=shapes)
        captured.save(path)
    return model, captured, path


def test_a_family_comes_back_as_it_was(saved):
    model, captured, path = saved
    opened = offload.open(path)
    assert opened.family == captured.family
    run = opened.load(sizes=offload.Sizes())
    with torch.no_grad():
        for size, length in ((4, 1), (50, 4), (7, 2), (90, 3)):
            x = torch.randn(size, 4)
            got, following = run(x, length)
            assert torch.equal(got, model(x, length)[0])
            assert following == length + 1
        with pytest.raises(offload.BindingError, match=r"expected 3 < n.*test_family_files\.py"):
            run(torch.randn(3, 4), 1)
        x = torch.randn(7, 4)
        assert torch.equal(opened.load()(x, 2)[0], model(x, 2)[0])  # only the recorded size


def test_a_file_of_one_size_is_as_older_versions_read_it(saved, tmp_path):
    model, _, path = saved
    with torch.no_grad():
        offload.capture(model, torch.randn(7, 4), 2).save(tmp_path / "plain")
    assert offload.open(tmp_path / "plain").family is None
    versions = []
    for one in (tmp_path / "plain", path):
        with zipfile.ZipFile(one) as archive:
            data = json.loads(archive.read("program.json"))
        versions.append((data["version"], FAMILY in data))
    assert versions == [(1, False), (2, True)]


def data_of(saved):
    family = saved[1].family
    return json.loads(
        json.dumps(with_family(encode_program(family.program), encode_family(family)))
    )


def decoded(data):
    root = parse(json.dumps(data).encode(), "program.json")
    return decode_family(root.mapping()[FAMILY], decode_program(root))


LIES = {
    "a dim without a place": lambda family: family["places"].pop(),
    "two dims of one name": lambda family: family["dims"][1].update(name="n"),
    "a recorded size out of range": lambda family: family["dims"][0].update(recorded=1),
    "another recorded size": lambda family: family["dims"][0].update(recorded=8),
    "a place without a dim": lambda family: family["places"][0].update(dim=2),
    "an input that is not there": lambda family: family["places"][0].update(leaf=1),
    "an axis that is not there": lambda family: family["places"][0].update(axis=2),
    "a constant that is no number": lambda family: family["places"][1].update(constant=7),
    "a launch that is not there": lambda family: family["foldable"].append(99),
    "a number that is not there": lambda family: family["varying"].append([9999, 0]),
    "an expression that is not there": lambda family: family["varying"].append([1, 999]),
    "a number twice": lambda family: family["varying"].append(family["varying"][0]),
    "an operation that is none": lambda family: family["expressions"].append([["sine"]]),
    "a result that is missing": lambda family: family["expressions"].append([["size", 0], ["add"]]),
    "a dim in code that is not there": lambda family: family["expressions"].append([["size", 5]]),
    "a number where none belongs": lambda family: family["expressions"].append([["add", 1]]),
    "no number where one belongs": lambda family: family["expressions"].append([["size"]]),
    "an integer as a fraction": lambda family: family["expressions"].append([["real", 1]]),
    "a guard that does not hold": lambda family: family["guards"].append(
        {"condition": [["size", 0], ["integer", 99], ["equal"]], "place": ""}
    ),
    "a place of a guard that is no text": lambda family: family["guards"][0].update(place=3),
    "another key": lambda family: family.update(more=1),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_family_whose_parts_do_not_fit_is_refused(saved, lie):
    data = data_of(saved)
    assert decoded(data) == saved[1].family
    LIES[lie](data[FAMILY])
    with pytest.raises(ProgramError):
        decoded(data)


def test_a_file_of_a_newer_version_is_refused(saved):
    data = data_of(saved)
    data["version"] = 3
    with pytest.raises(FileError, match="newer offload"):
        decoded(data)
    data["version"] = 1
    with pytest.raises(ProgramError):
        decode_program(Node(data, "program.json"))


def places_in(data, path=()):
    if isinstance(data, dict):
        for key, item in data.items():
            yield from places_in(item, (*path, key))
    elif isinstance(data, list):
        for index, item in enumerate(data):
            yield from places_in(item, (*path, index))
    else:
        yield path


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_read_of_damaged_families_stays_inside_its_values(saved, data):
    """For any file content, the file or a choice of sizes is refused, or its Program is whole."""
    told = copy.deepcopy(data_of(saved))
    paths = list(places_in(told[FAMILY]))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(paths))
        node = told[FAMILY]
        for step in path:
            node = node[step]
        node[last] = data.draw(
            st.one_of(st.integers(-3, 12), st.floats(-4, 4), st.sampled_from(["add", "size", ""]))
        )
    try:
        family = decoded(told)
    except (ProgramError, FileError):
        return
    for sizes in ({"n": 2, "k": 1}, {"n": 8, "k": 3}, {"n": 90, "k": 4}):
        try:
            program = family.at(sizes)
        except OffloadError:
            continue
        check_program(program)
