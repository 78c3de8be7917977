"""Decode rates as an SVG picture: a group of bars for each number of streams, its longest as long as can be."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, LABELS, BAR, GAP = 720, 230, 16, 14
"""In pixels: the picture, the part of it left of the bars, a bar's height, the space between groups."""
COLORS = {"engine": "#2f6db5", "server": "#6aa5e0"}
OTHER = "#b0b0b0"


def bars(labeled: list[tuple[str, dict[str, Any]]], prompt_tokens: int) -> str:
    """The picture of all rows with prompts of this length.

    Args:
        labeled: names and rows of `scripts.benchmark`; the name's first word gives the color.
    """
    rows = [(label, row) for label, row in labeled if row["prompt_tokens"] == prompt_tokens]
    parts: list[str] = []
    y = 6
    for streams in sorted({row["streams"] for _, row in rows}):
        group = [(label, row["decode_tok_s"]) for label, row in rows if row["streams"] == streams]
        most = max(rate for _, rate in group)
        parts.append(_text(0, y + 12, f"{streams} stream{'s' * (streams > 1)}, tokens/s", "bold"))
        y += BAR + 4
        for label, rate in group:
            length = round((WIDTH - LABELS - 60) * rate / most, 1)
            color = COLORS.get(label.split(",")[0], OTHER)
            parts.append(_text(0, y + 12, label))
            parts.append(f'<rect x="{LABELS}" y="{y}" width="{length}" height="{BAR - 3}" fill="{color}"/>')
            parts.append(_text(LABELS + length + 6, y + 12, f"{rate:.0f}"))
            y += BAR
        y += GAP
    size = f'width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    background = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{escape(text)}</text>'
