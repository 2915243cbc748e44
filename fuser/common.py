"""Small helpers that the operations share: dtypes, devices, dequantization, caller-owned gradient buffers.

Not for the arithmetic (`fuser.functional`, `fuser.gemm`) and not for choosing a backend (`fuser.dispatch`).
Behaviour: TE's ops/_common.py, without its forced clearing of tensors: here memory is freed by dropping references, so
a second backward pass works and no mark is left on a caller's tensor.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from fuser.quantization.quantizers import CONCRETE
from fuser.quantization.storage import QuantizedTensorStorage
from refops.arguments import shown


def publish(made: dict[str, Any], namespace: dict[str, Any]) -> None:
    """Add what was made of the rows of `refops.ACTIVATIONS` to a module's `globals()`.

    Raises:
        ValueError: the module has another thing of such a name.
    """
    for name, value in made.items():
        if namespace.get(name, value) is not value:
            rule = f"must be none that {namespace['__name__']} has already"
            raise ValueError(f"a name that is made of an activation {rule}; got {name!r}, {namespace[name]!r}")
    namespace.update(made)


def name_of(layer: str, tensor: str) -> str:
    """What tables call a tensor of a layer; the model itself has no name."""
    return f"{layer} {tensor}".strip()


def is_quantized_tensor(tensor: Any) -> bool:
    """Whether `tensor` holds quantized data (a `QuantizedTensor` or a bare storage)."""
    return isinstance(tensor, QuantizedTensorStorage)


def maybe_dequantize(tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` as a contiguous plain tensor, in `dtype` if given. No copy if it is one already."""
    if isinstance(tensor, QuantizedTensorStorage):
        return tensor.dequantize(dtype=dtype)
    if dtype is not None and tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def copied(value: Any) -> Any:
    """`value` with copies of the tensors in it; other contents, such as modules used as keys, are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: copied(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def reject_forward_kwargs(op: Any, kwargs: dict[str, Any]) -> None:
    """Raise Python's own TypeError for keyword arguments to an operation whose forward takes none."""
    if kwargs:
        raise TypeError(f"{type(op).__name__}.forward() got an unexpected keyword argument {next(iter(kwargs))!r}")


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """`dtype`, or torch's default dtype. `TypeError` unless it is a torch dtype."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, as torch.bfloat16, or None; got {shown(dtype)}")
    return torch.get_default_dtype() if dtype is None else dtype


def canonicalize_device(device: torch.device | str | int | None) -> torch.device:
    """`device` with its index, or torch's default device (TE: the current GPU)."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def parameter_in_place_of(old: Any, value: torch.Tensor) -> torch.nn.Parameter:
    """`value` as a parameter that keeps the flags and attributes (`main_grad`, ...) of the one it replaces."""
    new = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    for name, attribute in vars(old).items():
        if name not in vars(new):
            setattr(new, name, attribute)
    return new


def device_with_memory(device: torch.device) -> torch.device:
    """`device`; in place of meta torch's default device."""
    return canonicalize_device(None) if device.type == "meta" else device


def with_memory(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The parameter; in place of one on the meta device a new one on torch's default device, whose values are unset."""
    if not parameter.is_meta:
        return parameter
    return parameter_in_place_of(parameter, torch.empty_like(parameter, device=device_with_memory(parameter.device)))


def devices_match(device1: torch.device, device2: torch.device) -> bool:
    """Whether both are the same device; a CUDA device without index is the current one."""
    device1, device2 = torch.device(device1), torch.device(device2)
    if device1.type == device2.type == "cuda":
        return canonicalize_device(device1) == canonicalize_device(device2)
    return device1.type == device2.type


#: Whether torch.autocast is on for some device; a torch that can't tell is asked about each tensor's.
_in_some_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def in_autocast(tensor: Any) -> bool:
    """Whether torch.autocast is on for a tensor's device."""
    if not _in_some_autocast():  # a quarter of the time that it takes to name the device
        return False
    device_type = tensor.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def maybe_autocast_dtype(*, device_type: str = "cuda", default_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of `torch.autocast` where it is on for `device_type`, else `default_dtype` (or torch's default)."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return canonicalize_dtype(default_dtype)


def autocast_dtype_of(tensor: Any) -> torch.dtype:
    """The dtype of `torch.autocast` where it is on for the tensor's device, else that of the tensor."""
    return torch.get_autocast_dtype(tensor.device.type) if in_autocast(tensor) else tensor.dtype


def get_fused_normalization_quantizer(quantizer: Any) -> Any:
    """`quantizer` if a normalization can emit its data directly (one of the concrete classes here), else None."""
    return quantizer if isinstance(quantizer, CONCRETE) else None


def validate_or_alloc_output(
    buffer: torch.Tensor | None, shape: Iterable[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`buffer` if it can take the result, a new tensor if it is None. `ValueError` says what does not fit."""
    shape = tuple(shape)
    if buffer is None:
        return torch.empty(shape, dtype=dtype, device=device)
    problems = {
        f"shape {tuple(buffer.shape)}, expected {shape}": tuple(buffer.shape) != shape,
        f"dtype {buffer.dtype}, expected {dtype}": buffer.dtype != dtype,
        f"device {buffer.device}, expected {device}": not devices_match(buffer.device, device),
        "strides of a non-contiguous tensor, expected a contiguous one": not buffer.is_contiguous(),
        "requires_grad=True, expected False": buffer.requires_grad,
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"The output buffer has {problem}")
    return buffer


def get_main_grad_from_param(param: Any, *, op_label: str = "") -> torch.Tensor:
    """The `main_grad` buffer of a parameter (refreshed first if FSDP manages it). `RuntimeError` if there is none."""
    if hasattr(param, "__fsdp_param__"):
        param.main_grad = param.get_main_grad()
    main_grad = getattr(param, "main_grad", None)
    if main_grad is None:
        label = f"{op_label}: " if op_label else ""
        raise RuntimeError(
            f"{label}a parameter (shape={tuple(param.shape)}) does not have a valid main_grad attribute, "
            "which accumulate_into_main_grad=True writes the weight gradient to"
        )
    return main_grad


def view_main_grad_as_grouped_buffer(
    main_grad: torch.Tensor, num_groups: int, weight_shape: tuple[int, ...], *, label: str = ""
) -> torch.Tensor:
    """`main_grad` as `(num_groups, *weight_shape)`, in its memory. `RuntimeError` if size or strides don't allow it."""
    shape = (num_groups, *weight_shape)
    try:
        return main_grad.view(shape)
    except RuntimeError as error:
        raise RuntimeError(
            f"{label or 'Grouped weight'} main_grad must be viewable as {shape} without copy, but got shape "
            f"{tuple(main_grad.shape)} and stride {main_grad.stride()}"
        ) from error


def get_accumulate_flag_in_param(param: torch.nn.Parameter) -> bool:
    """Whether weight gradients are added to `main_grad` (True) or overwrite it (`param.overwrite_main_grad`)."""
    return not getattr(param, "overwrite_main_grad", False)


@functools.lru_cache(maxsize=64)
def _dummy_wgrad(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def get_dummy_wgrad(
    shape: Iterable[int], dtype: torch.dtype, zero: bool = False, *, device: torch.device | None = None
) -> torch.Tensor:
    """A stand-in, with meaningless values (`zero`: zeros), for a gradient that is stored elsewhere.

    All stand-ins of one shape, dtype and device are views of one buffer: autograd takes a tensor that nobody else holds
    as `param.grad` without a copy. `device`: by default torch's default device (TE: the current GPU).
    """
    grad = _dummy_wgrad(tuple(shape), dtype, canonicalize_device(device))
    if zero:
        grad.zero_()
    return grad.detach()


def get_dummy_wgrads_for_params(params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """For gradients that go to `main_grad`: a stand-in that fires the parameter's autograd hooks, else None.

    A parameter with attribute `grad_added_to_main_grad` gets it set and a `get_dummy_wgrad`, of zeros where
    `param.zero_out_wgrad`.
    """
    grads: list[torch.Tensor | None] = []
    for param in params:
        if not hasattr(param, "grad_added_to_main_grad"):
            grads.append(None)
            continue
        param.grad_added_to_main_grad = True
        zero = getattr(param, "zero_out_wgrad", False)
        grads.append(get_dummy_wgrad(param.shape, param.dtype, zero, device=param.device))
    return grads
