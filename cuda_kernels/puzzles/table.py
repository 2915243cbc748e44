"""The puzzles: on which inputs each kernel runs, with which threads, and what its wrong answers mean.

The kernels with their holes, and what they must compute, are in `holes`; here stands how that is checked.
"""

import inspect
import math
import re
from dataclasses import dataclass, field

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
    """

    what: str
    arrays: dict
    sizes: dict


@dataclass(frozen=True)
class Puzzle:
    """How a kernel is checked.

    Attributes:
        number, name, title: of the puzzle; `name` is the kernel's.
        spec: function of the case's arrays: what must come out, an array or a tuple of them.
        outputs: names of the arguments that the kernel writes.
        cases: function that returns the inputs; the first is the one whose accesses are drawn and judged, and on it
            every thread has an element.
        shape: function of the sizes: (grid, block).
        judge: function(arrays, got: name -> array) -> `refops.oracle.Report`; None: the spec's bits.
        wrong: what a wrong answer means -> function of the case's arrays that gives it.
        sectors: most sectors that one step may touch, for each array whose accesses are judged.
        stores: most elements of one output that a thread may store.
    """

    number: int
    name: str
    title: str
    spec: object
    outputs: tuple
    cases: object
    shape: object
    judge: object = None
    wrong: dict = field(default_factory=dict)
    sectors: dict | None = None
    stores: int = 1

    @property
    def arguments(self):
        """Names of the kernel's arguments, in order."""
        return tuple(inspect.signature(getattr(holes, self.name)).parameters)

    def expected(self, case):
        """Name of an output -> what must be in it."""
        with np.errstate(all="ignore"):
            found = self.spec(**case.arrays)
        return dict(zip(self.outputs, found if isinstance(found, tuple) else (found,), strict=True))


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


def flat_case(what, count, **arrays):
    """A case of a kernel that only knows how many elements there are."""
    return Case(what, arrays, {"count": count})


def matrix_case(what, rows, columns, **arrays):
    """A case of a kernel that knows rows and columns."""
    return Case(what, arrays, {"rows": rows, "columns": columns})


def of_length(what, x, name="x"):
    """`flat_case` with one thread for each element of an array."""
    return flat_case(what, x.size, **{name: x})


def add_bias_cases():
    bias = random(60, seed=2)
    yield matrix_case("8 x 32, one block of threads", 8, 32, x=random(8, 32), bias=bias[:32])
    yield matrix_case("5 x 60, 300 elements for 512 threads", 5, 60, x=random(5, 60), bias=bias)
    yield matrix_case("5 x 60 with infinities and NaN", 5, 60, x=special(5, 60), bias=bias)


def widen_bf16_cases():
    yield of_length("256 elements", random(256, dtype=BF16))
    yield of_length("300 elements of every kind", special(300, dtype=BF16))


def swiglu_cases():
    for what, rows, columns, make in (
        ("4 rows of 64 + 64", 4, 64, random),
        ("5 rows of 60 + 60", 5, 60, random),
        ("5 rows of 60 + 60 with infinities and NaN", 5, 60, special),
    ):
        yield matrix_case(what, rows, columns, x=make(rows, 2 * columns, dtype=BF16))


def absolute_cases():
    yield of_length("1024 elements, two blocks of threads", random(1024, dtype=BF16))
    yield of_length("1000 elements of every kind", special(1000, dtype=BF16))


def block_amax_cases():
    yield of_length("256 elements, 8 blocks", random(256))
    yield of_length("300 elements, the last block has 12", random(300))
    yield of_length("300 elements of every kind but NaN", special(300, nan=False))


def scale_byte_cases():
    powers = F(448) * F(2) ** np.arange(-128, 120, dtype=F)
    ends = np.array([0, 1e-45, 1e-36, 448, 449, 447, 3.4e38, np.inf], F)
    yield of_length("256 maxima", np.abs(random(256)) * 100, "amax")
    yield of_length("448 times each power of two, and the ends", np.concatenate([powers, ends]), "amax")


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
        yield flat_case(what, x.size // 2, x=x, multiplier=multiplier)


def transpose_cases():
    for what, rows, columns in (("64 x 64", 64, 64), ("40 x 72, ragged both ways", 40, 72), ("1 x 33", 1, 33)):
        codes = np.random.default_rng(3).integers(0, 256, (rows, columns)).astype(np.uint8)
        yield matrix_case(what, rows, columns, x=codes)


def dbias_cases():
    for what, rows, columns in (("64 x 64", 64, 64), ("70 x 40, ragged both ways", 70, 40), ("5 x 33", 5, 33)):
        dy = np.random.default_rng(4).integers(-16, 17, (rows, columns)) / 4  # every order of adding is exact
        yield matrix_case(what, rows, columns, dy=dy.astype(BF16))


# --- threads ----------------------------------------------------------------------------------------


def one_thread_each(sizes):
    """Blocks of 256 threads, one thread for each element of the output."""
    return (math.ceil(math.prod(sizes.values()) / 256),), (256,)


def eight_each(sizes):
    """Blocks of 64 threads with 512 elements."""
    return (math.ceil(sizes["count"] / 512),), (64,)


def tiles(sizes):
    """Blocks of 32 x 8 threads for tiles of 32 x 32."""
    return (math.ceil(sizes["columns"] / 32), math.ceil(sizes["rows"] / 32)), (32, 8)


def strips(sizes):
    """Blocks of 32 x 8 threads for 32 columns."""
    return (math.ceil(sizes["columns"] / 32),), (32, 8)


# --- judges -----------------------------------------------------------------------------------------


def judge_swiglu(arrays, got):
    return oracle.check("swiglu", arrays["x"], {"y": got["y"]})


def judge_scale_byte(arrays, got):
    blocks = np.zeros((len(arrays["amax"]), 32), F)
    blocks[:, 0] = arrays["amax"]
    return oracle.check("quantize", blocks, {"scale": got["scale"][:, None]}, scaling=MXFP8)


def judge_mxfp8(arrays, got):
    return oracle.check("quantize", arrays["x"], {"data": got["codes"], "scale": got["scales"]}, scaling=MXFP8)


def judge_pack_fp4(arrays, got):
    q = refops.quantize(arrays["x"], NVFP4)
    outputs = {"data": got["codes"], "scale": q.rowwise_scale_inv, "amax": q.amax_rowwise}
    return oracle.check("quantize", arrays["x"], outputs, scaling=NVFP4)


# --- known wrong answers ----------------------------------------------------------------------------


def amax_without(distance):
    """`block_amax` where one of the five steps is missing: what the first thread of each warp then knows."""

    def answer(x):
        blocks = np.pad(np.abs(x), (0, -len(x) % 32)).reshape(-1, 32)
        return blocks[:, (np.arange(32) & distance) == 0].max(axis=1)

    return answer


def signed_maximum(x):
    return np.pad(x, (0, -len(x) % 32)).reshape(-1, 32).max(axis=1)


def block_sum(x):
    """What five shuffles with + leave in the first thread of each warp, added in that order."""
    sums = np.pad(np.abs(x), (0, -len(x) % 32)).reshape(-1, 32)
    for distance in (16, 8, 4, 2, 1):
        sums = sums + sums[:, np.arange(32) ^ distance]
    return sums[:, 0]


def rows_too_short(x):
    """`swiglu` where a row of x is taken to be as long as one of y."""
    columns = x.shape[1] // 2
    first = columns * np.arange(len(x))[:, None] + np.arange(columns)
    flat = x.reshape(-1)
    return refops.activation("swiglu", np.concatenate([flat[first], flat[first + columns]], axis=1))


def exponent_and(more):
    """`scale_byte` where the exponent takes so many more whatever the mantissa is."""

    def answer(amax):
        bits = (amax * holes.INVERSE_448).view(np.uint32)
        return np.where(bits <= 0x400000, 0, np.minimum((bits >> 23) + more, 254)).astype(np.uint8)

    return answer


def unscaled_mxfp8(x):
    return refops.encode(x, refops.E4M3), holes.mxfp8_spec(x)[1]


def one_over_the_other(x, multiplier):
    codes = holes.pack_fp4_spec(x, multiplier)
    return codes & 15 | codes >> 4


def both_moved(x, multiplier):
    codes = holes.pack_fp4_spec(x, multiplier)
    return (codes & 15) + (codes >> 4) << 4


def tiles_not_turned(x):
    """`transpose` where a tile goes to its place as it is."""
    rows, columns = x.shape
    padded = np.pad(x, ((0, -rows % 32), (0, -columns % 32)))
    tiles = padded.reshape(len(padded) // 32, 32, -1, 32)
    return tiles.transpose(2, 1, 0, 3).reshape(padded.shape[::-1])[:columns, :rows]


WRONG = {
    "add_bias": {
        "The bias is not added.": lambda x, bias: x + 0 * bias,
        "Each element gets the bias of its row's number: the column is i % columns.": lambda x, bias: (
            x + np.resize(bias, len(x))[:, None]
        ),
    },
    "widen_bf16": {
        "The bits were read as a whole number and that was converted.": lambda x: x.view(np.uint16).astype(F),
        "All bits are gone: a uint16 shifted by 16 is 0. Make it a uint32 first.": lambda x: np.zeros(x.shape, F),
        "The bits are in the lower half: they must move up by 16.": lambda x: (
            x.view(np.uint16).astype(np.uint32).view(F)
        ),
        "The bits were read as float16.": lambda x: x.view(np.float16).astype(F),
    },
    "swiglu": {
        "A row of x has 2 * columns elements: act and gate of row r start at r * 2 * columns.": rows_too_short,
    },
    "block_amax": {
        "The shuffled values are added; the rule asks for the larger of two.": block_sum,
        "The sign still counts: magnitudes are compared.": signed_maximum,
        **{f"The step of distance {d} is missing.": amax_without(d) for d in (16, 8, 4, 2, 1)},
        "Each thread still knows its own element only.": lambda x: np.abs(x[::32]),
    },
    "scale_byte": {
        "The exponent is rounded down: it takes one more unless the mantissa is zero.": exponent_and(0),
        "A mantissa of zero needs no more: that power of two is the scale itself.": exponent_and(1),
    },
    "mxfp8": {"The elements are cast as they are, without 2^(127 - byte).": unscaled_mxfp8},
    "pack_fp4": {
        "The second code must move up by four bits.": one_over_the_other,
        "Both codes moved up by four bits: + binds tighter than <<, | does not.": both_moved,
    },
    "transpose": {
        "The codes are copied, not transposed.": lambda x: x.reshape(x.shape[::-1]),
        "The tiles are in their places, but not turned: the tile is read with its indices the other way round.": (
            tiles_not_turned
        ),
    },
    "dbias": {
        "Only the rows of the threads with ty == 0 are counted: the other partial sums are missing.": lambda dy: (
            dy[::8].astype(F).sum(axis=0)
        ),
        "The part of the thread with ty == 0 is counted twice: it is in `total` and in `partial[0, tx]`.": lambda dy: (
            dy.astype(F).sum(axis=0) + dy[::8].astype(F).sum(axis=0)
        ),
        "The sums run along the rows.": lambda dy: np.resize(dy.astype(F).sum(axis=1), dy.shape[1]),
    },
}


# --- the table --------------------------------------------------------------------------------------


def _puzzles():
    titles = re.findall(r"^# --- (\d+)\. (.*?) -+$", inspect.getsource(holes), re.MULTILINE)
    rows = (
        ("add_bias", ("y",), add_bias_cases, one_thread_each, {}),
        ("widen_bf16", ("y",), widen_bf16_cases, one_thread_each, {}),
        ("swiglu", ("y",), swiglu_cases, one_thread_each, {"judge": judge_swiglu}),
        ("absolute", ("y",), absolute_cases, eight_each, {"sectors": {"x": 2, "y": 2}, "stores": 8}),
        ("block_amax", ("amax",), block_amax_cases, one_thread_each, {}),
        ("scale_byte", ("scale",), scale_byte_cases, one_thread_each, {"judge": judge_scale_byte}),
        ("mxfp8", ("codes", "scales"), mxfp8_cases, one_thread_each, {"judge": judge_mxfp8}),
        ("pack_fp4", ("codes",), pack_fp4_cases, one_thread_each, {"judge": judge_pack_fp4}),
        ("transpose", ("y",), transpose_cases, tiles, {"sectors": {"x": 1, "y": 1}, "stores": 4}),
        ("dbias", ("sums",), dbias_cases, strips, {}),
    )
    for (number, title), (name, outputs, cases, shape, more) in zip(titles, rows, strict=True):
        spec, wrong = getattr(holes, f"{name}_spec"), WRONG.get(name, {})
        yield name, Puzzle(int(number), name, title, spec, outputs, cases, shape, wrong=wrong, **more)


#: name -> `Puzzle`, in order.
PUZZLES = dict(_puzzles())
