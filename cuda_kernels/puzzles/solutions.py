"""The puzzles solved, one way each; tests run them, and compile them for a GPU."""

import numpy as np

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


@kernel
def add_bias(x, bias, y, rows, columns):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < rows * columns:
        y[i] = x[i] + bias[i % columns]


@kernel
def widen_bf16(x, y, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        y[i] = as_f32(np.uint32(x[i]) << U32(16))


@kernel
def swiglu(x, y, rows, columns):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    row, column = i // columns, i % columns
    if row < rows:
        act = casts.widen_bf16(x[row * 2 * columns + column])
        gate = casts.widen_bf16(x[row * 2 * columns + columns + column])
        y[i] = casts.narrow_bf16(silu(act) * gate)


@kernel
def absolute(x, y, count):
    first = cuda.blockIdx.x * 512
    for k in range(8):
        i = first + k * 64 + cuda.threadIdx.x
        if i < count:
            y[i] = x[i] & U16(0x7FFF)


@kernel
def block_amax(x, amax, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    largest = magnitude(x[i]) if i < count else F(0)
    largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, 16))
    largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, 8))
    largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, 4))
    largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, 2))
    largest = maximum(largest, cuda.shfl_xor_sync(WARP, largest, 1))
    if i < count and i % 32 == 0:
        amax[i // 32] = largest


@kernel
def scale_byte(amax, scale, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        bits = as_u32(amax[i] * INVERSE_448)
        byte = np.uint32(bits + U32(0x7FFFFF)) >> U32(23)
        byte = select(bits <= U32(0x400000), U32(0), byte)  # 2^-127 and less
        scale[i] = np.uint8(select(byte > U32(254), U32(254), byte))  # infinity


@kernel
def mxfp8(x, codes, scales, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    value = casts.widen_bf16(x[i]) if i < count else F(0)
    byte = casts.e8m0_up(amax_of_warp(value) * INVERSE_448)
    if i < count:
        codes[i] = np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte)))
        if i % 32 == 0:
            scales[i // 32] = np.uint8(byte)


@kernel
def pack_fp4(x, multiplier, codes, count):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i < count:
        factor = multiplier[i // 8]
        first = casts.e2m1(casts.widen_bf16(x[2 * i]) * factor)
        second = casts.e2m1(casts.widen_bf16(x[2 * i + 1]) * factor)
        codes[i] = np.uint8(first | second << U32(4))


@kernel
def transpose(x, y, rows, columns):
    tile = cuda.shared.array((32, 33), np.uint32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row0, column0 = 32 * cuda.blockIdx.y, 32 * cuda.blockIdx.x
    for k in range(0, 32, 8):
        row, column = row0 + ty + k, column0 + tx
        if row < rows and column < columns:
            tile[ty + k, tx] = x[row * columns + column]
    cuda.syncthreads()
    for k in range(0, 32, 8):
        row, column = row0 + tx, column0 + ty + k
        if row < rows and column < columns:
            y[column * rows + row] = np.uint8(tile[tx, ty + k])


@kernel
def dbias(dy, sums, rows, columns):
    partial = cuda.shared.array((8, 32), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    column, total = cuda.blockIdx.x * 32 + tx, F(0)
    if column < columns:
        for row in range(ty, rows, 8):
            total = total + casts.widen_bf16(dy[row * columns + column])
    partial[ty, tx] = total
    cuda.syncthreads()
    if ty == 0 and column < columns:
        for k in range(1, 8):
            total = total + partial[k, tx]
        sums[column] = total
