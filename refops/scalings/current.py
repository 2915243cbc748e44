"""Per-tensor FP8 with a scale from the tensor's own amax. Source: TE `common/recipe/current_scaling.cu`."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from refops.formats import E4M3, E5M2, FloatFormat, require_format
from refops.hints import Number
from refops.scalings.declaration import (
    FP8_FORMATS,
    RECIPROCAL,
    Formulas,
    Layout,
    NamedScaling,
    Numbers,
    Path,
)
from refops.scalings.rules import Float32Scaling


@dataclass(frozen=True)
class CurrentScaling(Float32Scaling):
    """Per-tensor FP8 with the scale taken from the tensor's own amax.

    Attributes:
        fmt: E4M3 or E5M2.
        power_2_scale: round the scale down to a power of two.
        amax_epsilon: lower bound of the amax.

    scale = fmt.max / max(amax, amax_epsilon), 1 where amax is 0 or inf, FLT_MAX where the quotient overflows;
    data = fmt(x * scale), scale_inv = 1 / scale.
    """

    fmt: FloatFormat
    power_2_scale: bool = False
    amax_epsilon: Number = 0.0

    order = 20
    title = "FP8 with current scaling"
    path = Path("FUSED_ACTIVATION_AMAX_FP8", casts_rounded=True, amax_rounded=False, dbias_rounded=True)
    layout = Layout(amax="tensor")

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        super().__post_init__()

    @property
    def formulas(self) -> Formulas:
        """The quotient, and its reciprocal."""
        return replace(super().formulas, decode=RECIPROCAL)

    def numbers(self, dtype: Any) -> Numbers:
        # TE's kernel for this scaling has FLT_MAX for every input; its block kernels have the input's largest value.
        return super().numbers(np.dtype(np.float32))


NAMED = (
    NamedScaling(
        "current",
        CurrentScaling(E4M3),
        "FP8 E4M3, one scale from the tensor's own amax.",
        title="FP8 per tensor, current, E4M3",
    ),
    NamedScaling(
        "current-e5m2", CurrentScaling(E5M2), "FP8 E5M2, one scale from the tensor's own amax.", title="the same, E5M2"
    ),
    NamedScaling(
        "current-pow2",
        CurrentScaling(E4M3, power_2_scale=True),
        "FP8 E4M3, one scale from the tensor's own amax, rounded down to a power of two.",
        title="the same, scale a power of two",
    ),
)
