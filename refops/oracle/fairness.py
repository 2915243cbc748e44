"""Judging stochastic rounding whose random bits are not known."""

import numpy as np


def moves(values, codes, fmt):
    """(judged, p, up): which float32 `values` lie between two numbers of the format; of those, how far each lies from
    the lower magnitude to the higher, and whether its code is the higher.
    """
    magnitude = np.abs(values.astype(np.float64))
    position = np.searchsorted(fmt.grid, magnitude, side="right") - 1
    judged = np.isfinite(magnitude) & (position < len(fmt.grid) - 1)
    judged[judged] &= magnitude[judged] != fmt.grid[position[judged]]
    lower = position[judged]
    p = (magnitude[judged] - fmt.grid[lower]) / (fmt.grid[lower + 1] - fmt.grid[lower])
    return judged, p, fmt.magnitude_code(codes[judged]) > lower


class Fairness:
    """Whether stochastic rounding moved up as often as fair random bits would.

    For a value that lies a share p of the way to its upper neighbour (in magnitude), up is 1 with probability p. Over
    many elements sum(up - p) has variance sum p (1 - p), also with the sign of each value, which tells a bias towards
    one infinity; and sum(up - p)(1 - 2p), which tells rounding to nearest, has sum p (1 - p) (1 - 2p)^2. Draws of 8
    bits may be off by 1/256 each besides. Each sum must stay within 7 standard deviations: a fair kernel fails once in
    10^11 tensors. Means are tested, not independence, which `draws` looks at.
    """

    def __init__(self):
        self._count = self._up = self._probability = self._variance = self._slope = self._slope_variance = 0.0
        self._signed = 0.0

    def add(self, values, codes, fmt):
        """Count float32 `values` (already multiplied by their scale) and the codes written for them."""
        judged, p, up = moves(values, codes, fmt)
        self._count += p.size
        self._up += float(up.sum())
        self._probability += float(p.sum())
        self._variance += float((p * (1 - p)).sum())
        self._signed += float((np.sign(values[judged]) * (up - p)).sum())
        self._slope += float(((up - p) * (1 - 2 * p)).sum())
        self._slope_variance += float((p * (1 - p) * (1 - 2 * p) ** 2).sum())

    def bias(self):
        """What is wrong, or ""."""
        if abs(self._up - self._probability) > self._count / 256 + 7 * self._variance**0.5:
            got, fair = self._up / self._count, self._probability / self._count
            return (
                f"{100 * got:.2f} % of the inexact values moved up in magnitude where fair bits move {100 * fair:.2f} %"
            )
        if abs(self._signed) > self._count / 256 + 7 * self._variance**0.5:
            return "values are rounded towards one infinity more often than fair bits do: their mean moves"
        if abs(self._slope) > self._count / 256 + 7 * self._slope_variance**0.5:
            return "values are rounded up with another probability than their distance to the neighbours (to nearest?)"
        return ""
