"""Pipelines as operators of torch: in graphs of torch.compile each is one call, forward and backward.

    fuser::forward(input, parameters, extra_inputs, Pipeline, Call) -> outputs, saved, Saved
    fuser::backward(gradients, saved, Saved, sizes) -> gradients of what requires one
    fuser::update_scales(forward)                     (fuser.quantization.state)

They run what an eager call runs, `pipeline.run_forward` and `run_backward`, so bits are the same. What a graph sees:

- Tensors that backward needs are results of forward, or the arguments and outputs themselves: torch.compile plans,
  offloads and frees them, and autograd notices if one was overwritten. `Saved` has the rest: no tensor, one object for
  each call, that lives as long as the graph's own record of the call.
- `Call` says what was in force where the call was traced, the recipe above all. It is a constant of the graph, equal
  if its values are.
- `Pipeline` is the operations themselves, an argument. What their results' shapes depend on is guarded
  (`Pipeline.traits`).
- Operators have side effects: amaxes, random numbers, `main_grad`. Graphs keep all calls, in their order.

The shapes of results come from a rehearsal (`fuser.tracing`): the same operations, on tensors without elements.
Operators are functions of their tensors. So an output in the memory of an argument, or of another output, is a copy,
and what works in place works on a copy.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuser.aliasing import own_copy, works_in_place
from fuser.pipeline import as_in_forward, refuse_double_backward, run_backward, run_forward, without_torch_autocast
from fuser.quantization.state import DelayedScalingRequest, FP8GlobalStateManager
from fuser.quantization.storage import QUANTIZERS, BufferStorage, shallow_copy
from fuser.quantization.tensor import QuantizedTensor, WrapperTensor
from fuser.recipe import Recipe, constant_of_graph
from fuser.tracing import (
    OLD_TORCH,
    OpaqueBase,
    WhenTraced,
    define_operator,
    leave_for,
    outside_compile,
    refuse_strict_export,
    register_opaque,
    rehearsal,
    traces_checkpoint,
)
from refops.arguments import with_article

_SIMPLE = (bool, int, float, str, torch.dtype, torch.device)


class Pipeline(OpaqueBase):
    """The operations of a call, behind an object that graphs take as an argument.

    `owner`: what has this object, an `OperationFuser` or an operation that is called alone; `own_fuser()` of it is the
    `OperationFuser`. It is not kept alive: torch's caches hold this object for ever.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = None if owner is None else weakref.ref(owner)

    @property
    def fuser(self) -> Any:
        owner = None if self._owner is None else self._owner()
        if owner is None:
            raise RuntimeError("a graph of torch.compile has outlived its operations")
        return owner.own_fuser()

    def __reduce__(self) -> tuple[Any, ...]:
        """A constant, because compiled code in a cache does not depend on it. Operations make their own anew."""
        return Pipeline, (None,)

    def obstacle(self, recipe: Recipe | None, has_group: bool, has_kwargs: bool) -> str:
        """Why a graph can't have a call of these operations; "" if it can. Evaluated where a call is traced."""
        if has_kwargs:
            reason = "a graph has no keyword arguments of operations"
        elif recipe is not None and has_group:
            reason = "a graph has no amax_reduction_group"
        elif traces_checkpoint():
            reason = "torch.utils.checkpoint would have a graph call operators with side effects a second time"
        else:
            reason = self._obstacle(recipe)
        return leave_for(f"operations of fuser can't be part of a graph: {reason}" if reason else "")

    def _obstacle(self, recipe):
        fuser = self.fuser
        if fuser._hooked_ops():
            return "an operation has hooks, which torch runs where a module is called"
        for op in fuser._basic_ops:
            reason = op.graph_obstacle() or _obstacle_of_parameters(op) or _obstacle_of_recipe(op, recipe)
            if reason:
                return f"{type(op).__name__} {reason}"
        if recipe is not None and fuser._basic_ops[-1].returns_quantized:
            return "the last operation returns a quantized tensor, which torch.compile can't take apart"
        return ""

    def traits(self) -> list[Any]:
        """What, besides the tensors and the `Call`, determines the shapes of results and what backward needs."""
        fuser = self.fuser
        fusions = (
            fuser.forward_backward_fusion_functions,
            fuser.forward_fusion_functions,
            fuser.backward_fusion_functions,
        )
        return [_Traits((self._obstacle(None), *map(tuple, fusions), *map(_traits_of, fuser._basic_ops)))]


class Kept:
    """The fuser that an operation keeps for calls by itself; a copy of the operation starts without one."""

    def __init__(self) -> None:
        self.fuser: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()


class _Traits(tuple):
    """Immutable, and the same in a copy: fusions are compared by identity."""

    def __deepcopy__(self, memo: Any) -> _Traits:
        return self


def _obstacle_of_parameters(op):
    for parameter in op.parameters():
        if parameter.is_meta:
            return "makes its deferred parameters at the first call: call the model once before"
        if isinstance(parameter, WrapperTensor):
            return "has a quantized parameter, a tensor that torch.compile can't take apart"
        if type(parameter) is not torch.nn.Parameter:
            return f"has a parameter of type {type(parameter).__name__}"
    if any(module._parameters for module in op.modules() if module is not op):
        return "has parameters in a module inside it"
    return ""


def _obstacle_of_recipe(op, recipe):
    """Quantizers from outside this package can't be rehearsed."""
    if recipe is None or not recipe.custom():
        return ""
    roles = [role for mode in ("forward", "backward") for role in op.get_quantizer_roles(mode) or ()]
    kinds = {type(recipe.qfactory(role)) for role in roles} - {*QUANTIZERS.values(), DelayedScalingRequest}
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    return f"has quantizers of other classes than fuser's, {names}, whose shapes only a call tells" if names else ""


def _traits_of(op: Any) -> tuple[Any, ...]:
    settings = [(name, value) for name, value in op.__dict__.items() if _is_plain(value)]
    gradients = [name for name, parameter in op.named_parameters() if takes_gradient(op, parameter)]
    return type(op), op.training, settings, gradients


def _is_plain(value):
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _SIMPLE)


def takes_gradient(op: Any, parameter: torch.nn.Parameter) -> bool:
    """Whether autograd gets a gradient for a parameter of `op`: not if its gradient goes to `main_grad` alone."""
    if not parameter.requires_grad:
        return False
    into_main_grad = getattr(op, "_accumulate_into_main_grad", False) and parameter is getattr(op, "weight", None)
    return not into_main_grad or hasattr(parameter, "grad_added_to_main_grad")


@dataclass(frozen=True)
class Call:
    """What is in force at a call, apart from the tensors.

    Attributes:
        recipe: None without quantization.
        is_first: whether it is the first call since the outermost `autocast` was entered.
        capturing: whether a CUDA graph is being captured.
        autocast: the dtype of `torch.autocast`, or None.
        grad: whether gradients are recorded.
        require: which of the input, the parameters and the extra inputs require a gradient.
    """

    recipe: Recipe | None
    is_first: bool
    capturing: bool
    autocast: torch.dtype | None
    grad: bool
    require: tuple[bool, ...]

    def __post_init__(self) -> None:
        if self.recipe is not None:
            self.recipe.hold_values()

    def __hash__(self) -> int:
        return hash((self.recipe and self.recipe.fingerprint(), self.is_first, self.autocast, self.grad, self.require))

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return constant_of_graph(self)

    @contextlib.contextmanager
    def in_force(self, device_type: str) -> Iterator[None]:
        """Put in force, in this thread, what was in force then."""
        before = FP8GlobalStateManager.get_autocast_state()
        enabled = self.recipe is not None
        FP8GlobalStateManager.set_autocast_state((enabled, False, self.recipe, None, self.is_first, self.capturing))
        try:
            with torch.no_grad(), torch.autocast(device_type, dtype=self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            FP8GlobalStateManager.set_autocast_state(before)


class Saved(OpaqueBase):
    """What backward needs from a forward call besides tensors.

    `run_forward` sets its attributes, as on an autograd context.
    """

    tensor_objects: Any = None
    gradients: Any = ()
    saved_tensors: Any = ()

    def __init__(self) -> None:
        self._to_save: tuple[Any, ...] = ()
        self._frozen: tuple[torch.Tensor, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """A constant, because compiled code in a cache does not depend on it."""
        return Saved, ()

    def save_for_backward(self, *tensors: Any) -> None:
        self._to_save = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self._frozen = tensors

    def sort(self, given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Note where each tensor to save is: among `given`, `outputs`, or those returned here. Keeps none."""
        self.frozen = [i for i, y in enumerate(outputs) if any(y is one for one in self._frozen)]
        known = [*given, *outputs]
        self.returned: list[torch.Tensor] = []
        self.places = [self._place_of(tensor, known) for tensor in self._to_save]
        self.kept = sorted({i for i in self._indices(self.places) if i < len(known)})
        returned, self.returned = self.returned, []
        self.known = len(known)
        self.formats = [_format_of(tensor) for tensor in (*(known[i] for i in self.kept), *returned)]
        self._to_save = self._frozen = ()
        return returned

    def _place_of(self, tensor, known):
        if tensor is None:
            return None
        if isinstance(tensor, QuantizedTensor):
            names, rest = BufferStorage.__tensor_flatten__(tensor)
            fields = {name: self._place_of(getattr(tensor, name), known) for name in names}
            return _QuantizedPlace(fields, rest, tuple(tensor.shape))
        for i, one in enumerate([*known, *self.returned]):
            if _same_elements(tensor, one):
                return i, tuple(tensor.shape)
        self.returned.append(own_copy(tensor) if _shares_memory(tensor, [*known, *self.returned]) else tensor)
        return len(known) + len(self.returned) - 1, tuple(tensor.shape)

    def _indices(self, places):
        for place in places:
            if isinstance(place, _QuantizedPlace):
                yield from self._indices(place.fields.values())
            elif place is not None:
                yield place[0]

    def without_operations(self) -> Saved:
        """What a trace needs from it: torch's caches keep that for ever."""
        bare = Saved()
        bare.kept, bare.frozen, bare.gradients = self.kept, self.frozen, self.gradients
        return bare

    def restored(self, tensors: Sequence[torch.Tensor]) -> Saved:
        """A copy whose `saved_tensors` are those of forward, from the kept and the returned tensors."""
        if [_format_of(tensor) for tensor in tensors] != self.formats:
            raise RuntimeError(
                "what a graph of torch.compile keeps for backward is not what the call kept: a setting of an operation "
                "has changed that compiled code does not look at. Call torch.compiler.reset()"
            )
        where = dict(zip(self.kept, tensors, strict=False))
        where |= {self.known + i: tensor for i, tensor in enumerate(tensors[len(self.kept) :])}
        full = shallow_copy(self)
        full.saved_tensors = [_tensor_at(place, where) for place in self.places]
        return full


def _format_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


@dataclass
class _QuantizedPlace:
    """Where the buffers of a quantized tensor are."""

    fields: dict[str, Any]
    rest: dict[str, Any]
    shape: tuple[int, ...]


def _tensor_at(place, where):
    if place is None:
        return None
    if isinstance(place, _QuantizedPlace):
        inner = {name: _tensor_at(of_field, where) for name, of_field in place.fields.items()}
        return BufferStorage.__tensor_unflatten__(inner, place.rest, place.shape, None)
    index, shape = place
    tensor = where[index]
    return tensor if tensor.shape == shape else tensor.view(shape)


def _shares_memory(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    memory = tensor.untyped_storage()._cdata
    return any(one.untyped_storage()._cdata == memory for one in others)


def _same_elements(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `tensor` is `other`, or a view of it in another shape."""
    if not _shares_memory(tensor, [other]) or tensor.dtype != other.dtype:
        return False
    if tensor.storage_offset() != other.storage_offset() or tensor.numel() != other.numel():
        return False
    if tensor.shape == other.shape:
        return tensor.stride() == other.stride()
    return tensor.is_contiguous() and other.is_contiguous()


# --- the operators --------------------------------------------------------------------------------


def _forward(
    input_: torch.Tensor,
    parameters: list[torch.Tensor],
    extra_inputs: list[torch.Tensor],
    pipeline: Pipeline,
    call: Call,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Saved]:
    fuser = pipeline.fuser
    with fuser._lock, call.in_force(input_.device.type):
        x, extra = _as_called(fuser, input_, parameters, extra_inputs, call)
        fuser.plan(call.grad, call.recipe, x, extra)
        _require_own(fuser, parameters)
        return _run(fuser, x, extra, [input_, *parameters, *extra_inputs], call, _taking_gradients(fuser))


def _rehearsed_forward(input_, parameters, extra_inputs, pipeline, call):
    fuser = _real(pipeline).fuser
    with fuser._lock, call.in_force(input_.device.type), rehearsal():
        x, extra = _as_called(fuser, input_, parameters, extra_inputs, call)
        with torch.utils._python_dispatch._disable_current_modes():
            fuser.plan(call.grad, call.recipe, x, extra)
        takes = _taking_gradients(fuser)
        with _parameters_replaced(fuser, parameters):
            *results, saved = _run(fuser, x, extra, [input_, *parameters, *extra_inputs], call, takes)
    return *results, saved.without_operations()


def _real(opaque):
    """The object behind its stand-in in a trace."""
    return getattr(opaque, "real_obj", opaque)


def _as_called(fuser, input_, parameters, extra_inputs, call):
    """The input and the extra inputs as the caller gave them: requiring a gradient, and free to work on in place."""
    of_extra = call.require[1 + len(parameters) :]
    extra = [tensor.detach().requires_grad_(grad) for tensor, grad in zip(extra_inputs, of_extra, strict=True)]
    for position, (i, _) in enumerate(fuser._routes.external_inputs):
        if works_in_place(fuser._basic_ops[i]):
            extra[position] = own_copy(extra[position]).requires_grad_(extra[position].requires_grad)
    return input_.detach().requires_grad_(call.require[0]), extra


def _require_own(fuser, parameters):
    """`RuntimeError` unless the tensors of a call are those that the operations read."""
    for own, given in zip(fuser._fused_params, parameters, strict=True):
        if own.data_ptr() != given.data_ptr():
            raise RuntimeError(
                f"a parameter of shape {tuple(own.shape)} was changed in the compiled function before an operation of "
                "fuser read it: torch.compile writes such changes at the end. Change it outside"
            )


@contextlib.contextmanager
def _parameters_replaced(fuser, tensors):
    """The operations with other tensors in place of their parameters."""
    own = [(op, name) for op in fuser._basic_ops for name, value in op._parameters.items() if value is not None]
    before = [op._parameters[name] for op, name in own]
    try:
        for (op, name), parameter, tensor in zip(own, before, tensors, strict=True):
            op._parameters[name] = torch.nn.Parameter(tensor.detach(), requires_grad=parameter.requires_grad)
        yield
    finally:
        for (op, name), parameter in zip(own, before, strict=True):
            op._parameters[name] = parameter


def _taking_gradients(fuser):
    """For each parameter, whether autograd gets its gradient."""
    owned = zip(fuser._basic_ops, fuser._basic_op_params, strict=True)
    return [takes_gradient(op, parameter) for op, parameters in owned for parameter in parameters]


def _run(fuser, input_, extra_inputs, given, call, takes):
    """Forward.

    `given`: the tensors of the call, which backward may be given again; `takes`: which parameters take a gradient.
    """
    saved = Saved()
    kwargs: list[dict[str, Any]] = [{}] * fuser._num_basic_ops
    result = run_forward(saved if call.grad else None, fuser, input_, (), extra_inputs, kwargs)
    outputs: list[torch.Tensor] = []
    results = result if isinstance(result, tuple) else (result,)
    for y in results:
        _require_plain_output(y)
        outputs.append(own_copy(y) if _shares_memory(y, [*given, *outputs]) else y.detach())
    saved._frozen = tuple(outputs[i] for i, y in enumerate(results) if any(y is one for one in saved._frozen))
    returned = saved.sort(given, outputs)
    takes = [True, *takes, *[True] * len(extra_inputs)]
    saved.gradients = _gradients_of(given, call, takes)
    return outputs, returned, saved


def _require_plain_output(y):
    if type(y) is not torch.Tensor and isinstance(y, WrapperTensor):
        raise RuntimeError(
            f"a pipeline in a graph of torch.compile must return plain tensors; got {with_article(type(y).__name__)}. "
            "Leave the quantization of its output out of the compiled function"
        )


def _gradients_of(given, call, takes):
    """(index among the tensors of the call, number of dimensions, dtype, device) of each that gets a gradient."""
    return [
        (i, tensor.dim(), tensor.dtype, tensor.device)
        for i, (tensor, required, taken) in enumerate(zip(given, call.require, takes, strict=True))
        if required and taken
    ]


def _setup_context(ctx, inputs, output):
    input_, parameters, extra_inputs, _, _ = inputs
    outputs, returned, saved = output
    known, real = [input_, *parameters, *extra_inputs, *outputs], _real(saved)
    ctx.save_for_backward(*(known[i] for i in real.kept), *returned)
    ctx.mark_non_differentiable(*(outputs[i] for i in real.frozen), *returned)
    ctx.saved = saved
    ctx.counts = len(parameters), len(extra_inputs)
    ctx.sizes = [size for i, *_ in real.gradients for size in known[i].shape]


def _autograd(ctx, grad_outputs, grad_returned, grad_saved):
    refuse_double_backward()
    gradients = torch.ops.fuser.backward(list(grad_outputs), list(ctx.saved_tensors), ctx.saved, ctx.sizes)
    num_parameters, num_extra = ctx.counts
    every: list[Any] = [None] * (1 + num_parameters + num_extra)
    for (i, *_), gradient in zip(_real(ctx.saved).gradients, gradients, strict=True):
        every[i] = gradient
    return every[0], every[1 : 1 + num_parameters], every[1 + num_parameters :], None, None


def _backward(grad_outputs, tensors, saved, sizes):
    first, *extra = grad_outputs
    routes, basic_ops = saved.routes, saved.basic_ops
    extra = [
        own_copy(grad) if works_in_place(basic_ops[i]) else grad
        for grad, (i, _) in zip(extra, routes.public_outputs, strict=True)
    ]
    with torch.no_grad(), without_torch_autocast(first.device.type), as_in_forward(saved):
        grad_input, grad_params, grad_extra = run_backward(saved.restored(tensors), first, extra)
    every, gradients = [grad_input, *grad_params, *grad_extra], []
    for (i, _, dtype, device), shape in zip(saved.gradients, _shapes(saved, sizes), strict=True):
        gradient = every[i]
        if gradient is None:
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        gradient = gradient.to(dtype).contiguous()
        shared = _shares_memory(gradient, [*grad_outputs, *tensors, *gradients])
        gradients.append(own_copy(gradient) if shared else gradient)
    return gradients


def _rehearsed_backward(grad_outputs, tensors, saved, sizes):
    saved = _real(saved)
    return [
        grad_outputs[0].new_empty(shape, dtype=dtype, device=device)
        for (_, _, dtype, device), shape in zip(saved.gradients, _shapes(saved, sizes), strict=True)
    ]


def _shapes(saved, sizes):
    sizes = iter(sizes)
    return [tuple(next(sizes) for _ in range(dims)) for _, dims, _, _ in saved.gradients]


register_opaque(Pipeline, "reference", guard=Pipeline.traits, constants=["obstacle"])
register_opaque(Saved, "reference")
register_opaque(Call, "value")
register_opaque(Recipe, "value")
define_operator(
    "forward",
    "(Tensor input, Tensor[] parameters, Tensor[] extra_inputs, {} pipeline, {} call) -> (Tensor[], Tensor[], {})",
    _forward,
    _rehearsed_forward,
    Pipeline,
    Call,
    Saved,
    autograd=(_autograd, _setup_context),
)
define_operator(
    "backward",
    "(Tensor[] grad_outputs, Tensor[] tensors, {} saved, SymInt[] sizes) -> Tensor[]",
    _backward,
    _rehearsed_backward,
    Saved,
)


# --- the way into a graph ---------------------------------------------------------------------------


_QUANTIZED_INPUT = WhenTraced(
    functools.partial(leave_for, "operations of fuser can't be part of a graph: an input is a quantized tensor")
)


def call_in_graph(
    eager: Callable[..., Any],
    pipeline: Pipeline,
    basic_ops: Sequence[Any],
    input_: torch.Tensor,
    extra_inputs: Sequence[torch.Tensor],
    basic_op_kwargs: Sequence[dict[str, Any]] | None,
) -> Any:
    """What `eager(input_, *extra_inputs)` returns, as one operator of a graph. torch.compile traces this function.

    Where a graph can't have the call, it stays outside of the compiled code.
    """
    refuse_strict_export()
    state = FP8GlobalStateManager._of_thread.state
    recipe = state.fp8_recipe if state.fp8_enabled else None
    has_kwargs = basic_op_kwargs is not None and any(basic_op_kwargs)
    reason = OLD_TORCH or pipeline.obstacle(recipe, state.fp8_distributed_group is not None, has_kwargs)
    if any([isinstance(tensor, WrapperTensor) for tensor in (input_, *extra_inputs)]):
        reason = _QUANTIZED_INPUT.value
    if reason:
        return outside_compile(eager, input_, *extra_inputs, basic_op_kwargs=basic_op_kwargs, reason=reason)
    parameters = [parameter for op in basic_ops for parameter in op._parameters.values() if parameter is not None]
    grad = torch.is_grad_enabled()
    require = tuple([grad and tensor.requires_grad for tensor in (input_, *parameters, *extra_inputs)])
    device = input_.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    is_first = any(require) and FP8GlobalStateManager.is_first_fp8_module()
    call = Call(recipe, is_first, state.fp8_graph_capturing, autocast, grad, require)
    outputs, _, _ = torch.ops.fuser.forward(input_, parameters, list(extra_inputs), pipeline, call)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
