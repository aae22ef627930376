"""Values of our declarations of the Ascend runtime against a table of the documented values.

The simulator includes the same declarations: a wrong value there is wrong on both sides.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess

import pytest
from simulator_build import ROOT

NATIVE = ROOT / "native"
TABLE = ROOT / "tests" / "data" / "ascend_abi_values.csv"
ENUM = re.compile(r"^enum (\w+) : int \{(.*?)\};(?: *// (\w+))?", re.MULTILINE | re.DOTALL)
CONSTANT = re.compile(r"^inline constexpr std::\w+ (k\w+) =", re.MULTILINE)
ERROR = re.compile(r'X\((k\w+), \d+, *"\w+"\)')


def documented() -> list[dict[str, str]]:
    """The table's rows: name here, its declaration, documented name, value."""
    lines = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def declared_enums() -> dict[str, set[str]]:
    """Our enumerators, by the documented enumeration that a comment names."""
    text = (NATIVE / "ascend" / "acl_abi.hpp").read_text()
    found = {}
    for name, body, behind in ENUM.findall(text):
        said = re.search(r"// (acl\w+)", body)
        documented_name = said[1] if said else behind
        assert documented_name.startswith("acl"), f"{name}: its documented name is not said"
        assert documented_name not in found
        found[documented_name] = set(re.findall(r"\b(k\w+) =", body))
    return found


def compile_check(rows: list[dict[str, str]]) -> str:
    """The compiler's errors about our values against these rows; empty if all agree."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    lines = ['#include "ascend/acl_abi.hpp"', "using namespace offload::acl;"]
    for row in rows:
        same = f"static_cast<long>({row['name']}) == {row['value']}"
        lines.append(f'static_assert({same}, "{row["documented"]}");')
        if row["declared_in"] == "error":
            same = f'std::string_view(error_name({row["name"]})) == "{row["documented"]}"'
            lines.append(f"static_assert({same});")
    source = "#include <string_view>\n" + "\n".join(lines) + "\n"
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{NATIVE}", "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def test_every_value_is_the_documented_one() -> None:
    assert compile_check(documented()) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kTaskEventWait", "kHostRegisterPinned", "kRtNoStreamResource"])
def test_the_check_finds_another_value(name: str) -> None:
    (row,) = (one for one in documented() if one["name"] == name)
    said = compile_check([{**row, "value": str(int(row["value"], 0) + 1)}])
    assert "static assertion failed" in said
    assert row["documented"] in said


def test_the_table_has_every_value_that_is_declared() -> None:
    rows = documented()
    by_enum: dict[str, set[str]] = {}
    for row in rows:
        by_enum.setdefault(row["declared_in"], set()).add(row["name"])
    assert sum(len(names) for names in by_enum.values()) == len(rows)  # no duplicates
    errors, constants = by_enum.pop("error"), by_enum.pop("")
    assert by_enum == declared_enums()
    header = (NATIVE / "ascend" / "acl_abi.hpp").read_text()
    assert constants == set(CONSTANT.findall(header))
    of_errors = ERROR.findall(
        (NATIVE / "ascend" / "acl_errors.hpp").read_text().replace("\\\n", "")
    )
    assert errors == {"kSuccess", *of_errors}
    assert len(errors) > 200
