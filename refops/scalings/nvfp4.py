"""NVFP4: E2M1 elements, an E4M3 (or UE5M3) scale for 16 of them, a float32 amax for the tensor.

Sources: TE `common/cast/nvfp4/core_nvfp4.cuh` (scales), `quantize_transpose_nvfp4.cuh` (data),
`quantize_4over6_nvfp4.cuh` (4over6), `dequantize_nvfp4.cuh`; of UE5M3 those of TE's pull request 3325, c2d9c991.
The order of every float32 operation is theirs.
"""

from dataclasses import dataclass, field

import numpy as np

from refops.arguments import require_integer, shown
from refops.formats import E2M1, E4M3, UE5M3, FloatFormat, require_format
from refops.hints import Array
from refops.scalings.arithmetic import F
from refops.scalings.declaration import (
    UNFUSED,
    Choice,
    Formulas,
    Layout,
    NamedScaling,
    Path,
    RandomBits,
    Rule,
    Words,
    choose,
    coded_scale,
    flags,
    normalise,
)
from refops.scalings.rules import MinifloatScaling

SIX = F(6)

#: TE's fixed sign mask of the random Hadamard transform: bit i set means sign i is -1.
TE_SIGN_MASK = 0xD7E8
FUSED = Path("FUSED_ACTIVATION_AMAX_NVFP4", casts_rounded=True, amax_rounded=False, dbias_rounded=True)


@dataclass(frozen=True)
class NVFP4Scaling(MinifloatScaling):
    """NVFP4: E2M1 elements, one E4M3 (or UE5M3) scale for 16 of them, one float32 amax for the tensor.

    Attributes:
        two_d: one block scale for a 16x16 tile (weights).
        rht: apply the 16-point random Hadamard transform to the columnwise copy. The rowwise copy is as without.
        sign_mask: 16 bits, the transform's signs: bit i set means -1. TE's constant is 0xD7E8, drawn at random once; 0
            means no signs.
        stochastic_rounding: round elements stochastically; scales stay nearest-even.
        seed, offset: 64-bit Philox key and counter for the random bits. Each 16-element block has its own Philox
            subsequence: its row-major number in the stored layout, columnwise blocks counted after all rowwise ones.
            Without `stochastic_rounding` nothing reads them.
        random_bits: the random bits themselves, instead of seed and offset: uint8, one byte an element, of shape (M, K)
            for rowwise, (K, M) for columnwise output, or a pair of both. Not part of equality.
        four_over_six: try block maximum -> 4 besides -> 6 and keep the one with the smaller error, "mae" or "mse".
        e4m3_max: largest block scale in E4M3, 448 or (with `four_over_six`) 256.
        row_scaled: one amax for each row (and each column, columnwise) instead of one for the tensor.
        scale_format: E4M3, or UE5M3: no sign, up to 114688. In UE5M3 the largest block scale is 114688, or 65536 with
            `four_over_six`, and e4m3_max has no effect: it must stay 448.
        tensor_level: False: no amax of the tensor, as if S_enc were 1. For UE5M3 scales, whose range does without.
        fast_error: with `four_over_six` and E4M3 scales, compare before S_enc is undone: the error of an element is
            code * block scale - x * S_enc (TE: NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH).

    E4M3 scales, in float32 and in this order: S_enc = e4m3_max * 6 / amax (at most FLT_MAX; 1 where amax is 0 or inf),
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
    scale_format: FloatFormat = E4M3
    tensor_level: bool = True
    fast_error: bool = False

    # What `Scaling` says of every class: its place among the scalings, its name in sentences, and which fields kernels
    # take as arguments, so that another value compiles none anew.
    order = 50
    title = "NVFP4"
    block_size = 16
    fmt = E2M1
    at_run_time = ("sign_mask", "seed", "offset", "random_bits")

    def __post_init__(self):
        flags(self, "two_d", "rht", "stochastic_rounding", "row_scaled", "tensor_level", "fast_error")
        for integer, high in (("sign_mask", 1 << 16), ("seed", 1 << 64), ("offset", 1 << 64)):
            normalise(self, **{integer: require_integer(getattr(self, integer), integer, low=0, high=high)})
        choose(self, four_over_six=(None, "mae", "mse"), e4m3_max=(448, 256))
        if self.e4m3_max == 256 and self.four_over_six is None:
            raise ValueError("e4m3_max=256 needs four_over_six='mae' or 'mse'; got four_over_six=None")
        require_format(self.scale_format, (E4M3, UE5M3), "scale_format")
        if self.scale_format != E4M3 and self.e4m3_max != 448:
            raise ValueError(f"e4m3_max=256 needs scale_format=E4M3; got scale_format={self.scale_format}")
        if self.fast_error and (self.four_over_six is None or self.scale_format != E4M3):
            raise ValueError(
                "fast_error=True needs four_over_six='mae' or 'mse' and scale_format=E4M3; "
                f"got four_over_six={self.four_over_six!r}, scale_format={self.scale_format}"
            )
        if not self.tensor_level and (self.scale_format == E4M3 or self.four_over_six or self.row_scaled):
            raise ValueError(
                "tensor_level=False needs scale_format=UE5M3 without four_over_six and row_scaled; "
                f"got scale_format={self.scale_format}, four_over_six={self.four_over_six!r}, "
                f"row_scaled={self.row_scaled}"
            )
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

    @property
    def layout(self) -> Layout:
        """Columnwise data and scales are those of the transpose."""
        return Layout(
            block=(16, 16) if self.two_d else (1, 16),
            scale_format=self.scale_format,
            repeated=self.two_d,
            padding=(128, 4),
            packed=2,
            amax=("rows" if self.row_scaled else "tensor") if self.tensor_level else None,
            two_level=self.tensor_level,
            scale_order="gemm",
            shape_multiple=16,
            columnwise_multiple=32 if self.row_scaled else 16,
        )

    @property
    def path(self) -> Path:
        """Behind an activation, row scaling and the Hadamard transform are kernels of their own.

        They read the activation's result as it was stored, rounded to the tensor's dtype; the fused kernel's amax is
        that of the unrounded float32.
        """
        return UNFUSED if self.row_scaled or self.rht else FUSED

    @property
    def hadamard(self) -> int | None:
        """The sign mask, with `rht`."""
        return self.sign_mask if self.rht else None

    @property
    def random(self) -> RandomBits | None:
        """Philox or the caller's bits, with `stochastic_rounding`."""
        return RandomBits(self.seed, self.offset, self.random_bits) if self.stochastic_rounding else None

    @property
    def only_rowwise(self) -> str:
        """TE has no columnwise copy of the two together."""
        return "row_scaled and four_over_six together" if self.row_scaled and self.four_over_six else ""

    @property
    def scale_max(self) -> int:
        """The block scale of the block that holds the tensor's amax: 4over6 needs room for one 1.5 times larger."""
        if self.scale_format == E4M3:
            return self.e4m3_max
        return 65536 if self.four_over_six else 114688

    @property
    def formulas(self) -> Formulas:
        """Two levels, or one."""
        fmt = repr(self.scale_format)
        if not self.tensor_level:
            return Formulas(
                "1 / block scale, at most FLT_MAX", decode="block scale", stored=f"{fmt}(block amax * f32(1/6))"
            )
        byte = f"{fmt}(block amax * (S_enc * f32(1/6)))"
        if self.four_over_six:
            error = {"mae": "absolute", "mse": "squared"}[self.four_over_six]
            error += " error before S_enc is undone" if self.fast_error else " error"
            byte = f"{fmt}(block amax / 6 * S_enc), or of 1.5 times that (amax becomes 4, not 6): smaller {error}"
        down = f"f32(1/{self.top})"
        return Formulas(
            "1 / (block scale * (1 / S_enc)), at most FLT_MAX",
            decode=f"(block scale * amax) * {down}" if self.scale_format == E4M3 else f"block scale * (amax * {down})",
            stored=byte,
            tensor_scale=f"{self.scale_max} * 6 / {{whose}} amax (0 or inf: 1), at most FLT_MAX",
        )

    @property
    def top(self) -> float:
        """What the tensor's amax is mapped to."""
        return 6 * self.scale_max

    def decode_factor(self, words: Words) -> Rule:
        """TE's order for E4M3 and for UE5M3 under a scale of the tensor differ."""
        if self.scale_format == E4M3 or not self.tensor_level:
            return super().decode_factor(words)
        decode, down = words.decode(self.scale_format), F(1) / F(self.top)

        @words.function
        def factor(stored, amax):
            return decode(stored) * (amax * down)

        return factor

    def choice(self, words: Words) -> Choice | None:
        """4over6: factor 1 maps a block's maximum to 6, factor 1.5 to 4."""
        if self.four_over_six is None:
            return None
        encode, multiplier = words.encode(self.scale_format), self.multiplier(words)
        top, square, magnitude = F(self.top), self.four_over_six == "mse", words.magnitude
        tensor_scale, rounded = self.tensor_scale(words), words.rounded

        def candidate(factor):
            @words.function
            def code(amax, tensor_scale, p):
                s_enc, _ = tensor_scale
                return encode(((amax / SIX) * s_enc) * factor)

            return coded_scale(words, code, multiplier)

        @words.function
        def error(value, scale, amax, x):
            difference = ((value * scale) * amax) / top - x
            return difference * difference if square else magnitude(difference)

        @words.function
        def fast_error(value, scale, amax, x):
            # TE multiplies code and scale in float16, which holds the product of 2 and 4 bits as float32 does.
            s_enc, _ = tensor_scale(amax)
            difference = value * scale - rounded(x * s_enc)
            return difference * difference if square else magnitude(difference)

        return Choice((candidate(F(1)), candidate(F(1.5))), fast_error if self.fast_error else error)


NAMED = (
    NamedScaling(
        "nvfp4-1x16",
        NVFP4Scaling(),
        "NVFP4: E2M1, one E4M3 scale per 16 elements, one float32 amax for the tensor.",
        title="NVFP4 1x16",
    ),
    NamedScaling(
        "nvfp4-16x16",
        NVFP4Scaling(two_d=True),
        "NVFP4 with one E4M3 scale per 16x16 tile (TE's weights).",
        title="NVFP4 16x16",
    ),
    NamedScaling(
        "nvfp4-rht",
        NVFP4Scaling(rht=True),
        "NVFP4 after a random Hadamard transform of 16 rows: the columnwise copy, transform undone.",
        columnwise=True,
        title="NVFP4 with random Hadamard transform",
    ),
    NamedScaling(
        "nvfp4-4over6",
        NVFP4Scaling(four_over_six="mae", e4m3_max=256),
        "NVFP4 that maps each block's maximum to 6 or to 4, whichever has the smaller absolute error.",
        title="NVFP4, maximum mapped to 4 or 6",
    ),
    NamedScaling(
        "nvfp4-stochastic",
        NVFP4Scaling(stochastic_rounding=True),
        "NVFP4 with stochastic rounding (TE's gradients), seed 0.",
        title="NVFP4, stochastic rounding",
    ),
    NamedScaling(
        "nvfp4-row-scaled",
        NVFP4Scaling(row_scaled=True),
        "NVFP4 with one float32 amax per row (per token).",
        title="NVFP4, one amax a row",
    ),
    NamedScaling(
        "nvfp4-ue5m3",
        NVFP4Scaling(scale_format=UE5M3),
        "NVFP4 with UE5M3 block scales: more range, no sign.",
        title="NVFP4, UE5M3 scales",
    ),
    NamedScaling(
        "nvfp4-ue5m3-alone",
        NVFP4Scaling(scale_format=UE5M3, tensor_level=False),
        "NVFP4 with UE5M3 block scales and no amax of the tensor.",
        title="NVFP4, UE5M3 scales alone",
    ),
)
