"""What the tests of `refops` share: every 16-bit value, comparison by bits, a second implementation of each scaling.

The second implementation (`expect`) is written from the specification with whole-tensor NumPy and ml_dtypes casts. It
shares no code with `refops`: no tiles, no tables, no code grid. Sections are those of docs/spec/quantization.md.
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

import refops
from arrays import ARRAYS
from refops.activations import Arithmetic

F = np.float32
FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
FLT_MAX = np.finfo(np.float32).max
MASK = 0xD7E8

#: Every kind of setting, by a short name.
SCALINGS = {
    "delayed": refops.DelayedScaling(refops.E4M3, 3.7),
    "delayed-e5m2": refops.DelayedScaling(refops.E5M2, 0.125),
    "current": refops.CurrentScaling(refops.E4M3),
    "current-e5m2": refops.CurrentScaling(refops.E5M2),
    "current-pow2": refops.CurrentScaling(refops.E4M3, power_2_scale=True, amax_epsilon=1e-3),
    "block-1d": refops.BlockScaling(refops.E4M3, 1),
    "block-1d-f32": refops.BlockScaling(refops.E4M3, 1, power_2_scale=False),
    "block-2d": refops.BlockScaling(refops.E4M3, 2),
    "block-2d-f32-e5m2": refops.BlockScaling(refops.E5M2, 2, power_2_scale=False, amax_epsilon=1e-3),
    "mxfp8": refops.MXFP8Scaling(refops.E4M3),
    "mxfp8-e5m2": refops.MXFP8Scaling(refops.E5M2),
    "mxfp8-2d": refops.MXFP8Scaling(refops.E4M3, two_d=True),
    "mxfp8-floor": refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor"),
    "mxfp8-even": refops.MXFP8Scaling(refops.E4M3, scale_rounding="even"),
    "mxfp8-ceil": refops.MXFP8Scaling(refops.E5M2, scale_rounding="ceil_ocp"),
    "mxfp6-e3m2": refops.MXFP8Scaling(refops.E3M2),
    "mxfp6-e2m3": refops.MXFP8Scaling(refops.E2M3, two_d=True),
    "nvfp4": refops.NVFP4Scaling(),
    "nvfp4-2d": refops.NVFP4Scaling(two_d=True),
    "nvfp4-rht": refops.NVFP4Scaling(rht=True),
    "nvfp4-sr": refops.NVFP4Scaling(stochastic_rounding=True, seed=1234, offset=7),
    "nvfp4-sr-2d": refops.NVFP4Scaling(stochastic_rounding=True, two_d=True, seed=1 << 63, offset=1 << 40),
    "nvfp4-sr-rht": refops.NVFP4Scaling(stochastic_rounding=True, rht=True, sign_mask=0, seed=5),
    "nvfp4-mae-256": refops.NVFP4Scaling(four_over_six="mae", e4m3_max=256),
    "nvfp4-mse-448": refops.NVFP4Scaling(four_over_six="mse"),
    "nvfp4-mse-2d": refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True),
    "nvfp4-mae-fast": refops.NVFP4Scaling(four_over_six="mae", fast_error=True),
    "nvfp4-mse-fast-2d": refops.NVFP4Scaling(four_over_six="mse", e4m3_max=256, two_d=True, fast_error=True),
    "nvfp4-row": refops.NVFP4Scaling(row_scaled=True),
    "nvfp4-ue5m3": refops.NVFP4Scaling(scale_format=refops.UE5M3),
    "nvfp4-ue5m3-2d": refops.NVFP4Scaling(scale_format=refops.UE5M3, two_d=True, four_over_six="mse"),
    "nvfp4-ue5m3-mae": refops.NVFP4Scaling(scale_format=refops.UE5M3, four_over_six="mae"),
    "nvfp4-row-ue5m3": refops.NVFP4Scaling(scale_format=refops.UE5M3, row_scaled=True),
    "nvfp4-ue5m3-alone": refops.NVFP4Scaling(scale_format=refops.UE5M3, tensor_level=False),
    "nvfp4-ue5m3-alone-sr-2d": refops.NVFP4Scaling(
        scale_format=refops.UE5M3, tensor_level=False, two_d=True, stochastic_rounding=True, seed=3
    ),
    "nvfp4-rht-ue5m3-alone": refops.NVFP4Scaling(scale_format=refops.UE5M3, tensor_level=False, rht=True),
    "mxfp4": refops.MXFP4Scaling(),
    "mxfp4-floor": refops.MXFP4Scaling(scale_rounding="floor"),
    "mxfp4-even-2d": refops.MXFP4Scaling(two_d=True, scale_rounding="even"),
    "mxfp4-ceil": refops.MXFP4Scaling(scale_rounding="ceil_ocp"),
    "mxfp4-16": refops.MXFP4Scaling(block_size=16),
    "mxfp4-16-even": refops.MXFP4Scaling(scale_rounding="even", block_size=16),
    "mxfp4-16-2d": refops.MXFP4Scaling(two_d=True, block_size=16),
    "e8m0-1d": refops.E8M0BlockScaling(refops.E4M3, 1),
    "e8m0-1d-e5m2": refops.E8M0BlockScaling(refops.E5M2, 1, amax_epsilon=1e-4),
    "e8m0-2d": refops.E8M0BlockScaling(refops.E4M3, 2, amax_epsilon=1e-3),
    "e8m0-64": refops.E8M0BlockScaling(refops.E4M3, 1, block_size=64),
    "block-64": refops.Block64Scaling(refops.E4M3),
    "block-64-f32": refops.Block64Scaling(refops.E5M2, power_2_scale=False, amax_epsilon=1e-3),
    "mxint8": refops.MXINT8Scaling(),
    "mxint8-up": refops.MXINT8Scaling("up"),
}


#: (rowwise, columnwise)
DIRECTIONS = [(True, True), (True, False), (False, True)]


def all_values(dtype):
    """Every value of a 16-bit dtype: (65536,)."""
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def from_bits(*patterns):
    """float32 array with these bit patterns."""
    return np.array(patterns, np.uint32).view(np.float32)


def bits(x):
    """The bit pattern of a float32 scalar or one-element array, as int."""
    return int(np.asarray(x, np.float32).reshape(-1)[0].view(np.uint32))


def random_tensor(shape, dtype, seed=0, spread=3.0):
    """Normal values times powers of two, so that blocks have different maxima; both signs, some exact zeros of each."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.uniform(-spread, spread, shape))
    x = np.where(rng.random(shape) < 0.02, rng.choice([0.0, -0.0], shape), x)
    return x.astype(F).astype(dtype)


def special_tensor(shape, dtype, seed=0, extremes=True):
    """`random_tensor` with NaN of both signs and infinities here and there, and the largest and least magnitudes.

    `extremes=False` leaves the last two out: with them the sum of a Hadamard transform depends on its order.
    """
    x = random_tensor(shape, dtype, seed)
    rng = np.random.default_rng(seed + 1)
    largest, least = float(ml_dtypes.finfo(dtype).max), float(ml_dtypes.finfo(dtype).smallest_subnormal)
    specials = [np.nan, -np.nan, np.inf, -np.inf]
    if extremes:
        specials += [largest, -largest, least, -least]
    specials = np.array(specials, F).astype(dtype)
    flat = x.reshape(-1)
    count = min(flat.size, max(1, flat.size // 300))
    flat[rng.choice(flat.size, count, replace=False)] = rng.choice(specials, count)
    return flat.reshape(shape)


# --- bounds of float32 rounding ---------------------------------------------------------------------------------------


class Tracked(NDArrayOperatorsMixin):
    """A float64 value with a bound of the error of its float32 evaluation (running error analysis, Higham 3.3).

    Float32 code runs on it as on an array; activations in the vocabulary `TRACKED`. Each operation adds half an ulp of
    its result, 2^-24 |result|, and half the least subnormal. `overflows` marks where an intermediate result leaves
    float32: there the bound says nothing. Comparisons are for exact values (inputs) alone.
    """

    UNIT, TINY = 2.0**-24, 2.0**-150

    def __init__(self, value, error=0.0, overflows=False):
        self.value, self.error = np.asarray(value, np.float64), error
        self.overflows = overflows | ~(np.abs(self.value) + error < FLT_MAX)

    @classmethod
    def of(cls, value):
        """`value`, exact if it is no Tracked yet."""
        return value if isinstance(value, cls) else cls(value)

    def rounded(self):
        """With the rounding of an operation that had this result."""
        return Tracked(
            self.value, self.error + self.UNIT * (np.abs(self.value) + self.error) + self.TINY, self.overflows
        )

    def __array_ufunc__(self, ufunc, method, *inputs):
        assert method == "__call__"
        if ufunc in (np.less, np.less_equal, np.greater, np.greater_equal):
            assert not any(np.any(Tracked.of(v).error) for v in inputs), "a comparison of rounded values"
            return ufunc(*(Tracked.of(v).value for v in inputs))
        return getattr(self, f"_{ufunc.__name__}")(*map(Tracked.of, inputs))

    def __array_function__(self, function, types, arguments, options):
        return getattr(self, f"_{function.__name__}")(*arguments, **options)

    @staticmethod
    def _negative(a):
        return Tracked(-a.value, a.error, a.overflows)

    @staticmethod
    def _add(a, b):
        return Tracked(a.value + b.value, a.error + b.error, a.overflows | b.overflows).rounded()

    @staticmethod
    def _subtract(a, b):
        return a + -b

    @staticmethod
    def _multiply(a, b):
        error = np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error
        return Tracked(a.value * b.value, error, a.overflows | b.overflows).rounded()

    @staticmethod
    def _divide(a, b):
        quotient = a.value / b.value
        error = (a.error + np.abs(quotient) * b.error) / (np.abs(b.value) - b.error)
        return Tracked(quotient, error, a.overflows | b.overflows).rounded()

    @staticmethod
    def _where(condition, a, b):
        a, b = Tracked.of(a), Tracked.of(b)
        return Tracked(*(np.where(condition, getattr(a, n), getattr(b, n)) for n in ("value", "error", "overflows")))

    @staticmethod
    def _ones_like(a):
        return Tracked(np.ones_like(a.value))

    def exp(self):
        """e^x, rounded to nearest (`refops.elementary`)."""
        value = np.exp(self.value)
        return Tracked(value, value * np.expm1(self.error), self.overflows).rounded()

    def tanh(self):
        """tanh x, rounded to nearest."""
        nearest = np.maximum(np.abs(self.value) - self.error, 0)  # where tanh is steepest within the error
        error = self.error / np.cosh(np.minimum(nearest, 300)) ** 2
        return Tracked(np.tanh(self.value), error, self.overflows).rounded()


class TrackedArithmetic(Arithmetic):
    """The words of `refops.activations` on `Tracked` numbers: a maximum is as wrong as what it takes."""

    def maximum(self, a, x):
        """The larger one."""
        larger = x.value > a
        return Tracked(np.where(larger, x.value, a), np.where(larger, x.error, 0.0), x.overflows)


TRACKED = TrackedArithmetic()


# --- the second implementation ----------------------------------------------------------------------------------------

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e3m2": 0x1F, "e2m3": 0x1F, "e2m1": 0x7, "e8m0": 0xFF, "int8": 0, "ue5m3": 0xFF}


def ml_cast(v, fmt):
    """Saturating nearest-even cast through ml_dtypes; NaN gives the canonical code. float32 -> uint8.

    INT8 (OCP MX 1.0, 5.3.4): two's complement in units of 1/64, from -127 to 127.
    """
    if fmt.name == "int8":
        units = np.rint(np.where(np.isnan(v), F(0), v).astype(np.float64) * 64)
        return np.clip(units, -127, 127).astype(np.int8).view(np.uint8)
    dtype = ML_DTYPES[fmt.name]
    limit = F(ml_dtypes.finfo(dtype).max)
    nan = np.isnan(v)
    codes = np.clip(np.where(nan, F(0), v), -limit, limit).astype(dtype).view(np.uint8)
    return np.where(nan, np.uint8(NAN_CODE[fmt.name]), codes)


def ml_decode(codes, fmt):
    """Values of codes through ml_dtypes; of INT8 in units of 1/64."""
    if fmt.name == "int8":
        return codes.view(np.int8).astype(F) / F(64)
    return codes.view(ML_DTYPES[fmt.name]).astype(F)


def with_sign(code, negative, fmt):
    """The code of a number from that of its magnitude; integers are in two's complement."""
    if fmt.name == "int8":
        return np.where(negative, -code, code) & 0xFF
    return code | (negative << (fmt.bits - 1))


def nan_free_amax(v, axis=None):
    """max |v| over `axis`, NaN ignored."""
    return np.fmax.reduce(np.abs(v), axis=axis, initial=F(0))


def blocked(v, rows, columns):
    """(R, C) -> zero-padded (R/rows, rows, C/columns, columns)."""
    r, c = -(-v.shape[0] // rows), -(-v.shape[1] // columns)
    padded = np.zeros((r * rows, c * columns), v.dtype)
    padded[: v.shape[0], : v.shape[1]] = v
    return padded.reshape(r, rows, c, columns)


def unblocked(blocks, shape):
    """Undo `blocked`."""
    r, rows, c, columns = blocks.shape
    return np.ascontiguousarray(blocks.reshape(r * rows, c * columns)[: shape[0], : shape[1]])


def spread_scales(scales, rows, columns, shape):
    """One entry a block -> one entry an element of a (R, C) matrix."""
    return np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[: shape[0], : shape[1]]


def padded(scales, rows, columns):
    """Zero-pad to multiples of (rows, columns)."""
    blocks = blocked(scales, rows, columns)
    return unblocked(blocks, (blocks.shape[0] * rows, blocks.shape[2] * columns))


def fp8_scale(amax, fmt, eps, pow2, value_for_inf):
    """Section 3.1."""
    amax = np.where(amax < F(eps), F(eps), amax)
    scale = F(448 if fmt.name == "e4m3" else 57344) / amax
    scale = np.where(np.isinf(scale), F(value_for_inf), scale)
    if pow2:
        scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(F)
    return np.where((amax == 0) | np.isinf(amax), F(1), scale)


def e8m0_up(v):
    """`float_to_e8m0` of section 5.1."""
    b = v.view(np.uint32)
    e, m = (b >> 23) & 0xFF, b & 0x7FFFFF
    e = e + ((m > 0) & (e != 254) & ~((e == 0) & (m <= 0x400000)))
    return np.where(v == 0, 0, np.where(np.isinf(v), 254, e)).astype(np.uint8)


def mx_byte(amax, fmt, scale_rounding):
    """The MX scale byte: TE's rule, or 2^(exponent - emax) with the exponent from exact arithmetic."""
    limit = F(127 / 64) if fmt.name == "int8" else F(ml_dtypes.finfo(ML_DTYPES[fmt.name]).max)
    if scale_rounding == "up":
        return e8m0_up(amax * (F(1) / limit))
    emax, mantissa = {"e4m3": (8, 3), "e5m2": (15, 2), "e3m2": (4, 2), "e2m3": (2, 3), "e2m1": (2, 1), "int8": (0, 6)}[
        fmt.name
    ]
    finite = np.where(np.isinf(amax), F(1), amax).astype(np.float64)
    fraction, exponent = np.frexp(finite)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    exponent = exponent - 1
    if scale_rounding == "even":  # half up at `mantissa` bits may carry into the exponent
        exponent = exponent + (np.floor(fraction * 2 * 2**mantissa + 0.5) >= 2 ** (mantissa + 1))
    if scale_rounding == "ceil_ocp":
        exponent = exponent + (fraction != 0.5)
    byte = np.where(finite == 0, 0, np.clip(exponent + 127 - emax, 0, 254))
    return np.where(np.isinf(amax), 254, byte).astype(np.uint8)


def s_enc_of(amax, scale_max):
    """Section 6.1."""
    s = np.fmin(F(scale_max * 6) / amax, FLT_MAX)
    return np.where((amax == 0) | (s == 0), F(1), s)


def ue5m3(x):
    """|x| as an unsigned E5M3 code, to nearest even in float64: steps of 2^-17 up to 2^-14, then 8 for an octave."""
    a = np.where(np.isnan(x), 0, np.minimum(np.abs(x), F(114688))).astype(np.float64)
    _, exponent = np.frexp(a)
    octave = np.where(a == 0, -14, np.maximum(exponent - 1, -14))
    steps = np.rint(np.ldexp(a, 3 - octave))  # of the octave: 8 to 16, which is the next one's 8; below 8 subnormal
    return np.where(np.isnan(x), 0xFF, steps + 8 * (octave + 14)).astype(np.uint8)


def ue5m3_value(codes):
    """Values of unsigned E5M3 codes."""
    exponent, mantissa = (codes >> 3).astype(np.int32), (codes & 7).astype(np.float64)
    value = np.ldexp(np.where(exponent == 0, mantissa, mantissa + 8), np.maximum(exponent, 1) - 18)
    return np.where(codes == 0xFF, np.nan, value).astype(F)


def e2m1(x):
    """Section 1.2."""
    a = np.abs(x)
    steps = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5)
    code = sum(s.astype(np.uint8) for s in steps) | (np.signbit(x).astype(np.uint8) << 3)
    return np.where(np.isnan(x), np.uint8(7), code)


def e2m1_stochastic(x, random_bytes):
    """Section 6.8."""
    a = np.abs(x)
    step = np.where(a < 2, F(0.5), np.where(a < 4, F(1), F(2)))
    t = (a.astype(np.float64) + step.astype(np.float64) * (random_bytes / 256)).astype(F)
    step = np.where(t < 2, F(0.5), np.where(t < 4, F(1), F(2)))
    with np.errstate(all="ignore"):
        q = np.where(np.isnan(x), F(6), np.copysign(np.fmin(np.floor(t / step) * step, F(6)), x))
    return e2m1(q)


def philox_block(seed, offset, subsequence):
    """First Philox 4x32-10 block as four Python integers (Salmon et al. 2011)."""
    low = 0xFFFFFFFF
    c = [offset & low, offset >> 32, subsequence & low, subsequence >> 32]
    k = [seed & low, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & low, (p0 >> 32) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c


def philox_matrix(seed, offset, rows, columns, first):
    """One byte an element of a (rows, columns) matrix, 16 an element block, blocks numbered from `first`."""
    blocks = [philox_block(seed, offset, first + i) for i in range(rows * columns // 16)]
    return np.array(blocks, "<u4").view(np.uint8).reshape(rows, columns)


def round_float64(x, dtype):
    """float64 -> float32, float16 or bfloat16 with one rounding, as float32: an integer multiple of the value's ulp.

    For finite `x` below the overflow threshold; others go through the plain cast.
    """
    info = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(x)
    quantum = np.maximum(exponent - 1 - info.nmant, info.minexp - info.nmant)
    rounded = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
    return np.where(np.isfinite(x), np.copysign(rounded, x), x).astype(dtype).astype(F)


def hadamard_columns(v, mask, dtype):
    """Section 6.7 on groups of 16 rows of (M, K): products added in float64 to an accumulator that starts at +0.

    So a sum that cancels is +0, as in a tensor core; where values span less than 2^28 the float64 sum is exact.
    """
    i = np.arange(16)
    signs = np.where((mask >> i) & 1, -1.0, 1.0)
    parity = np.array([[bin(a & b).count("1") % 2 for b in i] for a in i])
    matrix = signs[:, None] * np.where(parity, -1.0, 1.0) * 0.25
    groups = v.astype(np.float64).reshape(v.shape[0] // 16, 16, v.shape[1])
    total = np.zeros(groups.shape)
    for j in range(16):
        for i in range(16):
            total[:, j] += groups[:, i] * matrix[i, j]
    return round_float64(total, dtype).reshape(v.shape)


def _nvfp4_direction(v, amax, scaling, random_bytes):
    """Packed codes and padded scales with blocks along the last axis of (R, C); amax is (1, 1) or (R, 1)."""
    edge = 16 if scaling.two_d else 1
    blocks = blocked(v, edge, 16)
    maxima = nan_free_amax(blocks, axis=(1, 3))
    wide = scaling.scale_format.name == "ue5m3"
    top = (65536 if scaling.four_over_six else 114688) if wide else scaling.e4m3_max
    s_enc = s_enc_of(amax, top) if scaling.tensor_level else F(1)
    s_dec = F(1) / s_enc

    def to_byte(scale):
        return ue5m3(scale) if wide else ml_cast(scale, refops.E4M3)

    def to_scale(scale_bytes):
        return ue5m3_value(scale_bytes) if wide else ml_decode(scale_bytes, refops.E4M3)

    def attempt(scale_bytes):
        enc = np.fmin(F(1) / (to_scale(scale_bytes) * s_dec), FLT_MAX)
        scaled = blocks * enc[:, None, :, None]
        if random_bytes is None:
            return e2m1(scaled)
        return e2m1_stochastic(scaled, blocked(random_bytes, edge, 16))

    if scaling.four_over_six is None:
        scales = to_byte(np.fmin(maxima * (s_enc * (F(1) / F(6))), FLT_MAX))
        codes = attempt(scales)
    else:
        base = maxima / F(6) * s_enc
        tried = [to_byte(np.fmin(base * F(f), F(114688 if wide else 448))) for f in (1, 1.5)]
        codes = [attempt(scales) for scales in tried]
        errors = []
        for c, scales in zip(codes, tried, strict=True):
            q = ml_decode(c, refops.E2M1) * to_scale(scales)[:, None, :, None]
            d = q * np.asarray(amax)[:, None, :, None] / F(6 * top) - blocks
            if scaling.fast_error:  # as the kernel does: a product of halves, compared in float32
                halves = (ml_decode(c, refops.E2M1), to_scale(scales)[:, None, :, None])
                product = halves[0].astype(np.float16) * halves[1].astype(np.float16)
                d = product.astype(F) - blocks * np.asarray(s_enc)[:, None, :, None]
            d = np.abs(d) if scaling.four_over_six == "mae" else d * d
            row_errors = np.zeros(d.shape[:3], F)
            for j in range(16):
                row_errors = row_errors + d[..., j]
            for half in (8, 4, 2, 1) if scaling.two_d else ():
                row_errors = row_errors[:, :half] + row_errors[:, half : 2 * half]
            errors.append(row_errors[:, 0])
        four = errors[1] < errors[0]
        codes = np.where(four[:, None, :, None], codes[1], codes[0])
        scales = np.where(four, tried[1], tried[0])
    return packed(unblocked(codes, v.shape)), padded(np.repeat(scales, edge, axis=0), 128, 4)


def packed(codes):
    """Two codes per byte, that of even index in the low half."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def expect(values, scaling, dtype, *, amax_values=None, rowwise=True, columnwise=True):
    """What `quantize` must write for a float32 matrix: a namespace with the array names of `Quantized`.

    Args:
        values: what is cast, float32; leading dimensions are flattened for the arithmetic.
        amax_values: where the amax of the whole tensor comes from (default `values`).
        dtype: nominal dtype (the block scaling limit, and the rounding of the Hadamard transform).
    """
    with np.errstate(all="ignore"):
        return _expect(values, values if amax_values is None else amax_values, scaling, dtype, rowwise, columnwise)


def _expect(values, amax_values, scaling, dtype, rowwise, columnwise):
    shape = values.shape
    k = shape[-1]
    v = values.reshape(int(np.prod(shape[:-1])), k)
    m = v.shape[0]
    out = dict.fromkeys(ARRAYS)
    if isinstance(scaling, refops.DelayedScaling | refops.CurrentScaling):
        if isinstance(scaling, refops.DelayedScaling):
            scale, amax = F(scaling.scale), nan_free_amax(v)
        else:
            amax = nan_free_amax(amax_values)
            scale = fp8_scale(amax, scaling.fmt, scaling.amax_epsilon, scaling.power_2_scale, FLT_MAX)
        codes = ml_cast(v * scale, scaling.fmt)
        row = codes.reshape(shape), np.array([F(1) / scale], F), np.array([amax], F)
        column = np.ascontiguousarray(codes.T).reshape(k, *shape[:-1]), row[1], row[2]
    elif isinstance(scaling, refops.BlockScaling | refops.Block64Scaling):
        size = 64 if isinstance(scaling, refops.Block64Scaling) else 128
        limit = {FP32: FLT_MAX, FP16: F(65504), BF16: from_bits(0x7F7F0000)[0]}[dtype]

        def one(matrix, rows):
            blocks = blocked(matrix, rows, size)
            scale = fp8_scale(
                nan_free_amax(blocks, (1, 3)), scaling.fmt, scaling.amax_epsilon, scaling.power_2_scale, limit
            )
            codes = unblocked(ml_cast(blocks * scale[:, None, :, None], scaling.fmt), matrix.shape)
            return codes, padded(F(1) / scale, 1, 4) if rows > 1 else padded((F(1) / scale).T, 1, 4)

        edge = 128 if size == 128 and scaling.block_dim == 2 else 1
        codes, scales = one(v, edge)
        row = codes.reshape(shape), scales, None
        codes, scales = one(np.ascontiguousarray(v.T), edge)
        column = codes.reshape(k, *shape[:-1]), scales, None
    elif isinstance(scaling, refops.MXFP8Scaling | refops.MXINT8Scaling):
        two_d, pad = getattr(scaling, "two_d", False), isinstance(scaling, refops.MXFP8Scaling)

        def one(rows, columns):
            blocks = blocked(v, rows, columns)
            scales = mx_byte(nan_free_amax(blocks, (1, 3)), scaling.fmt, scaling.scale_rounding)
            multiplier = np.ldexp(F(1), 127 - scales.astype(np.int32)).astype(F)
            codes = unblocked(ml_cast(blocks * multiplier[:, None, :, None], scaling.fmt), v.shape)
            return codes.reshape(shape), scales

        edge = 32 if two_d else 1
        codes, scales = one(edge, 32)
        row = codes, padded(np.repeat(scales, edge, axis=0)[:m], *((128, 4) if pad else (1, 1))), None
        codes, scales = one(32, edge)
        column = codes, padded(np.repeat(scales, edge, axis=1)[:, :k], *((4, 128) if pad else (1, 1))), None
    elif isinstance(scaling, refops.MXFP4Scaling | refops.E8M0BlockScaling):
        row, column = _expect_e8m0(v, scaling), _expect_e8m0(np.ascontiguousarray(v.T), scaling)
        row = (row[0].reshape(*shape[:-1], row[0].shape[1]), *row[1:])
        if isinstance(scaling, refops.E8M0BlockScaling):
            column = (column[0].reshape(k, *shape[:-1]), *column[1:])
    else:
        row, column = _expect_nvfp4(v, amax_values.reshape(v.shape), scaling, dtype, rowwise, columnwise)
        row = (row[0].reshape(*shape[:-1], k // 2), *row[1:])
    if rowwise:
        out["rowwise_data"], out["rowwise_scale_inv"], out["amax_rowwise"] = row
    if columnwise:
        out["columnwise_data"], out["columnwise_scale_inv"], out["amax_columnwise"] = column
    return SimpleNamespace(**out)


def _expect_e8m0(v, scaling):
    """Codes, scale bytes and no amax of a matrix whose rows hold the blocks: MXFP4 packed, FP8 in larger blocks."""
    is_fp4 = isinstance(scaling, refops.MXFP4Scaling)
    square = scaling.two_d if is_fp4 else scaling.block_dim == 2
    edge, size = (scaling.block_size if square else 1), scaling.block_size
    blocks = blocked(v, edge, size)
    maxima = nan_free_amax(blocks, (1, 3))
    if is_fp4:
        scales = mx_byte(maxima, refops.E2M1, scaling.scale_rounding)
    else:
        scales = mx_byte(np.maximum(maxima, F(scaling.amax_epsilon)), scaling.fmt, "up")
    scaled = blocks * np.ldexp(F(1), 127 - scales.astype(np.int32)).astype(F)[:, None, :, None]
    if is_fp4:
        return packed(unblocked(e2m1(scaled), v.shape)), padded(np.repeat(scales, edge, axis=0)[: len(v)], 128, 4), None
    return unblocked(ml_cast(scaled, scaling.fmt), v.shape), scales, None


def _expect_nvfp4(v, amax_values, scaling, dtype, rowwise, columnwise):
    m, k = v.shape
    transposed, amax_transposed = v.T, amax_values.T
    if scaling.rht:
        transposed = hadamard_columns(v, scaling.sign_mask, dtype).T
        amax_transposed = transposed
    transposed = np.ascontiguousarray(transposed)
    if scaling.row_scaled:
        amax_row, amax_column = nan_free_amax(amax_values, 1), nan_free_amax(amax_transposed, 1)
    else:
        amax_row, amax_column = (np.array([nan_free_amax(a)], F) for a in (amax_values, amax_transposed))
    row_bytes = column_bytes = None
    if scaling.stochastic_rounding and scaling.random_bits is not None:
        row_bytes, column_bytes = scaling.random_bits
    elif scaling.stochastic_rounding:
        row_bytes = philox_matrix(scaling.seed, scaling.offset, m, k, 0)
        column_bytes = philox_matrix(scaling.seed, scaling.offset, k, m, m * k // 16)
    row = _nvfp4_direction(v, amax_row[:, None], scaling, row_bytes)
    column = _nvfp4_direction(transposed, amax_column[:, None], scaling, column_bytes)
    if scaling.two_d and scaling.four_over_six:  # one choice for a tile, by errors summed in the tensor's orientation
        codes = np.stack([row[0] & 0xF, row[0] >> 4], axis=-1).reshape(m, k).T
        tiles = row[1][:m:16, : k // 16]
        column = packed(codes), padded(np.repeat(tiles.T, 16, axis=0), 128, 4)
    kept = (amax_row, amax_column) if scaling.tensor_level else (None, None)
    return (*row, kept[0]), (*column, kept[1])


def expect_dequantized(q):
    """What `dequantize` must give, rowwise and columnwise, before it is rounded: section 7 on hand-indexed scales."""
    scaling, fmt = q.scaling, q.scaling.fmt
    m, k = q.matrix_shape
    row, column = np.indices((m, k))
    if isinstance(scaling, refops.DelayedScaling | refops.CurrentScaling):
        rowwise = ml_decode(q.rowwise_data, fmt) * q.rowwise_scale_inv[0]
        columnwise = ml_decode(q.columnwise_data.T, fmt) * q.columnwise_scale_inv[0]
    elif isinstance(scaling, refops.BlockScaling):
        if scaling.block_dim == 1:
            row_scales, column_scales = (
                q.rowwise_scale_inv[column // 128, row],
                q.columnwise_scale_inv[row // 128, column],
            )
        else:
            row_scales = q.rowwise_scale_inv[row // 128, column // 128]
            column_scales = q.columnwise_scale_inv[column // 128, row // 128]
        rowwise = ml_decode(q.rowwise_data, fmt) * row_scales
        columnwise = ml_decode(q.columnwise_data.T, fmt) * column_scales
    elif isinstance(scaling, refops.MXFP8Scaling | refops.MXINT8Scaling):
        rowwise = ml_decode(q.rowwise_data, fmt) * np.exp2(q.rowwise_scale_inv[row, column // 32].astype(F) - 127)
        columnwise = ml_decode(q.columnwise_data, fmt) * np.exp2(
            q.columnwise_scale_inv[row // 32, column].astype(F) - 127
        )
    elif isinstance(scaling, refops.Block64Scaling):
        rowwise = ml_decode(q.rowwise_data, fmt) * q.rowwise_scale_inv[column // 64, row]
        columnwise = ml_decode(q.columnwise_data.T, fmt) * q.columnwise_scale_inv[row // 64, column]
    elif isinstance(scaling, refops.E8M0BlockScaling):
        size, edge = scaling.block_size, scaling.block_size if scaling.block_dim == 2 else 1
        rowwise = ml_decode(q.rowwise_data, fmt) * np.exp2(
            q.rowwise_scale_inv[row // edge, column // size].astype(F) - 127
        )
        powers = np.exp2(q.columnwise_scale_inv[column // edge, row // size].astype(F) - 127)
        columnwise = ml_decode(q.columnwise_data.T, fmt) * powers
    elif isinstance(scaling, refops.MXFP4Scaling):
        powers = np.exp2(q.rowwise_scale_inv[row, column // scaling.block_size].astype(F) - 127)
        rowwise = ml_decode(refops.unpack_fp4(q.rowwise_data), refops.E2M1) * powers
        powers = np.exp2(q.columnwise_scale_inv[column, row // scaling.block_size].astype(F) - 127)
        columnwise = ml_decode(refops.unpack_fp4(q.columnwise_data), refops.E2M1).T * powers
    else:
        wide = scaling.scale_format == refops.UE5M3
        top = scaling.e4m3_max if not wide else 65536 if scaling.four_over_six else 114688

        def factor(scales, amax):
            scales = ue5m3_value(scales) if wide else ml_decode(scales, refops.E4M3)
            if not scaling.tensor_level:
                return scales
            rcp = F(1) / F(6 * top)
            return scales * (amax * rcp) if wide else scales * amax * rcp

        def amax_of(amax, outer):
            return None if amax is None else amax[outer] if scaling.row_scaled else amax[0]

        scales = factor(q.rowwise_scale_inv[row, column // 16], amax_of(q.amax_rowwise, row))
        rowwise = ml_decode(refops.unpack_fp4(q.rowwise_data), refops.E2M1) * scales
        scales = factor(q.columnwise_scale_inv[column, row // 16], amax_of(q.amax_columnwise, column))
        columnwise = ml_decode(refops.unpack_fp4(q.columnwise_data), refops.E2M1).T * scales
        if scaling.rht:
            columnwise = refops.hadamard_transform(columnwise.T, scaling.sign_mask, inverse=True).T
    return rowwise, columnwise


#: Sections 8.2 and 8.4 by hand: which values are cast, give the tensor amax, and are summed to dbias; "unrounded" means
#: float32, "rounded" to the input dtype.
RULES = {
    "delayed": ("unrounded", "unrounded", "unrounded"),
    "mxfp8": ("rounded", "rounded", "unrounded"),
    "mxfp6": ("rounded", "rounded", "unrounded"),
    "current": ("rounded", "unrounded", "rounded"),
    "nvfp4": ("rounded", "unrounded", "rounded"),
    "block": ("rounded", "rounded", "rounded"),
    "mxfp4": ("rounded", "rounded", "rounded"),
    "e8m0": ("rounded", "rounded", "rounded"),
    "mxint8": ("rounded", "rounded", "rounded"),
    "nvfp4-rht": ("rounded", "rounded", "rounded"),
    "nvfp4-sr-rht": ("rounded", "rounded", "rounded"),
    "nvfp4-row": ("rounded", "rounded", "rounded"),
}


def rule_of(scaling_name):
    """The rule of the longest name that `scaling_name` starts with."""
    return RULES[max((n for n in RULES if scaling_name.startswith(n)), key=len)]
