"""Several linear layers side by side, each applied to its own run of rows: the experts of a mixture of experts.

TE has a second implementation, with one grouped cuBLASLt product over tensors packed into one buffer. Here every group
is a product of its own (TE's "split path"), which gives the same numbers on any device.
"""

from __future__ import annotations

import contextvars
import operator
import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuser.basic.basic_linear import BasicLinear
from fuser.basic.linear_operation import LinearOperation, quantize_operand, replace_parameter
from fuser.common import (
    device_with_memory,
    get_accumulate_flag_in_param,
    get_dummy_wgrads_for_params,
    get_main_grad_from_param,
    is_quantized_tensor,
    maybe_dequantize,
    validate_or_alloc_output,
    view_main_grad_as_grouped_buffer,
)
from fuser.op import ExtraTensorOperation, OperationContext
from fuser.overflow import warn_of_hidden_overflow
from fuser.quantization.grouped import GroupedTensor
from fuser.recipe import Recipe
from fuser.tracing import exporting
from refops.arguments import say_who

#: Keyword arguments of a forward call: caller's buffers for the output and for the input's gradient.
OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"


def is_op_fuser_grouped_tensor_path_supported(recipe: Recipe | None, dtype: torch.dtype) -> bool:
    """Whether `GroupedLinear` uses one grouped product over packed tensors: never, groups are multiplied one by one."""
    return False


class GroupedLinear(LinearOperation, ExtraTensorOperation):
    """`y_i = x_i W_i^T (+ b_i)` for each of `num_groups` runs of rows of one input.

    Args:
        num_groups, in_features, out_features: at least 1 each (`ValueError`).
        bias: whether there are biases.
        device, dtype, rng_state_tracker_function, accumulate_into_main_grad: as in `BasicLinear`.
        single_grouped_weight, single_grouped_bias: the weights, or biases, of all groups are one parameter. TE's
            experiment: a `UserWarning`, and parameters of their own, unless NVTE_GROUPED_LINEAR_SINGLE_PARAM is 1.
        delay_wgrad_compute: weight gradients wait for `backward_dw`, which adds them to each weight's `grad` or
            `main_grad`. Weights have the attribute `skip_backward_post_hook` then: what averages gradients over ranks
            calls its hooks by `register_wgrad_accumulation_and_reduce_hooks` instead.
        scale_bias: the second extra input scales the bias in each row.

    Parameters: `weight0` ... of shape `(out_features, in_features)`, then `bias0` ... of shape `(out_features,)`; or
    `GroupedTensor`s `weight` and `bias` of these, with a first dimension of `num_groups`. Bits are the same.
    Extra inputs: `split_sizes`, integers `(num_groups,)` that sum to the number of rows (0 is fine); with `scale_bias`
    and biases also `scales`, `(rows,)`.
    Forward keyword arguments: `output` and `grad_input`, buffers that receive the results.
    Input and gradients are quantized a group at a time, so neighbouring ops hand over high precision.
    """

    extra_input_names = ("split_sizes", "scales")

    weight0: torch.nn.Parameter
    weight: Any  # a `GroupedTensor`, or the plain parameter that it became under FSDP

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        self._scale_bias = bool(scale_bias and bias)
        self.num_extra_inputs = 2 if self._scale_bias else 1
        super().__init__()
        for name, size in (("num_groups", num_groups), ("in_features", in_features), ("out_features", out_features)):
            if size <= 0:
                raise ValueError(f"{name} must be positive (got {size})")
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.single_grouped_weight = _may_be_single("single_grouped_weight", single_grouped_weight)
        self.single_grouped_bias = _may_be_single("single_grouped_bias", single_grouped_bias) and bias
        self.has_bias = bias
        self._delay_wgrad_compute = delay_wgrad_compute
        self._pending_wgrads: deque[Callable[[], None]] = deque()
        self._wgrad_hooks: list[Callable[[], None]] = []

        device, dtype = self._keep_arguments(device, dtype, rng_state_tracker_function, accumulate_into_main_grad)
        weights = torch.empty(num_groups, out_features, in_features, dtype=dtype, device="meta")
        biases = torch.zeros(num_groups, out_features, dtype=dtype, device=device) if bias else None
        named = (("weight", weights, self.single_grouped_weight), ("bias", biases, self.single_grouped_bias))
        for name, values, single in named:
            for i in range(num_groups):
                present = values is not None and not single
                self.register_parameter(f"{name}{i}", torch.nn.Parameter(values[i]) if present else None)
        for name, values, single in named:  # behind those of all groups, as in TE
            if single:
                self.register_parameter(name, torch.nn.Parameter(GroupedTensor.pack(values.unbind())))
        if device.type != "meta":
            self._materialize(device)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Like torch's; weights whose gradients are delayed get `skip_backward_post_hook`."""
        super().register_parameter(name, param)
        self._mark_delayed(name, param)

    def _mark_delayed(self, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and self._delay_wgrad_compute and name.startswith("weight"):
            param.skip_backward_post_hook = True  # type: ignore[attr-defined]

    @property
    def weights(self) -> list[Any]:
        """The weight of each group."""
        return self._of_groups("weight", self.single_grouped_weight)

    @property
    def biases(self) -> list[Any]:
        """The bias of each group, `None` without biases."""
        return self._of_groups("bias", self.single_grouped_bias)

    def _of_groups(self, name: str, single: bool) -> list[Any]:
        """The parameters of the groups, or their parts of a single parameter; `None`s before they are registered."""
        if not single:
            return [getattr(self, f"{name}{i}", None) for i in range(self.num_groups)]
        parameter = getattr(self, name, None)
        if isinstance(parameter, GroupedTensor):
            return parameter.split_into_quantized_tensors()
        return [None] * self.num_groups if parameter is None else list(parameter.detach().unbind())

    def _group_weights(self) -> list[Any]:
        return self.weights

    @property
    def _weight_parameters(self) -> list[torch.nn.Parameter]:
        return [self.weight] if self.single_grouped_weight else self.weights

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}"
        )

    # Quantizers

    def graph_obstacle(self) -> str:
        return "reads the sizes of its groups from a tensor"

    def get_input_quantizer(self) -> None:
        """None: each group quantizes its own rows."""

    def get_grad_output_quantizer(self) -> None:
        """None: each group quantizes its own rows."""

    def _set_up_quantizers(self, recipe: Any, weights: list[Any]) -> None:
        super()._set_up_quantizers(recipe, weights)
        if self.single_grouped_weight and is_quantized_tensor(weights[0]):
            self.weight.set_quantizers([weight._quantizer for weight in weights])

    # Parameters

    def reset_parameters(self) -> None:
        """(Re)initialise as `torch.nn.Linear` does, biases with zeros, on a real device, quantized where asked for."""
        device = self._weight_parameters[0].device
        self._materialize(device_with_memory(device))

    def _materialize(self, device: torch.device) -> None:
        dtype = self._weight_parameters[0].dtype
        # One buffer for all weights: a grouped product, or an optimizer that works on flat memory, finds them in order
        packed = torch.empty(self.num_groups, self.out_features, self.in_features, dtype=dtype, device=device)
        self._replace("weight", self.single_grouped_weight, self._initialized(packed))
        if self.has_bias:
            zeros = [torch.zeros(self.out_features, dtype=old.dtype, device=device) for old in self.biases]
            self._replace("bias", self.single_grouped_bias, zeros)

    def _replace(self, name: str, single: bool, values: list[torch.Tensor]) -> None:
        """Make the groups' `values` the parameters, with the flags of the old ones."""
        if single:
            setattr(self, name, replace_parameter(getattr(self, name), GroupedTensor.pack(values)))
            return
        for i, value in enumerate(values):
            setattr(self, f"{name}{i}", replace_parameter(getattr(self, f"{name}{i}"), value))

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Choose the copies to quantize; `RuntimeError` if the groups' parameters don't match each other."""
        super().pre_fuser_forward(requires_grad=requires_grad)
        if not self.single_grouped_weight:
            _check_alike("weight", self.weights)
        if self.has_bias and not self.single_grouped_bias:
            _check_alike("bias", self.biases)

    # Compute

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, basic_op_kwargs: Any, **unused: Any
    ) -> Any:
        (ctx,), (kwargs,), (extra_inputs,) = basic_op_ctxs, basic_op_kwargs, basic_op_extra_inputs
        run = GroupedForward(self, ctx, input_.shape, extra_inputs, kwargs)
        for i, x in enumerate(run.rows_of_groups(maybe_dequantize(input_, run.dtype))):
            run.group(i, x)
        run.finish()
        return run.output, [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        (ctx,) = basic_op_ctxs
        run = GroupedBackward(self, ctx)
        grad_output = maybe_dequantize(grad_output, ctx.dtype)
        run.allocate(grad_output.shape, grad_output.device)
        for i, dy in enumerate(run.rows_of_groups(grad_output)):
            run.quantize_grad(i, dy)
            run.multiply(i)
        grads, grad_extra_inputs = run.finish()
        return run.grad_input, [grads], [grad_extra_inputs]

    def _group_backward(
        self, ctx: OperationContext, i: int, dy: Any, x: Any, w: Any, **wanted: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Gradients of the input and of the weight of group `i`. `wanted`: which, and where they go."""
        input_quantizer, weight_quantizer, grad_output_quantizer = ctx.quantizers[i]
        return BasicLinear._functional_backward(
            dy,
            x,
            w,
            input_quantizer=input_quantizer,
            weight_quantizer=weight_quantizer,
            grad_output_quantizer=grad_output_quantizer,
            **(self.backward_options(ctx) | wanted),
        )

    def _main_grads(self) -> list[dict[str, Any]]:
        """For each group the arguments of a product that make it write the weight's gradient to `main_grad`."""
        parameters = self._weight_parameters
        buffers: Sequence[Any] = [get_main_grad_from_param(one, op_label="GroupedLinear") for one in parameters]
        if self.single_grouped_weight:
            shape = (self.out_features, self.in_features)
            whole = view_main_grad_as_grouped_buffer(buffers[0], self.num_groups, shape, label="GroupedLinear:")
            buffers, parameters = whole.unbind(), parameters * self.num_groups
        return [
            {"grad_weight": buffer, "accumulate_into_grad_weight": get_accumulate_flag_in_param(parameter)}
            for buffer, parameter in zip(buffers, parameters, strict=True)
        ]

    # Delayed weight gradients

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for `backward_dw`."""
        return self._delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call `hook()` after each `backward_dw`."""
        self._wgrad_hooks.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward pass that waits for them, adding to each `weight.grad`.

        With `accumulate_into_main_grad` they go to the buffers that the weights had in that backward pass. Nothing
        happens if no backward pass waits.
        """
        if not self._pending_wgrads:
            return
        self._pending_wgrads.popleft()()
        for hook in self._wgrad_hooks:
            hook()

    @torch.no_grad()
    def _delayed_wgrads(
        self, ctx: OperationContext, dys: list[Any], xs: list[Any], destinations: list[dict[str, Any]]
    ) -> None:
        groups = enumerate(zip(dys, xs, destinations, strict=True))
        grads = [
            self._group_backward(ctx, i, dy, x, None, input_requires_grad=False, **destination)[1]
            for i, (dy, x, destination) in groups
        ]
        if destinations[0]:
            return
        parameters = self._weight_parameters
        for parameter, grad in zip(parameters, _as_of_parameters(grads, self.single_grouped_weight), strict=True):
            parameter.grad = grad.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(grad)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy: none of its backward passes waits for weight gradients."""
        return {**super().__getstate__(), "_pending_wgrads": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, param in self._parameters.items():  # torch copies parameters without their attributes
            self._mark_delayed(name, param)

    def _split_sizes(self, split_sizes: torch.Tensor, rows: int) -> list[int]:
        if exporting():
            raise RuntimeError(
                "torch.export can't record GroupedLinear: how it splits rows depends on the values of split_sizes. "
                "Export its groups one by one, as ops.Linear"
            )
        if split_sizes.numel() != self.num_groups:
            raise ValueError(f"Expected {self.num_groups} splits, but got {split_sizes.numel()}")
        if split_sizes.is_floating_point() or split_sizes.is_complex():
            raise ValueError(f"split_sizes must be integers (got {split_sizes.dtype})")
        splits = split_sizes.reshape(-1).to(torch.int64).tolist()
        if min(splits) < 0 or sum(splits) != rows:
            raise ValueError(f"split_sizes must be non-negative and sum to the {rows} rows of the input (got {splits})")
        return splits


class _GroupedPass:
    """What a forward and a backward pass of a `GroupedLinear` share: they go through the groups one by one.

    So can a fusion, which runs other operations on the rows of a group between two steps.
    """

    op: GroupedLinear
    ctx: OperationContext
    row_scales: Sequence[torch.Tensor] | None

    def rows_of_groups(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The rows of each group, of a tensor (..., features)."""
        return tensor.reshape(sum(self.ctx.split_sizes), tensor.shape[-1]).split(self.ctx.split_sizes)


class GroupedForward(_GroupedPass):
    """A forward pass: `group` for each group, then `finish`, which leaves in `ctx` what the backward pass reads.

    Args:
        shape: of the input, (..., in_features).
        extra_inputs, kwargs: those of the operation.

    Attributes:
        output: (..., out_features), written by `group`.
        dtype: that of the output, which inputs must have.
    """

    def __init__(
        self, op: GroupedLinear, ctx: OperationContext, shape: torch.Size, extra_inputs: Any, kwargs: dict[str, Any]
    ) -> None:
        unknown = sorted(set(kwargs) - {OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY})
        if unknown:
            raise TypeError(f"GroupedLinear got unexpected keyword arguments {unknown}")
        rows = shape[:-1].numel()
        if shape[-1:] != (op.in_features,):
            raise ValueError(
                f"last dimension of the input must be in_features={op.in_features}; got shape {tuple(shape)}"
            )
        self.op, self.ctx = op, ctx
        parameter = op._weight_parameters[0]
        self._options = op.begin_forward(ctx, parameter)
        self.dtype = ctx.dtype
        self.scales = extra_inputs[1] if op._scale_bias else None
        if self.scales is not None and self.scales.numel() != rows:
            raise ValueError(
                f"scales must have one entry for each of {rows} rows; got shape {tuple(self.scales.shape)}"
            )
        ctx.split_sizes = op._split_sizes(extra_inputs[0], rows)
        ctx.grad_input_buffer = kwargs.get(GRAD_INPUT_BUFFER_KEY)
        ctx.scales_require_grad = ctx.requires_grad and self.scales is not None and self.scales.requires_grad

        out_shape = (*shape[:-1], op.out_features)
        buffer = kwargs.get(OUTPUT_BUFFER_KEY)
        self.output = validate_or_alloc_output(buffer, out_shape, self.dtype, parameter.device)
        self._outputs = self.rows_of_groups(self.output)
        self.row_scales = None if self.scales is None else self.scales.reshape(-1).split(ctx.split_sizes)
        self._weights, self._biases = op.weights, op.biases
        self._saved_inputs: list[Any] = []
        self._saved_weights: list[Any] = []

    def group(self, i: int, x: torch.Tensor, *, keep_input: bool = True) -> torch.Tensor:
        """The output of group `i`, the next one. Without `keep_input`, backward will be given the input again."""
        y, bias, ctx = self._outputs[i], self._biases[i], self.ctx
        input_quantizer, weight_quantizer, _ = ctx.quantizers[i]
        try:
            _, saved_input, saved_weight = BasicLinear._functional_forward(
                x,
                self._weights[i],
                bias=None if self.op._scale_bias else bias,
                out=y,
                input_quantizer=input_quantizer,
                weight_quantizer=weight_quantizer,
                **self._options,
            )
        except (TypeError, ValueError) as error:
            say_who(error, f"group {i} of {ctx.split_sizes[i]} rows")
            raise
        if self.row_scales is not None:
            y += _for_sums(self.row_scales[i]).unsqueeze(1) * _for_sums(bias)
        self._saved_inputs.append(saved_input if keep_input else None)
        self._saved_weights.append(saved_weight)
        return y

    def finish(self) -> None:
        """Save what backward needs."""
        if self.ctx.requires_grad:
            biases = [] if self.scales is None else self._biases  # their gradient's other factor
            self.ctx.save_for_backward(self.scales, *self._saved_inputs, *self._saved_weights, *biases)


class GroupedBackward(_GroupedPass):
    """A backward pass: `quantize_grad`, then `multiply`, for each group; then `finish`.

    Attributes:
        grad_input: (..., in_features), written by `multiply`; None without `allocate`.
        inputs: what forward kept of the groups' inputs; a fusion puts in what it computes again.
    """

    def __init__(self, op: GroupedLinear, ctx: OperationContext) -> None:
        self.op, self.ctx = op, ctx
        scales, *saved = ctx.saved_tensors
        count = op.num_groups
        self.inputs, self._weights = saved[:count], saved[count : 2 * count]
        self._biases = op.biases if scales is None else saved[2 * count :]
        self._scales = scales
        self.row_scales = None if scales is None else scales.reshape(-1).split(ctx.split_sizes)
        self.grad_input: torch.Tensor | None = None
        self._grad_inputs: Sequence[torch.Tensor | None] = [None] * count
        self._operands: list[Any] = [None] * count
        self._grad_weights: list[torch.Tensor | None] = [None] * count
        self._grad_biases: list[torch.Tensor] = []
        self._grad_scales: list[torch.Tensor] = []
        self._delayed = op._delay_wgrad_compute and ctx.weight_requires_grad
        self._into_main_grad = op._accumulate_into_main_grad and ctx.weight_requires_grad
        self._destinations = op._main_grads() if self._into_main_grad else [{}] * count

    def allocate(self, shape: torch.Size, device: torch.device) -> None:
        """Make `grad_input`, for an output gradient of `shape`: the caller's buffer, if there is one."""
        dx_shape = (*shape[:-1], self.op.in_features)
        self.grad_input = validate_or_alloc_output(self.ctx.grad_input_buffer, dx_shape, self.ctx.dtype, device)
        self._grad_inputs = self.rows_of_groups(self.grad_input)

    def quantize_grad(self, i: int, dy: torch.Tensor) -> None:
        """Sum the output gradient of group `i`, the next one, and make the operand that products read from it."""
        ctx = self.ctx
        if self.op.has_bias:
            self._sum(_for_sums(dy), i)
        if ctx.with_quantized_compute:
            # Once for both products, even if the weight's gradient waits
            warn_of_hidden_overflow(dy, ctx.quantizers[i][2])
            dy = quantize_operand(dy, ctx.quantizers[i][2], rowwise=True, columnwise=ctx.weight_requires_grad)
        self._operands[i] = dy

    def _sum(self, dy: torch.Tensor, i: int) -> None:
        """Gradients of a bias and of its scales, summed in float32."""
        bias = self._biases[i]
        scaled = dy if self.row_scales is None else dy * _for_sums(self.row_scales[i]).unsqueeze(1)
        self._grad_biases.append(scaled.sum(0).to(bias.dtype))
        if self.ctx.scales_require_grad:
            self._grad_scales.append((dy * _for_sums(bias)).sum(1))

    def multiply(self, i: int) -> torch.Tensor:
        """The input gradient of group `i`; its weight gradient too, unless that waits for `backward_dw`."""
        wgrad = self.ctx.weight_requires_grad and not self._delayed
        wanted = {"weight_requires_grad": wgrad, "grad_input": self._grad_inputs[i]}
        if wgrad:
            wanted |= self._destinations[i]
        dx, self._grad_weights[i] = self.op._group_backward(
            self.ctx, i, self._operands[i], self.inputs[i], self._weights[i], **wanted
        )
        return dx

    def finish(self) -> tuple[list[torch.Tensor | None], tuple[torch.Tensor | None, ...]]:
        """Gradients of the parameters, in their order, and of the extra inputs."""
        op, ctx = self.op, self.ctx
        grad_weights = _as_of_parameters(self._grad_weights, op.single_grouped_weight)
        if self._delayed:
            waiting = self._operands, self.inputs, self._destinations
            settings = contextvars.copy_context()  # the backend and the products of this pass
            op._pending_wgrads.append(lambda: settings.run(op._delayed_wgrads, ctx, *waiting))
        if self._into_main_grad:
            grad_weights = get_dummy_wgrads_for_params(op._weight_parameters)
        grad_biases = _as_of_parameters(self._grad_biases, op.single_grouped_bias)
        # Those of all groups are the last parameters
        weights_last = op.single_grouped_weight and not op.single_grouped_bias
        grads = [*grad_biases, *grad_weights] if weights_last else [*grad_weights, *grad_biases]
        if not op._scale_bias:
            return grads, (None,)
        scales = self._scales
        has_grad = ctx.scales_require_grad
        return grads, (None, torch.cat(self._grad_scales).to(scales.dtype).view(scales.shape) if has_grad else None)


def _for_sums(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the dtype in which sums run: float32, or the float64 of `backend("float64")`."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


#: What the parameters of one kind have in common. Checked at every call: each can be changed at any time.
_ALIKE = {"dtype": "dtype", "device": "device", "requires_grad": "requires_grad", "type": "__class__"}
_get_alike = operator.attrgetter(*_ALIKE.values())


def _check_alike(kind: str, params: Sequence[torch.Tensor]) -> None:
    first = _get_alike(params[0])
    for i, param in enumerate(params):
        present = _get_alike(param)
        if present != first:
            name, expected, found = next(c for c in zip(_ALIKE, first, present, strict=True) if c[1] != c[2])
            raise RuntimeError(f"{kind}{i} has invalid {name} (expected {expected} as {kind}0, got {found})")


def _as_of_parameters(grads: list[Any], single: bool) -> list[Any]:
    """The groups' gradients as those of the parameters: stacked for a single parameter."""
    if not single or not grads:
        return grads
    return [None if grads[0] is None else torch.stack(grads)]


def _may_be_single(name: str, asked: bool) -> bool:
    """Whether all groups share one parameter: it was asked for, and TE's switch for it is on."""
    if asked and int(os.environ.get("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "0")) <= 0:
        warnings.warn(f"{name}=True is ignored: NVTE_GROUPED_LINEAR_SINGLE_PARAM is not set", UserWarning, stacklevel=3)
        return False
    return asked
