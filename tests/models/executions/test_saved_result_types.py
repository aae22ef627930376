"""Results of an opened program have the types that the model returned."""

from __future__ import annotations

import collections
import dataclasses
import json
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import offload


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Scores:
    logits: Any
    note: str


class Table(dict):
    """A mapping class."""


class Rows(list):
    """A list class."""


class Holder:
    """Attributes that its constructor does not take."""

    def __init__(self) -> None:
        raise AssertionError("an object is made without its constructor")


@dataclasses.dataclass
class Checked(collections.OrderedDict):
    """A dataclass that is also a mapping, as transformers' outputs, and checks its arguments."""

    logits: Any
    hidden: Any = None

    def __post_init__(self) -> None:
        assert self.logits.shape == (2, 3)
        assert self.logits.dtype == torch.float64
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


OWN = [Pair, Scores, Table, Rows, Holder, Checked]


def held(value: torch.Tensor) -> Holder:
    holder = Holder.__new__(Holder)
    holder.value = value
    return holder


def of_own_types(x: torch.Tensor) -> dict[str, Any]:
    return {
        "pair": Pair(x + 1, Scores(x * 2, "twice")),
        "table": Table(rows=Rows([x - 1, held(x.exp())])),
        "checked": Checked(logits=x.double()),
    }


def assert_alike(one: Any, other: Any) -> None:
    """Require the same types and tensors, recursively."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for mine, yours in zip(one, other, strict=True):
            assert_alike(mine, yours)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_alike(one[key], other[key])
    elif hasattr(one, "__dict__"):
        assert_alike(vars(one), vars(other))
    else:
        assert one == other


X, OTHER = torch.randn(2, 3), torch.randn(2, 3)


def saved(function: Any, path: Path, *, warned: str | None = None) -> offload.Captured:
    captured = offload.capture(function, X)
    if warned is None:
        captured.save(path)
    else:
        with pytest.warns(UserWarning, match=warned):
            captured.save(path)
    return captured


# ---- types that are found by name ---------------------------------------------------------------


def of_torchs_types(x: torch.Tensor) -> Any:
    ordered = collections.OrderedDict(low=x.min(dim=1), shape=x.shape, all=[x.sort()])
    return x.max(dim=1), {"ordered": ordered, "svd": torch.linalg.svd(x.double())}


def test_types_of_torch_and_python_come_back(tmp_path: Path) -> None:
    captured = saved(of_torchs_types, tmp_path / "one")
    opened = offload.open(tmp_path / "one")
    opened.save(tmp_path / "other")
    for one in (captured, opened, offload.open(tmp_path / "other")):
        assert_alike(one(OTHER), of_torchs_types(OTHER))
    assert type(opened(OTHER)[0]) is torch.return_types.max


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the outputs are its models'")


def bert(transformers: Any, cls: str) -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        output_hidden_states=True,
    )
    return getattr(transformers, cls)(config).eval()


@pytest.mark.parametrize(
    ("cls", "module"),
    [
        ("BertModel", "transformers.modeling_outputs"),
        ("BertForPreTraining", "transformers.models.bert.modeling_bert"),
    ],
)
def test_outputs_of_transformers_come_back(
    transformers: Any, cls: str, module: str, tmp_path: Path
) -> None:
    model, ids = bert(transformers, cls), torch.randint(16, (2, 4))
    with torch.no_grad():
        captured = offload.capture(model, ids)
        expected = model(ids)
        captured.save(tmp_path / "one")
        opened = offload.open(tmp_path / "one")
        opened.save(tmp_path / "other")
        for one in (opened, offload.open(tmp_path / "other")):
            assert_alike(one(ids), expected)
    assert type(expected).__module__ == module
    assert isinstance(opened(ids), transformers.utils.ModelOutput)
    assert opened(ids).hidden_states[0].equal(opened(ids)["hidden_states"][0])


def test_caches_of_transformers_come_back(transformers: Any, tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.randint(16, (2, 4))
    with torch.no_grad():
        offload.capture(model, ids).save(tmp_path / "m.offload")
        result, expected = offload.open(tmp_path / "m.offload")(ids), model(ids)
        assert_alike(result, expected)
        assert type(result.past_key_values) is transformers.DynamicCache
        more = [
            model(ids, past_key_values=one.past_key_values).logits for one in (result, expected)
        ]
    assert torch.equal(*more)


IN_A_FRESH_PROCESS = """
import offload, sys, torch
result = offload.open(sys.argv[1])(torch.zeros(2, 4, dtype=torch.long))
print(type(result).__name__, *result)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "expected"),
    [("", "BaseModelOutputWithPoolingAndCrossAttentions"), ("transformers", "dict")],
    ids=["with transformers", "without"],
)
def test_outputs_of_transformers_in_a_fresh_process(
    transformers: Any, tmp_path: Path, missing: str, expected: str
) -> None:
    """Without transformers they are dictionaries."""
    model, ids = bert(transformers, "BertModel"), torch.randint(16, (2, 4))
    with torch.no_grad():
        offload.capture(model, ids).save(tmp_path / "m.offload")
    script = f"import sys; sys.modules[{missing!r}] = None\n" * bool(missing) + IN_A_FRESH_PROCESS
    command = [sys.executable, "-c", script, str(tmp_path / "m.offload")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.split() == [expected, "last_hidden_state", "pooler_output", "hidden_states"]


def test_an_output_class_of_ones_own_comes_back_when_it_is_given(
    transformers: Any, tmp_path: Path
) -> None:
    @dataclasses.dataclass
    class Output(transformers.utils.ModelOutput):
        loss: Any = None
        logits: Any = None

    saved(lambda x: Output(logits=x + 1), tmp_path / "m", warned="Output")
    result = offload.open(tmp_path / "m", types=[Output])(OTHER)
    assert type(result) is Output
    assert result.loss is None
    assert torch.equal(result.logits, OTHER + 1)


# ---- the user's own types -----------------------------------------------------------------------


def test_own_types_come_back_when_they_are_given(tmp_path: Path) -> None:
    captured = saved(of_own_types, tmp_path / "one", warned=r"types=\[Pair, Scores, Table, Rows")
    opened = offload.open(tmp_path / "one", types=OWN)
    with pytest.warns(UserWarning, match=r"types=\[Pair"):
        opened.save(tmp_path / "other")
    again = offload.open(tmp_path / "other", types=OWN)
    for one in (captured, opened, again):
        assert_alike(one(OTHER), of_own_types(OTHER))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_own_types_are_plain_when_they_are_not_given(tmp_path: Path) -> None:
    saved(of_own_types, tmp_path / "m", warned="plain")
    result = offload.open(tmp_path / "m")(X)
    assert type(result["pair"]) is tuple
    assert type(result["pair"][1]) is dict
    assert type(result["table"]) is dict
    assert type(result["table"]["rows"]) is list
    assert type(result["checked"]) is dict
    part = offload.open(tmp_path / "m", types=[Scores])(X)["pair"]
    assert type(part) is tuple
    assert type(part[1]) is Scores


def test_save_warns_once_and_names_the_types_and_the_users_line(tmp_path: Path) -> None:
    captured = offload.capture(lambda x: [Pair(x + 1, x), Pair(x + 2, x)], X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured.save(tmp_path / "m")
    (one,) = caught
    assert one.category is UserWarning
    assert one.filename == __file__
    assert str(one.message).count(f"{__name__}.Pair") == 1


def test_a_warning_that_is_an_error_writes_nothing(tmp_path: Path) -> None:
    captured = offload.capture(lambda x: Pair(x + 1, x), X)
    with pytest.raises(UserWarning, match="Pair"):
        captured.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_plain_results_and_types_of_arguments_warn_of_nothing(tmp_path: Path) -> None:
    captured = offload.capture(lambda pair: {"sum": pair.first + pair.second}, Pair(X, X))
    captured.save(tmp_path / "m")
    assert torch.equal(offload.open(tmp_path / "m")(Pair(X, OTHER))["sum"], X + OTHER)


def renamed(path: Path, names: dict[str, str]) -> None:
    """Let a file give other names to the containers of its result."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    root = json.loads(members["program.json"])
    text = json.dumps(root["result_structure"])
    for old, new in names.items():
        assert json.dumps(old) in text
        text = text.replace(json.dumps(old), json.dumps(new))
    root["result_structure"] = json.loads(text)
    members["program.json"] = json.dumps(root).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_a_class_of_another_module_now_is_found_by_its_own_name(tmp_path: Path) -> None:
    saved(of_own_types, tmp_path / "m", warned="Pair")
    renamed(tmp_path / "m", {f"{__name__}.Pair": "__main__.Pair"})
    assert_alike(offload.open(tmp_path / "m", types=OWN)(OTHER), of_own_types(OTHER))


def test_the_full_name_goes_before_the_class_s_own(tmp_path: Path) -> None:
    one_pair, other_pair = (collections.namedtuple("Pair", ["first", "second"]) for _ in "ab")
    one_pair.__module__, other_pair.__module__ = "one", "now"
    assert one_pair is not other_pair
    saved(lambda x: [Pair(x + 1, x), one_pair(x, 1)], tmp_path / "m", warned="Pair")
    renamed(tmp_path / "m", {f"{__name__}.Pair": "then.Pair"})
    result = offload.open(tmp_path / "m", types=[other_pair, one_pair])(X)
    assert [type(one) for one in result] == [other_pair, one_pair]
    with pytest.raises(offload.FileError, match=r"several of .* named then\.Pair, one\.Pair"):
        offload.open(tmp_path / "m", types=[other_pair])


def test_buffers_nested_like_the_result(tmp_path: Path) -> None:
    saved(lambda x: {"pair": Pair(x + 1, x.max(dim=1))}, tmp_path / "m", warned="Pair")
    run = offload.open(tmp_path / "m", types=[Pair]).load()
    buffers = run(X)
    for out in (buffers, {"pair": ((torch.empty(2, 3), (torch.empty(2), None)))}):
        got = run(OTHER, out=out)
        assert got["pair"].first is out["pair"][0]
        assert got["pair"].second.values is out["pair"][1][0]
        assert_alike(got, {"pair": Pair(OTHER + 1, OTHER.max(dim=1))})


# ---- types that do not fit ----------------------------------------------------------------------


Turned = collections.namedtuple("Pair", ["second", "first"])
Longer = collections.namedtuple("Pair", ["first", "second", "third"])
Unpacked = type("Pair", (tuple,), {"__qualname__": "Pair"})


@pytest.mark.parametrize("cls", [Turned, Longer, Unpacked], ids=["turned", "longer", "unpacked"])
def test_a_class_that_does_not_fit_is_refused(tmp_path: Path, cls: type) -> None:
    saved(lambda x: Pair(x + 1, x), tmp_path / "m", warned="Pair")
    with pytest.raises(offload.FileError, match=r"does not fit .*Pair.*\['first', 'second'\]"):
        offload.open(tmp_path / "m", types=[cls])


def test_a_class_without_attributes_or_field_does_not_fit(tmp_path: Path) -> None:
    saved(lambda x: [Scores(x + 1, ""), Checked(x.double())], tmp_path / "m", warned="Scores")

    @dataclasses.dataclass(slots=True)
    class Slotted:
        logits: Any
        note: str

    @dataclasses.dataclass
    class Other(collections.OrderedDict):
        scores: Any

    for cls, name in ((Slotted, "Scores"), (Other, "Checked")):
        cls.__qualname__ = name
        with pytest.raises(offload.FileError, match=f"does not fit .*{name}"):
            offload.open(tmp_path / "m", types=[cls])


def test_a_class_that_the_file_does_not_name_is_refused(tmp_path: Path) -> None:
    saved(lambda x: [Pair(x + 1, x), x.max(dim=0)], tmp_path / "m", warned="Pair")
    named = rf"m: types= has .*Table.*none.*named {__name__}\.Pair, torch\.return_types\.max"
    for types in ([Table], [Pair, Table]):
        with pytest.raises(offload.FileError, match=named):
            offload.open(tmp_path / "m", types=types)
    with pytest.raises(offload.FileError, match=r"builtins\.list"):
        offload.open(tmp_path / "m", types=[list])


@pytest.mark.parametrize("types", [["Pair"], [Pair(1, 2)], Pair, "Pair", None, [list[int]]])
def test_what_is_no_class_is_refused(tmp_path: Path, types: Any) -> None:
    with pytest.raises(offload.BindingError, match="types=: expected"):
        offload.open(tmp_path / "not looked for", types=types)


def test_an_offline_model_has_no_types(tmp_path: Path) -> None:
    (tmp_path / "m.om").write_bytes(b"")
    with pytest.raises(offload.FileError, match="offline model"):
        offload.open(tmp_path / "m.om", types=[Pair])


def test_two_classes_of_one_name_are_refused(tmp_path):
    def make():
        class Same(NamedTuple):
            first: torch.Tensor

        return Same

    one, other = make(), make()
    with torch.no_grad():
        captured = offload.capture(lambda x: (one(x), other(x * 2)), torch.ones(2))
    with pytest.warns(UserWarning, match="Same"):
        captured.save(tmp_path / "m.offload")
    with pytest.raises(offload.FileError, match="several classes of one name"):
        offload.open(tmp_path / "m.offload", types=[one, other])
