"""Arguments: tensors of every content and memory layout, settings, parameters, and values that are wrong."""

import datetime
import decimal
import fractions

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import refops
from refops.activations import ACTIVATIONS

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FP8 = (refops.E4M3, refops.E5M2)
FORMATS = tuple(refops.FORMATS.values())
SIZES = (0, 1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 48, 64, 96, 100, 127, 128, 129, 160, 256, 257)
#: Elements that a tensor of a case has at most.
MOST = 1 << 14

# --- tensors ----------------------------------------------------------------------------------------------------------


def shape(case, *, low=0, high=4, fits=None):
    """A shape: mostly two dimensions of sizes around the blocks, sometimes none, many, or empty."""
    ndim = case.choose([2, 2, 2, 2, 1, 3, 4, 0]) if low == 0 else max(low, case.choose([2, 2, 2, 1, 3, high]))
    while True:
        sizes = tuple(case.choose(SIZES) for _ in range(ndim))
        if fits is not None and case.chance(0.8):
            sizes = tuple(-(-size // fits) * fits for size in sizes)
        if np.prod(sizes, dtype=object) <= MOST:
            return sizes
        ndim = max(low, ndim - case.below(2)) or 1


def contents(case, sizes, dtype):
    """Values of one of several kinds: bell-shaped, heavy-tailed, all bit patterns, extremes, special values."""
    rng, kind = case.rng, case.below(9)
    dtype = np.dtype(dtype)
    if kind == 0:  # every bit pattern, NaNs of every payload
        return rng.integers(0, 256, (*sizes, dtype.itemsize), np.uint8).view(dtype).reshape(sizes)
    if kind == 1:
        values = np.ldexp(rng.standard_normal(sizes), rng.integers(-149, 128, sizes))
    elif kind == 2:
        values = rng.choice([0.0, -0.0, 1.0, -1.0, 448.0, 6.0, np.inf, -np.inf, np.nan, 1e-40, 3e38], sizes)
    elif kind == 3:
        values = np.full(sizes, rng.choice([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 65504.0, 1e-45, -3.4e38]))
    elif kind == 4:
        values = rng.standard_t(1.5, sizes)
    elif kind == 5:
        values = rng.integers(-16, 17, sizes) / 4
    elif kind == 6:
        values = rng.standard_normal(sizes) * 1e-41
    else:
        values = rng.standard_normal(sizes)
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float64).astype(np.float32).astype(dtype)


class Subclass(np.ndarray):
    """An array class of a user's."""


LAYOUTS = ("plain", "fortran", "strided", "reversed", "readonly", "misaligned", "subclass", "transposed", "offset")


def laid_out(case, x, layout=None):
    """The same values in another place: order, strides, alignment, writability or class of the array differ."""
    layout = layout or case.choose(LAYOUTS)
    x = np.asarray(x)
    if layout == "fortran":
        return np.asfortranarray(x).reshape(x.shape)
    if layout == "strided" and x.ndim:
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "reversed" and x.ndim:
        return np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    if layout == "readonly":
        x = np.array(x)
        x.flags.writeable = False
        return x
    if layout == "misaligned":
        buffer = np.zeros(x.nbytes + 1, np.uint8)
        placed = buffer[1:].view(x.dtype).reshape(x.shape) if x.nbytes else x
        placed[...] = x
        return placed
    if layout == "subclass":
        return x.view(Subclass)
    if layout == "transposed" and x.ndim > 1:
        return np.ascontiguousarray(np.moveaxis(x, -1, 0)).transpose(*range(1, x.ndim), 0)
    if layout == "offset":
        return np.concatenate([np.zeros(3, x.dtype), x.reshape(-1)])[3:].reshape(x.shape)
    return x


def overlapping(case, dtype):
    """A tensor whose rows share memory: windows of one vector, or one row or column broadcast."""
    n, k = case.choose([1, 4, 32, 33]), case.choose([16, 32, 64, 128])
    base = contents(case, (n + k,), dtype)
    how = case.below(3)
    if how == 0:
        return np.lib.stride_tricks.sliding_window_view(base, k)[:n]
    return np.broadcast_to(base[:k], (n, k)) if how == 1 else np.broadcast_to(base[:n, None], (n, k))


def tensor(case, sizes=None, dtype=None, *, low=1, fits=None):
    """A high-precision tensor of any content and layout."""
    dtype = dtype or case.choose(FLOAT_DTYPES)
    if sizes is None and case.chance(0.06):
        return overlapping(case, dtype)
    return laid_out(case, contents(case, shape(case, low=low, fits=fits) if sizes is None else sizes, dtype))


def plain(x):
    """A contiguous copy without subclass."""
    return np.array(x, order="C", subok=False)


# --- settings ---------------------------------------------------------------------------------------------------------

FLAGS = st.booleans()
NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1.0, 2.0**-149, 2.0**-126, 3.4028235e38, 1e300, 1, 7, -1, 2**70, True]),
)
POSITIVE = st.floats(2.0**-20, 2.0**20, width=32)
SEEDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**63, 2**64 - 1]))

SCALINGS = st.one_of(
    st.builds(refops.DelayedScaling, st.sampled_from(FP8), POSITIVE),
    st.builds(refops.CurrentScaling, st.sampled_from(FP8), FLAGS, st.sampled_from([0.0, 1e-3, 3.0])),
    st.builds(refops.BlockScaling, st.sampled_from(FP8), st.sampled_from([1, 2]), FLAGS, st.sampled_from([0.0, 1e-3])),
    st.builds(
        refops.MXFP8Scaling,
        st.sampled_from([refops.E4M3, refops.E5M2, refops.E3M2, refops.E2M3]),
        FLAGS,
        st.sampled_from(["up", "floor", "even", "ceil_ocp"]),
    ),
    st.builds(refops.NVFP4Scaling, two_d=FLAGS, stochastic_rounding=FLAGS, seed=SEEDS, offset=SEEDS),
    st.builds(refops.NVFP4Scaling, rht=st.just(True), sign_mask=st.integers(0, 0xFFFF), stochastic_rounding=FLAGS),
    st.builds(
        refops.NVFP4Scaling,
        two_d=FLAGS,
        four_over_six=st.sampled_from(["mae", "mse"]),
        e4m3_max=st.sampled_from([448, 256]),
        fast_error=FLAGS,
    ),
    st.builds(refops.NVFP4Scaling, row_scaled=st.just(True), four_over_six=st.sampled_from([None, "mae", "mse"])),
)


def fits_of(scaling):
    """The numbers that must divide a tensor's sizes for every operation to take it, more or less."""
    if isinstance(scaling, refops.NVFP4Scaling):
        return 32 if scaling.row_scaled else 16
    return 32 if isinstance(scaling, refops.MXFP8Scaling) else None


def activation_name(case):
    """A name of an activation."""
    return case.choose(tuple(ACTIVATIONS))


def parameters(case, name):
    """Keyword parameters that an activation takes, some of them; values within what it allows, mostly."""
    chosen = {}
    for parameter in ACTIVATIONS[name].parameters:
        if case.chance(0.4):
            chosen[parameter] = case.draw(NUMBERS if case.chance(0.2) else POSITIVE)
    return chosen


def directions(case):
    """Which copies to make."""
    return case.choose([{}, {}, {"columnwise": True}, {"rowwise": False, "columnwise": True}])


# --- wrong values -----------------------------------------------------------------------------------------------------


def wrong(case):
    """A value that no argument is meant for (some are right for some arguments)."""
    makers = (
        lambda: None,
        lambda: "",
        lambda: "e4m3",
        lambda: "\x00\u202e\ud800",
        lambda: b"bytes",
        lambda: float("nan"),
        lambda: -1,
        lambda: 10**400,
        lambda: -(2**63),
        lambda: 1 + 2j,
        lambda: decimal.Decimal("1.5"),
        lambda: fractions.Fraction(1, 3),
        lambda: datetime.date(2020, 1, 1),
        lambda: object(),
        lambda: [],
        lambda: [[1.0, 2.0], [3.0]],
        lambda: {"a": 1},
        lambda: {1, 2},
        lambda: (x for x in ()),
        lambda: int,
        lambda: len,
        lambda: slice(None),
        lambda: Ellipsis,
        lambda: np.float64(1.0),
        lambda: np.zeros((4, 32), np.float64),
        lambda: np.zeros((4, 32), complex),
        lambda: np.zeros((4, 32), bool),
        lambda: np.zeros((4, 32), np.int64),
        lambda: np.zeros((4, 32), object),
        lambda: np.zeros((4, 32), "U3"),
        lambda: np.zeros((4, 32), "M8[s]"),
        lambda: np.zeros((4, 32), [("a", "f4"), ("b", "f2")]),
        lambda: np.zeros((4, 32), ">f4"),
        lambda: np.zeros((4, 32), ">f2"),
        lambda: np.zeros((4, 32), np.longdouble),
        lambda: np.zeros((4, 32), ml_dtypes.float8_e4m3fn),
        lambda: np.zeros((4, 32), ml_dtypes.float4_e2m1fn),
        lambda: np.zeros((4, 32), ml_dtypes.int4),
        lambda: np.zeros((4, 32), "V2"),
        lambda: np.ma.masked_array(np.zeros((4, 32), np.float32), True),
        lambda: np.zeros((), np.float32),
        lambda: np.zeros((0,), np.float32),
        lambda: np.zeros((0, 0), np.uint8),
        lambda: np.zeros((1,) * 64, np.float32),
        lambda: np.zeros((3, 5, 7), np.float16),
        lambda: np.full((2, 16), 255, np.uint8),
        lambda: refops.E8M0,
        lambda: refops.E4M3,
        lambda: refops.MXFP8Scaling(refops.E4M3),
        lambda: Raises(),
    )
    return case.choose(makers)()


class Raises:
    """An object whose conversions fail in a way of their own."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("no array today")

    def __repr__(self):
        return "Raises()"


def spoiled(case, arguments, probability=0.25):
    """`arguments` (name -> value), with this probability one of them wrong."""
    if arguments and case.chance(probability):
        return {**arguments, case.choose(list(arguments)): wrong(case)}
    return arguments
