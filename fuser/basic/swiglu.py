"""SwiGLU and its relatives, plain and with a scale for every row, as fusible operations.

A row is [a | b] of width 2H: a goes through the activation, b is the linear part. With `glu_interleave_size=k` it is
[a 0:k | b 0:k | a k:2k | b k:2k ...]. Source: TE behaviour, `ops/basic/swiglu.py` and `ops/basic/activation.py`.
"""

import math
from typing import Any, ClassVar

import torch

from fuser import dispatch
from fuser.basic.activation import _ActivationOperation, activation_dtype
from fuser.common import maybe_dequantize, reject_forward_kwargs
from fuser.op import ExtraTensorOperation, OperationContext


class _InterleavedGLU(_ActivationOperation):
    """A gated linear unit whose input rows may be interleaved.

    Args:
        cache_quantized_input: as for the other activations; the interleaved input is what is kept.
        glu_interleave_size: width of the blocks of interleaved rows, None for [a | b]. The input's gradient is then
            not quantized, since it is permuted after it was computed.

    Raises:
        ValueError: at forward, for a row that isn't a whole number of pairs of blocks.
    """

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.glu_interleave_size = glu_interleave_size

    def _activation_forward(self, x, quantizer):
        if self.glu_interleave_size is not None:
            x = deinterleave(x, self.glu_interleave_size)
        return super()._activation_forward(x, quantizer)

    def _activation_backward(self, dy, x, quantizer):
        if self.glu_interleave_size is None:
            return super()._activation_backward(dy, x, quantizer)
        dx = super()._activation_backward(dy, deinterleave(x, self.glu_interleave_size), None)
        return interleave(dx, self.glu_interleave_size)


def deinterleave(x: torch.Tensor, size: int) -> torch.Tensor:
    """Rows [a 0:size | b 0:size | a size:2*size | ...] as [a | b]: a copy, of the same shape."""
    if size <= 0 or x.shape[-1] % (2 * size):
        raise ValueError(
            f"glu_interleave_size must be positive and twice it must divide the last dimension; "
            f"got {size} and an input of shape {tuple(x.shape)}"
        )
    return x.unflatten(-1, (-1, 2, size)).transpose(-3, -2).reshape(x.shape)


def interleave(x: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of `deinterleave`."""
    return x.unflatten(-1, (2, -1, size)).transpose(-3, -2).reshape(x.shape)


class SwiGLU(_InterleavedGLU):
    """silu(a) * b."""

    activation = "swiglu"


class SiTUGLU(SwiGLU):
    """beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2).

    Raises:
        ValueError: a beta that isn't positive and finite.
    """

    activation = "situglu"

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.beta1, self.beta2 = _require_betas(beta1, beta2)

    def activation_parameters(self) -> dict:
        return {"beta1": self.beta1, "beta2": self.beta2}


class ClampedSwiGLU(_InterleavedGLU):
    """c sigmoid(alpha c) * (clamp(b, -limit, limit) + glu_linear_offset) with c = min(a, limit): the GLU of GPT-OSS.

    a is clamped from above only. Gradients pass at exactly the limits and are zero beyond them.
    """

    activation = "clamped_swiglu"

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, glu_interleave_size=glu_interleave_size)
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    def activation_parameters(self) -> dict:
        return {"limit": self.limit, "alpha": self.alpha, "glu_linear_offset": self.glu_linear_offset}


def _require_betas(beta1, beta2):
    for name, value in (("beta1", beta1), ("beta2", beta2)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite; got {value}")
    return beta1, beta2


# --- with a scale for every row -------------------------------------------------------------------


class _ScaledActivation(ExtraTensorOperation):
    """y[row] = act(x[row]) * scales[row], float32 inside, one rounding: the middle of a grouped MLP.

    The extra input `scales` has the shape of the input without its last dimension. It is converted to the compute
    dtype (autocast's, else the input's), in which its gradient, sum(dy * act(x)) over a row, is rounded as well; it
    is returned only if the scales required one at forward. Neighbours' quantizers are ignored: output and
    input gradient are always in high precision.

    Raises:
        ValueError: at forward, for a number of scales other than the number of rows.
        RuntimeError: at forward, for a dtype that `activation_dtype` refuses.
    """

    num_extra_inputs = 1

    #: Name of the activation in `fuser.dispatch`.
    activation: ClassVar[str]

    def activation_parameters(self) -> dict:
        """Keyword arguments of the activation besides its inputs."""
        return {}

    def fuser_forward(
        self,
        basic_op_ctxs: Any,
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: Any,
        basic_op_kwargs: Any,
        **quantizers: Any,
    ) -> Any:
        reject_forward_kwargs(self, basic_op_kwargs[0])
        ctx: OperationContext = basic_op_ctxs[0]
        scales = basic_op_extra_inputs[0][0]
        dtype = activation_dtype(input_)
        x = maybe_dequantize(input_, dtype)
        if scales.numel() != x.shape[:-1].numel():
            raise ValueError(
                f"scales must have one entry for each row of the input; got shape {tuple(scales.shape)} "
                f"for an input of shape {tuple(x.shape)}"
            )
        converted = maybe_dequantize(scales, dtype)
        y = dispatch.scaled_activation(self.activation, x, converted, **self.activation_parameters())
        if ctx.requires_grad:
            ctx.save_for_backward(x, converted)
            ctx.dtype = dtype
            ctx.extra_input_requires_grad = scales.requires_grad
        return y, [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **unused: Any) -> Any:
        ctx: OperationContext = basic_op_ctxs[0]
        x, scales = ctx.saved_tensors
        dy = maybe_dequantize(grad_output, ctx.dtype)
        dx, dscales = dispatch.scaled_activation_grad(self.activation, dy, x, scales, **self.activation_parameters())
        return dx, [()], [(dscales if ctx.extra_input_requires_grad else None,)]


class _ScaledGLU(_ScaledActivation):
    """A gated linear unit with a scale for every row.

    Args:
        glu_interleave_size: width of the blocks of interleaved rows, a multiple of 32 that divides the output's width;
            None for [a | b].
        activation_recompute_in_mlp: only False.

    Raises:
        ValueError: `activation_recompute_in_mlp` is True.
    """

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        if activation_recompute_in_mlp:
            raise ValueError(
                f"{type(self).__name__} does not support activation recomputation; got activation_recompute_in_mlp=True"
            )
        super().__init__()
        self.glu_interleave_size = glu_interleave_size
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def activation_parameters(self) -> dict:
        return {"glu_interleave_size": self.glu_interleave_size or 0}


class ScaledSwiGLU(_ScaledGLU):
    """silu(a) * b * scales[row]."""

    activation = "swiglu"


class ScaledSiTUGLU(_ScaledGLU):
    """`SiTUGLU` times scales[row]."""

    activation = "situglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        beta1: float = 4.0,
        beta2: float = 25.0,
    ) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self.beta1, self.beta2 = _require_betas(beta1, beta2)

    def activation_parameters(self) -> dict:
        return {**super().activation_parameters(), "beta1": self.beta1, "beta2": self.beta2}


class ScaledClampedQGeGLU(_ScaledGLU):
    """`ClampedSwiGLU` times scales[row]; its settings are those of the contained `_clamped`."""

    activation = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp)
        self._clamped = ClampedSwiGLU(limit=limit, alpha=alpha, glu_linear_offset=glu_linear_offset)

    def activation_parameters(self) -> dict:
        return {**super().activation_parameters(), **self._clamped.activation_parameters()}


class ScaledSReLU(_ScaledActivation):
    """max(x, 0)^2 * scales[row].

    `activation_recompute_in_mlp=True` is for the fused grouped MLP, which does not exist here: such an operation can be
    made, and raises RuntimeError when it runs.
    """

    activation = "srelu"

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__()
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._require_no_recompute()
        return super().fuser_forward(*args, **kwargs)

    def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
        self._require_no_recompute()
        return super().fuser_backward(*args, **kwargs)

    def _require_no_recompute(self):
        if self.activation_recompute_in_mlp:
            raise RuntimeError("ScaledSReLU with activation_recompute_in_mlp=True requires the fused grouped MLP path")
