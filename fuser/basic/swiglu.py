"""SwiGLU and its relatives, plain and with a scale for every row, as fusible operations.

A row is [a | b] of width 2H: a goes through the activation, b is the linear part. With `glu_interleave_size=k` it is
[a 0:k | b 0:k | a k:2k | b k:2k ...]. Source: TE behaviour, `ops/basic/swiglu.py` and `ops/basic/activation.py`.
"""

from typing import TYPE_CHECKING, Any

import torch

from fuser import dispatch
from fuser.basic.activation import (
    ActivationParameters,
    _ActivationOperation,
    activation_dtype,
    operation_of,
    operations_of,
    signature_of,
)
from fuser.common import maybe_dequantize, publish, reject_forward_kwargs
from fuser.op import ExtraTensorOperation, OperationContext
from refops.activations import ACTIVATIONS
from refops.arguments import say_who, shown


class _InterleavedGLU(_ActivationOperation):
    """A gated linear unit whose input rows may be interleaved.

    Args:
        cache_quantized_input: as for the other activations; the interleaved input is what is kept.
        glu_interleave_size: width of the blocks of interleaved rows, None for [a | b]. The input's gradient is then
            not quantized, since it is permuted after it was computed.

    Raises:
        ValueError: at forward, for a row that isn't a whole number of pairs of blocks.
    """

    def __init__(
        self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None, **parameters: float
    ) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, **parameters)
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


def deinterleave(x: torch.Tensor, size: int, dim: int = -1) -> torch.Tensor:
    """Along `dim`, [a 0:size | b 0:size | a size:2*size | ...] as [a | b]: a copy, of the same shape."""
    return _blocks_exchanged(x, size, dim, (-1, 2, size))


def interleave(x: torch.Tensor, size: int, dim: int = -1) -> torch.Tensor:
    """The inverse of `deinterleave`."""
    return _blocks_exchanged(x, size, dim, (2, -1, size))


def _blocks_exchanged(x, size, dim, blocks):
    dim %= x.dim()
    if not isinstance(size, int) or size <= 0 or x.shape[dim] % (2 * size):
        raise ValueError(
            f"glu_interleave_size must be positive and twice it must divide dimension {dim}; "
            f"got {shown(size)} and an input of shape {tuple(x.shape)}"
        )
    return x.unflatten(dim, blocks).transpose(dim, dim + 1).reshape(x.shape)


#: Name -> class of every gated activation that has kernels with a scale for each row: these take interleaved rows.
INTERLEAVED = operations_of(_InterleavedGLU, lambda row: row.gated and row.row_scaled)
publish(INTERLEAVED, globals())


# --- with a scale for every row -------------------------------------------------------------------


class _ScaledActivation(ActivationParameters, ExtraTensorOperation):
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

    def __init__(self, **parameters: float) -> None:
        super().__init__()
        self.set_parameters(parameters)

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
        x, scales = self.begin_forward(basic_op_ctxs[0], input_, basic_op_extra_inputs[0][0])
        return self.rows_forward(x, scales), [()]

    def begin_forward(
        self, ctx: OperationContext, input_: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check and save the input and its scales, in the compute dtype, which are returned."""
        dtype = activation_dtype(input_)
        x = maybe_dequantize(input_, dtype)
        if scales.numel() != x.shape[:-1].numel():
            raise ValueError(
                f"{type(self).__name__}: scales must have one entry for each row of the input; got shape "
                f"{tuple(scales.shape)} for an input of shape {tuple(x.shape)}"
            )
        converted = maybe_dequantize(scales, dtype)
        if ctx.requires_grad:
            ctx.save_for_backward(x, converted)
            ctx.dtype = dtype
            ctx.extra_input_requires_grad = scales.requires_grad
        return x, converted

    def rows_forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The output for some rows."""
        try:
            return dispatch.scaled_activation(self.activation, x, scales, **self.activation_parameters())
        except (TypeError, ValueError) as error:
            say_who(error, f"{type(self).__name__}, input of shape {tuple(x.shape)}")
            raise

    def rows_backward(
        self, dy: torch.Tensor, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of some rows and of their scales."""
        return dispatch.scaled_activation_grad(self.activation, dy, x, scales, **self.activation_parameters())

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **unused: Any) -> Any:
        ctx: OperationContext = basic_op_ctxs[0]
        x, scales = ctx.saved_tensors
        dx, dscales = self.rows_backward(maybe_dequantize(grad_output, ctx.dtype), x, scales)
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

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        **parameters: float,
    ) -> None:
        if activation_recompute_in_mlp:
            raise ValueError(
                f"{type(self).__name__} does not support activation recomputation; got activation_recompute_in_mlp=True"
            )
        super().__init__(**parameters)
        self.glu_interleave_size = glu_interleave_size
        self.activation_recompute_in_mlp = activation_recompute_in_mlp

    def activation_parameters(self) -> dict[str, Any]:
        return {**super().activation_parameters(), "glu_interleave_size": self.glu_interleave_size or 0}


class ScaledClampedQGeGLU(_ScaledGLU):
    """`ClampedSwiGLU` times scales[row]; its settings are those of the contained `_clamped`."""

    activation = "clamped_swiglu"

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        **parameters: float,
    ) -> None:
        super().__init__(glu_interleave_size, activation_recompute_in_mlp=activation_recompute_in_mlp, **parameters)
        self._clamped = INTERLEAVED["ClampedSwiGLU"](**parameters)

    def activation_parameters(self) -> dict[str, Any]:
        return {**super().activation_parameters(), **self._clamped.activation_parameters()}


ScaledClampedQGeGLU.__signature__ = signature_of(  # type: ignore[attr-defined]
    ACTIVATIONS["clamped_swiglu"], _ScaledGLU
)


class ScaledSReLU(_ScaledActivation):
    """max(x, 0)^2 * scales[row].

    `activation_recompute_in_mlp=True` is for a fused grouped MLP (`fuser.fused.GroupedMLP`), which computes the output
    again in backward. Elsewhere such an operation raises RuntimeError when it runs.
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


#: Name -> class of every activation with a scale for each row. TE has names and settings of its own for two.
SCALED: dict[str, Any] = {"ScaledClampedQGeGLU": ScaledClampedQGeGLU, "ScaledSReLU": ScaledSReLU}
SCALED |= {
    f"Scaled{row.op}": operation_of(row, _ScaledGLU if row.gated else _ScaledActivation, f"Scaled{row.op}", text)
    for row in ACTIVATIONS.values()
    for text in [f"`{row.op}` times scales[row]."]
    if row.row_scaled and row.name not in {cls.activation for cls in SCALED.values()}
}
publish(SCALED, globals())

if TYPE_CHECKING:  # the classes of `INTERLEAVED` and `SCALED`

    def __getattr__(name: str) -> type[Any]: ...
