"""FP8 with one float32 scale for 1x128 elements or a 128x128 tile.

Sources: TE `common/transpose/quantize_transpose_vector_blockwise.cu` (1x128), `..._square_blockwise.cu` (128x128),
`common/recipe/recipe_common.cuh` (scale).
"""

from dataclasses import dataclass

from refops.formats import E4M3, FloatFormat, require_format
from refops.hints import Number
from refops.scalings.declaration import FP8_FORMATS, Layout, NamedScaling, choose
from refops.scalings.rules import Float32Scaling


@dataclass(frozen=True)
class BlockScaling(Float32Scaling):
    """FP8 with one float32 scale for 1x128 elements (activations, gradients) or a 128x128 tile (weights).

    Attributes:
        fmt: E4M3 or E5M2.
        block_dim: 1 for 1x128, 2 for 128x128.
        power_2_scale: round scales down to powers of two.
        amax_epsilon: lower bound of each block's amax.

    Each block as `CurrentScaling` does a tensor, but an overflowing scale becomes the largest value of the input dtype.
    """

    fmt: FloatFormat
    block_dim: int = 2
    power_2_scale: bool = True
    amax_epsilon: Number = 0.0

    order = 30
    title = "FP8 with block scaling"
    block_size = 128

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        choose(self, block_dim=(1, 2))
        super().__post_init__()

    @property
    def layout(self) -> Layout:
        """1x128 scales stored [block, outer], 128x128 scales [outer block, block]; either padded to 4 last."""
        if self.block_dim == 2:
            return Layout(block=(128, 128), padding=(1, 4), scale_order="fixed")
        return Layout(block=(1, 128), scales_inner_first=(True, True), padding=(4, 1), scale_order="fixed")


NAMED = (
    NamedScaling(
        "block-1x128",
        BlockScaling(E4M3, 1),
        "FP8 E4M3, one power-of-two float32 scale per 1x128 elements.",
        title="FP8 in blocks of 1x128",
    ),
    NamedScaling(
        "block-128x128",
        BlockScaling(E4M3, 2),
        "FP8 E4M3, one power-of-two float32 scale per 128x128 tile.",
        title="FP8 in tiles of 128x128",
    ),
)
