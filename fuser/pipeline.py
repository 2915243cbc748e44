"""Runs a planned list of operations: forward and backward as one autograd node.

The plan is that of an `OperationFuser` (fuser.py), `fuser` in here. Nothing on the node is used up, so a retained graph
runs again; gradients can't be differentiated themselves. Behaviour: TE's ops/fuser.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from fuser.aliasing import (
    is_one_of,
    overlap,
    own_copy,
    requiring_grad,
    tensors_in,
    without_view,
    works_in_place,
    writable,
)
from fuser.cards import products_in_force, said_products
from fuser.channels import ChanneledOperation, Slot
from fuser.dispatch import current_backend, one_backend
from fuser.fusible import FusibleOperation, OperationContext
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.quantizers import is_replaying
from fuser.quantization.saving import prepare_for_saving, restore_from_saved
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.tracing import rehearsing
from refops.arguments import say_who

# Called as observer(fuser, step) after each step of a forward pass; `fuser.explain` listens here.
forward_observers: list[Callable[[Any, ForwardStep], None]] = []


@dataclass
class ForwardStep:
    """One operation of a forward pass as it ran, for observers. The contexts still hold their tensors in `to_save`."""

    op: FusibleOperation
    basic_op_indices: list[int]
    contexts: list[OperationContext]
    input: Any
    output: Any
    prev_op_grad_output_quantizer: Any
    next_op_input_quantizer: Any


#: Rows of the running pipeline's input before `pad` appended zeros; None if it appended none. Observers read it.
rows_before_padding: ContextVar[int | None] = ContextVar("fuser_rows_before_padding", default=None)


@contextlib.contextmanager
def padding(rows: int | None) -> Iterator[None]:
    """Within the block, pipelines have `rows` rows of their own."""
    token = rows_before_padding.set(rows)
    try:
        yield
    finally:
        rows_before_padding.reset(token)


# ---------------------------------------------------------------------- the passes


def _copy_shell(shell: Any) -> Any:
    """A storage object of the same kind, also without data."""
    copy = object.__new__(type(shell))
    copy.__dict__.update(shell.__dict__)
    return copy


class FuserFunction(torch.autograd.Function):
    """Forward and backward of all operations as one autograd node."""

    @staticmethod
    def forward(
        func_ctx: Any,
        input_: torch.Tensor,
        fuser: Any,
        basic_op_kwargs: list[dict[str, Any]],
        *params_and_extra_inputs: torch.Tensor,
    ) -> Any:
        extra_inputs = params_and_extra_inputs[len(params_and_extra_inputs) - fuser.num_extra_inputs :]
        return run_forward(func_ctx, fuser, input_, params_and_extra_inputs, extra_inputs, basic_op_kwargs)

    @staticmethod
    def backward(func_ctx: Any, grad_output: torch.Tensor, *grad_extra_outputs: torch.Tensor | None) -> Any:
        refuse_double_backward()
        with without_torch_autocast(grad_output.device.type), as_in_forward(func_ctx):
            grad_input, grad_params, grad_extra_inputs = run_backward(func_ctx, grad_output, grad_extra_outputs)
        return grad_input, None, None, *grad_params, *grad_extra_inputs


@contextlib.contextmanager
def as_in_forward(func_ctx: Any) -> Iterator[None]:
    """Restore backend and products of the forward pass: a GPU's autograd thread sees no context variables."""
    with one_backend(func_ctx.backend), products_in_force(func_ctx.products):
        yield


def refuse_double_backward() -> None:
    """Raise `RuntimeError` in a backward pass with create_graph=True.

    Not later, in a pass through the gradients: autograd would take constant ones for independent.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Double backward: fused operations have hand-written gradients, which can't be differentiated again; "
            "call backward() or torch.autograd.grad with create_graph=False"
        )


def without_torch_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Switch `torch.autocast` around `backward()` off: operations chose their dtypes in forward."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def run_forward(
    func_ctx: Any,
    fuser: Any,
    input_: torch.Tensor,
    unmarked: Sequence[torch.Tensor],
    extra_inputs: Sequence[torch.Tensor],
    basic_op_kwargs: list[dict[str, Any]],
) -> Any:
    """Run the operations in order. `func_ctx` is None without grad mode; `unmarked`: tensors that must stay so."""
    basic_ops, routes, alone = fuser._basic_ops, fuser._routes, fuser._computed_alone
    count = len(basic_ops)
    first_requiring_backward = fuser.first_op_requiring_backward
    contexts = [OperationContext(i >= first_requiring_backward) for i in range(count)]
    takes_extra_inputs = any(routes.input_sources)
    all_extra_inputs: Any = routes.place_external_inputs(extra_inputs) if takes_extra_inputs else [()] * count
    all_extra_outputs: list[Sequence[Any]] = [()] * count
    input_quantizers = [op.get_input_quantizer() for op in basic_ops]
    grad_quantizers = [op.get_grad_output_quantizer() for op in basic_ops]
    quantizes_gradients = fuser._quantizes_gradients

    x = input_
    for op, indices in fuser._forward_ops:
        first, stop = indices[0], indices[-1] + 1
        if takes_extra_inputs:
            for i in indices:
                for slot, source in enumerate(routes.input_sources[i]):
                    if source is not None and source[0] < first:
                        all_extra_inputs[i][slot] = writable(all_extra_outputs[source[0]][source[1]], basic_ops[i])
        quantizers = {
            "prev_op_grad_output_quantizer": grad_quantizers[first - 1] if first > 0 and quantizes_gradients else None,
            "next_op_input_quantizer": input_quantizers[stop] if stop < count else None,
        }
        step_input = x
        is_alone = alone[first] and op is basic_ops[first]
        try:
            if is_alone:
                x = op.op_forward(contexts[first], x, **quantizers, **basic_op_kwargs[first])
            else:
                result = op.fuser_forward(
                    contexts[first:stop],
                    x,
                    basic_op_extra_inputs=all_extra_inputs[first:stop],
                    basic_op_kwargs=basic_op_kwargs[first:stop],
                    **quantizers,
                )
        except Exception as error:
            _say_where(error, "forward", op, first + fuser._start)
            raise
        if not is_alone:
            _check_results(op, "fuser_forward", result, 2, _FORWARD_RESULTS)
            x, extra_outputs = result
        if not isinstance(x, _TENSORS):
            raise _wrong_output(op, "its output", x)
        if not is_alone:
            extra_outputs = _as_lists(op, "extra outputs", extra_outputs, len(indices), "extra outputs")
            _check_extra_outputs(fuser, op, indices, extra_outputs)
            for i, outputs in zip(indices, extra_outputs, strict=True):
                if func_ctx is not None and outputs and i >= first_requiring_backward:
                    outputs[:] = [requiring_grad(y, (input_, *unmarked)) for y in outputs]
                all_extra_outputs[i] = outputs
        for observer in forward_observers:
            if not rehearsing():
                observer(fuser, ForwardStep(op, indices, contexts[first:stop], step_input, x, **quantizers))
        if func_ctx is None:
            for context in contexts[first:stop]:
                context.to_save = None  # there is no backward to keep it for

    public = [all_extra_outputs[i][slot] for i, slot in routes.public_outputs]
    for y in (x, *public):
        if type(y) is torch.Tensor and y._is_view():
            given = [input_, *unmarked, *extra_inputs, *tensors_in(basic_op_kwargs)]
            x, *public = [without_view(one, given) for one in (x, *public)]
            break
    # Autograd needs an object of its own for each output.
    for i, tensor in enumerate(public):
        if is_one_of(tensor, (x, *public[:i])):
            public[i] = tensor.detach().requires_grad_(tensor.requires_grad)
    if func_ctx is not None:
        _save_for_backward(func_ctx, fuser, contexts, grad_quantizers)
        if public:
            sources = zip(routes.public_outputs, public, strict=True)
            func_ctx.mark_non_differentiable(*[y for (i, _), y in sources if i < first_requiring_backward])
    return (x, *public) if public else x


def _say_where(error: Exception, direction: str, op: FusibleOperation, first: int) -> None:
    """Begin an error's message with the operation in which it arose; add a note if the message is not plain text."""
    with contextlib.suppress(Exception):  # an operation's own __repr__ may fail; the error is what matters
        members = op.basic_ops if op.is_fused_op else [op]
        listed = ", ".join(f"{i} {_shown_op(member)}" for i, member in enumerate(members, first))
        fusion = f"{type(op).__name__} of " if op.is_fused_op else ""
        who = f"In {direction}, {fusion}operation {listed}"
        if [str(error)] == list(error.args):
            if not str(error).startswith(who):
                say_who(error, who)
        elif who not in getattr(error, "__notes__", ()):
            error.add_note(who)  # type: ignore[attr-defined]  # from Python 3.11 on


def _shown_op(op: Any) -> str:
    name = getattr(op, "name", None)
    return f"{type(op).__name__}({op.extra_repr()})" + (f" {name!r}" if isinstance(name, str) and name else "")


_TENSORS = (torch.Tensor, QuantizedTensorStorage)
_FORWARD_RESULTS = "(output, extra outputs of each basic operation)"
_BACKWARD_RESULTS = (
    "(input gradient, parameter gradients of each basic operation, extra input gradients of each basic operation)"
)


def _wrong_output(op: FusibleOperation, what: str, value: Any) -> RuntimeError:
    return RuntimeError(
        f"Expected {op.__class__.__name__} to return a tensor as {what}, but got {type(value).__name__}"
    )


def _check_results(op: FusibleOperation, method: str, result: Any, count: int, expected: str) -> None:
    """`RuntimeError` unless an operation's `method` returned `count` values, the tensor and lists of `expected`."""
    got = None
    if not isinstance(result, (tuple, list)):
        got = type(result).__name__
    elif len(result) != count:
        got = f"{len(result)} values"
    else:
        for lists in result[1:]:
            if not isinstance(lists, (tuple, list)):
                got = f"{type(lists).__name__} in place of a list"
    if got is not None:
        raise RuntimeError(f"Expected {op.__class__.__name__}.{method} to return {expected}, but got {got}")


def _as_lists(op: FusibleOperation, name: str, groups: Any, count: int, kind: str) -> list[list[Any]]:
    """A list for each of `count` basic operations. `RuntimeError` for another number, or what can't be a list.

    `name`: what errors call the groups, `kind`: what they call one of them.
    """
    who = op.__class__.__name__
    if len(groups) != count:
        raise RuntimeError(f"Expected {who} to generate {name} for {count} basic operations, but got {len(groups)}")
    for group in groups:
        if type(group) not in (tuple, list) and (isinstance(group, torch.Tensor) or not isinstance(group, Iterable)):
            raise RuntimeError(
                f"Expected {who} to return {kind} as a list for each basic operation, "
                f"but got {type(group).__name__} in place of a list"
            )
    return [list(group) for group in groups]


def _check_extra_outputs(fuser: Any, op: FusibleOperation, indices: list[int], extra_outputs: list[list[Any]]) -> None:
    name = op.__class__.__name__
    for i, outputs in zip(indices, extra_outputs, strict=True):
        expected = fuser._basic_ops[i].num_extra_outputs
        if len(outputs) != expected:
            raise RuntimeError(f"Expected op {i} to generate {expected} extra outputs, but got {len(outputs)}")
        for slot, output in enumerate(outputs):
            if isinstance(output, _TENSORS):
                continue
            if output is not None:
                raise _wrong_output(op, f"extra output {slot} of op {i}", output)
            if (i, slot) in fuser._routes.public_outputs:
                raise RuntimeError(f"Extra output {slot} of op {i} is public, but {name} returned None")
            if not set(fuser._routes.consumers((i, slot))).issubset(indices):
                raise RuntimeError(
                    f"Extra output {slot} of op {i} is required by an operation outside its forward fusion, "
                    f"but {name} returned None"
                )


def _save_for_backward(
    func_ctx: Any, fuser: Any, contexts: list[OperationContext], grad_quantizers: list[Quantizer | None]
) -> None:
    """Hand all operations' saved tensors to autograd as one flat list, and keep what else backward needs."""
    to_save: list[Any] = []
    for context in contexts:
        if context.to_save is not None:
            start = len(to_save)
            to_save += context.to_save
            context._saved_tensors_range = (start, len(to_save))
            context.to_save = None
    tensors, func_ctx.tensor_objects = prepare_for_saving(*to_save)
    func_ctx.save_for_backward(*tensors)

    needs_backward = fuser.first_op_requiring_backward < len(contexts)
    # Backward may run in another thread, where no settings are in force: what it needs is kept here.
    is_first_module = needs_backward and FP8GlobalStateManager.is_first_fp8_module()
    if is_first_module and _backward_has_begun():
        # torch's own reentrant checkpoint: the last block is computed again first, and others follow in this backward.
        torch.autograd.Variable._execution_engine.queue_callback(_update_scales_of_gradients)
        is_first_module = False
    func_ctx.is_first_module = is_first_module and not FP8GlobalStateManager.quantization_state.fp8_graph_capturing
    func_ctx.backward_ops = fuser._backward_ops
    func_ctx.basic_ops = fuser._basic_ops
    func_ctx.start = fuser._start
    func_ctx.routes = fuser._routes
    func_ctx.contexts = contexts
    func_ctx.backend = current_backend()
    func_ctx.products = said_products()
    func_ctx.own_rows = rows_before_padding.get()
    func_ctx.num_params = list(map(len, fuser._basic_op_params))
    func_ctx.quantizer_usages = _quantizer_usages(fuser._basic_ops, grad_quantizers)


def _backward_has_begun() -> bool:
    """Whether this forward is one of several that a backward pass computes again under the `autocast` around it."""
    in_backward = torch._C._current_graph_task_id() != -1 and not rehearsing()
    return in_backward and not FP8GlobalStateManager.quantization_state.entered_in_backward and not is_replaying()


def _quantizer_usages(
    basic_ops: Sequence[ChanneledOperation], grad_quantizers: list[Quantizer | None]
) -> list[tuple[Quantizer, dict[str, bool]]]:
    """The operations' quantizers and the copies that they were set to make after forward.

    Backward restores them: later calls of the same operations, e.g. on a validation batch, choose their own.
    `grad_quantizers`: what `get_grad_output_quantizer` says, perhaps no quantizers of the operation's recipe state.
    """
    quantizers = [quantizer for quantizer in grad_quantizers if quantizer is not None]
    for op in basic_ops:
        if op._quantizers:
            for of_mode in op._quantizers.values():
                quantizers.extend(of_mode)
    return [(quantizer, quantizer.get_usages()) for quantizer in quantizers if quantizer is not None]


def run_backward(
    func_ctx: Any, grad_output: torch.Tensor, grad_extra_outputs: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, list[Any], list[Any]]:
    """Run the operations' backward in reverse. Nothing on `func_ctx` is used up: a retained graph runs again."""
    for quantizer, usages in func_ctx.quantizer_usages:
        quantizer.set_usage(**usages)
    # The shells stay empty for the next backward; copies of them get the buffers, and go when this one is done.
    shells = [None if shell is None else _copy_shell(shell) for shell in func_ctx.tensor_objects]
    # Not within `padding`: under torch's checkpoint this computes forward passes of other pipelines again.
    saved = restore_from_saved(shells, list(func_ctx.saved_tensors))
    for context in func_ctx.contexts:
        context.saved_tensors = saved[slice(*(context._saved_tensors_range or (0, 0)))]
    del saved, shells
    with padding(func_ctx.own_rows):
        return _run_backward_ops(func_ctx, grad_output, grad_extra_outputs)


def _run_backward_ops(
    func_ctx: Any, grad_output: torch.Tensor, grad_extra_outputs: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, list[Any], list[Any]]:
    """`run_backward` with the saved tensors in the contexts of the operations."""
    basic_ops, contexts, routes = func_ctx.basic_ops, func_ctx.contexts, func_ctx.routes
    if len(grad_extra_outputs) != len(routes.public_outputs):
        raise ValueError(
            f"Expected grads for {len(routes.public_outputs)} extra tensor outputs, but got {len(grad_extra_outputs)}"
        )
    all_grad_outputs: list[list[Any]] = [[None] * op.num_extra_outputs for op in basic_ops]
    for position, ((i, slot), grad) in enumerate(zip(routes.public_outputs, grad_extra_outputs, strict=True)):
        if grad is not None and works_in_place(basic_ops[i]):
            # Operations behind may have returned any of these gradients as one of theirs.
            others = [grad_output, *grad_extra_outputs[:position], *grad_extra_outputs[position + 1 :]]
            grad = own_copy(grad) if overlap(grad, others) else grad
        all_grad_outputs[i][slot] = grad

    grad_params: list[Any] = [None] * len(basic_ops)
    grad_extra_inputs: list[Any] = [None] * len(basic_ops)
    channel_grads: dict[Slot, torch.Tensor] = {}
    dx: torch.Tensor | None = grad_output
    for op, indices in reversed(func_ctx.backward_ops):
        if not any(contexts[i].requires_grad for i in indices):
            dx = None
            break
        for i in indices:
            for slot in range(basic_ops[i].num_extra_outputs):
                grad = channel_grads.pop((i, slot), None)
                if grad is not None:
                    own = all_grad_outputs[i][slot]
                    all_grad_outputs[i][slot] = writable(grad, basic_ops[i]) if own is None else own + grad
        try:
            result = op.fuser_backward(
                [contexts[i] for i in indices], dx, basic_op_grad_extra_outputs=[all_grad_outputs[i] for i in indices]
            )
        except Exception as error:
            _say_where(error, "backward", op, indices[0] + func_ctx.start)
            raise
        _check_results(op, "fuser_backward", result, 3, _BACKWARD_RESULTS)
        dx, step_grad_params, step_grad_extra_inputs = result
        if not isinstance(dx, _TENSORS) and (
            dx is not None or any(context.requires_grad for context in contexts[: indices[0]])
        ):
            raise _wrong_output(op, "the gradient of its input", dx)
        count = len(indices)
        step_grad_params = _as_lists(op, "parameter gradients", step_grad_params, count, "gradients")
        step_grad_extra_inputs = _as_lists(op, "extra input gradients", step_grad_extra_inputs, count, "gradients")
        for i, grads, extra_grads in zip(indices, step_grad_params, step_grad_extra_inputs, strict=True):
            grad_params[i] = grads
            grad_extra_inputs[i] = extra_grads
            contexts[i].saved_tensors = None
            for source, grad in zip(routes.input_sources[i], extra_grads, strict=False):
                if source is not None and source[0] not in indices and grad is not None:
                    previous = channel_grads.get(source)
                    channel_grads[source] = grad if previous is None else previous + grad
    for context in contexts:
        context.saved_tensors = None

    grad_params = _padded(grad_params, func_ctx.num_params, "Expected op {} to generate {} param grads")
    counts = [op.num_extra_inputs for op in basic_ops]
    grad_extra_inputs = _padded(grad_extra_inputs, counts, "Expected op {} to generate grads for {} extra inputs")
    if func_ctx.is_first_module:
        _update_scales_of_gradients()
    of_caller = [grad_extra_inputs[i][slot] for i, slot in routes.external_inputs]
    return dx, list(itertools.chain.from_iterable(grad_params)), of_caller


def _update_scales_of_gradients() -> None:
    if not FP8GlobalStateManager.fp8_graph_capturing():
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


def _padded(grads: list[list[Any] | None], counts: list[int], complaint: str) -> list[list[Any]]:
    """All operations' gradients; those of operations that backward did not reach are None."""
    padded = [[None] * count if group is None else group for group, count in zip(grads, counts, strict=True)]
    for i, (group, count) in enumerate(zip(padded, counts, strict=True)):
        if len(group) != count:
            raise RuntimeError(f"{complaint.format(i, count)}, but got {len(group)}")
    return padded
