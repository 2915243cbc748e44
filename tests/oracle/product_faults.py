"""Products of matrices in float64, right and wrong ones, as kernels would write them. Nothing of the oracle is used.

`decoded` reads a quantized tensor by the formats' definitions; each function of `FAULTS` computes a wrong product of
what it reads, and has the name that a diagnosis must give.
"""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

import refops

BF16, FP16, FP32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
E4M3, E5M2 = refops.E4M3, refops.E5M2
TYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
#: FP4: the value of each code.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCALINGS = {
    "delayed": refops.DelayedScaling(E4M3, scale=96.0),
    "current": refops.CurrentScaling(E4M3),
    "current-e5m2": refops.CurrentScaling(E5M2),
    "block": refops.BlockScaling(E4M3, block_dim=1),
    "block-2d": refops.BlockScaling(E4M3),
    "mxfp8": refops.MXFP8Scaling(E4M3),
    "mxfp4": refops.MXFP4Scaling(),
    "nvfp4": refops.NVFP4Scaling(),
}


@dataclass
class Decoded:
    """One copy of a tensor, the contracted dimension last.

    Attributes:
        codes: uint8 (rows, k). elements: float64 values of them.
        scales: float64 (rows, blocks) of `block` elements, a (1, 1) of ones without.
        stored: the array of scales as stored. factor: number. top: what an amax was divided by to make it, or 1.
    """

    codes: np.ndarray
    elements: np.ndarray
    scales: np.ndarray
    block: int
    stored: np.ndarray
    factor: float
    top: float = 1.0
    packed: bool = False
    form: object = None
    kind: str = ""
    transposed: bool = False

    @property
    def values(self):
        """What the tensor stands for."""
        return self.spread() * self.factor

    def spread(self, scales=None):
        """Elements times scales of blocks."""
        scales = self.scales if scales is None else scales
        return self.elements * np.repeat(scales, self.block, axis=1)[:, : self.elements.shape[1]]


def decoded(q, columnwise=False):
    """The `Decoded` of a copy of a `refops.Quantized` whose scales lie in plain order."""
    side = "columnwise" if columnwise else "rowwise"
    data, stored = getattr(q, f"{side}_data"), getattr(q, f"{side}_scale_inv")
    kind = type(q.scaling).__name__
    transposed = columnwise and kind == "MXFP8Scaling"
    if kind in ("NVFP4Scaling", "MXFP4Scaling"):
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)
        elements = FP4[codes]
    else:
        codes = data.T if transposed else data
        elements = codes.view(TYPES[q.scaling.fmt]).astype(np.float64)
    rows, k = codes.shape
    one = Decoded(codes, elements, np.ones((rows, 1)), k, stored, 1.0, form=q.scaling.fmt, kind=kind)
    one.transposed = transposed
    if kind in ("DelayedScaling", "CurrentScaling"):
        return replace(one, factor=float(stored[0]))
    if kind == "BlockScaling":
        blocks = -(-k // 128)
        scales = stored[:, :blocks].repeat(128, axis=0)[:rows] if q.scaling.block_dim == 2 else stored.T[:rows]
        return replace(one, scales=scales.astype(np.float64), block=128)
    block = 16 if kind == "NVFP4Scaling" else 32
    one = replace(one, block=block, packed=kind != "MXFP8Scaling")
    one = replace(one, scales=_scales(one, stored))
    if kind == "NVFP4Scaling":
        amax = getattr(q, f"amax_{side}")
        return replace(one, factor=float(amax[0]) / 2688, top=2688.0)
    return one


def _scales(one, stored):
    """float64 (rows, blocks) of stored scale bytes."""
    rows, k = one.elements.shape
    if one.transposed:
        stored = stored.T
    plain = stored[:rows, : -(-k // one.block)]
    if one.kind == "NVFP4Scaling":
        return plain.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return 2.0 ** (plain.astype(np.float64) - 127)


@dataclass
class Given:
    """What a kernel reads: two operands, and what it adds."""

    a: Decoded
    b: Decoded
    dtype: np.dtype = FP32
    alpha: float = 1.0
    beta: float = 1.0
    bias: np.ndarray | None = None
    c: np.ndarray | None = None
    facts: dict = field(default_factory=dict)

    def product(self, a=None, b=None):
        """float64 a b^T."""
        return (self.a.values if a is None else a) @ (self.b.values if b is None else b).T

    def finished(self, sums, alpha=None, bias=1.0, beta=None):
        """The result of sums, rounded once."""
        total = (self.alpha if alpha is None else alpha) * sums
        if self.bias is not None:
            total = total + bias * self.bias.astype(np.float64)
        if self.c is not None:
            total = total + (self.beta if beta is None else beta) * self.c.astype(np.float64)
        return rounded(total, self.dtype)


def rounded(x, dtype):
    """float64 to a dtype; the detour over float32 is what kernels take."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(dtype)


def swizzled(scales):
    """Scale bytes in the order of a GEMM, one index after the other: tiles of 128 x 4, 32 rows of 16 bytes each."""
    rows, blocks = scales.shape
    r, c = np.indices(scales.shape)
    tile = (r // 128) * (blocks // 4) + c // 4
    at = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    out = np.empty(scales.size, scales.dtype)
    out[at.reshape(-1)] = scales.reshape(-1)
    return out.reshape(rows, blocks)


def unswizzled(scales):
    """The inverse."""
    rows, blocks = scales.shape
    order = swizzled(np.arange(scales.size, dtype=np.int64).reshape(rows, blocks)).reshape(-1)
    out = np.empty(scales.size, scales.dtype)
    out[order] = scales.reshape(-1)
    return out.reshape(rows, blocks)


# --- faults ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        name: what a diagnosis must call it.
        function: from `Given` to y.
        scalings: names of `SCALINGS` with which it shows.
        needs: what it needs of `Given`: "bias", "c", "beta", "alpha", "no c", or the name of a dtype of y.
    """

    name: str
    function: object
    scalings: tuple
    needs: tuple

    def shows(self, scaling, given):
        """Whether it shows in a product."""
        met = {
            "bias": given.bias is not None,
            "c": given.c is not None,
            "no c": given.c is None,
            "beta": given.beta != 1,
            "alpha": given.alpha != 1,
            given.dtype.name: True,
        }
        return scaling in self.scalings and all(met.get(need, False) for need in self.needs)


ONE_SCALE = ("delayed", "current", "current-e5m2")
BLOCKS = ("block", "block-2d", "mxfp8", "mxfp4", "nvfp4")
SWIZZLED = ("mxfp8", "mxfp4", "nvfp4")
PACKED = ("mxfp4", "nvfp4")
BYTES = (*ONE_SCALE, "block", "block-2d", "mxfp8")
#: Every fault.
FAULTS: list = []


def planted(name, scalings=tuple(SCALINGS), needs=()):
    """Add a function to the faults, under the name that a diagnosis must give."""

    def add(function):
        FAULTS.append(Planted(name, function, scalings, needs))
        return function

    return add


def with_factor(one, factor):
    return one.spread() * factor


@planted("result-transposed")
def transposed(g):
    y = g.finished(g.product())
    return np.ascontiguousarray(y.T).reshape(y.shape)


@planted("scales-of-other-operand")
def a_scales_of_b(g):
    if g.a.block == g.a.elements.shape[1]:
        return g.finished(g.product(a=with_factor(g.a, g.b.factor)))
    rows = np.arange(len(g.a.elements)) % len(g.b.elements)
    return g.finished(g.product(a=g.a.spread(g.b.scales[rows]) * g.a.factor))


@planted("scales-of-other-operand", ("block", *SWIZZLED))  # the product of two scales of a block of rows is the same
def scales_exchanged(g):
    a = g.a.spread(g.b.scales[np.arange(len(g.a.elements)) % len(g.b.elements)])
    b = g.b.spread(g.a.scales[np.arange(len(g.b.elements)) % len(g.a.elements)])
    return g.finished(g.product(a=a * g.a.factor, b=b * g.b.factor))


@planted("scales-missing")
def b_scales_missing(g):
    if g.b.block < g.b.elements.shape[1]:
        return g.finished(g.product(b=g.b.elements * g.b.factor))
    return g.finished(g.product(b=g.b.elements))


@planted("scales-missing")
def all_scales_missing(g):
    factors = [one.factor if one.block < one.elements.shape[1] else 1.0 for one in (g.a, g.b)]
    return g.finished(g.product(a=g.a.elements * factors[0], b=g.b.elements * factors[1]))


@planted("scales-twice")
def a_scales_twice(g):
    if g.a.block < g.a.elements.shape[1]:
        return g.finished(g.product(a=g.a.spread(g.a.scales**2) * g.a.factor))
    return g.finished(g.product(a=g.a.elements * g.a.factor**2))


@planted("scales-inverted")
def a_scales_inverted(g):
    if g.a.block < g.a.elements.shape[1]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return g.finished(g.product(a=g.a.spread(1 / g.a.scales) * g.a.factor))
    return g.finished(g.product(a=g.a.elements / g.a.factor))


@planted("tensor-scale-missing", ("nvfp4",))
def tensor_scale_of_a_missing(g):
    return g.finished(g.product(a=g.a.spread()))


@planted("tensor-scale-missing", ("nvfp4",))
def tensor_scales_missing(g):
    return g.finished(g.product(a=g.a.spread(), b=g.b.spread()))


@planted("amax-undivided", ("nvfp4",))
def amax_as_scale(g):
    return g.finished(g.product(b=g.b.spread() * (g.b.factor * g.b.top)))


@planted("amax-undivided", ("nvfp4",))
def amaxes_multiplied_alone(g):
    return g.finished(g.product() * g.a.top * g.b.top)


@planted("tensor-scale-twice", ("nvfp4",))
def tensor_scale_twice(g):
    return g.finished(g.product(a=g.a.spread() * g.a.factor**2))


def _with_stored(one, change):
    return one.spread(_scales(one, change(one.stored))) * one.factor


@planted("scales-order", SWIZZLED)
def a_plain_read_as_swizzled(g):
    return g.finished(g.product(a=_with_stored(g.a, unswizzled)))


@planted("scales-order", SWIZZLED)
def b_swizzled_read_as_plain(g):
    return g.finished(g.product(b=_with_stored(g.b, swizzled)))


@planted("scales-order", SWIZZLED)
def both_swizzled_read_as_plain(g):
    return g.finished(g.product(a=_with_stored(g.a, swizzled), b=_with_stored(g.b, swizzled)))


@planted("scales-transposed", SWIZZLED)
def b_scales_transposed(g):
    return g.finished(g.product(b=_with_stored(g.b, lambda stored: stored.reshape(stored.shape[::-1]).T)))


@planted("scales-shifted", BLOCKS)
def next_block(g):
    scales = np.concatenate([g.a.scales[:, 1:], g.a.scales[:, -1:]], axis=1)
    return g.finished(g.product(a=g.a.spread(scales) * g.a.factor))


@planted("scales-shifted", BLOCKS)
def block_before_around(g):
    scales = np.concatenate([g.b.scales[:, -1:], g.b.scales[:, :-1]], axis=1)
    return g.finished(g.product(b=g.b.spread(scales) * g.b.factor))


@planted("scales-shifted", ("block", *SWIZZLED))
def row_before(g):
    scales = np.concatenate([g.a.scales[:1], g.a.scales[:-1]])
    return g.finished(g.product(a=g.a.spread(scales) * g.a.factor))


@planted("nibbles-swapped", PACKED)
def nibbles_swapped(g):
    codes = g.b.codes.copy()
    codes[:, 0::2], codes[:, 1::2] = g.b.codes[:, 1::2], g.b.codes[:, 0::2]
    return g.finished(g.product(b=replace(g.b, elements=FP4[codes]).values))


@planted("other-format", BYTES)
def other_format(g):
    other = TYPES[E5M2 if g.a.form == E4M3 else E4M3]
    elements = np.ascontiguousarray(g.a.codes).view(other).astype(np.float64)
    return g.finished(g.product(a=replace(g.a, elements=elements).values))


@planted("operand-transposed", BYTES)
def operand_transposed(g):
    read = np.ascontiguousarray(g.b.elements).reshape(g.b.elements.shape[::-1]).T
    return g.finished(g.product(b=replace(g.b, elements=read).values))


@planted("terms-missing")
def last_step_missing(g):
    k = g.a.elements.shape[1]
    step = 64 if k % 64 == 0 else k % 64
    return g.finished(g.product(a=g.a.values[:, : k - step], b=g.b.values[:, : k - step]))


@planted("terms-missing")
def a_part_of_the_split_missing(g):
    k = g.a.elements.shape[1]
    parts = np.array_split(np.arange(k), 4)
    kept = np.concatenate([parts[0], *parts[2:]])
    return g.finished(g.product(a=g.a.values[:, kept], b=g.b.values[:, kept]))


@planted("terms-twice")
def first_step_twice(g):
    first = g.a.values[:, :32] @ g.b.values[:, :32].T
    return g.finished(g.product() + first)


def in_half(g, dtype, step):
    """Sums rounded to 16 bits after every step."""
    total = np.zeros((len(g.a.elements), len(g.b.elements)))
    a, b = g.a.spread(), g.b.spread()
    for start in range(0, a.shape[1], step):
        part = a[:, start : start + step] @ b[:, start : start + step].T
        with np.errstate(over="ignore"):
            total = (total + part).astype(np.float32).astype(dtype).astype(np.float64)
    return g.finished(total * g.a.factor * g.b.factor)


@planted("sums-in-half")
def in_bfloat16_after_each_tile(g):
    return in_half(g, BF16, 32)


@planted("sums-in-half", ("current", "block", "mxfp8"))  # others overflow, or are exact
def in_float16_after_each_term(g):
    return in_half(g, FP16, 1)


def split(g, dtype, parts, total):
    """k in parts, each rounded to 16 bits and multiplied by all scales before, added in a dtype."""
    a, b = g.a.spread(), g.b.spread()
    step, sums = a.shape[1] // parts, np.zeros((len(a), len(b)))
    for start in range(0, a.shape[1], step):
        part = a[:, start : start + step] @ b[:, start : start + step].T * g.a.factor * g.b.factor
        sums = (sums + part.astype(np.float32).astype(dtype).astype(np.float64)).astype(total).astype(np.float64)
    return g.finished(sums)


@planted("split-sums-in-half")
def halves_of_k_in_bfloat16(g):
    return split(g, BF16, 2, np.float32)


@planted("split-sums-in-half")
def quarters_of_k_in_bfloat16_throughout(g):
    return split(g, BF16, 4, BF16)


@planted("bias-wrong", needs=("bias",))
def bias_forgotten(g):
    return g.finished(g.product(), bias=0.0)


@planted("bias-wrong", needs=("bias",))
def bias_twice(g):
    return g.finished(g.product(), bias=2.0)


@planted("rounded-before-adding", needs=("bias", "no c"))
def rounded_before_the_bias(g):
    sums = rounded(g.alpha * g.product(), BF16).astype(np.float64)
    return rounded(sums + g.bias.astype(np.float64), g.dtype)


@planted("accumulation-wrong", needs=("c",))
def not_accumulated(g):
    return g.finished(g.product(), beta=0.0)


@planted("accumulation-wrong", needs=("c",))
def accumulated_twice(g):
    return g.finished(g.product(), beta=2 * g.beta)


@planted("accumulation-wrong", needs=("c", "beta"))
def beta_forgotten(g):
    return g.finished(g.product(), beta=1.0)


@planted("alpha-missing", needs=("alpha",))
def alpha_forgotten(g):
    return g.finished(g.product(), alpha=1.0)


@planted("alpha-inverted", needs=("alpha",))
def divided_by_alpha(g):
    return g.finished(g.product(), alpha=1 / g.alpha)


@planted("alpha-on-all", needs=("alpha", "bias"))
def alpha_on_all(g):
    return g.finished(g.product(), bias=g.alpha, beta=g.alpha * g.beta)


@planted("activation-applied")
def relu(g):
    return np.maximum(g.finished(g.product()), np.asarray(0, g.dtype))


@planted("result-rounded", needs=("float32",))
def through_bfloat16(g):
    return g.finished(g.product()).astype(BF16).astype(g.dtype)


@planted("result-cut-off", needs=("bfloat16",))
def cut_off(g):
    exact = replace(g, dtype=FP32).finished(g.product())
    return (exact.view(np.uint32) >> 16).astype(np.uint16).view(BF16)


@planted("operand-rounded", (*ONE_SCALE, "nvfp4"), ("float32",))  # others have scales that are powers of two
def a_in_bfloat16(g):
    return g.finished(g.product(a=g.a.values.astype(np.float32).astype(BF16).astype(np.float64)))


@planted("sign")
def negated(g):
    return g.finished(g.product(), alpha=-g.alpha)
