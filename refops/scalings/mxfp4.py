"""MXFP4: E2M1 elements, an E8M0 scale for 32. Source: OCP Microscaling Formats (MX) 1.0, sections 5.3 and 6.3."""

from dataclasses import dataclass

from refops.formats import E2M1, E8M0
from refops.scalings.declaration import Layout, NamedScaling, choose, flags
from refops.scalings.rules import E8M0Scaling


@dataclass(frozen=True)
class MXFP4Scaling(E8M0Scaling):
    """OCP MXFP4: E2M1 elements, two per byte, one E8M0 scale byte for 32 of them.

    Attributes:
        two_d: one scale for a square tile instead of a line of elements.
        scale_rounding: as `MXFP8Scaling`'s. "floor" is the specification's and torchao's rule, "even" AMD's.
        block_size: 32, or 16: not in the specification, but NVIDIA's tensor cores multiply it.
    """

    two_d: bool = False
    scale_rounding: str = "up"
    block_size: int = 32
    title, fmt = "MXFP4", E2M1

    def __post_init__(self):
        flags(self, "two_d")
        choose(self, block_size=(32, 16))
        super().__post_init__()

    @property
    def layout(self) -> Layout:
        """Like NVFP4's: columnwise data and scales are those of the transpose."""
        block = (self.block_size if self.two_d else 1, self.block_size)
        return Layout(block, E8M0, self.two_d, padding=(128, 4), packed=2, scale_order="gemm", shape_multiple=16)


NAMED = (
    NamedScaling("mxfp4", MXFP4Scaling(), "MXFP4: E2M1, one E8M0 scale byte per 32 elements."),
    NamedScaling("mxfp4-1x16", MXFP4Scaling(block_size=16), "MXFP4 in blocks of 16."),
)
