"""Draws hit rates over the size of the pool, as an SVG picture.

Written out by hand, since the client depends on no drawing library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

_WIDTH: Final = 720
_HEIGHT: Final = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 150, 40, 50
_COLOURS: Final = ("#1668b8", "#d1495b", "#3a8f5c", "#b07a16", "#666666", "#7b4fa3")

Line = Sequence[tuple[int, float]]


def draw(title: str, x_title: str, lines: Mapping[str, Line], ticks: Mapping[int, str]) -> str:
    """A picture with one line for each name, through points (size, share from 0 to 1).

    ``ticks`` are the sizes that the axis names. Sizes are drawn by their logarithms.
    """
    sizes = [size for line in lines.values() for size, _ in line]
    lowest, highest = math.log(min(sizes)), math.log(max(sizes))
    top = max(share for line in lines.values() for _, share in line) or 1.0
    step = _step(top)
    top = step * math.ceil(top / step - 1e-9)

    def x(size: int) -> float:
        share = (math.log(size) - lowest) / (highest - lowest) if highest > lowest else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return _HEIGHT - _BOTTOM - share / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 22, title, 'font-weight="bold" font-size="14"'),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_title, 'text-anchor="middle"'),
    ]
    for number in range(round(top / step) + 1):
        share = number * step
        parts.append(_path([(_LEFT, y(share)), (_WIDTH - _RIGHT, y(share))], "#dddddd", 1))
        parts.append(_text(_LEFT - 8, y(share) + 4, f"{share:.0%}", 'text-anchor="end"'))
    for size, label in ticks.items():
        parts.append(_path([(x(size), _TOP), (x(size), _HEIGHT - _BOTTOM)], "#eeeeee", 1))
        parts.append(_text(x(size), _HEIGHT - _BOTTOM + 18, label, 'text-anchor="middle"'))
    for number, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(x(size), y(share)) for size, share in line]
        parts.append(_path(points, colour, 2))
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points
        ]
        row = _TOP + 12 + 20 * number
        parts.append(
            _path([(_WIDTH - _RIGHT + 12, row - 4), (_WIDTH - _RIGHT + 32, row - 4)], colour, 2)
        )
        parts.append(_text(_WIDTH - _RIGHT + 38, row, name))
    return "\n".join([*parts, "</svg>", ""])


def _step(top: float) -> float:
    """Between two lines of the grid: 1, 2 or 5 times a power of ten, five lines or so."""
    power: float = 10.0 ** math.floor(math.log10(top / 5))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * 5 >= top)


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _path(points: Sequence[tuple[float, float]], colour: str, width: int) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
