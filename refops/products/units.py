"""The units of tensor cores: how many products each adds at once, how many bits it keeps, and how it rounds.

NVIDIA specifies none of this. Tests on cards have found it out:

- Products are added without being normalised, aligned to the largest exponent and cut off toward zero: Fasi, Higham,
  Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (PeerJ CS 7:e330, 2021), on V100, T4 and A100.
- Hopper's FP8 sums keep about 14 bits: DeepSeek-V3's report (arXiv 2412.19437), section 3.3.2. The authors of `mmaemu`
  recorded cuBLAS's FP8 products on an H100 and replay their bits with 32 products, 13 bits and 13 kept.
- Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores" (arXiv 2512.07004), have models of A100, H100 and B200
  in 8, 16 and 19 bits that agreed with the cards on 10^5 random vectors.
- Every number of `UNITS`: Xie et al., "MMA-Sim" (arXiv 2511.10909), whose authors report the bits of ten architectures
  in more than a million tests, and publish the model, `mmasim`, and the tests for cards.

This project has measured no card: a row of `UNITS` is what `mmasim` 2.1 computes, and tests/peers compares the two, and
Hopper's FP8 with `mmaemu`. MMA-Sim's list of formats has FP8, FP4, MXFP8, MXFP4 and NVFP4, not FP6: of FP6, and of the
exponents of zeros, there is the claim of the model alone.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from refops.arguments import BFLOAT16, require_choice, require_dtype, require_integer
from refops.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FloatFormat, require_format
from refops.hints import DTypeLike

FLOAT16 = np.dtype(np.float16)
CARDS = ("ampere", "hopper", "blackwell")

#: What the elements of an operand are: codes of a format, or float16 or bfloat16 as they are.
OperandFormat: TypeAlias = FloatFormat | np.dtype[Any]


@dataclass(frozen=True)
class Accumulator:
    """How a sum is rounded after each group of products.

    Attributes:
        dtype: np.dtype that holds it.
        fraction_bits: bits that are kept behind the first one.
        smallest_exponent: of normal numbers; below it there are fewer bits.
        rounding: how the others go, "toward_zero" or "nearest_even" of `refops.rounding.ROUNDING_MODES`.
    """

    dtype: np.dtype[Any]
    fraction_bits: int
    smallest_exponent: int
    rounding: str


SINGLE = Accumulator(np.dtype(np.float32), 23, -126, "toward_zero")
#: float32 in memory, of which 13 bits behind the first one are used.
SHORT_SINGLE = Accumulator(np.dtype(np.float32), 13, -126, "toward_zero")
HALF = Accumulator(FLOAT16, 10, -14, "nearest_even")


@dataclass(frozen=True)
class Unit:
    """One unit of a card: d = c + sum of a_i b_i for a group of products, which `matmul` repeats along k.

    Attributes:
        card: "ampere", "hopper" or "blackwell" (the data centre's, sm_100).
        name: what errors and tables call it.
        formats: the formats that an operand may have: `FloatFormat`, or np.dtype of float16 and bfloat16.
        products: how many products are added at once, the accumulator being one more summand.
        fraction_bits: how far below the largest summand's exponent the summands are cut off.
        zero_exponent: the exponent of a product, or accumulator, that is zero: what is far below 2^zero_exponent is cut
            off by zeros alone.
        accumulator: what the sum becomes.
        scale_format: format of the scales that the unit reads: E8M0, E4M3 (whose sign bit it ignores), or None.
        scale_blocks: along k, elements of a scale that it can read.
        added_exactly: products that are added before they are aligned to others: they share both scales.
        split_interval: products after which software that splits the accumulator empties it, None where none does.
    """

    card: str
    name: str
    formats: tuple[OperandFormat, ...] = field(repr=False)
    products: int
    fraction_bits: int
    zero_exponent: int
    accumulator: Accumulator = field(default=SINGLE, repr=False)
    scale_format: FloatFormat | None = None
    scale_blocks: tuple[int, ...] = ()
    added_exactly: int = 1
    split_interval: int | None = None

    def takes(self, a_format: OperandFormat, b_format: OperandFormat) -> bool:
        """Whether it multiplies the two: a 16-bit format only by itself, small ones by each other."""
        alike = a_format == b_format or not {FLOAT16, BFLOAT16} & {a_format, b_format}
        return a_format in self.formats and b_format in self.formats and alike


SIXTEEN_BITS = (FLOAT16, BFLOAT16)
FP8 = (E4M3, E5M2)
F8F6F4 = (E4M3, E5M2, E3M2, E2M3, E2M1)

#: Every unit. Where two take the same operands the first is the one that software uses: packed FP4 goes to the unit of
#: its own. A split accumulator is emptied by CUTLASS (`mma_promotion_interval` = 4 instructions of 32 products) and
#: DeepGEMM; when cuBLAS does, is not published.
UNITS = (
    # mma.sync m16n8k16 takes two groups.
    Unit("ampere", "16 bits", SIXTEEN_BITS, 8, 24, -132),
    Unit("ampere", "16 bits in float16", (FLOAT16,), 8, 24, -20, HALF),
    # wgmma
    Unit("hopper", "16 bits", SIXTEEN_BITS, 16, 25, -133),
    Unit("hopper", "16 bits in float16", (FLOAT16,), 16, 25, -21, HALF),
    Unit("hopper", "FP8", FP8, 32, 13, -133, SHORT_SINGLE, split_interval=128),
    Unit("hopper", "FP8 in float16", FP8, 32, 13, -21, HALF),
    # tcgen05.mma kind::f16, kind::f8f6f4
    Unit("blackwell", "16 bits", SIXTEEN_BITS, 16, 25, -133),
    Unit("blackwell", "16 bits in float16", (FLOAT16,), 16, 25, -21, HALF),
    Unit("blackwell", "f8f6f4", F8F6F4, 32, 25, -133),
    Unit("blackwell", "f8f6f4 in float16", F8F6F4, 32, 25, -21, HALF),
    # kind::mxf4, kind::mxf4nvf4, kind::mxf8f6f4
    Unit("blackwell", "mxf4", (E2M1,), 64, 35, -139, SINGLE, E8M0, (32, 16), added_exactly=16),
    Unit("blackwell", "nvf4", (E2M1,), 64, 35, -139, SINGLE, E4M3, (16,), added_exactly=16),
    Unit("blackwell", "mxf8f6f4", F8F6F4, 32, 25, -133, SINGLE, E8M0, (32,)),
)


def unit(
    card: str,
    a_format: FloatFormat | DTypeLike,
    b_format: FloatFormat | DTypeLike | None = None,
    *,
    scale_format: FloatFormat | None = None,
    accumulator: DTypeLike = np.float32,
) -> Unit:
    """Return the unit of a card that multiplies two formats.

    Args:
        card: "ampere", "hopper" or "blackwell".
        a_format: E4M3, E5M2, E3M2, E2M3 or E2M1, np.float16 or ml_dtypes.bfloat16.
        b_format: the same; None: that of a.
        scale_format: format of the scales that the unit is to read, E8M0 or E4M3 (NVFP4's); None: it reads none.
        accumulator: np.float32, or np.float16, which some units offer.

    Raises:
        TypeError: a format that is none. ValueError: no such card; the card has no such unit. The message names those
            that do.
    """
    card = require_choice(card, "card", CARDS)
    formats = (
        require_operand_format(a_format, "a_format"),
        require_operand_format(a_format if b_format is None else b_format, "b_format"),
    )
    accumulator = require_accumulator(accumulator)
    if scale_format is not None:
        require_format(scale_format, name="scale_format")
    fitting = [
        row
        for row in UNITS
        if row.takes(*formats) and row.scale_format == scale_format and row.accumulator.dtype == accumulator
    ]
    for row in fitting:
        if row.card == card:
            return row
    asked = " and ".join(map(format_name, dict.fromkeys(formats)))
    asked += f" with {scale_format!r} scales" * (scale_format is not None)
    raise no_unit(card, f"{asked}, accumulated in {accumulator}", [row.card for row in fitting])


class NoUnitError(ValueError):
    """A card does not multiply what is asked for.

    Attributes:
        card: its name.
    """

    card: str


def no_unit(card: str, asked: str, cards: list[str]) -> NoUnitError:
    """The error for a card that does not multiply what is asked for; it names the cards that do."""
    others = f"{' and '.join(dict.fromkeys(cards))} can" if cards else f"none of {', '.join(CARDS)} can"
    error = NoUnitError(f"card must have a unit that multiplies {asked}: {others}; got {card!r}")
    error.card = card
    return error


def require_operand_format(value: Any, name: str) -> OperandFormat:
    """Return a format of operands, a small one or np.dtype; TypeError if it is neither."""
    if isinstance(value, FloatFormat):
        return value
    return require_dtype(value, name, SIXTEEN_BITS, "a FloatFormat such as refops.E4M3, float16 or bfloat16")


def require_accumulator(value: Any) -> np.dtype[Any]:
    """Return the dtype of an accumulator as np.dtype; TypeError if no unit accumulates in it."""
    return require_dtype(value, "accumulator", (SINGLE.dtype, HALF.dtype), "float32 or float16")


def format_name(fmt: OperandFormat) -> str:
    """What errors call a format."""
    return repr(fmt) if isinstance(fmt, FloatFormat) else fmt.name


def smallest_exponent(fmt: FloatFormat | DTypeLike) -> int:
    """The exponent of a format's smallest normal number, which its subnormal numbers have too.

    Args:
        fmt: a `FloatFormat`, np.float16 or ml_dtypes.bfloat16.

    Raises:
        TypeError: something else.
    """
    fmt = require_operand_format(fmt, "fmt")
    if isinstance(fmt, FloatFormat):
        return int(np.frexp(fmt.smallest_normal)[1]) - 1
    return int(ml_dtypes.finfo(fmt).minexp)


def require_interval(value: Any, unit: Unit, name: str) -> int | None:
    """Return a number of products between promotions, or None; raise unless it is a multiple of the unit's group."""
    if value is None:
        return None
    interval = require_integer(value, name, low=1, high=1 << 62)
    if interval % unit.products:
        raise ValueError(
            f"{name} must be a multiple of {unit.products}, the products that the unit adds at once; got {interval}"
        )
    return interval
