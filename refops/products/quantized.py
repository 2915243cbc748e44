"""The product of two quantized tensors on a card: `gemm`, with TE's order of operands and names of layouts."""

from collections.abc import Callable

import numpy as np

from refops.arguments import (
    require_choice,
    require_dtype,
    require_high_precision,
    require_high_precision_dtype,
    require_number,
    require_tensor,
    shown,
)
from refops.hints import Array, ArrayLike, DTypeLike, Number
from refops.products.arithmetic import matmul as reference_matmul
from refops.products.cards import operand_format, product_of
from refops.products.units import SIXTEEN_BITS
from refops.quantization.dequantize import code_tile, require_element_codes
from refops.quantization.result import DIRECTIONS, Quantized, matrix_shape
from refops.rounding import multiply_add, stored
from refops.tiles import ceil_div, for_each, tile_slices

LAYOUTS = ("TN", "NN", "NT")


def gemm(
    a: Quantized | ArrayLike,
    b: Quantized | ArrayLike,
    card: str,
    *,
    layout: str = "TN",
    out_dtype: DTypeLike | None = None,
    bias: ArrayLike | None = None,
    alpha: Number = 1.0,
    use_split_accumulator: bool = False,
    split_interval: int | None = None,
    accumulator: DTypeLike = np.float32,
    matmul: Callable[..., Array] = reference_matmul,
) -> Array:
    """Return alpha op(b) op(a) + bias, as a card computes it: tensor core, scales, bias, one rounding.

    A linear layer computes, with weight w (out, in), input x (..., in), gradient dy (..., out):

        y  = gemm(w, x, card)                       x w^T     reads rowwise copies
        dx = gemm(w, dy, card, layout="NN")         dy w      w's columnwise copy, dy's rowwise copy
        dw = gemm(x, dy, card, layout="NT")         dy^T x    columnwise copies

    The operands stand in the order of TE's `general_gemm`: `refops.oracle.check("matmul", {"a": x, "b": w}, y)` judges
    gemm(w, x, card).

    Args:
        a, b: `Quantized`, or both plain, float16 or bfloat16. Leading dimensions are flattened to rows. Scales may be
            in the order that GEMMs read. With one scale for the tensor either copy serves.
        card: "ampere", "hopper" or "blackwell". `refops.products.cards` has the table of what each multiplies.
        layout: "TN" is b a^T, "NN" is b a, "NT" is b^T a.
        out_dtype: float32, float16 or bfloat16; default the nominal dtype of b.
        bias: (columns of the result,), float32, float16 or bfloat16; added in float32.
        alpha: number that multiplies the sums, with the tensors' scales.
        use_split_accumulator: promote Hopper's FP8 sums, as TE asks for in dgrad and wgrad.
        split_interval: after how many products, a multiple of 32; None: 128.
        accumulator: np.float32, or np.float16, which some units offer.
        matmul: what computes the sums, with the arguments of `refops.products.matmul`.

    Returns:
        (..., n) with the leading dimensions of b; for "NT" two dimensions.

    Raises:
        TypeError: an operand of another kind or dtype. ValueError: a card without that product, shapes that do not fit,
            a `Quantized` without the copy that the layout reads, columnwise copies after different Hadamard transforms,
            another layout.
    """
    layout = require_choice(layout, "layout", LAYOUTS)
    right, left = _operand(a, "a", layout[0] == "N"), _operand(b, "b", layout[1] == "T")
    if left.shape[1] != right.shape[1]:
        raise ValueError(
            f"a of shape {right.tensor_shape} and b of shape {left.tensor_shape} must have one contracted size with "
            f"layout {layout!r}; got {right.shape[1]} and {left.shape[1]}"
        )
    if left.hadamard != right.hadamard:
        raise ValueError(
            "a and b must have gone through the same Hadamard transform, or none, in the copies that are read; "
            f"got sign masks {right.hadamard} and {left.hadamard}"
        )
    out_dtype = left.dtype if out_dtype is None else require_high_precision_dtype(out_dtype, "out_dtype")
    alpha = require_number(alpha, "alpha")
    if not callable(matmul):
        raise TypeError(f"matmul must be a function such as refops.products.matmul; got {shown(matmul)}")
    bias = None if bias is None else _require_bias(bias, right.shape[0])
    product = product_of(
        card,
        right.kind,
        left.kind,
        use_split_accumulator=use_split_accumulator,
        split_interval=split_interval,
        accumulator=accumulator,
    )
    sums = matmul(
        left.values(),
        right.values(),
        product.unit,
        a_format=operand_format(left.kind),
        b_format=operand_format(right.kind),
        a_scale=left.block_scales(product.block),
        b_scale=right.block_scales(product.block),
        promotion=product.promotion,
    )
    down = np.float32(1 / (right.top * left.top))
    result = np.empty(sums.shape, out_dtype)

    def finish(rows, columns):
        factor = alpha * right.factor(columns)[None, :] * left.factor(rows)[:, None] * down
        scaled = multiply_add(sums[rows, columns], factor, np.float32(0))
        result[rows, columns] = stored(scaled if bias is None else scaled + bias[columns], out_dtype)

    for_each(tile_slices(sums.shape), finish)
    return result if layout == "NT" else result.reshape(*left.tensor_shape[:-1], right.shape[0])


class _Plain:
    """A tensor of 16 bits as a product reads it: a matrix (outer, k), the contracted dimension last.

    Attributes:
        kind: its dtype.
        shape: (outer, k).
        tensor_shape, dtype: of the tensor.
        hadamard: sign mask of the transform that it went through: None.
        top: what its amax was mapped to, where that is a factor of the values; else 1.
    """

    hadamard, top = None, 1.0

    def __init__(self, tensor, name, transposed):
        if hasattr(tensor, "_quantizer"):
            raise TypeError(
                f"{name} must be a refops.Quantized or a plain tensor; got a {type(tensor).__name__}, which "
                "fuser.gemm.gemm multiplies, as a card does in a scope of fuser.products"
            )
        tensor = require_tensor(tensor, name)
        self.kind = self.dtype = require_dtype(
            tensor.dtype, name, SIXTEEN_BITS, "a Quantized, float16 or bfloat16: tensor cores multiply no float32"
        )
        self.tensor_shape = tensor.shape
        matrix = tensor.reshape(matrix_shape(tensor.shape))
        self._matrix = matrix.T if transposed else matrix
        self.shape = self._matrix.shape

    def values(self):
        """float32 (outer, k)."""
        return self._matrix.astype(np.float32)

    def block_scales(self, block):
        """None: there are no block scales."""
        return None

    def factor(self, places):
        """float32 (1,): what the sums are multiplied by for this tensor."""
        return np.ones(1, np.float32)


class _Copy:
    """The copy of a quantized tensor that a product reads; attributes and methods as `_Plain` has them.

    Attributes:
        kind: the scaling.
    """

    def __init__(self, q, name, transposed):
        require_element_codes(q)
        q = q.unswizzled() if q.with_gemm_swizzled_scales else q
        self._q, self._transposed, self._columnwise = q, transposed, _reads_columnwise(q, name, transposed)
        direction = DIRECTIONS[self._columnwise]
        self._scales, self._amax = getattr(q, f"{direction}_scale_inv"), getattr(q, f"amax_{direction}")
        self.kind, self.tensor_shape, self.dtype = q.scaling, q.shape, q.dtype
        self.shape = q.matrix_shape[:: -1 if transposed else 1]
        self.hadamard = q.scaling.hadamard if self._columnwise else None
        self.top = q.scaling.top if q.scaling.layout.two_level else 1.0

    def values(self):
        """float32 (outer, k), without scales."""
        rows, columns = (slice(0, size) for size in self._q.matrix_shape)
        codes = code_tile(self._q, rows, columns, self._columnwise)
        values = self.kind.fmt.values[codes]
        return values.T if self._transposed else values

    def block_scales(self, block):
        """float32 (outer, ceil(k / block)), each scale repeated for what it covers; None where block is."""
        if block is None:
            return None
        layout, (outer, k) = self.kind.layout, self.shape
        outer_count, block_count = layout.scale_counts(self._q.matrix_shape, self._columnwise)
        scales = layout.scales_by_outer(self._scales, self._columnwise)[:outer_count, :block_count]
        if layout.scale_format is not None:
            scales = layout.scale_format.values[layout.scale_format.magnitude_code(scales)]
        rows = np.repeat(scales, layout.run[0], axis=0)[:outer]
        return np.repeat(rows, layout.run[1] // block, axis=1)[:, : ceil_div(k, block)]

    def factor(self, places):
        """float32, (1,) or one for each outer index of places."""
        layout = self.kind.layout
        if layout.block is None:
            return self._scales
        if not layout.two_level:
            return np.ones(1, np.float32)
        return self._amax[places] if layout.amax == "rows" else self._amax


def _operand(tensor, name, transposed):
    return (_Copy if isinstance(tensor, Quantized) else _Plain)(tensor, name, transposed)


def _reads_columnwise(q, name, wanted):
    """Whether to read a tensor's columnwise copy; ValueError where the one that the product needs is not there."""
    held = [getattr(q, f"{direction}_data") is not None for direction in DIRECTIONS]
    if held[wanted]:
        return wanted
    if q.scaling.layout.block is None and held[not wanted]:
        return not wanted
    raise ValueError(f"{name} must hold a {DIRECTIONS[wanted]} copy for this product; got {q!r}")


def _require_bias(bias, columns):
    bias = require_high_precision(bias, "bias")
    if bias.shape != (columns,):
        raise ValueError(f"bias must have shape {(columns,)}; got {bias.shape}")
    return bias.astype(np.float32)
