"""What the notebooks share: one look for all figures, tables, and the tensors of a real model.

Figures are read on paper and by readers who do not see all colours: colours are those of Okabe and Ito, lines differ by
dash and marker too (`series`), heat maps go from light to dark.
"""

import logging
from html import escape
from itertools import cycle
from pathlib import Path

import ml_dtypes
import numpy as np
from cycler import cycler
from IPython.display import HTML
from matplotlib import pyplot as plt
from safetensors.numpy import load_file

#: Which loops are compiled, on first use of `cuda_kernels.host`, is not a notebook's subject.
logging.getLogger("cuda_kernels").setLevel("WARNING")

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)
#: One number each, light (small) to dark (large): prints in grey.
SEQUENTIAL = "cividis_r"

plt.rcParams.update(
    {
        "figure.figsize": (7.5, 3.2),
        "figure.dpi": 100,
        "figure.constrained_layout.use": True,
        "font.size": 10,
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "image.cmap": SEQUENTIAL,
    }
)


def series():
    """Yield keyword arguments of `plot` for one line after another, apart by colour, dash and marker."""
    dashes = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
    yield from cycle(
        {"color": colour, "linestyle": dash, "marker": marker, "markersize": 4, "markevery": 0.12}
        for colour, dash, marker in zip(COLOURS, dashes, "osD^vPX", strict=True)
    )


def table(headers, rows, caption=""):
    """A table for the page: numbers to the right, everything else to the left.

    Args:
        headers: names of the columns, with units.
        rows: one sequence for each row; cells are shown with `str`, so round numbers before.
        caption: a line above the table.
    """

    def cell(tag, value):
        number = isinstance(value, int | float | np.number) or str(value)[:1] in "+-.0123456789"
        return f'<{tag} style="text-align:{"right" if number else "left"}">{escape(str(value))}</{tag}>'

    head = "".join(f'<th style="text-align:left">{escape(str(name))}</th>' for name in headers)
    body = "".join("<tr>" + "".join(cell("td", value) for value in row) + "</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return HTML(f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def minilm():
    """Tensors of the feed-forward block of a trained sentence encoder (all-MiniLM-L6-v2), name -> bfloat16 array.

    `layer3.up` (1536, 384) and the like are weights; `...input`, `...preactivation` and `...grad` come from a batch of
    English sentences. tests/data/README.md says how they were made.
    """
    return load_file(DATA / "minilm_ffn.safetensors")


def bfloat16(x):
    """x rounded to bfloat16 (ml_dtypes)."""
    return np.asarray(x).astype(ml_dtypes.bfloat16)


def sqnr(exact, approximate):
    """Signal to quantization noise, in dB: 10 log10(sum exact^2 / sum (exact - approximate)^2)."""
    exact, approximate = (np.asarray(x, np.float64) for x in (exact, approximate))
    return float(10 * np.log10(np.sum(exact**2) / np.sum((exact - approximate) ** 2)))
