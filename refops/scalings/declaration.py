"""How a scaling is declared: settings, layout, path and rule, and the default of every hook.

A scaling is one file of this folder: a frozen dataclass that derives from `Scaling`, and its rows of the command line
in `NAMED`. Whatever quantizes, dequantizes, judges, explains or compiles reads the attributes below and never asks for
a class. Directions: seen along a direction, the *inner* dimension is the one that blocks run along (K rowwise, M
columnwise), the other one is *outer*.
"""

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np

from refops.arguments import BFLOAT16, require_choice, require_flag, require_integer, require_number, shown
from refops.formats import E4M3, E5M2, ElementFormat, FloatFormat, require_format
from refops.hints import Array
from refops.scalings.arithmetic import FLT_MAX, REFERENCE, F
from refops.tiles import ALIGNMENT, ceil_div, round_up

#: The vocabulary of `refops.scalings.arithmetic`, NumPy's or a compiler's.
Words: TypeAlias = Any
#: A function of a rule: of arrays, or of numbers that a compiler takes.
Rule: TypeAlias = Callable[..., Any]
FP8_FORMATS = (E4M3, E5M2)

#: The largest finite value of each dtype of unquantized tensors, as float32.
LARGEST_FINITE = {
    np.dtype(np.float32): FLT_MAX,
    np.dtype(np.float16): F(65504),
    BFLOAT16: np.uint32(0x7F7F0000).view(np.float32),
}

#: Scales of MXFP8, MXFP4 and NVFP4 are padded to multiples of (128, 4): the tile that a GEMM loads at once.
SCALE_TILE = (128, 4)

#: What a rule reads as `p`, because code must not be compiled anew for it. Field, meaning:
#:   epsilon        what a smaller amax is replaced by
#:   largest_scale  what an overflowing encode scale becomes
Numbers = namedtuple("Numbers", "epsilon largest_scale")


@dataclass(frozen=True)
class Path:
    """Which values a composed operation uses where; f is the unrounded float32 result of the activation.

    Attributes:
        name: TE's name of the path.
        casts_rounded: elements (and block amaxes) come from f rounded to the input's dtype, else from f itself.
        amax_rounded: the amax of the whole tensor comes from the rounded values.
        dbias_rounded: the bias gradient sums the rounded values.
    """

    name: str
    casts_rounded: bool
    amax_rounded: bool
    dbias_rounded: bool


#: The activation is stored, and what is stored is quantized: TE's path without a fused kernel.
UNFUSED = Path("UNFUSED", casts_rounded=True, amax_rounded=True, dbias_rounded=True)


@dataclass(frozen=True)
class Layout:
    """Where codes and scales are stored, as data; sizes and blocks are (outer, inner), seen along a direction.

    Attributes:
        block: elements that share a scale, (1, B) or (B, B), B a divisor of 128; None: the whole tensor.
        scale_format: format of stored scales, uint8 codes; None: float32 decode scales.
        repeated: a (B, B) block's scale is stored for each of its B outer indices, not once.
        scales_inner_first: (rowwise, columnwise): scales are stored [block, outer] instead of [outer, block].
        padding: multiples that the (outer, block) counts of stored scales are padded to, with zeros.
        columnwise_transposed: columnwise data are stored (K, M) instead of (M, K).
        packed: codes in a byte, along the last dimension.
        amax: which float32 amax is kept: "tensor", "rows" (one for each outer index) or None.
        two_level: decoding needs that amax.
        scale_order: "gemm" where scales have an order of their own for GEMMs (`refops.swizzle`), "fixed" where GEMMs
            read them as they are stored, "none" where there is one scale.
        shape_multiple: what M and K must be divisible by to be stored.
        columnwise_multiple: what M and K must be divisible by for a columnwise copy to be made; `shape_multiple` where
            that is larger.

    Raises:
        TypeError, ValueError: one of these is none of its values, or nobody could walk a tensor with all of them.
    """

    block: tuple[int, int] | None = None
    scale_format: FloatFormat | None = None
    repeated: bool = False
    scales_inner_first: tuple[bool, bool] = (False, False)
    padding: tuple[int, int] = (1, 1)
    columnwise_transposed: bool = True
    packed: int = 1
    amax: str | None = None
    two_level: bool = False
    scale_order: str = "none"
    shape_multiple: int = 1
    columnwise_multiple: int = 1

    def __post_init__(self):
        if self.scale_format is not None:
            require_format(self.scale_format, name="scale_format")
        require_choice(self.amax, "amax", ("tensor", "rows", None))
        require_choice(self.scale_order, "scale_order", ("gemm", "fixed", "none"))
        require_choice(self.packed, "packed", (1, 2))
        flags(self, "repeated", "columnwise_transposed", "two_level")
        for name in ("scales_inner_first", "padding"):
            if not isinstance(getattr(self, name), tuple) or len(getattr(self, name)) != 2:
                raise ValueError(f"{name} must be a pair; got {shown(getattr(self, name))}")
        for flag in self.scales_inner_first:
            require_flag(flag, "scales_inner_first")
        for multiple in self.padding:
            require_integer(multiple, "padding", low=1, high=1 << 31)
        self._check_multiples()
        if self.block is None:
            self._check_one_scale()
        else:
            self._check_block()

    def _check_multiples(self):
        """Whole bytes, and no columnwise copy of a shape that cannot be stored."""
        for name in ("shape_multiple", "columnwise_multiple"):
            require_integer(getattr(self, name), name, low=1, high=1 << 31)
        normalise(self, columnwise_multiple=max(self.columnwise_multiple, self.shape_multiple))
        if self.shape_multiple % self.packed:
            raise ValueError(f"shape_multiple must be divisible by packed, {self.packed}; got {self.shape_multiple}")
        if self.columnwise_multiple % self.shape_multiple:
            raise ValueError(
                f"columnwise_multiple must be divisible by shape_multiple, {self.shape_multiple}; "
                f"got {self.columnwise_multiple}"
            )

    def _check_one_scale(self):
        """A tensor that is one block has one scale, of its own amax."""
        needed = {
            "amax": "tensor",
            "two_level": False,
            "repeated": False,
            "scales_inner_first": (False, False),
            "padding": (1, 1),
            "scale_order": "none",
        }
        for name, value in needed.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} must be {value!r} with block=None, one scale for the tensor; got {getattr(self, name)!r}"
                )

    def _check_block(self):
        """A block that tiles hold whole, whose scales have an order, and the amaxes that they need."""
        block = self.block
        is_pair = isinstance(block, tuple) and len(block) == 2 and all(type(edge) is int for edge in block)
        if not is_pair or block[1] < 1 or ALIGNMENT % block[1] or block[0] not in (1, block[1]):
            raise ValueError(
                f"block must be (1, B) or (B, B) where B divides {ALIGNMENT}, the edge of the tiles that tensors are "
                f"walked in; got {shown(block)}"
            )
        if self.scale_order == "none":
            raise ValueError(f"scale_order must be 'gemm' or 'fixed' with a block, {block}; got 'none'")
        if self.scale_order == "gemm" and any(n % edge for n, edge in zip(self.padding, SCALE_TILE, strict=True)):
            raise ValueError(
                f"padding must be divisible by {SCALE_TILE}, the tile of scales that a GEMM loads, with "
                f"scale_order='gemm'; got {self.padding}"
            )
        if self.repeated and block[0] == 1:
            raise ValueError(f"repeated must be False unless a block has several rows; got True with block={block}")
        if self.amax == "rows" and self.is_square:
            raise ValueError(f"amax must be 'tensor' or None with a square block, {block}; got 'rows'")
        if self.two_level and self.amax is None:
            raise ValueError("amax must be 'tensor' or 'rows' with two_level=True; got None")

    @property
    def scale_dtype(self) -> Any:
        """np.dtype of stored scales."""
        return np.dtype(np.float32 if self.scale_format is None else np.uint8)

    @property
    def is_square(self) -> bool:
        """Whether both directions share their blocks."""
        return self.block is None or self.block[0] == self.block[1]

    @property
    def run(self) -> tuple[int, int] | None:
        """(outer, inner) elements that one stored scale covers: less than `block` where scales are repeated."""
        if self.block is None:
            return None
        return (1 if self.repeated else self.block[0], self.block[1])

    def oriented(self, shape: Any, columnwise: bool) -> tuple[Any, Any]:
        """(outer, inner) of an (M, K) pair, whatever it holds; its own inverse."""
        m, k = shape
        return (k, m) if columnwise else (m, k)

    def data_transposed(self, columnwise: bool) -> bool:
        """Whether a direction's data are stored (K, M)."""
        return columnwise and self.columnwise_transposed

    def scale_counts(self, shape: tuple[int, int], columnwise: bool) -> tuple[int, int]:
        """(outer, block) counts of the stored scales of an (M, K) tensor, without padding; (1, 1) per tensor."""
        if self.run is None:
            return (1, 1)
        outer, inner = self.oriented(shape, columnwise)
        return ceil_div(outer, self.run[0]), ceil_div(inner, self.run[1])

    def scale_shape(self, shape: tuple[int, int], columnwise: bool) -> tuple[int, ...]:
        """Shape of the stored scales of an (M, K) tensor, padding and order included."""
        if self.block is None:
            return (1,)
        counts = self.scale_counts(shape, columnwise)
        outer, blocks = (round_up(n, multiple) for n, multiple in zip(counts, self.padding, strict=True))
        return (blocks, outer) if self.scales_inner_first[columnwise] else (outer, blocks)

    def data_shape(self, shape: tuple[int, ...], columnwise: bool) -> tuple[int, ...]:
        """Shape of the stored data of a tensor of any `shape`: packed codes flatten what is transposed."""
        if not shape:
            return ()
        *leading, k = shape
        if not self.data_transposed(columnwise):
            return (*leading, k // self.packed)
        return (k, math.prod(leading) // self.packed) if self.packed > 1 else (k, *leading)

    def amax_shape(self, shape: tuple[int, int], columnwise: bool) -> tuple[int] | None:
        """Shape of the kept amax of an (M, K) tensor, None without one."""
        if self.amax is None:
            return None
        return (self.oriented(shape, columnwise)[0] if self.amax == "rows" else 1,)

    def scales_by_outer(self, stored: Array, columnwise: bool) -> Array:
        """Stored scales as an [outer, block] view, padding included; per tensor (1, 1)."""
        if self.block is None:
            return stored.reshape(1, 1)
        return stored.T if self.scales_inner_first[columnwise] else stored


@dataclass(frozen=True)
class RandomBits:
    """Where the bits of stochastic rounding come from.

    Attributes:
        seed, offset: Philox key and counter. 16 elements in a row of the stored layout share a subsequence, whatever
            the block: their number there, those of the columnwise copy counted after all rowwise ones.
        bits: the bits themselves instead, one uint8 array or a (rowwise, columnwise) pair; None: Philox.
    """

    seed: int
    offset: int
    bits: Array | tuple[Array, Array] | None

    def of_copy(self, columnwise: bool) -> Array | None:
        """The caller's bits of a direction in its stored orientation; None: Philox makes them."""
        return self.bits[columnwise] if isinstance(self.bits, tuple) else self.bits


#: What a float32 scale is, as it is stored.
RECIPROCAL = "1 / encode multiplier, float32"


@dataclass(frozen=True)
class Formulas:
    """The rule of a scaling in words, one formula for each number on the way from an amax to the decode factor.

    Attributes:
        multiplier: what elements are multiplied by before the cast; "{largest}" is `Numbers.largest_scale`.
        decode: what the values of codes are multiplied by.
        stored: the stored scale; float32 scales store 1 / multiplier.
        tensor_scale: what all blocks share; "{whose}" is "tensor", "row" or "column".
        amax: what more there is to say of the tensor's amax.
    """

    multiplier: str
    decode: str = "the stored scale"
    stored: str = RECIPROCAL
    tensor_scale: str = ""
    amax: str = ""


@dataclass(frozen=True)
class Choice:
    """Several scales for a block, of which the one with the smallest error is kept; the first wins a tie.

    It is for coded scales and layouts that keep an amax; elements are rounded to nearest-even. Square blocks must be
    whole: `Layout.shape_multiple` is divisible by their edge.

    Attributes:
        candidates: functions as `Scaling.block_scale` gives.
        error: f(value, scale, amax, x): an element's error, from its code's value, the stored scale's value, the
            tensor's (or row's) amax and the element. Errors along a line are added one after the other; those of a
            square along its rows, whose sums then meet as a tree: row i with i + B/2, then B/4, ... 1.
    """

    candidates: tuple[Any, ...]
    error: Any


#: What is said of a class of scalings, not of its settings: no field has such a name.
CLASS_ATTRIBUTES = ("order", "title", "gate_multiple", "at_run_time")


class Scaling:
    """Base of all settings: what the machinery may ask of a scaling.

    Class attributes:
        order: place in `SCALINGS`: TE's in TE's order, then others by name.
        title: what sentences and tables call it.
        gate_multiple: what H must be divisible by where a gated activation [act | gate] is fused with the cast.
        at_run_time: names of fields that no compiled code depends on; each has a default.

    Attributes:
        fmt: the element format.
        block_size: elements along a block's edge, for readers; machinery asks `layout.block`. 0 says nothing of it.
        power_2_scale: whether float32 scales are powers of two.

    Rules are factories: functions of the vocabulary `words` (`refops.scalings.arithmetic`) that return a function of
    arrays or of numbers, as `words` is. They see float32 and codes, and are total over both:

        tensor_scale(words)     f(amax) -> the pair (encode, decode) of a tensor, or of each row, float32 of the shape
                                of amax. A block's amax is multiplied by encode before it becomes a scale: a constant
                                / amax, at most the largest float32, 1 for an amax of 0 or infinity. The value of a
                                stored scale is multiplied by decode, which is 1 / encode. None without
                                `Layout.two_level`
        block_scale(words)      f(amax, tensor_scale, p) -> (stored, multiplier) of a block, or of the tensor where that
                                is one block. Its argument tensor_scale is what the function above gave, float32 0 where
                                there is none; p: `Numbers`. Monotone in amax. A scaling with coded scales declares the
                                next two instead, and this one is composed of them; float32 scales store 1 / multiplier.
        scale_code(words)       f(amax, tensor_scale, p) -> code in the scale format
        multiplier(words)       f(code, tensor_scale) -> what elements are multiplied by; None: float32 scales
        decode_factor(words)    f(stored, amax) -> what the value of a code is multiplied by; amax: the tensor's, or
                                the row's
        choice(words)           `Choice` of several scales for a block, or None: `block_scale` alone

    A base of rules says in `demands` what a row's settings must be for them.
    """

    order: ClassVar[int] = 100
    title: ClassVar[str]
    gate_multiple: ClassVar[int] = 1
    at_run_time: ClassVar[tuple[str, ...]] = ()
    power_2_scale: bool = False

    fmt: Any
    block_size: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        """Compute a `layout` that is a property once for an instance: every call asks for it several times."""
        super().__init_subclass__(**options)
        made = vars(cls).get("layout")
        if isinstance(made, property) and made.fget is not None:
            once = cached_property(made.fget)
            once.__set_name__(cls, "layout")
            cls.layout = once  # type: ignore[method-assign,assignment]

    @property
    def layout(self) -> Layout:
        """Where codes and scales are stored."""
        raise _missing(self, "a layout")

    @property
    def formulas(self) -> Formulas:
        """The rule in words."""
        raise _missing(self, "formulas, the rule in words")

    @property
    def path(self) -> Path:
        """The path of an activation fused with the cast."""
        return UNFUSED

    @property
    def given(self) -> np.float32 | None:
        """The encode scale, where it is known before the tensor is seen."""
        return None

    @property
    def hadamard(self) -> int | None:
        """Sign mask of the Hadamard transform that the columnwise copy goes through."""
        return None

    @property
    def random(self) -> RandomBits | None:
        """The bits of stochastic rounding."""
        return None

    @property
    def copies_share_codes(self) -> bool:
        """Whether both copies hold the same codes: one scale of the tensor or of a square block, values as they are."""
        return self.layout.is_square and self.hadamard is None and self.random is None

    @property
    def only_rowwise(self) -> str:
        """Why no columnwise copy can be made, in the words of an error; "" if one can."""
        return ""

    @property
    def compiled_as(self) -> "Scaling":
        """The same settings with every field of `at_run_time` at its default: the key of compiled code."""
        defaults = {f.name: f.default for f in fields(self) if f.name in self.at_run_time}  # type: ignore[arg-type]
        return replace(self, **defaults)  # type: ignore[type-var]

    def numbers(self, dtype: Any) -> Numbers:
        """The `Numbers` of a tensor of `dtype`."""
        return Numbers(F(0), FLT_MAX)

    def tensor_scale(self, words: Words) -> Rule | None:
        return None

    def block_scale(self, words: Words) -> Rule:
        return coded_scale(words, self.scale_code(words), self.multiplier(words))

    def scale_code(self, words: Words) -> Rule:
        raise _missing(self, "block_scale, or scale_code and multiplier")

    def multiplier(self, words: Words) -> Rule | None:
        return None

    def decode_factor(self, words: Words) -> Rule:
        @words.function
        def factor(stored, amax):
            return stored

        return factor

    def choice(self, words: Words) -> Choice | None:
        return None

    def demands(self) -> list[tuple[bool, str]]:
        """Further rules of a base for a declared row: whether each holds, and the sentence if it does not."""
        return []


def require_declared(cls: type[Scaling]) -> None:
    """Raise TypeError or ValueError unless a class can be one of `SCALINGS`.

    It is frozen, its class attributes have values of their kinds, and fields of `at_run_time` have a default.
    """
    if not is_dataclass(cls) or not cls.__dataclass_params__.frozen:
        raise TypeError(f"{cls.__name__} must be a frozen dataclass, whose settings are keys of compiled code")
    for field in fields(cls):
        if field.name in CLASS_ATTRIBUTES or callable(getattr(Scaling, field.name, None)):
            rule = "must not be named like an attribute of every class"
            raise TypeError(f"a field of {cls.__name__} {rule}; got {field.name!r}")
    require_integer(cls.order, f"{cls.__name__}.order", low=0, high=1 << 31)
    require_integer(cls.gate_multiple, f"{cls.__name__}.gate_multiple", low=1, high=1 << 31)
    if not isinstance(cls.at_run_time, tuple) or not all(isinstance(name, str) for name in cls.at_run_time):
        raise TypeError(f"{cls.__name__}.at_run_time must be a tuple of names; got {shown(cls.at_run_time)}")
    for name in cls.at_run_time:
        if not hasattr(cls, name):
            raise TypeError(f"{cls.__name__}.at_run_time must name fields with a default; got {name!r}")
    if not isinstance(cls.title, str) or not cls.title:
        raise TypeError(f"{cls.__name__}.title must be a string, the name that tables show; got {shown(cls.title)}")


def require_fit(scaling: Scaling) -> None:
    """Raise TypeError or ValueError, which says why, unless settings, layout and rules of a scaling fit together.

    Tables ask it of each of their rows, calls do not.
    """
    require_format(getattr(scaling, "fmt", None), name=f"fmt of {type(scaling).__name__}")
    for name, kind in (("layout", Layout), ("path", Path), ("formulas", Formulas)):
        value = getattr(scaling, name)
        if not isinstance(value, kind):
            raise TypeError(f"{name} of {type(scaling).__name__} must be {kind.__name__}(...); got {shown(value)}")
    _require_all(scaling.demands(), scaling)
    layout, choice = scaling.layout, scaling.choice(REFERENCE)
    scaling.block_scale(REFERENCE)
    scaling.decode_factor(REFERENCE)
    edge = 0 if layout.block is None else layout.block[1]
    second_level, coded = scaling.tensor_scale(REFERENCE) is not None, scaling.multiplier(REFERENCE) is not None
    rules = [
        (scaling.fmt.signed, f"fmt must have a sign, as elements have; got {scaling.fmt!r}"),
        (layout.packed == 1 or scaling.fmt.bits == 4, f"fmt must have 4 bits with packed=2; got {scaling.fmt!r}"),
        (
            second_level == layout.two_level,
            "tensor_scale must give a rule with two_level=True and None without; "
            f"got {'a rule' if second_level else 'None'} with two_level={layout.two_level}",
        ),
        (
            coded == (layout.scale_format is not None),
            "multiplier must give a rule with a scale_format and None without; "
            f"got {'a rule' if coded else 'None'} with scale_format={layout.scale_format!r}",
        ),
        (
            scaling.block_size in (0, edge),
            f"block_size must be the edge of the layout's block, {edge}; got {scaling.block_size}",
        ),
    ]
    if scaling.given is not None:
        path = scaling.path
        rules += [
            (layout.amax == "tensor", f"amax must be 'tensor' where the scale is given; got {layout.amax!r}"),
            (
                path.amax_rounded == path.casts_rounded,
                "path.amax_rounded must equal path.casts_rounded where the scale is given, for the amax is that of the "
                f"values that are cast; got {path}",
            ),
        ]
    if choice is not None:
        whole = layout.block is None or not layout.is_square or layout.shape_multiple % edge == 0
        rules += [
            (layout.block is not None, "block must not be None with a choice of scales, one for each block; got None"),
            (layout.scale_format is not None, "scale_format must be a format with a choice of scales; got None"),
            (layout.amax is not None, "amax must be 'tensor' or 'rows' with a choice of scales; got None"),
            (scaling.random is None, f"random must be None with a choice of scales; got {scaling.random}"),
            (
                whole,
                f"shape_multiple must be divisible by {edge}, the edge of a square block, with a choice of scales; "
                f"got {layout.shape_multiple}",
            ),
        ]
    _require_all(rules, scaling)


def _require_all(rules, scaling):
    """Raise ValueError with the first sentence of (whether it holds, sentence) that does not hold."""
    for holds, sentence in rules:
        if not holds:
            raise ValueError(f"{sentence} in {scaling}")


def _missing(scaling, what):
    """The error of a class that does not declare what it must."""
    return TypeError(f"{type(scaling).__name__} must have {what}; got none")


def accepts(scaling: Scaling, **values: Any) -> bool:
    """Whether a scaling may have these values in some fields, with the others unchanged."""
    try:
        replace(scaling, **values)  # type: ignore[type-var]
    except (TypeError, ValueError):
        return False
    return True


def coded_scale(words, scale_code, multiplier):
    """Return the rule of a block whose multiplier follows from its code."""

    @words.function
    def scale(amax, tensor_scale, p):
        code = scale_code(amax, tensor_scale, p)
        return code, multiplier(code, tensor_scale)

    return scale


@dataclass(frozen=True)
class NamedScaling:
    """A scaling that the command line knows by name.

    Attributes:
        name: what `--scaling` takes.
        scaling: the settings.
        description: one sentence.
        columnwise: whether the columnwise copy is the one to look at (RHT changes only that).
        title: the head of its row in tables; the description without one.
    """

    name: str
    scaling: Scaling
    description: str
    columnwise: bool = False
    title: str = ""

    def __post_init__(self):
        for field in ("name", "description", "title"):
            if not isinstance(getattr(self, field), str):
                raise TypeError(f"{field} of a row of NAMED must be a string; got {shown(getattr(self, field))}")
        flags(self, "columnwise")
        normalise(self, title=self.title or self.description.removesuffix("."))


def normalise(settings: Any, **values: Any) -> None:
    """Store plain Python values in frozen `settings`: equal settings hash alike, and integers never overflow."""
    for name, value in values.items():
        object.__setattr__(settings, name, value)


def flags(settings: Any, *names: str) -> None:
    """Store each named field as a plain bool; TypeError if it is not one."""
    for name in names:
        value = getattr(settings, name)
        normalise(settings, **{name: require_flag(value, name, _takes_no_format(settings, value))})


def _takes_no_format(settings: Any, value: Any) -> str:
    """What an error adds about an element format, handed to settings whose elements have one format always."""
    is_field = any(field.name == "fmt" for field in fields(settings))
    if is_field or not isinstance(value, ElementFormat):
        return ""
    return f"; {type(settings).__name__} takes no element format, its elements are {settings.fmt!r}"


def choose(settings: Any, **choices: tuple[Any, ...]) -> None:
    """Store each named field as the one of its choices that it equals; ValueError without one."""
    normalise(settings, **{name: require_choice(getattr(settings, name), name, of) for name, of in choices.items()})


def non_negative(settings: Any, *names: str) -> None:
    """Store each named field as a finite float >= 0; TypeError or ValueError if it is not one."""
    for name in names:
        normalise(settings, **{name: float(require_number(getattr(settings, name), name, non_negative=True))})
