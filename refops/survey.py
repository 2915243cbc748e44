"""What each scaling does to a tensor: signal to noise, what is lost below and above, bits per element.

The measurements behind `refops inspect` and the last section of `refops report`, and the table of scalings that the
whole command line shares. Quantization itself is `refops.quantize`; nothing here recomputes a code or a scale. It
measures tensors, not models: a high SQNR says how well values are kept, not what a network makes of them.
"""

import fnmatch
import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from refops.formats import encode
from refops.ops import DequantizedSource, quantize
from refops.quantization.dequantize import code_tile
from refops.quantization.hadamard import HadamardSource
from refops.scalings import NAMED
from refops.tiles import InputSource, Matrix, materialize, tile_slices

#: The scalings that the command line shows, by name.
SCALINGS = NAMED


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


def tensor_facts(x):
    """Return the `TensorFacts` of a float32, float16 or bfloat16 array of at least one dimension."""
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
    return TensorFacts(
        x.shape, x.dtype.name, x.size, non_finite, zeros, amax, 0.0 if math.isinf(smallest) else smallest
    )


def measure(x, named):
    """Quantize `x` under one scaling and measure what came of it.

    Args:
        x: float32, float16 or bfloat16 array (..., K) with elements.
        named: a `NamedScaling`.

    Returns:
        `Measurement`. Sums run in float64 over tiles, so memory beyond `x` is that of the codes.
    """
    columnwise = named.columnwise
    try:
        q = quantize(x, named.scaling, rowwise=not columnwise, columnwise=columnwise)
    except ValueError as error:
        return Measurement(named.name, reason=_short_reason(error))
    return measure_quantized(x, q, named.name)


def measure_quantized(x, q, name=""):
    """Measure what quantization made of a tensor: its rowwise copy, or the columnwise one where there is no other.

    Args:
        x: float32, float16 or bfloat16 array (..., K) with elements.
        q: `Quantized` of `x`.
        name: what the result calls the scaling.

    Returns:
        `Measurement`.
    """
    return Measurement(
        name,
        saturated=_saturated_share(x, q),
        bits_per_element=stored_bits(q, q.rowwise_data is None) / x.size,
        **_errors(InputSource(x), DequantizedSource(q)),
    )


def measure_cast(x, kept, name=""):
    """Measure what a cast to another dtype made of a tensor.

    Args:
        x: float32, float16 or bfloat16 array (..., K) with elements.
        kept: array of that shape, of the same or another of these dtypes.
        name: what the result calls the cast.

    Returns:
        `Measurement`; elements beyond the dtype's range became infinite, so none is `saturated`.
    """
    errors = _errors(InputSource(x), InputSource(kept))
    return Measurement(name, saturated=0.0, bits_per_element=8.0 * kept.itemsize, **errors)


def _short_reason(error):
    """The rule in an error of `quantize`, without what was got."""
    return str(error).split(" (")[0].split("; got")[0].replace("x must have", "needs")


@np.errstate(all="ignore")
def _errors(original, restored):
    """SQNR, flushed share and worst relative error of a tensor and its dequantized copy, both given as sources."""
    signal = noise = worst = 0.0
    finite_count = non_zero_count = flushed_count = 0
    for rows, columns in tile_slices(original.shape):
        a = original.read(rows, columns).astype(np.float64)
        b = restored.read(rows, columns).astype(np.float64)
        finite = np.isfinite(a)
        a, b = a[finite], b[finite]
        error = np.where(np.isfinite(b), np.abs(a - b), np.inf)
        signal += float(np.sum(a * a))
        noise += float(np.sum(error * error))
        flushed = (a != 0) & (b == 0)
        kept = (a != 0) & ~flushed
        if kept.any():
            worst = max(worst, float(np.max(error[kept] / np.abs(a[kept]))))
        finite_count += a.size
        non_zero_count += int(np.count_nonzero(a))
        flushed_count += int(np.count_nonzero(flushed))
    return {
        "sqnr_db": _decibels(signal, noise) if finite_count else None,
        "flushed": flushed_count / non_zero_count if non_zero_count else 0.0 if finite_count else None,
        "worst_relative_error": worst if finite_count else None,
    }


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
def _saturated_share(x, q):
    """Share of the finite elements that saturate; under RHT of the transformed elements, which are what is cast."""
    values, restored = cast_source(x, q), cast_dequantized_source(q)
    codes, fmt = element_codes(q), q.scaling.fmt
    count = finite_count = 0
    for rows, columns in tile_slices(values.shape):
        tile = values.read(rows, columns)
        finite_count += int(np.count_nonzero(np.isfinite(tile)))
        count += int(np.count_nonzero(saturates(tile, restored.read(rows, columns), codes[rows, columns], fmt)))
    return count / finite_count if finite_count else None


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
    """Source of what the value of each element's code is multiplied with, read off as what a code of 1 gives."""
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


def stored_bits(q, columnwise=False):
    """Bits of one direction: data, scales without padding, 32 for each float32 amax or scale of the tensor or a row."""
    layout, prefix = q.scaling.layout, "columnwise" if columnwise else "rowwise"
    bits = 8 * getattr(q, f"{prefix}_data").nbytes
    bits += 8 * layout.scale_dtype.itemsize * math.prod(layout.scale_counts(q.matrix_shape, columnwise))
    return bits + (32 * getattr(q, f"amax_{prefix}").size if layout.two_level else 0)
