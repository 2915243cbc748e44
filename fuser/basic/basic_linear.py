"""`y = x W^T`: the linear layer without bias, with low-precision operands and tensor parallelism.

The bias, the communication after a row-parallel product and everything else around the product are ops of their own;
the fusions of `fuser.fused` bring them together by calling `BasicLinear.fused_forward` and `fused_backward`.

Where this differs from TransformerEngine on purpose:

* a product that should be emitted through a quantizer other than delayed scaling's (`Linear -> Linear` under current,
  block, MXFP8 or NVFP4 scaling) comes out in high precision, and the next op quantizes it. TE raises.
* with `overwrite_main_grad`, autograd gets the dummy gradient as it does when gradients accumulate. TE hands it
  `main_grad` itself, which then counts twice.
* quantized tensors that the caller can see keep both their copies; only storages made inside the pipeline lose one.
  One that lacks the copy for the backward pass is quantized again there. TE raises.
* scales are stored in GEMM order where products read that (MXFP8 from sm_100 on); TE asks for it everywhere.
* under sequence parallelism, formats that scale blocks are gathered in high precision and quantized as a whole, so the
  op before hands over high precision. What ranks gather in FP8 is saved in FP8; TE saves it in high precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fuser.basic.linear_operation import (
    PER_TENSOR_QUANTIZERS,
    Destination,
    LinearOperation,
    check_linear_dtype,
    keep_columnwise,
    prepare_operand,
    replace_parameter,
)
from fuser.common import (
    device_with_memory,
    get_accumulate_flag_in_param,
    get_dummy_wgrads_for_params,
    get_main_grad_from_param,
    maybe_dequantize,
)
from fuser.distributed import (
    all_reduce,
    gather_along_first_dim,
    get_distributed_world_size,
    reduce_scatter_along_first_dim,
)
from fuser.gemm import linear_dgrad, linear_forward, linear_wgrad
from fuser.op import OperationContext
from fuser.overflow import warn_of_hidden_overflow
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.quantizers import Float8CurrentScalingQuantizer
from refops.arguments import shown


class BasicLinear(LinearOperation):
    """`y = x W^T` with `weight` of shape `(out_features, in_features)`.

    Args:
        in_features, out_features: inner sizes of the whole layer, over all tensor-parallel ranks.
        device: where the weight lives; `"meta"` defers its initialisation to the first forward pass.
        dtype: float32, float16 or bfloat16 (`ValueError` otherwise).
        tensor_parallel_mode: `None`, `"column"` (ranks share `out_features`) or `"row"` (ranks share `in_features`).
        tensor_parallel_group: the ranks; `None` is the default group. A group of one switches tensor parallelism off.
        sequence_parallel: the activations outside the tensor-parallel region are sharded along dimension 0, so that a
            column-parallel layer gathers its input and a row-parallel one reduce-scatters its output.
        rng_state_tracker_function: returns a tracker whose `fork()` surrounds the initialisation.
        accumulate_into_main_grad: weight gradients go to `weight.main_grad` rather than `weight.grad`.
        userbuffers_options: accepted for TE's signature; communication isn't overlapped here.

    Shapes: `(..., in_features)` to `(..., out_features)`, local sizes under tensor parallelism. The output has
    autocast's dtype, else the weight's.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: torch.distributed.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        (
            self.tensor_parallel_mode,
            self.tensor_parallel_group,
            self.tensor_parallel_size,
            self.sequence_parallel,
            self.local_in_features,
            self.local_out_features,
        ) = self._canonicalize_tensor_parallelism(
            mode=tensor_parallel_mode,
            process_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            in_features=in_features,
            out_features=out_features,
        )
        device, dtype = self._keep_arguments(device, dtype, rng_state_tracker_function, accumulate_into_main_grad)
        weight = torch.empty(self.local_out_features, self.local_in_features, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(weight)
        if device.type != "meta":
            self.reset_parameters()

    @classmethod
    def _canonicalize_tensor_parallelism(
        cls,
        *,
        mode: str | None,
        process_group: torch.distributed.ProcessGroup | None,
        sequence_parallel: bool,
        in_features: int,
        out_features: int,
    ) -> tuple[str | None, torch.distributed.ProcessGroup | None, int, bool, int, int]:
        """`(mode, group, group size, sequence parallel, local in_features, local out_features)`, checked."""
        size = 1 if mode is None else get_distributed_world_size(process_group)
        if size == 1:
            return None, None, 1, False, in_features, out_features
        if mode not in ("column", "row"):
            raise ValueError(f"Supported modes for tensor parallelism are 'row' and 'column' (got {shown(mode)})")
        name, features = ("out_features", out_features) if mode == "column" else ("in_features", in_features)
        if features % size:
            raise ValueError(
                "Invalid configuration for tensor parallelism: "
                f"mode={mode!r} needs {name} divisible by the number of ranks (got {name}={features}, ranks={size})"
            )
        if mode == "column":
            return mode, process_group, size, sequence_parallel, in_features, out_features // size
        return mode, process_group, size, sequence_parallel, in_features // size, out_features

    def extra_repr(self) -> str:
        parallel = f", tensor_parallel_mode={self.tensor_parallel_mode!r}" if self.tensor_parallel_mode else ""
        return f"in_features={self.in_features}, out_features={self.out_features}{parallel}"

    # Quantizers

    def graph_obstacle(self) -> str:
        return "exchanges tensors with other processes" if self.tensor_parallel_mode else ""

    def get_input_quantizer(self) -> Quantizer | None:
        """The input's quantizer, unless the input must be gathered in high precision before it is quantized."""
        quantizer = super().get_input_quantizer()
        return None if quantizer is not None and self._gathers_before(quantizer, "column") else quantizer

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """The output gradient's quantizer, unless that gradient must be gathered in high precision first."""
        quantizer = super().get_grad_output_quantizer()
        return None if quantizer is not None and self._gathers_before(quantizer, "row") else quantizer

    def _gathers_before(self, quantizer: Quantizer, mode: str) -> bool:
        return self._gathers(mode) and not isinstance(quantizer, PER_TENSOR_QUANTIZERS)

    def _gathers(self, mode: str) -> bool:
        return self.sequence_parallel and self.tensor_parallel_mode == mode

    def _set_up_quantizers(self, recipe: Any, weights: list[Any]) -> None:
        super()._set_up_quantizers(recipe, weights)
        for mode, direction in (("column", "forward"), ("row", "backward")):
            if not self._gathers(mode):
                continue
            quantizer = self.get_quantizer(direction, 0)
            quantizer.optimize_for_gemm = False
            # NVFP4 has an amax of the tensor too, but is quantized after gathering: all ranks see the whole
            if isinstance(quantizer, Float8CurrentScalingQuantizer):
                quantizer.with_amax_reduction = True
                quantizer.amax_reduction_group = self.tensor_parallel_group

    # Parameters

    @property
    def _weight_parameters(self) -> list[torch.nn.Parameter]:
        return [self.weight]

    def _group_weights(self) -> list[Any]:
        return [getattr(self, "weight", None)]

    def reset_parameters(self) -> None:
        """(Re)initialise the weight as `torch.nn.Linear` does, on a real device, quantized where it was asked for."""
        old = self.weight
        memory = torch.empty(old.shape, dtype=old.dtype, device=device_with_memory(old.device))
        (weight,) = self._initialized([memory])
        self.weight = replace_parameter(old, weight)

    # Compute: the functional forms

    @staticmethod
    def _forward_product(
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        alpha: float = 1.0,
        bias: torch.Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
        beta: float | None = None,
        accumulate_into_out: bool = False,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: torch.distributed.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        with_quantized_compute: bool = False,
        backward_override: str | None = None,
        input_quantizer: Quantizer | None = None,
        weight_quantizer: Quantizer | None = None,
        output_quantizer: Quantizer | None = None,
        use_split_accumulator: bool | None = None,
        input_requires_grad: bool = True,
        weight_requires_grad: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """`y = alpha * x W^T (+ bias) (+ beta * out)`, summed in float32 and rounded once.

        Args:
            input: `(..., in_features)`, plain or quantized. Column + sequence parallel gathers it along dimension 0.
            weight: `(out_features, in_features)`, plain or quantized.
            alpha: factor of the product.
            bias: `(out_features,)`, added before the rounding.
            device: where `out` must live; default: the weight's device.
            dtype: of the compute and of the output; default: that of `out`, else of `weight`.
            out: receives the result in place.
            beta, accumulate_into_out: add `beta` (default 1) times the previous values of `out`.
            tensor_parallel_mode, tensor_parallel_group, sequence_parallel: as in the constructor.
            with_quantized_compute: multiply quantized operands; each that isn't quantized needs its quantizer
                (`ValueError`), one that is quantized is used as it is.
            backward_override: `"high_precision"` keeps the original operands for the backward pass, `"dequantized"`
                the quantized copies that the forward pass multiplied (to be dequantized there).
            output_quantizer: emits the output, if it is delayed scaling's; ignored otherwise.
            use_split_accumulator: as for `fuser.gemm.gemm`.
            input_requires_grad, weight_requires_grad: which gradients the backward pass will compute.

        Returns:
            `(y, input for wgrad or None, weight for dgrad or None)`.
        """
        if dtype is None:
            source = weight if out is None else out
            if source is None:
                raise ValueError("Could not infer dtype from weight nor out")
            dtype = source.dtype
        dtype = check_linear_dtype(dtype)
        gather, reduce = _collectives(tensor_parallel_group, sequence_parallel)
        gather = gather if tensor_parallel_mode == "column" else None
        reduced_by, reduce = ("row", reduce) if tensor_parallel_mode == "row" else (None, None)
        quantizer = output_quantizer if with_quantized_compute else None
        destination = Destination("output", out, accumulate_into_out, beta, quantizer, reduced_by, reduce)
        destination.check_quantized(with_quantized_compute)
        destination.check(dtype, weight.device if device is None else device)

        quantized_backward = with_quantized_compute and backward_override is None
        operand = functools.partial(
            prepare_operand, dtype=dtype, quantized=with_quantized_compute, rowwise=True, reads="rowwise"
        )
        columnwise = weight_requires_grad and quantized_backward
        x, x_local = operand("input tensor", input, input_quantizer, columnwise=columnwise, gather=gather)
        columnwise = input_requires_grad and quantized_backward
        w, _ = operand("weight tensor", weight, weight_quantizer, columnwise=columnwise)
        y = destination.receive(
            linear_forward, x, w, dtype=dtype, alpha=alpha, bias=bias, use_split_accumulator=use_split_accumulator
        )

        x_for_wgrad = w_for_dgrad = None
        if weight_requires_grad:
            x_for_wgrad = input if backward_override == "high_precision" else x_local
        if input_requires_grad:
            w_for_dgrad = weight if backward_override == "high_precision" else w
        if quantized_backward:
            if gather is None:
                keep_columnwise(x_for_wgrad)
            keep_columnwise(w_for_dgrad)
        return y, x_for_wgrad, w_for_dgrad

    _functional_forward = staticmethod(torch.no_grad()(_forward_product))

    @staticmethod
    @torch.no_grad()
    def _functional_backward(
        grad_output: torch.Tensor,
        input: torch.Tensor | None,
        weight: torch.Tensor | None,
        *,
        grad_input_alpha: float | None = None,
        input_requires_grad: bool = True,
        grad_weight_alpha: float | None = None,
        weight_requires_grad: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        grad_weight: torch.Tensor | None = None,
        grad_weight_beta: float | None = None,
        accumulate_into_grad_weight: bool = False,
        grad_input: torch.Tensor | None = None,
        grad_input_beta: float | None = None,
        accumulate_into_grad_input: bool = False,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: torch.distributed.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        with_quantized_compute: bool = False,
        input_quantizer: Quantizer | None = None,
        weight_quantizer: Quantizer | None = None,
        grad_output_quantizer: Quantizer | None = None,
        grad_input_quantizer: Quantizer | None = None,
        grad_input_use_split_accumulator: bool | None = None,
        grad_weight_use_split_accumulator: bool | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`dx = alpha * dy W (+ beta * grad_input)` and `dW = alpha * dy^T x (+ beta * grad_weight)`.

        Sums run over all leading dimensions, in float32, rounded once. `input` and `weight` are what
        `_functional_forward` returned for the backward pass. Buffers are written in place; alphas and betas default
        to 1. `dx` is emitted through `grad_input_quantizer` only if that is delayed scaling's and the layer isn't
        column parallel. `*_use_split_accumulator` are those of `fuser.gemm.gemm`. Returns `(dx or None, dW or None)`;
        `dW` has the buffer's dtype, else `dtype`.
        """
        if dtype is None:
            dtype = (grad_output if weight is None else weight).dtype
        dtype = check_linear_dtype(dtype)
        if weight_requires_grad and input is None:
            raise ValueError("Attempted to compute gradient w.r.t. weight, but did not provide input tensor")
        if input_requires_grad and weight is None:
            raise ValueError("Attempted to compute gradient w.r.t. input, but did not provide weight tensor")
        gather, reduce = _collectives(tensor_parallel_group, sequence_parallel)
        reduced_by, reduce = ("column", reduce) if tensor_parallel_mode == "column" else (None, None)
        quantizer = grad_input_quantizer if with_quantized_compute else None
        of_input = Destination(
            "grad input", grad_input, accumulate_into_grad_input, grad_input_beta, quantizer, reduced_by, reduce
        )
        of_weight = Destination("grad weight", grad_weight, accumulate_into_grad_weight, grad_weight_beta)
        buffer_device = grad_output.device if device is None else device
        of_input.check_quantized(with_quantized_compute)
        of_input.check(dtype, buffer_device)
        of_weight.check(None, buffer_device)
        if not input_requires_grad and not weight_requires_grad:
            return None, None

        if with_quantized_compute:
            warn_of_hidden_overflow(grad_output, grad_output_quantizer)
        operand = functools.partial(prepare_operand, dtype=dtype, quantized=with_quantized_compute)
        dy, _ = operand(
            "grad output tensor",
            grad_output,
            grad_output_quantizer,
            rowwise=input_requires_grad,
            columnwise=weight_requires_grad,
            gather=gather if tensor_parallel_mode == "row" else None,
        )
        dx = dw = None
        if input_requires_grad:
            w, _ = operand("weight tensor", weight, weight_quantizer, rowwise=False, columnwise=True)
            dx = of_input.receive(
                linear_dgrad,
                dy,
                w,
                dtype=dtype,
                alpha=1.0 if grad_input_alpha is None else grad_input_alpha,
                use_split_accumulator=grad_input_use_split_accumulator,
            )
        if weight_requires_grad:
            gather = gather if reduced_by else None
            x, _ = operand("input tensor", input, input_quantizer, rowwise=False, columnwise=True, gather=gather)
            dw = of_weight.receive(
                linear_wgrad,
                dy,
                x,
                dtype=dtype if grad_weight is None else grad_weight.dtype,
                alpha=1.0 if grad_weight_alpha is None else grad_weight_alpha,
                use_split_accumulator=grad_weight_use_split_accumulator,
            )
        return dx, dw

    # Compute: as an op of a pipeline

    def fused_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        output_quantizer: Quantizer | None = None,
        dtype: torch.dtype | None = None,
        **product: Any,
    ) -> torch.Tensor:
        """The forward product of this op or of a fusion with it, leaving in `ctx` what `op_backward` reads.

        `product` holds arguments of `_functional_forward` (`alpha`, `bias`, `out`, `beta`, `accumulate_into_out`).
        """
        weight = self.weight
        if input_.size()[-1:] != weight.shape[1:]:
            raise ValueError(
                f"Input tensor (shape={tuple(input_.size())}) and weight tensor (shape={tuple(weight.shape)}) "
                "are not compatible: the input's last dimension must be in_features"
            )
        options = self.begin_forward(ctx, weight, dtype)
        quantized = options["with_quantized_compute"]
        ctx.input_quantizer, ctx.weight_quantizer, grad_output_quantizer = ctx.quantizers[0]
        ctx.grad_output_quantizer = grad_output_quantizer if ctx.with_quantized_compute else None
        ctx.grad_input_quantizer = prev_op_grad_output_quantizer if ctx.with_quantized_compute else None
        if not quantized and not product and self.tensor_parallel_mode is None:  # a plain product has nothing to decide
            x, w = maybe_dequantize(input_, ctx.dtype), maybe_dequantize(weight, ctx.dtype)
            ctx.save_for_backward(x if ctx.weight_requires_grad else None, w if ctx.input_requires_grad else None)
            return linear_forward(x, w, out_dtype=ctx.dtype)
        output, x, w = BasicLinear._forward_product(  # there is no grad mode in a fuser's forward
            input_,
            weight,
            tensor_parallel_mode=self.tensor_parallel_mode,
            tensor_parallel_group=self.tensor_parallel_group,
            sequence_parallel=self.sequence_parallel,
            input_quantizer=ctx.input_quantizer,
            weight_quantizer=ctx.weight_quantizer,
            output_quantizer=output_quantizer if quantized else None,
            **options,
            **product,
        )
        ctx.save_for_backward(x, w)
        return output

    def fused_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor, **product: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Both gradient products of this op or of a fusion with it: `(dx, what autograd gets for the weight)`.

        `product` holds arguments of `_functional_backward` (`dtype`, `grad_input_alpha`, `grad_input`, ...). With
        `accumulate_into_main_grad` the weight's gradient goes to `weight.main_grad`.
        """
        x, w = ctx.saved_tensors
        into_main_grad = self._accumulate_into_main_grad and ctx.weight_requires_grad
        if into_main_grad:
            product["grad_weight"] = get_main_grad_from_param(self.weight, op_label="BasicLinear")
            product["accumulate_into_grad_weight"] = get_accumulate_flag_in_param(self.weight)
        grad_input, grad_weight = BasicLinear._functional_backward(
            grad_output,
            x,
            w,
            tensor_parallel_mode=self.tensor_parallel_mode,
            tensor_parallel_group=self.tensor_parallel_group,
            sequence_parallel=self.sequence_parallel,
            input_quantizer=ctx.input_quantizer,
            weight_quantizer=ctx.weight_quantizer,
            grad_output_quantizer=ctx.grad_output_quantizer,
            grad_input_quantizer=ctx.grad_input_quantizer,
            **(self.backward_options(ctx) | product),
        )
        if into_main_grad:
            (grad_weight,) = get_dummy_wgrads_for_params([self.weight])
        return grad_input, grad_weight

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
    ) -> torch.Tensor:
        return self.fused_forward(
            ctx,
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            output_quantizer=next_op_input_quantizer,
        )

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        grad_input, grad_weight = self.fused_backward(ctx, grad_output)
        return grad_input, [grad_weight]


def _collectives(
    group: torch.distributed.ProcessGroup | None, sequence_parallel: bool
) -> tuple[Callable[..., torch.Tensor] | None, Callable[..., torch.Tensor]]:
    """What gathers an operand that is sharded along dimension 0, None if none is, and what reduces partial sums."""
    gather = functools.partial(gather_along_first_dim, group=group) if sequence_parallel else None
    return gather, functools.partial(reduce_scatter_along_first_dim if sequence_parallel else all_reduce, group=group)
