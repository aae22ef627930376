"""Type names that a hostile file gives to its result: only models' outputs are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile import archive, tree, valid_file

pytestmark = pytest.mark.slow

# Opens the given files; prints for each the modules imported meanwhile, and the classes of
# containers in its result.
OPENS = """
import json, sys
from offload.files import open_saved
def classes(structure):
    below = [one for child in structure.children for one in classes(child)]
    return below if structure.container is None else [structure.container.__qualname__, *below]
open_saved(sys.argv[1]).bound
for path in sys.argv[1:]:
    known = set(sys.modules)
    found = classes(open_saved(path).bound.bindings.results)
    print(json.dumps([sorted(set(sys.modules) - known), found]))
"""

UNTRUSTED_NAMES = [
    "os.system", "os.PathLike", "builtins.eval", "builtins.type", "builtins.BaseException",
    "subprocess.Popen", "antigravity.x", "tests.hostile.Model", "torch.nn.Module", "torch.Tensor",
    "torch.return_types.__loader__", "torch.return_types.torch", "torch.return_types.SequenceKey",
    "torch.return_types.return_types", "torch.return_types.max.__class__", "torch.return_types.",
    "torch.return_types.torch.Size", "collections.UserDict", "transformers", "transformers.x",
    "transformers.utils.import_utils.is_torch_available", "transformers.utils.ModelOutput",
    "transformers.modeling_outputs.torch.Size", "transformers.models.bert.tokenization_bert.x",
    "transformers.models.bert.modeling_bert.torch.x", "transformers.models...modeling_bert.x",
    "transformers.models.bert.modeling_bert\n.x", "transformers.models.b/../c.modeling_bert.x",
    "transformers_modules.modeling_outputs.BaseModelOutput", "x" * 10**5, "", ".", "..", " ", "\0",
    "transformers.models." + "x" * 10**5 + ".modeling_x.X", ".".join("x" * 10**4), "é.é", "1.2",
]  # fmt: skip


def classes_found(results: list[Any], folder: Path) -> list[tuple[list[str], list[str]]]:
    """Open files with these structures in place of the list's third item, in a fresh process."""
    (folder / "valid").write_bytes(valid_file())
    paths = [folder / "valid"]
    for number, structure in enumerate(results):
        root = tree()
        root["result_structure"]["children"][2] = structure
        paths.append(folder / str(number))
        paths[-1].write_bytes(archive(program=json.dumps(root).encode()))
    command = [sys.executable, "-c", OPENS, *map(str, paths)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines()][1:]


def third(kind: str, type_name: str, *keys: str, item: Any = None) -> Any:
    """A container around the third item's tensor."""
    (leaf,) = tree()["result_structure"]["children"][2]["children"]
    children = [leaf if item is None else item] * max(1, len(keys))
    return {"kind": kind, "type_name": type_name, "keys": list(keys), "children": children}


@pytest.mark.parametrize("kind", ["tuple", "list", "record", "dict", "mapping", "object"])
def test_untrusted_names_import_nothing(tmp_path: Path, kind: str) -> None:
    keys = [] if kind in ("tuple", "list") else ["logits"]
    found = classes_found([third(kind, name, *keys) for name in UNTRUSTED_NAMES], tmp_path)
    assert found == [[[], []]] * len(UNTRUSTED_NAMES)


def test_a_name_of_a_model_imports_nothing_where_no_output_can_be(tmp_path: Path) -> None:
    name = "transformers.models.bert.modeling_bert.BertModel"
    others = [third(kind, name, "logits") for kind in ("record", "dict", "object")]
    found = classes_found([*others, third("tuple", name), third("list", name)], tmp_path)
    assert found == [[[], []]] * 5


def test_trusted_classes_that_are_no_outputs_or_do_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the outputs are its models'")
    bert, output = "transformers.models.bert.modeling_bert", "transformers.modeling_outputs"
    state = "last_hidden_state"
    (leaf,) = third("tuple", "")["children"]
    pair = third("list", "builtins.list", item={"kind": "constant", "constant": "__class__"})
    pair["children"].append(leaf)
    found = classes_found(
        [
            third("mapping", f"{bert}.BertModel", "config"),
            third("mapping", f"{bert}.OrderedDict", "a"),
            third("mapping", f"{bert}.ModelOutput", "a"),
            third("mapping", f"{bert}.BaseModelOutputWithPoolingAndCrossAttentions", state),
            third("mapping", f"{output}.OrderedDict", "a"),
            third("mapping", f"{output}.BaseModelOutput", "logits"),
            third("mapping", f"{output}.BaseModelOutput", state, "__class__"),
            third("mapping", f"{output}.BaseModelOutput", state, item=third("list", "", item=pair)),
            third("mapping", "transformers.models.no_such.modeling_no_such.Output", "logits"),
            third("mapping", "transformers.cache_utils.DynamicCache", "layers"),
            third("object", "transformers.cache_utils.PreTrainedConfig", "layers"),
            third("object", "transformers.cache_utils.ABC", "layers"),
            third("object", "transformers.cache_utils.is_torchdynamo_compiling", "layers"),
            third("tuple", "torch.return_types.max"),
            third("tuple", "torch.Size"),
            third("mapping", "torch.Size", "a"),
            third("tuple", "collections.OrderedDict"),
        ],
        tmp_path,
    )
    assert [classes for _, classes in found] == [[]] * 17
    fits = third("mapping", f"{output}.BaseModelOutput", state)
    assert classes_found([fits], tmp_path)[0][1] == ["BaseModelOutput"]
