"""Kernels that this project did not write, as others write them: CUDA C++ by NVRTC, and PTX of Triton.

What comes out is judged by NumPy and `refops`.
"""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ptx_kernels import TARGET
from small_formats import doubles, every_brain_and_more, nearest_codes

import refops
from cuda_kernels.emulator import driver_calls, programs
from refops import E4M3
from refops.activations import bind_activation

F, BF16 = np.float32, ml_dtypes.bfloat16
TRITON = Path(__file__).with_name("triton")
SILU, SWIGLU = bind_activation("silu", {}), bind_activation("swiglu", {})


pytest.importorskip("cuda.bindings.nvrtc")


def run(source, entry, grid, block, arguments, options=(), *, compiled_for=None, shared=0):
    """Run CUDA C++ or PTX on the device as it is and return its arrays.

    Args:
        compiled_for: the architecture that CUDA C++ is compiled for, if not the device's. The device runs every
            instruction whatever it is, so that only the name in the text has to be its own.
    """
    mine = TARGET
    if not programs.is_ptx(source):
        source, entry = programs.compile_cuda(source, entry, compiled_for or mine, options)
    source = re.sub(r"^\.target sm_\w+", f".target {mine}", source, flags=re.MULTILINE)
    return programs.run(source, entry, grid, block, arguments, shared=shared, target=mine).arrays


def heavy(shape, dtype, seed=1):
    """Values of many sizes, none beyond 80, whose exponential float32 still holds."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape)), -80, 80).astype(dtype)


# --- CUDA C++: casts of the headers -----------------------------------------------------------------

CASTS = """
#include <cuda_fp4.h>
#include <cuda_fp6.h>
#include <cuda_fp8.h>
#include <cuda_bf16.h>

template <class Small> __device__ void cast(const float* x, unsigned char* codes, float* back, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    Small small(x[i]);
    codes[i] = small.__x;
    back[i] = float(small);
}
extern "C" __global__ void e4m3(const float* x, unsigned char* c, float* b, int n) { cast<__nv_fp8_e4m3>(x, c, b, n); }
extern "C" __global__ void e5m2(const float* x, unsigned char* c, float* b, int n) { cast<__nv_fp8_e5m2>(x, c, b, n); }
extern "C" __global__ void e2m1(const float* x, unsigned char* c, float* b, int n) { cast<__nv_fp4_e2m1>(x, c, b, n); }
extern "C" __global__ void e2m3(const float* x, unsigned char* c, float* b, int n) { cast<__nv_fp6_e2m3>(x, c, b, n); }
extern "C" __global__ void e3m2(const float* x, unsigned char* c, float* b, int n) { cast<__nv_fp6_e3m2>(x, c, b, n); }
"""
SMALL = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100a"])
@pytest.mark.parametrize("name", SMALL)
def test_casts_of_the_headers(name, target):
    """In integers on sm_80, in instructions on sm_100a: the same codes from every bfloat16 and from values between."""
    x = every_brain_and_more(3)
    grid = -(-x.size // 256)
    arguments = [x, np.zeros(x.size, np.uint8), np.zeros(x.size, F), x.size]
    _, codes, back = run(CASTS, name, grid, 256, arguments, compiled_for=target)
    expected = nearest_codes(x, SMALL[name])
    numbers = ~np.isnan(x)  # the headers' integers keep the sign of a NaN in some formats
    np.testing.assert_array_equal(codes[numbers], expected[numbers])
    values = codes.astype(np.uint8).view(SMALL[name]).astype(F)
    np.testing.assert_array_equal(back[numbers], values[numbers])


# --- CUDA C++: quantization -------------------------------------------------------------------------

SWIGLU_MXFP8 = """
#include <cuda_bf16.h>
#include <cuda_fp8.h>

template <int WIDTH> __device__ float group_max(float v) {
    #pragma unroll
    for (int d = WIDTH / 2; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, d));
    return v;
}

// x (rows, 2 columns) = [act | gate]: a warp takes 32 columns, one block of MXFP8.
extern "C" __global__ void swiglu_mxfp8(const __nv_bfloat16* x, __nv_bfloat16* y, __nv_fp8_e4m3* codes,
                                        unsigned char* scales, int columns) {
    int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    const __nv_bfloat16* mine = x + size_t(row) * 2 * columns;
    float act = __bfloat162float(mine[column]), gate = __bfloat162float(mine[column + columns]);
    __nv_bfloat16 stored = __float2bfloat16(act / (1 + EXP(-act)) * gate);
    float v = __bfloat162float(stored);
    float amax = group_max<32>(fabsf(v));
    unsigned char scale = __nv_cvt_float_to_e8m0(amax * (1.0f / 448), __NV_SATFINITE, cudaRoundPosInf);
    float inverse = scale >= 254 ? __int_as_float(0x00400000 >> (scale - 254)) : __int_as_float((254 - scale) << 23);
    y[size_t(row) * columns + column] = stored;
    codes[size_t(row) * columns + column] = __nv_fp8_e4m3(v * inverse);
    if (threadIdx.x % 32 == 0) scales[(size_t(row) * columns + column) / 32] = scale;
}
"""


@pytest.mark.parametrize("exponential", ["expf", "__expf"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100a"])
def test_swiglu_to_mxfp8(exponential, target):
    rows, columns = 9, 256
    x = heavy((rows, 2 * columns), BF16)
    arguments = [x, np.zeros((rows, columns), BF16), np.zeros((rows, columns), np.uint8)]
    arguments += [np.zeros((rows, columns // 32), np.uint8), columns]
    options = (f"-DEXP={exponential}",)
    grid = (columns // 128, rows)
    _, y, codes, scales = run(SWIGLU_MXFP8, "swiglu_mxfp8", grid, 128, arguments, options, compiled_for=target)
    exact = SWIGLU.truth(doubles(x[:, :columns]), doubles(x[:, columns:]))
    assert np.all(np.abs(doubles(y) - exact) <= 2.0**-8 * 1.001 * np.abs(exact) + 1e-38)  # half a place of bfloat16
    expected = refops.quantize(y, refops.MXFP8Scaling(E4M3))
    np.testing.assert_array_equal(scales, expected.rowwise_scale_inv.view(np.uint8)[:rows, : columns // 32])
    np.testing.assert_array_equal(codes, expected.rowwise_data.view(np.uint8))


AMAX = """
extern "C" __global__ void amax(const float* x, float* result, int count) {
    extern __shared__ float of_warps[];
    float v = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        v = fmaxf(v, fabsf(x[i]));
    for (int d = 16; d; d /= 2) v = fmaxf(v, __shfl_down_sync(0xFFFFFFFF, v, d));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        v = threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : 0;
        for (int d = 16; d; d /= 2) v = fmaxf(v, __shfl_down_sync(0xFFFFFFFF, v, d));
        if (threadIdx.x == 0) atomicMax(reinterpret_cast<int*>(result), __float_as_int(v));
    }
}
"""


def test_amax_by_an_atomic():
    x = heavy(10007, F)
    _, result = run(AMAX, "amax", 5, 256, [x, np.zeros(1, F), x.size], shared=32)
    assert result[0] == np.abs(x).max()


TURNED = """
#include <cuda_fp8.h>
template <class T, int TILE> __device__ void turn(const T* x, __nv_fp8_e4m3* y, float scale, int rows, int columns) {
    __shared__ T tile[TILE][TILE + 1];
    int column = blockIdx.x * TILE + threadIdx.x, row = blockIdx.y * TILE + threadIdx.y;
    for (int k = 0; k < TILE; k += blockDim.y)
        if (row + k < rows && column < columns) tile[threadIdx.y + k][threadIdx.x] = x[(row + k) * columns + column];
    __syncthreads();
    row = blockIdx.x * TILE + threadIdx.y;
    column = blockIdx.y * TILE + threadIdx.x;
    for (int k = 0; k < TILE; k += blockDim.y)
        if (row + k < columns && column < rows)
            y[(row + k) * rows + column] = __nv_fp8_e4m3(float(tile[threadIdx.x][threadIdx.y + k]) * scale);
}
extern "C" __global__ void turned(const float* x, __nv_fp8_e4m3* y, float scale, int rows, int columns) {
    turn<float, 32>(x, y, scale, rows, columns);
}
"""


def test_transposition_in_shared_memory():
    x = heavy((70, 45), F)
    arguments = [x, np.zeros((45, 70), np.uint8), 4.0, 70, 45]
    _, y = run(TURNED, "turned", (2, 3), (32, 8), arguments)
    np.testing.assert_array_equal(y, nearest_codes(x.T * F(4), ml_dtypes.float8_e4m3fn))


GROUPS = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

// Sums of 8 neighbours, the largest of a warp, and how many threads of a warp are odd, each in its own way.
extern "C" __global__ void groups(const int* x, int* sums, unsigned* largest, int* odd) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
    cg::thread_block_tile<8> eight = cg::tiled_partition<8>(warp);
    int i = block.group_index().x * block.size() + block.thread_rank();
    int sum = cg::reduce(eight, x[i], cg::plus<int>());
    if (eight.thread_rank() == 0) sums[i / 8] = sum;
    largest[i] = cg::reduce(warp, unsigned(x[i]), cg::greater<unsigned>());
    odd[i] = 0;
    if (x[i] & 1) odd[i] = cg::coalesced_threads().size();
    block.sync();
}
"""


def test_cooperative_groups():
    x = np.random.default_rng(2).integers(0, 1000, 256).astype(np.int32)
    arguments = [x, np.zeros(32, np.int32), np.zeros(256, np.uint32), np.zeros(256, np.int32)]
    _, sums, largest, odd = run(GROUPS, "groups", 2, 128, arguments)
    np.testing.assert_array_equal(sums, x.reshape(-1, 8).sum(1))
    np.testing.assert_array_equal(largest, np.repeat(x.reshape(-1, 32).max(1), 32))
    of_warp = np.repeat((x & 1).reshape(-1, 32).sum(1), 32)
    np.testing.assert_array_equal(odd, np.where(x & 1, of_warp, 0))


PIPELINE = """
#include <cuda_pipeline.h>
extern "C" __global__ void sums(const float4* x, float* y, int steps) {
    __shared__ float4 buffer[2][128];
    const float4* mine = x + blockIdx.x * steps * 128 + threadIdx.x;
    __pipeline_memcpy_async(&buffer[0][threadIdx.x], mine, sizeof(float4));
    __pipeline_commit();
    float total = 0;
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps)
            __pipeline_memcpy_async(&buffer[(step + 1) % 2][threadIdx.x], mine + (step + 1) * 128, sizeof(float4));
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        float4 v = buffer[step % 2][threadIdx.x ^ 1];  // what a neighbour copied
        total += v.x + v.y + v.z + v.w;
        __syncthreads();
    }
    y[blockIdx.x * 128 + threadIdx.x] = total;
}
"""


def test_a_pipeline_of_asynchronous_copies():
    x = np.random.default_rng(3).integers(-9, 10, (3, 5, 128, 4)).astype(F)
    _, y = run(PIPELINE, "sums", 3, 128, [x, np.zeros((3, 128), F), 5])
    np.testing.assert_array_equal(y, x.sum((1, 3))[:, np.arange(128) ^ 1])


BARRIERS = """
#include <cuda/barrier>
using barrier = cuda::barrier<cuda::thread_scope_block>;
extern "C" __global__ void handed_over(const int* x, int* y, int steps) {
    __shared__ barrier full;
    __shared__ alignas(16) int buffer[256];
    if (threadIdx.x == 0) init(&full, blockDim.x);
    __syncthreads();
    int total = 0;
    for (int step = 0; step < steps; step++) {
        COPY
        full.arrive_and_wait();
        total += buffer[255 - threadIdx.x];
        __syncthreads();
    }
    y[threadIdx.x] = total;
}
"""
COPIES = {
    "stores": "buffer[threadIdx.x] = x[step * 256 + threadIdx.x];",
    "memcpy_async": "cuda::memcpy_async(&buffer[threadIdx.x], x + step * 256 + threadIdx.x, sizeof(int), full);",
}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_barriers_in_shared_memory(copy, target):
    x = np.random.default_rng(4).integers(0, 1000, (4, 256)).astype(np.int32)
    source = BARRIERS.replace("COPY", COPIES[copy])
    _, y = run(source, "handed_over", 1, 256, [x, np.zeros(256, np.int32), 4], compiled_for=target)
    np.testing.assert_array_equal(y, x.sum(0)[::-1])


BULK = """
#include <cuda/ptx>
#include <cuda/barrier>
namespace ptx = cuda::ptx;
using barrier = cuda::barrier<cuda::thread_scope_block>;
extern "C" __global__ void doubled(const int* x, int* y) {
    __shared__ alignas(16) int buffer[256];
    __shared__ barrier full;
    if (threadIdx.x == 0) {
        init(&full, blockDim.x);
        cuda::device::memcpy_async_tx(buffer, x + blockIdx.x * 256, cuda::aligned_size_t<16>(sizeof(buffer)), full);
    }
    __syncthreads();
    barrier::arrival_token token;
    if (threadIdx.x == 0) token = cuda::device::barrier_arrive_tx(full, 1, sizeof(buffer));
    else token = full.arrive();
    full.wait(std::move(token));
    buffer[threadIdx.x] *= 2;
    ptx::fence_proxy_async(ptx::space_shared);
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, y + blockIdx.x * 256, buffer, sizeof(buffer));
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>());
    }
}
"""


def test_bulk_copies():
    x = np.arange(768, dtype=np.int32)
    _, y = run(BULK, "doubled", 3, 256, [x, np.zeros_like(x)], compiled_for="sm_90")
    np.testing.assert_array_equal(y, 2 * x)


BLOCK_REDUCE = """
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
extern "C" __global__ void reduced(const int* x, int* sums, int* before) {
    using Reduce = cub::BlockReduce<int, 128>;
    using Scan = cub::BlockScan<int, 128>;
    __shared__ union { typename Reduce::TempStorage reduce; typename Scan::TempStorage scan; } storage;
    int v = x[blockIdx.x * 128 + threadIdx.x], sum = Reduce(storage.reduce).Sum(v), place;
    __syncthreads();
    Scan(storage.scan).ExclusiveSum(v, place);
    before[blockIdx.x * 128 + threadIdx.x] = place;
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
"""


def test_cub():
    x = np.random.default_rng(5).integers(-99, 100, (3, 128)).astype(np.int32)
    arguments = [x, np.zeros(3, np.int32), np.zeros((3, 128), np.int32)]
    _, sums, before = run(BLOCK_REDUCE, "reduced", 3, 128, arguments)
    np.testing.assert_array_equal(sums, x.sum(1))
    np.testing.assert_array_equal(before, x.cumsum(1) - x)


# --- CUDA C++: functions ----------------------------------------------------------------------------

FUNCTIONS = {
    "expf": np.exp,
    "exp2f": np.exp2,
    "logf": np.log,
    "log2f": np.log2,
    "log1pf": np.log1p,
    "expm1f": np.expm1,
    "tanhf": np.tanh,
    "sinf": np.sin,
    "cosf": np.cos,
    "sqrtf": np.sqrt,
    "rsqrtf": lambda x: x**-0.5,
    "cbrtf": np.cbrt,
    "atanf": np.arctan,
    "ceilf": np.ceil,
    "roundf": lambda x: np.trunc(x + np.copysign(0.5, x)),
    "__expf": np.exp,
    "__logf": np.log,
    "1.0f /": lambda x: 1 / x,
}
#: Places by which a result may be wrong, as the CUDA C++ guide says; 2 where it is not here.
PLACES = {"__expf": 2 + 1.173 * 80, "__logf": 2**20, "rsqrtf": 2, "sqrtf": 0.5, "1.0f /": 0.5, "ceilf": 0, "roundf": 0}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_toolkit(name):
    """Slow paths, tables and polynomials as they are compiled in."""
    source = f"""
extern "C" __global__ void apply(const float* x, float* y, int count) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = {name}(x[i]);
}}"""
    rng = np.random.default_rng(6)
    x = np.concatenate(
        [rng.standard_normal(3000) * 10, rng.standard_normal(1000) * 1e6, rng.standard_normal(96) * 1e-3]
    )
    x = np.clip(x, -80, 80).astype(F) if "exp" in name else x.astype(F)
    if name in ("logf", "log2f", "__logf", "log1pf", "sqrtf", "rsqrtf"):
        x = np.abs(x) + F(1e-6)
    _, y = run(source, "apply", 16, 256, [x, np.zeros_like(x), x.size])
    exact = FUNCTIONS[name](x.astype(np.float64))
    places = np.abs(y - exact) / np.spacing(np.abs(exact).astype(F)).astype(np.float64)
    if name == "__logf":  # absolute near 1
        places = np.where((x > 0.5) & (x < 2), np.abs(y - exact) * 2**21.41, places / 3)
        assert places.max() <= 1
    else:
        assert places.max() <= PLACES.get(name, 2)


CALLED = """
struct Pair { float low, high; };
__device__ __noinline__ Pair bounds(const float* x, int count, Pair start) {
    for (int i = 0; i < count; i++) {
        start.low = fminf(start.low, x[i]);
        start.high = fmaxf(start.high, x[i]);
    }
    return start;
}
__device__ __noinline__ double ratio(double a, double b) { return b == 0 ? 0 : a / b; }
extern "C" __global__ void spread(const float* x, double* y, int columns) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    Pair found = bounds(x + row * columns, columns, Pair{x[row * columns], x[row * columns]});
    y[row] = ratio(found.low, found.high) + ratio(row % 3, row % 2);
}
"""


def test_functions_that_are_not_inlined():
    x = heavy((64, 7), F)
    _, y = run(CALLED, "spread", 2, 32, [x, np.zeros(64, np.float64), 7])
    low, high = x.min(1).astype(np.float64), x.max(1).astype(np.float64)
    row = np.arange(64)
    np.testing.assert_array_equal(y, low / high + np.where(row % 2, row % 3, 0))


INTEGERS = """
typedef long long Integer;
typedef unsigned long long Natural;
extern "C" __global__ void divided(const Natural* a, const Integer* b, Natural* q, Integer* r) {
    int i = threadIdx.x;
    q[i] = a[i] / Natural(b[i]);
    r[i] = Integer(a[i]) % b[i];
}
"""


def test_integers_of_64_bits():
    rng = np.random.default_rng(7)
    a = rng.integers(0, 1 << 63, 128, dtype=np.uint64)
    b = rng.integers(1, 1 << 40, 128) >> rng.integers(0, 38, 128)
    b = np.maximum(b, 1)
    _, _, q, r = run(INTEGERS, "divided", 1, 128, [a, b, np.zeros_like(a), np.zeros_like(b)])
    np.testing.assert_array_equal(q, a // b.astype(np.uint64))
    np.testing.assert_array_equal(r, a.astype(np.int64) % b)


ASSERTION = """
extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* name, size_t);
#define assert(condition) if (!(condition)) __assertfail(#condition, "kernel.cu", __LINE__, __func__, 1)
"""


@pytest.mark.parametrize(
    "statement, said",
    [
        ("assert(x[0] == 7)", "an assertion of the kernel failed"),
        ('printf("%f", x[0])', "the kernel prints (vprintf)"),
        ("x = (const float*)malloc(x[0])", "the kernel allocates memory (malloc)"),
    ],
)
def test_what_the_device_does_not_do_is_named(statement, said):
    """Where a thread gets there; a kernel that only could print runs."""
    body = "if (x[0] > LIMIT) { STATEMENT; } y[0] = x[0];".replace("STATEMENT", statement)
    source = ASSERTION + 'extern "C" __global__ void k(const float* x, float* y) { BODY }'.replace("BODY", body)
    arguments = [np.full(1, 5, F), np.zeros(1, F)]
    assert run(source.replace("LIMIT", "6"), "k", 1, 1, arguments)[1] == 5
    with pytest.raises(driver_calls.DeviceError, match=re.escape(said)) as raised:
        run(source.replace("LIMIT", "4"), "k", 1, 1, arguments)
    assert "thread 0" in str(raised.value) and "kernel.cu" in str(raised.value)


# --- Triton -----------------------------------------------------------------------------------------


def run_triton(name, target, grid, arguments):
    """Run one of the texts beside triton/kernels.py with the arguments that are not compiled in."""
    text = (TRITON / f"{name}.{target}.ptx").read_text()
    threads, shared = map(int, re.match(r"// threads (\d+), shared (\d+),", text).groups())
    scratch = np.zeros(1, np.uint64)
    return run(text, name, grid, threads, [*arguments, scratch, scratch], shared=shared)


@pytest.fixture(params=["sm_80", "sm_90"])
def target(request):
    """What Triton compiled for."""
    return request.param


def near(found, exact, places):
    """Are values within so many places of the dtype that they are stored in?"""
    info = ml_dtypes.finfo(found.dtype)
    unit = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 1e-300))), info.minexp) - info.nmant)
    return np.all(np.abs(doubles(found) - exact) <= places * unit)


def test_triton_silu(target):
    x = heavy(4096 - 48, BF16)
    _, y, _, _ = run_triton("silu", target, 8, [x, np.zeros_like(x), x.size])
    assert near(y, SILU.truth(doubles(x)), 0.51)


def test_triton_softmax(target):
    x = heavy((5, 1008), F)
    _, y, _, _ = run_triton("softmax", target, 5, [x, np.zeros_like(x), 1008])
    e = np.exp(doubles(x) - doubles(x).max(1, keepdims=True))
    exact = e / e.sum(1, keepdims=True)
    assert np.all(np.abs(y - exact) <= 2e-5 * exact + 1e-37)


def test_triton_quantization():
    x = heavy(2048 - 16, BF16)
    scale = np.array([0.37], F)
    arguments = [x, np.zeros(x.size, np.uint8), scale, np.zeros(1, F), x.size]
    _, codes, _, amax, _, _ = run_triton("quantize_e4m3", "sm_90", 2, arguments)
    np.testing.assert_array_equal(codes, nearest_codes(x.astype(F) * scale, ml_dtypes.float8_e4m3fn))
    assert amax[0] == np.abs(doubles(x)).max()


def test_triton_swiglu(target):
    x = np.random.default_rng(8).standard_normal((8, 480)).astype(np.float16)
    _, y, _, _ = run_triton("swiglu", target, 2, [x, np.zeros((8, 240), np.float16), 240])
    assert near(y, SWIGLU.truth(doubles(x[:, :240]), doubles(x[:, 240:])), 0.51)


def test_triton_transposition(target):
    x = heavy((32, 64), F)
    _, y, _, _ = run_triton("turned", target, 1, [x, np.zeros((64, 32), F)])
    np.testing.assert_array_equal(y, x.T)


def test_triton_loads_ahead(target):
    x = np.random.default_rng(9).integers(-9, 10, (6, 2560 - 64)).astype(BF16)
    _, y, _, _ = run_triton("sums", target, 6, [x, np.zeros(6, F), x.shape[1]])
    np.testing.assert_array_equal(y, doubles(x).sum(1))
