"""What the puzzles' kernels are written with: the package's vocabulary, and four helpers under simpler names."""

from cuda_kernels import casts
from cuda_kernels.formulas import functions_of
from cuda_kernels.simt import (
    U16,
    U32,
    F,
    as_f32,
    as_u32,
    cuda,
    device,
    kernel,
    larger_magnitude,
    magnitude,
    maximum,
    select,
)
from cuda_kernels.vectors import make_group_max

__all__ = [
    "INVERSE_448",
    "U16",
    "U32",
    "WARP",
    "F",
    "amax_of_warp",
    "as_f32",
    "as_u32",
    "casts",
    "cuda",
    "kernel",
    "magnitude",
    "maximum",
    "select",
    "silu",
]

#: All 32 threads of a warp take part in a shuffle.
WARP = 0xFFFFFFFF
#: What the amax of a block is multiplied by to become its scale: 448 is E4M3's largest number.
INVERSE_448 = F(1) / F(448)

_silu = functions_of("silu").value
_largest_of_warp = make_group_max(32)


@device
def silu(x):
    """x / (1 + e^-x)."""
    return _silu(x, F(0))


@device
def amax_of_warp(x):
    """The largest magnitude that the 32 threads of a warp hold, NaN ignored; every one of them calls it."""
    return _largest_of_warp(larger_magnitude(F(0), x))
