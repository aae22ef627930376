"""Programs as plain data: built, compared, printed, serialised and rewritten."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import small_parts
import torch
from small_parts import N_BYTES, launch, make, value, view

import offload
from offload.program import (
    Bindings,
    BoundProgram,
    Effect,
    EffectKind,
    Opaque,
    Result,
    Role,
    StoredTensor,
    Symbol,
    check_program,
    decode_program,
    encode_program,
    plain_structure,
    rewrite,
)
from offload.program.reader import parse
from offload.program.structure import Structure

WITHOUT_TORCH = """
import json, sys
sys.path.insert(0, {folder!r})
from small_parts import make
from offload.program import check_program, decode_program, encode_program, rewrite
from offload.program.reader import parse

program, again = make(), make()
assert program == again
check_program(program)
text = json.dumps(encode_program(program)).encode()
assert decode_program(parse(text, "here")) == program
shorter = rewrite(program, program.launches[1:])
assert len(shorter.program.launches) == len(program.launches) - 1
assert shorter.program != program
print(program)
assert "torch" not in sys.modules, "torch was imported"
"""


def test_programs_need_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(folder=str(Path(small_parts.__file__).parent))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(make())


def test_recorded_programs_are_plain_data():
    """They are pickled, which no tensor memory or callable of the caller would survive."""
    table, options = torch.ones(4), {"scale": torch.float64}

    def forward(x, generator, settings):
        return {"out": torch.rand(4, generator=generator) + x.to(settings["scale"]) + table}

    with torch.no_grad():
        captured = offload.capture(forward, torch.ones(4), torch.Generator(), options)
    again = pickle.loads(pickle.dumps(captured.program))
    assert again == captured.program
    assert b"storage" not in pickle.dumps(captured.program)
    constants = [one for one in flat(captured.program.arguments_structure) if one is not None]
    assert constants == [Symbol("object", "torch._C.Generator"), Symbol("dtype", "float64")]
    assert captured.bindings.generators[1] is not torch.default_generator
    assert [held[0] is table for held in captured.bindings.weights.values()] == [True]


def flat(structure: Structure) -> list[object]:
    found = [structure.constant] if structure.kind == "constant" else []
    return found + [one for child in structure.children for one in flat(child)]


def test_an_object_is_named_by_its_class():
    plain = plain_structure(Structure("constant", constant=Path("/x")))
    assert plain.constant == Symbol("object", f"{type(Path()).__module__}.{type(Path()).__name__}")
    assert plain_structure(plain) == plain


def test_what_was_recorded_comes_back_with_its_classes_and_objects():
    def forward(x, settings):
        return {"out": x.to(settings[0])}

    with torch.no_grad():
        captured = offload.capture(forward, torch.ones(4), (torch.float64,))
    assert captured(torch.ones(4), (torch.float64,))["out"].dtype is torch.float64
    with pytest.raises(offload.BindingError, match=r"args\[1\]\[0\]: recorded with torch.float64"):
        captured(torch.ones(4), (torch.float16,))


def test_every_field_with_an_index_is_mapped():
    program = make()
    rewritten = rewrite(program, program.launches[1:])
    assert rewritten.positions == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
    found = rewritten.program
    assert [one.index for one in found.values] == [0, 1, 2, 3, 4]
    assert [one.name for one in found.values] == [one.name for one in program.values[1:]]
    assert [one.index for one in found.launches] == [0, 1]
    first, second = found.launches
    assert (first.reads, first.writes) == ((1, 2), (3,))
    assert (second.reads, second.writes) == ((3, 0), (4,))
    assert first.arguments == (view(1), view(2), (view(1), None), 1)
    assert second.results == (view(4),)
    assert found.inputs == (view(0), view(1))
    assert found.results == (Result(view(4)), Result(view(1), 1))
    assert found.weight_views == {2: (view(2),)}
    assert found.overlaps == program.overlaps  # which name inputs by position
    check_program(found)


def test_bindings_move_with_their_program():
    stored = StoredTensor("w", "/w.safetensors", 0, N_BYTES, (8,), "float32")
    bindings = Bindings(weights={3: (torch.ones(8),), 0: ()}, stored={3: stored})
    moved = bindings.moved(rewrite(make(), make().launches[1:]).positions)
    assert moved.weights == {2: bindings.weights[3]}
    assert moved.stored == {2: stored}


def test_nothing_to_do_gives_the_same_program():
    program = make()
    assert rewrite(program, program.launches).program is program


def test_launches_may_be_added_and_values_appended():
    program = make()
    more = (*program.values, value(6, Role.ACTIVATION))
    doubled = (launch(0, (2, 3), 4), launch(0, (4,), 6), launch(0, (6, 1), 5))
    found = rewrite(program, doubled, more).program
    assert [one.reads for one in found.launches] == [(1, 2), (3,), (5, 0)]
    assert [one.index for one in found.launches] == [0, 1, 2]


def test_values_may_become_weights():
    """As constants do, which no launch then makes."""
    program = make()
    values = [*program.values]
    values[4] = dataclasses.replace(values[4], role=Role.WEIGHT)
    views = {**program.weight_views, 4: (view(4),)}
    found = rewrite(program, [program.launches[2]], values, views)
    assert [one.role for one in found.program.values] == [
        Role.INPUT, Role.INPUT, Role.WEIGHT, Role.OUTPUT,
    ]  # fmt: skip
    assert found.program.weight_views == {2: (view(2),)}
    assert found.positions == {1: 0, 2: 1, 4: 2, 5: 3}


def test_names_are_printed_on_one_line():
    named = dataclasses.replace(make().values[1], name="a\nreturn \x1b[1m")
    values = (make().values[0], named, *make().values[2:])
    lines = str(make(values=values)).splitlines()
    assert len(lines) == len(str(make()).splitlines())
    assert any(r"a\nreturn \x1b[1m" in line for line in lines)


def test_generators_are_told_apart():
    own = torch.Generator().manual_seed(3)

    def forward(x):
        return x + torch.rand(4) + torch.rand(4, generator=own)

    with torch.no_grad():
        captured = offload.capture(forward, torch.ones(4))
    drawn = [sorted(one.effects) for one in captured.program.launches if one.random]
    assert drawn == [[Effect(EffectKind.GENERATOR, "0")], [Effect(EffectKind.GENERATOR, "1")]]
    assert captured.bindings.generators == (torch.default_generator, own)


def test_opaque_launches_are_printed_and_refused_by_files():
    program = make(launches=(launch(0, (1,), 5, callee=Opaque(0, "said so")),))
    assert program.opaque == Opaque(0, "said so")
    assert "offload::opaque(" in str(program)
    assert make().opaque is None
    with pytest.raises(offload.FileError, match=r"one opaque launch.*said so"):
        offload.Captured(BoundProgram(program)).save("nowhere")


def test_programs_survive_json():
    program = make()
    text = json.dumps(encode_program(program)).encode()
    assert decode_program(parse(text, "here")) == program
