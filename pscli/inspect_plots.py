"""The plots of the HTML report: SVG text by matplotlib, whose colours are the page's CSS variables (light and dark)."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INK, FAINT = "#010203", "#010204"  # stand for the page's colours, see `_themed`
SERIES = tuple(f"#0102{number:02x}" for number in range(0x10, 0x1A))
_SIZE = (5.0, 2.5)  # inches; as wide as a telephone shows without making the text small


@dataclass(frozen=True, kw_only=True)
class Plot:
    """title and unit for the page; svg: the picture."""

    title: str
    note: str
    svg: str


def lines(
    title: str,
    steps: Sequence[int],
    values: Mapping[str, Sequence[float | None]],
    *,
    note: str = "",
    marks: Sequence[int] = (),
    log_scale: bool = False,
    stacked: bool = False,
) -> Plot | None:
    """Curves over global steps; None when there is nothing to draw. marks: steps with a dashed line (restarts).

    stacked: bars on one another instead of curves.
    """
    # Only here: --html is the one option that pays for the plotting library.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    known = {name: ys for name, ys in values.items() if any(y is not None for y in ys)}
    if not known or not steps:
        return None
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "ps",
        "font.size": 9.5,
        "font.family": "sans-serif",
    }
    with rc_context(settings):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        base = [0.0] * len(steps)
        width = (steps[-1] - steps[0]) / max(1, len(steps) - 1) if len(steps) > 1 else 1.0
        for number, (name, ys) in enumerate(known.items()):
            colour = SERIES[number % len(SERIES)]
            if stacked:
                heights = [y or 0.0 for y in ys]
                axes.bar(steps, heights, width=width, bottom=base, color=colour, label=name)
                base = [one + other for one, other in zip(base, heights, strict=True)]
            else:
                there = [(x, y) for x, y in zip(steps, ys, strict=True) if y is not None]
                axes.plot(
                    [x for x, _ in there],
                    [y for _, y in there],
                    color=colour,
                    label=name,
                    linewidth=1.4,
                    marker="." if len(there) < 4 else "",
                )
        for mark in marks:
            axes.axvline(mark, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
        if log_scale:
            axes.set_yscale("log")
        elif stacked:
            axes.set_ylim(bottom=0)
        axes.grid(True, color=FAINT, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, which="both", length=2)
        axes.xaxis.set_major_formatter(lambda value, _place: f"{value:,.0f}")
        if log_scale:  # 7, not 7 × 10⁰
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter())
        else:
            axes.yaxis.set_major_formatter(lambda value, _place: f"{value:,.6g}")
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(FAINT)
        if len(known) > 1 or stacked:
            figure.legend(
                loc="outside upper left", ncols=3, frameon=False, labelcolor=INK, fontsize=8, handlelength=1.2
            )
        picture = io.StringIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Plot(title=title, note=note, svg=_themed(picture.getvalue(), title))


def _themed(svg: str, title: str) -> str:
    """The <svg> element alone, its colours by CSS variable, its size left to the page, its ids its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    prefix = re.sub(r"\W+", "-", title.lower())
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    for colour, name in ((INK, "ink"), (FAINT, "faint"), *((c, f"s{n}") for n, c in enumerate(SERIES))):
        svg = svg.replace(colour, f"var(--{name})")
    return svg
