"""Places of a Python file that a mutant changes: Cosmic Ray's operators, and two beside them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

Change = Callable[[], tuple[str, str | None]]
Position = tuple[int, int]

# Of the replacements of a binary or comparison operator, those that a mistake would make.
_NAMES = (
    "AddNot",
    "ExceptionReplacer",
    "NumberReplacer",
    "ReplaceAndWithOr",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceBinaryOperator_BitOr_BitAnd",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceBinaryOperator_Div_Mul",
    "ReplaceBinaryOperator_LShift_RShift",
    "ReplaceBinaryOperator_Mod_FloorDiv",
    "ReplaceBinaryOperator_Mul_FloorDiv",
    "ReplaceBinaryOperator_RShift_LShift",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBreakWithContinue",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceContinueWithBreak",
    "ReplaceFalseWithTrue",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_USub",
    "ZeroIterationForLoop",
)


class RemoveStatement(Operator):
    """Replaces a `raise`, and a call or an assignment in place that stands alone, by `pass`."""

    def mutation_positions(
        self, node: parso.tree.NodeOrLeaf
    ) -> Iterator[tuple[Position, Position]]:
        """The whole statement."""
        alone = node.parent is not None and node.parent.type == "simple_stmt"
        call = node.type in ("atom_expr", "power") and node.children[-1].type == "trailer"
        in_place = node.type == "expr_stmt" and node.children[1].type == "operator"
        in_place = in_place and node.children[1].value not in ("=", ":")
        raised = node.type == "raise_stmt" or getattr(node, "value", None) == "raise"
        if alone and (call or in_place or raised):
            yield node.start_pos, node.end_pos

    def mutate(self, node: parso.tree.NodeOrLeaf, index: int) -> parso.tree.NodeOrLeaf:
        """`pass` where the statement stood."""
        prefix = node.get_first_leaf().prefix
        return parso.python.tree.Keyword("pass", node.start_pos, prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        """None: the tests of this package have them."""
        return ()


class SwapMinMax(Operator):
    """Calls `max` where `min` was called, and the other way round."""

    def mutation_positions(
        self, node: parso.tree.NodeOrLeaf
    ) -> Iterator[tuple[Position, Position]]:
        """The name that is called."""
        following = node.get_next_sibling() if node.parent is not None else None
        called = following is not None and following.type == "trailer"
        if called and node.type == "name" and node.value in ("min", "max"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: parso.tree.NodeOrLeaf, index: int) -> parso.tree.NodeOrLeaf:
        """The other name."""
        node.value = {"min": "max", "max": "min"}[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """None: the tests of this package have them."""
        return ()


def _operators() -> dict[str, Operator]:
    known = {name: get_operator(f"core/{name}")() for name in _NAMES}
    return {**known, "RemoveStatement": RemoveStatement(), "SwapMinMax": SwapMinMax()}


_OPERATORS = _operators()
_OPERATORS_OF_NAMES = {"SwapMinMax": _OPERATORS["SwapMinMax"]}
_PLAIN_TYPES = ("name", "newline", "string")
_PUNCTUATION = frozenset("()[]{},.:;=") | {"->", ":="}


def _is_plain(node: parso.tree.NodeOrLeaf) -> bool:
    # Most nodes are, and no other rule changes them.
    return node.type in _PLAIN_TYPES or getattr(node, "value", None) in _PUNCTUATION


def places(source: str) -> list[list[Change]]:
    """Return the changes that are possible at each place, in the file's order.

    A change gives the rule's name and the mutated file, or None in its place where the mutated file
    does not compile or means the same. Excluded are docstrings, messages of errors and warnings,
    f-strings, type hints, blocks that only type checkers read, and what holds anyway: assertions
    and the strictness of zip.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    excluded = list(_excluded(tree, lines))
    counts = dict.fromkeys(_OPERATORS, 0)
    found: dict[Position, list[Change]] = {}
    for node in ast_nodes(get_ast(source)):
        for name, operator in (
            _OPERATORS_OF_NAMES.items() if _is_plain(node) else _OPERATORS.items()
        ):
            for begin, _ in operator.mutation_positions(node):
                occurrence = counts[name]
                counts[name] += 1
                if not any(first <= begin < last for first, last in excluded):
                    change = partial(_change, source, name, occurrence)
                    found.setdefault(begin, []).append(change)
    return [found[begin] for begin in sorted(found)]


def _change(source: str, name: str, occurrence: int) -> tuple[str, str | None]:
    content = mutate_code(source, _OPERATORS[name], occurrence)
    if content is None:
        return name, None
    try:
        same = ast.dump(ast.parse(content)) == ast.dump(ast.parse(source))
        compile(content, "mutant", "exec")
    except (SyntaxError, ValueError):
        return name, None
    return name, None if same else content


def _excluded(tree: ast.Module, lines: list[str]) -> Iterator[tuple[Position, Position]]:
    for node in ast.walk(tree):
        if _says_nothing(node):
            yield _span(node, lines)
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield _span(node.annotation, lines)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield _span(node.returns, lines)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from (_span(one, lines) for one in _arguments(node.exc))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("warn", "cast")):
            yield from (_span(one, lines) for one in _arguments(node))


def _says_nothing(node: ast.AST) -> bool:
    # Whether a whole node is a message, is for type checkers, or checks what holds anyway.
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.keyword(arg="strict"):
            return True
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return isinstance(node, ast.Assign) and _is_type_alias(node)


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_type_alias(node: ast.Assign) -> bool:
    # `Axis = int | str` and the like: names, `|` and subscripts only.
    allowed = (ast.Name, ast.Attribute, ast.BinOp, ast.BitOr, ast.Subscript, ast.Tuple)
    allowed += (ast.Constant, ast.Load, ast.List)
    return isinstance(node.value, ast.BinOp) and all(
        isinstance(part, allowed) for part in ast.walk(node.value)
    )


def _span(node: ast.AST, lines: list[str]) -> tuple[Position, Position]:
    # ast counts columns in bytes of UTF-8, parso in characters.
    def column(line: int, n_bytes: int) -> int:
        return len(lines[line - 1].encode()[:n_bytes].decode())

    first = (node.lineno, column(node.lineno, node.col_offset))
    return first, (node.end_lineno, column(node.end_lineno, node.end_col_offset))
