"""FP8 with one float32 scale for 1x64 elements: `BlockScaling`'s rule on shorter blocks."""

from dataclasses import dataclass

from refops.formats import E4M3, FloatFormat, require_format
from refops.hints import Number
from refops.scalings.declaration import FP8_FORMATS, Layout, NamedScaling
from refops.scalings.rules import Float32Scaling


@dataclass(frozen=True)
class Block64Scaling(Float32Scaling):
    """FP8 with one float32 scale for 1x64 elements.

    Attributes:
        fmt: E4M3 or E5M2.
        power_2_scale: round scales down to powers of two.
        amax_epsilon: lower bound of each block's amax.
    """

    fmt: FloatFormat
    power_2_scale: bool = True
    amax_epsilon: Number = 0.0

    title, block_size = "FP8 with scales of 64", 64
    layout = Layout((1, 64), scales_inner_first=(True, True), padding=(4, 1), scale_order="fixed")

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        super().__post_init__()


NAMED = (
    NamedScaling(
        "block-1x64", Block64Scaling(E4M3), "FP8 E4M3, one power-of-two float32 scale per 1x64.", title="FP8 1x64"
    ),
)
