"""The fuser of a list of operations: it plans what runs, and splits the list into parts where operations have hooks.

`OperationFuser(ops)` is called like a function of the input. `register_*_fusion` adds a fusion for all fusers,
`fusions` for a scope. Behaviour: TE's ops/fuser.py, except: parameters are read at every call and operations are fused
again when anything changes that can change a fusion or a quantizer (`OperationFuser.maybe_fuse_ops`); hooks of
operations run; no mark stays on a caller's tensor; a second backward works with `retain_graph=True`; under a recipe
with `backward_override` no operation is asked for a quantized gradient (TE's activations emit one); memory that an
operation works on in place is copied first if it is that of another tensor that the caller gave; outputs in memory of
their own are no views, so the caller may change them in place.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_map

from fuser.aliasing import copy_of_gradient, overlap, own_copy, tensors_in, works_in_place, writable
from fuser.cards import Products, products_in_force, said_products, selected_products
from fuser.channels import ChanneledOperation, Routes, Slot, check_extra_inputs
from fuser.dispatch import one_backend
from fuser.fusible import FusibleOperation
from fuser.operators import Pipeline, call_in_graph
from fuser.pipeline import FuserFunction, forward_observers, run_forward
from fuser.quantization.quantizers import is_replaying
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.recipe import Format, MMParams, QParams, Recipe
from fuser.tracing import exporting, refuse_proxy, refuse_trace, rehearsing
from refops.scalings import SCALINGS

FusionFunction = Callable[..., list[FusibleOperation]]


def fusion_steps(
    functions: Iterable[FusionFunction], ops: list[FusibleOperation], recipe: Any
) -> Iterator[tuple[FusionFunction, list[FusibleOperation], list[FusibleOperation]]]:
    """Apply fusion functions in order; yields each function with the operations before and after it.

    `RuntimeError` for a function that returns anything but a list of operations.
    """
    for function in functions:
        before, ops = ops, function(ops, recipe=recipe)
        returned = ops if isinstance(ops, (list, tuple)) else [ops]
        wrong = [type(op).__name__ for op in returned if not isinstance(op, FusibleOperation)]
        if wrong or returned is not ops:
            name = getattr(function, "__name__", repr(function))
            got = f"{wrong[0]} in it" if returned is ops else type(ops).__name__
            raise RuntimeError(f"Expected fusion function {name} to return a list of operations, but got {got}")
        yield function, before, ops


def _fuse(functions: Iterable[FusionFunction], ops: list[FusibleOperation], recipe: Any) -> list[FusibleOperation]:
    fused = ops
    for _, _, after in fusion_steps(functions, ops, recipe):
        fused = after
    return fused


#: Immutable types, compared by value; a recipe with others is compared by its repr.
_IMMUTABLE = {bool, int, float, str, type, type(None), FunctionType, Format, MMParams, QParams, *SCALINGS}


@functools.cache
def _fields_of(kind: type[Any]) -> Callable[[Recipe], tuple[Any, ...]]:
    """The function that reads the class and all fields of a recipe."""
    return operator.attrgetter("__class__", *(field.name for field in dataclasses.fields(kind)))


def _settings_of(recipe: Recipe) -> Any:
    """A recipe's present settings, to compare with those at a later call."""
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


def _held_parameters(ops: Iterable[ChanneledOperation]) -> list[Any]:
    """The operations that have parameters, each with its parameters, to compare with those at another call."""
    held: list[Any] = []
    for op in ops:
        if op._modules:
            held += (op, *_parameters_of(op))
        elif op._parameters:
            held += (op, *op._parameters.values())
    return held


def _modules_with_tensors(ops: Iterable[ChanneledOperation]) -> list[torch.nn.Module]:
    """Operations, and their parts, that have a plain tensor as attribute."""
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


def _require_tensors(input_: Any, extra_inputs: Sequence[Any]) -> None:
    for name, given in (("input", [input_]), ("extra_inputs", extra_inputs)):
        for tensor in given:
            if not isinstance(tensor, torch.Tensor | QuantizedTensorStorage):
                raise TypeError(f"{name} must hold torch tensors; got {type(tensor).__name__}")


class OperationFuser:
    """Runs a list of operations, fused as the registered fusion functions decide.

    `ops`: basic or fused operations; fused ones are expanded to their basic operations and fused anew. Building a fuser
    locks the channels of its operations. Not a module: `fuser.ops.Sequential` is the module that uses it.

    Hooks: torch runs those of a module where the module is called. So the fuser calls an operation that has hooks, one
    of its `_hook_owners`, as a module, and the others in parts between (`_Part`, each with a fuser of its own). The
    called operation asks `run_alone` for its result, which takes the part's fuser from `_fuser_of_this_call`. Where a
    user calls an operation, `run_alone` makes that fuser. The operation is no hook owner of it, or its hooks would run
    again; of a fused one its basic operations are, and they are the fuser's `_ops`.
    """

    forward_backward_fusion_functions: list[FusionFunction] = []  # noqa: RUF012 (global registry, as in TE)
    forward_fusion_functions: list[FusionFunction] = []  # noqa: RUF012
    backward_fusion_functions: list[FusionFunction] = []  # noqa: RUF012

    def __init__(self, ops: Sequence[FusibleOperation]) -> None:
        self._build(ops)

    def _build(self, ops: Sequence[FusibleOperation]) -> None:
        basic_ops: list[Any] = []
        for op in ops:
            basic_ops.extend(op.basic_ops if op.is_fused_op else [op])
        self._setup(list(ops), basic_ops, Routes.of(basic_ops))
        for op in basic_ops:
            op._extra_tensor_channels_locked = True

    def _setup(self, ops: list[FusibleOperation], basic_ops: list[ChanneledOperation], routes: Routes) -> None:
        self._lock = threading.RLock()
        self._pipeline = Pipeline(self)
        self._ops = ops
        self._basic_ops = basic_ops
        self._num_basic_ops = len(basic_ops)
        self._start = 0  # where its operations begin in the pipeline that errors speak of: it may be a part
        self._routes = routes
        self.num_extra_inputs = len(routes.external_inputs)
        self._read_parameters()
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
        self._computed_alone = [op.computes_alone for op in basic_ops]
        unfused: list[tuple[FusibleOperation, list[int]]] = [(op, [i]) for i, op in enumerate(basic_ops)]
        self._forward_ops = unfused
        self._backward_ops = unfused
        self.first_op_requiring_backward = 0
        self._fuse_key: tuple[Any, ...] | None = None
        self._fused_params: list[torch.nn.Parameter] = []
        self._held: list[Any] | None = None  # what `_held_parameters` said when the operations were fused

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are fused anew: plans and keys refer to the original's operations."""
        return (type(self), (self._ops,))

    @property
    def _basic_op_extra_input_sources(self) -> list[list[Slot | None]]:
        """TE's name, which its users read."""
        return self._routes.input_sources

    # ------------------------------------------------------------------ running

    def __call__(
        self, input: torch.Tensor, *extra_inputs: Any, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> Any:
        """The output of the last operation, or `(output, *extra_outputs)`.

        `extra_inputs`: one for each extra input that no channel feeds, in order (`ValueError` otherwise).
        `basic_op_kwargs`: keyword arguments for each basic operation's forward.
        """
        if torch.compiler.is_dynamo_compiling():
            return call_in_graph(self, self._pipeline, self._basic_ops, input, extra_inputs, basic_op_kwargs)
        refuse_trace("operations")
        if torch._C._are_functorch_transforms_active():
            return self._transformed(input, extra_inputs, basic_op_kwargs)
        if self._members_of_fused:
            self.own_fuser()
        if len(extra_inputs) != self.num_extra_inputs:
            check_extra_inputs(self.wanted_extra_inputs(), extra_inputs)
        if type(input) is not torch.Tensor or extra_inputs:
            _require_tensors(input, extra_inputs)
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

    def _transformed(self, x: torch.Tensor, extra_inputs: Sequence[Any], basic_op_kwargs: Any) -> torch.Tensor:
        """A call on a tensor of torch.func's transforms (grad, vmap ...)."""
        if FP8GlobalStateManager.is_fp8_enabled():
            raise RuntimeError(
                "torch.func can't transform operations that quantize: those in a fuser.autocast, and layers that "
                "fuser.convert gave a recipe; fuser.convert(model, None) makes these torch's again"
            )
        if extra_inputs or any(basic_op_kwargs or ()):
            raise RuntimeError("torch.func can transform operations without extra inputs and keyword arguments")
        if self._hooked_ops():
            raise RuntimeError("torch.func can't transform operations with hooks")
        for op in self._basic_ops:
            x = op.transformed(x)
        return x

    def wanted_extra_inputs(self) -> list[tuple[ChanneledOperation, int]]:
        """The operations that take extra inputs from the caller, each with the slot, in order."""
        return [(self._basic_ops[i], slot) for i, slot in self._routes.external_inputs]

    def own_fuser(self) -> OperationFuser:
        """Itself, with the basic operations that its operations stand for now."""
        if self._members_of_fused and not self.is_current():
            self._build(self._ops)
        return self

    def is_current(self) -> bool:
        """Whether the fused operations given still stand for the basic operations that they did then."""
        for op, members in self._members_of_fused:
            if len(members) != len(op.basic_ops) or not all(map(operator.is_, members, op.basic_ops)):
                return False
        return True

    def _safe_in_place(
        self, input_: torch.Tensor, extra_inputs: Sequence[Any], basic_op_kwargs: list[dict[str, Any]]
    ) -> list[Any]:
        """The extra inputs; one that is changed in place is copied if its memory was also given as something else.

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
        # What was planned is on this object and its operations, and another thread may plan otherwise
        with self._lock, one_backend() as backend:
            computed_by = backend, selected_products.get()
            if computed_by != self._basic_ops[0]._computed_by:
                self._note_how(*computed_by)
            state = FP8GlobalStateManager.quantization_state
            recipe = state.fp8_recipe if state.fp8_enabled else None
            recording = torch.compiler.is_compiling() and exporting()
            if recording:  # before tensors without memory become scales or parameters
                self._check_recordable(recipe)
            is_grad_enabled = torch.is_grad_enabled() and not recording
            self.plan(is_grad_enabled, recipe, input_, extra_inputs)
            if not is_grad_enabled:
                result = run_forward(None, self, input_, (), extra_inputs, basic_op_kwargs)
                # An exported graph has no gradients: those of some operations are not autograd's
                return tree_map(torch.Tensor.detach, result) if recording else result
            if self._all_may_pass_through and not any(basic_op_kwargs) and not forward_observers:
                passed = self._passed_through(input_)
                if passed is not None:
                    return passed
            return FuserFunction.apply(input_, self, basic_op_kwargs, *self._fused_params, *extra_inputs)

    def _note_how(self, backend: str, products: Products | None) -> None:
        """Keep the backend and the scope of products of a call with its first operation.

        `RuntimeError` if autograd calls operations that would compute otherwise than in their last call.
        """
        op: Any = self._basic_ops[0]
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and op._computed_by is not None and not is_replaying() and not rehearsing():
            backend_then, scope_then = op._computed_by
            with products_in_force(scope_then):
                products_then = said_products()
            for what, then, now in (("backend", backend_then, backend), ("products", products_then, said_products())):
                if then != now:
                    raise RuntimeError(
                        f"{type(op).__name__} is computed again in the backward pass, with other {what} ({now}) than "
                        f"in its forward pass ({then}): use fuser.checkpoint instead of "
                        "torch.utils.checkpoint.checkpoint, with any use_reentrant"
                    )
        op._computed_by = backend, products

    def plan(self, is_grad_enabled: bool, recipe: Any, input_: torch.Tensor, extra_inputs: Sequence[Any]) -> None:
        """Prepare for `run_forward`: operations are fused, their quantizers know which copies to make."""
        self.maybe_fuse_ops(is_grad_enabled, recipe, input_, extra_inputs)
        first = self.first_op_requiring_backward
        for i, op in self._prepared:
            op.pre_fuser_forward(requires_grad=i >= first)

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

    # ------------------------------------------------------------------ whether the plan is current

    def maybe_fuse_ops(
        self, is_grad_enabled: bool, recipe: Any, input_: torch.Tensor, extra_inputs: Sequence[Any]
    ) -> None:
        """Fuse the operations and set up their quantizers if a change since the last call can make a difference.

        That is: the recipe's type and values and its process group, the input's device, the first operation that takes
        part in backward, the parameters (which objects, their dtype, device, requires_grad), training mode, the
        registered fusions, and the recipe state that another fuser left in a shared operation.
        """
        held, fused = _held_parameters(self._basic_ops), self._held
        same_parameters = fused is not None and len(held) == len(fused) and all(map(operator.is_, held, fused))
        if not same_parameters:
            self._held = None  # until all is done: a fusion may raise
        params = self._fused_params if same_parameters else self._read_parameters()
        first = self._find_first_op_requiring_backward(is_grad_enabled, input_, extra_inputs)
        self.first_op_requiring_backward = first
        is_current = same_parameters and self._fuse_key == self._current_key(recipe, first, input_.device, params)
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
        self._held = _held_parameters(self._basic_ops)
        self._fuse_key = self._current_key(recipe, first, input_.device, self._fused_params)

    def _read_parameters(self) -> list[torch.nn.Parameter]:
        """All parameters that the operations have now; `_basic_op_params` has those of each."""
        self._basic_op_params = list(map(_parameters_of, self._basic_ops))
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
        trained = (i for i, params in enumerate(self._basic_op_params) if any(param.requires_grad for param in params))
        given = zip(self._routes.external_inputs, extra_inputs, strict=True)
        fed = [i for (i, _), tensor in given if getattr(tensor, "requires_grad", False)]
        return min([next(trained, self._num_basic_ops), *fed])

    # ------------------------------------------------------------------ hooks

    def _hooked_ops(self) -> list[FusibleOperation]:
        """The operations whose hooks a call must run: those that have some, or all where torch has a global one."""
        if torch_module._has_any_global_hook():
            return self._hook_owners
        return [
            op
            for op in self._hook_owners
            if op._forward_hooks or op._forward_pre_hooks or op._backward_hooks or op._backward_pre_hooks
        ]

    def _run_in_parts(
        self,
        hooked: list[FusibleOperation],
        input_: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor],
        basic_op_kwargs: list[dict[str, Any]],
    ) -> Any:
        """Call operations that have hooks as modules, for torch to run the hooks, and fuse what lies between them.

        Data that crosses from one part to the next is in high precision.
        """
        tensors: dict[Slot, Any] = {}
        external = dict(zip(self._routes.external_inputs, extra_inputs, strict=True))
        x = input_
        for part in self._parts_around(hooked):
            part_inputs = []
            for i, slot in part.fuser._routes.external_inputs:
                index = part.start + i
                source = self._routes.input_sources[index][slot]
                outside = source is None
                part_inputs.append(
                    external[index, slot] if outside else writable(tensors[source], self._basic_ops[index])
                )
            kwargs = basic_op_kwargs[part.start : part.start + part.fuser._num_basic_ops]
            result = part.run(x, part_inputs, kwargs)
            public = part.fuser._routes.public_outputs
            if public:
                x, *outputs = result
                for (i, slot), y in zip(public, outputs, strict=True):
                    tensors[part.start + i, slot] = y
                    if y.requires_grad and works_in_place(self._basic_ops[part.start + i]):
                        y.register_hook(copy_of_gradient)  # its backward adds to a gradient that others may hold
            else:
                x = result
        outputs = [tensors[slot] for slot in self._routes.public_outputs]
        return (x, *outputs) if outputs else x

    def parts(self) -> list[OperationFuser]:
        """The fusers that a call uses: this one, or with hooks those of its parts."""
        hooked = self._hooked_ops()
        if hooked:
            return [sub_fuser for part in self._parts_around(hooked) for sub_fuser in part.fuser.parts()]
        return [self]

    def _parts_around(self, hooked: list[FusibleOperation]) -> list[_Part]:
        key = tuple(hooked)
        if key not in self._parts:
            self._parts[key] = self._make_parts(set(hooked))
        return self._parts[key]

    def _make_parts(self, hooked: set[FusibleOperation]) -> list[_Part]:
        parts: list[_Part] = []
        plain_start = start = 0

        def end_plain(stop: int) -> None:
            if stop > plain_start:
                parts.append(_Part(self._sub_fuser(self._basic_ops[plain_start:stop], plain_start), plain_start))

        for op in self._ops:
            members = list(op.basic_ops) if op.is_fused_op else [op]
            for callee in [op] if op in hooked else members:
                count = len(members) if callee is op else 1
                if callee in hooked:
                    end_plain(start)
                    sub_fuser = self._sub_fuser(self._basic_ops[start : start + count], start)
                    if callee is op and op.is_fused_op:
                        sub_fuser._hook_owners = members
                    parts.append(_Part(sub_fuser, start, callee))
                    plain_start = start + count
                start += count
        end_plain(start)
        return parts

    def _sub_fuser(self, basic_ops: list[ChanneledOperation], start: int) -> OperationFuser:
        fuser = OperationFuser.__new__(OperationFuser)
        fuser._setup(list(basic_ops), list(basic_ops), self._routes.part(start, start + len(basic_ops)))
        fuser._hook_owners = []
        fuser._start = start
        return fuser

    # ------------------------------------------------------------------ fusing

    def fuse_ops(self, recipe: Any) -> None:
        """Apply the registered fusions: joint ones first, then those of each pass on their result."""
        joint = _fuse(self.forward_backward_fusion_functions, list(self._basic_ops), recipe)
        forward = _fuse(self.forward_fusion_functions, list(joint), recipe)
        backward = _fuse(self.backward_fusion_functions, list(joint), recipe)
        self._forward_ops = self._map_to_basic_ops(forward)
        self._backward_ops = self._map_to_basic_ops(backward)

    def _map_to_basic_ops(self, ops: Sequence[FusibleOperation]) -> list[tuple[FusibleOperation, list[int]]]:
        """Each operation with the indices of its basic operations. `RuntimeError` unless all are there, in order."""
        mapped: list[tuple[FusibleOperation, list[int]]] = []
        basic_ops: list[FusibleOperation] = []
        for op in ops:
            members = list(op.basic_ops) if op.is_fused_op else [op]
            mapped.append((op, list(range(len(basic_ops), len(basic_ops) + len(members)))))
            basic_ops.extend(members)
        if len(basic_ops) != self._num_basic_ops or not all(map(operator.is_, basic_ops, self._basic_ops)):
            raise RuntimeError(
                "Found mismatch after fusing operations "
                f"(basic_ops={[op.__class__.__name__ for op in self._basic_ops]}, "
                f"fused_ops={[op.__class__.__name__ for op in ops]})"
            )
        return mapped


@dataclass
class _Part:
    """A stretch of operations that runs by itself; `callee`: the operation with hooks that it is, if it is one."""

    fuser: OperationFuser
    start: int
    callee: FusibleOperation | None = None

    def run(self, x: torch.Tensor, extra_inputs: list[Any], basic_op_kwargs: list[dict[str, Any]]) -> Any:
        if self.callee is None:
            return self.fuser._run(x, extra_inputs, basic_op_kwargs)
        outer = _called.set((self.callee, self.fuser))
        try:
            if self.callee.is_fused_op:
                return self.callee(x, *extra_inputs, basic_op_kwargs=basic_op_kwargs)
            return self.callee(x, *extra_inputs, **basic_op_kwargs[0])
        finally:
            _called.reset(outer)


#: The operation that a pipeline of this thread calls as a module, and its fuser. A hook may call the same one again.
_called: ContextVar[tuple[FusibleOperation, OperationFuser] | None] = ContextVar("fuser_called", default=None)


def run_alone(
    op: FusibleOperation,
    input_: torch.Tensor,
    extra_inputs: Sequence[Any],
    basic_op_kwargs: list[dict[str, Any]] | None,
) -> Any:
    """Forward of an operation called as a module: by a fuser of its own, or by that of the part that calls it."""
    refuse_proxy(input_, op)
    if torch.compiler.is_dynamo_compiling():
        basic_ops = op.__dict__["_modules"]["basic_ops"] if op.is_fused_op else [op]  # not by the aliases of Linear
        return call_in_graph(
            functools.partial(_call_alone, op), op._pipeline, basic_ops, input_, extra_inputs, basic_op_kwargs
        )
    called = _called.get()
    fuser = called[1] if called is not None and called[0] is op else fuser_of(op)
    return fuser(input_, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


def _call_alone(op: FusibleOperation, input_: torch.Tensor, *extra_inputs: Any, basic_op_kwargs: Any) -> Any:
    return fuser_of(op)(input_, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


def fuser_of(op: FusibleOperation) -> OperationFuser:
    """The fuser of an operation that a user calls."""
    fuser = OperationFuser([op])
    fuser._ops = list(op.basic_ops) if op.is_fused_op else [op]
    fuser._hook_owners = fuser._ops if op.is_fused_op else []
    return fuser


# ---------------------------------------------------------------------- registering fusions


def _register(kind: str, func: FusionFunction, prepend: bool) -> FusionFunction:
    functions = getattr(OperationFuser, f"{kind}_fusion_functions")
    functions.insert(0 if prepend else len(functions), func)
    return func


def register_forward_backward_fusion(func: FusionFunction, prepend: bool = False) -> FusionFunction:
    """Register `func(ops, *, recipe) -> ops` for both passes; its fused operations run in both. Returns `func`."""
    return _register("forward_backward", func, prepend)


def register_forward_fusion(func: FusionFunction, prepend: bool = False) -> FusionFunction:
    """Register `func(ops, *, recipe) -> ops` for forward (`prepend`: before all others). Returns `func`."""
    return _register("forward", func, prepend)


def register_backward_fusion(func: FusionFunction, prepend: bool = False) -> FusionFunction:
    """Register `func(ops, *, recipe) -> ops` for the backward pass of every fuser. Returns `func`."""
    return _register("backward", func, prepend)


class fusions:  # noqa: N801 (used like a function)
    """Fusions for a scope: `with fusions(forward=f): ...`, or `handle = fusions(...).register()`, `handle.remove()`.

    `forward`, `backward`, `forward_backward`: fusion functions (one or several). `prepend`: before those registered
    already.
    `only`: without those registered already. Fusers follow at their next call.
    """

    _in_force: list[fusions] = []  # noqa: RUF012 (in order of registration)

    def __init__(
        self,
        *,
        forward: FusionFunction | Iterable[FusionFunction] = (),
        backward: FusionFunction | Iterable[FusionFunction] = (),
        forward_backward: FusionFunction | Iterable[FusionFunction] = (),
        prepend: bool = False,
        only: bool = False,
    ) -> None:
        given = {"forward_backward": forward_backward, "forward": forward, "backward": backward}
        self._functions = {kind: [value] if callable(value) else list(value) for kind, value in given.items()}
        self._prepend = prepend
        self._only = only
        self._hidden: dict[str, list[FusionFunction]] = {}

    def register(self) -> fusions:
        """Put the fusions in force until `remove`. Returns self. `RuntimeError` if they are already."""
        if self in self._in_force:
            raise RuntimeError("These fusions are registered already")
        self._in_force.append(self)
        for kind, own in self._functions.items():
            functions = getattr(OperationFuser, f"{kind}_fusion_functions")
            if self._only:
                self._hidden[kind] = list(functions)
                functions.clear()
            position = 0 if self._prepend else len(functions)
            functions[position:position] = own
        return self

    def remove(self) -> None:
        """Remove the fusions (and restore those that `only` hid), in any order. A second call does nothing."""
        if self not in self._in_force:
            return
        number = self._in_force.index(self)
        hiding = [scope for scope in self._in_force[number + 1 :] if scope._only]  # the first has this one's functions
        del self._in_force[number]
        for kind, own in self._functions.items():
            functions = hiding[0]._hidden[kind] if hiding else getattr(OperationFuser, f"{kind}_fusion_functions")
            for function in own:
                # by identity, and the latest one: the same function may be registered outside this scope too
                position = max((i for i, other in enumerate(functions) if other is function), default=None)
                if position is not None:
                    del functions[position]
            functions[:0] = self._hidden.pop(kind, [])

    def __enter__(self) -> fusions:
        return self.register()

    def __exit__(self, *exc_info: Any) -> None:
        self.remove()
