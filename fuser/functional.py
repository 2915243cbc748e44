"""The functions of TE's PyTorch extension (`transformer_engine_torch`): activations, gradients, casts, with quantizers.

    y = gelu(x)                              like x
    q = swiglu(x, MXFP8Quantizer(...))       what the quantizer makes: a quantized tensor, or its bare storage
    dx = dswiglu(dy, x)
    dbias, dx = dbias_dgelu(dy, x, quantizer)

Tensors in, tensors out; autograd is the ops' business. Which values are rounded before they are quantized depends on
the quantizer, as in TE (`refops.scalings.Path`); f is the activation in float32:

| quantizer                                     | path                         | amax of   | cast of   | dbias of  |
|-----------------------------------------------|------------------------------|-----------|-----------|-----------|
| None                                          | FULLY_FUSED                  |           | f         | rounded f |
| Float8Quantizer (delayed)                     | FULLY_FUSED                  | f         | f         | f         |
| MXFP8Quantizer                                | FULLY_FUSED                  | rounded f | rounded f | f         |
| Float8CurrentScalingQuantizer                 | FUSED_ACTIVATION_AMAX_FP8    | f         | rounded f | rounded f |
| NVFP4Quantizer                                | FUSED_ACTIVATION_AMAX_NVFP4  | f         | rounded f | rounded f |
| NVFP4Quantizer with RHT or row scaling, Float8BlockQuantizer | UNFUSED       | rounded f | rounded f | rounded f |
| BlockScaledQuantizer                          | what its scaling declares    |           |           |           |
| with an amax reduction group, custom quantizers              | UNFUSED       | rounded f | rounded f | rounded f |

"rounded" means: to the dtype of the input.

Errors: TypeError for what is no plain tensor, for dtypes other than float32, float16 and bfloat16, and for gradient and
input of different dtypes; ValueError for shapes that do not belong together, odd gated widths, parameters out of range.
Unlike in TE quantizers are optional everywhere, `dbias_*` without one return an unquantized gradient, and there is a
`dbias_*` for every activation.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch

from fuser import dispatch
from fuser.common import publish
from fuser.dtypes import DType, require_torch_tensor, torch_dtype
from fuser.quantization.grouped import GroupedTensorStorage, allocate
from fuser.quantization.quantizer import Quantizer, observed
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.tracing import traced_without_quantizer, untraced
from refops.activations import ACTIVATIONS
from refops.arguments import require_flag, require_integer, require_list, require_name, say_who, shown
from refops.ops import SCALED_ACTIVATIONS

_GATED = frozenset(name for name, row in ACTIVATIONS.items() if row.gated)

# --- checks, in the words of the arguments here -----------------------------------------------------


def _require_input(tensor, name):
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:  # without a call, where it is
        require_torch_tensor(tensor, name)
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension; got a scalar")


def _output_shape(name, x, argument):
    """Shape of an activation's output."""
    if name not in _GATED:
        return x.shape
    if x.shape[-1] % 2:
        raise ValueError(
            f"Wrong input shape. Expected (after flattening) last dimension to be even: "
            f"{argument} has shape {tuple(x.shape)}, and {name} reads rows [act | gate]"
        )
    return torch.Size((*x.shape[:-1], x.shape[-1] // 2))


def _require_activation(name):
    if not isinstance(name, str) or name not in ACTIVATIONS:
        require_name(name, "name", ACTIVATIONS)


def _check_backward(name, grad, x, *, same_dtype=True):
    """Check a gradient of an activation's output; TE wants its elements in the input's order, not its very shape."""
    _require_activation(name)
    _require_input(grad, "grad")
    _require_input(x, "fwd_input")
    if same_dtype and grad.dtype is not x.dtype:
        raise TypeError(f"Types of both inputs must match. grad is {grad.dtype}, fwd_input is {x.dtype}")
    expected = _output_shape(name, x, "fwd_input")
    if grad.shape == expected:
        return grad
    if grad.shape[-1] != expected[-1] or grad.numel() != expected.numel():
        raise ValueError(
            f"Wrong Grad shape. Expected (after flattening) that of the activation's output, {tuple(expected)}, for "
            f"fwd_input of shape {tuple(x.shape)}; grad has shape {tuple(grad.shape)}"
        )
    return grad.reshape(expected)


def _require_quantizer(quantizer):
    if not isinstance(quantizer, Quantizer):
        got = f"the class {quantizer.__name__}" if isinstance(quantizer, type) else type(quantizer).__name__
        raise TypeError(f"Unexpected type for quantizer: it must be a Quantizer or None; got {got}")


def _fusable(quantizer):
    """Whether an activation may run together with the cast: the quantizer offers the settings of one, and the amax
    doesn't come from other processes too."""
    _require_quantizer(quantizer)
    return _casts_by_scaling(type(quantizer)) and not getattr(quantizer, "with_amax_reduction", False)


@functools.cache
def _casts_by_scaling(kind):
    """Whether quantizers of a class only cast by their `scaling()`: a subclass may quantize in its own way."""
    own = ("__call__", "quantize", "quantize_impl", "quantize_buffers")
    return kind.scaling is not Quantizer.scaling and all(getattr(kind, m) is getattr(Quantizer, m) for m in own)


# --- by the name of the activation ------------------------------------------------------------------


@overload
def activation(name: str, input: torch.Tensor, quantizer: None = ..., **params: float) -> torch.Tensor: ...


@overload
def activation(name: str, input: torch.Tensor, quantizer: Quantizer | None = ..., **params: float) -> Any: ...


@traced_without_quantizer
def activation(name: str, input: torch.Tensor, quantizer: Quantizer | None = None, **params: float) -> Any:
    """Apply an activation.

    Args:
        name: a key of `refops.ACTIVATIONS`.
        input: (..., K), or (..., 2H) as [act | gate] for gated activations; float32, float16 or bfloat16.
        quantizer: what to quantize the result with.
        **params: the activation's parameters: limit, alpha, glu_linear_offset (clamped_swiglu), beta1, beta2 (situglu).

    Returns:
        (..., K) or (..., H) in the dtype of `input`; with a quantizer what it makes of that.
    """
    if quantizer is None and not torch.compiler.is_compiling():
        repeated = dispatch.repeated("activation", input, (name, input), {"out_dtype": None, **params})
        if repeated is not None:
            return repeated
    _require_activation(name)
    _require_input(input, "input")
    _output_shape(name, input, "input")
    if quantizer is None:
        return dispatch.activation(name, input, **params)
    if not _fusable(quantizer):
        return quantizer(dispatch.activation(name, input, **params))
    buffers = dispatch.activation_quantize(name, input, quantizer.scaling(), **_copies(quantizer), **params)
    return observed(quantizer, lambda: dispatch.activation(name, input, **params), quantizer.wrap(buffers))


@overload
def activation_grad(
    name: str, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: None = ..., **params: float
) -> torch.Tensor: ...


@overload
def activation_grad(
    name: str, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Quantizer | None = ..., **params: float
) -> Any: ...


@traced_without_quantizer
def activation_grad(
    name: str, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Quantizer | None = None, **params: float
) -> Any:
    """Return the gradient of `activation` with respect to its input, like `fwd_input`; quantized if asked.

    Args:
        grad: gradient of the output, in the dtype of `fwd_input`.
        name, fwd_input, quantizer, **params: as for `activation`.
    """
    grad = _check_backward(name, grad, fwd_input)
    if quantizer is None:
        return dispatch.activation_grad(name, grad, fwd_input, **params)
    if not _fusable(quantizer):
        return quantizer(dispatch.activation_grad(name, grad, fwd_input, **params))
    copies = _copies(quantizer)
    buffers = dispatch.activation_grad_quantize(name, grad, fwd_input, quantizer.scaling(), **copies, **params)
    original = functools.partial(dispatch.activation_grad, name, grad, fwd_input, **params)
    return observed(quantizer, original, quantizer.wrap(buffers))


@traced_without_quantizer
def dbias_activation_grad(
    name: str, grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Quantizer | None = None, **params: float
) -> list[Any]:
    """Return [bias gradient, gradient of the activation]: the column sums (K,) or (2H,), in the dtype of `grad`, and
    what `activation_grad` returns.

    The sums are those of the unrounded float32 gradient where TE fuses them with the cast (delayed scaling, MXFP8), and
    those of the gradient rounded to its dtype elsewhere.
    """
    grad = _check_backward(name, grad, fwd_input)
    if quantizer is not None and _fusable(quantizer):
        buffers, dbias = dispatch.activation_grad_quantize(
            name, grad, fwd_input, quantizer.scaling(), dbias=True, **_copies(quantizer), **params
        )
        original = functools.partial(dispatch.activation_grad, name, grad, fwd_input, **params)
        return [dbias, observed(quantizer, original, quantizer.wrap(buffers))]
    gradient, dbias = dispatch.activation_grad(name, grad, fwd_input, dbias=True, **params)
    return [dbias, gradient if quantizer is None else quantizer(gradient)]


@overload
def scaled_activation(
    name: str,
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: None = ...,
    *,
    glu_interleave_size: int = ...,
    **params: float,
) -> torch.Tensor: ...


@overload
def scaled_activation(
    name: str,
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Quantizer | None = ...,
    *,
    glu_interleave_size: int = ...,
    **params: float,
) -> Any: ...


@traced_without_quantizer
def scaled_activation(
    name: str,
    input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Quantizer | None = None,
    *,
    glu_interleave_size: int = 0,
    **params: float,
) -> Any:
    """Apply an activation and multiply each row by its scale, in float32, rounded once; then quantize if asked.

    Args:
        name: one of `refops.SCALED_ACTIVATIONS`.
        input: (..., 2H), or (..., K) for srelu.
        act_scales: one scale a row of `input`, in any shape and dtype of the three.
        glu_interleave_size: 0, or g: rows are [act 0:g | gate 0:g | act g:2g | ...], g a multiple of 32 that divides H.
    """
    _check_scaled(name, input, act_scales, "input")
    y = dispatch.scaled_activation(name, input, act_scales, glu_interleave_size=glu_interleave_size, **params)
    return _maybe_quantized(y, quantizer)


@traced_without_quantizer
def scaled_activation_grad(
    name: str,
    grad: torch.Tensor,
    fwd_input: torch.Tensor,
    act_scales: torch.Tensor,
    quantizer: Quantizer | None = None,
    *,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
    **params: float,
) -> tuple[Any, torch.Tensor | None]:
    """Return (gradient of the input, gradient of the scales): like `fwd_input`, quantized if asked, and like
    `act_scales`, or None unless `compute_scale_grad`. `grad` may have another dtype than `fwd_input`."""
    _check_scaled(name, fwd_input, act_scales, "fwd_input")
    grad = _check_backward(name, grad, fwd_input, same_dtype=False)
    dx, dscales = dispatch.scaled_activation_grad(
        name, grad, fwd_input, act_scales, glu_interleave_size=glu_interleave_size, **params
    )
    return _maybe_quantized(dx, quantizer), dscales if compute_scale_grad else None


def _check_scaled(name, x, act_scales, argument):
    require_name(name, "name", SCALED_ACTIVATIONS)
    _require_input(x, argument)
    if name in _GATED and x.shape[-1] % 2:
        raise ValueError(
            f"scaled activation input width is not compatible with activation: {argument} has shape {tuple(x.shape)}, "
            f"and {name} needs an even last dimension"
        )
    _require_input(act_scales, "act_scales")
    rows = x.shape[:-1].numel()
    if act_scales.numel() != rows:
        raise ValueError(
            f"scaled activation expects one scale per input row: {argument} has {rows} rows, act_scales has shape "
            f"{tuple(act_scales.shape)}"
        )


def _maybe_quantized(tensor, quantizer, who=None):
    """The tensor, quantized if there is a quantizer; `who`: its name in errors."""
    if quantizer is None:
        return tensor
    try:
        _require_quantizer(quantizer)
        return quantizer(tensor)
    except (TypeError, ValueError) as error:
        if who is not None:
            say_who(error, who)
        raise


def _copies(quantizer):
    return {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}


# --- casts ------------------------------------------------------------------------------------------


@untraced
def quantize(tensor: torch.Tensor, quantizer: Quantizer, output: Any = None, noop: torch.Tensor | None = None) -> Any:
    """Quantize a tensor.

    Args:
        tensor: float32, float16 or bfloat16.
        quantizer: a `Quantizer`.
        output: a quantized tensor to overwrite, and to return.
        noop: flag (1,), needs an output; other than 0 it leaves `output` as it is.

    Returns:
        What the quantizer makes.
    """
    _require_quantizer(quantizer)
    if noop is not None and output is None:
        raise ValueError("noop needs output, the tensor that it leaves as it is; got output=None")
    if output is None:
        return quantizer(tensor)
    return quantizer.update_quantized(tensor, output, noop_flag=noop)


@untraced
def dequantize(input: Any, otype: DType | torch.dtype) -> torch.Tensor:
    """Return the values of a quantized tensor in `otype`, a `DType` or torch dtype."""
    if not isinstance(input, QuantizedTensorStorage):
        raise TypeError(f"input must be a quantized tensor or its storage; got {type(input).__name__}")
    return input.dequantize(dtype=torch_dtype(otype, "otype"))


@untraced
def bgrad_quantize(input: torch.Tensor, quantizer: Quantizer | None = None) -> list[Any]:
    """Return [bias gradient, quantized `input`]: the sums over all but the last dimension, in float32, rounded to the
    dtype of `input`; without a quantizer `input` itself, contiguous."""
    _require_input(input, "input")
    if quantizer is not None and _fusable(quantizer):
        buffers, dbias = dispatch.quantize(input, quantizer.scaling(), dbias=True, **_copies(quantizer))
        return [dbias, observed(quantizer, lambda: input, quantizer.wrap(buffers))]
    accumulator = torch.float64 if input.dtype is torch.float64 else torch.float32
    dbias = input.reshape(input.shape[:-1].numel(), input.shape[-1]).sum(0, dtype=accumulator).to(input.dtype)
    return [dbias, input.contiguous() if quantizer is None else quantizer(input)]


# --- groups: tensors side by side -------------------------------------------------------------------


@untraced
def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Quantizer | None],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Quantize runs of rows, each by itself: `[quantizer(run) ...]`, in order.

    Args:
        tensor: (rows, ..., K).
        split_sections: rows of each run, at most `rows` in all; those that are left are not quantized.
        quantizer_list: one for each run, None for a run that stays as it is.
        disable_bulk_allocation: accepted for TE's sake, which else gives the results common memory.
    """
    _require_input(tensor, "tensor")
    sections = [
        require_integer(size, "split_sections", low=-(2**63), high=2**63)
        for size in require_list(split_sections, "split_sections", "the rows of each run")
    ]
    quantizers = require_list(quantizer_list, "quantizer_list", "a quantizer, or None, for each run")
    if len(quantizers) != len(sections):
        raise ValueError(f"Expected {len(sections)} quantizers, but got {len(quantizers)}")
    rest = tensor.shape[0] - sum(sections)
    if rest < 0 or min(sections, default=0) < 0:
        raise ValueError(
            f"Attempted to split tensor with shape={tuple(tensor.shape)} along dim 0 with split_sections={sections}"
        )
    runs = tensor.contiguous().split([*sections, rest])
    return [
        _maybe_quantized(run, quantizer, f"split {i}")
        for i, (run, quantizer) in enumerate(zip(runs, quantizers, strict=False))
    ]


@untraced
def group_quantize(
    tensor: torch.Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
    output: GroupedTensorStorage | None = None,
) -> Any:
    """Quantize tensors that lie one after the other, each as if it were alone, into a grouped tensor.

    Args:
        tensor: (rows, columns). Its elements in memory order are those of the first tensor, then of the second ...
        quantizer: for all of them. TE has kernels for some of these; here any with a scaling will do.
        num_tensors: how many there are.
        first_dims, last_dims: int64, (num_tensors,): their rows and widths; None: all have the same.
        tensor_offsets: int64, (num_tensors + 1,): where they start, in elements, by default without gaps.
        noop_flag: flag (1,), needs an output; other than 0 it leaves `output` as it is.
        output: a grouped tensor of alike members, made with `quantizer`, to overwrite and to return.

    Returns:
        `GroupedTensor`, or its storage if the quantizer is internal.
    """
    if noop_flag is not None and output is None:
        raise ValueError("noop_flag needs output, the tensor that it leaves as it is; got output=None")
    group, parts = _group_of(tensor, quantizer, num_tensors, first_dims, last_dims, tensor_offsets, output)
    group.quantize(parts, noop_flag=noop_flag)
    return group


@untraced
def bgrad_group_quantize(
    tensor: torch.Tensor,
    quantizer: Quantizer,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """Return (`group_quantize` of the tensors, (num_tensors, columns) the bias gradient of each, in the dtype of
    `tensor`): what `bgrad_quantize` gives for each alone. Their widths must be the same."""
    if last_dims is not None:
        raise ValueError("bgrad_group_quantize needs tensors of one width; got last_dims")
    group, parts = _group_of(tensor, quantizer, num_tensors, first_dims, None, tensor_offsets, None)
    sums, members = zip(*(bgrad_quantize(part, quantizer) for part in parts), strict=True)
    group.copy_members(members)
    return group, torch.stack(sums)


def _group_of(tensor, quantizer, num_tensors, first_dims, last_dims, tensor_offsets, output):
    """The grouped tensor for a result, and the tensors that go into it."""
    _require_quantizer(quantizer)
    _require_input(tensor, "tensor")
    if tensor.dim() != 2:
        raise ValueError(f"tensor must be 2D; got shape {tuple(tensor.shape)}")
    dims = {"first_dims": first_dims, "last_dims": last_dims, "tensor_offsets": tensor_offsets}
    if output is None:
        group = allocate(num_tensors, tuple(tensor.shape), quantizer, tensor.device, tensor.dtype, **dims)
    else:
        group = output
        given = [name for name, dim in dims.items() if dim is not None]
        if given:
            raise ValueError(f"output must be of tensors of one shape, without {given[0]}; got both")
        for name, wanted in {"num_tensors": num_tensors, "logical_shape": tuple(tensor.shape)}.items():
            if getattr(output, name) != wanted:
                raise ValueError(f"output must have {name} {wanted}; got {getattr(output, name)}")
        for kept in output.member_quantizers():
            _require_alike(kept, quantizer)
    return group, group.parts_of(tensor.contiguous())


def _require_alike(kept, quantizer):
    """`ValueError` unless both quantize a tensor alike. A group may keep a copy."""
    if type(kept) is not type(quantizer) or kept.settings() != quantizer.settings():
        raise ValueError(f"output must have quantizer {quantizer}; got {kept}")
    for name in ("scale", "amax", "optimize_for_gemm", "with_amax_reduction", "amax_reduction_group"):
        if getattr(kept, name, None) is not getattr(quantizer, name, None):
            raise ValueError(f"output must have a quantizer with the {name} of {quantizer}; it has another")


@untraced
def group_dequantize(input: GroupedTensorStorage, otype: DType | torch.dtype) -> Any:
    """Return the values of a quantized grouped tensor as a `GroupedTensor` in `otype`, a `DType` or torch dtype."""
    if not isinstance(input, GroupedTensorStorage) or input.quantizer is None:
        raise TypeError(f"input must be a quantized GroupedTensor or its storage; got {type(input).__name__}")
    dtype = torch_dtype(otype, "otype")
    dims = {name: getattr(input, name) for name in ("first_dims", "last_dims", "tensor_offsets")}
    members = input.split_into_quantized_tensors()
    values = allocate(input.num_tensors, input.logical_shape, None, members[0].device, dtype, **dims)
    values.copy_members([member.dequantize(dtype=dtype) for member in members])
    return values


def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """Return int64 (n + 1,): where tensors with rows `first_dims`, int64 (n,), start in their buffer, in elements."""
    require_torch_tensor(first_dims, "first_dims")
    if first_dims.dtype is not torch.int64 or first_dims.dim() != 1:
        raise ValueError(f"first_dims must be 1D and int64; got {first_dims.dtype} of shape {tuple(first_dims.shape)}")
    width = require_integer(logical_last_dim, "logical_last_dim", low=1, high=2**63)
    return GroupedTensorStorage.make_tensor_offsets(first_dims, width)


def splits_to_offsets_multi(
    split_sizes: torch.Tensor,
    device: torch.device | str,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return (`split_sizes` as int64 on `device`, their running sums times each of `strides`).

    Args:
        split_sizes: integers, (n,).
        strides, include_leading_zero, dtypes: of each result: the factor; whether it is (n + 1,), from 0 on, or (n,);
            int32 or int64.
        bulk_allocate: accepted for TE's sake, which then gives the results common memory.
    """
    require_torch_tensor(split_sizes, "split_sizes")
    if split_sizes.dtype not in (torch.int32, torch.int64) or split_sizes.dim() != 1:
        raise ValueError(
            f"split_sizes must be 1D, int32 or int64; got {split_sizes.dtype} of shape {tuple(split_sizes.shape)}"
        )
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError):
        raise TypeError(f"device must be a torch.device or its name; got {shown(device)}") from None
    strides = require_list(strides, "strides", "a factor for each result")
    leading = require_list(include_leading_zero, "include_leading_zero", "True or False for each result")
    dtypes = require_list(dtypes, "dtypes", "a dtype for each result")
    if not len(strides) == len(leading) == len(dtypes):
        raise ValueError(
            "strides, include_leading_zero, and dtypes must have matching lengths, but got "
            f"{len(strides)}, {len(leading)}, and {len(dtypes)}"
        )
    results, sizes = [], split_sizes.to(device=device, dtype=torch.int64)
    for stride, from_zero, dtype in zip(strides, leading, dtypes, strict=True):
        if dtype is not torch.int32 and dtype is not torch.int64:
            raise ValueError(f"dtypes must be torch.int32 or torch.int64; got {shown(dtype)}")
        offsets = GroupedTensorStorage.make_tensor_offsets(
            sizes, require_integer(stride, "strides", low=-(2**63), high=2**63)
        )
        results.append((offsets if require_flag(from_zero, "include_leading_zero") else offsets[1:]).to(dtype))
    return sizes, results


# --- by TE's names ----------------------------------------------------------------------------------
#
# One function for each activation and direction, made from the table of activations:
#   gelu(input, quantizer)                                      situglu(input, quantizer, beta1, beta2)
#   dgelu(grad, fwd_input, quantizer)                           dbias_dgelu(grad, fwd_input, quantizer)
#   scaled_swiglu(input, act_scales, quantizer, glu_interleave_size)
#   scaled_dswiglu(grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad)
# Parameters of an activation stand after the quantizer, in TE's order.


def gradient_name(name: str) -> str:
    """TE's name of an activation's gradient: dgelu for gelu, clamped_dswiglu for clamped_swiglu."""
    prefix, separator, last = name.rpartition("_")
    return f"{prefix}{separator}d{last}"


def _named(public_name, helper, name, tensors, options):
    """Return the public function `public_name`: `helper` for the activation `name`, with positional parameters.

    `tensors` are its required arguments, `options` those after the quantizer with their defaults.
    """
    required = len(tensors)

    def function(*args, **kwargs):
        if kwargs or not required <= len(args) <= required + 1:
            args, kwargs = (), signature.bind(*args, **kwargs).arguments
        return helper(name, *args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults = {"quantizer": None, **options}
    hints: dict[str, Any] = dict.fromkeys(tensors, torch.Tensor)
    hints |= {option: type(default) for option, default in options.items()}
    hints |= {"quantizer": Quantizer | None, "return": inspect.signature(helper).return_annotation}
    parameters = [
        inspect.Parameter(one, kind, default=defaults.get(one, inspect.Parameter.empty), annotation=hints[one])
        for one in (*tensors, *defaults)
    ]
    signature = inspect.Signature(parameters, return_annotation=hints["return"])
    function.__name__ = function.__qualname__ = public_name
    function.__signature__, function.__annotations__ = signature, hints
    function.__doc__ = f"`{helper.__name__}` of {name}: {ACTIVATIONS[name].formula}.\n\n{inspect.getdoc(helper)}"
    return function


def _functions():
    """Return public name -> function."""
    made = {}

    def add(public_name, helper, tensors, **options):
        made[public_name] = _named(public_name, helper, name, tensors, options)

    for name, row in ACTIVATIONS.items():
        parameters = {parameter.name: parameter.default for parameter in row.declared}
        gradient = gradient_name(name)
        add(name, activation, ("input",), **parameters)
        add(gradient, activation_grad, ("grad", "fwd_input"), **parameters)
        add(f"dbias_{gradient}", dbias_activation_grad, ("grad", "fwd_input"), **parameters)
        if name in SCALED_ACTIVATIONS:
            layout = {"glu_interleave_size": 0} if row.gated else {}
            tensors = ("grad", "fwd_input", "act_scales")
            add(f"scaled_{name}", scaled_activation, ("input", "act_scales"), **parameters, **layout)
            options = {**parameters, **layout, "compute_scale_grad": True}
            add(f"scaled_{gradient}", scaled_activation_grad, tensors, **options)
    return made


_NAMED = _functions()
publish(_NAMED, globals())

if TYPE_CHECKING:  # the functions of `_NAMED`

    def __getattr__(name: str) -> Any: ...


__all__ = [
    "DType",
    "activation",
    "activation_grad",
    "bgrad_group_quantize",
    "bgrad_quantize",
    "dbias_activation_grad",
    "dequantize",
    "gradient_name",
    "group_dequantize",
    "group_quantize",
    "quantize",
    "scaled_activation",
    "scaled_activation_grad",
    "split_quantize",
    "splits_to_offsets",
    "splits_to_offsets_multi",
    *_NAMED,
]
