"""The number formats E4M3, E5M2, E2M1, E8M0, UE5M3 (and FP6, INT8), and the two maps between them and float32.

A code is the integer that a format stores. `decode` reads a code's value from a table that follows the definition of
the format; `encode` finds the code of the nearest value. `ElementFormat` is what others may ask of a format. Sources:
OCP 8-bit Floating Point Specification (OFP8) 1.0 for E4M3 and E5M2, OCP Microscaling Formats (MX) 1.0 for E8M0, FP6,
FP4 and INT8, and the CUDA headers `cuda_fp8.hpp` and `cuda_fp4.hpp` for what happens to NaN, infinities and -0.

Rules of `encode` (each is what NVIDIA's `cvt.*.satfinite` does):
    NaN   -> the format's canonical NaN (E4M3 and E5M2 0x7F, E8M0 and UE5M3 0xFF); floats without NaN give +max,
             integers 0.
    inf   -> the largest finite value with its sign (`saturate=True`), else inf, or NaN where the format has no inf.
    -0.0  -> keeps its sign; so does a negative value that rounds to zero. Integers have one zero.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refops.arguments import (
    as_array,
    as_codes_hint,
    describe_array,
    did_you_mean,
    require_choice,
    require_flag,
    require_high_precision,
    require_integer,
    shown,
)
from refops.hints import ArrayLike
from refops.rounding import (
    ROUNDING_MODES,
    STOCHASTIC,
    floor_in,
    round_to_grid,
    round_to_grid_stochastic,
)
from refops.tiles import Matrix, for_each, tile_slices


class ElementFormat:
    """What a format of codes is to those that cast, decode, compile and judge: `FloatFormat` or `IntegerFormat`.

    Magnitudes are those of a small float, or the like of one: the finite ones in ascending order are the `grid`, and
    the index there is the magnitude's code. How a code carries the sign is the format's own: `signed_code`.

    Attributes:
        name: lower-case name, for example "e4m3".
        bits: width of a code.
        fields: widths of a code's fields by name, the highest first.
        exponent_bits, mantissa_bits, bias: of the magnitudes.
        largest_code: code of the largest finite magnitude.
        infinity_code: code of +inf, or None.
        nan_code: canonical NaN code, or None: the format has no NaN.
        code_of_nan: what NaN is cast to.
        signed: whether there are negative values.
        twos_complement: whether a negative value's code is the complement of its magnitude's: one zero.
        has_subnormals: whether exponent field 0 means zero and subnormals (E8M0: no, it is 2^-127).
        fraction_bits: codes read as integers are 2^fraction_bits times their value; 0 for floats.
        key_bits: how many of a float32's highest bits decide its code, if the last one is set where others are lost.
    """

    name: str
    bits: Any
    fields: Any
    exponent_bits: Any
    mantissa_bits: Any
    bias: Any
    largest_code: Any
    infinity_code: Any = None
    nan_code: Any = None
    code_of_nan: Any
    signed: bool = True
    twos_complement: bool = False
    has_subnormals: bool = True
    fraction_bits: Any = 0
    key_bits: int = 16

    def signed_code(self, magnitude: Any, negative: Any) -> Any:
        """The uint8 codes of magnitudes (codes without sign), given which are negative."""
        raise NotImplementedError

    def magnitude_code(self, code: Any) -> Any:
        """The codes of |value|, NaN codes among them: no more than `largest_code` where `signed_code` made the code."""
        raise NotImplementedError

    @property
    def values(self) -> NDArray[np.float32]:
        """Value of every code, float32 (2**bits,), with NaN and inf where the format has them."""
        raise NotImplementedError

    def __repr__(self):
        return self.name.upper()

    @property
    def max(self) -> np.float32:
        """Largest finite value, np.float32."""
        return np.float32(self.grid[-1])

    @property
    def smallest_normal(self) -> np.float32:
        """Smallest positive value with a full mantissa, np.float32."""
        return np.float32(2.0 ** (self.has_subnormals - self.bias))

    @property
    def smallest_subnormal(self) -> np.float32:
        """Smallest positive value, np.float32."""
        return np.float32(self.grid[1] if self.has_subnormals else self.grid[0])

    @cached_property
    def grid(self) -> NDArray[np.float64]:
        """Finite magnitudes in ascending order, float64; the index is the code without its sign."""
        grid = self._magnitudes(np.arange(self.largest_code + 1))
        grid.flags.writeable = False
        return grid

    @property
    def after_largest(self) -> np.float64:
        """The magnitude that the next code would have, np.float64: a value that rounds to it or beyond overflows."""
        return self._magnitudes(np.array([self.largest_code + 1]))[0]

    def _magnitudes(self, code):
        """The values of codes without sign, by the definition, float64."""
        exponent = code >> self.mantissa_bits
        fraction = (code & ((1 << self.mantissa_bits) - 1)) / 2.0**self.mantissa_bits
        values = (1 + fraction) * 2.0 ** (exponent - self.bias)
        if self.has_subnormals:
            values = np.where(exponent == 0, fraction * 2.0 ** (1 - self.bias), values)
        return values


@dataclass(frozen=True, repr=False)
class FloatFormat(ElementFormat):
    """One small floating-point format: sign, exponent and mantissa.

    Attributes:
        name: lower-case name, for example "e4m3".
        exponent_bits, mantissa_bits: field widths.
        bias: exponent bias.
        largest_code: code of the largest finite magnitude.
        infinity_code: code of +inf, or None.
        nan_code: canonical NaN code, or None: the format has no NaN.
        signed: whether a sign bit stands above the exponent.
        has_subnormals: whether exponent field 0 means zero and subnormals (E8M0: no, it is 2^-127).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int
    infinity_code: int | None = None
    nan_code: int | None = None
    signed: bool = True
    has_subnormals: bool = True

    def __post_init__(self):
        self._check_fields()
        if self.bits > 8:
            raise ValueError(f"a format must have at most 8 bits; got {self.bits} bits in {self.name!r}")
        self._check_points()

    def _check_fields(self):
        """Raise unless each field alone has a value of its kind, and codes fit the widths."""
        _require_name(self.name)
        require_flag(self.signed, "signed")
        require_flag(self.has_subnormals, "has_subnormals")
        for field, high in (("exponent_bits", 9), ("mantissa_bits", 8), ("bias", 256)):
            require_integer(getattr(self, field), field, low=-256 if field == "bias" else 0, high=high)
        codes = 1 << (self.exponent_bits + self.mantissa_bits)
        require_integer(self.largest_code, "largest_code", low=1, high=codes)
        for field in ("infinity_code", "nan_code"):
            if getattr(self, field) is not None:
                code = require_integer(getattr(self, field), field, low=0, high=codes)
                if code <= self.largest_code:
                    raise ValueError(
                        f"{field} must be above largest_code, {self.largest_code:#x}, up to which codes are numbers; "
                        f"got {code:#x}"
                    )
        if self.nan_code is not None and self.nan_code == self.infinity_code:
            raise ValueError(f"nan_code must differ from infinity_code; got {self.nan_code} for both")

    def _check_points(self):
        """Raise unless `key_bits` bits of a float32 tell on which side of each value and midpoint it lies."""
        extended = np.append(self.grid, self.after_largest)
        points = np.concatenate([self.grid, (extended[1:] + extended[:-1]) / 2])
        with np.errstate(all="ignore"):
            single = points.astype(np.float32)
        if (single != points).any() or (single.view(np.uint32) & ((1 << (33 - self.key_bits)) - 1)).any():
            raise ValueError(
                f"values and midpoints of a format must be bfloat16 numbers with an even last bit for encode to be "
                f"exact (up to 5 mantissa bits, inside bfloat16's range); got {self.bits} bits in {self.name!r}, "
                f"mantissa_bits={self.mantissa_bits}, bias={self.bias}"
            )

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def fields(self) -> dict[str, int]:
        """Widths of sign, exponent and mantissa."""
        return {"sign": int(self.signed), "exponent": self.exponent_bits, "mantissa": self.mantissa_bits}

    @property
    def code_of_nan(self) -> int:
        """NaN, or the largest value where the format has none."""
        return self.largest_code if self.nan_code is None else self.nan_code

    def signed_code(self, magnitude: Any, negative: Any) -> Any:
        """Codes with their sign bit, if there is one."""
        magnitude = np.asarray(magnitude).astype(np.uint8)
        return magnitude | np.asarray(negative, np.uint8) << np.uint8(self.bits - 1) if self.signed else magnitude

    def magnitude_code(self, code: Any) -> Any:
        """Codes without their sign bit."""
        return code & np.uint8((1 << (self.bits - self.signed)) - 1)

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Value of every code, float32 (2**bits,), with NaN and inf where the format has them."""
        magnitudes = np.full(1 << (self.bits - self.signed), np.nan)
        magnitudes[: self.largest_code + 1] = self.grid
        if self.infinity_code is not None:
            magnitudes[self.infinity_code] = np.inf
        values = np.concatenate([magnitudes, -magnitudes]) if self.signed else magnitudes
        values = values.astype(np.float32)
        values.flags.writeable = False
        return values


@dataclass(frozen=True, repr=False)
class IntegerFormat(ElementFormat):
    """Integers in two's complement, times 2^-fraction_bits. Their magnitudes are a float's with one exponent bit.

    The least code, which has no positive counterpart, is decoded, but no cast gives it. NaN is cast to 0.

    Attributes:
        name: lower-case name, for example "int8".
        bits: width of a code, 3 to 8.
        fraction_bits: codes are 2^fraction_bits times their value.
    """

    name: str
    bits: int
    fraction_bits: int = 0

    exponent_bits = 1
    code_of_nan = 0
    twos_complement = True
    key_bits = 17

    def __post_init__(self):
        _require_name(self.name)
        require_integer(self.bits, "bits", low=3, high=9)
        require_integer(self.fraction_bits, "fraction_bits", low=0, high=self.bits + 1)

    @property
    def fields(self) -> dict[str, int]:
        """Widths of the integer, sign included, and of the fraction."""
        return {"integer": self.bits - self.fraction_bits, "fraction": self.fraction_bits}

    @property
    def mantissa_bits(self) -> int:
        """Bits below the highest one of the largest magnitude."""
        return self.bits - 2

    @property
    def bias(self) -> int:
        """The bias of the exponent bit, which magnitudes from 2^(1 - bias) on have set."""
        return 1 + self.fraction_bits - self.mantissa_bits

    @property
    def largest_code(self) -> int:
        """The largest integer."""
        return (1 << (self.bits - 1)) - 1

    def signed_code(self, magnitude: Any, negative: Any) -> Any:
        """The integers, in two's complement."""
        magnitude = np.asarray(magnitude).astype(np.uint8)
        return np.where(negative, np.uint8(0) - magnitude, magnitude) & np.uint8((1 << self.bits) - 1)

    def magnitude_code(self, code: Any) -> Any:
        """The integers without their sign."""
        code = np.asarray(code).astype(np.uint8)
        return np.where(code > self.largest_code, np.uint8(0) - code, code) & np.uint8((1 << self.bits) - 1)

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Value of every code, float32 (2**bits,)."""
        codes = np.arange(1 << self.bits)
        integers = np.where(codes > self.largest_code, codes - (1 << self.bits), codes)
        values = (integers * 2.0**-self.fraction_bits).astype(np.float32)
        values.flags.writeable = False
        return values


def _require_name(name):
    if not isinstance(name, str):
        raise TypeError(f"name must be a string; got {shown(name)}")


E4M3 = FloatFormat("e4m3", 4, 3, bias=7, largest_code=0x7E, nan_code=0x7F)
E5M2 = FloatFormat("e5m2", 5, 2, bias=15, largest_code=0x7B, infinity_code=0x7C, nan_code=0x7F)
E2M1 = FloatFormat("e2m1", 2, 1, bias=1, largest_code=0x7)
E8M0 = FloatFormat("e8m0", 8, 0, bias=127, largest_code=0xFE, nan_code=0xFF, signed=False, has_subnormals=False)
E3M2 = FloatFormat("e3m2", 3, 2, bias=3, largest_code=0x1F)
E2M3 = FloatFormat("e2m3", 2, 3, bias=1, largest_code=0x1F)
#: For scales alone. Sources: CUDA 13.5 `cuda_fp8.hpp`, PTX ISA 9.4 (cvt.*.ue5m3x2).
UE5M3 = FloatFormat("ue5m3", 5, 3, bias=15, largest_code=0xFE, nan_code=0xFF, signed=False)
INT8 = IntegerFormat("int8", 8, fraction_bits=6)

#: Every format by name.
FORMATS: dict[str, ElementFormat] = {fmt.name: fmt for fmt in (E4M3, E5M2, E2M1, E8M0, E3M2, E2M3, UE5M3, INT8)}


def encode(
    x: ArrayLike,
    fmt: ElementFormat,
    *,
    saturate: bool = True,
    rounding: str = "nearest_even",
    random_bits: ArrayLike | None = None,
) -> NDArray[np.uint8]:
    """Return the codes of `x` in `fmt`.

    Args:
        x: float32, float16 or bfloat16 array of any shape.
        fmt: a `FloatFormat` or `IntegerFormat`. E8M0 and UE5M3 have no sign: they encode |x|. In E8M0 magnitudes below
            2^-127 give code 0.
        saturate: clamp overflow to the largest finite value; otherwise overflow gives inf, or NaN where `fmt` has no
            inf, or the largest value where it has neither.
        rounding: "nearest_even", "nearest_away", "toward_zero", "up", "down" or "stochastic".
        random_bits: uint8 array of the shape of `x`, eight random bits an element; with "stochastic" only.

    Returns:
        uint8 array of the shape of `x`; codes narrower than 8 bits stand in the low bits (see `pack_fp4`).

    Raises:
        TypeError: `x` is not float32, float16 or bfloat16; `fmt` is no format; `random_bits` is not uint8.
        ValueError: unknown `rounding`; `random_bits` missing, superfluous or of another shape.
    """
    x = require_high_precision(x, "x")
    require_format(fmt)
    saturate = require_flag(saturate, "saturate")
    rounding = require_choice(rounding, "rounding", (*ROUNDING_MODES, STOCHASTIC))
    if rounding == STOCHASTIC:
        random_bits = _require_random_bits(random_bits, x.shape, fmt)
    elif random_bits is not None:
        raise ValueError(f"random_bits needs rounding='stochastic'; got rounding={rounding!r}")
    matrix, codes = Matrix(np.atleast_1d(x)), np.empty(x.shape, np.uint8)
    bits = None if random_bits is None else Matrix(np.atleast_1d(random_bits))
    out = codes.reshape(matrix.shape)

    def work(rows, columns):
        tile_bits = None if bits is None else bits.raw(rows, columns)
        values = matrix.read(rows, columns)
        out[rows, columns] = encode_tile(values, fmt, saturate=saturate, rounding=rounding, random_bits=tile_bits)

    for_each(tile_slices(matrix.shape), work)
    return codes


def encode_tile(values, fmt, *, saturate=True, rounding="nearest_even", random_bits=None):
    """`encode` of a float32 tile of any shape, all at once and unchecked."""
    if rounding == STOCHASTIC:
        finite_or_inf = np.where(np.isnan(values), np.float32(0), values)
        magnitude_code = round_to_grid_stochastic(finite_or_inf, _extended_grid(fmt), random_bits, partial(_floor, fmt))
        return _finish_codes(magnitude_code, values, fmt, saturate)
    return _code_table(fmt, saturate, rounding).take(_odd_rounded_key(values, fmt.key_bits), mode="clip")


def decode(codes: ArrayLike, fmt: ElementFormat) -> NDArray[np.float32]:
    """Return the float32 values of `codes` in `fmt`, exact.

    Args:
        codes: uint8 array of any shape, one code an element (unpack FP4 with `unpack_fp4`).
        fmt: a `FloatFormat` or `IntegerFormat`.

    Raises:
        TypeError: `codes` is not uint8, or `fmt` is no format.
        ValueError: a code does not fit the width of `fmt`.
    """
    codes = require_codes(codes, "codes")
    require_format(fmt)
    if fmt.bits < 8 and codes.size and codes.max() >= len(fmt.values):
        raise ValueError(f"codes must be below {len(fmt.values)} in {fmt!r}; got {int(codes.max())}")
    matrix, values = Matrix(np.atleast_1d(codes)), np.empty(codes.shape, np.float32)
    out = values.reshape(matrix.shape)

    def work(rows, columns):
        out[rows, columns] = fmt.values.take(matrix.raw(rows, columns))

    for_each(tile_slices(matrix.shape), work)
    return values


def pack_fp4(codes: ArrayLike) -> NDArray[np.uint8]:
    """Pack 4-bit codes two per byte along the last dimension: the even element takes the low nibble.

    Args:
        codes: uint8 (..., n), n even, codes below 16.

    Returns:
        uint8 (..., n/2).

    Raises:
        TypeError: not uint8. ValueError: odd last dimension, or a code above 15.
    """
    codes = require_codes(codes, "codes")
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes must have an even last dimension to pack two per byte; got shape {codes.shape}")
    if codes.size and codes.max() > 15:
        raise ValueError(f"codes must be below 16 to pack; got {int(codes.max())}")
    packed = codes[..., 1::2] << np.uint8(4)
    packed |= codes[..., 0::2]
    return packed


def unpack_fp4(packed: ArrayLike) -> NDArray[np.uint8]:
    """Undo `pack_fp4`: uint8 (..., n/2) -> uint8 (..., n), codes below 16.

    Raises:
        TypeError: not uint8. ValueError: a scalar.
    """
    packed = require_codes(packed, "packed")
    if packed.ndim == 0:
        raise ValueError("packed must have at least one dimension; got a scalar")
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    np.bitwise_and(packed, np.uint8(0xF), out=codes[..., 0::2])
    np.right_shift(packed, np.uint8(4), out=codes[..., 1::2])
    return codes


def encode_by_definition(x, fmt, saturate, rounding):
    """`encode` as the definition reads, for float64 `x`: search the grid, decide, add the sign. Slow."""
    finite_or_inf = np.where(np.isnan(x), 0, x if fmt.signed else np.abs(x))
    magnitude_code = round_to_grid(finite_or_inf, fmt.grid, fmt.after_largest, rounding)
    return _finish_codes(magnitude_code, x, fmt, saturate)


def _require_random_bits(
    random_bits: ArrayLike | None, shape: tuple[int, ...], fmt: ElementFormat
) -> NDArray[np.uint8]:
    """Return `random_bits` as an array, raising unless they serve a stochastic cast of `shape` to `fmt`."""
    if random_bits is None:
        raise ValueError("random_bits is required with rounding='stochastic'; got None")
    random_bits = require_codes(random_bits, "random_bits")
    if random_bits.shape != shape:
        raise ValueError(f"random_bits must have the shape of x, {shape}; got {random_bits.shape}")
    if not fmt.has_subnormals:
        raise ValueError(f"rounding='stochastic' needs a format with a zero; got {fmt!r}")
    return random_bits


def _finish_codes(magnitude_code, x, fmt, saturate):
    """Apply the overflow, infinity, sign and NaN rules to grid indices (`len(grid)` and above is overflow)."""
    overflow_code = fmt.largest_code
    if not saturate:
        overflow_code = next(c for c in (fmt.infinity_code, fmt.nan_code, fmt.largest_code) if c is not None)
    overflows = magnitude_code > fmt.largest_code
    if not saturate:
        overflows |= np.isinf(x)  # toward_zero keeps a large finite value finite, but never infinity
    code = np.where(overflows, overflow_code, magnitude_code)
    return np.where(np.isnan(x), np.uint8(fmt.code_of_nan), fmt.signed_code(code, np.signbit(x)))


@lru_cache(maxsize=64)
def _code_table(fmt, saturate, rounding):
    """Codes of every float32 that fits in `key_bits` bits, 65 536 for bfloat16: `_odd_rounded_key` indexes them."""
    keys = np.arange(1 << fmt.key_bits, dtype=np.uint32)
    values = (keys << np.uint32(32 - fmt.key_bits)).view(np.float32)
    return encode_by_definition(values.astype(np.float64), fmt, saturate, rounding)


@lru_cache(maxsize=16)
def _extended_grid(fmt):
    """The magnitudes of a format, and the one after its largest."""
    return np.append(fmt.grid, fmt.after_largest)


@lru_cache(maxsize=16)
def _floor_table(fmt):
    """`floor_in` the extended grid, of all float32 magnitudes of `key_bits` bits: `_odd_rounded_key` indexes it."""
    keys = np.arange(1 << fmt.key_bits - 1, dtype=np.uint32)
    magnitudes = (keys << np.uint32(32 - fmt.key_bits)).view(np.float32)
    return floor_in(_extended_grid(fmt))(magnitudes)


def _floor(fmt, magnitudes):
    """`floor_in` the extended grid of a format, for float32 magnitudes, from a table."""
    return _floor_table(fmt).take(_odd_rounded_key(magnitudes, fmt.key_bits))


def _odd_rounded_key(values, key_bits):
    """Bit patterns of float32 `values` rounded to bfloat16 *to odd*: truncated, last bit 1 if anything was lost.

    Why a table of bfloat16 codes is enough for float32: every value and every midpoint of a format is a bfloat16 whose
    last bit is 0 (`FloatFormat` checks it). Rounding to odd never lands on such a number unless the float32 was that
    number, and never crosses one. Every comparison that decides a code, and the test for NaN, therefore come out as
    they would for the float32 itself. Midpoints of INT8 have a bit more: so has its table.
    """
    bits, lost = values.view(np.uint32), np.uint32(32 - key_bits)
    key = bits >> lost
    key |= (bits & np.uint32((1 << lost) - 1)) != 0
    return key


def require_format(fmt: Any, allowed: tuple[ElementFormat, ...] | None = None, name: str = "fmt") -> None:
    """Raise unless `fmt` is an ElementFormat (and one of `allowed`)."""
    if not isinstance(fmt, ElementFormat):
        known = FORMATS.get(fmt.lower()) if isinstance(fmt, str) else None
        hint = did_you_mean(fmt, map(repr, FORMATS.values())) if known is None else f": write refops.{known!r}"
        raise TypeError(f"{name} must be a FloatFormat or IntegerFormat such as refops.E4M3; got {shown(fmt)}{hint}")
    if allowed is not None and fmt not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {fmt!r}")


def require_codes(codes: ArrayLike, name: str) -> NDArray[np.uint8]:
    """Return `codes` as an array, raising unless it is uint8."""
    codes = as_array(codes, name)
    if codes.dtype != np.uint8:
        raise TypeError(f"{name} must be a uint8 array; got {describe_array(codes)}{as_codes_hint(codes.dtype, name)}")
    return codes
