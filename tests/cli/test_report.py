"""The report of a run: whole, self-contained, harmless whatever an agent wrote."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import rc_context

from kitestring_api.errors import UserMistakeError
from kitestring_cli.report import write_report
from kitestring_cli.report.charts import MOST_BARS, MOST_POINTS, Series, bar_chart, line_chart, thinned
from kitestring_cli.report.numbers import number
from kitestring_cli.report.samples import TASKS, telling_tasks
from tests.cli.run_folders import MadeUpRun, Try, make_run
from tests.cli.test_inspect import learn

VOID = {"meta", "br"}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}</style></svg>&lt;\x00\x1b'


class Page(HTMLParser):
    """Elements, attributes and text of a page; fails where elements do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(run: MadeUpRun) -> tuple[str, Page]:
    path = write_report(run.folder.root)
    assert path == run.folder.report
    page = path.read_text(encoding="utf-8")
    return page, Page(page)


def test_everything_is_there(tmp_path: Path) -> None:
    run = learn(make_run(tmp_path / "runs", backend="verl"))
    began = time.process_time()
    page, read = page_of(run)
    assert time.process_time() - began < 3.0
    assert len(page) < 1_000_000
    text = read.text
    assert "calc-20261129-120000 Succeeded" in text
    for title in (
        "Validation", "Reward in training", "Response length", "Entropy", "KL of sampler and trainer",
        "1 − correlation of sampler and trainer", "Rollouts that failed", "Time",
    ):  # fmt: skip
        assert title in text
    assert "validation, sampled 0.500 → 1.000 +0.500" in text
    assert "1 TimedOut no end within 60 s no t000001-00000001-000" in text
    assert "bound 0.002, inside throughout" in text
    assert [tag for tag, _ in read.elements].count("svg") == 8
    assert "at the start s000000-00000001-000 reward 0" in text
    assert "after step 2 s000002-00000001-000 reward 1" in text
    assert 'system Use the calculator. user What is 2+2? assistant → calculator({"x": "2+2"}) tool 4' in text
    assert "rollouts.groupSize 2" in text


def test_nothing_is_fetched(tmp_path: Path) -> None:
    page, read = page_of(learn(make_run(tmp_path / "runs", backend="verl")))
    assert not {tag for tag, _ in read.elements} & {"script", "link", "img", "iframe", "object", "base", "form", "a"}
    for tag, attributes in read.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            assert name not in ("src", "xlink:href", "action", "srcset"), tag
            if name == "href":
                assert tag == "use"
                assert value is not None
                assert value.startswith("#")
            assert "url(" not in (value or "")
    assert "url(" not in page
    assert "@import" not in page
    assert "://" not in "".join(part for tag, a in read.elements for part in [tag, *map(str, a.values())])
    policy = next(a["content"] for tag, a in read.elements if tag == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_what_agents_write_is_only_text(tmp_path: Path) -> None:
    hostile = {
        "role": HOSTILE,
        "content": HOSTILE,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}],
    }

    def play(plan: object, index: int) -> list[Try]:
        return [Try("AgentFailed", HOSTILE, 0.5, HOSTILE, replies=[hostile, hostile], question=HOSTILE)]

    run = make_run(tmp_path / "runs")
    clean = page_of(run)[1].elements
    run.validation(0, "validation-sampled", play)
    run.step(1, play)
    run.validation(1, "validation-sampled", play)
    run.result(phase="Failed", reason=HOSTILE, message=HOSTILE)
    page, read = page_of(run)
    drawn = {"svg", "g", "defs", "path", "use", "text", "title", "figure", "i", "b", "span", "div"}
    table = {"table", "tr", "td", "th", "br", "code", "li"}
    assert {tag for tag, _ in read.elements} - {tag for tag, _ in clean} <= drawn | table
    assert "<script" not in page
    assert not re.search(r"<[^>]*onerror", page)
    assert "\x00" not in page
    assert "\x1b" not in page
    assert read.text.count("{{ 7*7 }}") > 4
    assert read.text.count("<script>alert(1)</script>") > 4


@pytest.mark.parametrize("backend", ["collect", "verl"])
def test_a_run_that_has_just_begun(tmp_path: Path, backend: str) -> None:
    _, read = page_of(make_run(tmp_path / "runs", backend=backend))
    assert "Unfinished" in read.text
    assert "nothing was validated" in read.text
    assert "No rollout has been committed." in read.text


def test_a_collecting_run_has_no_curves_of_updates(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    run.step(1)
    _, read = page_of(run)
    assert "Entropy" not in read.text
    assert "KL of sampler" not in read.text
    assert "none: every rollout succeeded" in read.text
    assert "in step 1 t000001-00000000-000 reward 1" in read.text  # nothing was validated: of training, then


def test_a_run_without_its_traces_keeps_its_curves(tmp_path: Path) -> None:
    run = learn(make_run(tmp_path / "runs", backend="verl"))
    (run.folder.store / "traces").rename(tmp_path / "away")
    _, read = page_of(run)
    assert [tag for tag, _ in read.elements].count("svg") == 8


def test_long_conversations_are_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    chatter = [{"role": "assistant", "content": "x" * 100_000}] * 40
    run.step(1, lambda _plan, _index: [Try(replies=chatter, output="y" * 60_000)])
    page, read = page_of(run)
    assert len(page) < 1_000_000
    assert "more characters)" in read.text
    assert "more turns: kitestring show calc-20261129-120000 t000001-00000000-000" in read.text


def test_literal_values_of_the_agents_environment_are_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs")
    (run.folder.resolved / "rolloutpool.yaml").write_text(
        "kind: RolloutPool\nmetadata: {name: p}\nspec: {template: {spec: {containers: "
        "[{name: agent, env: [{name: KEY, value: sk-secret}]}]}}}\n"
    )
    page, read = page_of(run)
    assert "sk-secret" not in page
    assert "template.spec.containers[0].env[0].value (not shown)" in read.text


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserMistakeError, match="no folder of a run"):
        write_report(tmp_path)


# --- charts ---


Bounds = tuple[float, float, float, float]
"""left, top, right, bottom"""


def bounds(path: ElementTree.Element) -> Bounds:
    found = [float(part) for part in re.findall(r"-?\d+(?:\.\d+)?", path.attrib["d"])]
    return min(found[::2]), min(found[1::2]), max(found[::2]), max(found[1::2])


def inked(svg: ElementTree.Element) -> list[tuple[str, ElementTree.Element]]:
    """(colour, path) of the lines and bars, in the order in which they were drawn."""
    found = [(re.search(r"var\((--c\d)\)", path.get("style", "")), path) for path in svg.iter("path")]
    markers = {id(path) for defs in svg.iter("defs") for path in defs}
    return [(colour[1], path) for colour, path in found if colour and id(path) not in markers]


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_a_line_chart() -> None:
    svg = parsed(line_chart("reward <&>", [Series("a<b", [(0, 0.1), (1, 0.9)]), Series("none", [])]))
    assert svg.attrib["aria-label"] == "reward <&>"
    ((colour, line),) = inked(svg)
    assert colour == "--c0"
    assert bounds(line)[::2] == (54.0, 428.0)  # from edge to edge
    dots = [(float(dot.attrib["x"]), float(dot.attrib["y"])) for dot in svg.iter("use")]
    assert [x for x, _ in dots] == [54.0, 428.0]
    assert dots[0][1] > dots[1][1]
    assert [title.text for title in svg.iter("title")] == ["a<b, step 0: 0.1", "a<b, step 1: 0.9"]
    assert line_chart("empty", [Series("a", [])]) == ""


def test_a_bar_chart_stacks_its_layers() -> None:
    svg = parsed(bar_chart("time", [1, 2], {"a": [1.0, 0.0], "b": [3.0, 2.0]}))
    bars = [(colour, bounds(bar)) for colour, bar in inked(svg)]
    assert [colour for colour, _ in bars] == ["--c0", "--c1", "--c1"]
    (_, first), (_, upon), (_, second) = bars
    assert upon[3] == pytest.approx(first[1])
    height, tall, other = (bottom - top for _, top, _, bottom in (first, upon, second))
    assert tall == pytest.approx(3 * height)
    assert other == pytest.approx(2 * height)
    assert [title.text for title in svg.iter("title")] == ["a, step 1: 1", "b, step 1: 3", "b, step 2: 2"]
    assert bar_chart("empty", [], {"a": []}) == ""


@pytest.mark.parametrize("chart", [line_chart("a", [Series("a", [(3, 0.5)])]), bar_chart("a", [3], {"a": [1.0]})])
def test_a_single_step_is_the_only_one_named(chart: str) -> None:
    svg = parsed(chart)
    words = [text.text for text in svg.iter("text")]
    assert words[: words.index("step")] == ["3"]


def test_charts_take_colours_and_fonts_from_the_page() -> None:
    svg = line_chart("a", [Series(str(place), [(0, place), (1, place)]) for place in range(7)])
    assert not re.search(r"#[0-9a-fA-F]{6}\b", svg)
    assert [colour for colour, _ in inked(parsed(svg))] == ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c0"]
    assert "font" not in svg
    assert "<style" not in svg
    assert not {"width", "height"} & set(parsed(svg).attrib)


def test_the_same_chart_is_the_same_text_and_shares_no_id_with_another() -> None:
    series = [Series("a", [(0, 0.1), (1, 0.9)])]
    assert line_chart("a", series) == line_chart("a", series)
    ids = [
        {element.attrib["id"] for element in parsed(line_chart(label, series)).iter() if "id" in element.attrib}
        for label in ("a", "b")
    ]
    assert all(ids)
    assert not ids[0] & ids[1]


def test_commands_start_without_matplotlib() -> None:
    imports = "import sys, kitestring_cli.main, kitestring_cli.report, kitestring_cli.run.command"
    check = f"{imports}; print('matplotlib' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "False\n"


def test_the_users_settings_of_matplotlib_change_nothing() -> None:
    series = [Series("a", [(0, 0.1), (1, 0.9)])]
    expected = line_chart("a", series)
    with rc_context({"lines.markersize": 20, "axes.grid": True, "svg.fonttype": "path", "ytick.right": True}):
        assert line_chart("a", series) == expected


@pytest.mark.parametrize("steps", [1, 2, 61, 5000])
def test_charts_stay_small(steps: int) -> None:
    points = [(float(step), math.sin(step)) for step in range(1, steps + 1)]
    line = line_chart("a", [Series("a", points)])
    bars = bar_chart("b", list(range(1, steps + 1)), {name: [1.0] * steps for name in "abcdef"})
    for svg in (line, bars):
        parsed(svg)
        assert "nan" not in svg
        assert len(svg) < 90_000


values = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(values, min_size=1, max_size=2000), st.integers(1, 400))
def test_thinning_keeps_mean_and_order(found: list[float], most: int) -> None:
    points = [(float(step), value) for step, value in enumerate(found)]
    thin = thinned(points, most)
    assert len(thin) <= most
    assert [step for step, _ in thin] == sorted(step for step, _ in thin)
    assert min(found) - 1e-3 <= min(value for _, value in thin)
    assert max(value for _, value in thin) <= max(found) + 1e-3
    if len(found) <= most:
        assert thin == points


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 10**6), values), min_size=1, max_size=50), st.booleans())
def test_any_values_make_a_chart(points: list[tuple[int, float]], from_zero: bool) -> None:
    points.sort()
    svg = parsed(line_chart("a", [Series("a", points)], from_zero=from_zero))
    dots = list(svg.iter("use"))
    assert len(dots) == len(points)
    for dot in dots:
        assert 54 <= float(dot.attrib["x"]) <= 428
        assert 12 <= float(dot.attrib["y"]) <= 188


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (0.25, "0.25"), (1234567, "1.23e6"), (12345, "12,345"), (2e-6, "2e-6"), (-0.5, "-0.5")],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_bounds_of_charts() -> None:
    assert MOST_POINTS > MOST_BARS


# --- which tasks are shown ---


def test_tasks_that_tell_most() -> None:
    before = dict.fromkeys(range(10), 0.0)
    after = {**before, 3: 1.0, 7: 1.0, 5: 0.5}
    assert telling_tasks(before, after) == [3, 7, 5, 0]
    assert telling_tasks({}, {}) == []
    assert telling_tasks({1: None}, {2: 1.0}) == [2, 1]


@given(
    st.dictionaries(st.integers(0, 30), st.none() | st.floats(0, 1)),
    st.dictionaries(st.integers(0, 30), st.none() | st.floats(0, 1)),
)
def test_tasks_are_of_the_run(before: dict[int, float | None], after: dict[int, float | None]) -> None:
    found = telling_tasks(before, after)
    assert len(found) == len(set(found)) <= TASKS
    assert set(found) <= set(before) | set(after)
    assert bool(found) == bool(before or after)
