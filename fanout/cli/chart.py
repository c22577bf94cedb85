"""A chart of `fanout bench`, as SVG: for each number of calls in flight a bar of medians, and how far the tails reach.

Owns the drawing. Knows nothing of how the numbers came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Bar", "svg"]

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 60, 60
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its parts from the bottom up, in ms, and the p95 and p99 of the whole."""

    label: str
    parts: Sequence[float]
    p95: float
    p99: float


def svg(title: str, subtitle: str, names: Sequence[str], bars: Sequence[Bar]) -> str:
    """Return an SVG document; `names` are those of the parts. Times are on a linear axis from nothing."""
    top = _step(max((max(sum(bar.parts), bar.p99) for bar in bars), default=0.0))
    inner = _HEIGHT - _TOP - _BOTTOM
    right = _WIDTH - _RIGHT

    def y(ms: float) -> float:
        return _HEIGHT - _BOTTOM - inner * ms / (top * 5)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 24, title, size=16),
        _text(_LEFT, 42, subtitle, colour="#666"),
        _text(_LEFT - 8, _TOP - 8, "ms", anchor="end", colour="#666"),
    ]
    for tick in range(6):
        at = y(tick * top)
        lines.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(_text(_LEFT - 8, at + 4, f"{tick * top:g}", anchor="end", colour="#666"))
    room = (right - _LEFT) / max(len(bars), 1)
    wide = min(room * 0.5, 80)
    for number, bar in enumerate(bars):
        middle, below = _LEFT + room * (number + 0.5), 0.0
        for colour, part in zip(_COLOURS, bar.parts, strict=False):
            high = y(below) - y(below + part)
            lines.append(
                f'<rect x="{middle - wide / 2:.1f}" y="{y(below + part):.1f}" width="{wide:.1f}" height="{high:.1f}" '
                f'fill="{colour}"/>'
            )
            below += part
        lines.append(
            f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="{y(below):.1f}" y2="{y(bar.p99):.1f}" stroke="#333"/>'
        )
        for ms in (bar.p95, bar.p99):
            lines.append(
                f'<line x1="{middle - 8:.1f}" x2="{middle + 8:.1f}" y1="{y(ms):.1f}" y2="{y(ms):.1f}" stroke="#333"/>'
            )
        lines.append(_text(middle, _HEIGHT - _BOTTOM + 18, bar.label, anchor="middle"))
    lines.append(_text((_LEFT + right) / 2, _HEIGHT - 16, "calls in flight", anchor="middle", colour="#666"))
    for number, (colour, name) in enumerate(zip(_COLOURS, names, strict=False)):
        at = _TOP + 20 * number
        lines.append(f'<rect x="{right + 16}" y="{at}" width="12" height="12" fill="{colour}"/>')
        lines.append(_text(right + 34, at + 11, name))
    at = _TOP + 20 * len(names) + 11
    lines.append(_text(right + 16, at, "whiskers: p95, p99", colour="#666"))
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _step(most: float) -> float:
    """Return a round fifth of an axis on which `most` fits."""
    step = 0.1
    while step * 5 < most:
        for factor in (2.0, 2.5, 2.0):
            step *= factor
            if step * 5 >= most:
                break
    return step


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )
