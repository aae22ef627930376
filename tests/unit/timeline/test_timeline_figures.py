"""The figures and the page: their content, their size, and that they are self-contained."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html.parser
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib as mpl
import pytest
from timelines import (
    DEVICE_LANE,
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

from offload.errors import OffloadError, TimelineError
from offload.observe.timelines.chart import TIMES, duration_text
from offload.observe.timelines.summary import merged_names
from offload.observe.timelines.trace import trace_of
from offload.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"
COMPARISON = "Host-bound scheduling against model offload scheduling, end to end"
SEQUENCE = "Host/device time sequence of one execution"


def drawn(made: Timeline, folder: Path) -> ElementTree.Element:
    made.plot(folder / "t.svg")
    return ElementTree.parse(folder / "t.svg").getroot()


def texts_of(picture: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()).strip() for element in picture.iter(f"{SVG}text")]


# ---- what is drawn ------------------------------------------------------------------------------


def test_both_figures(tmp_path: Path) -> None:
    texts = texts_of(drawn(both_schedulings(3), tmp_path))
    assert COMPARISON in texts
    assert SEQUENCE in texts
    # In the comparison, in the sequence, and in the enlarged header.
    assert texts.count("m_l_t 1.98 µs") == 3
    assert (
        "Host-bound scheduling (execution 3, 3 launches, the median of 2 executions by total "
        "time, 11.1 µs to 11.1 µs)" in texts
    )
    assert "end to end 11.1 µs" in texts
    assert "end to end 5.00 µs" in texts
    assert "6.10 µs less: 2.22 times as fast, of medians" in texts


def test_every_launch_of_three_is_labelled(tmp_path: Path) -> None:
    texts = texts_of(drawn(both_schedulings(3), tmp_path))
    for name in ("addmm", "relu", "add"):
        # The host's issue and launch, the offloaded launch, measured and predicted in time.
        assert texts.count(name) == 2 + 1 + 2
    for name in ("convert", "policy", "patch", "submit"):
        assert name in texts


def test_substages_have_a_lane_where_the_header_is_enlarged(tmp_path: Path) -> None:
    one = with_substages(offloaded(3), {"table copy": 300, "execute enqueue": 400})
    texts = texts_of(drawn(timeline([one]), tmp_path))
    for name in ("table copy", "execute enqueue", "of submit"):
        assert texts.count(name) == 1
    assert "submit" in texts


def test_every_launch_is_labelled_even_if_it_is_too_short_to_see(tmp_path: Path) -> None:
    spans = [*header(0), *(launch(i, 1980 + 10 * i, 1985 + 10 * i) for i in range(4))]
    spans.append(launch(4, 2100, 9_000_000))
    texts = texts_of(drawn(timeline([execution(spans)]), tmp_path))
    for name in ("addmm", "relu", "add", "native_layer_norm", "mm"):
        assert texts.count(name) == 1


@pytest.mark.parametrize("n_launches", [150, 5000])
def test_many_launches_are_folded_with_their_counts(tmp_path: Path, n_launches: int) -> None:
    made = timeline([offloaded(n_launches)])
    picture = drawn(made, tmp_path)
    texts = texts_of(picture)
    counts = [int(text[1:].replace(",", "")) for text in texts if re.match(rf"{TIMES}\d", text)]
    # Measured and predicted; here no block is too narrow for its count.
    assert sum(counts) == 2 * n_launches
    assert len(counts) <= 2 * 41
    assert "m_l_t 1.98 µs" in texts
    assert any(text.startswith(f"{TIMES}n: n neighbours folded") for text in texts)


@pytest.mark.slow
def test_a_picture_of_5000_launches_is_as_small_as_one_of_150(tmp_path: Path) -> None:
    few = drawn(both_schedulings(150), tmp_path)
    size_bytes = (tmp_path / "t.svg").stat().st_size
    many = drawn(both_schedulings(5000), tmp_path)
    assert (tmp_path / "t.svg").stat().st_size < 1.2 * size_bytes < 200_000
    assert len(texts_of(many)) < 1.2 * len(texts_of(few)) < 250


def test_predictions_of_the_same_execution_stand_below_it(tmp_path: Path) -> None:
    texts = texts_of(drawn(timeline([offloaded(3)]), tmp_path))
    assert COMPARISON not in texts
    assert texts.count("predicted") == 3
    assert (
        "Model offload scheduling (execution 1, 3 launches): end to end 7.26 µs predicted "
        "(+45.2 %)" in texts
    )
    assert "The header enlarged: m_l_t 3.96 µs predicted (+100.0 %)" in texts


def test_the_other_scheduling_may_be_only_predicted(tmp_path: Path) -> None:
    host = hosted(3)
    predicted = dataclasses.replace(host, spans=(), predicted=host.spans)
    texts = texts_of(drawn(timeline([offloaded(3), predicted]), tmp_path))
    assert COMPARISON in texts
    assert "Host-bound scheduling (predicted)" in texts


def test_host_scheduling_alone(tmp_path: Path) -> None:
    texts = texts_of(drawn(timeline([hosted(3)]), tmp_path))
    assert COMPARISON not in texts
    assert texts.count("m_l_t 900 ns") == 2
    assert "predicted" not in texts


def test_it_is_said_if_offload_is_slower(tmp_path: Path) -> None:
    made = timeline([offloaded(3, launch_ns=9000), hosted(3)])
    assert "17.9 µs less: 2.61 times as fast, of one execution" in texts_of(drawn(made, tmp_path))


def test_an_operator_name_is_no_formula(tmp_path: Path) -> None:
    one = dataclasses.replace(launch(0, 1980, 9000), name="mine::$x_1$")
    assert "$x_1$" in texts_of(drawn(timeline([execution([*header(0), one])]), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spans",
    [
        [launch(0, 0, 10)],
        header(0),
        header(0, {"convert": 0, "submit": 0}),
        [launch(i, 5, 5) for i in range(50)],
        [*header(0), launch(0, 1980, 2500), launch(1, 1980, 9000, "stream 8")],
        [*header(0), transfer("copy in", 1980, 2980, 64, DEVICE_LANE)],
    ],
    ids=["no header", "no launches", "no time", "no duration", "two lanes", "a transfer"],
)
def test_odd_executions(tmp_path: Path, spans: list[object]) -> None:
    made = timeline([execution(spans)])  # type: ignore[arg-type]
    texts = texts_of(drawn(made, tmp_path))
    assert SEQUENCE in texts
    assert any(text.startswith("m_l_t") for text in texts) == any(
        span.kind == "stage" for span in made.executions[0].spans
    )
    made.html(tmp_path / "t.html")


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1980, "1.98 µs"),
        (24_680, "24.7 µs"),
        (629_000, "629 µs"),
        (18_600_000, "18.6 ms"),
        (2_500_000_000, "2.50 s"),
    ],
)
def test_durations(duration_ns: int, text: str) -> None:
    assert duration_text(duration_ns) == text


# ---- files --------------------------------------------------------------------------------------


def test_the_same_timeline_gives_the_same_file(tmp_path: Path) -> None:
    pictures = []
    for _ in range(2):
        both_schedulings(20).plot(tmp_path / "t.svg")
        pictures.append((tmp_path / "t.svg").read_bytes())
    assert pictures[0] == pictures[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begins"), [("t.png", b"\x89PNG"), ("t.pdf", b"%PDF")])
def test_other_formats(tmp_path: Path, name: str, begins: bytes) -> None:
    both_schedulings(3).plot(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match=r"t\.txt: a picture's name must end in \.svg, \.pdf"):
        both_schedulings(3).plot(tmp_path / "t.txt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("made", [timeline([]), timeline([execution([])])])
def test_nothing_to_draw(tmp_path: Path, made: Timeline) -> None:
    for write in (made.plot, made.html):
        with pytest.raises(TimelineError, match="the timeline is empty"):
            write(tmp_path / "t.svg")


@pytest.mark.parametrize(("package", "method"), [("matplotlib", "plot"), ("jinja2", "html")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, method: str
) -> None:
    for name in list(sys.modules):
        if name.startswith("offload.observe.timelines.") or name.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(OffloadError, match=rf"needs {package}.*pip install 'offload\[pictures\]'"):
        getattr(both_schedulings(3), method)(tmp_path / "t.svg")


def test_global_settings_of_matplotlib_stay(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    both_schedulings(3).plot(tmp_path / "t.svg")
    assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_pyplot_is_never_imported_and_matplotlib_only_to_draw(tmp_path: Path) -> None:
    code = f"""
import sys
from timelines import both_schedulings
made = both_schedulings(3)
made.show()
made.save({str(tmp_path / "t.json")!r})
assert "matplotlib" not in sys.modules
made.plot({str(tmp_path / "t.png")!r})
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    path = [str(Path(__file__).parent), *sys.path]
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        check=True,
        capture_output=True,
    )


# ---- the page -----------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """Collects tags, addresses and the text of cells; checks that every opened tag is closed."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "poster"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(" ".join(data.split()))


def written(made: Timeline, folder: Path) -> tuple[str, Page]:
    made.html(folder / "t.html")
    text = (folder / "t.html").read_text("utf-8")
    return text, Page(text)


@pytest.mark.slow
@pytest.mark.parametrize("n_launches", [3, 5000])
def test_the_page_stands_alone(tmp_path: Path, n_launches: int) -> None:
    text, page = written(both_schedulings(n_launches), tmp_path)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    outside = [one for one in page.addresses if not one.startswith(("#", "data:"))]
    assert outside == []
    assert all(target == "#" for target in re.findall(r"url\(['\"]?(.)", text))
    assert "@import" not in text
    # Namespace names are the only addresses; they are never fetched.
    assert set(re.findall(r"https?://[^\"'\s<>]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert len(page.ids) == len(set(page.ids))


def test_the_page_holds_all_of_it(tmp_path: Path) -> None:
    made = both_schedulings(3)
    _, page = written(made, tmp_path)
    assert page.tags.count("svg") == 1
    assert page.texts.count("m_l_t 1.98 µs") == 3
    for expected in (
        "4 executions on cpu (Processor 1), torch 2.13.0",
        "execution 1, offload scheduling",
        "1.98 us",
        "+100.0 %",
        "#2 aten::add.Tensor",
    ):
        assert expected in page.texts
    assert any(text.startswith("Recording read the clock 1,000 times") for text in page.texts)
    (data,) = [one for one in page.addresses if one.startswith("data:")]
    trace = gzip.decompress(base64.b64decode(data.partition(",")[2]))
    assert json.loads(trace) == trace_of(made)


def test_names_on_the_page_are_escaped(tmp_path: Path) -> None:
    one = dataclasses.replace(launch(0, 1980, 9000), name="mine::<script>alert(1)</script>")
    made = timeline([execution([*header(0), one])])
    made.machine_name = "<b>&"
    text, page = written(made, tmp_path)
    assert "script" not in page.tags
    assert "&lt;b&gt;&amp;" in text


def test_names_that_only_some_executions_have_keep_their_order():
    assert merged_names([]) == []
    assert merged_names([["enqueue"], ["copy", "enqueue"], ["read", "copy", "enqueue"]]) == [
        "read",
        "copy",
        "enqueue",
    ]
