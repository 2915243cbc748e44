"""Layer normalization and root mean square normalization, over the rows of a matrix.

Statistics and products are float32 (float64 for float64 tensors) whatever the dtype; results are rounded once.
Sources: TE behaviour, `ops/basic/layer_norm.py`, `ops/basic/rms_norm.py`, `csrc/extensions/normalization.cpp`.
"""

import functools
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

from fuser.common import (
    autocast_dtype_of,
    canonicalize_device,
    canonicalize_dtype,
    get_fused_normalization_quantizer,
    in_autocast,
    maybe_dequantize,
    with_memory,
)
from fuser.op import BasicOperation, OperationContext
from fuser.quantization.quantizers import Float8Quantizer
from fuser.tracing import rehearsing

#: Elements that one step works on, on a CPU: float32 temporaries of this size stay in its cache.
STEP = 1 << 20

#: The steps of RMSNorm in one call, on a CPU: (y, rstd). A private function of torch, which older ones lack.
_fused_on_cpu = getattr(torch, "_fused_rms_norm", None)

_MARGIN_VARIABLES = {
    "forward": "NVTE_FWD_LAYERNORM_SM_MARGIN",
    "backward": "NVTE_BWD_LAYERNORM_SM_MARGIN",
    "inference": "NVTE_INF_LAYERNORM_SM_MARGIN",
}


class Normalization(BasicOperation):
    """Base of LayerNorm and RMSNorm over the trailing dimensions `normalized_shape`.

    The dtype of output and gradients is autocast's for the tensor's own device, else that of the weight, not of the
    input. The output is emitted with the next operation's input quantizer, if it is one of the five concrete classes;
    the input's gradient is never quantized.

    Args:
        normalized_shape: an integer or integers.
        eps: added to the variance or mean square.
        device, dtype: of the parameters. `device="meta"` defers them to the first forward.
        zero_centered_gamma: the weight's deviation from 1 is the parameter; 1 is added in float32.
        sm_margin: multiprocessors that a kernel leaves free, an integer or a dict with "forward", "backward" and
            "inference"; NVTE_{FWD,BWD,INF}_LAYERNORM_SM_MARGIN override an integer, and stand in for missing keys.
            Accepted for TE's sake: it has no effect here, and none on numbers anywhere.

    Raises:
        ValueError: at forward, for an input whose trailing dimensions aren't `normalized_shape`.
    """

    #: Names of the parameters, in order.
    parameter_names: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self._sm_margins = _sm_margins(sm_margin)
        shape = tuple(normalized_shape) if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        device = canonicalize_device(device)
        for name in self.parameter_names:
            self.register_parameter(
                name, torch.nn.Parameter(torch.empty(shape, device=device, dtype=canonicalize_dtype(dtype)))
            )
        if device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the parameters to the identity; meta parameters move to the default device."""
        for name in self.parameter_names:
            parameter = with_memory(getattr(self, name))
            setattr(self, name, parameter)
            ones = name == "weight" and not self.zero_centered_gamma
            with torch.no_grad():
                parameter.fill_(1.0 if ones else 0.0)

    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Any:
        parameters = [getattr(self, name) for name in self.parameter_names]
        weight = parameters[0]
        shape, inner = input_.shape, weight.shape
        if shape[len(shape) - len(inner) :] != inner or len(shape) < len(inner):
            raise ValueError(
                f"Input tensor (shape={tuple(shape)}) and weight tensor (shape={tuple(inner)}) are not compatible: "
                "the input's last dimensions must be normalized_shape"
            )
        dtype = autocast_dtype_of(weight)
        if self._dtypes_of_torch and (input_.dtype is not weight.dtype or in_autocast(weight)):
            of_autocast = dtype if in_autocast(weight) else None
            dtype = _dtype_of_torch(type(self).__name__, input_.device.type, input_.dtype, weight.dtype, of_autocast)
        x = maybe_dequantize(input_, dtype)
        is_matrix = len(shape) == 2 and len(inner) == 1
        if not is_matrix:
            x = x.reshape(math.prod(shape[: len(shape) - len(inner)]), math.prod(inner))

        quantizer = get_fused_normalization_quantizer(next_op_input_quantizer)
        # TE's kernel writes delayed-scaling FP8 from the float32 value; other formats take the rounded output.
        out_dtype = wide(dtype) if isinstance(quantizer, Float8Quantizer) else dtype
        y, *statistics = self.normalize(x, self._flat_and_wide(parameters, dtype), out_dtype)
        y = y if is_matrix else y.view(shape)
        if quantizer is not None:
            y = quantizer.quantize(y, dtype=dtype)
        if ctx.requires_grad:
            # The parameters too: autograd notices if they are overwritten before backward.
            ctx.save_for_backward(x, *statistics, *parameters)
            ctx.dtype = dtype
        return y

    def op_backward(self, ctx: OperationContext, grad_output: Any, **options: Any) -> Any:
        """As for every operation; `options` are those of `normalize_grad`."""
        x, *saved = ctx.saved_tensors
        count = len(self.parameter_names)
        statistics, parameters = saved[:-count], self._flat_and_wide(saved[-count:], ctx.dtype)
        dy = maybe_dequantize(grad_output, ctx.dtype)
        dx, *gradients = self.normalize_grad(dy.view(x.shape), x, statistics, parameters, **options)
        dtype = self.weight.dtype if self._dtypes_of_torch else ctx.dtype
        return dx.view(dy.shape), [gradient.to(dtype).view(self.weight.shape) for gradient in gradients]

    def normalize(self, x: Any, parameters: Any, out_dtype: Any) -> Any:
        """(y of `out_dtype`, statistics...) for a matrix x and flat wide parameters."""
        raise NotImplementedError

    def normalize_grad(self, dy: Any, x: Any, statistics: Any, parameters: Any) -> Any:
        """(dx like x, wide gradients of the parameters...)."""
        raise NotImplementedError

    def _flat_and_wide(self, parameters, dtype):
        """Parameters rounded to `dtype`, then flat and wide, the weight with its 1 if zero-centred.

        torch's module does not round them.
        """
        rounded = wide(dtype) if self._dtypes_of_torch else dtype
        weight, *rest = (flat_parameter(parameter.detach(), rounded) for parameter in parameters)
        return [weight + 1 if self.zero_centered_gamma else weight, *rest]


class LayerNorm(Normalization):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the trailing dimensions, with the biased variance.

    See `Normalization` for arguments, dtypes, quantized outputs and errors. Kept for backward: x in the compute dtype,
    mean and 1 / sqrt(variance + eps) of every row in float32.
    """

    parameter_names = ("weight", "bias")

    def normalize(self, x: Any, parameters: Any, out_dtype: Any) -> Any:
        # On a CPU torch's kernel takes 16-bit rows with float32 parameters: float32 statistics, one rounding. Elsewhere
        # it wants one dtype for all.
        source = x if x.device.type == "cpu" and out_dtype == x.dtype else x.to(wide(x.dtype))
        y, mean, rstd = torch.native_layer_norm(source, x.shape[1:], parameters[0], parameters[1], self.eps)
        return y.to(out_dtype), mean, rstd

    def normalize_grad(self, dy: Any, x: Any, statistics: Any, parameters: Any) -> Any:
        dx = torch.empty_like(x)
        weight_grad, bias_grad = (torch.zeros_like(parameter) for parameter in parameters)
        for rows in steps(x):
            # In float32: given 16-bit rows, torch's kernel sums the parameters' gradients in 16 bits.
            step_dx, step_dw, step_db = torch.ops.aten.native_layer_norm_backward(
                dy[rows].to(wide(x.dtype)),
                x[rows].to(wide(x.dtype)),
                x.shape[1:],
                *(statistic[rows] for statistic in statistics),
                *parameters,
                [True, True, True],
            )
            dx[rows] = step_dx
            weight_grad += step_dw
            bias_grad += step_db
        return dx, weight_grad, bias_grad


class RMSNorm(Normalization):
    """y = x / sqrt(mean(x^2) + eps) * weight over the trailing dimensions.

    See `Normalization` for arguments, dtypes, quantized outputs and errors. Kept for backward: x in the compute dtype
    and 1 / sqrt(mean(x^2) + eps) of every row in float32.
    """

    parameter_names = ("weight",)

    def normalize(self, x: Any, parameters: Any, out_dtype: Any) -> Any:
        (weight,) = parameters
        if x.dtype is out_dtype is wide(x.dtype) and x.numel() <= STEP:
            if _fused_on_cpu is not None and x.is_cpu:
                return _fused_on_cpu(x, x.shape[1:], weight, self.eps)
            # what mean() computes, with less to dispatch
            rstd = x.square().sum(-1, keepdim=True).div_(x.shape[-1]).add_(self.eps).rsqrt_()
            return (x * rstd).mul_(weight), rstd
        y = torch.empty_like(x, dtype=out_dtype)
        rstd = x.new_empty((len(x), 1), dtype=wide(x.dtype))
        for rows in steps(x):
            step = x[rows].to(wide(x.dtype))
            torch.rsqrt(step.square().mean(-1, keepdim=True).add_(self.eps), out=rstd[rows])
            y[rows] = (step * rstd[rows]).mul_(weight)
        return y, rstd

    def normalize_grad(self, dy: Any, x: Any, statistics: Any, parameters: Any, *, extra_gradient: Any = None) -> Any:
        """As for every normalization; `extra_gradient`, shaped like the input, is added before dx is rounded."""
        extra = None if extra_gradient is None else maybe_dequantize(extra_gradient).view(x.shape)
        (rstd,), (weight,) = statistics, parameters
        dx, weight_grad = torch.empty_like(x), torch.zeros_like(weight)
        for rows in steps(x):
            normalized = x[rows].to(wide(x.dtype)) * rstd[rows]
            step_dy = dy[rows].to(wide(x.dtype))
            product = step_dy * normalized
            weight_grad += product.sum(0)
            slope = product.mul_(weight).mean(-1, keepdim=True)  # of the row's length
            step_dx = (step_dy * weight).addcmul_(normalized, slope, value=-1).mul_(rstd[rows])
            dx[rows] = step_dx if extra is None else step_dx.add_(extra[rows])
        return dx, weight_grad


@functools.lru_cache(maxsize=64)
def _dtype_of_torch(
    norm: str, device: str, dtype: torch.dtype, of_weight: torch.dtype, of_autocast: torch.dtype | None
) -> torch.dtype:
    """The dtype in which torch's module returns an input, in the autocast in force, whose dtype is `of_autocast`.

    Outside of autocast it is the weight's dtype if torch refuses this input with this weight.
    """
    module = getattr(torch.nn, norm)(1, elementwise_affine=of_autocast is None, device=device, dtype=of_weight)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that its kernel for two dtypes is slow
            return module(torch.empty(0, 1, device=device, dtype=dtype)).dtype
    except RuntimeError:
        return of_weight


def flat_parameter(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter rounded to `dtype`, then flat and wide; the parameter itself if it is all that already."""
    if parameter.ndim == 1 and type(parameter) is torch.Tensor and parameter.dtype is dtype is torch.float32:
        return parameter
    return maybe_dequantize(parameter, dtype).reshape(-1).to(wide(dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that tensors of `dtype` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def steps(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of rows to process in turn: as many rows as fit into the cache on a CPU, all rows elsewhere."""
    rows, width = matrix.shape
    if rehearsing():
        return iter([slice(None)])
    count = max(1, STEP // max(1, width)) if matrix.device.type == "cpu" else max(1, rows)
    return (slice(first, first + count) for first in range(0, rows, count))


def _sm_margins(sm_margin):
    if isinstance(sm_margin, dict):
        return {key: int(sm_margin.get(key, os.getenv(name, "0"))) for key, name in _MARGIN_VARIABLES.items()}
    return {key: int(os.getenv(name, sm_margin)) for key, name in _MARGIN_VARIABLES.items()}
