"""Matrix products of plain and quantized operands, accumulated in float32, or as on a card, and rounded once.

    y  = linear_forward(x, w, bias=b)      x w^T + b       reads rowwise copies
    dx = linear_dgrad(dy, w)               dy w            dy's rowwise copy, w's columnwise copy
    dw = linear_wgrad(dy, x)               dy^T x          columnwise copies

What runs natively and what is emulated:

| operands                             | CPU                              | GPU                                       |
|--------------------------------------|----------------------------------|-------------------------------------------|
| bfloat16, and so the result          | torch's product in bfloat16 (1)  | torch's product in their dtype            |
| float32, float16, other 16-bit ones  | float32 products of exact copies | torch's product in their dtype            |
| FP8 with one scale for the tensor    | dequantized: below               | `torch._scaled_mm` from sm_89 on          |
| FP8 with E8M0 scales for 32 (MXFP8)  | dequantized: below               | `torch._scaled_mm` from sm_100 on         |
| any other scaling, mixed ones        | dequantized: below               | dequantized: below                        |

Where a native product does not fit (`native_obstacle` says why), operands are dequantized there too:

| dequantized operands                            | are multiplied                                               |
|-------------------------------------------------|--------------------------------------------------------------|
| exact in bfloat16 (`fuser.narrow`), as result   | in bfloat16 (1), a factor of a tensor times the sums         |
| a bfloat16 result, but one of them is not exact | in float32                                                   |
| another dtype of the result                     | in float32; for float32 results a GPU stores bfloat16's sums |

(1) On CPUs with AMX or AVX512_BF16 and GPUs from sm_80 on, under `backend("auto")`, with a bias that is bfloat16, too;
else, and so always under "reference" and "float64", in float32. While a CUDA graph is captured, quantized operands are
multiplied in float32: nothing can look at their scales.

All of these sum in float32, in an order of their own, and round the result once, so they differ by what two orders of
one float32 sum do: gamma_n sum |a| |b|, which for the same operands is another neighbour of bfloat16 in some 1e-5 to
1e-4 of the results. A CPU's units for bfloat16 count what is below 2^-126 as zero: elements of plain operands,
products, sums and results. Two quantized operands where a product or a sum might be that small are found by their
scales and multiplied in float32 (what a bias makes of a sum is not looked at), as are those whose sums may overflow. So
NaN and inf come out as from float32. A plain operand is not looked at, nor is a quantized one beside it for its sake:
small numbers count as zero there, and where sums overflow NaN and inf come out as in another order.

A dequantized operand is exactly what its codes and scales stand for, so an emulated product differs from a tensor
core's only in the order and the width of its sums. Under `backend("float64")` operands may be float64; then products
are.

Where `fuser.products`, a recipe or FUSER_PRODUCTS names a card (`fuser.cards` has the order), products are the card's
to the bit, as far as tests on cards have found it out (`refops.products`):

| operands                                       | products of a card                                             |
|------------------------------------------------|----------------------------------------------------------------|
| two quantized ones, two of float16 or bfloat16 | of its unit for their formats, as `refops.gemm` computes them  |
| a quantized one and one of float16 or bfloat16 | the first is dequantized to the dtype of the second; then that |
| float32 or float64, float16 beside bfloat16    | as without a card                                              |

Scales of a tensor, alpha and bias meet the sums in float32, before the one rounding; so does what is added to. CPU
tensors are multiplied by `cuda_kernels.host`, under `backend("reference")` by `refops`. A GPU that is the card
multiplies itself what torch gives to tensor cores, unless the scope says where to promote; what it doesn't, and what is
on another GPU, goes through host memory. Plain operands and the bias get gradients; the products of these follow the
same table.

Two operands in formats of the caller's own (TE: `custom`) whose quantizer has a `qgemm` are multiplied by that; others
in such a format dequantize themselves.
"""

import enum
import numbers
from collections import namedtuple
from dataclasses import dataclass

import torch

from fuser import dispatch
from fuser.cards import card_for, is_card, products_in_force
from fuser.common import in_autocast
from fuser.dispatch import Buffers
from fuser.dtypes import HIGH_PRECISION
from fuser.narrow import narrow, narrow_product, takes_bfloat16
from fuser.quantization.storage import QuantizedTensorStorage
from refops.arguments import shown
from refops.formats import E4M3, E5M2, E8M0
from refops.quantization.result import matrix_shape

LAYOUTS = ("TN", "NN", "NT")
_FP8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Whether torch.mm of 16-bit CUDA tensors can store its float32 sums.
_MM_STORES_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype")


class GEMMType(enum.Enum):
    """Which product of a linear layer a quantizer's `qgemm` is asked for."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class MMParams:
    """How a `qgemm` is to compute: dtype of its result, and TE's flag for exact sums."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


#: A quantized tensor of the caller's own whose quantizer multiplies.
_Custom = namedtuple("_Custom", "storage shape dtype device")


# --- public -----------------------------------------------------------------------------------------


def linear_forward(x, w, *, out_dtype=None, **options):
    """Return x w^T, (..., out), of x (..., in) and w (out, in); options as for `gemm`."""
    if not options and _are_float32_matrices(x, w, out_dtype):
        return torch.nn.functional.linear(x, w)
    return gemm(w, x, layout="TN", out_dtype=out_dtype, **options)


def linear_dgrad(dy, w, **options):
    """Return dy w, (..., in), of dy (..., out) and w (out, in); options as for `gemm`."""
    return gemm(w, dy, layout="NN", **options)


def linear_wgrad(dy, x, **options):
    """Return dy^T x, (out, in), of dy (..., out) and x (..., in); options as for `gemm`."""
    return gemm(x, dy, layout="NT", **options)


def gemm(
    a,
    b,
    *,
    layout="TN",
    out_dtype=None,
    bias=None,
    alpha=1.0,
    beta=None,
    out=None,
    accumulate=False,
    use_split_accumulator=None,
):
    """Return alpha op(b) op(a) + bias, with TE's order of operands and names of layouts.

    Args:
        a, b: plain tensors (float32, float16 or bfloat16), quantized tensors, their storages, or `Buffers`.
            Leading dimensions are flattened to rows.
        layout: "TN" is b a^T, "NN" is b a, "NT" is b^T a. The rowwise copies of a transposed a and of a plain b are
            read, else the columnwise ones; with one scale for the tensor whichever there is.
        out_dtype: dtype of the result; by default that of `out`, else the nominal dtype of `b`.
        bias: added to every row, (columns of the result,).
        alpha: number that multiplies the product.
        out: tensor to write to, and to return.
        accumulate: add to what `out` holds.
        beta: what `out` is multiplied by when accumulating, 1 if None.
        use_split_accumulator: whether a card's sums of few bits are promoted to float32 (`fuser.products`), and what a
            `qgemm` is told. None: as TE's layers, not for "TN".

    Sums are float32, or a card's, and all of the expression is rounded once, to the dtype of the result.

    Returns:
        (..., n) with the leading dimensions of `b`; for "NT" two dimensions.

    Raises:
        TypeError: an operand of another kind or dtype. ValueError: shapes that do not fit, a quantized operand without
            the copy that the layout reads, `accumulate` without `out`, `beta` without `accumulate`, another layout;
            operands that the card that `fuser.products` names can't multiply.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}; got {shown(layout)}")
    a, b = _operand(a, "a", layout[0] == "N"), _operand(b, "b", layout[1] == "T")
    shape = _result_shape(a, b, layout)
    out_dtype = _result_dtype(out_dtype, out, b)
    _check_options(shape, bias, beta, out, accumulate)
    if type(alpha) is not float:
        _require_number(alpha, "alpha")
    if beta is not None and type(beta) is not float:
        _require_number(beta, "beta")
    dtype = torch.promote_types(out_dtype, torch.float32) if accumulate else out_dtype
    split = layout != "TN" if use_split_accumulator is None else use_split_accumulator
    if in_autocast(a):  # torch.autocast would multiply in 16 bits what is float32 here
        with torch.autocast(a.device.type, enabled=False):
            result = _product(a, b, layout, dtype, bias, alpha, split)
    else:
        result = _product(a, b, layout, dtype, bias, alpha, split)
    if len(shape) != 2:
        result = result.reshape(shape)
    if out is None:
        return result
    if accumulate:
        result = result.add_(out.to(dtype), alpha=1.0 if beta is None else beta)
    return out.copy_(result)


def _are_float32_matrices(x, w, out_dtype):
    """Whether x w^T is simply torch's product of the tensors: `gemm` would find nothing to do or to refuse."""
    return (
        type(x) in _PLAIN
        and type(w) in _PLAIN
        and x.dtype is w.dtype is torch.float32
        and (out_dtype is None or out_dtype is torch.float32)
        and x.dim() == 2
        and x.shape[1:] == w.shape[1:]
        and not in_autocast(x)
    )


def _require_number(number, name):
    if not isinstance(number, numbers.Real):
        raise TypeError(f"{name} must be a number; got {shown(number)}")


def native_obstacle(a, b, *, layout="TN"):
    """Return why `gemm(a, b)` dequantizes its operands, in words; None if a tensor core takes them as they are."""
    a, b = _operand(a, "a", layout[0] == "N"), _operand(b, "b", layout[1] == "T")
    if not (isinstance(a, Buffers) and isinstance(b, Buffers)):
        return "an operand is not quantized"
    if a.device.type != "cuda" or b.device.type != "cuda":
        return "an operand is on a CPU"
    if dispatch.current_backend() == "reference":
        return "backend('reference') is selected"
    return _format_obstacle(a, b, torch.cuda.get_device_capability(a.device)) or _size_obstacle(a, b, layout)


def reads_swizzled_scales(device):
    """Whether products on a device read block scales in GEMM order: MXFP8's on tensor cores do; others undo it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MX_CAPABILITY


def _format_obstacle(a, b, capability):
    """Why tensor cores of a capability cannot multiply these formats, or None."""
    kinds = {_native_kind(a.scaling), _native_kind(b.scaling)}
    if None in kinds or len(kinds) > 1:
        return f"no native product of {type(a.scaling).__name__} and {type(b.scaling).__name__}"
    if a.scaling.fmt == b.scaling.fmt == E5M2:
        return "no native product of E5M2 and E5M2"
    mx = kinds == {_MX}
    needed = _MX_CAPABILITY if mx else (8, 9)
    if capability < needed:
        return f"needs compute capability {needed[0]}.{needed[1]}; the GPU has {capability[0]}.{capability[1]}"
    if mx and not hasattr(torch, "float8_e8m0fnu"):
        return "this torch has no float8_e8m0fnu"
    return None


#: The kinds of FP8 operands that tensor cores take: one scale for the tensor, E8M0 scales for blocks of 32.
_PER_TENSOR, _MX = "one scale", "microscaling"
#: What tensor cores of microscaling need.
_MX_CAPABILITY = (10, 0)


def _native_kind(scaling):
    """Which of these kinds a scaling's operands are, or None."""
    layout = scaling.layout
    if scaling.fmt not in _FP8 or layout.packed > 1 or layout.amax == "rows":
        return None
    if layout.block is None:
        return _PER_TENSOR
    is_mx = layout.scale_format is E8M0 and layout.run == (1, 32) and not layout.two_level
    return _MX if is_mx and layout.scale_order == "gemm" and scaling.hadamard is None else None


def _size_obstacle(a, b, layout):
    """Why sizes keep `torch._scaled_mm` from multiplying, or None."""
    multiple = a.scaling.layout.block[1] if a.scaling.layout.block else 16
    (rows, inner), (columns, _) = _k_major_shape(b, layout[1] == "T"), _k_major_shape(a, layout[0] == "N")
    if not rows or not inner or not columns:
        return "an operand is empty"
    if inner % multiple or columns % 16:
        return (
            f"sizes: the contracted dimension must be a multiple of {multiple} and the result's last one of 16; "
            f"they are {inner} and {columns}"
        )
    return None


# --- arguments --------------------------------------------------------------------------------------


def _operand(value, name, columnwise):
    """Return a plain tensor as it is; of anything quantized the `Buffers` of the copy to read, `_Custom`, or values."""
    if type(value) in _PLAIN:
        return value
    buffers = value if isinstance(value, Buffers) else getattr(value, "buffers", None)
    if hasattr(buffers, "operand"):
        operand = buffers.operand(columnwise)
        if operand is None:
            direction = "columnwise" if columnwise else "rowwise"
            raise ValueError(f"{name} must hold a {direction} copy for this product; got {value!r}")
        return operand
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, QuantizedTensorStorage):
        if not (getattr(value, "custom", False) and hasattr(value._quantizer, "qgemm")):
            return value.dequantize()
        return _Custom(value, tuple(value.original_shape), value.dtype, value.device)
    raise TypeError(f"{name} must be a tensor, a quantized tensor or its storage; got {type(value).__name__}")


def _k_major_shape(operand, transposed):
    """Shape of the operand with the contracted dimension last."""
    rows, columns = matrix_shape(operand.shape)
    return (columns, rows) if transposed else (rows, columns)


def _result_shape(a, b, layout):
    for operand, name in ((a, "a"), (b, "b")):
        if not operand.shape:
            raise ValueError(f"{name} must have at least one dimension; got a scalar")
    n, inner = _k_major_shape(a, layout[0] == "N")
    m, other = _k_major_shape(b, layout[1] == "T")
    if inner != other:
        raise ValueError(
            f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)} do not fit with layout {layout!r}: "
            f"contracted sizes {inner} and {other}"
        )
    return (m, n) if layout == "NT" else (*b.shape[:-1], n)


def _result_dtype(out_dtype, out, b):
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"out_dtype must be the dtype of out, {out.dtype}; got {out_dtype}")
    dtype = out_dtype or (b.dtype if out is None else out.dtype)
    if not dispatch.computes_in(dtype):
        raise TypeError(
            f"out_dtype must be float32, float16 or bfloat16 (float64 only under backend('float64')); got {dtype}"
        )
    return dtype


def _check_options(shape, bias, beta, out, accumulate):
    if bias is not None and tuple(bias.shape) != shape[-1:]:
        raise ValueError(f"bias must have shape {shape[-1:]}; got {tuple(bias.shape)}")
    if accumulate and out is None:
        raise ValueError("accumulate needs out, the tensor to add to; got out=None")
    if beta is not None and not accumulate:
        raise ValueError(f"beta needs accumulate=True; got beta={beta}, accumulate=False")
    if out is not None and tuple(out.shape) != tuple(shape):
        raise ValueError(f"out must have shape {tuple(shape)}; got {tuple(out.shape)}")


# --- products ---------------------------------------------------------------------------------------


def _product(a, b, layout, dtype, bias, alpha, split):
    """Return alpha op(b) op(a) + bias as a matrix of `dtype`, rounded once."""
    if isinstance(a, _Custom) and isinstance(b, _Custom):
        return _custom_product(a.storage, b.storage, layout, dtype, bias, alpha, split)
    a, b = (operand.storage.dequantize() if isinstance(operand, _Custom) else operand for operand in (a, b))
    quantized = isinstance(a, Buffers) and isinstance(b, Buffers)
    card = card_for(a, b)
    on_card = card is not None and is_card(b.device, card)
    if quantized and (card is None or on_card) and native_obstacle(a, b, layout=layout) is None:
        return _native_product(a, b, layout, dtype, bias, alpha, fast_sums=on_card and not split)
    if card is not None and not (on_card and _is_torchs_product(a, b, dtype, bias)):
        return _card_product(card, a, b, layout, dtype, bias, alpha, split)
    operands = _narrow_operands(a, b, layout, dtype, bias, alpha)
    if operands is None:
        left, right = _matrix(b, "b", layout[1] == "T"), _matrix(a, "a", layout[0] == "N")
        compute = _compute_dtype(left, right, dtype, bias)
    else:
        left, right, alpha = operands
        compute = torch.bfloat16
    left, right = (left.t() if layout[1] == "T" else left), (right.t() if layout[0] == "T" else right)
    if left.dtype is not compute or right.dtype is not compute:
        left, right = left.to(compute), right.to(compute)
    if dtype is torch.float32 and compute in (torch.float16, torch.bfloat16):  # on a GPU
        return _finished(torch.mm(left, right, out_dtype=dtype), dtype, bias, alpha)
    if bias is not None:
        product = torch.addmm(bias.to(compute), left, right, alpha=alpha)
    elif alpha == 1.0:
        product = torch.mm(left, right)
    elif compute is torch.float32:
        product = torch.mm(left, right).mul_(alpha)
    else:  # multiplied before it is rounded
        product = torch.addmm(left.new_zeros(1), left, right, alpha=alpha, beta=0)
    return product if compute is dtype else product.to(dtype)


def _narrow_operands(a, b, layout, dtype, bias, alpha):
    """Operands, one of them quantized, as bfloat16 matrices, and the product's factor; None if that is impossible."""
    if not (isinstance(a, Buffers) or isinstance(b, Buffers)):
        return None
    if not _is_rounded_once(torch.bfloat16, dtype, bias, a.device) or not takes_bfloat16(a.device):
        return None
    operands = []
    for operand, name, columnwise in ((b, "b", layout[1] == "T"), (a, "a", layout[0] == "N")):
        if isinstance(operand, Buffers):
            operand = narrow(operand, _reads_columnwise(operand, name, columnwise))
        elif isinstance(operand, torch.Tensor) and operand.dtype is torch.bfloat16:
            operand = operand if operand.dim() == 2 else operand.reshape(matrix_shape(operand.shape))
        else:
            operand = None
        if operand is None:
            return None
        operands.append(operand)
    return narrow_product(*operands, alpha)


def _matrix(operand, name, columnwise):
    """Return a plain operand, or the dequantized float32 copy of another, as a matrix."""
    if isinstance(operand, Buffers):
        operand = dispatch.dequantize(operand, columnwise=_reads_columnwise(operand, name, columnwise))
    elif not dispatch.computes_in(operand.dtype):
        raise TypeError(
            f"{name} must be float32, float16 or bfloat16 (float64 only under backend('float64')); got {operand.dtype}"
        )
    return operand if operand.dim() == 2 else operand.reshape(matrix_shape(operand.shape))


def _reads_columnwise(buffers, name, columnwise):
    """Whether to read the columnwise copy; ValueError where the copy that the product needs is not there."""
    wanted, other = ("columnwise", "rowwise") if columnwise else ("rowwise", "columnwise")
    if getattr(buffers, f"{wanted}_data") is not None:
        return columnwise
    if buffers.scaling.layout.block is None and getattr(buffers, f"{other}_data") is not None:
        return not columnwise
    raise ValueError(f"{name} must hold a {wanted} copy for this product; got {type(buffers.scaling).__name__} without")


def _compute_dtype(left, right, dtype, bias):
    """The dtype to multiply in: float32, or that of 16-bit operands where their sums are float32 until the result."""
    if left.dtype is right.dtype is dtype is torch.float32:
        return dtype
    if torch.float64 in (left.dtype, right.dtype, dtype):
        return torch.float64
    if left.dtype is not right.dtype or not _is_rounded_once(left.dtype, dtype, bias, left.device):
        return torch.float32
    native = left.is_cuda or (left.dtype is torch.bfloat16 and takes_bfloat16(left.device))
    return left.dtype if native else torch.float32


def _is_rounded_once(operands, dtype, bias, device):
    """Whether a device's product of operands of one dtype, plus a bias, comes out as `dtype` in a single rounding."""
    if dtype is operands:
        return bias is None or bias.dtype is dtype  # another bias would be rounded first
    return dtype is torch.float32 and device.type == "cuda" and _MM_STORES_FLOAT32  # of float32 sums


def _finished(product, dtype, bias, alpha):
    """alpha product + bias of a float32 product, rounded once to `dtype`."""
    if alpha != 1.0:
        product = product * alpha
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.to(dtype)


def _is_torchs_product(a, b, dtype, bias):
    """Whether torch multiplies two operands on a GPU's tensor cores for 16 bits."""
    return not (isinstance(a, Buffers) or isinstance(b, Buffers)) and _is_rounded_once(b.dtype, dtype, bias, b.device)


def _card_product(card, a, b, layout, dtype, bias, alpha, split):
    """The product as a card computes it; a quantized operand beside a plain one has its dtype."""
    quantized = isinstance(a, Buffers) and isinstance(b, Buffers)
    if isinstance(a, Buffers) and not quantized:
        a = _matrix(a, "a", layout[0] == "N").to(b.dtype)
    elif isinstance(b, Buffers) and not quantized:
        b = _matrix(b, "b", layout[1] == "T").to(a.dtype)
    given = [tensor for tensor in (a, b, bias) if tensor is not None]
    if not quantized and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return _CardProduct.apply(a, b, bias, card, layout, dtype, alpha, split)
    return _sums_of_card(card, a, b, layout, dtype, bias, alpha, split)


def _sums_of_card(card, a, b, layout, dtype, bias, alpha, split):
    """The product of two plain or two quantized operands, without gradients."""
    product = dispatch.gemm(
        a,
        b,
        card.name,
        layout=layout,
        out_dtype=dtype if dtype in HIGH_PRECISION else torch.float32,
        bias=None if bias is None else bias.to(torch.float32),
        alpha=alpha,
        **card.promoting(split),
    )
    return product.reshape(matrix_shape(product.shape)).to(dtype)


#: Layout -> (operands, layout) of the products that are the gradients of a and of b.
_GRADIENTS = {
    "TN": (("b", "dy", "NT"), ("a", "dy", "NN")),
    "NN": (("dy", "b", "NT"), ("a", "dy", "TN")),
    "NT": (("dy", "b", "NN"), ("dy", "a", "TN")),
}


class _CardProduct(torch.autograd.Function):
    """A card's product of plain operands; the products of its gradients are the card's, too, if their dtypes agree."""

    @staticmethod
    def forward(a, b, bias, card, layout, dtype, alpha, split):
        return _sums_of_card(card, a, b, layout, dtype, bias, alpha, split)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, bias, ctx.card, ctx.layout, _, ctx.alpha, _ = inputs
        ctx.save_for_backward(a, b)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx, dy):
        tensors = dict(zip("ab", ctx.saved_tensors, strict=True), dy=dy)
        gradients = [None, None]
        with products_in_force(ctx.card):
            for i, (left, right, layout) in enumerate(_GRADIENTS[ctx.layout]):
                if ctx.needs_input_grad[i]:
                    operand = ctx.saved_tensors[i]
                    made = gemm(tensors[left], tensors[right], layout=layout, out_dtype=operand.dtype, alpha=ctx.alpha)
                    gradients[i] = made.reshape(operand.shape)
        dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return *gradients, dbias, None, None, None, None, None


def _custom_product(a, b, layout, dtype, bias, alpha, split):
    """The product that a quantizer of the caller's own computes: `qgemm` of that of `b`, as TE calls it."""
    kind = {"TN": GEMMType.FPROP, "NN": GEMMType.DGRAD, "NT": GEMMType.WGRAD}[layout]
    left, left_scale = (b.data_t, b.scale_t) if layout[1] == "T" else (b.data, b.scale)
    right, right_scale = (a.data, a.scale) if layout[0] == "T" else (a.data_t, a.scale_t)
    plain = alpha == 1.0
    computed = dtype if plain else torch.float32
    product = b._quantizer.qgemm(
        left,
        right,
        MMParams(computed, split),
        computed,
        left_scale,
        right_scale,
        bias if plain else None,
        gemm_type=kind,
        qresult_x=b,
        qresult_w=a,
    )
    return product if plain else _finished(product, dtype, bias, alpha)


def _native_product(a, b, layout, dtype, bias, alpha, *, fast_sums=False):
    """The product of a tensor core: `torch._scaled_mm` of K-major codes and their scales.

    `fast_sums`: let a card sum FP8 in the bits that it has, as TE does without a split accumulator.
    """
    left, left_scale = _k_major_codes(b, layout[1] == "T")
    right, right_scale = _k_major_codes(a, layout[0] == "N")
    plain = bias is None and alpha == 1.0
    product = torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scale,
        scale_b=right_scale,
        out_dtype=dtype if plain else torch.float32,
        use_fast_accum=fast_sums,
    )
    return product if plain else _finished(product, dtype, bias, alpha)


def _k_major_codes(buffers, transposed):
    """Return codes as a contiguous FP8 matrix with the contracted dimension last, and scales as a GEMM reads them."""
    rows, columns = matrix_shape(buffers.shape)
    columnwise = _reads_columnwise(buffers, "operand", transposed)
    direction = "columnwise" if columnwise else "rowwise"
    codes, scales = getattr(buffers, f"{direction}_data"), getattr(buffers, f"{direction}_scale_inv")
    stored_transposed = buffers.scaling.layout.data_transposed(columnwise)
    codes = codes.reshape((columns, rows) if stored_transposed else (rows, columns))
    codes = codes if stored_transposed == transposed else codes.t().contiguous()
    if _native_kind(buffers.scaling) == _MX:
        scales = _swizzled(buffers, direction).view(torch.float8_e8m0fnu).flatten()
    return codes.view(_FP8[buffers.scaling.fmt]), scales


def _swizzled(buffers, direction):
    """The scales of one copy in the order that tensor cores read."""
    if not buffers.with_gemm_swizzled_scales:
        buffers = dispatch.swizzled(buffers)
    return getattr(buffers, f"{direction}_scale_inv")
