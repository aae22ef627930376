"""The terminal tables: their figures, and what is folded."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console
from timelines import (
    DEVICE_LANE,
    M_L_T_NS,
    both_schedulings,
    execution,
    header,
    hosted,
    launch,
    offloaded,
    timeline,
    transfer,
    with_substages,
)

from offload.observe.timelines.summary import (
    SHOWN_EXECUTIONS,
    SHOWN_LAUNCHES,
    launch_groups,
    quantities_of,
    representative,
    sections_of,
)
from offload.timeline import WEIGHT_WAIT, ExecutionTimeline, Span, SpanKind, Timeline


def shown(made: Timeline, width: int = 120) -> str:
    written = io.StringIO()
    made.show(Console(file=written, width=width, color_system=None))
    return written.getvalue()


def rows_of(text: str, name: str) -> list[list[str]]:
    """The cells of the rows whose first cell is the name."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return [row[1:] for row in rows if row and row[0] == name]


def test_the_median_execution_is_named_with_the_spread() -> None:
    times_ns = (9_000, 1_000, 2_000)
    made = timeline(
        [
            dataclasses.replace(offloaded(1, launch_ns=time_ns), number=number)
            for number, time_ns in enumerate(times_ns, 1)
        ]
    )
    text = shown(made, width=200)
    assert "offload scheduling: execution 3 is the median of 3 executions by total time" in text
    ((median, low, high),) = re.findall(r"total time, (\S+) us \((\S+) us to (\S+) us\)", text)
    assert float(low) < float(median) < float(high)
    assert "is the median" not in shown(timeline([offloaded(3)]))


def test_one_execution() -> None:
    text = shown(timeline([offloaded(3)]))
    assert "1 execution on cpu (Processor 1), torch 2.13.0" in text
    assert "execution 1, offload scheduling" in text
    assert "policy io: 2 slots, 5 words, 0 bytes copied" in text
    assert rows_of(text, "m_l_t") == [["", "1.98 us", "3.96 us", "+100.0 %"]]
    assert rows_of(text, "convert") == [["", "0.90 us", "1.80 us", "+100.0 %"]]
    assert rows_of(text, "submit") == [["", "0.70 us", "1.40 us", "+100.0 %"]]
    assert rows_of(text, "launches") == [["3", "3.00 us", "3.30 us", "+10.0 %"]]
    assert rows_of(text, "end to end") == [["", "5.00 us", "7.26 us", "+45.2 %"]]
    assert rows_of(text, "#1 aten::relu") == [
        ["1", "1.00 us", "1.10 us", "+10.0 %", "1.00 us", "33.3 %"]
    ]


def test_what_submit_consists_of() -> None:
    one = with_substages(offloaded(3), {"table copy": 300, "execute enqueue": 400})
    text = shown(timeline([one]))
    assert rows_of(text, "submit") == [["", "0.70 us", "1.40 us", "+100.0 %"]]
    assert rows_of(text, "table copy") == [["", "0.30 us", "-", "-"]]
    assert rows_of(text, "execute enqueue") == [["", "0.40 us", "-", "-"]]
    assert rows_of(text, "m_l_t") == [["", "1.98 us", "3.96 us", "+100.0 %"]]


def test_what_recording_cost() -> None:
    text = " ".join(shown(timeline([offloaded(3)])).split())
    assert (
        "Recording read the clock 1,000 times at 25.0 ns each and so added 25.00 us to the "
        "executions, 500.0 % of their time." in text
    )


def test_issues_of_host_scheduling() -> None:
    text = shown(timeline([hosted(3)]))
    assert rows_of(text, "m_l_t") == [["", "0.90 us"]]
    assert rows_of(text, "issues") == [["3", "9.00 us"]]
    assert rows_of(text, "launches") == [["3", "3.00 us"]]


def test_without_predictions_there_are_no_such_columns() -> None:
    text = shown(timeline([hosted(3)]))
    assert "error" not in text
    assert "Nothing is predicted: run.timeline(offload.calibrate()) compares" in text


def test_transfers_count_their_bytes() -> None:
    copies = [
        transfer("copy in", 1980, 2480, 4096, DEVICE_LANE),
        transfer("copy out", 9000, 9100, 512, DEVICE_LANE),
    ]
    text = shown(timeline([execution([*header(0), *copies, launch(0, 3000, 9000)])]))
    assert rows_of(text, "transfers, 4,608 bytes") == [["2", "0.60 us"]]


def test_what_a_prediction_leaves_out_has_no_error() -> None:
    copied = [*header(0), transfer("copy in", 1980, 2480, 64, DEVICE_LANE), launch(0, 3000, 9000)]
    text = shown(timeline([execution(copied, [*header(0), launch(0, 1980, 8580)])]))
    assert rows_of(text, "transfers, 64 bytes") == [["1", "0.50 us", "-", "-"]]
    assert rows_of(text, "launches") == [["1", "6.00 us", "6.60 us", "+10.0 %"]]


def test_only_predicted() -> None:
    text = shown(timeline([execution([], [*header(0), launch(0, 1980, 3000)])]))
    assert "execution 1, offload scheduling, only predicted" in text
    assert rows_of(text, "m_l_t") == [["", "-", "1.98 us", "-"]]
    assert rows_of(text, "launches") == [["1", "-", "1.02 us", "-"]]


@pytest.mark.parametrize("made", [timeline([]), timeline([execution([])])], ids=["none", "bare"])
def test_empty(made: Timeline) -> None:
    text = shown(made)
    assert ("The timeline is empty: nothing was executed" in text) == (not made.executions)


def test_markup_in_names_is_shown_as_it_stands() -> None:
    text = shown(
        timeline([execution([dataclasses.replace(launch(0, 0, 10), name="mine::[bold]op[/bold]")])])
    )
    assert "mine::[bold]op[/bold]" in text


# ---- many ---------------------------------------------------------------------------------------


def test_many_launches_are_summed_up_by_operator() -> None:
    text = shown(timeline([offloaded(SHOWN_LAUNCHES)]))
    assert len(re.findall(r"│ #\d+ aten::", text)) == SHOWN_LAUNCHES
    text = shown(timeline([offloaded(5000)]))
    assert "#" not in text
    assert rows_of(text, "aten::mm") == [
        ["1,000", "1,000.00 us", "1,100.00 us", "+10.0 %", "1.00 us", "20.0 %"]
    ]
    assert len(text.splitlines()) < 40


def test_many_operators_are_folded_and_the_longest_come_first() -> None:
    spans = [
        dataclasses.replace(launch(i, 100 * i, 101 * i), name=f"mine::op{i}") for i in range(1, 31)
    ]
    groups = launch_groups([execution(spans)])
    assert [group.total.name for group in groups[:2]] == ["mine::op30", "mine::op29"]
    assert len(groups) == SHOWN_LAUNCHES + 1
    rest = groups[-1]
    assert rest.total.name == "20 other operators"
    assert (rest.total.count, rest.total.measured_ns) == (20, sum(range(1, 21)))
    assert rest.longest_ns == 20
    assert sum(group.share for group in groups) == pytest.approx(1)


def test_many_executions_are_summed_up_by_medians() -> None:
    executions = [offloaded(3, number=i, launch_ns=1000 * i) for i in range(1, 6)]
    executions += [hosted(3, number=6), hosted(3, number=7)]
    sections = sections_of(executions)
    assert [section.title for section in sections] == [
        "offload scheduling, medians of 5 executions",
        "host scheduling, medians of 2 executions",
        "execution 1, offload scheduling",
        "execution 7, host scheduling",
    ]
    medians = {quantity.name: quantity for quantity in sections[0].quantities}
    assert medians["m_l_t"].measured_ns == M_L_T_NS
    assert medians["launches"].measured_ns == 3 * 3000
    assert medians["launches"].count == 3
    assert medians["launches"].predicted_ns == 3 * 3300
    assert len(sections_of(executions[:SHOWN_EXECUTIONS])) == SHOWN_EXECUTIONS


def test_what_only_some_executions_have_counts_as_zero_in_the_others() -> None:
    plain = [offloaded(3, number=i) for i in range(1, 4)]
    copying = execution([*header(0), transfer("copy in", 1980, 2980, 64, DEVICE_LANE)], number=4)
    rows = {quantity.name: quantity for quantity in quantities_of([*plain, copying])}
    assert (rows["transfers"].measured_ns, rows["transfers"].count) == (0, 0)
    # One of them has no prediction: a median of the rest would describe something else.
    assert rows["m_l_t"].predicted_ns is None


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_the_representative_has_the_median_time(n: int, expected: int) -> None:
    executions = [offloaded(3, number=i, launch_ns=100 * i) for i in range(1, n + 1)]
    chosen = representative(executions[::-1], "offload")
    assert chosen is not None
    assert chosen.number == expected


def test_what_was_measured_comes_before_what_was_only_predicted() -> None:
    predicted = execution([], [launch(0, 0, 10)], number=1)
    assert representative([predicted], "offload") == predicted
    chosen = representative([predicted, offloaded(3, number=2)], "offload")
    assert isinstance(chosen, ExecutionTimeline)
    assert chosen.number == 2
    assert representative([predicted], "host") is None


def test_both_schedulings_fit_a_terminal() -> None:
    lines = shown(both_schedulings(150), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("n_launches", [5, 40])
@pytest.mark.parametrize(("width", "n_tables"), [(80, 2), (100, 2), (130, 1)])
def test_predictions_and_waits_leave_operators_and_counts(
    n_launches: int, width: int, n_tables: int
) -> None:
    one = offloaded(n_launches, launch_ns=1_234_567)
    waits = [
        Span(SpanKind.WAIT, WEIGHT_WAIT, DEVICE_LANE, span.begin_ns - 5, span.begin_ns, span.launch)
        for span in one.of_kind(SpanKind.LAUNCH)
    ]
    text = shown(timeline([dataclasses.replace(one, spans=(*one.spans, *waits))]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert text.count("┃ operator") == n_tables
    count, name = n_launches // 5, "#0 aten::addmm" if n_launches == 5 else "aten::addmm"
    cells = [cell for row in rows_of(text, name) for cell in row]
    measured, predicted = (f"{count * ns / 1e3:,.2f} us" for ns in (1_234_567, 1_358_023))
    assert cells == [
        f"{count}",
        measured,
        predicted,
        "+10.0 %",
        "1,234.57 us",
        "20.0 %",
        f"{count * 5 / 1e3:.2f} us",
    ]


def test_the_terminal_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    timeline([offloaded(3)]).show()
    assert "m_l_t" in capsys.readouterr().out
