"""MXINT8: 32 integers share a power of two, an E8M0 byte. Source: OCP Microscaling Formats (MX) 1.0, 5.3.4 and 6.3."""

from dataclasses import dataclass

from refops.formats import E8M0, INT8
from refops.scalings.declaration import Layout, NamedScaling, choose
from refops.scalings.rules import E8M0Scaling


@dataclass(frozen=True)
class MXINT8Scaling(E8M0Scaling):
    """OCP MXINT8: int8 elements that count 1/64, one E8M0 scale byte for 32 of them.

    Attributes:
        scale_rounding: "floor", the specification's, clamps what lies beyond 127/64 of the scale; "up" does not,
            except for an amax from 3.39e38 on, where E8M0 ends.

    Codes are two's complement, -128 (which the specification leaves unused) is read as -2 but never written.
    """

    scale_rounding: str = "floor"

    title, fmt, block_size = "MXINT8", INT8, 32

    def __post_init__(self):
        choose(self, scale_rounding=("floor", "up"))

    @property
    def layout(self) -> Layout:
        """Like MXFP8's, except that no GEMM asks for padding or another order."""
        inner_first = (False, True)
        return Layout((1, 32), E8M0, scales_inner_first=inner_first, columnwise_transposed=False, scale_order="fixed")


NAMED = (
    NamedScaling("mxint8", MXINT8Scaling(), "MXINT8: int8, one E8M0 scale byte per 32 elements.", title="MXINT8"),
    NamedScaling("mxint8-up", MXINT8Scaling("up"), "MXINT8, scales rounded up: nothing clamps.", title="the same, up"),
)
