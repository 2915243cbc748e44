"""Nothing but the values decides a result: not the tile size, not the memory layout; and extra memory stays bounded."""

import tracemalloc
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from independent import BF16, FP32, SCALINGS, F, random_tensor, special_tensor

import refops
from arrays import assert_same_bits, assert_same_quantized, assert_same_values
from refops.tiles import tile_elements
from tiers import sampled

TILE_SIZES = [1 << 14, 1 << 15, 1 << 17, 1 << 22]
#: Spans several tiles both ways at the smaller sizes, ends inside a tile at each, and divides by 32.
SHAPE = (288, 1184)
GATED = [name for name, row in refops.ACTIVATIONS.items() if row.gated]


def run(name, kind, dy, x, scales):
    """One operation on the given tensors, as a list of arrays."""
    if kind == "forward":
        return [refops.activation(name, x)]
    if kind == "backward":
        return list(refops.activation_grad(name, dy, x, dbias=True))
    if kind == "scaled":
        return [refops.scaled_activation(name, x, scales)]
    if kind == "scaled-backward":
        return list(refops.scaled_activation_grad(name, dy, x, scales))
    if kind == "interleaved":
        return [
            refops.scaled_activation(name, x, scales, glu_interleave_size=32),
            *refops.scaled_activation_grad(name, dy, x, scales, glu_interleave_size=32),
        ]
    if kind == "hadamard":
        return [refops.hadamard_transform(x)]
    scaling = SCALINGS[kind]
    if name is None:
        q, dbias = refops.quantize(x, scaling, columnwise=True, dbias=True)
        return [q, dbias, refops.dequantize(q)]
    q, dbias = refops.activation_grad_quantize(name, dy, x, scaling, columnwise=True, dbias=True)
    return [refops.activation_quantize(name, x, scaling, columnwise=True), q, dbias]


#: (activation, kind): every activation and every scaling alone, some of both together.
OPERATIONS = [
    *((name, kind) for name in refops.ACTIVATIONS for kind in ("forward", "backward")),
    *((name, kind) for name in refops.SCALED_ACTIVATIONS for kind in ("scaled", "scaled-backward")),
    *((name, "interleaved") for name in ("swiglu", "situglu", "clamped_swiglu")),
    *((None, kind) for kind in SCALINGS),
    ("swiglu", "mxfp8"),
    ("gelu", "delayed"),
    ("clamped_swiglu", "current"),
    ("srelu", "nvfp4-sr"),
    ("geglu", "nvfp4-rht"),
    ("situglu", "block-1d"),
]


def tensors(name, shape=SHAPE, dtype=FP32):
    """(dy, x, scales) of an operation whose output is `shape`."""
    width = shape[-1] * 2 if name in GATED else shape[-1]
    dy, x = special_tensor(shape, dtype, 21), special_tensor((*shape[:-1], width), dtype, 22)
    return dy, x, random_tensor((int(np.prod(shape[:-1])),), FP32, 23)


def assert_same_results(actual, expected, what):
    """Two lists of arrays and results are equal to the bit; NaN in unquantized arrays is one class."""
    for a, e in zip(actual, expected, strict=True):
        (assert_same_values if isinstance(a, np.ndarray) else assert_same_quantized)(a, e, what)


@sampled(("name", "kind"), OPERATIONS, 5)
def test_tile_size_never_changes_a_bit(name, kind):
    """float32, whose sums round at every step; bfloat16 where the path of a fused operation rounds to it."""
    dy, x, scales = tensors(name, dtype=BF16 if name and kind in SCALINGS else FP32)
    results = []
    for size in TILE_SIZES:
        with tile_elements(size):
            results.append(run(name, kind, dy, x, scales))
    for size, result in zip(TILE_SIZES[1:], results[1:], strict=True):
        assert_same_results(result, results[0], f"{name} {kind} tile {size}")


@pytest.mark.parametrize("name", refops.ACTIVATIONS)
def test_tile_size_never_changes_the_bits_of_a_nan(name):
    """Which NaN a SIMD loop and its scalar tail return may differ: the sign of a NaN must not tell where tiles end."""
    dy, x, _ = tensors(name)
    results = []
    for size in TILE_SIZES:
        with tile_elements(size):
            results.append((refops.activation(name, x), refops.activation_grad(name, dy, x)))
    for y, dx in results[1:]:
        assert_same_bits(y, results[0][0], name)
        assert_same_bits(dx, results[0][1], name)


def fortran(x):
    """Column-major copy."""
    return np.asfortranarray(x)


def strided(x):
    """Every second element of a larger array along both axes."""
    big = np.full([2 * n + 1 for n in x.shape], np.nan, x.dtype)
    view = big[tuple(slice(1, None, 2) for _ in x.shape)]
    view[...] = x
    return view


def reversed_(x):
    """Negative strides along every axis."""
    backwards = tuple(slice(None, None, -1) for _ in x.shape)
    return np.ascontiguousarray(x[backwards])[backwards]


def unaligned(x):
    """Starts one byte into a buffer."""
    buffer = np.zeros(x.nbytes + 1, np.uint8)
    view = buffer[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    assert not view.flags.aligned
    return view


def read_only(x):
    """Not writeable."""
    x = x.copy()
    x.flags.writeable = False
    return x


def transposed_3d(x):
    """(a, b, K) stored as (b, a, K): no 2-D view of it exists."""
    a = 4
    b = x.shape[0] // a
    stored = np.ascontiguousarray(x.reshape(a, b, *x.shape[1:]).swapaxes(0, 1))
    view = stored.swapaxes(0, 1)
    with pytest.raises(ValueError):
        np.reshape(view, (a * b, -1), copy=False)
    return view


LAYOUTS = [fortran, strided, reversed_, unaligned, read_only, transposed_3d, "memmap"]
LAYOUT_OPERATIONS = [
    ("gelu", "forward"),
    ("situglu", "forward"),
    ("clamped_swiglu", "backward"),
    ("silu", "backward"),
    ("swiglu", "scaled"),
    ("clamped_swiglu", "interleaved"),
    ("srelu", "scaled-backward"),
    (None, "hadamard"),
    *((None, kind) for kind in SCALINGS),
    ("swiglu", "mxfp8"),
    ("silu", "delayed"),
    ("gelu", "current"),
    ("geglu", "nvfp4-rht"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: getattr(layout, "__name__", layout))
@sampled(("name", "kind"), LAYOUT_OPERATIONS, 5)
def test_memory_layout_never_changes_a_bit(name, kind, layout, tmp_path):
    """And the operation reads its inputs only: they are the same bits afterwards."""
    extremes = "rht" not in kind
    shape = (128, 288)
    width = 2 * shape[1] if name in GATED else shape[1]
    for dtype in (FP32, BF16):
        dy, x = special_tensor(shape, dtype, 31, extremes), special_tensor((shape[0], width), dtype, 32, extremes)
        scales = random_tensor(shape[:1], FP32, 33)
        expected = run(name, kind, dy, x, scales)
        if layout == "memmap":
            laid_out = []
            for i, array in enumerate((dy, x)):
                array.tofile(tmp_path / str(i))
                laid_out.append(np.memmap(tmp_path / str(i), dtype, "r", shape=array.shape))
        else:
            laid_out = [layout(dy), layout(x)]
        with tile_elements(1 << 14):
            actual = run(name, kind, *laid_out, scales)
        for before, after in zip((dy, x), laid_out, strict=True):
            assert_same_bits(np.ascontiguousarray(after).reshape(before.shape), before, "input")
        assert_same_results([as_matrix(r) for r in actual], [as_matrix(r) for r in expected], f"{name} {kind}")


def as_matrix(result):
    """Leading dimensions flattened, so that a 3-D result compares with a 2-D one."""
    if not isinstance(result, refops.Quantized):
        return result.reshape(-1, result.shape[-1]) if result.ndim > 1 else result
    arrays = {name: getattr(result, name) for name in ("rowwise_scale_inv", "columnwise_scale_inv")}
    arrays |= {name: getattr(result, name) for name in ("amax_rowwise", "amax_columnwise")}
    arrays["rowwise_data"] = result.rowwise_data.reshape(-1, result.rowwise_data.shape[-1])
    data = result.columnwise_data
    transposed = result.scaling.layout.columnwise_transposed
    arrays["columnwise_data"] = data.reshape(len(data), -1) if transposed else data.reshape(-1, data.shape[-1])
    return SimpleNamespace(**arrays)


def test_results_do_not_share_memory_with_inputs_or_each_other():
    x = random_tensor((128, 128), FP32)
    for scaling in SCALINGS.values():
        q = refops.quantize(x, scaling, columnwise=True)
        arrays = [a for a in vars(q).values() if isinstance(a, np.ndarray)]
        assert not any(np.shares_memory(a, x) for a in arrays)
        assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
        assert all(a.flags.writeable and a.flags.c_contiguous for a in arrays)
    for name in refops.ACTIVATIONS:
        assert not np.shares_memory(refops.activation(name, x), x)


# --- memory -----------------------------------------------------------------------------------------

#: The promise is 256 MiB for any tensor. With 16 Mi elements, 16 MiB leave no room for one byte an element more than
#: the outputs, so whatever grows with the tensor shows; what remains are tiles and vectors of M or K entries.
ELEMENTS, LIMIT = 16 << 20, 16 << 20


@contextmanager
def traced_memory():
    """Yield a namespace that holds the peak of NumPy's allocations, in bytes, once the block has ended."""
    memory = SimpleNamespace()
    tracemalloc.start()
    try:
        yield memory
        memory.peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bytes_of(results):
    """Bytes of all arrays in results."""
    flat = results if isinstance(results, list | tuple) else [results]
    arrays = [a for r in flat for a in (vars(r).values() if isinstance(r, refops.Quantized) else [r])]
    return sum(a.nbytes for a in arrays if isinstance(a, np.ndarray))


def half(x):
    """The left half of a matrix: a gradient for a gated activation of x."""
    return x[:, : x.shape[1] // 2]


WORK = {
    "mxfp8-both": lambda x: refops.quantize(x, SCALINGS["mxfp8"], columnwise=True),
    "current-dbias": lambda x: refops.quantize(x, SCALINGS["current"], dbias=True),
    "nvfp4-rht": lambda x: refops.quantize(x, SCALINGS["nvfp4-rht"], columnwise=True),
    "gated-grad-mxfp8-dbias": lambda x: refops.activation_grad_quantize(
        "swiglu", half(x), x, SCALINGS["mxfp8"], columnwise=True, dbias=True
    ),
    "scaled-grad": lambda x: refops.scaled_activation_grad("swiglu", half(x), x, np.ones(x.shape[0], F)),
    "dequantize": lambda x: refops.dequantize(refops.quantize(x, SCALINGS["nvfp4-row"])),
    "hadamard": refops.hadamard_transform,
    "encode": lambda x: refops.encode(x, refops.E4M3),
    "encode-stochastic": lambda x: refops.encode(
        x, refops.E2M1, rounding="stochastic", random_bits=np.broadcast_to(np.uint8(0), x.shape)
    ),
    "decode": lambda x: refops.decode(x.view(np.uint8), refops.E4M3),
}
SHAPES = {"wide": (128, ELEMENTS // 128), "tall": (ELEMENTS // 128, 128)}


@pytest.mark.parametrize("shape", SHAPES)
@sampled("work", WORK, 5)
def test_extra_memory_does_not_grow_with_the_tensor(work, shape, tmp_path):
    """A memory-mapped bfloat16 tensor (a sparse file of zeros with values at its corners)."""
    x = np.memmap(tmp_path / "x", BF16, "w+", shape=SHAPES[shape])
    x[0, 0], x[-1, -1], x[0, -1] = 3.0, -7.0, 0.5
    with traced_memory() as memory:
        kept = bytes_of(WORK[work](x))
    if work == "dequantize":
        kept += ELEMENTS // 2 + ELEMENTS // 16 + 4 * len(x)  # the NVFP4 tensor: codes, scales, amaxes
    assert memory.peak - kept < LIMIT, f"{(memory.peak - kept) / 2**20:.0f} MiB"


@pytest.mark.parametrize("rows", [1, 2, 33, 127, 129])
@pytest.mark.parametrize(
    "scaling",
    [
        refops.BlockScaling(refops.E4M3, 1),
        refops.BlockScaling(refops.E4M3, 2),
        refops.MXFP8Scaling(refops.E4M3),
        refops.MXFP8Scaling(refops.E4M3, two_d=True),
    ],
    ids=repr,
)
def test_few_rows_are_not_padded_to_whole_blocks(scaling, rows):
    """A tile is widest where rows are few: padding them to 128 would multiply its memory."""
    x = np.ones((rows, (1 << 21) // rows), np.float32)
    tracemalloc.start()
    try:
        refops.quantize(x, scaling, columnwise=True)
        extra = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert extra < 32 << 20  # outputs and their scales take up to 10 MiB of it
