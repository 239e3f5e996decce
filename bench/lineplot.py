"""Line plots as SVG, legible on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 230, 44, 52
# Seven colours that differ for colour-blind readers too, and that stand out from white and black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56a4d9", "#8c8c8c")
DASHES = ("", "7 4", "2 3")
STYLE = """text{font:13px sans-serif;fill:#24292f}
.grid{stroke:#8884}.line{fill:none;stroke-width:2.2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"""
LEGEND_PITCH = 20


@dataclass(frozen=True)
class Line:
    """One line; its values stand above the plot's ticks, in their order."""

    title: str
    values: Sequence[float]


def line_plot(title: str, x: str, y: str, ticks: Sequence[str], lines: Sequence[Line]) -> str:
    """An SVG of lines over evenly spaced ticks, from zero up.

    Args:
        title: above the plot.
        x: what the ticks are.
        y: what the values are, with their unit.
        ticks: labels.
        lines: of at most as many values each as there are ticks.
    """
    top = max((value for line in lines for value in line.values), default=1.0)
    step = round_step(top / 5)
    rows = max(1, math.ceil(top / step))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def at(column: int, value: float) -> tuple[float, float]:
        wide = (right - LEFT) / max(1, len(ticks) - 1)
        return LEFT + column * wide, bottom - (bottom - TOP) * value / (rows * step)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<style>{STYLE}</style><title>{escape(title)}</title>",
        _text(LEFT, 20, title),
        _text(LEFT, TOP - 8, y),
        _text((LEFT + right) / 2, HEIGHT - 12, x, "middle"),
    ]
    for row in range(rows + 1):
        _, height = at(0, row * step)
        parts.append(f'<path class="grid" d="M{LEFT} {height:.1f}H{right}"/>')
        parts.append(_text(LEFT - 8, height + 4, f"{row * step:,g}", "end"))
    for column, tick in enumerate(ticks):
        parts.append(_text(at(column, 0)[0], bottom + 20, tick, "middle"))
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        stroke = f'class="line" stroke="{colour}" stroke-dasharray="{dash}"'
        points = [at(column, value) for column, value in enumerate(line.values)]
        path = "L".join(f"{across:.1f} {down:.1f}" for across, down in points)
        parts.append(f'<path {stroke} d="M{path}"/>' if points else "")
        parts += [f'<circle cx="{a:.1f}" cy="{d:.1f}" r="3" fill="{colour}"/>' for a, d in points]
        height = TOP + number * LEGEND_PITCH
        parts.append(f'<path {stroke} d="M{right + 14} {height}h22"/>')
        parts.append(_text(right + 42, height + 4, line.title))
    return "\n".join([*parts, "</svg>\n"])


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... (or .1, .2, ...) that is not below ``least``."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _text(across: float, down: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
