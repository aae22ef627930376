"""The rules by which mutants are made, and what is told of the tests that run against them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("cosmic_ray", reason="make mutations installs what makes mutants")
pytest.importorskip("tree_sitter_cpp", reason="make mutations installs what makes mutants")

from mutations import cpp_mutants, mutants, python_mutants, report, results
from mutations.areas import Group, read_groups
from mutations.forked_pytest import Forks
from mutations.testing import Verdict

AREA = Group("area", "python", ("capture/offload/plan/topology.py",), tests=("tests/unit",))


def changed(rules: ModuleType, source: str) -> set[str]:
    """The files that changes of a source make, without the whitespace around them."""
    places = rules.places(f"{source}\n")
    contents = [change()[1] for changes in places for change in changes]
    return {" ".join(one.split()) for one in contents if one is not None}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", {"x = a <= b"}),
        ("x = a is None", {"x = a is not None"}),
        ("x = a + 1", {"x = a - 1", "x = a + 2", "x = a + 0"}),
        ("x = max(a, b)", {"x = min(a, b)"}),
        ("if a: raise KeyError('1')", {"if not a: raise KeyError('1')", "if a: pass"}),
        ("f(a)", {"pass"}),
        ("a += b", {"pass"}),
        ("for x in a: continue", {"for x in []: continue", "for x in a: break"}),
    ],
)
def test_python_changes(source: str, expected: set[str]) -> None:
    assert changed(python_mutants, source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""1 + 1."""',
        "# a < 1",
        "x: int | None",
        "def f(a: int | str) -> int | None: return a",
        "Axis = int | str",
        "assert a < 1, b + 1",
        "x = f'{a + 1}'",
        "x = zip(a, b, strict=True)",
        "def __repr__(self): return self.a + 1",
    ],
)
def test_what_no_test_could_notice_in_python_is_left(source: str) -> None:
    assert changed(python_mutants, source) == set()


def test_messages_of_python_errors_are_left() -> None:
    source = "raise ValueError('é', a + 1)"
    assert changed(python_mutants, source) == {"pass"}


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("return a < b;", {"return a <= b;"}),
        ("return a && b;", {"return a || b;"}),
        ("return 2;", {"return 3;", "return 1;"}),
        ("return std::min(a, b);", {"return std::max(a, b);"}),
        (
            'if (a) throw E("1" + b);',
            {'if (true) throw E("1" + b);', 'if (false) throw E("1" + b);', "if (a) ;"},
        ),
        ("f(a);", {";"}),
        ("a += b;", {"a -= b;", ";"}),
        ("return !a;", {"return a;"}),
        ("while (true) break;", {"while (false) break;", "while (true) continue;"}),
    ],
)
def test_cpp_changes(statement: str, expected: set[str]) -> None:
    wanted = {f"int f() {{ {one} }}" for one in expected}
    assert changed(cpp_mutants, f"int f() {{ {statement} }}") == wanted


@pytest.mark.parametrize(
    "source",
    [
        "// a < 1",
        "#include <a>",
        "#if A < 1\n#endif",
        'const char* a = "1 < 2";',
        "static_assert(a < 1);",
        "std::array<int, 4> a;",
        "template <int kSize = 1> struct A;",
    ],
)
def test_what_no_test_could_notice_in_cpp_is_left(source: str) -> None:
    assert changed(cpp_mutants, source) == set()


def test_removed_statements_of_cpp_leave_their_lines() -> None:
    (removed,) = (change()[1] for (change,) in cpp_mutants.places("int f() {\n  g(\n    a);\n}"))
    assert removed == "int f() {\n  ;\n\n}"


def test_the_table_names_what_exists() -> None:
    groups = read_groups()
    languages = {(one.area, one.language) for one in groups}
    assert {area for area, _ in languages} == {
        *("planner", "checker", "header", "relocation", "streaming", "guards", "fusion proof")
    }


def test_a_table_that_names_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "areas.toml"
    table.write_text('[[group]]\narea = "a"\nlanguage = "python"\nfiles = ["no.py"]\n')
    with pytest.raises(ValueError, match=r"area a names \['no.py'\]"):
        read_groups(table)


def test_mutants_are_divided_evenly() -> None:
    found = mutants.shares(read_groups(), 200, 70)
    assert sum(found.values()) == 200
    assert sum(count for (_, language), count in found.items() if language == "cpp") == 70
    for language in ("python", "cpp"):
        counts = [count for (_, one), count in found.items() if one == language]
        assert max(counts) - min(counts) <= 1


def draw_some(n_wanted: int, known: dict[str, results.Result]) -> list[mutants.Mutant]:
    """Draw mutants of a file, each noticed but the first, which is discarded."""
    found = []
    for mutant in results.in_turns([AREA], results.Draw(n_wanted, 0, seed=1), known):
        outcome = "noticed" if found else "discarded"
        known[mutant.key] = results.result_of(mutant, Verdict(outcome, "", "", 1.0))
        found.append(mutant)
    return found


def test_each_mutant_of_a_draw_is_found_where_it_stands() -> None:
    all_keys = {one.key for one in mutants.mutants_of(AREA, AREA.files[0])}
    drawn = {one.key for one in mutants.drawn([AREA], "area", "python", 1)}
    assert drawn
    assert drawn < all_keys


def test_a_draw_is_repeated_continued_and_replaces_what_was_discarded() -> None:
    known: dict[str, results.Result] = {}
    first = draw_some(4, known)
    assert len(first) == 5
    assert draw_some(4, {}) == first
    assert draw_some(4, known) == []
    for mutant in first:
        compile(mutant.content, mutant.path, "exec")
        assert mutant.before != mutant.after
        assert (
            mutant.before.splitlines()[0]
            == ((Path(__file__).parents[3] / mutant.path).read_text().splitlines()[mutant.line - 1])
        )


def test_a_survivor_has_a_test_or_a_reason_or_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, results.Result] = {}
    mutant = draw_some(1, known)[1]
    survived = results.result_of(mutant, Verdict("survived", "", "", 1.0))
    told = tmp_path / "survivors.toml"
    told.write_text("survivor = []")
    monkeypatch.setattr(report, "read_survivors", lambda read=report.read_survivors: read(told))
    monkeypatch.setattr(report, "DATA", tmp_path / "mutations.json")
    monkeypatch.setattr(report, "PAGE", tmp_path / "mutations.md")
    draw = results.Draw(1, 0, seed=1)
    report.write_report(draw, [survived])
    assert "left open: 1" in (tmp_path / "mutations.md").read_text()
    told.write_text(f'[[survivor]]\nkey = "{mutant.key}"\ntest = "tests/unit/a.py::b"')
    with pytest.raises(report.ReportError, match="was not run"):
        report.write_report(draw, [survived])
    told.write_text(f'[[survivor]]\nkey = "{mutant.key}"\nreason = "the same for each input"')
    report.write_report(draw, [survived])
    assert "the same for each input" in (tmp_path / "mutations.md").read_text()
    assert "left open: 0" in (tmp_path / "mutations.md").read_text()
    told.write_text(told.read_text().replace(mutant.key, "another"))
    with pytest.raises(report.ReportError, match="are no survivors"):
        report.write_report(draw, [survived])


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, str]]:
    """Runs one test function in a fork."""
    folder = tmp_path_factory.mktemp("forked") / "tree"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

        def run(body: str, limit_s: float = 600.0) -> tuple[str, str]:
            (folder / "test_one.py").write_text(f"import os\ndef test_it():\n    {body}\n")
            found = Forks(limit_s).run(folder, ("test_one.py",), mutated=True)
            return found.noticed_by, found.how

        yield run


def test_what_a_fork_tells(outcome_of: Callable[..., tuple[str, str]]) -> None:
    assert outcome_of("pass") == ("", "")
    assert outcome_of("assert os.getpid() < 0") == ("test_one.py::test_it", "failed")
    assert outcome_of("os._exit(0)") == ("test_one.py::test_it", "the process ended")
    assert outcome_of("pass", limit_s=0.0) == ("test_one.py", "the time limit")
    assert outcome_of("pass\nsyntax error") == ("test_one.py", "failed")
