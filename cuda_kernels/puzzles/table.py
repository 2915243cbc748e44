"""The puzzles: on which inputs each kernel runs, with which threads, and what judges it.

The kernels with their holes, and what they must compute, are in `holes`; here stands how that is checked, in `causes`
what wrong answers mean.
"""

import inspect
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import refops
from cuda_kernels.puzzles import holes
from refops import oracle
from refops.scalings.arithmetic import REFERENCE

F, BF16 = np.float32, np.dtype(ml_dtypes.bfloat16)
MXFP8, NVFP4 = refops.MXFP8Scaling(refops.E4M3), refops.NVFP4Scaling()


@dataclass(frozen=True)
class Case:
    """One input of a puzzle.

    Attributes:
        what: in words.
        arrays: name of an argument -> array, as the spec takes them. sizes: name -> int.
        ragged: whether there are threads that have no element.
    """

    what: str
    arrays: dict
    sizes: dict
    ragged: bool = False

    @property
    def square(self):
        """Whether there are rows and columns, in equal number."""
        return len(self.sizes) == 2 and len(set(self.sizes.values())) == 1


@dataclass(frozen=True)
class Threads:
    """How threads are laid over a puzzle's elements.

    Attributes:
        shape: function of the sizes: (grid, block).
        elements: function of the sizes: how many elements threads are for.
        element: function of (thread_index, block_index): number of the element that the thread is for; None where that
            depends on the kernel, or where a thread has several.
    """

    shape: object
    elements: object
    element: object = None


@dataclass(frozen=True)
class Puzzle:
    """How a kernel is checked.

    Attributes:
        number, title: of the puzzle, as in `holes`.
        kernel: the one with the hole; its name is the puzzle's.
        spec: function of the case's arrays: what must come out, an array or a tuple of them.
        outputs: names of the arguments that the kernel writes.
        cases: function that returns the inputs; the first is the one whose accesses are drawn and judged, and on it
            every thread has an element.
        threads: `Threads`.
        judge: function(arrays, got: name -> array) -> `refops.oracle.Report`; None: the spec's bits.
        sectors: most sectors that one step may touch, for each array whose accesses are judged.
        stores: most elements of one output that a thread may store.
        one_reader: names of inputs of which one thread alone may load an element.
    """

    number: int
    title: str
    kernel: object
    spec: object
    outputs: tuple
    cases: object
    threads: Threads
    judge: object = None
    sectors: dict | None = None
    stores: int = 1
    one_reader: tuple = ()

    @property
    def name(self):
        """The kernel's name, by which users choose the puzzle."""
        return self.kernel.__name__

    @property
    def arguments(self):
        """Names of the kernel's arguments, in order."""
        return tuple(inspect.signature(self.kernel).parameters)

    def expected(self, case):
        """Name of an output -> what must be in it."""
        with np.errstate(all="ignore"):
            found = self.spec(**case.arrays)
        return dict(zip(self.outputs, found if isinstance(found, tuple) else (found,), strict=True))


def carried(array):
    """A flat view with elements as kernels see them: bfloat16 as uint16."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint16) if array.dtype.name == "bfloat16" else flat


# --- inputs -----------------------------------------------------------------------------------------


def random(*shape, dtype=F, seed=0):
    """Heavy-tailed values with a few zeros of both signs."""
    x = np.random.default_rng(seed).standard_t(3, shape).astype(F)
    x.reshape(-1)[5::37] = 0
    x.reshape(-1)[7::61] = -0.0
    return x.astype(dtype)


def special(*shape, dtype=F, nan=True):
    """Every kind of number: zeros, subnormal, smallest, largest, infinities, NaN among ordinary ones."""
    kinds = [0.0, -0.0, 1e-40, -3e-39, 1.2e-38, 1.0, -1.5, 448.0, 3.3e38, -np.inf, np.inf] + [np.nan] * nan
    x = random(*shape, seed=1)
    x.reshape(-1)[::3] = np.resize(np.array(kinds, F), x.reshape(-1)[::3].shape)
    return x.astype(dtype)


def matrix_case(what, rows, columns, *, ragged=False, **arrays):
    """A case of a kernel that knows rows and columns."""
    return Case(what, arrays, {"rows": rows, "columns": columns}, ragged)


def of_length(what, x, name="x", *, ragged=False):
    """A case of a kernel that only knows how many elements its one array has."""
    return Case(what, {name: x}, {"count": x.size}, ragged)


def add_bias_cases():
    bias = random(60, seed=2)
    yield matrix_case("8 x 32, one block of threads", 8, 32, x=random(8, 32), bias=bias[:32])
    yield matrix_case("5 x 60, 300 elements for 512 threads", 5, 60, ragged=True, x=random(5, 60), bias=bias)
    yield matrix_case("5 x 60 with infinities and NaN", 5, 60, ragged=True, x=special(5, 60), bias=bias)


def widen_bf16_cases():
    yield of_length("256 elements", random(256, dtype=BF16))
    yield of_length("300 elements of every kind", special(300, dtype=BF16), ragged=True)


def swiglu_cases():
    yield matrix_case("4 rows of 64 + 64", 4, 64, x=random(4, 128, dtype=BF16))
    yield matrix_case("5 rows of 60 + 60", 5, 60, ragged=True, x=random(5, 120, dtype=BF16))
    yield matrix_case("5 rows of 60 + 60 with infinities and NaN", 5, 60, ragged=True, x=special(5, 120, dtype=BF16))


def absolute_cases():
    yield of_length("1024 elements, two blocks of threads", random(1024, dtype=BF16))
    yield of_length("1000 elements of every kind", special(1000, dtype=BF16), ragged=True)


def block_amax_cases():
    yield of_length("256 elements, 8 blocks", random(256))
    yield of_length("300 elements, the last block has 12", random(300), ragged=True)
    yield of_length("300 elements of every kind but NaN", special(300, nan=False), ragged=True)


def scale_byte_cases():
    powers = F(448) * F(2) ** np.arange(-128, 120, dtype=F)
    above = np.nextafter(powers, F(np.inf))  # a mantissa of 1, which float32's log2 loses beside a larger exponent
    ends = np.array([0, 1e-45, 1e-36, 447, 3.4e38, np.inf], F)
    maxima = np.abs(random(256)) * 100
    maxima[3::16], maxima[9::16] = powers[100:116], above[124:140]
    yield of_length("256 maxima, some of them 448 times a power of two or just above", maxima, "amax")
    yield of_length(
        "448 times each power of two, just above, and the ends", np.concatenate([powers, above, ends]), "amax"
    )


def mxfp8_cases():
    sizes = np.repeat(F(10) ** np.arange(-4, 5, dtype=F), 32).reshape(3, 96)
    ends = special(3, 96, dtype=BF16)
    ends[-1, -32:] = 0
    yield of_length("4 x 64", random(4, 64, dtype=BF16))
    yield of_length("3 x 96, blocks of very different size", (random(3, 96) * sizes).astype(BF16))
    yield of_length("3 x 96 with a block of zeros, infinities and NaN", ends)


def pack_fp4_cases():
    for what, rows, columns in (("16 x 32", 16, 32), ("48 x 16, 384 bytes for 512 threads", 48, 16)):
        x = random(rows, columns, dtype=BF16)
        q = refops.quantize(x, NVFP4)
        scales, of_tensor = q.rowwise_scale_inv[:rows, : columns // 16], NVFP4.tensor_scale(REFERENCE)(q.amax_rowwise)
        multiplier = NVFP4.multiplier(REFERENCE)(scales, of_tensor)
        yield Case(what, {"x": x, "multiplier": multiplier}, {"count": x.size // 2}, ragged=x.size < 1024)


def transpose_cases():
    for what, rows, columns in (("64 x 64", 64, 64), ("96 x 32", 96, 32), ("37 x 72, ragged both ways", 37, 72)):
        codes = np.random.default_rng(3).integers(0, 256, (rows, columns)).astype(np.uint8)
        yield matrix_case(what, rows, columns, ragged=rows % 32 != 0, x=codes)


def dbias_cases():
    for what, rows, columns in (("64 x 96", 64, 96), ("70 x 40, ragged both ways", 70, 40), ("5 x 33", 5, 33)):
        dy = np.random.default_rng(4).integers(-16, 17, (rows, columns)) / 4  # every order of adding is exact
        yield matrix_case(what, rows, columns, ragged=columns % 32 != 0, dy=dy.astype(BF16))


# --- threads ----------------------------------------------------------------------------------------


#: Blocks of 256 threads, one thread for each element.
ONE_EACH = Threads(
    shape=lambda sizes: ((math.ceil(math.prod(sizes.values()) / 256),), (256,)),
    elements=lambda sizes: math.prod(sizes.values()),
    element=lambda thread, block: 256 * block[0] + thread[0],
)
#: Blocks of 64 threads with 512 elements.
EIGHT_EACH = Threads(
    shape=lambda sizes: ((math.ceil(sizes["count"] / 512),), (64,)), elements=lambda sizes: sizes["count"]
)
#: Blocks of 32 x 8 threads for tiles of 32 x 32.
TILES = Threads(
    shape=lambda sizes: ((math.ceil(sizes["columns"] / 32), math.ceil(sizes["rows"] / 32)), (32, 8)),
    elements=lambda sizes: math.prod(sizes.values()),
)
#: Blocks of 32 x 8 threads for 32 columns; eight threads are for the same one.
STRIPS = Threads(
    shape=lambda sizes: ((math.ceil(sizes["columns"] / 32),), (32, 8)),
    elements=lambda sizes: sizes["columns"],
    element=lambda thread, block: 32 * block[0] + thread[0],
)


# --- judges -----------------------------------------------------------------------------------------


def judge_swiglu(arrays, got):
    return oracle.check("swiglu", arrays["x"], {"y": got["y"]})


def judge_scale_byte(arrays, got):
    amax, places = arrays["amax"], np.arange(len(arrays["amax"]))
    blocks = amax[:, None] * np.random.default_rng(5).uniform(-0.9, 0.9, (len(amax), 32)).astype(F)
    blocks[places, 7 * places % 32] = amax  # a whole block for each: the oracle also asks what other elements would do
    return oracle.check("quantize", blocks, {"scale": got["scale"][:, None]}, scaling=MXFP8)


def judge_mxfp8(arrays, got):
    return oracle.check("quantize", arrays["x"], {"data": got["codes"], "scale": got["scales"]}, scaling=MXFP8)


def judge_pack_fp4(arrays, got):
    q = refops.quantize(arrays["x"], NVFP4)
    outputs = {"data": got["codes"], "scale": q.rowwise_scale_inv, "amax": q.amax_rowwise}
    return oracle.check("quantize", arrays["x"], outputs, scaling=NVFP4)


# --- the table --------------------------------------------------------------------------------------

_ROWS = (
    Puzzle(1, "One thread, one element", holes.add_bias, holes.add_bias_spec, ("y",), add_bias_cases, ONE_EACH),
    Puzzle(
        2,
        "bfloat16 is the upper half of float32",
        holes.widen_bf16,
        holes.widen_bf16_spec,
        ("y",),
        widen_bf16_cases,
        ONE_EACH,
    ),
    Puzzle(3, "A gated row", holes.swiglu, holes.swiglu_spec, ("y",), swiglu_cases, ONE_EACH, judge=judge_swiglu),
    Puzzle(
        4,
        "Neighbours read neighbours",
        holes.absolute,
        holes.absolute_spec,
        ("y",),
        absolute_cases,
        EIGHT_EACH,
        sectors={"x": 2, "y": 2},
        stores=8,
    ),
    Puzzle(
        5,
        "The maximum of a warp",
        holes.block_amax,
        holes.block_amax_spec,
        ("amax",),
        block_amax_cases,
        ONE_EACH,
        one_reader=("x",),
    ),
    Puzzle(
        6,
        "A scale that is a power of two",
        holes.scale_byte,
        holes.scale_byte_spec,
        ("scale",),
        scale_byte_cases,
        ONE_EACH,
        judge=judge_scale_byte,
    ),
    Puzzle(
        7,
        "MXFP8, rowwise",
        holes.mxfp8,
        holes.mxfp8_spec,
        ("codes", "scales"),
        mxfp8_cases,
        ONE_EACH,
        judge=judge_mxfp8,
    ),
    Puzzle(
        8,
        "Two FP4 codes in a byte",
        holes.pack_fp4,
        holes.pack_fp4_spec,
        ("codes",),
        pack_fp4_cases,
        ONE_EACH,
        judge=judge_pack_fp4,
    ),
    Puzzle(
        9,
        "A transpose through shared memory",
        holes.transpose,
        holes.transpose_spec,
        ("y",),
        transpose_cases,
        TILES,
        sectors={"x": 1, "y": 1},
        stores=4,
    ),
    Puzzle(
        10,
        "The gradient of a bias",
        holes.dbias,
        holes.dbias_spec,
        ("sums",),
        dbias_cases,
        STRIPS,
        one_reader=("dy",),
    ),
)

#: name -> `Puzzle`, in order.
PUZZLES = {puzzle.name: puzzle for puzzle in _ROWS}
