"""Places of a C++ file that a mutant changes, found in its syntax tree.

The rules are those of `python_mutants` where C++ has the construct: the mutation operators of
J. Offutt et al., "An Experimental Determination of Sufficient Mutant Operators" (TOSEM 5(2), 1996),
which are replacements of relational, logical and arithmetic operators, and removed statements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

Change = Callable[[], tuple[str, str | None]]
_Edit = tuple[str, Node, str]

_PARSER = Parser(Language(tree_sitter_cpp.language()))
_REPLACED = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "%": "/",
    "+=": "-=",
    "-=": "+=",
    "|": "&",
    "&": "|",
    "|=": "&=",
    "<<": ">>",
    ">>": "<<",
}
_NAMES = {"std::min": "std::max", "std::max": "std::min"}
_NOT_CODE = {
    "comment",
    "preproc_include",
    "preproc_def",
    "preproc_if",
    "static_assert_declaration",
    "string_literal",
    "template_argument_list",
    "template_parameter_list",
    "using_declaration",
}


def places(source: str) -> list[list[Change]]:
    """Return the changes that are possible at each place, in the file's order.

    A change gives the rule's name and the mutated file, of which a compiler decides whether it is
    C++. Excluded are comments, strings, what is thrown, template arguments and the preprocessor.
    """
    content = source.encode()
    found: dict[int, list[Change]] = {}
    for kind, node, text in _edits(_PARSER.parse(content).root_node):
        changes = found.setdefault(node.start_byte, [])
        changes.append(partial(_change, content, kind, node.start_byte, node.end_byte, text))
    return [found[begin] for begin in sorted(found)]


def _change(content: bytes, kind: str, begin: int, end: int, text: str) -> tuple[str, str]:
    # A removed statement leaves its lines, so that later ones keep their numbers.
    lines = "\n" * (content[begin:end].count(b"\n") - text.count("\n"))
    return kind, (content[:begin] + text.encode() + lines.encode() + content[end:]).decode()


def _edits(node: Node) -> Iterator[_Edit]:
    if node.type in _NOT_CODE or node.type == "ERROR":
        return
    yield from _of(node)
    if node.type != "throw_statement":  # its message
        for child in node.children:
            yield from _edits(child)


def _of(node: Node) -> Iterator[_Edit]:
    text = node.text.decode() if node.text else ""
    if node.type in ("binary_expression", "assignment_expression"):
        operator = node.child_by_field_name("operator")
        if operator is not None and operator.type in _REPLACED:
            yield (
                f"{operator.type} to {_REPLACED[operator.type]}",
                operator,
                _REPLACED[operator.type],
            )
    elif node.type == "number_literal" and text.isdigit():
        yield "number + 1", node, str(int(text) + 1)
        if int(text) > 0:
            yield "number - 1", node, str(int(text) - 1)
    elif node.type in ("true", "false"):
        yield "boolean", node, "false" if node.type == "true" else "true"
    elif node.type == "throw_statement":
        yield "remove throw", node, ";"
    elif node.type == "qualified_identifier" and text in _NAMES:
        yield "swap min and max", node, _NAMES[text]
    elif node.type == "if_statement":
        yield from _conditions(node)
    elif node.type == "unary_expression" and text.startswith("!"):
        yield "remove !", node.children[0], ""
    elif node.type == "expression_statement" and node.child_count > 1:
        if node.children[0].type in ("call_expression", "assignment_expression"):
            yield "remove statement", node, ";"
    elif node.type in ("break_statement", "continue_statement"):
        other = "continue;" if node.type == "break_statement" else "break;"
        yield f"{node.type.partition('_')[0]} to {other[:-1]}", node, other


def _conditions(node: Node) -> Iterator[_Edit]:
    clause = node.child_by_field_name("condition")
    value = clause.child_by_field_name("value") if clause is not None else None
    # A condition that declares a variable, and `if constexpr`, are kept.
    if value is None or value.type == "declaration" or clause.child_count != 3:
        return
    if any(child.type == "constexpr" for child in node.children):
        return
    yield "condition never", value, "false"
    yield "condition always", value, "true"
