"""Per-tensor FP8 with a scale known before the tensor is seen. Source: TE `common/cast/fp8/quantize_fp8.cuh`."""

from dataclasses import dataclass

import numpy as np

from refops.arguments import require_number
from refops.formats import E4M3, FloatFormat, require_format
from refops.hints import Number
from refops.scalings.declaration import (
    FP8_FORMATS,
    RECIPROCAL,
    Formulas,
    Layout,
    NamedScaling,
    Path,
    Rule,
    Scaling,
    Words,
    normalise,
)


@dataclass(frozen=True)
class DelayedScaling(Scaling):
    """Per-tensor FP8 with a scale known before the tensor is seen (from the amax history of earlier steps).

    Attributes:
        fmt: E4M3 or E5M2.
        scale: float32 multiplier applied before the cast: a number, or what `refops.update_delayed_scale` returned.

    data = fmt(x * scale), scale_inv = 1 / scale; the result's amax is max |x|, for the history.
    """

    fmt: FloatFormat
    scale: Number = 1.0

    order = 10
    title = "FP8 with delayed scaling"
    at_run_time = ("scale",)
    path = Path("FULLY_FUSED", casts_rounded=False, amax_rounded=False, dbias_rounded=False)
    layout = Layout(amax="tensor")
    formulas = Formulas(
        "the scale, known before the tensor was seen",
        decode=RECIPROCAL,
        amax="; for the history, not for this scale",
    )

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        scale = require_number(self.scale, "scale", positive=True)
        with np.errstate(all="ignore"):
            if np.isinf(np.float32(1) / scale):
                raise ValueError(f"scale must have a finite float32 reciprocal; got {self.scale!r}")
        normalise(self, scale=float(scale))

    @property
    def given(self) -> np.float32:
        """The scale."""
        return np.float32(self.scale)

    def block_scale(self, words: Words) -> Rule:
        multiplier = self.given
        stored = np.float32(1) / multiplier

        @words.function
        def scale(amax, tensor_scale, p):
            return stored, multiplier

        return scale


NAMED = (
    NamedScaling(
        "delayed-scale-1",
        DelayedScaling(E4M3),
        "FP8 E4M3 with scale 1: the first step of delayed scaling, before any amax is known. Says nothing about "
        "later steps, whose scale comes from the amaxes of earlier ones.",
        title="FP8 per tensor, delayed",
    ),
)
