"""Charts as SVG for a page of its own: no script, no font, no colour but the page's variables. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 440
HEIGHT: Final = 224
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 36
_DOTS = 60
"""Points up to which each gets a dot with its value."""
MOST_POINTS: Final = 300
MOST_BARS: Final = 60

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
    frame = _Frame.around(steps, values, from_zero=from_zero)
    parts = list(frame.axes())
    for place, one in enumerate(lines):
        parts.extend(_line(frame, one, place))
    return _svg(label, parts)


def bar_chart(label: str, steps: Sequence[int], layers: Mapping[str, Sequence[float]]) -> str:
    """A bar for each step, its layers on top of each other; "" without steps. Of many steps neighbours are averaged."""
    if not steps:
        return ""
    thin = {name: thinned(list(zip(steps, layer, strict=True)), MOST_BARS) for name, layer in layers.items()}
    columns = [step for step, _ in next(iter(thin.values()))] if thin else []
    totals = [sum(layer[index][1] for layer in thin.values()) for index in range(len(columns))]
    gap = (columns[1] - columns[0]) if len(columns) > 1 else 1.0
    frame = _Frame.around([columns[0] - gap / 2, columns[-1] + gap / 2], [0.0, *totals], from_zero=True)
    parts = list(frame.axes())
    width = max(1.0, 0.72 * (frame.x(columns[0] + gap) - frame.x(columns[0])))
    for index, step in enumerate(columns):
        base = 0.0
        for place, (name, layer) in enumerate(thin.items()):
            value = layer[index][1]
            if value > 0:
                top, height = frame.y(base + value), frame.y(base) - frame.y(base + value)
                parts.append(
                    f'<rect class="f{place % 6}" x="{frame.x(step) - width / 2:.1f}" y="{top:.1f}" '
                    f'width="{width:.1f}" height="{height:.1f}">{_title(name, step, value)}</rect>'
                )
                base += value
    return _svg(label, parts)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points: means of neighbours."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    cells = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(step for step, _ in cell) / len(cell), sum(v for _, v in cell) / len(cell)) for cell in cells]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers that cover `low` to `high`, at most `most` and at least two."""
    span = high - low
    rough = span / max(1, most - 1)
    unit = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * unit
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first + 1 <= most:
            break
    return [index * step for index in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True)
class _Frame:
    """From steps and values to places in the picture."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_low: float
    x_high: float

    @classmethod
    def around(cls, steps: Sequence[float], values: Sequence[float], *, from_zero: bool) -> _Frame:
        low, high = min(values), max(values)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if low == high:
            pad = abs(high) / 2 or 0.5
            low, high = (0.0, high + pad) if from_zero and low >= 0 else (low - pad, high + pad)
        x_low, x_high = min(steps), max(steps)
        if x_low == x_high:
            x_low, x_high = x_low - 0.5, x_high + 0.5
        whole = [tick for tick in ticks(x_low, x_high, 9) if x_low <= tick <= x_high and tick == int(tick)]
        return cls(whole, ticks(low, high, 6), x_low, x_high)

    def x(self, step: float) -> float:
        return _LEFT + (step - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> Iterator[str]:
        for tick in self.y_ticks:
            y = self.y(tick)
            yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>'
        for tick in self.x_ticks:
            place = f'x="{self.x(tick):.1f}" y="{HEIGHT - _BOTTOM + 16}"'
            yield f'<text class="tick" {place} text-anchor="middle">{number(tick)}</text>'
        yield f'<text class="tick" x="{WIDTH - _RIGHT}" y="{HEIGHT - 3}" text-anchor="end">step</text>'


def number(value: float) -> str:
    """A number as short as it can be read."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.4g}" if size < 1e3 else f"{value:,.0f}"


def _line(frame: _Frame, one: Series, place: int) -> Iterator[str]:
    path = " ".join(f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in one.points)
    dashes = ' stroke-dasharray="5 4"' if one.dashed else ""
    yield f'<polyline class="s{place % 6}" points="{path}"{dashes}/>'
    if len(one.points) <= _DOTS:
        for step, value in one.points:
            where = f'cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}"'
            yield f'<circle class="f{place % 6}" {where} r="2.8">{_title(one.name, step, value)}</circle>'


def _title(name: str, step: float, value: float) -> str:
    return f"<title>{escape(name)}, step {number(step)}: {number(value)}</title>"


def _svg(label: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    return "".join([head, *parts, "</svg>"])
