"""Command line: tests mutants, tests survivors again, and writes the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from mutations import copied_tree
from mutations.areas import read_groups
from mutations.mutants import Mutant, mutants_of
from mutations.report import ReportError, read_survivors, write_report
from mutations.results import Draw, Result, append, in_turns, read_results, result_of
from mutations.testing import Tester


@click.group()
@click.option("--count", default=200, show_default=True, help="Mutants in all.")
@click.option("--cpp-count", default=70, show_default=True, help="Of them in C++.")
@click.option("--seed", default=1, show_default=True, help="Draws the same mutants of a tree.")
@click.pass_context
def main(context: click.Context, count: int, cpp_count: int, seed: int) -> None:
    """Change one place of the product at a time, and see which tests notice it."""
    context.obj = Draw(count, cpp_count, seed)


@main.command()
@click.option("--minutes", default=600.0, show_default=True, help="Begin no mutant after these.")
@click.pass_obj
def run(draw: Draw, minutes: float) -> None:
    """Test the mutants that have no verdict yet."""
    begin, before = time.monotonic(), copied_tree.state_of_tree()
    tester, known = Tester(), read_results(draw.path())
    try:
        for mutant in in_turns(read_groups(), draw, known):
            if time.monotonic() - begin > 60 * minutes:
                break
            result = result_of(mutant, tester.test(mutant))
            known[result.key] = result
            append(draw.path(), result)
            _show(result)
    finally:
        if copied_tree.state_of_tree() != before:
            raise click.ClickException("the working tree has changed: its results are worthless")
    click.echo(f"{sum(one.outcome != 'discarded' for one in known.values())} of {draw.count}")


@main.command()
@click.pass_obj
def survivors(draw: Draw) -> None:
    """Run the tests that were added for survivors, with and without their mutants."""
    known, told, tester = read_results(draw.path()), read_survivors(), Tester()
    left = {
        one.key: one
        for one in known.values()
        if one.outcome == "survived" and told.get(one.key, {}).get("test", "") != one.noticed_since
    }
    for mutant in _again(list(left.values())):
        test = told[mutant.key]["test"]
        group = replace(mutant.group, tests=(test,), programs=())
        if test.endswith(".cpp"):
            group = replace(mutant.group, tests=(), programs=(Path(test).stem,))
        verdict = tester.test(replace(mutant, group=group))
        if verdict.outcome != "noticed":
            raise click.ClickException(f"{mutant.key}: {test} does not notice it")
        append(draw.path(), replace(left[mutant.key], noticed_since=test))
        click.echo(f"{mutant.key}: noticed by {verdict.noticed_by}")


@main.command()
@click.pass_obj
def report(draw: Draw) -> None:
    """Write docs/measurements/mutations.json and the page made of it."""
    try:
        write_report(draw, read_results(draw.path()).values())
    except ReportError as error:
        raise click.ClickException(str(error)) from error


def _again(wanted: Sequence[Result]) -> Iterator[Mutant]:
    """Yield the mutants of these results, found where they stand: a changed tree draws others."""
    left = {one.key for one in wanted}
    for group in read_groups():
        for path in (path for path in group.files if any(one.path == path for one in wanted)):
            for mutant in mutants_of(group, path):
                if mutant.key in left:
                    left.remove(mutant.key)
                    yield mutant
    if left:
        raise click.ClickException(f"no rule makes {sorted(left)} any more")


def _show(result: Result) -> None:
    by = f" by {result.noticed_by} ({result.how})" if result.noticed_by else ""
    click.echo(
        f"{result.outcome}{by}, {result.seconds} s: {result.path}:{result.line} {result.kind}"
    )
    if result.outcome == "survived":
        click.echo(f"  - {result.before}\n  + {result.after}")


if __name__ == "__main__":
    main()
