"""The stubs of the native modules, kept by hand for their types, name what the modules have."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

import offload

MODULES = ("_native", "_planner")
FOLDER = Path(offload.__file__).parent / "native"
# Of the stub alone: the form of a Python function that a compiled one calls.
PROTOCOLS = {"SizedKernel"}


@dataclasses.dataclass(frozen=True)
class Parameters:
    """A callable's parameters without types: names in order, and which are optional."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    optional: frozenset[str]


def parameters(function: ast.FunctionDef) -> Parameters:
    found = function.args
    positional = [one.arg for one in (*found.posonlyargs, *found.args) if one.arg != "self"]
    keyword_only = [one.arg for one in found.kwonlyargs]
    optional = positional[len(positional) - len(found.defaults) :] if found.defaults else []
    optional += [
        name
        for name, default in zip(keyword_only, found.kw_defaults, strict=True)
        if default is not None
    ]
    return Parameters(tuple(positional), tuple(keyword_only), frozenset(optional))


def stubbed(module: str) -> dict[str, ast.stmt]:
    """Each name of a stub and of its classes ("Class.member"), with its declaration."""
    declared: dict[str, ast.stmt] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                declared[prefix + statement.name] = statement
            elif isinstance(statement, ast.AnnAssign):
                assert isinstance(statement.target, ast.Name)
                declared[prefix + statement.target.id] = statement
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    assert isinstance(target, ast.Name)
                    declared[prefix + target.id] = statement
            elif isinstance(statement, ast.ClassDef):
                declared[prefix + statement.name] = statement
                visit(statement.body, f"{prefix}{statement.name}.")

    visit(ast.parse((FOLDER / f"{module}.pyi").read_text()).body, "")
    return declared


def compiled(module: str) -> dict[str, object]:
    """Each public name of a compiled module and of its classes, and what both declare."""
    members = vars(importlib.import_module(f"offload.native.{module}"))
    found = {name: value for name, value in members.items() if not name.startswith("_")}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            of_enumeration = {"name", "value"} if hasattr(value, "__members__") else set()
            for member, held in vars(value).items():
                if not member.startswith("_") and member not in of_enumeration:
                    found[f"{name}.{member}"] = held
    return found


def signatures(function: object) -> list[Parameters]:
    """What pybind11 writes into the first line of a function's documentation, or numbers below."""
    lines = (getattr(function, "__doc__", None) or "").splitlines()
    overloads = [line.split(". ", 1)[1] for line in lines if line[:1].isdigit()]
    found = []
    for line in overloads or lines[:1]:
        (parsed,) = ast.parse(f"def {line.partition(' -> ')[0]}: ...").body
        assert isinstance(parsed, ast.FunctionDef)
        found.append(parameters(parsed))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_stub_names_what_its_module_has(module):
    declared, found = stubbed(module), compiled(module)
    public = {
        name
        for name in declared
        if not name.rpartition(".")[2].startswith("_") and name.split(".")[0] not in PROTOCOLS
    }
    assert public == set(found)


@pytest.mark.parametrize("module", MODULES)
def test_a_stub_has_the_parameters_of_its_module(module):
    """Names, order, whether by keyword alone, and whether they may be left out."""
    native = importlib.import_module(f"offload.native.{module}")
    n_compared = 0
    for name, declaration in stubbed(module).items():
        owner, _, member = name.rpartition(".")
        if not isinstance(declaration, ast.FunctionDef) or owner in PROTOCOLS:
            continue
        function = getattr(getattr(native, owner) if owner else native, member)
        if isinstance(function, property) or owner == "CallableReplay":  # of CPython's interface
            continue
        if member == "__exit__":  # takes anything
            continue
        assert parameters(declaration) in signatures(function), name
        n_compared += 1
    assert n_compared
