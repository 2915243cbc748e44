"""The settings of each way to scale and quantize a tensor. Plain data: the arithmetic is in `refops.quantization`.

Each class is one of TE's scaling modes; the defaults are TE's. Every wrong value raises when the setting is made.
"""

from dataclasses import dataclass, field

import numpy as np

from refops.arguments import (
    require_choice,
    require_flag,
    require_integer,
    require_number,
    shown,
)
from refops.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FloatFormat, require_format
from refops.hints import Array, Number

FP8_FORMATS = (E4M3, E5M2)
MX_FORMATS = (E4M3, E5M2, E3M2, E2M3)

#: TE's fixed sign mask of the random Hadamard transform: bit i set means sign i is -1.
TE_SIGN_MASK = 0xD7E8


@dataclass(frozen=True)
class DelayedScaling:
    """Per-tensor FP8 with a scale known before the tensor is seen (from the amax history of earlier steps).

    Attributes:
        fmt: E4M3 or E5M2.
        scale: float32 multiplier applied before the cast: a number, or what `refops.update_delayed_scale` returned.

    data = fmt(x * scale), scale_inv = 1 / scale; the result's amax is max |x|, for the history.
    """

    fmt: FloatFormat
    scale: Number = 1.0

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        scale = require_number(self.scale, "scale", positive=True)
        with np.errstate(all="ignore"):
            if np.isinf(np.float32(1) / scale):
                raise ValueError(f"scale must have a finite float32 reciprocal; got {self.scale!r}")
        _normalise(self, scale=float(scale))


@dataclass(frozen=True)
class CurrentScaling:
    """Per-tensor FP8 with the scale taken from the tensor's own amax.

    Attributes:
        fmt: E4M3 or E5M2.
        power_2_scale: round the scale down to a power of two.
        amax_epsilon: lower bound of the amax.

    scale = fmt.max / max(amax, amax_epsilon), 1 where amax is 0 or inf, FLT_MAX where the quotient overflows;
    data = fmt(x * scale), scale_inv = 1 / scale.
    """

    fmt: FloatFormat
    power_2_scale: bool = False
    amax_epsilon: Number = 0.0

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        require_flag(self.power_2_scale, "power_2_scale")
        _normalise(self, amax_epsilon=float(require_number(self.amax_epsilon, "amax_epsilon", non_negative=True)))


@dataclass(frozen=True)
class BlockScaling:
    """FP8 with one float32 scale for 1x128 elements (activations, gradients) or a 128x128 tile (weights).

    Attributes:
        fmt: E4M3 or E5M2.
        block_dim: 1 for 1x128, 2 for 128x128.
        power_2_scale: round scales down to powers of two.
        amax_epsilon: lower bound of each block's amax.

    Each block as `CurrentScaling` does a tensor, but an overflowing scale becomes the largest value of the input dtype.
    """

    fmt: FloatFormat
    block_dim: int = 2
    power_2_scale: bool = True
    amax_epsilon: Number = 0.0

    #: Elements along a block's edge.
    block_size = 128

    def __post_init__(self):
        require_format(self.fmt, FP8_FORMATS)
        _normalise(self, block_dim=require_choice(self.block_dim, "block_dim", (1, 2)))
        require_flag(self.power_2_scale, "power_2_scale")
        _normalise(self, amax_epsilon=float(require_number(self.amax_epsilon, "amax_epsilon", non_negative=True)))


@dataclass(frozen=True)
class MXFP8Scaling:
    """OCP microscaling: one E8M0 scale byte (a power of two) for 32 elements.

    Attributes:
        fmt: E4M3 or E5M2; E3M2 and E2M3 give MXFP6, stored one code a byte.
        two_d: one scale for a 32x32 tile instead of 32 elements along a direction.
        scale_rounding: how amax / max becomes a power of two. "up" is TE's, cuBLAS's and PTX's rule: nothing saturates.
            The others are 2^(e - emax), emax the exponent of the format's largest value, with e from:
            "floor" floor(log2 amax), the OCP specification's example; "even" the same after rounding amax half up to
            the mantissa width of `fmt`; "ceil_ocp" ceil(log2 amax).

    byte = round_up_to_power_of_two(amax * float32(1 / fmt.max)) + 127 as exponent, data = fmt(x * 2^(127 - byte)).
    """

    fmt: FloatFormat
    two_d: bool = False
    scale_rounding: str = "up"

    #: Elements along a block's edge.
    block_size = 32

    def __post_init__(self):
        require_format(self.fmt, MX_FORMATS)
        require_flag(self.two_d, "two_d")
        rule = require_choice(self.scale_rounding, "scale_rounding", ("up", "floor", "even", "ceil_ocp"))
        _normalise(self, scale_rounding=rule)


@dataclass(frozen=True)
class NVFP4Scaling:
    """NVFP4: E2M1 elements, one E4M3 scale for 16 of them, one float32 amax for the tensor.

    Attributes:
        two_d: one block scale for a 16x16 tile (weights).
        rht: apply the 16-point random Hadamard transform to the columnwise copy.
        sign_mask: 16 bits, the transform's signs: bit i set means -1. TE's constant is 0xD7E8; 0 means no signs.
        stochastic_rounding: round elements stochastically; scales stay nearest-even.
        seed, offset: 64-bit Philox key and counter for the random bits. Each 16-element block has its own Philox
            subsequence: its row-major number in the stored layout, columnwise blocks counted after all rowwise ones.
        random_bits: the random bits themselves, instead of seed and offset: uint8, one byte an element, of shape (M, K)
            for rowwise, (K, M) for columnwise output, or a pair of both. Not part of equality.
        four_over_six: try block maximum -> 4 besides -> 6 and keep the one with the smaller error, "mae" or "mse".
        e4m3_max: largest block scale, 448 or (with `four_over_six`) 256.
        row_scaled: one amax for each row (and each column, columnwise) instead of one for the tensor.

    In float32, in this order: S_enc = e4m3_max * 6 / amax (at most FLT_MAX; 1 where amax is 0 or inf),
    byte = E4M3(block amax * (S_enc * float32(1/6))), data = E2M1(x * min(1 / (E4M3 value * (1 / S_enc)), FLT_MAX)).
    With 4over6: byte = E4M3((block amax / 6) * S_enc), and the same times 1.5. Only bfloat16 input goes through the
    Hadamard transform in TE; other dtypes follow its Python reference.
    """

    two_d: bool = False
    rht: bool = False
    sign_mask: int = TE_SIGN_MASK
    stochastic_rounding: bool = False
    seed: int = 0
    offset: int = 0
    random_bits: Array | tuple[Array, Array] | None = field(default=None, compare=False, repr=False)
    four_over_six: str | None = None
    e4m3_max: int = 448
    row_scaled: bool = False

    #: Elements along a block's edge.
    block_size = 16
    #: The element format.
    fmt = E2M1

    def __post_init__(self):
        for flag in ("two_d", "rht", "stochastic_rounding", "row_scaled"):
            require_flag(getattr(self, flag), flag)
        for integer, high in (("sign_mask", 1 << 16), ("seed", 1 << 64), ("offset", 1 << 64)):
            _normalise(self, **{integer: require_integer(getattr(self, integer), integer, low=0, high=high)})
        _normalise(self, four_over_six=require_choice(self.four_over_six, "four_over_six", (None, "mae", "mse")))
        _normalise(self, e4m3_max=require_choice(self.e4m3_max, "e4m3_max", (448, 256)))
        if self.e4m3_max == 256 and self.four_over_six is None:
            raise ValueError("e4m3_max=256 needs four_over_six='mae' or 'mse'; got four_over_six=None")
        exclusive = {
            "four_over_six": ("rht", "stochastic_rounding"),
            "row_scaled": ("two_d", "rht", "stochastic_rounding"),
            "rht": ("two_d",),
        }
        for name, others in exclusive.items():
            for other in others:
                if getattr(self, name) and getattr(self, other):
                    raise ValueError(
                        f"{name} cannot be combined with {other}; got {name}={getattr(self, name)!r}, "
                        f"{other}={getattr(self, other)!r}"
                    )
        self._check_random_bits()

    def _check_random_bits(self):
        if self.random_bits is None:
            return
        if not self.stochastic_rounding:
            raise ValueError("random_bits needs stochastic_rounding=True; got stochastic_rounding=False")
        pair = self.random_bits if isinstance(self.random_bits, tuple) else (self.random_bits,) * 2
        if len(pair) != 2:
            raise ValueError(f"random_bits must be one array or a (rowwise, columnwise) pair; got {len(pair)} arrays")
        for bits in pair:
            if not isinstance(bits, np.ndarray) or bits.dtype != np.uint8:
                raise TypeError(f"random_bits must hold uint8 arrays; got {shown(bits)}")


def _normalise(settings, **fields):
    """Store plain Python values in frozen `settings`: equal settings hash alike, and integers never overflow."""
    for name, value in fields.items():
        object.__setattr__(settings, name, value)


#: Any of the settings.
Scaling = DelayedScaling | CurrentScaling | BlockScaling | MXFP8Scaling | NVFP4Scaling
SCALINGS = (DelayedScaling, CurrentScaling, BlockScaling, MXFP8Scaling, NVFP4Scaling)


def require_scaling(scaling: Scaling) -> Scaling:
    """Return `scaling`, raising TypeError unless it is one of the settings above."""
    if not isinstance(scaling, SCALINGS):
        names = ", ".join(cls.__name__ for cls in SCALINGS)
        raise TypeError(f"scaling must be one of {names}; got {shown(scaling)}")
    return scaling
