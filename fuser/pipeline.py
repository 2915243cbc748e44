"""Runs a list of operations: checks that the plan is current, then runs forward and backward as one autograd node.

What runs is decided by `OperationFuser` (fuser.py), which makes the plan. Nothing on the node is used up, so a retained
graph runs again; gradients can't be differentiated themselves. Behaviour: TE's ops/fuser.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_map

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
from fuser.channels import ChanneledOperation, Routes, Slot, check_extra_inputs
from fuser.dispatch import backend, current_backend
from fuser.fusible import FusibleOperation, OperationContext
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.saving import prepare_for_saving, restore_from_saved
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.recipe import Format, MMParams, QParams, Recipe
from fuser.tracing import exporting, outside_compile, refuse_trace
from refops.arguments import say_who
from refops.scalings import SCALINGS

# Called as observer(pipeline, step) after each step of a forward pass; `fuser.explain` listens here.
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


#: Immutable types, compared by value; a recipe with others is compared by its repr.
_IMMUTABLE = {bool, int, float, str, type, type(None), FunctionType, Format, MMParams, QParams, *SCALINGS}


@functools.cache
def _fields_of(kind: type[Any]) -> Callable[[Recipe], tuple[Any, ...]]:
    """The function that reads the class and all fields of a recipe."""
    return operator.attrgetter("__class__", *(field.name for field in dataclasses.fields(kind)))


def _settings_of(recipe: Recipe) -> Any:
    """What a recipe says now, to compare with what one says at a later call."""
    values = _fields_of(type(recipe))(recipe)  # type: ignore[arg-type]
    return values if _IMMUTABLE.issuperset(map(type, values)) else (type(recipe), repr(recipe))


#: What decides, besides a parameter's identity, how an operation is fused.
_traits_of_parameter = operator.attrgetter("dtype", "device", "requires_grad")
#: The same of an operation: what it does, and what its quantizers follow.
_traits_of_operation = operator.attrgetter("training", "_recipe_key")


def _parameters_of(op: ChanneledOperation) -> list[torch.nn.Parameter]:
    """`list(op.parameters())`, without its cost for an operation that has no submodules."""
    if "parametrizations" in op._modules:
        raise RuntimeError(
            f"{op.__class__.__name__} has parametrized parameters (torch.nn.utils.parametrize): its backward "
            "gives gradients of its own parameters, not of those that they are computed from"
        )
    if op._modules or len(op._parameters) > 1:
        return list(op.parameters())
    return [param for param in op._parameters.values() if param is not None]


def _modules_with_tensors(ops: Iterable[ChanneledOperation]) -> list[torch.nn.Module]:
    """Those among operations and their parts that have a plain tensor as attribute."""
    modules = (module for op in ops for module in (op.modules() if op._modules else (op,)))
    return [module for module in modules if torch.Tensor in map(type, module.__dict__.values())]


def _reject_computed_parameters(op: torch.nn.Module) -> None:
    """`RuntimeError` for a tensor in an attribute that should get a gradient: an operation's backward knows parameters.

    torch.nn.utils.prune, spectral_norm and weight_norm put one in a parameter's place.
    """
    for name, value in op.__dict__.items():
        if type(value) is torch.Tensor and value.requires_grad and op._parameters.get(name) is not value:
            raise RuntimeError(
                f"{op.__class__.__name__}.{name} is a tensor that requires a gradient but no parameter (as "
                "torch.nn.utils.prune, spectral_norm and weight_norm make it): the operation's backward gives "
                "gradients of its own parameters, not of those that they are computed from"
            )


class Pipeline:
    """Operations in order, with a plan of what runs in forward and in backward.

    A subclass makes the plan: `_build` for other operations, `fuse_ops` for other circumstances, `_run_in_parts` around
    operations that have hooks.
    """

    # Functions that plan; a plan is current as long as they are the same.
    forward_backward_fusion_functions: list[Any]
    forward_fusion_functions: list[Any]
    backward_fusion_functions: list[Any]

    def _build(self, ops: Sequence[FusibleOperation]) -> None:
        """`_setup` for operations as they are given."""
        raise NotImplementedError

    def fuse_ops(self, recipe: Any) -> None:
        """Set `_forward_ops` and `_backward_ops`: what runs, each with the indices of its basic operations."""
        raise NotImplementedError

    def _run_in_parts(
        self,
        hooked: list[FusibleOperation],
        input_: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        basic_op_kwargs: list[dict[str, Any]],
    ) -> Any:
        """Run with the hooks of `hooked`."""
        raise NotImplementedError

    def _setup(self, ops: list[FusibleOperation], basic_ops: list[ChanneledOperation], routes: Routes) -> None:
        self._lock = threading.RLock()
        self._ops = ops
        self._basic_ops = basic_ops
        self._num_basic_ops = len(basic_ops)
        self._start = 0  # where its operations begin in the pipeline that errors speak of: it may be a part
        self._routes = routes
        self.num_extra_inputs = len(routes.external_inputs)
        self._read_parameters()
        # Modules whose hooks must run. An operation run alone is called by its own hooks, so it is taken off this list.
        self._hook_owners = list(dict.fromkeys([*ops, *basic_ops]))
        self._parts: dict[tuple[FusibleOperation, ...], list[Any]] = {}  # by the operations whose hooks run
        self._members_of_fused = [(op, list(op.basic_ops)) for op in ops if op.is_fused_op]
        self._with_tensors: list[torch.nn.Module] = []
        self._all_may_pass_through = all("passed_through" in vars(type(op)) for op in basic_ops)
        self._quantizes_gradients = True
        self._prepared = [
            (i, op)
            for i, op in enumerate(basic_ops)
            if getattr(op.pre_fuser_forward, "__func__", None) is not FusibleOperation.pre_fuser_forward
        ]
        unfused: list[tuple[FusibleOperation, list[int]]] = [(op, [i]) for i, op in enumerate(basic_ops)]
        self._forward_ops = unfused
        self._backward_ops = unfused
        self.first_op_requiring_backward = 0
        self._fuse_key: tuple[Any, ...] | None = None
        self._fused_params: list[torch.nn.Parameter] = []

    @property
    def _basic_op_extra_input_sources(self) -> list[list[Slot | None]]:
        return self._routes.input_sources

    @property
    def _basic_op_extra_output_consumers(self) -> list[list[list[int]]]:
        return self._routes.output_consumers

    @property
    def _external_extra_input_slots(self) -> list[Slot]:
        return self._routes.external_inputs

    @property
    def _public_extra_output_slots(self) -> list[Slot]:
        return self._routes.public_outputs

    # ------------------------------------------------------------------ running

    def __call__(
        self,
        input: torch.Tensor,
        *extra_inputs: Any,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """The output of the last operation, or `(output, *extra_outputs)`.

        `extra_inputs`: one for each extra input that no channel feeds, in order (`ValueError` otherwise).
        `basic_op_kwargs`: keyword arguments for each basic operation's forward.
        """
        if torch.compiler.is_compiling() and not exporting():
            return outside_compile(self, input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
        refuse_trace("operations")
        if self._members_of_fused and not self.is_current():
            self._build(self._ops)
        if len(extra_inputs) != self.num_extra_inputs:
            check_extra_inputs(self.wanted_extra_inputs(), extra_inputs)
        for name, given in (("input", (input,)), ("extra_inputs", extra_inputs)):
            for tensor in given:
                if not isinstance(tensor, torch.Tensor | QuantizedTensorStorage):
                    raise TypeError(f"{name} must hold torch tensors; got {type(tensor).__name__}")
        if basic_op_kwargs is None:
            basic_op_kwargs = [{}] * self._num_basic_ops
        elif len(basic_op_kwargs) != self._num_basic_ops:
            raise ValueError(
                f"basic_op_kwargs has {len(basic_op_kwargs)} dicts for {self._num_basic_ops} basic operations"
            )
        if extra_inputs:
            extra_inputs = tuple(self._safe_in_place(input, extra_inputs, basic_op_kwargs))
        hooked = self._hooked_ops()
        if hooked:
            return self._run_in_parts(hooked, input, extra_inputs, basic_op_kwargs)
        return self._run(input, extra_inputs, basic_op_kwargs)

    def wanted_extra_inputs(self) -> list[tuple[ChanneledOperation, int]]:
        """The operations that take extra inputs from the caller, each with the slot, in order."""
        return [(self._basic_ops[i], slot) for i, slot in self._routes.external_inputs]

    def is_current(self) -> bool:
        """Whether the fused operations given still stand for the basic operations that they did then."""
        for op, members in self._members_of_fused:
            if len(members) != len(op.basic_ops) or not all(map(operator.is_, members, op.basic_ops)):
                return False
        return True

    def _safe_in_place(
        self, input_: torch.Tensor, extra_inputs: Sequence[Any], basic_op_kwargs: list[dict[str, Any]]
    ) -> list[Any]:
        """The extra inputs; one that is worked on in place as a copy, if its memory was given as something else too.

        Operations read, or saved for backward, what would change: autograd notes versions only when all have run.
        """
        safe = list(extra_inputs)
        for position, (i, _) in enumerate(self._routes.external_inputs):
            if not works_in_place(self._basic_ops[i]):
                continue
            params = itertools.chain.from_iterable(map(_parameters_of, self._basic_ops))
            others = [*extra_inputs[:position], *extra_inputs[position + 1 :], *tensors_in(basic_op_kwargs), *params]
            if overlap(extra_inputs[position], [input_, *others]):
                safe[position] = own_copy(extra_inputs[position])
        return safe

    def _run(
        self, input_: torch.Tensor, extra_inputs: Sequence[torch.Tensor], basic_op_kwargs: list[dict[str, Any]]
    ) -> Any:
        with self._lock:  # what was planned is on this object and its operations, and another thread may plan otherwise
            return self._run_as_planned(input_, extra_inputs, basic_op_kwargs)

    def _run_as_planned(
        self, input_: torch.Tensor, extra_inputs: Sequence[torch.Tensor], basic_op_kwargs: list[dict[str, Any]]
    ) -> Any:
        state = FP8GlobalStateManager.quantization_state
        recipe = state.fp8_recipe if state.fp8_enabled else None
        recording = exporting()
        if recording:  # before tensors without memory become scales or parameters
            self._check_recordable(recipe)
        is_grad_enabled = torch.is_grad_enabled() and not recording
        self.maybe_fuse_ops(is_grad_enabled, recipe, input_, extra_inputs)
        first = self.first_op_requiring_backward
        for i, op in self._prepared:
            op.pre_fuser_forward(requires_grad=i >= first)
        if not is_grad_enabled:
            result = run_forward(None, self, input_, (), extra_inputs, basic_op_kwargs)
            # An exported graph has no gradients: those of some operations are not autograd's
            return tree_map(torch.Tensor.detach, result) if recording else result
        if self._all_may_pass_through and not any(basic_op_kwargs) and not forward_observers:
            passed = self._passed_through(input_)
            if passed is not None:
                return passed
        return FuserFunction.apply(input_, self, basic_op_kwargs, *self._fused_params, *extra_inputs)

    def _check_recordable(self, recipe: Any) -> None:
        """`RuntimeError` where torch.export can't record a call."""
        if recipe is not None:
            raise RuntimeError(
                f"torch.export can't record operations under a recipe, {type(recipe).__name__}: casts are kernels, not "
                "operators of torch. Export outside of fuser.autocast"
            )
        for op in self._basic_ops:
            if any(param.is_meta for param in _parameters_of(op)):
                raise RuntimeError(
                    f"torch.export would record the initialization of {type(op).__name__}, whose parameters are on the "
                    "meta device: call the model, or to_empty() and reset_parameters(), first"
                )

    def _passed_through(self, input_: torch.Tensor) -> torch.Tensor | None:
        """The output as a view of the input in autograd's eyes, if no operation does more; else None.

        Changing that in place works as with `torch.nn.Identity`. A node of our own could not offer it.
        """
        steps = [*self._forward_ops, *self._backward_ops]
        if type(input_) not in (torch.Tensor, torch.nn.Parameter) or any(op.is_fused_op for op, _ in steps):
            return None
        output: Any = input_.view_as(input_)
        for op in self._basic_ops:
            output = op.passed_through(output)
            if output is None:
                return None
        return output

    def _hooked_ops(self) -> list[FusibleOperation]:
        """The operations whose hooks a call must run: those that have some, or all where torch has a global one."""
        if torch_module._has_any_global_hook():
            return self._hook_owners
        return [
            op
            for op in self._hook_owners
            if op._forward_hooks or op._forward_pre_hooks or op._backward_hooks or op._backward_pre_hooks
        ]

    # ------------------------------------------------------------------ whether the plan is current

    def maybe_fuse_ops(
        self, is_grad_enabled: bool, recipe: Any, input_: torch.Tensor, extra_inputs: Sequence[Any]
    ) -> None:
        """Fuse the operations and set up their quantizers if a change since the last call can make a difference.

        That is: the recipe's type and values and its process group, the input's device, the first operation that takes
        part in backward, the parameters (which objects, their dtype, device, requires_grad), training mode, the
        registered fusions, and the recipe state that another fuser left in a shared operation.
        """
        params = self._read_parameters()
        first = self._find_first_op_requiring_backward(is_grad_enabled, input_, extra_inputs)
        self.first_op_requiring_backward = first
        is_current = (
            self._fuse_key is not None
            and self._fuse_key == self._current_key(recipe, first, input_.device, params)
            and len(params) == len(self._fused_params)
            and all(map(operator.is_, params, self._fused_params))
        )
        if not is_current:  # as where a parameter was replaced
            self._with_tensors = _modules_with_tensors(self._basic_ops)
        for module in self._with_tensors:
            _reject_computed_parameters(module)
        if is_current:
            return

        with torch.device(input_.device):  # where new scales and amax histories go
            for op in self._basic_ops:
                op.reset_recipe_state(recipe=recipe)
        if self._fuse_key is None:
            for op in self._basic_ops:
                op.pre_first_fuser_forward()
        self._quantizes_gradients = getattr(recipe, "backward_override", None) is None
        self.fuse_ops(recipe)

        self._fused_params = self._read_parameters()  # deferred parameters exist only now
        self._fuse_key = self._current_key(recipe, first, input_.device, self._fused_params)

    def _read_parameters(self) -> list[torch.nn.Parameter]:
        """All parameters that the operations have now; `_basic_op_params` has those of each."""
        self._basic_op_params = [_parameters_of(op) if op._parameters or op._modules else [] for op in self._basic_ops]
        return list(itertools.chain.from_iterable(self._basic_op_params))

    def _current_key(
        self, recipe: Any, first: int, device: torch.device, params: Sequence[torch.nn.Parameter]
    ) -> tuple[Any, ...]:
        return (
            first,
            device,
            None if recipe is None else _settings_of(recipe),
            None if recipe is None else FP8GlobalStateManager.quantization_state.fp8_distributed_group,
            list(map(_traits_of_operation, self._basic_ops)),
            list(map(_traits_of_parameter, params)),
            tuple(self.forward_backward_fusion_functions),
            tuple(self.forward_fusion_functions),
            tuple(self.backward_fusion_functions),
        )

    def _find_first_op_requiring_backward(
        self, is_grad_enabled: bool, input_: torch.Tensor, extra_inputs: Sequence[Any]
    ) -> int:
        if not is_grad_enabled:
            return self._num_basic_ops
        if input_.requires_grad:
            return 0
        first = self._num_basic_ops
        for i, params in enumerate(self._basic_op_params):
            if any(param.requires_grad for param in params):
                first = i
                break
        for (i, _), tensor in zip(self._routes.external_inputs, extra_inputs, strict=True):
            if i < first and getattr(tensor, "requires_grad", False):
                return i
        return first


# ---------------------------------------------------------------------- the passes


def _copy_shell(shell: Any) -> Any:
    """A storage object of the same kind, also without data."""
    copy = object.__new__(type(shell))
    copy.__dict__.update(shell.__dict__)
    return copy


class FuserFunction(torch.autograd.Function):
    """Forward and backward of a whole pipeline as one autograd node."""

    @staticmethod
    def forward(
        func_ctx: Any,
        input_: torch.Tensor,
        pipeline: Pipeline,
        basic_op_kwargs: list[dict[str, Any]],
        *params_and_extra_inputs: torch.Tensor,
    ) -> Any:
        extra_inputs = params_and_extra_inputs[len(params_and_extra_inputs) - pipeline.num_extra_inputs :]
        return run_forward(func_ctx, pipeline, input_, params_and_extra_inputs, extra_inputs, basic_op_kwargs)

    @staticmethod
    def backward(func_ctx: Any, grad_output: torch.Tensor, *grad_extra_outputs: torch.Tensor | None) -> Any:
        # The backend of the forward pass: a GPU's autograd thread sees no context variables.
        with torch.no_grad(), _without_torch_autocast(grad_output.device.type), backend(func_ctx.backend):
            grad_input, grad_params, grad_extra_inputs = run_backward(func_ctx, grad_output, grad_extra_outputs)
        grads = (grad_input, None, None, *grad_params, *grad_extra_inputs)
        return _only_once_differentiable(grads) if torch.is_grad_enabled() else grads


def _without_torch_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Operations chose their dtypes in forward; `torch.autocast` around `backward()` must not choose others."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


class _OnlyOnceDifferentiable(torch.autograd.Function):
    """The identity; an error in backward. torch's `once_differentiable` lets constant output gradients pass."""

    @staticmethod
    def forward(func_ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(func_ctx: Any, *grads: torch.Tensor) -> None:
        raise RuntimeError(
            "Double backward: fused operations have hand-written gradients, which can't be differentiated again"
        )


def _only_once_differentiable(grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a backward pass with `create_graph=True`: right values, an error if they are differentiated."""
    present = [grad for grad in grads if grad is not None]
    marked = iter(_OnlyOnceDifferentiable.apply(torch.empty(0, requires_grad=True), *present))
    return tuple(None if grad is None else next(marked) for grad in grads)


def run_forward(
    func_ctx: Any,
    pipeline: Pipeline,
    input_: torch.Tensor,
    unmarked: Sequence[torch.Tensor],
    extra_inputs: Sequence[torch.Tensor],
    basic_op_kwargs: list[dict[str, Any]],
) -> Any:
    """Run the operations in order. `func_ctx` is None without grad mode; `unmarked`: tensors that must stay so."""
    basic_ops, routes = pipeline._basic_ops, pipeline._routes
    first_requiring_backward = pipeline.first_op_requiring_backward
    contexts = [OperationContext(requires_grad=i >= first_requiring_backward) for i in range(len(basic_ops))]
    takes_extra_inputs = any(routes.input_sources)
    all_extra_inputs: Any = routes.place_external_inputs(extra_inputs) if takes_extra_inputs else [()] * len(basic_ops)
    all_extra_outputs: list[Sequence[Any]] = [()] * len(basic_ops)

    x = input_
    for op, indices in pipeline._forward_ops:
        first, last = indices[0], indices[-1]
        for i in indices:
            if routes.input_sources[i]:
                for slot, source in enumerate(routes.input_sources[i]):
                    if source is not None and source[0] < first:
                        all_extra_inputs[i][slot] = writable(all_extra_outputs[source[0]][source[1]], basic_ops[i])
        prev_quantizer = (
            basic_ops[first - 1].get_grad_output_quantizer() if first > 0 and pipeline._quantizes_gradients else None
        )
        next_quantizer = basic_ops[last + 1].get_input_quantizer() if last + 1 < len(basic_ops) else None
        step_input = x
        try:
            result = op.fuser_forward(
                contexts[first : last + 1],
                x,
                basic_op_extra_inputs=all_extra_inputs[first : last + 1],
                prev_op_grad_output_quantizer=prev_quantizer,
                next_op_input_quantizer=next_quantizer,
                basic_op_kwargs=basic_op_kwargs[first : last + 1],
            )
        except Exception as error:
            _say_where(error, "forward", op, indices[0] + pipeline._start)
            raise
        if type(result) is not tuple or len(result) != 2 or type(result[1]) is not list:
            _check_results(op, "fuser_forward", result, 2, _FORWARD_RESULTS)
        x, extra_outputs = result
        if not isinstance(x, _TENSORS):
            raise _wrong_output(op, "its output", x)
        if extra_outputs != _NO_EXTRA_OUTPUTS or first != last or routes.output_consumers[first]:
            extra_outputs = _as_lists(op, "extra outputs", extra_outputs)
            _check_extra_outputs(pipeline, op, indices, extra_outputs)
            for i, outputs in zip(indices, extra_outputs, strict=True):
                if func_ctx is not None and outputs and i >= first_requiring_backward:
                    outputs[:] = [requiring_grad(y, (input_, *unmarked)) for y in outputs]
                all_extra_outputs[i] = outputs
        for observer in forward_observers:
            step_contexts = [contexts[i] for i in indices]
            observer(pipeline, ForwardStep(op, indices, step_contexts, step_input, x, prev_quantizer, next_quantizer))
        if func_ctx is None:
            for i in indices:
                contexts[i].to_save = None  # there is no backward to keep it for

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
        _save_for_backward(func_ctx, pipeline, contexts)
        frozen = [y for (i, _), y in zip(routes.public_outputs, public, strict=True) if i < first_requiring_backward]
        func_ctx.mark_non_differentiable(*frozen)
    return (x, *public) if public else x


def _say_where(error: Exception, direction: str, op: FusibleOperation, first: int) -> None:
    """Begin an error's message with the operation in which it arose; one that is no plain text gets it as a note."""
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
_NO_EXTRA_OUTPUTS = [()]
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


def _as_lists(op: FusibleOperation, what: str, groups: Any) -> list[list[Any]]:
    """One list for each basic operation. `RuntimeError` for a group that can't be a list of tensors."""
    for group in groups:
        if type(group) not in (tuple, list) and (isinstance(group, torch.Tensor) or not isinstance(group, Iterable)):
            raise RuntimeError(
                f"Expected {op.__class__.__name__} to return {what} as a list for each basic operation, "
                f"but got {type(group).__name__} in place of a list"
            )
    return [list(group) for group in groups]


def _check_extra_outputs(
    pipeline: Pipeline, op: FusibleOperation, indices: list[int], extra_outputs: list[list[Any]]
) -> None:
    name = op.__class__.__name__
    if len(extra_outputs) != len(indices):
        raise RuntimeError(
            f"Expected {name} to generate extra outputs for {len(indices)} basic operations, "
            f"but got {len(extra_outputs)}"
        )
    for i, outputs in zip(indices, extra_outputs, strict=True):
        expected = pipeline._basic_ops[i].num_extra_outputs
        if len(outputs) != expected:
            raise RuntimeError(f"Expected op {i} to generate {expected} extra outputs, but got {len(outputs)}")
        for slot, output in enumerate(outputs):
            if isinstance(output, _TENSORS):
                continue
            if output is not None:
                raise _wrong_output(op, f"extra output {slot} of op {i}", output)
            if (i, slot) in pipeline._routes.public_outputs:
                raise RuntimeError(f"Extra output {slot} of op {i} is public, but {name} returned None")
            if any(consumer not in indices for consumer in pipeline._routes.output_consumers[i][slot]):
                raise RuntimeError(
                    f"Extra output {slot} of op {i} is required by an operation outside its forward fusion, "
                    f"but {name} returned None"
                )


def _save_for_backward(func_ctx: Any, pipeline: Pipeline, contexts: list[OperationContext]) -> None:
    """Hand all operations' saved tensors to autograd as one flat list, and keep what backward needs besides."""
    to_save: list[Any] = []
    for context in contexts:
        start = len(to_save)
        to_save.extend(context.to_save or ())
        context._saved_tensors_range = (start, len(to_save))
        context.to_save = None
    tensors, func_ctx.tensor_objects = prepare_for_saving(*to_save)
    func_ctx.save_for_backward(*tensors)

    needs_backward = pipeline.first_op_requiring_backward < len(contexts)
    # Backward may run in another thread, where no settings are in force: what it needs is kept here.
    is_first_module = needs_backward and FP8GlobalStateManager.is_first_fp8_module()
    func_ctx.is_first_module = is_first_module and not FP8GlobalStateManager.quantization_state.fp8_graph_capturing
    func_ctx.backward_ops = pipeline._backward_ops
    func_ctx.basic_ops = pipeline._basic_ops
    func_ctx.start = pipeline._start
    func_ctx.routes = pipeline._routes
    func_ctx.contexts = contexts
    func_ctx.backend = current_backend()
    func_ctx.num_params = [len(params) for params in pipeline._basic_op_params]
    func_ctx.quantizer_usages = _quantizer_usages(pipeline._basic_ops)


def _quantizer_usages(basic_ops: Sequence[ChanneledOperation]) -> list[tuple[Quantizer, dict[str, bool]]]:
    """The operations' quantizers and the copies that forward left them to make.

    Backward restores them: later calls of the same operations, e.g. on a validation batch, choose their own.
    """
    quantizers = [op.get_grad_output_quantizer() for op in basic_ops]  # of its own making, perhaps
    for op in basic_ops:
        if op._quantizers:
            for of_mode in op._quantizers.values():
                quantizers.extend(of_mode)
    return [(quantizer, quantizer.get_usages()) for quantizer in quantizers if quantizer is not None]


def run_backward(
    func_ctx: Any, grad_output: torch.Tensor, grad_extra_outputs: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, list[Any], list[Any]]:
    """Run the operations' backward in reverse. Nothing on `func_ctx` is used up: a retained graph runs again."""
    basic_ops, contexts, routes = func_ctx.basic_ops, func_ctx.contexts, func_ctx.routes
    for quantizer, usages in func_ctx.quantizer_usages:
        quantizer.set_usage(**usages)
    # The shells stay empty for the next backward; copies of them get the buffers, and go when this one is done.
    shells = [None if shell is None else _copy_shell(shell) for shell in func_ctx.tensor_objects]
    saved = restore_from_saved(shells, list(func_ctx.saved_tensors))
    for context in contexts:
        context.saved_tensors = saved[slice(*context._saved_tensors_range)]
    del saved, shells

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
                [contexts[i] for i in indices],
                dx,
                basic_op_grad_extra_outputs=[all_grad_outputs[i] for i in indices],
            )
        except Exception as error:
            _say_where(error, "backward", op, indices[0] + func_ctx.start)
            raise
        _check_results(op, "fuser_backward", result, 3, _BACKWARD_RESULTS)
        dx, *groups = result
        if not isinstance(dx, _TENSORS) and (
            dx is not None or any(context.requires_grad for context in contexts[: indices[0]])
        ):
            raise _wrong_output(op, "the gradient of its input", dx)
        for what, group in zip(("parameter gradients", "extra input gradients"), groups, strict=True):
            if len(group) != len(indices):
                raise RuntimeError(
                    f"Expected {op.__class__.__name__} to generate {what} for {len(indices)} basic operations, "
                    f"but got {len(group)}"
                )
        step_grad_params, step_grad_extra_inputs = (_as_lists(op, "gradients", group) for group in groups)
        for i, grads, extra_grads in zip(indices, step_grad_params, step_grad_extra_inputs, strict=True):
            grad_params[i] = grads
            grad_extra_inputs[i] = extra_grads
            contexts[i].saved_tensors = None
            for source, grad in zip(routes.input_sources[i], grad_extra_inputs[i], strict=False):
                if source is not None and source[0] not in indices and grad is not None:
                    previous = channel_grads.get(source)
                    channel_grads[source] = grad if previous is None else previous + grad
    for context in contexts:
        context.saved_tensors = None

    flat_grad_params = _flatten_grads(grad_params, func_ctx.num_params, "Expected op {} to generate {} param grads")
    counts = [op.num_extra_inputs for op in basic_ops]
    flat_grad_extra = _flatten_grads(grad_extra_inputs, counts, "Expected op {} to generate grads for {} extra inputs")
    is_external = [source is None for sources in routes.input_sources for source in sources]
    if func_ctx.is_first_module and not FP8GlobalStateManager.fp8_graph_capturing():
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
    return (
        dx,
        flat_grad_params,
        [grad for grad, external in zip(flat_grad_extra, is_external, strict=True) if external],
    )


def _flatten_grads(grads: list[list[Any] | None], counts: list[int], complaint: str) -> list[Any]:
    """One list of all operations' gradients; operations that backward did not reach contribute None."""
    flat: list[Any] = []
    for i, (op_grads, count) in enumerate(zip(grads, counts, strict=True)):
        if op_grads is None:
            op_grads = [None] * count
        if len(op_grads) != count:
            raise RuntimeError(f"{complaint.format(i, count)}, but got {len(op_grads)}")
        flat.extend(op_grads)
    return flat
