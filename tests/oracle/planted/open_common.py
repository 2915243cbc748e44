"""Right pieces that the kernels of `open_*` are made of: casts, scales, blocks, activations, walks over tiles."""

import ml_dtypes
import numpy as np

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
FLT_MAX = np.finfo(np.float32).max
U8, U32 = np.uint8, np.uint32
M, K = 224, 352
SHAPE = (M, K)


# --- casts ------------------------------------------------------------------------------------------


def f32(x):
    """What a thread has in registers after it loaded 16-bit elements."""
    return np.asarray(x).astype(F)


def bf16(v):
    """float32 rounded to bfloat16 and back."""
    return v.astype(BF16).astype(F)


def fp16(v):
    """float32 rounded to half and back."""
    return v.astype(np.float16).astype(F)


def e4m3(v):
    """cvt.rn.satfinite.e4m3x2: codes."""
    return np.clip(v, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn).view(U8)


def e5m2(v):
    """cvt.rn.satfinite.e5m2x2: codes."""
    return np.clip(v, F(-57344), F(57344)).astype(ml_dtypes.float8_e5m2).view(U8)


def e2m1(v):
    """cvt.rn.satfinite.e2m1x2 before the two nibbles are joined: codes below 16."""
    return np.clip(v, F(-6), F(6)).astype(ml_dtypes.float4_e2m1fn).view(U8) & U8(15)


def e4m3_value(code):
    """float32 value of codes."""
    return code.view(ml_dtypes.float8_e4m3fn).astype(F)


def e2m1_value(code):
    """float32 value of codes below 16."""
    return np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F)[code]


def pack(codes):
    """Two codes per byte, the even element low."""
    return codes[:, 0::2] | codes[:, 1::2] << U8(4)


def unpack(data):
    """Undo `pack`."""
    return np.stack([data & U8(15), data >> U8(4)], axis=2).reshape(len(data), -1)


def truncate_e4m3(v):
    """Codes rounded toward zero."""
    code = e4m3(v)
    return code - (np.abs(e4m3_value(code)) > np.abs(v)).astype(U8)


# --- tiles ------------------------------------------------------------------------------------------


def tiles(shape, rows, columns):
    """(rows, columns) slices of the tiles of a grid, row by row; the last ones may be partial."""
    for r in range(0, shape[0], rows):
        for c in range(0, shape[1], columns):
            yield slice(r, min(r + rows, shape[0])), slice(c, min(c + columns, shape[1]))


def blocks(count, size):
    """(number, slice) of blocks along a line; the last one may be partial."""
    for number, start in enumerate(range(0, count, size)):
        yield number, slice(start, min(start + size, count))


def amax_of(v):
    """max |x| along the last dimension."""
    return np.abs(v).max(axis=-1)


# --- MXFP8 ------------------------------------------------------------------------------------------


def byte_up(amax, largest=448):
    """E8M0 byte of amax / largest, rounded up."""
    bits = np.asarray(amax * (F(1) / F(largest)), F).view(U32)
    exponent, mantissa = bits >> U32(23), bits & U32(0x7FFFFF)
    up = mantissa > np.where(exponent == 0, U32(0x400000), U32(0))
    return np.minimum(exponent + up, 254).astype(U8)


def byte_floor(amax, emax=8):
    """E8M0 byte of the OCP specification's example: floor(log2 amax) - emax."""
    exponent = np.asarray(amax, F).view(U32) >> U32(23)
    return np.clip(exponent.astype(np.int32) - emax, 0, 254).astype(U8)


def inverse(byte):
    """2^(127 - byte)."""
    return (2.0 ** (127.0 - byte.astype(np.float64))).astype(F)


def mx_block(block):
    """Codes and bytes of float32 (R, up to 32): one block a row."""
    byte = byte_up(amax_of(block))
    return e4m3(block * inverse(byte)[:, None]), byte


def mx_buffers(shape, columnwise=False):
    """Data and bytes as the allocator gives them, zero."""
    m, k = shape
    return np.zeros(shape, U8), np.zeros((-(-m // 32), k) if columnwise else (m, -(-k // 32)), U8)


def mx_rowwise(v):
    """Right rowwise copy."""
    data, scale = mx_buffers(v.shape)
    for j, c in blocks(v.shape[1], 32):
        data[:, c], scale[:, j] = mx_block(v[:, c])
    return {"rowwise_data": data, "rowwise_scale_inv": scale}


def mx_columnwise(v):
    """Right columnwise copy."""
    data, scale = mx_buffers(v.shape, True)
    for i, r in blocks(v.shape[0], 32):
        codes, scale[i] = mx_block(v[r].T)
        data[r] = codes.T
    return {"columnwise_data": data, "columnwise_scale_inv": scale}


def rowwise(data, scale, **more):
    """Outputs of a rowwise copy."""
    return {"rowwise_data": data, "rowwise_scale_inv": scale, **more}


def columnwise(data, scale, **more):
    """Outputs of a columnwise copy."""
    return {"columnwise_data": data, "columnwise_scale_inv": scale, **more}


# --- NVFP4 ------------------------------------------------------------------------------------------


def s_enc(amax):
    """Scale of the tensor: 448 * 6 / amax."""
    return F(1) if amax == 0 else np.fmin(F(2688) / F(amax), FLT_MAX)


def nv_byte(amax, s):
    """E4M3 byte of a block."""
    return e4m3(np.asarray(amax * (s * (F(1) / F(6))), F))


def nv_multiplier(byte, s):
    """What the elements of a block are multiplied by."""
    return np.fmin(F(1) / (e4m3_value(byte) * (F(1) / s)), FLT_MAX)


def nv_block(block, s):
    """Codes and bytes of float32 (R, 16): one block a row; `s` of the tensor, or one for each row."""
    byte = nv_byte(amax_of(block), s)
    return e2m1(block * nv_multiplier(byte, s)[:, None]), byte


def nv_buffers(shape):
    """Codes, still one per byte, and bytes, zero."""
    m, k = shape
    return np.zeros(shape, U8), np.zeros((m, k // 16), U8)


def nv_lines(v, s):
    """Packed data and bytes of (outer, inner) values, blocks of 16 along a line."""
    codes, scale = nv_buffers(v.shape)
    for j, c in blocks(v.shape[1], 16):
        codes[:, c], scale[:, j] = nv_block(v[:, c], s)
    return pack(codes), scale


def nv_rowwise(v, amax):
    """Right rowwise copy."""
    return rowwise(*nv_lines(v, s_enc(amax)), amax_rowwise=np.array([amax], F))


def nv_columnwise(v, amax):
    """Right columnwise copy: that of the transpose."""
    return columnwise(*nv_lines(v.T, s_enc(amax)), amax_columnwise=np.array([amax], F))


def nv_square(v, amax):
    """Right copies in tiles of 16x16: codes (M, K) and a byte for each tile."""
    s, codes, scale = s_enc(amax), np.zeros(v.shape, U8), np.zeros((v.shape[0] // 16, v.shape[1] // 16), U8)
    for r, c in tiles(v.shape, 16, 16):
        byte = nv_byte(np.abs(v[r, c]).max()[None], s)
        scale[r.start // 16, c.start // 16] = byte[0]
        codes[r, c] = e2m1(v[r, c] * nv_multiplier(byte, s))
    return codes, scale


HADAMARD = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
SIGNS = np.array([-1.0 if 0xD7E8 >> i & 1 else 1.0 for i in range(16)])


def transform(group, signs=SIGNS, norm=0.25):
    """16 rows through the random Hadamard transform, stored in bfloat16: float32 (16, C)."""
    return bf16((HADAMARD @ (signs[:, None] * group.astype(np.float64)) * norm + 0.0).astype(F))


def transformed(v):
    """All groups of 16 rows of (M, K)."""
    return np.concatenate([transform(v[r]) for _, r in blocks(len(v), 16)])


# --- FP8 with float32 scales --------------------------------------------------------------------------


def tensor_scale(amax, largest=448):
    """Scale of current scaling."""
    return F(1) if amax == 0 or np.isinf(amax) else np.fmin(F(largest) / F(amax), FLT_MAX)


def one(value):
    """float32 (1,)."""
    return np.array([value], F)


def fp8_rowwise(v, scale, amax, cast=e4m3):
    """Right rowwise copy with a scale of the tensor."""
    return rowwise(cast(v * F(scale)), one(F(1) / F(scale)), amax_rowwise=one(amax))


def fp8_columnwise(v, scale, amax, cast=e4m3):
    """Right columnwise copy, transposed."""
    return columnwise(cast(v * F(scale)).T.copy(), one(F(1) / F(scale)), amax_columnwise=one(amax))


def power_2_scale(amax, largest=448):
    """Scale of a block: the quotient with its mantissa cleared."""
    quotient = np.asarray(F(largest) / amax, F)
    return np.where(amax > 0, (quotient.view(U32) & U32(0xFF800000)).view(F), F(1))


def vector_lines(v):
    """Codes (outer, inner) and scale_inv [block, outer] in blocks of 1x128."""
    data, scale_inv = np.zeros(v.shape, U8), np.zeros((-(-v.shape[1] // 128), len(v)), F)
    for j, c in blocks(v.shape[1], 128):
        scale = power_2_scale(amax_of(v[:, c]))
        data[:, c], scale_inv[j] = e4m3(v[:, c] * scale[:, None]), F(1) / scale
    return data, scale_inv


def square_tiles(v):
    """Codes (M, K) and scale_inv [block row, block column] in tiles of 128x128."""
    data, scale_inv = np.zeros(v.shape, U8), np.zeros((-(-v.shape[0] // 128), -(-v.shape[1] // 128)), F)
    for r, c in tiles(v.shape, 128, 128):
        scale = power_2_scale(np.abs(v[r, c]).max())
        data[r, c], scale_inv[r.start // 128, c.start // 128] = e4m3(v[r, c] * scale), F(1) / scale
    return data, scale_inv


# --- activations in float32 ---------------------------------------------------------------------------


def exp(x):
    """expf."""
    return np.exp(x.astype(np.float64)).astype(F)


def tanh(x):
    """tanhf."""
    return np.tanh(x.astype(np.float64)).astype(F)


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return F(1) / (F(1) + exp(-x))


LINEAR, CUBIC, RATIO, SLOPE = F(0.79788456), F(0.03567741), F(0.044715), F(0.1070322243)


def gelu(x):
    """GELU with tanh."""
    return x * (F(0.5) + F(0.5) * tanh(x * (LINEAR + (CUBIC * x) * x)))


def dgelu(x):
    """Its derivative."""
    t = tanh((LINEAR * x) * (F(1) + (RATIO * x) * x))
    return (F(0.5) * x) * ((F(1) - t * t) * (LINEAR + (SLOPE * x) * x)) + F(0.5) * (F(1) + t)


def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)


def dsilu(x):
    """Its derivative."""
    s = sigmoid(x)
    return x * (s * (F(1) - s)) + s


def qgelu(x):
    """x sigmoid(1.702 x)."""
    return x * sigmoid(F(1.702) * x)


def clamped_swiglu(act, gate, limit=7.0, alpha=1.702, offset=1.0):
    """The GLU of GPT-OSS."""
    c = np.fmin(act, F(limit))
    return (c * sigmoid(F(alpha) * c)) * (np.clip(gate, F(-limit), F(limit)) + F(offset))


def halves(x):
    """act and gate of rows [act | gate], float32."""
    h = x.shape[1] // 2
    return f32(x[:, :h]), f32(x[:, h:])


def column_sum(v, chunk=32):
    """Bias gradient: each warp adds `chunk` rows in registers, and its sum to the total."""
    total = np.zeros(v.shape[1], F)
    for _, r in blocks(len(v), chunk):
        total += np.add.reduce(v[r], axis=0, dtype=F)
    return total


# --- inputs -------------------------------------------------------------------------------------------


def draw(rng, shape, scale=1.0, dtype=BF16):
    """Normal numbers."""
    return (scale * rng.standard_normal(shape, np.float32)).astype(dtype)


def with_dy(shape, gated=False, dtype=BF16, scale=1.0):
    """Inputs of a gradient: dy of `shape` and x of it or of twice its width."""
    m, k = shape
    wide = (m, 2 * k) if gated else shape
    return lambda rng: {"dy": draw(rng, shape, scale, dtype), "x": draw(rng, wide, scale, dtype)}


def with_row_scales(shape, dy=False, dtype=np.float32):
    """Inputs of an activation with a scale for each row, x of twice the width of `shape`."""
    m, k = shape

    def make(rng):
        first = {"dy": draw(rng, shape)} if dy else {}
        return {**first, "x": draw(rng, (m, 2 * k)), "row_scales": (rng.random(m) + 0.25).astype(dtype)}

    return make


def histories(rng):
    """Amax histories of 24 tensors over 16 steps, and their scales."""
    return {"amax_history": (rng.random((16, 24)) * 8 + 0.1).astype(F), "scale": np.full(24, 100, F)}
