"""Recipes: which format and scaling each tensor of a model gets, by the names of `transformer_engine.common.recipe`.

    with fuser.autocast(recipe=fuser.recipe.MXFP8BlockScaling()):
        y = model(x)

A recipe is plain data. Quantizers read it when they are made (`fuser.quantization.state`); changing a field of a recipe
in use takes effect at the next call of the model, which compares the values with those of the last one (not of
one under which torch.compile traced a call, whose code holds for its values: `RuntimeError`). Environment
variables give defaults and are read when a recipe is made (TE: when the module is imported).
"""

import functools
import math
import operator
import os
import pickle
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from refops.arguments import require_choice, shown, similar_names
from refops.products import CARDS
from refops.scalings import Scaling, as_code, require_scaling, row_of

#: How products can be computed: summed in float32, or as the tensor cores of a card do.
PRODUCTS = ("float32", *CARDS)


class _Maxima(NamedTuple):
    """Largest magnitudes of a format's forward and backward types."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Element types of forward and backward tensors; the value is `(max_fwd, max_bwd)`.

    HYBRID is E4M3 forward and E5M2 backward.
    """

    E2M1 = _Maxima(max_fwd=6, max_bwd=6)
    E4M3 = _Maxima(max_fwd=448, max_bwd=448)
    E5M2 = _Maxima(max_fwd=57344, max_bwd=57344)
    HYBRID = _Maxima(max_fwd=E4M3.max_fwd, max_bwd=E5M2.max_bwd)


@dataclass(frozen=True)
class MMParams:
    """Settings of a matrix product.

    Attributes:
        use_split_accumulator: where a tensor core sums in fewer bits than float32, add its partial sums in float32
            registers now and then. Products that a card computes follow it (`fuser.products`); others are float32.
    """

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Settings of the quantization of one kind of tensor.

    Attributes:
        power_2_scale: scales are powers of two.
        amax_epsilon: lower bound of an amax.
        random_hadamard_transform, stochastic_rounding, fp4_2d_quantization: NVFP4's.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _flag(variable: str, default: str = "0") -> Any:
    """A field whose default is an environment variable's truth."""
    return field(default_factory=lambda: os.getenv(variable, default) == "1")


def _backward_override() -> Any:
    return field(default_factory=lambda: os.getenv("NVTE_BACKWARD_OVERRIDE") or None)


class _Derived:
    """Value of a field that follows from others until it is assigned: computed when read, so that edits of its sources
    count. Has no setter: an assigned value hides it.
    """

    def __init__(self, derive: Callable[[Any], QParams]):
        self.derive = derive

    def __get__(self, recipe, owner=None):
        return self if recipe is None else self.derive(recipe)


_qparams = functools.cache(QParams)  # derived ones are read at every call of a model

_CURRENT_SCALING_QPARAMS: Any = _Derived(lambda recipe: _qparams(power_2_scale=bool(recipe.use_power_2_scales)))
_BLOCK_SCALING_QPARAMS: Any = _Derived(lambda recipe: _qparams(power_2_scale=not recipe.use_f32_scales))
_NVFP4_INPUT_QPARAMS: Any = _Derived(lambda recipe: _qparams(random_hadamard_transform=not recipe.disable_rht))
_NVFP4_WEIGHT_QPARAMS: Any = _Derived(lambda recipe: _qparams(fp4_2d_quantization=not recipe.disable_2d_quantization))
_NVFP4_GRADIENT_QPARAMS: Any = _Derived(
    lambda recipe: _qparams(
        random_hadamard_transform=not recipe.disable_rht, stochastic_rounding=not recipe.disable_stochastic_rounding
    )
)


def _require(condition: bool, message: str) -> None:
    """TE's recipes assert; an explicit raise survives `python -O`."""
    if not condition:
        raise AssertionError(message)


def constant_of_graph(value: Any) -> tuple[str, dict[str, Any]]:
    """The code for a constant of a graph of torch.compile, and what its names stand for.

    One that can't be pickled is itself what a name stands for: such a graph can't be kept in a file.
    """
    try:
        return f"_restored({pickle.dumps(value)!r})", {"_restored": _restored}
    except (pickle.PicklingError, AttributeError, TypeError):  # of a function that is local to another
        name = f"_fuser_constant_{id(value)}"
        return name, {name: value}


@functools.lru_cache(maxsize=256)
def _restored(pickled):
    return pickle.loads(pickled)


#: What recipes without a field for it say of each product: TE's flags.
_MM_PARAMS = {"fprop": MMParams(use_split_accumulator=False), "dgrad": MMParams(), "wgrad": MMParams()}


@dataclass(repr=False, eq=False)
class Recipe:
    """Base of all recipes. The predicates are classmethods: they answer for a recipe and for its class.

    Attributes:
        products: how products are computed, a name of `fuser.products`; None: the recipe doesn't say. (Not in TE.)
    """

    products: str | None = field(default=None, kw_only=True)

    if TYPE_CHECKING:  # a field that every recipe has, each at another position

        @property
        def backward_override(self) -> str | None: ...

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether it is NVFP4 block scaling."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether it is MXFP8 block scaling."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        """Whether it is delayed scaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether it is per-tensor current scaling."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether a tensor has one scale: delayed or current scaling."""
        return issubclass(cls, DelayedScaling | Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether it is FP8 with float32 block scales."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether quantizers come from a function of the user's."""
        return issubclass(cls, CustomRecipe)

    @classmethod
    def block_scaled(cls) -> bool:
        """Whether it is given its scalings. (Not in TE.)"""
        return issubclass(cls, BlockScaledRecipe)

    def product_params(self, product: str) -> MMParams:
        """Settings of the products "fprop", "dgrad" or "wgrad". (Not in TE.)"""
        return getattr(self, f"fp8_gemm_{product}", _MM_PARAMS[product])

    @property
    def title(self) -> str:
        """Its class and what differs from the class's defaults, as "Float8CurrentScaling hopper". (Not in TE.)"""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        own = {entry.name: values[entry.name] for entry in fields(self) if values[entry.name] != _default(entry, self)}
        card = own.pop("products", "")
        return " ".join(
            filter(None, [type(self).__name__, card, *(f"{n}={_shown(value)}" for n, value in own.items())])
        )

    def fingerprint(self) -> str:
        """A string that is equal for recipes of equal class and values."""
        own = sorted(fields(self), key=operator.attrgetter("kw_only"))  # before those of all recipes
        values = ", ".join(f"{f.name}={_shown(getattr(self, f.name))}" for f in own)
        return f"{type(self).__name__}({values})"

    def __repr__(self):
        return self.fingerprint()

    def __eq__(self, other):
        return other is self or (type(other) is type(self) and self.fingerprint() == other.fingerprint())

    def __hash__(self):
        return hash(self.fingerprint())

    def __setattr__(self, name, value):
        if "_held" in self.__dict__:
            raise RuntimeError(
                f"{name} can't be changed: code that torch.compile made holds for the present values of this "
                f"{type(self).__name__}. Make another recipe, as by dataclasses.replace(recipe, {name}=...)"
            )
        if name == "products" and value is not None:
            require_choice(value, name, PRODUCTS)
        object.__setattr__(self, name, value)

    def hold_values(self) -> None:
        """Let the values change no more: `RuntimeError` from now on. Copies are not held."""
        self.__dict__["_held"] = True

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "_held"}

    def __fx_repr__(self):
        return constant_of_graph(self)

    def _check_backward_override(self):
        _require(
            self.backward_override in (None, "high_precision", "dequantized"),
            f"backward_override must be None, 'high_precision' or 'dequantized'; got {shown(self.backward_override)}",
        )

    def _check_positive_integer(self, name):
        value = getattr(self, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        _require(is_count, f"{name} must be a positive integer; got {shown(value)}")

    def _check_not_e5m2(self):
        _require(
            isinstance(self.fp8_format, Format),
            f"fp8_format must be a Format, as Format.E4M3; got {shown(self.fp8_format)}",
        )
        _require(self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported.")


def _default(entry: Any, recipe: Recipe) -> Any:
    """The default of a field of a recipe; MISSING if it has none."""
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    return entry.default.derive(recipe) if isinstance(entry.default, _Derived) else entry.default


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Format) else repr(value)


@dataclass(repr=False)
class DelayedScaling(Recipe):
    """FP8 with one scale for each tensor, taken from the amaxes of earlier steps.

    Attributes:
        margin: scales are made smaller by 2^margin.
        fp8_format: HYBRID or E4M3.
        amax_history_len: steps remembered, a positive integer.
        amax_compute_algo: "max", "most_recent", or a function from the history, (L, n), to amaxes (n,).
        scaling_factor_compute_algo: None, or a function `(amax, scale, fp8_max, recipe)` to new scales (n,).
        reduce_amax: take the largest amax over the amax reduction group of `autocast`.
        fp8_dpa, fp8_mha: attention's; unused here.
        backward_override: must be None.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _backward_override()

    def __post_init__(self):
        self._check_not_e5m2()
        _require(
            self.backward_override is None,
            f"Delayed scaling does not support backward_override; got {shown(self.backward_override)}",
        )
        is_number = isinstance(self.margin, int | float) and not isinstance(self.margin, bool)
        _require(is_number and math.isfinite(self.margin), f"margin must be a finite number; got {shown(self.margin)}")
        _require(
            callable(self.amax_compute_algo) or self.amax_compute_algo in ("max", "most_recent"),
            f"amax_compute_algo must be 'max', 'most_recent' or a callable; got {shown(self.amax_compute_algo)}",
        )
        self._check_positive_integer("amax_history_len")


@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale for each tensor, from its own amax.

    Attributes:
        use_power_2_scales: round scales down to powers of two.
        fp8_format: HYBRID or E4M3.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: settings of the products.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: `QParams` of inputs, weights, gradients; they
            follow `use_power_2_scales` (in TE only the environment variable) until they are assigned.
        backward_override: None, "high_precision" or "dequantized": how backward products are computed.
    """

    use_power_2_scales: bool = _flag("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _backward_override()
    fp8_quant_fwd_inp: QParams = field(init=False, default=_CURRENT_SCALING_QPARAMS)
    fp8_quant_fwd_weight: QParams = field(init=False, default=_CURRENT_SCALING_QPARAMS)
    fp8_quant_bwd_grad: QParams = field(init=False, default=_CURRENT_SCALING_QPARAMS)

    def __post_init__(self):
        self._check_not_e5m2()
        self._check_backward_override()


@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power-of-two scale for 32 elements.

    Attributes:
        margin: stored, without effect, as in TE.
        fp8_format: E4M3 (E5M2 is refused; HYBRID gives E5M2 gradients).
        enable_2d_quantization: one scale for 32x32 elements of a weight.
        backward_override: None, "high_precision" or "dequantized".
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    enable_2d_quantization: bool = False
    backward_override: str | None = _backward_override()

    def __post_init__(self):
        self._check_not_e5m2()
        self._check_backward_override()


@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """FP8 with a float32 scale for 1x128 elements (inputs, gradients) or 128x128 (weights).

    Attributes:
        use_f32_scales: scales are any float32 instead of powers of two.
        fp8_format: E4M3 (E5M2 is refused).
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 or 2; no two operands of a product can be 2.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: settings of the products.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: `QParams`; they follow `use_f32_scales` (in TE only
            the environment variable) until they are assigned.
        backward_override: None, "high_precision" or "dequantized".
    """

    use_f32_scales: bool = _flag("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = _backward_override()
    fp8_quant_fwd_inp: QParams = field(init=False, default=_BLOCK_SCALING_QPARAMS)
    fp8_quant_fwd_weight: QParams = field(init=False, default=_BLOCK_SCALING_QPARAMS)
    fp8_quant_bwd_grad: QParams = field(init=False, default=_BLOCK_SCALING_QPARAMS)

    def __post_init__(self):
        dims = {name: getattr(self, f"{name}_block_scaling_dim") for name in ("x", "w", "grad")}
        for name, dim in dims.items():
            _require(dim in (1, 2), f"Only 1D or 2D blocks supported for {name}; got {name}_block_scaling_dim={dim!r}")
        two_d = [name for name, dim in dims.items() if dim == 2]
        _require(len(two_d) < 2, f"2D by 2D block gemm not supported; got 2D blocks for {' and '.join(two_d)}")
        self._check_not_e5m2()
        self._check_backward_override()
        _require(not (self.fp8_dpa or self.fp8_mha), "FP8 attention is not supported with Float8BlockScaling")


_SCOPES = ("none", "weights", "activations", "all")


@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """FP4 (E2M1) with an E4M3 scale for 16 elements and a float32 amax for the tensor.

    Attributes:
        disable_rht: no random Hadamard transform of inputs and gradients.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: weights get a scale for 16 elements instead of 16x16.
        fp4_format, fp8_format: E2M1 and E4M3.
        row_scaled_activation: an amax for each row of forward tensors other than weights.
        nvfp4_4over6: which forward tensors try a block maximum of 4 besides 6: "none", "weights", "activations", "all".
        nvfp4_4over6_e4m3_use_256: which of those limit block scales to 256.
        nvfp4_4over6_err_mode: "MAE" or "MSE".
        fp4_quant_fwd_inp, fp4_quant_fwd_weight, fp4_quant_bwd_grad: the `QParams` that follow, until they are assigned.
        backward_override: None, "high_precision" or "dequantized".
    """

    disable_rht: bool = _flag("NVTE_NVFP4_DISABLE_RHT")
    disable_stochastic_rounding: bool = _flag("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING")
    disable_2d_quantization: bool = _flag("NVTE_NVFP4_DISABLE_2D_QUANTIZATION")
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    row_scaled_activation: bool = _flag("NVTE_NVFP4_ROW_SCALED_ACTIVATION")
    nvfp4_4over6: str = field(default_factory=lambda: os.getenv("NVTE_NVFP4_4OVER6", "none").lower())
    nvfp4_4over6_e4m3_use_256: str = field(
        default_factory=lambda: os.getenv("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all").lower()
    )
    nvfp4_4over6_err_mode: str = field(default_factory=lambda: os.getenv("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE").upper())
    backward_override: str | None = _backward_override()
    fp4_quant_fwd_inp: QParams = field(init=False, default=_NVFP4_INPUT_QPARAMS)
    fp4_quant_fwd_weight: QParams = field(init=False, default=_NVFP4_WEIGHT_QPARAMS)
    fp4_quant_bwd_grad: QParams = field(init=False, default=_NVFP4_GRADIENT_QPARAMS)

    def __post_init__(self):
        _require(self.fp4_format == Format.E2M1, "Only E2M1 is supported for NVFP4 scaling")
        _require(self.fp8_format == Format.E4M3, "Only E4M3 is supported for NVFP4 scaling")
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            scope = getattr(self, name)
            _require(scope in _SCOPES, f"{name} must be one of {', '.join(_SCOPES)}; got {shown(scope)}")
        mode = self.nvfp4_4over6_err_mode
        _require(mode in ("MAE", "MSE"), f"nvfp4_4over6_err_mode must be MAE or MSE; got {shown(mode)}")
        _require(
            self.disable_rht or self.nvfp4_4over6 not in ("activations", "all"),
            f"nvfp4_4over6={self.nvfp4_4over6!r} can't be combined with the random Hadamard transform of activations: "
            "set disable_rht=True",
        )
        self._check_backward_override()


@dataclass(repr=False)
class CustomRecipe(Recipe):
    """Quantizers from a function of the user's.

    Attributes:
        qfactory: `qfactory(role: QuantizerRole) -> Quantizer | DelayedScalingRequest`.
        quantization_alignment: what padded sizes must be divisible by, a positive integer.
        backward_override: None, "high_precision" or "dequantized".
    """

    qfactory: Callable[..., Any]
    fp8_dpa: bool = False
    fp8_mha: bool = False
    quantization_alignment: int = 128
    backward_override: str | None = _backward_override()

    def __post_init__(self):
        _require(callable(self.qfactory), f"qfactory must be a function of a QuantizerRole; got {shown(self.qfactory)}")
        self._check_positive_integer("quantization_alignment")
        self._check_backward_override()


@dataclass(repr=False)
class BlockScaledRecipe(Recipe):
    """Blocks with scales of their own, by any scalings that `refops.scalings` declares. TE has no such recipe.

        with fuser.autocast(recipe=fuser.recipe.BlockScaledRecipe(MXFP8Scaling(E4M3, scale_rounding="floor"))):
            y = model(x)

    Products dequantize their operands and accumulate in float32 (`fuser.gemm` says what a GPU multiplies natively).
    The backend is chosen at each call: `fuser.backend("reference")` takes every scaling, the others refuse what
    `cuda_kernels` cannot make.

    Attributes:
        scaling: of inputs and outputs, and of whatever has none of its own.
        weight, gradient: of weights and of gradients; None: `scaling`.
        backward_override: None, "high_precision" or "dequantized".

    Raises:
        TypeError: no declared scaling. ValueError: one scale for the tensor.
    """

    scaling: Scaling
    weight: Scaling | None = None
    gradient: Scaling | None = None
    backward_override: str | None = _backward_override()

    def __post_init__(self):
        for name in ("scaling", "weight", "gradient"):
            given = getattr(self, name)
            if (given is not None or name == "scaling") and require_scaling(given).layout.block is None:
                raise ValueError(f"{name} must have blocks; TE's recipes are for one scale a tensor; got {given}")
        self._check_backward_override()

    def scaling_of(self, tensor_type: str) -> Scaling:
        """The scaling of "input", "weight", "output", "grad_output" or "grad_input"."""
        own = {"weight": self.weight, "grad_output": self.gradient, "grad_input": self.gradient}.get(tensor_type)
        return self.scaling if own is None else own

    @property
    def quantization_alignment(self) -> int:
        """What padded sizes must be divisible by: whole blocks of all three."""
        layouts = [scaling.layout for scaling in (self.scaling, self.weight, self.gradient) if scaling is not None]
        return math.lcm(*(n for layout in layouts for n in (*(layout.block or ()), layout.shape_multiple)))


# --- hints in errors --------------------------------------------------------------------------------


def _expression_of(word: object) -> str | None:
    """The expression that makes the recipe a word probably means, such as "nvfp4"; None if no recipe is like it."""
    classes = {cls.__name__: cls for cls in Recipe.__subclasses__()}
    stem = str(word).lower().removesuffix("scaling").removesuffix("block")
    named = [name for name in classes if stem and name.lower().startswith(stem)]
    row = row_of(stem)
    if not named and row is not None and row.scaling.layout.block is not None:
        return f"fuser.recipe.BlockScaledRecipe({as_code(row.scaling)})"
    for name in named or similar_names(word, classes):
        required = any(one.default is MISSING and one.default_factory is MISSING for one in fields(classes[name]))
        return f"fuser.recipe.{name}({'...' if required else ''})"
    return None


if not TYPE_CHECKING:  # for a type checker, a name that is not here is an error

    def __getattr__(name: str) -> NoReturn:
        meant = None if name.startswith("_") else _expression_of(name)
        hint = f" (did you mean {meant}?)" if meant else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
