"""The 16-point random Hadamard transform of eight values and their neighbour's eight: two threads hold a group.

Four butterfly stages in float32, three within a thread and one across two lanes, then a factor 1/4. TE's kernel sums in
float32 too, in an order that it leaves open; the two agree while the values of a group span less than about 2^12.
"""

from functools import cache

import numpy as np

from cuda_kernels.simt import U32, F, as_f32, as_u32, cuda, device, select
from cuda_kernels.vectors import WARP, make_map

QUARTER, ZERO = F(0.25), F(0)


@device
def butterflies(v):
    """The 8-point transform, strides 1, 2 and 4."""
    a0, a1, a2, a3 = v[0] + v[1], v[0] - v[1], v[2] + v[3], v[2] - v[3]
    a4, a5, a6, a7 = v[4] + v[5], v[4] - v[5], v[6] + v[7], v[6] - v[7]
    b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
    b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
    return b0 + b4, b1 + b5, b2 + b6, b3 + b7, b0 - b4, b1 - b5, b2 - b6, b3 - b7


@device
def signed(x, mask, bit):
    """x with its sign changed where `bit` of the mask is set."""
    return as_f32(np.uint32(as_u32(x) ^ np.uint32(np.uint32(np.uint32(mask >> U32(bit)) & U32(1)) << U32(31))))


@device
def with_signs(v, mask):
    """The eight values with the signs of the low eight bits of `mask`."""
    return (
        signed(v[0], mask, 0),
        signed(v[1], mask, 1),
        signed(v[2], mask, 2),
        signed(v[3], mask, 3),
        signed(v[4], mask, 4),
        signed(v[5], mask, 5),
        signed(v[6], mask, 6),
        signed(v[7], mask, 7),
    )


@device
def across(x, upper):
    """The last stage: sum in the lower thread, difference in the upper one. The factor leaves no -0."""
    other = cuda.shfl_xor_sync(WARP, x, 1)
    return select(upper, other - x, x + other) * QUARTER + ZERO


all_across = make_map(across)
positive_zeros = make_map(device(lambda x, p: x + ZERO))


@cache
def make_hadamard(sign_mask, inverse=False):
    """Return `transform(v, upper)`: the thread's eight values of the transformed group.

    Args:
        sign_mask: bit i set means sign i is -1.
        inverse: undo the transform.

    `upper` says that the thread holds elements 8 to 15. All lanes of a warp must call it.
    """
    low_mask, high_mask = U32(sign_mask & 0xFF), U32(sign_mask >> 8)

    @device
    def transform(v, upper):
        mask = select(upper, high_mask, low_mask)
        b = butterflies(v if inverse else with_signs(v, mask))
        c = all_across(b, upper)
        return positive_zeros(with_signs(c, mask), ZERO) if inverse else c

    return transform
