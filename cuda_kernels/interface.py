"""The public calls of every backend: checks, the places of roundings, allocation. No arithmetic on tensors.

`Interface(backend)` has the calls of `refops` with the same signatures, checks and messages. A backend (`host` on the
CPU, kernels on a GPU) computes; `Backend` lists what it must offer. Which values TE's kernel path rounds before the
amax, the cast and the sum is read from `refops.ops.path_of`, and handed to the backend as a `Job`.
"""

import inspect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import numpy as np

import refops
from cuda_kernels.errors import NoKernelsError
from cuda_kernels.operands import ACCURATE, ELEMENT_FORMATS, EXACT, NO_PARAMETERS, PARAMETERS, Front
from refops.activations import DEFAULT_PARAMETERS, bind_activation
from refops.arguments import require_choice, require_flag, require_integer, require_name, shown
from refops.formats import ElementFormat, FloatFormat, require_format
from refops.hints import DTypeLike, Number
from refops.ops import SCALED_ACTIVATIONS, check_fusable, path_of
from refops.quantization.delayed import Algorithm
from refops.quantization.layout import one_order
from refops.quantization.quantize import check_shape, given_bits
from refops.quantization.result import stored_layout
from refops.rounding import PHILOX_BYTES, ROUNDING_MODES, STOCHASTIC
from refops.scalings import TE_SIGN_MASK, UNFUSED, Path, Scaling, require_scaling
from refops.scalings.arithmetic import REFERENCE

HADAMARD_GROUP = 16
_NOT_GIVEN = object()
#: What a backend returns: its arrays, its quantized tensors.
ArrayT = TypeVar("ArrayT")
QuantizedT = TypeVar("QuantizedT")


class Operand(NamedTuple):
    """A tensor argument as a backend sees it.

    Attributes:
        array: the backend's contiguous array of the tensor's elements, any shape; only the backend looks inside.
        shape: the tensor's shape.
        storage: "float32", "float16" or "bfloat16".
    """

    array: Any
    shape: tuple
    storage: str

    @property
    def dtype(self):
        """The dtype as an error message shows it."""
        return self.storage


@dataclass(frozen=True)
class Job:
    """A quantization: the front half, the settings, and the arrays to fill.

    Attributes:
        front: `operands.Front`, what is computed.
        path: `refops.ops.Path`, which values are rounded to `front.storage` before they are used.
        scaling: the settings, a `refops` scaling.
        rowwise, columnwise: which copies to make.
        fields: name -> array by the names of `refops.Quantized`: data (not initialised), scale_inv (zero: padding),
            amax where the scaling keeps one. Only those of the directions to make.
        random_bits: (rowwise (M, K), columnwise (K, M)) uint8 NumPy arrays, or (None, None).
        dbias: array (K,) of `front.storage` to fill with the column sums, or None.
        swizzled: store scales in the order that tensor-core GEMMs read.
    """

    front: Front
    path: Path
    scaling: Any
    rowwise: bool
    columnwise: bool
    fields: dict
    random_bits: tuple
    dbias: Any
    swizzled: bool


class Backend:
    """What `Interface` needs from a backend. Arrays are the backend's own; dtypes are names ("bfloat16", "uint8")."""

    def arithmetic(self, given):
        """Return what activations are computed in where a caller gave `arithmetic`, raising ValueError for others."""
        return require_choice(given, "arithmetic", (ACCURATE, EXACT))

    def tensor(self, value, name):
        """Return the argument as an `Operand`, contiguous; TypeError or ValueError as `refops.arguments.require_tensor`
        (at least one dimension; float32, float16 or bfloat16)."""
        raise NotImplementedError

    def elements(self, value, name):
        """As `tensor`, but scalars are allowed."""
        raise NotImplementedError

    def codes(self, value, name):
        """Return uint8 codes as an `Operand` with storage "uint8"; TypeError otherwise."""
        raise NotImplementedError

    def storage(self, dtype, name):
        """Return the name of a high-precision dtype that a caller gave, raising TypeError for others."""
        raise NotImplementedError

    def empty(self, shape, dtype):
        """Return an array to be filled, `dtype` a name."""
        raise NotImplementedError

    def zeros(self, shape, dtype):
        """Return an array of zeros."""
        raise NotImplementedError

    def widened(self, operand):
        """Return an `Operand` as one of float32, exact; itself if it is."""
        raise NotImplementedError

    def materialize(self, front, out, storage, dbias):
        """Fill `out`, of dtype `storage`, with the result of `front`, rounded once; NaN becomes the canonical NaN.

        `dbias`, unless None, is an array (K,) of `front.storage` for the column sums of the values as stored.
        """
        raise NotImplementedError

    def scaled_gradient(self, front, out, storage, scales_gradient, scales_storage):
        """Fill `out` (like x, of dtype `storage`) with the gradient of a row-scaled activation, and `scales_gradient`
        (M entries, of dtype `scales_storage`) with that of its row scales. `front.storage` is that of x and dy."""
        raise NotImplementedError

    def amax(self, front):
        """Return float32 (1,): the largest magnitude, NaN ignored, 0 for an empty tensor."""
        raise NotImplementedError

    def quantize(self, job):
        """Fill every array of a `Job`."""
        raise NotImplementedError

    def without_kernels(self, scaling):
        """What keeps a scaling that has kernels elsewhere from having this backend's; "" if it has them."""
        return ""

    def quantized(self, fields, scaling, shape, storage, swizzled):
        """Return the result object: `refops.Quantized` or the backend's own with the same attributes."""
        raise NotImplementedError

    def require_quantized(self, q):
        """Return the backend's quantized tensor `q`, scales in order; errors as `refops.dequantize`."""
        raise NotImplementedError

    def dequantize(self, q, out, storage):
        """Fill `out` with the values that `q` stands for."""
        raise NotImplementedError

    def hadamard(self, operand, sign_mask, inverse, out):
        """Fill `out` with groups of 16 along the last dimension transformed."""
        raise NotImplementedError

    def encode(self, operand, fmt, saturate, rounding, random_bits, out):
        """Fill uint8 `out` with codes; `random_bits` an `Operand` or None."""
        raise NotImplementedError

    def largest_code(self, codes):
        """Return the largest of an `Operand` of codes as int, 0 if it is empty."""
        raise NotImplementedError

    def decode(self, codes, fmt, out):
        """Fill float32 `out` with the values of `codes`."""
        raise NotImplementedError

    def update_delayed_scale(self, amax_history, scale, fmt, *, margin, algorithm, keep_unused):
        """As `refops.update_delayed_scale`."""
        raise NotImplementedError


def front_of(kind, bound, parameters, x, width, shape, *, dy=None, row_scales=None, interleave=0, arithmetic=ACCURATE):
    """Return the `Front` of an `Operand` x; `bound` is a `refops.activations.BoundActivation` or None."""
    if parameters:
        given = DEFAULT_PARAMETERS | parameters
        parameters = tuple(np.float32(given[name]) for name in PARAMETERS)
    return Front(
        kind=kind,
        name=None if bound is None else bound.activation.name,
        parameters=parameters or NO_PARAMETERS,
        x=x.array,
        dy=None if dy is None else dy.array,
        row_scales=row_scales,
        interleave=interleave,
        gated=bound is not None and bound.gated,
        width=width,
        tensor_shape=tuple(shape),
        storage=x.storage,
        arithmetic=arithmetic,
    )


class Interface(Generic[ArrayT, QuantizedT]):
    """The public calls over one backend. Signatures, results and errors are those of `refops`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    # --- front halves ---------------------------------------------------------------------------------

    def _identity(self, x):
        return front_of("identity", None, {}, x, x.shape[-1], x.shape)

    def _forward(self, name, x, params, arithmetic):
        arithmetic = self.backend.arithmetic(arithmetic)
        bound = bind_activation(name, params)
        x = self.backend.tensor(x, "x")
        width = _output_width(x, bound.gated)
        return front_of("forward", bound, bound.parameters, x, width, (*x.shape[:-1], width), arithmetic=arithmetic)

    def _backward(self, name, dy, x, params, arithmetic):
        arithmetic = self.backend.arithmetic(arithmetic)
        bound = bind_activation(name, params)
        dy, x = self.backend.tensor(dy, "dy"), self.backend.tensor(x, "x")
        width = _output_width(x, bound.gated)
        _require_output_shape(dy, x, width)
        if dy.storage != x.storage:
            raise TypeError(f"dy and x must have the same dtype; got {dy.dtype} and {x.dtype}")
        return front_of("backward", bound, bound.parameters, x, width, x.shape, dy=dy, arithmetic=arithmetic)

    def _scaled(self, name, dy, x, row_scales, glu_interleave_size, params, arithmetic):
        """Return the front of a row-scaled activation (no `dy`) or its gradient, and x and row_scales as they came."""
        require_name(name, "name", SCALED_ACTIVATIONS)
        bound = bind_activation(name, params)
        x, row_scales = self.backend.tensor(x, "x"), self.backend.tensor(row_scales, "row_scales")
        width, m = _output_width(x, bound.gated), math.prod(x.shape[:-1])
        if math.prod(row_scales.shape) != m:
            raise ValueError(f"row_scales must have one entry per row, {m}; got shape {row_scales.shape}")
        g = _require_interleave(glu_interleave_size, bound.gated, width)
        options = {"row_scales": self.backend.widened(row_scales).array, "interleave": g}
        options["arithmetic"] = self.backend.arithmetic(arithmetic)
        if dy is _NOT_GIVEN:
            front = front_of("forward", bound, bound.parameters, x, width, (*x.shape[:-1], width), **options)
            return front, x, row_scales
        dy = self.backend.tensor(dy, "dy")
        _require_output_shape(dy, x, width)
        read = x
        if dy.storage != x.storage:
            dy, read = self.backend.widened(dy), self.backend.widened(x)
        front = front_of("backward", bound, bound.parameters, read, width, x.shape, dy=dy, **options)
        return front, x, row_scales

    # --- activations ----------------------------------------------------------------------------------

    def activation(
        self, name: str, x: Any, *, out_dtype: DTypeLike | None = None, arithmetic: str = ACCURATE, **params: Number
    ) -> ArrayT:
        """As `refops.activation`: float32 arithmetic, one rounding to the output dtype."""
        return self._materialized(self._forward(name, x, params, arithmetic), out_dtype)

    @overload
    def activation_grad(
        self,
        name: str,
        dy: Any,
        x: Any,
        *,
        out_dtype: DTypeLike | None = ...,
        dbias: Literal[False] = ...,
        arithmetic: str = ...,
        **params: Number,
    ) -> ArrayT: ...
    @overload
    def activation_grad(
        self,
        name: str,
        dy: Any,
        x: Any,
        *,
        out_dtype: DTypeLike | None = ...,
        dbias: Literal[True],
        arithmetic: str = ...,
        **params: Number,
    ) -> tuple[ArrayT, ArrayT]: ...
    @overload
    def activation_grad(
        self,
        name: str,
        dy: Any,
        x: Any,
        *,
        out_dtype: DTypeLike | None = ...,
        dbias: bool,
        arithmetic: str = ...,
        **params: Number,
    ) -> ArrayT | tuple[ArrayT, ArrayT]: ...
    def activation_grad(
        self,
        name: str,
        dy: Any,
        x: Any,
        *,
        out_dtype: DTypeLike | None = None,
        dbias: bool = False,
        arithmetic: str = ACCURATE,
        **params: Number,
    ) -> ArrayT | tuple[ArrayT, ArrayT]:
        """As `refops.activation_grad`: dx, or (dx, dbias), dbias the sum of dx as stored."""
        require_flag(dbias, "dbias")
        return self._materialized(self._backward(name, dy, x, params, arithmetic), out_dtype, dbias)

    def scaled_activation(
        self,
        name: str,
        x: Any,
        row_scales: Any,
        *,
        glu_interleave_size: int = 0,
        out_dtype: DTypeLike | None = None,
        arithmetic: str = ACCURATE,
        **params: Number,
    ) -> ArrayT:
        """As `refops.scaled_activation`: the activation with each row multiplied by its scale."""
        front, _, _ = self._scaled(name, _NOT_GIVEN, x, row_scales, glu_interleave_size, params, arithmetic)
        return self._materialized(front, out_dtype)

    def scaled_activation_grad(
        self,
        name: str,
        dy: Any,
        x: Any,
        row_scales: Any,
        *,
        glu_interleave_size: int = 0,
        out_dtype: DTypeLike | None = None,
        arithmetic: str = ACCURATE,
        **params: Number,
    ) -> tuple[ArrayT, ArrayT]:
        """As `refops.scaled_activation_grad`: (dx, drow_scales)."""
        front, x, row_scales = self._scaled(name, dy, x, row_scales, glu_interleave_size, params, arithmetic)
        storage = self._output_storage(out_dtype, x.storage)
        out = self.backend.empty(x.shape, storage)
        scales_gradient = self.backend.empty(row_scales.shape, row_scales.storage)
        self.backend.scaled_gradient(front, out, storage, scales_gradient, row_scales.storage)
        return out, scales_gradient

    def _materialized(self, front, out_dtype, dbias=False):
        storage = self._output_storage(out_dtype, front.storage)
        out = self.backend.empty(front.tensor_shape, storage)
        sums = self.backend.empty(front.tensor_shape[-1:], front.storage) if dbias else None
        self.backend.materialize(front, out, storage, sums)
        return (out, sums) if dbias else out

    def _output_storage(self, dtype, default):
        return default if dtype is None else self.backend.storage(dtype, "out_dtype")

    # --- quantization ---------------------------------------------------------------------------------

    @overload
    def quantize(
        self,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = ...,
        columnwise: bool = ...,
        dbias: Literal[False] = ...,
        swizzled_scales: bool = ...,
    ) -> QuantizedT: ...
    @overload
    def quantize(
        self,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = ...,
        columnwise: bool = ...,
        dbias: Literal[True],
        swizzled_scales: bool = ...,
    ) -> tuple[QuantizedT, ArrayT]: ...
    @overload
    def quantize(
        self,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = ...,
        columnwise: bool = ...,
        dbias: bool,
        swizzled_scales: bool = ...,
    ) -> QuantizedT | tuple[QuantizedT, ArrayT]: ...
    def quantize(
        self,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        dbias: bool = False,
        swizzled_scales: bool = False,
    ) -> QuantizedT | tuple[QuantizedT, ArrayT]:
        """As `refops.quantize`; `swizzled_scales` stores scales as `Quantized.swizzled` would."""
        front = self._identity(self.backend.tensor(x, "x"))
        return self._quantized(front, UNFUSED, scaling, rowwise, columnwise, dbias, swizzled_scales)

    def activation_quantize(
        self,
        name: str,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        swizzled_scales: bool = False,
        arithmetic: str = ACCURATE,
        **params: Number,
    ) -> QuantizedT:
        """As `refops.activation_quantize`: the activation, quantized, rounded where TE's kernels round."""
        front = self._forward(name, x, params, arithmetic)
        check_fusable(front, scaling)
        return self._quantized(front, path_of(scaling), scaling, rowwise, columnwise, False, swizzled_scales)

    @overload
    def activation_grad_quantize(
        self,
        name: str,
        dy: Any,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = ...,
        columnwise: bool = ...,
        dbias: Literal[False] = ...,
        swizzled_scales: bool = ...,
        arithmetic: str = ...,
        **params: Number,
    ) -> QuantizedT: ...
    @overload
    def activation_grad_quantize(
        self,
        name: str,
        dy: Any,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = ...,
        columnwise: bool = ...,
        dbias: Literal[True],
        swizzled_scales: bool = ...,
        arithmetic: str = ...,
        **params: Number,
    ) -> tuple[QuantizedT, ArrayT]: ...
    @overload
    def activation_grad_quantize(
        self,
        name: str,
        dy: Any,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = ...,
        columnwise: bool = ...,
        dbias: bool,
        swizzled_scales: bool = ...,
        arithmetic: str = ...,
        **params: Number,
    ) -> QuantizedT | tuple[QuantizedT, ArrayT]: ...
    def activation_grad_quantize(
        self,
        name: str,
        dy: Any,
        x: Any,
        scaling: Scaling,
        *,
        rowwise: bool = True,
        columnwise: bool = False,
        dbias: bool = False,
        swizzled_scales: bool = False,
        arithmetic: str = ACCURATE,
        **params: Number,
    ) -> QuantizedT | tuple[QuantizedT, ArrayT]:
        """As `refops.activation_grad_quantize`: the gradient, quantized, with `dbias` also its column sums."""
        front = self._backward(name, dy, x, params, arithmetic)
        check_fusable(front, scaling)
        return self._quantized(front, path_of(scaling), scaling, rowwise, columnwise, dbias, swizzled_scales)

    def _quantized(self, front, path, scaling, rowwise, columnwise, dbias, swizzled):
        _require_kernels(scaling, self.backend)
        flags = {"rowwise": rowwise, "columnwise": columnwise, "dbias": dbias, "swizzled_scales": swizzled}
        for name, flag in flags.items():
            require_flag(flag, name)
        if not (rowwise or columnwise):
            raise ValueError("rowwise or columnwise must be True; got rowwise=False, columnwise=False")
        _check_swizzled(scaling, swizzled)
        swizzled = swizzled and scaling.layout.scale_order == "gemm"
        check_shape(scaling, front.tensor_shape, front.matrix_shape, columnwise)
        bits, fields = given_bits(scaling, front.matrix_shape, rowwise, columnwise), {}
        for name, (shape, dtype) in stored_layout(scaling, front.tensor_shape).items():
            if columnwise if "columnwise" in name else rowwise:
                allocate = self.backend.empty if name.endswith("_data") else self.backend.zeros
                fields[name] = allocate(shape, dtype.name)
        sums = self.backend.empty(front.matrix_shape[1:], front.storage) if dbias else None
        self.backend.quantize(Job(front, path, scaling, rowwise, columnwise, fields, bits, sums, swizzled))
        q = self.backend.quantized(fields, scaling, front.tensor_shape, front.storage, swizzled)
        return (q, sums) if dbias else q

    def dequantize(self, q: Any, *, dtype: DTypeLike = "float32") -> ArrayT:
        """As `refops.dequantize`."""
        storage = self.backend.storage(dtype, "dtype")
        q = self.backend.require_quantized(q)
        _require_kernels(q.scaling, self.backend)
        out = self.backend.empty(q.shape, storage)
        self.backend.dequantize(q, out, storage)
        return out

    def amax(self, x: Any) -> ArrayT:
        """Return the largest magnitude of `x`, float32 (1,); NaN is ignored, an empty tensor gives 0."""
        return self.backend.amax(self._identity(self.backend.tensor(x, "x")))

    def update_delayed_scale(
        self,
        amax_history: Any,
        scale: Any,
        fmt: FloatFormat,
        *,
        margin: int = 0,
        algorithm: Algorithm = "max",
        keep_unused: bool = True,
    ) -> tuple[ArrayT, Any]:
        """As `refops.update_delayed_scale`: (new_history, new_scale)."""
        return self.backend.update_delayed_scale(
            amax_history, scale, fmt, margin=margin, algorithm=algorithm, keep_unused=keep_unused
        )

    # --- elements -------------------------------------------------------------------------------------

    def hadamard_transform(self, x: Any, sign_mask: int = TE_SIGN_MASK, *, inverse: bool = False) -> ArrayT:
        """As `refops.hadamard_transform`, summed in float32 in four butterfly stages."""
        x = self.backend.tensor(x, "x")
        sign_mask = require_integer(sign_mask, "sign_mask", low=0, high=1 << 16)
        require_flag(inverse, "inverse")
        if x.shape[-1] % HADAMARD_GROUP:
            raise ValueError(f"x must have a last dimension divisible by 16; got shape {x.shape}")
        out = self.backend.empty(x.shape, x.storage)
        self.backend.hadamard(x, sign_mask, inverse, out)
        return out

    def encode(
        self,
        x: Any,
        fmt: ElementFormat,
        *,
        saturate: bool = True,
        rounding: str = "nearest_even",
        random_bits: Any = None,
    ) -> ArrayT:
        """As `refops.encode`: the codes of `x` in `fmt`, uint8."""
        x = self.backend.elements(x, "x")
        require_format(fmt)
        saturate = require_flag(saturate, "saturate")
        rounding = require_choice(rounding, "rounding", (*ROUNDING_MODES, STOCHASTIC))
        if rounding == STOCHASTIC:
            random_bits = self._require_random_bits(random_bits, x.shape, fmt)
        elif random_bits is not None:
            raise ValueError(f"random_bits needs rounding='stochastic'; got rounding={rounding!r}")
        out = self.backend.empty(x.shape, "uint8")
        self.backend.encode(x, fmt, saturate, rounding, random_bits, out)
        return out

    def _require_random_bits(self, random_bits, shape, fmt):
        if random_bits is None:
            raise ValueError("random_bits is required with rounding='stochastic'; got None")
        random_bits = self.backend.codes(random_bits, "random_bits")
        if random_bits.shape != shape:
            raise ValueError(f"random_bits must have the shape of x, {shape}; got {random_bits.shape}")
        if not fmt.has_subnormals:
            raise ValueError(f"rounding='stochastic' needs a format with a zero; got {fmt!r}")
        return random_bits

    def decode(self, codes: Any, fmt: ElementFormat) -> ArrayT:
        """As `refops.decode`: the float32 values of `codes` in `fmt`, exact."""
        codes = self.backend.codes(codes, "codes")
        require_format(fmt)
        largest = self.backend.largest_code(codes) if fmt.bits < 8 else 0
        if largest >= len(fmt.values):
            raise ValueError(f"codes must be below {len(fmt.values)} in {fmt!r}; got {largest}")
        out = self.backend.empty(codes.shape, "float32")
        self.backend.decode(codes, fmt, out)
        return out


_ARITHMETIC = """`arithmetic` is "accurate", that of TE's default build, or "exact", with the bits of `refops`; on a GPU
also "fast"."""


def _with_the_reference_s_docstrings(interface):
    """Let help() on a call show the arguments, results and errors of the call of the same name in `refops`."""
    for name, method in vars(interface).items():
        reference = getattr(refops, name, None)
        if reference is not None and not name.startswith("_"):
            more = [_ARITHMETIC] if "arithmetic" in inspect.signature(method).parameters else []
            method.__doc__ = "\n\n".join([method.__doc__, *more, inspect.getdoc(reference)])


_with_the_reference_s_docstrings(Interface)


# --- checks -----------------------------------------------------------------------------------------

#: Edges of blocks that kernels are made for.
BLOCKS = (16, 32, 64, 128)


def _require_kernels(scaling, backend):
    """Raise TypeError for anything but a scaling, `NoKernelsError` for one that a backend's kernels cannot make."""
    reason = _without_kernels(require_scaling(scaling)) or backend.without_kernels(scaling)
    if reason:
        raise NoKernelsError(f"scaling must be one that has kernels: {reason}; got {shown(scaling)}")


@lru_cache(maxsize=512)
def _without_kernels(scaling):
    """What keeps a scaling from having kernels; "" if it has them."""
    layout, fmt = scaling.layout, scaling.fmt
    if fmt not in ELEMENT_FORMATS:
        return f"elements in one of {', '.join(map(str, ELEMENT_FORMATS))}"
    if layout.packed not in (1, 2) or (layout.packed == 2 and (fmt.bits > 4 or layout.shape_multiple % 8)):
        return "one code in a byte, or two of e2m1 and sizes that divide by 8"
    if layout.block is None:
        return "" if layout.scale_format is None and layout.packed == 1 else "a float32 scale where a tensor has one"
    if layout.block[1] not in BLOCKS or layout.block[0] not in (1, layout.block[1]):
        return f"blocks of 1 x B or B x B elements, B one of {', '.join(map(str, BLOCKS))}"
    if not scaling.path.casts_rounded:
        return "values that are rounded before they are cast by blocks"
    chooses = scaling.choice(REFERENCE) is not None
    if chooses and not (layout.block[1] == 16 and layout.packed == 2 and layout.two_level):
        return "a choice of scales for blocks of 16 codes of e2m1 under a scale of the tensor"
    if scaling.random is not None and (layout.shape_multiple % PHILOX_BYTES or layout.packed != 2):
        return f"stochastic rounding to e2m1, of sizes that divide by {PHILOX_BYTES}"
    return ""


def _output_width(x, gated):
    if not gated:
        return x.shape[-1]
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even last dimension, [act | gate]; got shape {x.shape}")
    return x.shape[-1] // 2


def _require_output_shape(dy, x, width):
    expected = (*x.shape[:-1], width)
    if dy.shape != expected:
        raise ValueError(f"dy must have the shape of the activation's output, {expected}; got {dy.shape}")


def _require_interleave(glu_interleave_size, gated, width):
    g = require_integer(glu_interleave_size, "glu_interleave_size", low=0, high=1 << 62)
    if g and (not gated or g % 32 or width % g):
        raise ValueError(
            f"glu_interleave_size must be 0, or for gated activations a multiple of 32 that divides H={width}; got {g}"
        )
    return g


def _check_swizzled(scaling, swizzled):
    if swizzled and scaling.layout.scale_order == "fixed":
        raise ValueError(f"swizzled_scales must be False with {type(scaling).__name__}: {one_order(scaling)}; got True")
