"""Ten kernels with holes. Replace each `...`, then run

    .venv/bin/python -m cuda_kernels puzzles

in this folder (`make check` creates .venv; in an activated environment `python` is enough): it runs every kernel in
a simulator, no GPU needed, and says which hole fails, where and why; with a puzzle's name or number behind it, it runs
that one and shows what its threads ask memory for. A puzzle has its rule in words, its rule in NumPy (`..._spec`), and
the kernel. Change nothing but the holes, not even the kernels' names; a hole may take several lines.

A kernel is a function that many threads run at the same time. Exactly one thread stores each element of the output.
Arrays are flat: x[row * columns + column]. bfloat16 numbers are stored as uint16, codes and scale bytes as uint8. What
you may use besides Python's operators (^ is the exclusive or of the bits, XOR: 5 ^ 1 is 4):

    cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockDim.x      which thread this is; also .y
    cuda.shared.array(shape, dtype), cuda.syncthreads()     memory of a block of threads, and its barrier
    cuda.shfl_xor_sync(WARP, value, d)                      the value of the thread whose number is this one's ^ d
    WARP                                                    the mask of a shuffle: all 32 threads of the warp take part
    amax_of_warp(x)                                         the largest magnitude of the warp's 32 values, by shuffles
    maximum(a, b), magnitude(x), silu(x)                    the larger one, |x|, x / (1 + e^-x), of float32
    select(condition, a, b)                                 a where the condition holds, else b
    as_u32(x), as_f32(bits)                                 the bits of a float32, and back
    F(1), U16(1), U32(1)                                    constants of a fixed width; F is float32, U unsigned
    np.uint8(a), np.uint16(a), np.uint32(a)                 a as an unsigned number of that width
    INVERSE_448                                             1 / 448, float32; 448 is E4M3's largest number
    casts.widen_bf16, casts.narrow_bf16                     bfloat16 bits to float32, and rounded back
    casts.e4m3, casts.e2m1                                  float32 to the code of FP8 E4M3, of FP4 E2M1, saturating
    casts.e8m0_up, casts.e8m0_value, casts.e8m0_multiplier  amax / 448 to a scale byte b; 2^(b - 127); 2^(127 - b)
"""

import numpy as np

import refops
from cuda_kernels.puzzles.vocabulary import (
    INVERSE_448,
    U16,
    U32,
    WARP,
    F,
    amax_of_warp,
    as_f32,
    as_u32,
    casts,
    cuda,
    kernel,
    magnitude,
    maximum,
    select,
    silu,
)

# --- 1. One thread, one element ---------------------------------------------------------------------
# Add a bias to every row of x (rows, columns), float32. The kernel runs in as many blocks of 256 threads as it needs.
# In the last block some threads have no element, and those must not touch memory.


def add_bias_spec(x, bias):
    return x + bias


@kernel
def add_bias(x, bias, y, rows, columns):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    ...


# --- 2. bfloat16 is the upper half of float32 -------------------------------------------------------
# Turn every bfloat16 into float32. No arithmetic is needed: the 16 bits of a bfloat16 are the upper 16 bits of the
# float32, whose lower 16 bits are zero. (A uint16 has no room for a shift by 16: make it a uint32 first.)


def widen_bf16_spec(x):
    return x.astype(np.float32)


@kernel
def widen_bf16(x, y, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        y[i] = ...


# --- 3. A gated row ---------------------------------------------------------------------------------
# Compute SwiGLU: a row of x is [act | gate], both `columns` long, and y = silu(act) gate. x has twice as many columns
# as y.


def swiglu_spec(x):
    act, gate = np.split(x.astype(np.float32), 2, axis=1)
    return (act / (1 + np.exp(-act)) * gate).astype(x.dtype)


@kernel
def swiglu(x, y, rows, columns):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    row, column = i // columns, i % columns
    if row < rows:
        act = casts.widen_bf16(...)
        gate = casts.widen_bf16(...)
        y[i] = casts.narrow_bf16(silu(act) * gate)


# --- 4. Neighbours read neighbours ------------------------------------------------------------------
# Compute |x| of bfloat16 numbers. A block of 64 threads owns 512 elements, and each thread eight of them. Memory moves
# in sectors of 32 bytes; the 32 threads of a warp load together, and what they ask for in one step should lie in as
# few sectors as possible. Any choice of the eight elements gives the right y, but only one kind of choice wastes no
# byte: it needs two sectors for each load.


def absolute_spec(x):
    return np.abs(x)


@kernel
def absolute(x, y, count):
    first = cuda.blockIdx.x * 512
    for k in range(8):
        i = first + ...
        if i < count:
            y[i] = x[i] & U16(0x7FFF)


# --- 5. The maximum of a warp -----------------------------------------------------------------------
# Find the amax (largest magnitude) of each block of 32 elements, float32 without NaN; the last block may be short.
# Each warp owns a block, and each thread one element. A shuffle by d = 16, 8, 4, 2, 1 gives every thread the value of
# another one: after five shuffles, each thread knows the maximum of all 32. Every thread of a warp must reach every
# shuffle.


def block_amax_spec(x):
    padded = np.pad(np.abs(x), (0, -len(x) % 32))
    return padded.reshape(-1, 32).max(axis=1)


@kernel
def block_amax(x, amax, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    largest = magnitude(x[i]) if i < count else F(0)
    ...
    if i < count and i % 32 == 0:
        amax[i // 32] = largest


# --- 6. A scale that is a power of two --------------------------------------------------------------
# MXFP8's scale byte is the exponent (E8M0, bias 127) of the smallest power of two that is at least amax / 448. The
# exponent field of a float32 (bits 23 to 30) has the same bias, so the byte is that field, plus one unless all 23 bits
# of the mantissa are zero. The two lines for the ends of the range are already there.


def scale_byte_spec(amax):
    return refops.encode(amax * np.float32(1 / 448), refops.E8M0, rounding="up")


@kernel
def scale_byte(amax, scale, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        bits = as_u32(amax[i] * INVERSE_448)
        byte = ...
        byte = select(bits <= U32(0x400000), U32(0), byte)  # 2^-127 and less
        scale[i] = np.uint8(select(byte > U32(254), U32(254), byte))  # infinity


# --- 7. MXFP8, rowwise ------------------------------------------------------------------------------
# Combine puzzles 2, 5 and 6: quantize x (rows, columns) to E4M3 codes and one scale byte for every 32 elements of a
# row; columns is a multiple of 32. Multiply each element by 2^(127 - byte), which is exact, and cast it. All 32
# threads know the byte, but only one stores it.


def mxfp8_spec(x):
    q = refops.quantize(x, refops.MXFP8Scaling(refops.E4M3))
    rows, blocks = x.shape[0], x.shape[1] // 32
    return q.rowwise_data, q.rowwise_scale_inv[:rows, :blocks].view(np.uint8)


@kernel
def mxfp8(x, codes, scales, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    value = casts.widen_bf16(x[i]) if i < count else F(0)
    byte = casts.e8m0_up(amax_of_warp(value) * INVERSE_448)
    if i < count:
        codes[i] = ...
        ...


# --- 8. Two FP4 codes in a byte ---------------------------------------------------------------------
# NVFP4 stores two elements in a byte, the first of them in the lower four bits. The multiplier of each block of 16
# elements is given. Each thread makes one byte, and `count` is the number of bytes.


def pack_fp4_spec(x, multiplier):
    scaled = x.astype(np.float32) * np.repeat(multiplier, 16, axis=1)
    codes = refops.encode(scaled, refops.E2M1)
    return codes[:, 0::2] | codes[:, 1::2] << 4


@kernel
def pack_fp4(x, multiplier, codes, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        factor = multiplier[i // 8]
        first = casts.e2m1(casts.widen_bf16(x[2 * i]) * factor)
        second = casts.e2m1(casts.widen_bf16(x[2 * i + 1]) * factor)
        codes[i] = ...


# --- 9. A transpose through shared memory -----------------------------------------------------------
# Transpose FP8 codes: x (rows, columns) becomes y (columns, rows). 32 x 8 threads own a tile of 32 x 32. Neighbouring
# threads read neighbouring codes of a row, and they must write neighbouring codes too; in between, the tile lies in
# shared memory.
#
# Shared memory has 32 banks, with word w in bank w % 32. It serves a warp at once only if no two threads ask for
# different words of the same bank. How long must a row of the tile be, so that both a row and a column of 32 words lie
# in 32 different banks? And no thread may read what another has not written yet.


def transpose_spec(x):
    return x.T


@kernel
def transpose(x, y, rows, columns):
    tile = cuda.shared.array((32, ...), np.uint32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row0, column0 = 32 * cuda.blockIdx.y, 32 * cuda.blockIdx.x
    for k in range(0, 32, 8):
        row, column = row0 + ty + k, column0 + tx
        if row < rows and column < columns:
            tile[ty + k, tx] = x[row * columns + column]
    ...
    for k in range(0, 32, 8):
        ...


# --- 10. The gradient of a bias ---------------------------------------------------------------------
# Sum the columns of dy (rows, columns), bfloat16, in float32. 32 x 8 threads own 32 columns: each thread adds every
# eighth row of one column, so eight partial sums remain for each column. The threads put them into shared memory,
# where one row of threads (ty == 0) adds them. If two threads added to the same element of `sums`, one would overwrite
# the other's part.


def dbias_spec(dy):
    return dy.astype(np.float32).sum(axis=0)


@kernel
def dbias(dy, sums, rows, columns):
    partial = cuda.shared.array((8, 32), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    column, total = cuda.blockIdx.x * 32 + tx, F(0)
    if column < columns:
        for row in range(ty, rows, 8):
            total = total + casts.widen_bf16(dy[row * columns + column])
    ...
