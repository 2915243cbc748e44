"""`refops inspect --html`: one page with plots and all numbers, which needs no other file, no network and no script."""

import base64
import io
import math
from html import escape

from refops.arguments import dimensions
from refops.display.console import printable
from refops.display.inspect import SUMMARY_LEGEND, holds, spreads, worst_first
from refops.display.numbers import percent, significant, sqnr
from refops.display.plot import MOST_TENSORS_DRAWN, heat_maps, panels
from refops.replacing import replacing

STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #8884; }
th:first-child, td:first-child, .text { text-align: left; }
.wide { overflow-x: auto; }
img { max-width: 100%; background: white; }
pre { overflow-x: auto; }"""


def write_page(path, file, inspected, skipped):
    """Write the page.

    Args:
        path: file to write, whole or not at all.
        file: path of what was inspected.
        inspected, skipped: as in `refops.display.inspect.inspection_as_dict`, with at least one SQNR.

    Raises:
        OSError: the file cannot be written.
    """
    ordered = worst_first(inspected)
    drawn = [(name, measurements) for name, _, _, measurements in ordered[:MOST_TENSORS_DRAWN]]
    title = f"What each scaling does to {printable(file)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{len(inspected) + len(skipped)} tensors</p>",
        f"<ul>{''.join(f'<li>{escape(printable(line))}</li>' for line in holds(inspected, skipped))}</ul>",
        "<h2>SQNR of all tensors</h2>",
        _picture(_curves(ordered), "SQNR of every tensor under each scaling, sorted: a line for each scaling"),
        _table(["scaling", "minimum", "median", "maximum", "worst tensor"], _spread_rows(inspected), texts=(0, 4)),
        f"<h2>The {len(drawn)} tensors of lowest SQNR</h2>",
        _picture(heat_maps(drawn), "SQNR and share flushed to zero of the worst tensors, a row each, by scaling"),
        "<h2>Every tensor</h2>",
        _table(*_tensor_table(ordered), texts=(0, 1, 2, 3)),
        *([] if not skipped else ["<h2>Not measured</h2>", _table(["tensor", "why"], _words(skipped), texts=(0, 1))]),
        f"<pre>{escape(SUMMARY_LEGEND)}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    page = "\n".join(['<!DOCTYPE html><html lang="en"><head>' + head + "</head><body>", *parts, "</body></html>", ""])
    with replacing(path) as new:
        new.write_text(page, encoding="utf-8")


def _table(columns, rows, texts):
    """A table of words; columns whose numbers are in `texts` are left-aligned."""
    kinds = [' class="text"' if i in texts else "" for i in range(len(columns))]
    lines = [zip(kinds, line, strict=True) for line in (columns, *rows)]
    head, *body = (
        "".join(f"<{tag}{kind}>{escape(word)}</{tag}>" for kind, word in line)
        for tag, line in zip(["th", *["td"] * len(rows)], lines, strict=True)
    )
    body = "\n".join(f"<tr>{line}</tr>" for line in body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _words(rows):
    return [[printable(word) for word in row] for row in rows]


def _spread_rows(inspected):
    return [
        [scaling, *map(sqnr, found or [None] * 3), printable(worst)] for scaling, found, worst in spreads(inspected)
    ]


def _tensor_table(ordered):
    """(columns, rows) of all tensors: what they are, and their SQNR under each scaling."""
    columns = ["tensor", "dtype", "shape", "held as", "magnitudes", "zeros %", "non-finite"]
    rows = [
        [
            printable(name),
            facts.dtype,
            dimensions(facts.shape),
            printable(note),
            f"{significant(facts.smallest)} to {significant(facts.amax)}",
            percent(facts.zeros / facts.elements),
            str(facts.non_finite),
            *(sqnr(m.sqnr_db) for m in measurements),
        ]
        for name, note, facts, measurements in ordered
    ]
    return columns + [m.scaling for m in ordered[0][-1]], rows


def _curves(ordered):
    """The figure of SQNR over the share of tensors that have no more, a line for each scaling."""
    from matplotlib import colormaps

    figure, (axis,) = panels(1, 10, 4.5)
    by_scaling = list(zip(*(measurements for *_, measurements in ordered), strict=True))
    shades = colormaps["viridis"]
    for number, of_tensors in enumerate(by_scaling):
        values = sorted(m.sqnr_db for m in of_tensors if m.sqnr_db is not None and math.isfinite(m.sqnr_db))
        shares = [100 * (i + 0.5) / len(values) for i in range(len(values))]
        style = ("-", "--", ":")[number % 3]
        color = shades(number / max(1, len(by_scaling) - 1) * 0.9)
        axis.plot(shares, values, style, color=color, label=of_tensors[0].scaling, marker="." * (len(values) < 2))
    axis.set_xlabel("share of the tensors with no higher SQNR (%)", fontsize=10)
    axis.set_ylabel("SQNR (dB)", fontsize=10)
    axis.set_xlim(0, 100)
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


def _picture(figure, text):
    """A figure as an <img> that holds its own SVG; equal figures give equal bytes."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": text}):
        figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
    code = base64.b64encode(drawn.getvalue().encode()).decode()
    return f'<p><img src="data:image/svg+xml;base64,{code}" alt="{escape(text)}"></p>'
