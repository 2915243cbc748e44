"""The 16-point random Hadamard transform that NVFP4 applies to columnwise copies.

For a group v of 16 values: out[j] = 1/4 sum_i v[i] s[i] (-1)^popcount(i & j), signs s from a 16-bit mask. It is
orthogonal, so it changes no dot product of two operands that both went through it, but spreads outliers over the
group before they meet a 16-element scale (Ashkboos et al., "QuaRot", 2024; TE `common/hadamard_transform`).
"""

import numpy as np

from refops.arguments import require_flag, require_integer, require_tensor
from refops.hints import Array, ArrayLike
from refops.rounding import round_once
from refops.scalings import TE_SIGN_MASK
from refops.tiles import Matrix, Source, for_each, tile_slices

GROUP = 16


def hadamard_transform(x: ArrayLike, sign_mask: int = TE_SIGN_MASK, *, inverse: bool = False) -> Array:
    """Transform groups of 16 along the last dimension.

    Args:
        x: float32, float16 or bfloat16 (..., K), K % 16 == 0. For NVFP4's columnwise copy this is x.T.
        sign_mask: bit i set means sign i is -1. TE's constant is 0xD7E8; 0 gives the plain transform.
        inverse: apply the inverse transform.

    Returns:
        Array of the shape and dtype of `x`: the sum in float64, rounded once. (TE's kernel takes bfloat16 and sums in
        float32 in an unspecified order: equal while the group's values span less than about 2^12.)

    Raises:
        TypeError: other dtype. ValueError: K % 16 != 0, a scalar, or a mask outside 16 bits.
    """
    x = require_tensor(x, "x")
    sign_mask = require_integer(sign_mask, "sign_mask", low=0, high=1 << 16)
    require_flag(inverse, "inverse")
    if x.shape[-1] % GROUP:
        raise ValueError(f"x must have a last dimension divisible by 16; got shape {x.shape}")
    matrix, transformed = Matrix(x), np.empty(x.shape, x.dtype)
    out = transformed.reshape(matrix.shape)

    def work(rows, columns):
        tile = matrix.read(rows, columns)
        groups = tile.reshape(len(tile), -1, GROUP).swapaxes(1, 2)
        result = transform_groups(groups, sign_mask, x.dtype, inverse=inverse)
        out[rows, columns] = result.swapaxes(1, 2).reshape(tile.shape)

    for_each(tile_slices(matrix.shape), work)
    return transformed


class HadamardSource(Source):
    """A source whose groups of 16 rows went through the Hadamard transform and were rounded to the nominal dtype."""

    def __init__(self, source, sign_mask):
        super().__init__(source.tensor_shape, source.shape, source.dtype)
        self._source, self._sign_mask = source, sign_mask

    def read(self, rows, columns):
        tile = self._source.read(rows, columns)
        groups = tile.reshape(-1, GROUP, tile.shape[1])
        return transform_groups(groups, self._sign_mask, self.dtype).astype(np.float32).reshape(tile.shape)


def transform_groups(groups, sign_mask, dtype, *, inverse=False):
    """Transform along axis 1 of (n, 16, C) and round once to `dtype`."""
    values = transform_exactly(groups.astype(np.float64), sign_mask, inverse=inverse)
    # A matrix product accumulates from +0, so its zeros are +0; the signs can make them -0.
    return round_once(values + 0.0, dtype)


def transform_exactly(groups, sign_mask, *, inverse=False):
    """Transform along axis 1 of (n, 16, C) float64, not rounded to a storage dtype."""
    signs = sign_vector(sign_mask)[:, None]
    if inverse:
        return _sylvester(groups) * 0.25 * signs
    return _sylvester(groups * signs) * 0.25


def sign_vector(sign_mask):
    """The 16 signs of a mask, float64."""
    return np.where((sign_mask >> np.arange(GROUP)) & 1, -1.0, 1.0)


def _sylvester(values):
    """Multiply by the 16 x 16 Sylvester Hadamard matrix along axis 1 in four butterfly stages."""
    n, _, columns = values.shape
    for stride in (1, 2, 4, 8):
        pairs = values.reshape(n, GROUP // (2 * stride), 2, stride, columns)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        values = np.stack([first + second, first - second], axis=2).reshape(n, GROUP, columns)
    return values
