"""Charts as SVG for a page of its own: no script, no font, no colour but the page's variables.

matplotlib draws them; importing it takes most of a second, so this module is imported where a page is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from io import StringIO
from typing import Final
from xml.etree import ElementTree

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kitestring_cli.report.numbers import number

WIDTH: Final = 440
HEIGHT: Final = 224
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 36
_POINTS_PER_INCH = 72
"""Of an SVG by matplotlib: what is given in points becomes the units of its viewBox."""
_DOTS = 60
"""Points up to which each gets a dot with its value."""
MOST_POINTS: Final = 300
MOST_BARS: Final = 60

_INKS: Final = tuple(f"#00010{place}" for place in range(6))
_GRID: Final = "#000106"
_VARIABLES: Final = {**{ink: f"var(--c{place})" for place, ink in enumerate(_INKS)}, _GRID: "var(--line)"}
"""matplotlib knows no CSS variables: these colours stand for them until the picture is drawn.

None is black, the colour that it leaves out."""

Point = tuple[float, float]
"""(step, value)"""


@dataclass(frozen=True)
class Series:
    """A named line; its points are in the order of their steps."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


def line_chart(label: str, series: Sequence[Series], *, from_zero: bool = False) -> str:
    """Lines over steps; "" when no line has a point. Longer lines are thinned to means of neighbours."""
    lines = [Series(one.name, thinned(one.points, MOST_POINTS), one.dashed) for one in series if one.points]
    if not lines:
        return ""
    values = [value for one in lines for _, value in one.points]
    steps = [step for one in lines for step, _ in one.points]
    with _settings(label):
        picture = _Picture()
        for place, one in enumerate(lines):
            picture.line(one, _INKS[place % len(_INKS)])
        picture.span(min(steps), max(steps), values, from_zero=from_zero)
        return picture.svg(label)


def bar_chart(label: str, steps: Sequence[int], layers: Mapping[str, Sequence[float]]) -> str:
    """A bar for each step, its layers on top of each other; "" without steps. Of many steps neighbours are averaged."""
    if not steps or not layers:
        return ""
    thin = {name: thinned(list(zip(steps, layer, strict=True)), MOST_BARS) for name, layer in layers.items()}
    columns = [step for step, _ in next(iter(thin.values()))]
    gap = (columns[1] - columns[0]) if len(columns) > 1 else 1.0
    tops = [0.0] * len(columns)
    with _settings(label):
        picture = _Picture()
        for place, (name, layer) in enumerate(thin.items()):
            for index, (step, value) in enumerate(layer):
                if value > 0:
                    ink, title = _INKS[place % len(_INKS)], _title(name, step, value)
                    picture.bar((step, tops[index]), (0.72 * gap, value), ink, title)
                    tops[index] += value
        picture.span(columns[0] - gap / 2, columns[-1] + gap / 2, tops, from_zero=True)
        return picture.svg(label)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points: means of neighbours."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    cells = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(step for step, _ in cell) / len(cell), sum(v for _, v in cell) / len(cell)) for cell in cells]


def _settings(label: str) -> AbstractContextManager[None]:
    """matplotlib's own, not the user's. The same chart has the same text always; charts of two labels share no id."""
    return style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": label}])


def _title(name: str, step: float, value: float) -> str:
    return f"{name}, step {number(step)}: {number(value)}"


def _empty() -> Figure:
    figure = Figure(figsize=(WIDTH / _POINTS_PER_INCH, HEIGHT / _POINTS_PER_INCH), frameon=False)
    FigureCanvasSVG(figure)
    place = (_LEFT / WIDTH, _BOTTOM / HEIGHT, 1 - (_LEFT + _RIGHT) / WIDTH, 1 - (_TOP + _BOTTOM) / HEIGHT)
    axes = figure.add_axes(place, frameon=False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_GRID, linewidth=1, clip_on=False)
    axes.tick_params(left=False, bottom=False, length=0, pad=6)
    axes.set_xlabel("step", loc="right", labelpad=4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    return figure


@dataclass(frozen=True)
class _Picture:
    """A figure that is being drawn, and the titles that its dots and bars will get."""

    figure: Figure = field(default_factory=_empty)
    titles: dict[str, list[str]] = field(default_factory=dict)

    @property
    def axes(self) -> Axes:
        return self.figure.axes[0]

    def line(self, one: Series, ink: str) -> None:
        dots = len(one.points) <= _DOTS
        self.axes.plot(
            [step for step, _ in one.points],
            [value for _, value in one.points],
            color=ink,
            linewidth=2,
            linestyle=(0, (2.5, 2)) if one.dashed else "solid",
            marker="o" if dots else "",
            markersize=5.6,
            markeredgewidth=0,
            clip_on=False,
            gid=self._named([_title(one.name, step, value) for step, value in one.points] if dots else []),
        )

    def bar(self, foot: Point, size: Point, ink: str, title: str) -> None:
        """`foot`: the middle of its lower edge; `size`: steps wide, values high."""
        (step, bottom), (width, height) = foot, size
        self.axes.bar(step, height, width, bottom, color=ink, clip_on=False, gid=self._named([title]))

    def _named(self, titles: list[str]) -> str:
        """A name for what is drawn next; `titles` are those of its dots, or the one of its bar."""
        name = f"drawn-{len(self.titles)}"
        self.titles[name] = titles
        return name

    def span(self, first: float, last: float, values: Sequence[float], *, from_zero: bool) -> None:
        """The axes reach over these steps from edge to edge, and from tick to tick over these values."""
        low, high = min(values), max(values)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if low == high:
            pad = abs(high) / 2 or 0.5
            low, high = (0.0, high + pad) if from_zero and low >= 0 else (low - pad, high + pad)
        ticks = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(low, high)
        self.axes.set_yticks(ticks)
        self.axes.set_ylim(ticks[0], ticks[-1])
        whole = MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        self.axes.xaxis.set_major_locator(whole)
        self.axes.set_xlim(*((first, last) if first < last else (first - 0.5, last + 0.5)))

    def svg(self, label: str) -> str:
        """The element of the page."""
        drawn = StringIO()
        self.figure.savefig(drawn, format="svg", metadata={"Date": None})
        root = ElementTree.fromstring(drawn.getvalue())  # noqa: S314 - matplotlib's own output, none of a user's words
        return _inline(root, label, self.titles)


def _inline(root: ElementTree.Element, label: str, titles: Mapping[str, Sequence[str]]) -> str:
    """A document of matplotlib's as an element of the page: its sizes, fonts and colours are left to the page."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: " ".join(value.split()) for name, value in element.attrib.items()}
        element.tail = None
        if element.tag != "text":
            element.text = None
    for element in list(root.iter()):
        # matplotlib's style sheet would hold for the whole page.
        for child in [child for child in element if child.tag in ("metadata", "style")]:
            element.remove(child)
    used = {element.attrib["href"].removeprefix("#") for element in root.iter("use")}
    for element in root.iter():
        name = element.attrib.get("id", "")
        if name not in used:
            element.attrib.pop("id", None)
        if element.tag == "text":
            element.attrib["class"] = "tick"
        if "style" in element.attrib:
            element.attrib["style"] = _styled(element.attrib["style"])
        if titles.get(name):
            marks = list(element.iter("use")) or list(element.iter("path"))
            for mark, title in zip(marks, titles[name], strict=True):
                ElementTree.SubElement(mark, "title").text = title
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _styled(declarations: str) -> str:
    parts = [part.strip().partition(": ") for part in declarations.split(";")]
    return "; ".join(f"{key}: {_VARIABLES.get(value, value)}" for key, _, value in parts if not key.startswith("font"))
