"""Curves as text: eight dots a character (braille), axes with round numbers, one colour per curve.

A library (plotext) would draw the dots, but its ticks are no round numbers, its frame is not ASCII, and its interface
has changed as a whole with version 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

# The bits of a braille character's dots, by row and column, after U+2800.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


@dataclass(frozen=True)
class Curve:
    """Points in ascending x, and the style they are drawn in."""

    points: Sequence[tuple[float, float]]
    style: str


class Canvas:
    """A grid of characters, drawn on by dots."""

    def __init__(self, width: int, height: int, *, braille: bool = True) -> None:
        self.width = width
        self._across, self._down = (2, 4) if braille else (1, 1)
        self._cells = [[(0, "")] * width for _ in range(height)]
        self.dots = width * self._across, height * self._down  # across and down

    def dot(self, x: int, y: int, style: str) -> None:
        """Set a dot; (0, 0) is the top left. The last curve to come through a character gives it its colour."""
        if 0 <= x < self.dots[0] and 0 <= y < self.dots[1]:
            row, column = self._cells[y // self._down], x // self._across
            row[column] = row[column][0] | _DOTS[y % self._down][x % self._across], style

    def line(self, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
        (x, y), (to_x, to_y) = start, end
        steps = max(abs(to_x - x), abs(to_y - y), 1)
        for step in range(steps + 1):
            self.dot(round(x + (to_x - x) * step / steps), round(y + (to_y - y) * step / steps), style)

    def row(self, number: int) -> Text:
        text = Text()
        for style, run in groupby(self._cells[number], key=lambda cell: cell[1]):
            letters = [" " if not bits else chr(0x2800 + bits) if self._down == 4 else "*" for bits, _ in run]
            text.append("".join(letters), style=style)
        return text


class Axis:
    """Values to positions 0…1, with round numbers for its ticks."""

    def __init__(self, low: float, high: float, *, log: bool = False) -> None:
        self.log = log and low > 0
        if high - low <= 1e-12 * max(abs(low), abs(high), 1e-280):  # flat, as far as a picture goes
            pad = abs(low) * 0.1 or 1.0
            low, high, self.log = low - pad, high + pad, False
        self.low, self.high = low, high

    def position(self, value: float) -> float:
        low, high, own = (math.log10(one) if self.log else one for one in (self.low, self.high, value))
        return (own - low) / (high - low)

    def ticks(self, most: int) -> list[float]:
        """Return at most so many round numbers between the ends; the ends themselves when no round one fits twice."""
        found = self._decades(most) if self.log else self._round_numbers(most)
        return found if len(found) > 1 else [self.low, self.high]

    def _decades(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for digits in ((1, 2, 5), (1, 3), (1,)):
            inside = [d * 10.0**power for power in range(first, last + 1) for d in digits]
            inside = [value for value in inside if self.low <= value <= self.high]
            if len(inside) <= most:
                return inside
        return inside[:: math.ceil(len(inside) / most)]

    def _round_numbers(self, most: int) -> list[float]:
        """Return multiples of 1, 2 or 5 times a power of ten."""
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / max(most, 1)))
        for factor in (1, 2, 5, 10, 20, 50):
            step = factor * power
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            if last - first + 1 <= most:
                return [number * step for number in range(first, last + 1)]
        return []


def plot(
    title: str,
    curves: Sequence[Curve],
    *,
    width: int,
    height: int,
    x_end: float,
    log: bool = False,
    percent: bool = False,
    braille: bool = True,
) -> list[Text]:
    """Draw curves over 0…x_end, in exactly this many columns and rows, later ones on top.

    Heights are logarithmic with ``log`` where all are positive and differ by a factor of ten. Without ``braille``
    everything is plain ASCII.
    """
    values = [y for curve in curves for _, y in curve.points]
    lines = [Text(title[:width], style="bold")]
    if not values:
        lines.append(Text("  not measured yet"[:width], style="dim"))
        return lines + [Text() for _ in range(height - len(lines))]
    low, high = min(values), max(values)
    across, up = Axis(0, max(x_end, 1)), Axis(low, high, log=log and low > 0 and high >= 10 * low)
    rows = max(height - 3, 1)
    ticks = {round((1 - up.position(tick)) * (rows - 1)): tick for tick in up.ticks(max(2, rows // 2))}
    labels = {row: f"{100 * tick:.3g}%" if percent else f"{tick:.3g}" for row, tick in ticks.items()}
    margin = max(len(label) for label in labels.values())
    canvas = Canvas(max(width - margin - 2, 1), rows, braille=braille)
    for curve in curves:
        _draw(canvas, curve, across, up)
    upright, corner, flat = "│└─" if braille else "|+-"
    for number in range(rows):
        line = Text().append(f"{labels.get(number, ''):>{margin}} {upright}", style="dim")
        lines.append(line + canvas.row(number))
    lines.append(Text(" " * (margin + 1) + corner + flat * canvas.width, style="dim"))
    lines.append(Text(" " * (margin + 2) + _horizontal_labels(across, canvas.width), style="dim"))
    return lines[:height]


def _horizontal_labels(axis: Axis, width: int) -> str:
    """Return the numbers below the axis, each centred on its place and none touching the next."""
    line = ""
    for tick in axis.ticks(max(2, width // 10)):
        label = f"{tick:.6g}"
        place = round(axis.position(tick) * (width - 1)) - len(label) // 2
        place = min(max(place, 0), width - len(label))
        if not line or place > len(line):
            line = line.ljust(place) + label
    return line


def _draw(canvas: Canvas, curve: Curve, horizontal: Axis, vertical: Axis) -> None:
    across, down = canvas.dots
    columns: dict[int, list[int]] = {}
    for x, y in curve.points:
        column = round(horizontal.position(x) * (across - 1))
        columns.setdefault(column, []).append(round((1 - vertical.position(y)) * (down - 1)))
    before: tuple[int, int] | None = None
    for column, heights in columns.items():  # a column of dots shows the whole range of what falls into it
        canvas.line(before or (column, heights[0]), (column, heights[0]), curve.style)
        canvas.line((column, min(heights)), (column, max(heights)), curve.style)
        before = (column, heights[-1])
