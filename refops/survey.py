"""What each scaling does to a tensor: signal to noise, what is lost below and above, bits per element.

The measurements behind `refops inspect` and the last section of `refops report`, and the table of scalings that the
whole command line shares. Quantization itself is `refops.quantize`; nothing here recomputes a code or a scale. It
measures tensors, not models: a high SQNR says how well values are kept, not what a network makes of them.
"""

import fnmatch
import math
import statistics
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Protocol

import numpy as np

from refops.formats import encode
from refops.ops import DequantizedSource, quantize
from refops.quantization.dequantize import code_tile
from refops.quantization.hadamard import HadamardSource
from refops.quantization.quantize import check_shape, quantize_source
from refops.scalings import NAMED
from refops.tiles import InputSource, Matrix, ceil_div, cut, materialize, tensor_amax, tile_slices

#: The scalings that the command line shows, by name.
SCALINGS = NAMED
#: Rows that a partial sum of squares covers.
BAND = 128
#: Entry points of modules that are `Surveyor`s, and the elements beyond which one is loaded: what it compiles for a
#: scaling, once, takes the seconds in which NumPy measures about so many.
GROUP, WORTH_COMPILING = "refops.surveyors", 1 << 26
#: Elements of a larger tensor that are quantized at once.
AT_ONCE = 1 << 28


def match_names(patterns, names):
    """Return the `names` that match any of the glob `patterns`, in their own order; all of them without patterns.

    Raises:
        LookupError: a pattern that matches none; its argument is the pattern.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) or name == pattern for name in names):
            raise LookupError(pattern)
    return [n for n in names if not patterns or any(fnmatch.fnmatchcase(n, p) or n == p for p in patterns)]


@dataclass(frozen=True)
class Measurement:
    """What one scaling does to one tensor. Only finite elements of the tensor count.

    Attributes:
        scaling: name of the scaling.
        reason: why the scaling does not apply to the tensor's shape, or ""; the numbers are None then.
        sqnr_db: 10 log10(sum x^2 / sum (x - xhat)^2) in dB: inf where every element is exact, -inf where a finite
            element became infinite or NaN; None if no element is finite.
        flushed: share of the non-zero elements that came back as zero, 0 to 1.
        saturated: share of the elements that the format's range cut off, 0 to 1 (see `saturates`).
        worst_relative_error: largest |x - xhat| / |x| over non-zero elements that were not flushed.
        bits_per_element: data bits, stored scales without padding, and 32 for each float32 amax or scale of the tensor
            or of a row.
    """

    scaling: str
    reason: str = ""
    sqnr_db: float | None = None
    flushed: float | None = None
    saturated: float | None = None
    worst_relative_error: float | None = None
    bits_per_element: float | None = None

    @property
    def exact(self):
        """Whether every finite element came back as it was."""
        return self.sqnr_db == math.inf

    def as_dict(self):
        """Plain data, with `exact` (JSON has no infinity: its `sqnr_db` is null then)."""
        return {**asdict(self), "exact": self.exact}


@dataclass(frozen=True)
class TensorFacts:
    """What can be said of a tensor before quantization.

    Attributes:
        shape, dtype: as given.
        elements: their number.
        non_finite: how many are NaN or infinite.
        zeros: how many are +-0.
        amax: largest finite magnitude.
        smallest: smallest non-zero magnitude, 0 if there is none.
    """

    shape: tuple[int, ...]
    dtype: str
    elements: int
    non_finite: int
    zeros: int
    amax: float
    smallest: float


# --- who measures -----------------------------------------------------------------------------------------------------


class Errors(NamedTuple):
    """How a tensor and its dequantized copy differ. Only finite elements of the tensor count.

    Attributes:
        signal, noise: float64 (M / 128 rounded up, K): x^2 and (x - xhat)^2, the 128 rows of a band added in order.
        worst: largest |x - xhat| / |x| over non-zero elements that were not flushed.
        finite, non_zero, flushed: how many elements are finite, are not zero besides, and came back as zero though.
        saturated, cast: how many elements the format's range cut off (see `saturates`), of how many finite ones.
    """

    signal: np.ndarray
    noise: np.ndarray
    worst: float
    finite: int
    non_zero: int
    flushed: int
    saturated: int
    cast: int


class Surveyor(Protocol):
    """What reads every element of a tensor. A package that does so faster than NumPy names a module of these functions
    as an entry point of the group `refops.surveyors`; its numbers must be `ArraySurveyor`'s, bit for bit."""

    def takes(self, scaling: Any) -> bool:
        """Whether `quantize` and `errors` may be called with a scaling."""

    def quantize(self, x: Any, scaling: Any) -> Any:
        """The rowwise `Quantized` of an array; ValueError as of `refops.quantize`."""

    def magnitudes(self, x: Any) -> tuple[int, int, float, float]:
        """(elements that are not finite, zeros, largest finite magnitude, smallest one that is not zero or 0)."""

    def errors(self, x: Any, q: Any) -> tuple:
        """The fields of `Errors` for an array and its rowwise `Quantized`."""


class ArraySurveyor:
    """The `Surveyor` that uses NumPy: it takes every scaling, and columnwise copies."""

    def takes(self, scaling):
        return True

    def quantize(self, x, scaling):
        return quantize(x, scaling)

    def magnitudes(self, x):
        matrix = Matrix(x)
        non_finite = zeros = 0
        amax, smallest = 0.0, math.inf
        for rows, columns in tile_slices(matrix.shape):
            magnitude = np.abs(matrix.read(rows, columns))
            finite = magnitude[np.isfinite(magnitude)]
            non_zero = finite[finite > 0]
            non_finite += magnitude.size - finite.size
            zeros += finite.size - non_zero.size
            if non_zero.size:
                amax, smallest = max(amax, float(non_zero.max())), min(smallest, float(non_zero.min()))
        return non_finite, zeros, amax, 0.0 if math.isinf(smallest) else smallest

    def errors(self, x, q):
        return _errors(InputSource(x), DequantizedSource(q), *_saturated(x, q))


ARRAYS = ArraySurveyor()


def installed_surveyor() -> Surveyor:
    """The first `Surveyor` of an installed package that can be imported, else `ARRAYS`."""
    for found in entry_points(group=GROUP):
        try:
            return found.load()
        except ImportError:  # the package is there, what it needs is not
            continue
    return ARRAYS


def lowest_sqnr(measurements):
    """The `Measurement` of a tensor with the lowest SQNR, or None where no scaling has one."""
    return min((m for m in measurements if m.sqnr_db is not None), key=lambda m: m.sqnr_db, default=None)


def spread(values):
    """(minimum, median, maximum) of numbers, of which the median is the lower of two; None without numbers."""
    numbers = sorted(value for value in values if value is not None)
    return (numbers[0], statistics.median_low(numbers), numbers[-1]) if numbers else None


class Meter:
    """Measures one tensor after the other: with NumPy, or with an installed package where that is worth compiling.

    Attributes:
        surveyor: who measures now; no number depends on it.
    """

    def __init__(self, elements=0):
        """`elements` are those of all tensors to come, as far as they are known."""
        self.surveyor, self._elements, self._chosen = ARRAYS, 0, False
        self._choose(elements)

    def facts(self, x):
        """`tensor_facts` of an array, the next one to be measured."""
        self._elements += x.size
        self._choose(self._elements)
        return tensor_facts(x, self.surveyor)

    def measure(self, x, named):
        """`measure` of an array under a `NamedScaling`."""
        return measure(x, named, self.surveyor)

    def _choose(self, elements):
        if not self._chosen and elements > WORTH_COMPILING:
            self.surveyor, self._chosen = installed_surveyor(), True


# --- measurements -----------------------------------------------------------------------------------------------------


def tensor_facts(x, surveyor=ARRAYS):
    """Return the `TensorFacts` of a float32, float16 or bfloat16 array of at least one dimension."""
    parts = [surveyor.magnitudes(part) for part in _parts_of(x)]
    non_finite, zeros, amaxes, smallest = zip(*parts, strict=True) if parts else ([], [], [0.0], [])
    least = min((one for one in smallest if one > 0), default=0.0)
    return TensorFacts(x.shape, x.dtype.name, x.size, sum(non_finite), sum(zeros), max(amaxes), least)


def measure(x, named, surveyor=ARRAYS):
    """Quantize `x` under one scaling and measure what came of it.

    Args:
        x: float32, float16 or bfloat16 array (..., K) with elements, or what has `shape`, `dtype`, `size` and, as
            `refops.checkpoints.Coded` does, its rows in parts.
        named: a `NamedScaling`.
        surveyor: the `Surveyor` that does it; no number depends on which.

    Returns:
        `Measurement`. Sums run in float64 over tiles: memory beyond `x` is that of the codes and 16 bytes for each
        column of a band of 128 rows. Of a tensor of more than `AT_ONCE` elements so many are quantized at a time,
        unless random bits or a Hadamard transform of columns depend on where they lie.
    """
    scaling, columnwise, shape = named.scaling, named.columnwise, (math.prod(x.shape[:-1]), x.shape[-1])
    try:
        if columnwise or not surveyor.takes(scaling):
            found = _errors_of_copy(np.asarray(x), scaling, columnwise)
        elif x.size <= AT_ONCE or scaling.random is not None:
            found = _errors_of_whole(np.asarray(x), scaling, surveyor)
        else:
            found = _errors_of_parts(x, shape, scaling, surveyor)
    except ValueError as error:
        return Measurement(named.name, reason=_short_reason(error))
    return _measured(named.name, stored_bits(scaling.layout, shape, columnwise) / x.size, found)


def _errors_of_copy(x, scaling, columnwise):
    """`Errors` of an array as the reference makes the copy of one direction."""
    return ARRAYS.errors(x, quantize(x, scaling, rowwise=not columnwise, columnwise=columnwise))


def _errors_of_whole(x, scaling, surveyor):
    """`Errors` of an array that is quantized at once."""
    return Errors(*surveyor.errors(x, surveyor.quantize(x, scaling)))


def _errors_of_parts(x, shape, scaling, surveyor):
    """`Errors` of a tensor of which some rows are quantized at a time, under the amax of all where there is one."""
    check_shape(scaling, x.shape, shape, False)
    if scaling.layout.amax == "tensor" and scaling.given is None:
        amax = np.max([tensor_amax(InputSource(part)) for part in _parts_of(x)]).astype(x.dtype).reshape(1, 1)
        parts = [
            surveyor.errors(part, quantize_source(InputSource(part), InputSource(amax), scaling, True, False))
            for part in _parts_of(x)
        ]
    else:
        parts = [surveyor.errors(part, surveyor.quantize(part, scaling)) for part in _parts_of(x)]
    signals, noises, worsts, *counts = zip(*parts, strict=True)
    return Errors(np.concatenate(signals), np.concatenate(noises), max(worsts), *map(sum, counts))


def _parts_of(x):
    """Yield the rows of a tensor as (rows, K) arrays of about `AT_ONCE` elements, whole bands each."""
    if x.size <= AT_ONCE:
        yield np.asarray(x)
        return
    matrix = x if hasattr(x, "rows") else Matrix(x)
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    for part in cut(m, max(BAND, AT_ONCE // max(k, 1) // BAND * BAND)):
        yield x.rows(part) if matrix is x else matrix.raw(part, slice(0, k))


def measure_quantized(x, q, name=""):
    """Measure what quantization made of a tensor: its rowwise copy, or the columnwise one where there is no other.

    Args:
        x: float32, float16 or bfloat16 array (..., K) with elements.
        q: `Quantized` of `x`.
        name: what the result calls the scaling.

    Returns:
        `Measurement`.
    """
    bits = stored_bits(q.scaling.layout, q.matrix_shape, q.rowwise_data is None)
    return _measured(name, bits / x.size, ARRAYS.errors(x, q))


def measure_cast(x, kept, name=""):
    """Measure what a cast to another dtype made of a tensor.

    Args:
        x: float32, float16 or bfloat16 array (..., K) with elements.
        kept: array of that shape, of the same or another of these dtypes.
        name: what the result calls the cast.

    Returns:
        `Measurement`; elements beyond the dtype's range became infinite, so none is `saturated`.
    """
    return _measured(name, 8.0 * kept.itemsize, _errors(InputSource(x), InputSource(kept), 0, 1))


def _measured(name, bits_per_element, errors):
    """The `Measurement` that `Errors` give."""
    share = errors.flushed / errors.non_zero if errors.non_zero else 0.0
    signal, noise = float(np.sum(errors.signal)), float(np.sum(errors.noise))
    return Measurement(
        name,
        sqnr_db=_decibels(signal, noise) if errors.finite else None,
        flushed=share if errors.finite else None,
        saturated=errors.saturated / errors.cast if errors.cast else None,
        worst_relative_error=errors.worst if errors.finite else None,
        bits_per_element=bits_per_element,
    )


def _short_reason(error):
    """The rule in an error of `quantize`, without what was got."""
    return str(error).split(" (")[0].split("; got")[0].replace("x must have", "needs")


@np.errstate(all="ignore")
def _errors(original, restored, saturated, cast):
    """The `Errors` of a tensor and its dequantized copy, both given as sources."""
    m, k = original.shape
    signal, noise = np.zeros((2, ceil_div(m, BAND), k))
    worst, finite_count, non_zero_count, flushed_count = 0.0, 0, 0, 0
    for rows, columns in tile_slices((m, k)):
        values, back = original.read(rows, columns), restored.read(rows, columns)
        finite = np.isfinite(values)
        a = np.where(finite, values, 0).astype(np.float64)
        error = np.where(np.isfinite(back), np.abs(a - back), np.inf)
        error[~finite] = 0
        bands = slice(rows.start // BAND, ceil_div(rows.stop, BAND))
        signal[bands, columns], noise[bands, columns] = _band_sums(a * a), _band_sums(error * error)
        non_zero = a != 0
        flushed = non_zero & (back == 0)
        ratios = np.divide(error, np.abs(a), out=np.zeros_like(a), where=non_zero & ~flushed)
        worst = max(worst, float(ratios.max(initial=0)))
        finite_count += int(np.count_nonzero(finite))
        non_zero_count += int(np.count_nonzero(non_zero))
        flushed_count += int(np.count_nonzero(flushed))
    return Errors(signal, noise, worst, finite_count, non_zero_count, flushed_count, saturated, cast)


def _band_sums(squares):
    """Sums of `BAND` rows at a time, one row after the other: float64 (R, C) to (R / BAND rounded up, C)."""
    total = np.zeros((ceil_div(len(squares), BAND), squares.shape[1]))
    for row in range(min(BAND, len(squares))):
        of_bands = squares[row::BAND]
        total[: len(of_bands)] += of_bands
    return total


def _decibels(signal, noise):
    """10 log10(signal / noise), infinite where there is no noise."""
    if noise == 0:
        return math.inf
    if signal == 0 or math.isinf(noise):
        return -math.inf
    return 10 * math.log10(signal / noise)


def saturates(values, restored, codes, fmt):
    """Which elements the format's range cut off, bool array.

    An element saturates when its code is the largest one and its magnitude lies more than half of the format's last
    step above the largest value that its scale can express (beyond 464/448 of it with E4M3, 61440/57344 with E5M2, 7/6
    with E2M1). Up to there the error is one of ordinary rounding. Non-finite elements do not count, nor does a block
    whose scale is zero: its elements are flushed.

    Args:
        values: float32 array, what was cast.
        restored: float32 array, the dequantized codes.
        codes: uint8 array of codes.
        fmt: their format.
    """
    half_step = (fmt.after_largest - fmt.grid[-1]) / 2
    largest = fmt.magnitude_code(codes) == fmt.largest_code
    # |values| > |restored| * (max + half_step) / max; both products are exact in float64.
    beyond = np.abs(values.astype(np.float64)) * fmt.grid[-1] > np.abs(restored.astype(np.float64)) * (
        fmt.grid[-1] + half_step
    )
    return largest & beyond & np.isfinite(values) & (restored != 0)


@np.errstate(all="ignore")
def _saturated(x, q):
    """(elements that saturate, finite elements); under RHT of the transformed elements, which are what is cast."""
    values, restored = cast_source(x, q), cast_dequantized_source(q)
    codes, fmt = element_codes(q), q.scaling.fmt
    count = finite_count = 0
    for rows, columns in tile_slices(values.shape):
        tile = values.read(rows, columns)
        finite_count += int(np.count_nonzero(np.isfinite(tile)))
        count += int(np.count_nonzero(saturates(tile, restored.read(rows, columns), codes[rows, columns], fmt)))
    return count, finite_count


# --- a Quantized, element by element ---------------------------------------------------------------------------------


def has_transform(q):
    """Whether `q`'s columnwise copy, the one to look at, went through the Hadamard transform."""
    return q.scaling.hadamard is not None and q.rowwise_data is None


def cast_source(x, q):
    """Source of what was cast to codes: `x`, or under RHT its transform, rounded to the dtype of `x`."""
    source = InputSource(x)
    return HadamardSource(source, q.scaling.hadamard) if has_transform(q) else source


def cast_dequantized_source(q):
    """Source of each code times its decode scale, any Hadamard transform left in place."""
    return DequantizedSource(q, undo_transform=False)


def decode_scale_source(q):
    """Source of what the value of each element's code is multiplied by, read off as what a code of 1 gives."""
    one = int(encode(np.float32([1]), q.scaling.fmt)[0])
    byte = sum(one << (8 // q.scaling.layout.packed * i) for i in range(q.scaling.layout.packed))
    field = "columnwise_data" if q.rowwise_data is None else "rowwise_data"
    data = getattr(q, field)
    return cast_dequantized_source(replace(q, **{field: np.broadcast_to(np.uint8(byte), data.shape)}))


def as_matrix(source):
    """The whole of a source as float32 (M, K)."""
    return materialize(source, np.float32).reshape(source.shape)


def element_codes(q):
    """uint8 (M, K): the code of each element, unpacked and in the tensor's orientation; rowwise if present."""
    m, k = q.matrix_shape
    return code_tile(q, slice(0, m), slice(0, k), q.rowwise_data is None)


def stored_bits(layout, shape, columnwise=False):
    """Bits of one direction: data, scales without padding, 32 for each float32 amax or scale of the tensor or a row.

    Args:
        layout: of the scaling. shape: (M, K).
    """
    bits = 8 * math.prod(shape) // layout.packed
    bits += 8 * layout.scale_dtype.itemsize * math.prod(layout.scale_counts(shape, columnwise))
    amaxes = layout.oriented(shape, columnwise)[0] if layout.amax == "rows" else 1
    return bits + (32 * amaxes if layout.two_level else 0)
