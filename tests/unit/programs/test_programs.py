"""Programs as plain data: built, compared, printed, serialised, rewritten and checked."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offload
from offload.errors import ProgramError
from offload.program import (
    Bindings,
    BoundProgram,
    Effect,
    EffectKind,
    Kernel,
    Launch,
    Opaque,
    Operator,
    Overlap,
    Program,
    Result,
    Role,
    StoredTensor,
    Symbol,
    TensorView,
    Value,
    check_program,
    decode_program,
    encode_program,
    plain_structure,
    rewrite,
)
from offload.program.reader import parse
from offload.program.structure import Structure

N_BYTES = 32


def view(value: int) -> TensorView:
    return TensorView(value, 0, (8,), (1,), "float32")


def value(index: int, role: Role) -> Value:
    return Value(index, role, (8,), (1,), "float32", N_BYTES, f"{role}{index}")


def launch(index: int, reads: tuple[int, ...], makes: int, **changes: object) -> Launch:
    plain = Launch(
        index=index,
        callee=Operator("aten::add.Tensor"),
        arguments=(*(view(one) for one in reads), (view(reads[0]), None), 1),
        results=(view(makes),),
        reads=reads,
        writes=(makes,),
        random=False,
        guard=None,
        guards_shape=False,
        source=f"net.py:{index}",
    )
    return dataclasses.replace(plain, **changes)


def leaves(count: int) -> tuple[Structure, ...]:
    return tuple(Structure("tensor", leaf=leaf) for leaf in range(count))


ROLES = (Role.ACTIVATION, Role.INPUT, Role.INPUT, Role.WEIGHT, Role.ACTIVATION, Role.OUTPUT)


def make(**changes: object) -> Program:
    """Two inputs, a weight, an unused launch and two that make the output."""
    program = Program(
        device="cpu",
        values=tuple(value(index, role) for index, role in enumerate(ROLES)),
        launches=(launch(0, (1,), 0), launch(1, (2, 3), 4), launch(2, (4, 1), 5)),
        inputs=(view(1), view(2)),
        results=(Result(view(5)), Result(view(2), 1)),
        arguments_structure=Structure("tuple", (Structure("tuple", leaves(2)), Structure("dict"))),
        result_structure=Structure("tuple", leaves(2)),
        overlaps=(Overlap(0, 1, 16),),
        weight_views={3: (view(3),)},
    )
    return dataclasses.replace(program, **changes)


# ---- without torch ------------------------------------------------------------------------------

WITHOUT_TORCH = """
import json, sys
sys.path.insert(0, {folder!r})
from test_programs_data import make_program
from offload.program import check_program, decode_program, encode_program, rewrite
from offload.program.reader import parse

program, again = make_program(), make_program()
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


def test_programs_need_no_torch(tmp_path):
    """This file builds it, without its parts that need pytest or torch."""
    own = Path(__file__).read_text().split("# ---- without torch")[0]
    lines = own.replace("def make(", "def make_program(").splitlines()
    lines = [one for one in lines if one not in ("import pytest", "import torch", "import offload")]
    (tmp_path / "test_programs_data.py").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(folder=str(tmp_path))],
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
    assert plain.constant == Symbol("object", f"pathlib.{type(Path()).__name__}")
    assert plain_structure(plain) == plain


def test_what_was_recorded_comes_back_with_its_classes_and_objects():
    def forward(x, settings):
        return {"out": x.to(settings[0])}

    with torch.no_grad():
        captured = offload.capture(forward, torch.ones(4), (torch.float64,))
    assert captured(torch.ones(4), (torch.float64,))["out"].dtype is torch.float64
    with pytest.raises(offload.BindingError, match=r"args\[1\]\[0\]: recorded with torch.float64"):
        captured(torch.ones(4), (torch.float16,))


# ---- rewriting ----------------------------------------------------------------------------------


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


def cut(one: Launch, **changes: object) -> Launch:
    return dataclasses.replace(one, **changes)


WRONG = {
    "launches\\[0\\] uses %4 .*no earlier launch writes": lambda a, b, c: [c],
    "the result contains %5 .*no earlier launch writes": lambda a, b, c: [b],
    "before it is made": lambda a, b, c: [a, c, b],
    "a second time": lambda a, b, c: [a, b, b, c],
    "not declared to read or write": lambda a, b, c: [cut(b, reads=(2,)), c],
    "not declared to write exactly what it makes": lambda a, b, c: [b, cut(c, writes=(5, 0))],
    "name %99, and there are 6 values": lambda a, b, c: [b, cut(c, reads=(4, 1, 99))],
    "covers bytes 16 to 48": lambda a, b, c: [
        b, cut(c, results=(dataclasses.replace(view(5), offset_bytes=16),))
    ],
    "makes the input": lambda a, b, c: [
        cut(b, results=(view(1),), writes=(1,)), launch(0, (2, 3), 4), c
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_program_is_refused(message):
    program = make()
    launches = WRONG[message](*program.launches)
    with pytest.raises(ProgramError, match=message):
        rewrite(program, launches)


BROKEN = {
    "begins 16 bytes before %1": {
        "launches": (
            launch(0, (1,), 0, arguments=(dataclasses.replace(view(1), offset_bytes=-16),)),
        )
    },
    "has the shape .*expected as many of both": {
        "values": (dataclasses.replace(value(0, Role.ACTIVATION), strides=()), *make().values[1:])
    },
    "has the unknown dtype 'foo'": {
        "values": (dataclasses.replace(value(0, Role.ACTIVATION), dtype="foo"), *make().values[1:])
    },
    "expected an Operator, an Opaque, a Kernel or a TritonKernel as its callee": {
        "launches": (launch(0, (1,), 0, callee="aten::add.Tensor"),)
    },
    "has the index %3": {"values": tuple(value(3, role) for role in ROLES)},
    "has the index 7": {"launches": (launch(7, (2, 3), 4),)},
    "spans 32 bytes, and its size is 4": {
        "values": (dataclasses.replace(value(0, Role.ACTIVATION), size_bytes=4), *make().values[1:])
    },
    "the values of role weight are not those": {"weight_views": {}},
    "the holders of %3 are missing": {"weight_views": {3: ()}},
    "arguments_structure does not hold each input once": {
        "arguments_structure": Structure(
            "tuple", (Structure("tuple", leaves(1)), Structure("dict"))
        )
    },
    "is the activation %0": {"results": (Result(view(0)), Result(view(5)))},
    "is not a pair of the 2 inputs": {"overlaps": (Overlap(0, 2, 0),)},
    "lists inputs that do not overlap": {"overlaps": (Overlap(0, 1, 32),)},
}


@pytest.mark.parametrize("message", BROKEN)
def test_parts_that_contradict_each_other_are_refused(message):
    with pytest.raises(ProgramError, match=message):
        check_program(make(**BROKEN[message]))


def of_kernels(*packed: int) -> Program:
    """A kernel that packs its weight, %1, into %2, and one that reads %2 in its place."""

    def call_of(n_inputs: int) -> Structure:
        return Structure("tuple", (Structure("tuple", leaves(n_inputs)), Structure("dict")))

    def replaced(n_inputs: int) -> Program:
        inputs = tuple(range(n_inputs))
        roles = (*(Role.INPUT for _ in inputs), Role.OUTPUT)
        return make(
            values=tuple(value(index, role) for index, role in enumerate(roles)),
            launches=(launch(0, inputs, n_inputs),),
            inputs=tuple(view(one) for one in inputs),
            results=(Result(view(n_inputs)),),
            arguments_structure=call_of(n_inputs),
            result_structure=Structure("tensor", leaf=0),
            overlaps=(),
            weight_views={},
        )

    def kernel(index: int, reads: tuple[int, ...], makes: int, callee: Kernel) -> Launch:
        return launch(
            index, reads, makes, callee=callee, arguments=tuple(view(one) for one in reads)
        )

    roles = (Role.INPUT, Role.WEIGHT, Role.DERIVED, Role.OUTPUT)
    packs, uses = Kernel(0, replaced(1), derives=True), Kernel(1, replaced(2), packed=packed)
    return make(
        values=tuple(value(index, role) for index, role in enumerate(roles)),
        launches=(kernel(0, (1,), 2, packs), kernel(1, (0, 1, 2), 3, uses)),
        inputs=(view(0),),
        results=(Result(view(3)),),
        arguments_structure=call_of(1),
        result_structure=Structure("tensor", leaf=0),
        overlaps=(),
        weight_views={1: (view(1),)},
    )


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ((1, 2), "has no derived values in place of"),
        ((1, 9), "has no derived values in place of"),
        ((0,), "does not read a value that is not a weight"),
    ],
)
def test_a_kernel_reads_derived_values_in_place_of_weights(packed, said):
    check_program(of_kernels(1))
    check_program(of_kernels())
    with pytest.raises(ProgramError, match=said):
        check_program(of_kernels(*packed))


def test_memory_that_begins_without_content_is_no_lost_content():
    """As from torch.empty: no launch makes it, and the first launch that uses it writes it."""
    filling = launch(0, (0,), 0, arguments=(view(0),), results=(None,))
    program = make(launches=(filling, launch(1, (2, 3), 4), launch(2, (4, 0), 5)))
    assert len(rewrite(program, list(program.launches)).program.launches) == 3
    with pytest.raises(ProgramError, match=r"uses %0 .*no earlier launch writes"):
        rewrite(program, program.launches[1:])


def test_memory_that_is_read_before_it_is_written_has_no_content_to_lose():
    reading = launch(0, (2, 0), 4)
    filling = launch(1, (0,), 0, arguments=(view(0),), results=(None,))
    program = make(launches=(reading, filling, launch(2, (4, 1), 5)))
    found = rewrite(program, [reading, filling, launch(2, (4, 0), 5)]).program
    assert len(found.launches) == 3


def test_names_are_printed_on_one_line():
    named = dataclasses.replace(make().values[1], name="a\nreturn \x1b[1m")
    values = (make().values[0], named, *make().values[2:])
    lines = str(make(values=values)).splitlines()
    assert len(lines) == len(str(make()).splitlines())
    assert any(r"a\nreturn \x1b[1m" in line for line in lines)


def test_a_captured_program_is_whole():
    with torch.no_grad():
        captured = offload.capture(torch.nn.GRU(4, 4, 2), torch.randn(3, 1, 4))
    check_program(captured.program)


# ---- effects ------------------------------------------------------------------------------------


def effects(**changes: object) -> set[Effect]:
    return set(launch(0, (1,), 0, **changes).effects)


def test_a_launch_knows_what_it_touches_besides_bytes():
    assert effects() == set()
    assert effects(random=True) == {Effect(EffectKind.GENERATOR, "0")}
    own = (view(1), Symbol("generator", "2"))
    assert effects(random=True, arguments=own) == {Effect(EffectKind.GENERATOR, "2")}
    assert effects(guard=False) == effects(guards_shape=True) == {Effect(EffectKind.GUARD)}
    assert effects(callee=Operator("mine::op")) == {Effect(EffectKind.UNSEEN)}
    assert effects(callee=Opaque(0, "said so")) == {Effect(EffectKind.UNSEEN)}
    reduce = Operator("_c10d_functional::all_reduce")
    assert effects(callee=reduce, arguments=(view(1), "sum", "world")) == {
        Effect(EffectKind.GROUP, "world")
    }
    wait = Operator("_c10d_functional::wait_tensor")
    assert effects(callee=wait, arguments=(view(1),)) == {Effect(EffectKind.GROUP)}


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
