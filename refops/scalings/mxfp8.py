"""MXFP8: 32 elements share a power of two, stored as an E8M0 byte.

Sources: OCP Microscaling Formats (MX) 1.0, section 6.3; TE `common/cast/mxfp8/quantize_mxfp8.cuh`.
"""

from dataclasses import dataclass

from refops.formats import E2M3, E3M2, E4M3, E5M2, E8M0, FloatFormat, require_format
from refops.scalings.declaration import Layout, NamedScaling, Path, flags
from refops.scalings.rules import E8M0Scaling

MX_FORMATS = (E4M3, E5M2, E3M2, E2M3)


@dataclass(frozen=True)
class MXFP8Scaling(E8M0Scaling):
    """OCP microscaling: one E8M0 scale byte (a power of two) for 32 elements.

    Attributes:
        fmt: E4M3 or E5M2; E3M2 and E2M3 give MXFP6, stored one code a byte.
        two_d: one scale for a 32x32 tile instead of 32 elements along a direction.
        scale_rounding: how amax / max becomes a power of two. "up" is TE's, cuBLAS's and PTX's rule: nothing saturates.
            The others are 2^(e - emax), emax the exponent of the format's largest value, with e from:
            "floor" floor(log2 amax), the OCP specification's example; "even" the same after rounding amax half up to
            the mantissa width of `fmt`; "ceil_ocp" ceil(log2 amax).

    With "up" byte = E8M0(amax * float32(1 / fmt.max)), rounded up; with each, data = fmt(x * 2^(127 - byte)).
    """

    fmt: FloatFormat
    two_d: bool = False
    scale_rounding: str = "up"

    order = 40
    title = "MXFP8"
    block_size = 32
    gate_multiple = 32
    path = Path("FULLY_FUSED", casts_rounded=True, amax_rounded=True, dbias_rounded=False)

    def __post_init__(self):
        require_format(self.fmt, MX_FORMATS)
        flags(self, "two_d")
        super().__post_init__()

    @property
    def layout(self) -> Layout:
        """Nothing is transposed: columnwise scales are stored [block, column]."""
        return Layout(
            block=(32, 32) if self.two_d else (1, 32),
            scale_format=E8M0,
            repeated=self.two_d,
            scales_inner_first=(False, True),
            padding=(128, 4),
            columnwise_transposed=False,
            scale_order="gemm",
        )


NAMED = (
    NamedScaling(
        "mxfp8",
        MXFP8Scaling(E4M3),
        "MXFP8: E4M3, one E8M0 scale byte per 32 elements, rounded up (TE's rule).",
        title="MXFP8, E4M3, TE's scale rule",
    ),
    NamedScaling("mxfp8-e5m2", MXFP8Scaling(E5M2), "MXFP8 with E5M2 elements.", title="the same, E5M2"),
    NamedScaling(
        "mxfp8-floor",
        MXFP8Scaling(E4M3, scale_rounding="floor"),
        "MXFP8 with the OCP specification's scale rule, rounded down: the largest elements may saturate.",
        title="the same, the OCP specification's rule",
    ),
)
