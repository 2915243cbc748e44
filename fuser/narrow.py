"""Quantized operands of products as bfloat16 matrices: exact, up to one factor for the whole tensor.

A code's value times its block's scale has at most 8 significant bits where that is a power of two, or where both are
small floats of few bits: bfloat16 holds it. A float32 number of the whole tensor (the scale of per-tensor scaling,
NVFP4's second level) is left out here and multiplied by the sums. Columnwise copies with a Hadamard transform are
multiplied as they are, transformed, as tensor cores do: the sums of a product run along what was transformed.

Units for bfloat16 count numbers below 2^-126 as zero. So an operand tells of what power of two its elements are
multiples, `multiple_of`: where the product of two such numbers is no smaller, no sum is. At the other end, `largest`,
sums that may overflow, where infinities are of one order of adding and not of another, are left to float32 too.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

from fuser import dispatch
from fuser.dispatch import Buffers
from fuser.tracing import rehearsing
from refops.formats import E4M3, E5M2, E8M0, UE5M3
from refops.quantization.result import matrix_shape
from refops.scalings.arithmetic import REFERENCE, F

#: The smallest normal number of bfloat16 and of float32, and the first power of two that neither has.
SMALLEST, TOO_LARGE = 2.0**-126, 2.0**128
_SIGNIFICANT_BITS = 8
_FIELDS = ("{}_data", "{}_scale_inv", "amax_{}")
#: Bytes of E8M0.
_TWO_TO_127, _ONE = 254, 127
#: Sign and fraction of a float32.
_NO_EXPONENT = -0x7F800001


class Narrow(NamedTuple):
    """A quantized operand: `factor` times elements that are exact in bfloat16.

    Attributes:
        copy: `Buffers` with one copy, which dequantizes to these elements.
        columnwise: whether that copy is the columnwise one; else it is the rowwise one.
        transposed: whether it is of the transposed matrix.
        factor: a number of the whole tensor.
        multiple_of: a power of two that all elements are multiples of. largest: those that are finite are no larger.
        below: the magnitudes of all elements must be less, which `matrix` looks at; inf where nothing has to be.
        transform: sign mask of the Hadamard transform that the elements have, or None.
    """

    copy: Buffers
    columnwise: bool
    transposed: bool
    factor: float
    multiple_of: float
    largest: float
    below: float
    transform: int | None

    def matrix(self):
        """The elements, bfloat16; None unless all of them are below `below` in magnitude."""
        matrix = dispatch.dequantize(self.copy, dtype=torch.bfloat16, columnwise=self.columnwise)
        if self.below < math.inf and not dispatch.amax(matrix).item() < self.below:
            return None
        matrix = matrix.view(matrix_shape(matrix.shape))
        return matrix.t() if self.transposed else matrix


#: Whether oneDNN multiplies bfloat16 faster than float32 on this CPU: it has AMX or AVX512_BF16.
_CPU_HAS_UNITS = (
    torch.backends.mkldnn.is_available()
    and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
)


def takes_bfloat16(device):
    """Whether a device multiplies bfloat16 faster than float32, now and under the selected backend."""
    if dispatch.current_backend() != "auto" or rehearsing():  # a rehearsal has no scales
        return False
    if device.type == "cuda":  # a captured graph cannot look at scales
        return torch.cuda.get_device_capability(device) >= (8, 0) and not torch.cuda.is_current_stream_capturing()
    return device.type == "cpu" and _CPU_HAS_UNITS and torch._C._get_mkldnn_enabled()


def narrow(buffers, columnwise):
    """The `Narrow` of one copy; None where its elements are not known to be exact in bfloat16."""
    scaling, direction = buffers.scaling, "columnwise" if columnwise else "rowwise"
    plain = scaling if scaling.random is None else scaling.compiled_as  # random bits play no part
    layout, neutral = scaling.layout, _neutral_amax(plain)
    transposed, inner_first = layout.data_transposed(columnwise), layout.scales_inner_first
    # A columnwise copy that is stored transposed is read as the rowwise one of the transpose.
    unreadable = inner_first[0] != inner_first[1] if transposed else columnwise and scaling.hadamard is not None
    data, scales, amax = [getattr(buffers, name.format(direction)) for name in _FIELDS]
    if neutral is None or unreadable or layout.amax == "rows" or not data.numel():
        return None
    read = _READ.get(layout.scale_format)
    found = None if read is None else read(scaling, scales, amax, neutral)
    if found is None:
        return None
    scales, amax, factor, multiple_of, largest, below = found
    shape = buffers.shape
    if transposed:
        shape, direction = matrix_shape(shape)[::-1], "rowwise"
        data = data.reshape(layout.data_shape(shape, False))
    arrays = dict(zip([name.format(direction) for name in _FIELDS], (data, scales, amax), strict=True))
    copy = Buffers(
        **arrays,
        scaling=plain,
        shape=shape,
        dtype=buffers.dtype,
        with_gemm_swizzled_scales=buffers.with_gemm_swizzled_scales,
    )
    smallest = float(scaling.fmt.smallest_subnormal)
    return Narrow(
        copy,
        columnwise and not transposed,
        transposed,
        factor,
        multiple_of * smallest,
        largest * float(scaling.fmt.max),
        below * smallest,
        scaling.hadamard if columnwise else None,
    )


@functools.lru_cache(maxsize=256)
def _neutral_amax(scaling):
    """The amax with which a code is multiplied by its scale and nothing else; None where the scaling's rule has none.

    1 where no amax is read. The rule is asked for every scale, and whether it is proportional to the amax.
    """
    layout, fmt = scaling.layout, scaling.layout.scale_format
    stored = (
        np.exp2(np.arange(-126, 128), dtype=np.float32) if fmt is None else np.arange(1 << fmt.bits, dtype=np.uint8)
    )
    values = stored if fmt is None else fmt.values
    rule, neutral = scaling.decode_factor(REFERENCE), F(scaling.top if layout.two_level else 1)
    with np.errstate(all="ignore"):
        once, twice = rule(stored, neutral), rule(stored, 2 * neutral)
    ulps = 2.0**-22 if layout.two_level else 0.0
    proportional = np.allclose(twice, values * (2 if layout.two_level else 1), rtol=ulps, atol=0, equal_nan=True)
    return float(neutral) if proportional and np.allclose(once, values, rtol=ulps, atol=0, equal_nan=True) else None


def narrow_product(left, right, alpha):
    """Two operands, each a `Narrow` or a bfloat16 matrix, as two matrices and what their product is multiplied by.

    None where that is not the product of what they stand for, or where it, or a part of it, may overflow or be below
    2^-126. That is known of two quantized operands. A plain matrix is not looked at: with numbers as small as in it,
    products and sums below 2^-126 count as zero, and large ones overflow in another order.
    """
    quantized = [one for one in (left, right) if isinstance(one, Narrow)]
    left_transform, right_transform = [one.transform if isinstance(one, Narrow) else None for one in (left, right)]
    parts = [number for one in quantized for number in (one.multiple_of, one.multiple_of * one.factor)]
    multiple_of = math.prod(one.multiple_of for one in quantized)
    alpha *= math.prod(one.factor for one in quantized)
    terms = max(math.prod(one.copy.shape) for one in quantized)  # no sum has more
    largest = terms * math.prod(one.largest for one in quantized)
    if left_transform != right_transform or not min(*parts, multiple_of, multiple_of * abs(alpha)) >= SMALLEST:
        return None
    if not max(largest, largest * abs(alpha)) < TOO_LARGE:
        return None
    matrices = [one.matrix() if isinstance(one, Narrow) else one for one in (left, right)]
    return None if any(matrix is None for matrix in matrices) else (*matrices, alpha)


# --- scales ---------------------------------------------------------------------------------------
# Functions of a scaling, the scales of a copy, its amax and the scaling's `_neutral_amax`. They return scales and amax
# that dequantize to elements without the tensor's factor; that factor; what power of two the scales are multiples of,
# at most 1; the largest of them; and `below`. None where bfloat16 does not hold the elements, or float32 not the factor
# times them.


def _float32(scaling, scales, amax, neutral):
    if scaling.layout.block is None:
        factor = scales.item()
        within = abs(factor) * float(scaling.fmt.max) < TOO_LARGE
        return (torch.ones_like(scales), amax, factor, 1.0, 1.0, math.inf) if within else None
    if torch.count_nonzero(scales.view(torch.int32) & _NO_EXPONENT).item():
        return None
    smallest, largest = (one.item() for one in scales.aminmax())
    if smallest == 0:  # of padding, or a block of zeros
        smallest = torch.where(scales == 0, 1.0, scales).min().item()
    return scales, amax, 1.0, min(smallest, 1.0), largest, math.inf


def _powers_of_two(scaling, scales, amax, neutral):
    (lowest, highest), below = (one.item() for one in scales.aminmax()), math.inf
    if lowest == 0:  # padding, a block of zeros, or one of small elements, which a factor of 2^127 would show
        lowest = (scales - 1).min().item() + 1
        scales, below = scales + (scales == 0).view(torch.uint8) * _TWO_TO_127, 2.0**127
    return scales, amax, 1.0, 2.0 ** (min(lowest, _ONE) - _ONE), 2.0 ** (highest - _ONE), below


def _small_floats(scaling, scales, amax, neutral):
    fmt = scaling.layout.scale_format
    if fmt.mantissa_bits + 1 + scaling.fmt.mantissa_bits + 1 > _SIGNIFICANT_BITS:
        return None
    smallest, largest = float(fmt.smallest_subnormal), float(fmt.max)
    if not scaling.layout.two_level:
        return scales, amax, 1.0, smallest, largest, math.inf
    factor = amax.item()
    if not abs(factor) * largest < TOO_LARGE:
        return None
    return scales, torch.full_like(amax, neutral), factor / neutral, smallest, largest, math.inf


#: Format of a scaling's scales -> the function that reads them.
_READ = {
    None: _float32,
    E8M0: _powers_of_two,
    E4M3: _small_floats,
    E5M2: _small_floats,
    UE5M3: _small_floats,
}
