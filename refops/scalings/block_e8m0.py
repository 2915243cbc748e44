"""FP8 blocks with E8M0 scales. Sources: DeepSeek's DeepGEMM, `deep_gemm/utils/math.py`; FlashMLA, `tests/quant.py`."""

from dataclasses import dataclass

from refops.formats import E4M3, E8M0, FloatFormat, require_format
from refops.scalings.declaration import FP8_FORMATS, Layout, NamedScaling, choose
from refops.scalings.rules import E8M0Scaling


@dataclass(frozen=True)
class E8M0BlockScaling(E8M0Scaling):
    """FP8 with one E8M0 scale byte, amax / fmt.max rounded up, for 1x128 (or 1x64) elements or a 128x128 tile.

    Attributes:
        fmt, block_dim: as `BlockScaling`'s, whose scales have the same values with power_2_scale=True.
        amax_epsilon: lower bound of each block's amax; DeepSeek has 1e-4.
        block_size: 128 or 64.
    """

    fmt: FloatFormat
    block_dim: int = 2
    amax_epsilon: float = 0.0
    block_size: int = 128
    title, scale_rounding, at_run_time = "FP8 in blocks with E8M0 scales", "up", ("amax_epsilon",)

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        choose(self, block_dim=(1, 2), block_size=(128, 64))
        super().__post_init__()

    @property
    def layout(self) -> Layout:
        """Scales stand [outer, block]; columnwise data and scales are those of the transpose."""
        return Layout((self.block_size if self.block_dim == 2 else 1, self.block_size), E8M0, scale_order="fixed")


NAMED = tuple(
    NamedScaling(f"e8m0-{size}", E8M0BlockScaling(E4M3, *more), f"FP8 E4M3, one E8M0 scale byte per {size} elements.")
    for size, more in (("1x128", (1,)), ("128x128", (2,)), ("1x64", (1, 0.0, 64)))
)
