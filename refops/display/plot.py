"""The picture of `refops inspect --plot`: SQNR and flushed share of every tensor under every scaling."""

import itertools
import math
import re
from pathlib import Path

import numpy as np

from refops.display.console import printable
from refops.replacing import replacing

#: More rows than this do not fit a page.
MOST_TENSORS_DRAWN = 60
#: Longer names are shortened.
LONGEST_LABEL = 48
#: Inches: what the titles need, and a column.
AXES_WIDTH, COLUMN_WIDTH = 4.8, 0.5


class PlotError(Exception):
    """A picture that cannot be drawn; the message is one line that names the argument, its value and the rule."""


def require_drawable(path, tensors):
    """Fail before the work, not after it, where `draw` cannot succeed.

    Args:
        path: file to write.
        tensors: how many there are to draw.

    Raises:
        PlotError: `require_picture` raises it, or there are too many tensors.
    """
    require_picture(path)
    if tensors > MOST_TENSORS_DRAWN:
        raise PlotError(f"--plot draws at most {MOST_TENSORS_DRAWN} tensors, choose with --tensor; got {tensors}")


def require_picture(path, name="--plot"):
    """Fail where no picture can be written to a path, which an error calls `name`.

    Raises:
        PlotError: no matplotlib, a suffix that it does not know, or no such directory.
    """
    require_matplotlib(name)
    from matplotlib.backend_bases import FigureCanvasBase

    allowed = [f".{suffix}" for suffix in sorted(FigureCanvasBase.get_supported_filetypes())]
    if Path(path).suffix.lower() not in allowed:
        raise PlotError(f"{name} must end in one of {', '.join(allowed)}; got {str(path)!r}")
    if not Path(path).absolute().parent.is_dir():
        raise PlotError(f"{name} must name a file in an existing directory; got {str(path)!r}")


def require_matplotlib(name):
    """Raise PlotError where there is no matplotlib for what an error calls `name`."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError(f"{name} needs matplotlib; install it with: pip install matplotlib") from None


def draw(path, surveys):
    """Draw `heat_maps` of some tensors.

    Args:
        path: file to write, whole or not at all; the suffix gives the format (png, pdf, svg). See `require_drawable`.
        surveys: list of (tensor name, list of `Measurement`), 1 to `MOST_TENSORS_DRAWN`.

    Raises:
        PlotError: the file cannot be written.
    """
    save(heat_maps(surveys), path)


def heat_maps(surveys):
    """Return the figure of SQNR and flushed share of every tensor (row) under every scaling (column); as `draw`."""
    names = short_labels([printable(name) for name, _ in surveys])
    scalings = [m.scaling for m in surveys[0][1]]
    sqnr = _grid(surveys, lambda m: m.sqnr_db)
    flushed = _grid(surveys, lambda m: None if m.flushed is None else 100 * m.flushed)
    finite = sqnr[np.isfinite(sqnr)]
    best = max(10.0, 5 * math.ceil(finite.max() / 5)) if finite.size else 10.0
    width = 0.085 * max(map(len, names)) + max(AXES_WIDTH, COLUMN_WIDTH * len(scalings)) + 1.2
    figure, (upper, lower) = panels(2, width, 2 * (0.27 * len(names) + 0.4) + 1.6)
    # One hue each, light to dark: readable in grey and with any colour vision.
    heat_map(figure, upper, sqnr, "Blues", best, lambda value: f"{value:.1f}")
    heat_map(figure, lower, flushed, "Oranges", 100.0, _percent_label)
    upper.set_title("Signal to quantization noise, SQNR (dB): darker is better", fontsize=10, loc="left")
    lower.set_title("Flushed to zero (% of the non-zero elements): darker is worse", fontsize=10, loc="left")
    for axis in (upper, lower):
        axis.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)  # a name may hold a $
        axis.set_ylabel("tensor", fontsize=9)
    lower.set_xticks(range(len(scalings)), scalings, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    lower.set_xlabel("scaling", fontsize=9)
    return figure


def panels(count, width, height, **options):
    """A figure of so many inches and an array of its panels, one above the other, with a common x axis.

    It is none of pyplot's: nothing needs to close it, and the program's backend is left alone.

    Args:
        options: of `matplotlib.figure.Figure.subplots`, as `height_ratios`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(count, 1, sharex=True, squeeze=False, **options)[:, 0]


def save(figure, path, name="--plot"):
    """Write a figure to a path, which an error calls `name`, whole or not at all.

    Raises:
        PlotError: the file cannot be written.
    """
    try:
        with replacing(path) as new:
            figure.savefig(new, dpi=160, bbox_inches="tight")
    except (OSError, RuntimeError) as error:  # RuntimeError: .pgf without LaTeX
        reason = getattr(error, "strerror", None) or error
        raise PlotError(f"{name} must name a file that can be written; got {str(path)!r}: {reason}") from None


def short_labels(names):
    """Names for an axis: where one is too long, common ends are dropped, then middles, but never what differs."""
    if max(map(len, names)) <= LONGEST_LABEL:
        return names
    labels = names
    if len(names) > 1:
        start = _common_parts(names)
        end = _common_parts([name[start:][::-1] for name in names])
        before, after = "..." if start else "", "..." if end else ""
        labels = [f"{before}{name[start : len(name) - end]}{after}" for name in names]
    half = (LONGEST_LABEL - 3) // 2
    labels = [label if len(label) <= LONGEST_LABEL else f"{label[:half]}...{label[-half:]}" for label in labels]
    return labels if len(set(labels)) == len(names) else names


def _common_parts(names):
    """Length of the parts, between dots or slashes, that all names start with."""
    parts = zip(*(re.split("[./]", name)[:-1] for name in names), strict=False)
    return sum(len(part[0]) + 1 for part in itertools.takewhile(lambda part: len(set(part)) == 1, parts))


def _grid(surveys, number):
    """One number for each (tensor, scaling), NaN where there is none."""
    rows = [[number(m) for m in measurements] for _, measurements in surveys]
    return np.array([[np.nan if value is None else value for value in row] for row in rows], np.float64)


def _percent_label(percent):
    return "0" if percent == 0 else "<0.1" if percent < 0.1 else f"{percent:.1f}"


def heat_map(figure, axis, numbers, colors, high, label):
    """Draw one panel: shades from 0 to `high`, a label in every cell, grey where the scaling does not apply."""
    shade = np.clip(numbers, 0, high)
    image = axis.imshow(shade, cmap=colors, vmin=0, vmax=high, aspect="auto")
    axis.set_facecolor("0.88")
    for (row, column), value in np.ndenumerate(numbers):
        if np.isnan(value):
            text, color = "n/a", "0.4"
        else:
            text = ("exact" if value > 0 else "-inf") if np.isinf(value) else label(value)
            color = "white" if shade[row, column] > 0.6 * high else "black"
        axis.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
    axis.set_xticks(np.arange(numbers.shape[1] + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(numbers.shape[0] + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1)
    axis.tick_params(which="both", length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    figure.colorbar(image, ax=axis, fraction=0.03, pad=0.01).ax.tick_params(labelsize=7)
