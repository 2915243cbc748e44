"""Right pieces of the kernels in `held_*`: casts, scale arithmetic, activations in float32, the tiles of a launch."""

import ml_dtypes
import numpy as np

import refops

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
F = np.float32
ONE = F(1)
FLT_MAX = np.finfo(F).max

MX = refops.MXFP8Scaling(refops.E4M3)
MX_E5M2 = refops.MXFP8Scaling(refops.E5M2)
CURRENT = refops.CurrentScaling(refops.E4M3)
DELAYED = refops.DelayedScaling(refops.E4M3, 24.0)
ROW_BLOCKS = refops.BlockScaling(refops.E4M3, 1)
TILE_BLOCKS = refops.BlockScaling(refops.E4M3, 2)
NV = refops.NVFP4Scaling()
NV_TILES = refops.NVFP4Scaling(two_d=True)
NV_RHT = refops.NVFP4Scaling(rht=True)


# --- inputs ---------------------------------------------------------------------------------------


def gradients(shape, gated=False, scale=1.0):
    """Inputs of a gradient: dy of `shape`, and x of it, or of twice the width."""

    def make(rng):
        width = shape[1] * (2 if gated else 1)
        dy = rng.standard_normal(shape, np.float32)
        return {"dy": dy.astype(BF16), "x": (scale * rng.standard_normal((shape[0], width), np.float32)).astype(BF16)}

    return make


def rows_of_many_sizes(shape):
    """x whose rows differ in magnitude by powers of two."""

    def make(rng):
        return {"x": (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, (shape[0], 1))).astype(BF16)}

    return make


# --- memory and launch ----------------------------------------------------------------------------


def load(x):
    """float32 registers of what memory holds."""
    return x.astype(F)


def bf16(x):
    """Rounded to bfloat16, in float32 registers."""
    return x.astype(BF16).astype(F)


def launch(m, k, height, width):
    """(tile number, rows, columns) of a grid of tiles in launch order, clipped at the edges."""
    across = -(-k // width)
    for tile in range(-(-m // height) * across):
        r, c = tile // across * height, tile % across * width
        yield tile, slice(r, min(r + height, m)), slice(c, min(c + width, k))


def amax_of(x, axis=None):
    """max |x|."""
    return np.max(np.abs(x), axis=axis)


# --- casts ----------------------------------------------------------------------------------------


def e4m3(x):
    """Saturating codes."""
    return np.clip(x, F(-448), F(448)).astype(E4M3).view(np.uint8)


def e5m2(x):
    """Saturating codes."""
    return np.clip(x, F(-57344), F(57344)).astype(E5M2).view(np.uint8)


def e4m3_value(code):
    """float32 values of codes."""
    return np.asarray(code, np.uint8).view(E4M3).astype(F)


def e2m1(x):
    """4-bit codes, ties to even."""
    a = np.abs(x)
    code = (a > 0.25).astype(np.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5)
    return (code | np.signbit(x) << 3).astype(np.uint8)


def e2m1_value(code):
    """float32 values of 4-bit codes."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)
    return np.where(code & 8, -table[code & 7], table[code & 7])


def pack(codes):
    """Two codes per byte, the even one low."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(data):
    """Codes of packed bytes."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def e8m0_up(value):
    """Exponent byte of the power of two at or above each float32."""
    bits = np.asarray(value, F).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    carry = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + carry).astype(np.uint8)


def exp2_inverse(byte):
    """2^(127 - byte)."""
    return np.ldexp(ONE, 127 - byte.astype(np.int32))


# --- scales ---------------------------------------------------------------------------------------


def mx_byte(amax, top=448):
    """Scale byte of an MXFP8 block."""
    return e8m0_up(np.asarray(amax, F) * (ONE / F(top)))


def blocks(tile, size):
    """(R, C) as (R, blocks, size), zeros where the last block has no elements."""
    r, c = tile.shape
    padded = np.zeros((r, -(-c // size) * size), tile.dtype)
    padded[:, :c] = tile
    return padded.reshape(r, -1, size)


def mx_rows(tile, cast=e4m3, top=448):
    """(codes, bytes) of a tile, blocks of 32 along the row."""
    b = blocks(tile, 32)
    byte = mx_byte(amax_of(b, 2), top)
    codes = cast(b * exp2_inverse(byte)[:, :, None])
    return codes.reshape(len(tile), -1)[:, : tile.shape[1]], byte


def mx_columns(tile, cast=e4m3, top=448):
    """(codes, bytes) of a tile, blocks of 32 down the column; bytes are [block, column]."""
    codes, byte = mx_rows(tile.T, cast, top)
    return codes.T, byte.T


def tensor_scale(amax, top=448):
    """Multiplier of FP8 with one scale."""
    return F(top) / F(amax) if amax > 0 else ONE


def power_of_two(scale):
    """The mantissa cleared."""
    return (np.asarray(scale, F).view(np.uint32) & np.uint32(0xFF800000)).view(F)


def block_multiplier(amax, top=448):
    """Multiplier of an FP8 block: top / amax, a power of two."""
    amax = np.asarray(amax, F)
    return np.where(amax > 0, power_of_two(F(top) / np.where(amax > 0, amax, ONE)), ONE).astype(F)


def encode_scale(amax):
    """(S_enc, S_dec) of NVFP4."""
    s = F(2688) / F(amax) if amax > 0 else ONE
    return s, ONE / s


def nv_byte(block_amax, s):
    """E4M3 scale byte of NVFP4 blocks."""
    return e4m3(block_amax * (s[0] * (ONE / F(6))))


def nv_multiplier(byte, s):
    """What the elements of blocks are multiplied by."""
    return np.fmin(ONE / (e4m3_value(byte) * s[1]), FLT_MAX)


def nv_rows(tile, s):
    """(4-bit codes, bytes) of a tile, blocks of 16 along the row."""
    b = blocks(tile, 16)
    byte = nv_byte(amax_of(b, 2), s)
    return e2m1(b * nv_multiplier(byte, s)[:, :, None]).reshape(tile.shape), byte


HADAMARD = np.array([[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)], np.float64)
SIGNS = np.where(0xD7E8 >> np.arange(16) & 1, -1.0, 1.0)


# --- activations ----------------------------------------------------------------------------------


def exp(x):
    """e^x."""
    return np.exp(x.astype(np.float64)).astype(F)


def tanh(x):
    """Hyperbolic tangent."""
    return np.tanh(x.astype(np.float64)).astype(F)


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return ONE / (ONE + exp(-x))


def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


def dsilu(x):
    """Its slope."""
    s = sigmoid(x)
    return x * (s * (ONE - s)) + s


def gelu(x):
    """The tanh form."""
    return x * (F(0.5) + F(0.5) * tanh(x * (F(0.79788456) + (F(0.03567741) * x) * x)))


def dgelu(x):
    """Its slope."""
    t = tanh((F(0.79788456) * x) * (ONE + (F(0.044715) * x) * x))
    steep = F(0.79788456) + (F(0.1070322243) * x) * x
    return (F(0.5) * x) * ((ONE - t * t) * steep) + F(0.5) * (ONE + t)


def qgelu(x):
    """x sigmoid(1.702 x)."""
    return x * sigmoid(F(1.702) * x)


def dqgelu(x):
    """Its slope."""
    z = F(1.702) * x
    s = sigmoid(z)
    return z * (s * (ONE - s)) + s


def halves(x):
    """act and gate of rows [act | gate]."""
    h = x.shape[1] // 2
    return x[:, :h], x[:, h:]
