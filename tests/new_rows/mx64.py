"""MXFP8 in blocks of 64: one E8M0 scale byte for 64 elements along a direction."""

from dataclasses import dataclass

from refops.formats import E4M3, E8M0, FloatFormat, require_format
from refops.scalings.declaration import FP8_FORMATS, Layout, NamedScaling
from refops.scalings.rules import E8M0Scaling


@dataclass(frozen=True)
class MX64Scaling(E8M0Scaling):
    """FP8 elements, one E8M0 scale byte for 64 of them.

    Attributes:
        fmt: E4M3 or E5M2.
        scale_rounding: as `MXFP8Scaling`'s.
    """

    fmt: FloatFormat
    scale_rounding: str = "up"
    title, block_size = "MXFP8 in blocks of 64", 64

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        super().__post_init__()

    @property
    def layout(self):
        """The layout of MXFP8: nothing is transposed."""
        places = {"scales_inner_first": (False, True), "columnwise_transposed": False}
        return Layout((1, 64), E8M0, padding=(128, 4), scale_order="gemm", **places)


NAMED = (NamedScaling("mx64", MX64Scaling(E4M3), "MXFP8: E4M3, one E8M0 scale byte per 64 elements."),)
