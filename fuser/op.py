"""The base classes of operations: what an operation is, and how one runs by itself.

`BasicOperation`: one step of a model with a hand-written backward, e.g. a bias. `FusedOperation`: several basic
operations computed at once. What a fuser knows of both is in `fuser.fusible` and `fuser.channels`. Behaviour: TE's
ops/op.py (names, errors, recipe state), except: extra state is tensors and JSON instead of a pickle, a recipe whose
values change rebuilds the quantizers without losing amax histories, running once without a recipe does not lose them
either, and an operation without parameters may return the bare gradient from `op_backward`.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fuser import extra_state
from fuser.channels import ChanneledOperation
from fuser.common import devices_match
from fuser.fuser import fuser_of, run_alone
from fuser.fusible import FusibleOperation, OperationContext
from fuser.operators import Kept, Pipeline
from fuser.quantization.contexts import autocast
from fuser.quantization.quantizers import is_replaying
from fuser.quantization.state import FP8GlobalStateManager, RecipeState
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.quantization.tensor import WrapperTensor
from refops.arguments import say_who

__all__ = ["BasicOperation", "ExtraTensorOperation", "FusedOperation", "FusibleOperation", "OperationContext"]

_BUFFER_POSITION = "buffer_index_and_autocast_key"
_META_KEYS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}


class _CalledAlone(FusibleOperation):
    """What calls an operation by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._called_alone()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._called_alone()

    def _called_alone(self) -> None:
        self._pipeline, self._kept = Pipeline(self), Kept()

    def own_fuser(self) -> Any:
        """The fuser of graphs in which this operation is called alone."""
        fuser, basic_ops = self._kept.fuser, self.basic_ops if self.is_fused_op else [self]
        if fuser is None or [*map(id, fuser._ops)] != [*map(id, basic_ops)]:
            fuser = self._kept.fuser = fuser_of(self)
        return fuser


class BasicOperation(_CalledAlone, ChanneledOperation, metaclass=abc.ABCMeta):
    """A single step with its own parameters, quantizers and backward.

    A subclass gives `op_forward` and `op_backward`; with extra inputs or outputs (`num_extra_inputs`,
    `num_extra_outputs`, set on the class or before `__init__`) it gives `fuser_forward` and `fuser_backward` instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fp8_metas: dict[str, dict[str, Any] | None] | None = None
        self._quantizers: dict[str, list[Any]] | None = None
        self._suspended_recipe_state: tuple[Any, Any] | None = None
        self._recipe_key: tuple[str, Any] | None = None  # what the quantizers follow; fusers compare it
        self._keeps_unseen_scales = False  # `keeps_unseen` of its `DelayedScalingRecipeState`s
        self._computed_by: tuple[str, Any] | None = None  # backend and scope of products of its last call
        self._dtypes_of_torch = False  # in torch.autocast, of a norm or activation that stands for torch's module

    # ------------------------------------------------------------------ quantizers and recipe state

    def num_quantizers(self, mode: str) -> int:
        """Number of quantizers in `mode` ("forward" or "backward")."""
        return 0

    def get_quantizer_roles(self, mode: str) -> list[Any] | None:
        """What each quantizer of `mode` quantizes, for recipes that tell tensors apart. None: by position."""
        return None

    def get_quantizer(self, mode: str, index: int) -> Any:
        """Quantizer `index` of `mode`, or None where no recipe is in force."""
        return None if self._quantizers is None else self._quantizers[mode][index]

    def get_input_quantizer(self) -> Any:
        return self.get_quantizer("forward", 0) if self._quantizers and self._quantizers["forward"] else None

    def get_grad_output_quantizer(self) -> Any:
        return self.get_quantizer("backward", 0) if self._quantizers and self._quantizers["backward"] else None

    def reset_recipe_state(self, *, recipe: Any) -> None:
        """Make the quantizers follow `recipe` (None: no quantizers).

        Amax histories survive a change of the recipe's values and calls without a recipe; another type of recipe starts
        anew.
        """
        if recipe is None:
            if self._fp8_metas is not None:
                _refuse_recomputing(self)
                self._suspended_recipe_state = (self._fp8_metas, self._quantizers)
            self._fp8_metas = self._quantizers = self._recipe_key = None
            return
        self._resume_recipe_state()
        self._recipe_key = None  # until all is done: a recipe's function may raise

        if self._fp8_metas is None or any(
            not isinstance(recipe, type(meta["recipe"])) for meta in self._fp8_metas.values() if meta
        ):
            made = {mode: self._made_recipe_state(mode, recipe) for mode in _META_KEYS}
            self._fp8_metas = {mode: meta for mode, (meta, _) in made.items()}
            self._quantizers = {mode: quantizers for mode, (_, quantizers) in made.items()}
        else:
            for mode in _META_KEYS:
                self._update_recipe_state(mode, recipe)
        self._recipe_key = (repr(recipe), FP8GlobalStateManager.get_fp8_group())

        if FP8GlobalStateManager.is_fp8_enabled() and not FP8GlobalStateManager.fp8_graph_capturing():
            for meta in self._fp8_metas.values():
                if meta:
                    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(meta, self._keeps_unseen_scales)

    def _resume_recipe_state(self) -> None:
        """Put back the state that a call without a recipe suspended."""
        if self._suspended_recipe_state is not None:
            self._fp8_metas, self._quantizers = self._suspended_recipe_state
            self._suspended_recipe_state = None

    def _made_recipe_state(self, mode: str, recipe: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """New state of `mode`, and its quantizers."""
        count = self.num_quantizers(mode)
        if count == 0:
            return None, []
        roles = self._checked_roles(mode, count)
        state = RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles)
        meta = {
            _META_KEYS[mode]: state,
            "recipe": recipe,
            "recipe_values": repr(recipe),
            "fp8_group": FP8GlobalStateManager.get_fp8_group(),
        }
        return meta, state.make_quantizers()

    def _checked_roles(self, mode: str, count: int) -> list[Any] | None:
        roles = self.get_quantizer_roles(mode)
        if roles is not None and len(roles) != count:
            raise AssertionError(
                f"{self.__class__.__name__} has {count} quantizers in mode {mode!r}, but {len(roles)} quantizer roles"
            )
        return roles

    def _update_recipe_state(self, mode: str, recipe: Any) -> None:
        """Follow a recipe of the same type: if values differ, make new quantizers on the old amax history."""
        meta = self._fp8_metas[mode]
        if not meta:
            return
        meta["recipe"] = recipe
        meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
        values = repr(recipe)
        state = meta[_META_KEYS[mode]]
        if values == meta["recipe_values"] and devices_match(state.device, torch.get_default_device()):
            return
        count = self.num_quantizers(mode)
        if count != state.num_quantizers:
            self._fp8_metas[mode], self._quantizers[mode] = self._made_recipe_state(mode, recipe)
            return
        # The same state: gradients of earlier forward passes may still be on their way to its history.
        state.follow(recipe, device=torch.get_default_device())
        state.roles = self._checked_roles(mode, count)
        self._quantizers[mode] = state.make_quantizers()
        meta["recipe_values"] = values

    def __getstate__(self) -> dict[str, Any]:
        """For copies: their amax histories are their own, so they are not registered for amax reduction yet."""
        state = dict(self.__dict__)
        state["_parameters"] = {  # what a converted module computed for a call can't be copied
            name: value if value is None or value.is_leaf else torch.empty_like(value, device="meta")
            for name, value in self._parameters.items()
        }
        state["_recipe_key"] = None  # makes the next fuser call register them
        if self._fp8_metas is not None:
            state["_fp8_metas"] = {mode: _unregistered(meta) for mode, meta in self._fp8_metas.items()}
        if self._suspended_recipe_state is not None:
            metas, quantizers = self._suspended_recipe_state
            state["_suspended_recipe_state"] = ({mode: _unregistered(meta) for mode, meta in metas.items()}, quantizers)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weights = [parameter for parameter in self.parameters() if isinstance(parameter, WrapperTensor)]
        of_weights = [quantizer for weight in weights for quantizer in weight.held_quantizers()]
        for metas, quantizers in ((self._fp8_metas, self._quantizers), self._suspended_recipe_state or (None, None)):
            for mode, meta in (metas or {}).items():
                if meta:
                    meta[_META_KEYS[mode]].reconnect(quantizers[mode], of_weights)

    # ------------------------------------------------------------------ compute

    def pre_first_fuser_forward(self) -> None:
        """Initialize parameters that are on the meta device, by the operation's `reset_parameters`."""
        reset_parameters = getattr(self, "reset_parameters", None)
        if reset_parameters is not None and any(param.device.type == "meta" for param in self.parameters()):
            reset_parameters()

    @abc.abstractmethod
    def op_forward(
        self, ctx: OperationContext, input_: Any, *, prev_op_grad_output_quantizer: Any, next_op_input_quantizer: Any
    ) -> Any:
        """The output for `input_`. Tensors for backward go to `ctx.save_for_backward`, the rest on `ctx` itself."""

    @abc.abstractmethod
    def op_backward(self, ctx: OperationContext, grad_output: Any) -> Any:
        """`(input gradient, parameter gradients)`, one for each of `self.parameters()` in order (None allowed).

        An operation without parameters may return the bare input gradient.
        """

    @property
    def computes_alone(self) -> bool:
        is_own = getattr(self.fuser_forward, "__func__", None) is not BasicOperation.fuser_forward
        return not (is_own or self.num_extra_inputs or self.num_extra_outputs)

    def fuser_forward(
        self, basic_op_ctxs: Any, input_: Any, *, basic_op_extra_inputs: Any, basic_op_kwargs: Any, **quantizers: Any
    ) -> Any:
        self._check_no_extra_tensors("fuser_forward")
        return self.op_forward(basic_op_ctxs[0], input_, **quantizers, **basic_op_kwargs[0]), [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, *, basic_op_grad_extra_outputs: Any) -> Any:
        self._check_no_extra_tensors("fuser_backward")
        grads = self.op_backward(basic_op_ctxs[0], grad_output)
        is_bare = grads is None or isinstance(grads, torch.Tensor | QuantizedTensorStorage)
        grad_input, grad_params = (grads, ()) if is_bare else grads
        return grad_input, [grad_params], [()]

    def _check_no_extra_tensors(self, method: str) -> None:
        if self.num_extra_inputs > 0 or self.num_extra_outputs > 0:
            raise RuntimeError(
                f"{self.__class__.__name__} operation has {self.num_extra_inputs} extra tensor inputs and "
                f"{self.num_extra_outputs} extra tensor outputs. It should override `{method}` "
                f"instead of `op_{method.removeprefix('fuser_')}`."
            )

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        """Run this operation by itself. Returns the output, or `(output, *extra_outputs)`."""
        return run_alone(self, input, extra_inputs, [kwargs])

    # ------------------------------------------------------------------ checkpoints

    def _kept_fp8_metas(self) -> dict[str, dict[str, Any] | None]:
        """The recipe states, also those that a call without a recipe suspended."""
        return self._suspended_recipe_state[0] if self._suspended_recipe_state is not None else self._fp8_metas or {}

    def _has_first_scales(self) -> bool:
        """Whether no update has set forward scales of delayed scaling: they are 1, and its amax history is empty."""
        meta = self._kept_fp8_metas().get("forward")
        state = meta[_META_KEYS["forward"]].delayed_state if meta else None
        return state is None or state.has_first_scales()

    def delayed_recipe(self) -> Any:
        """The recipe whose delayed scales an update has set in forward; None if there are no such scales."""
        return None if self._has_first_scales() else self._kept_fp8_metas()["forward"]["recipe"]

    def get_extra_state(self) -> torch.Tensor:
        """The delayed-scaling state as a 1-D uint8 CPU tensor (see `fuser.extra_state`), else an empty one."""
        header, tensors = {}, {}
        for mode, meta in self._kept_fp8_metas().items():
            state_tensors = _delayed_tensors(meta, mode) if meta else {}
            if state_tensors:
                header[mode] = {"recipe": extra_state.recipe_to_json(meta["recipe"])}
                tensors.update({f"{mode}.{name}": tensor for name, tensor in state_tensors.items()})
        return extra_state.pack(header, tensors) if tensors else torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Restore what `get_extra_state` returned. An empty state does nothing; a pickle with scales raises."""
        unpacked = extra_state.unpack(state)
        if unpacked is None:
            return
        header, tensors = unpacked
        for mode, entry in header.items():
            if mode not in _META_KEYS:
                raise RuntimeError(f"{self.__class__.__name__}: saved state is of mode {mode!r}")
            if self.num_quantizers(mode) == 0:
                continue
            self._ensure_recipe_state(mode, entry.get("recipe") if isinstance(entry, Mapping) else None)
            current = _delayed_tensors(self._fp8_metas[mode], mode)
            copies = []
            for name, tensor in current.items():
                saved = tensors.get(f"{mode}.{name}")
                if saved is None or saved.shape != tensor.shape:
                    found = "is missing" if saved is None else f"has shape {tuple(saved.shape)}"
                    raise RuntimeError(
                        f"{self.__class__.__name__}: saved {mode} {name} {found}, "
                        f"the operation needs {tuple(tensor.shape)}"
                    )
                copies.append((tensor, saved))
            with torch.no_grad():
                for tensor, saved in copies:
                    tensor.copy_(saved)

    def _ensure_recipe_state(self, mode: str, saved_recipe: Any) -> None:
        """Make the state of `mode` follow a recipe in JSON; one that does stays: its quantizers may be in use."""
        self._resume_recipe_state()
        meta = (self._fp8_metas or {}).get(mode)
        present = meta["recipe"] if meta else None
        is_followed = meta and present.delayed() and meta["recipe_values"] == repr(present)
        if is_followed and extra_state.recipe_to_json(present) == saved_recipe:
            return
        recipe = extra_state.recipe_from_json(saved_recipe, present)
        if meta and meta["recipe_values"] == repr(recipe):
            return
        with torch.no_grad(), autocast(enabled=True, recipe=recipe):
            self.reset_recipe_state(recipe=recipe)
        for difference in extra_state.differences(saved_recipe, recipe):
            warnings.warn(
                f"{self.__class__.__name__}: the recipe of the extra state can't be restored as it was: {difference}. "
                "Scales and amax histories are restored, and used by the recipe of the next call",
                UserWarning,
                stacklevel=2,
            )

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *args: Any
    ) -> None:
        """Load the extra state first: quantized parameters need its scales. Without one, scales stay as they are.

        An error of the extra state begins with its key in the state dict.
        """
        key = prefix + "_extra_state"
        if key in state_dict:
            try:
                self.set_extra_state(state_dict[key])
            except (RuntimeError, TypeError) as error:
                say_who(error, key)
                raise
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)
        if key in missing_keys:
            missing_keys.remove(key)


def _delayed_tensors(meta: Mapping[str, Any], mode: str) -> dict[str, torch.Tensor]:
    """Scale and amax history of a delayed-scaling state; empty for recipes without such state."""
    if not meta["recipe"].delayed():
        return {}
    state = meta[_META_KEYS[mode]]
    return {"scale": state.scale, "amax_history": state.amax_history}


def _refuse_recomputing(op: BasicOperation) -> None:
    """`RuntimeError` if autograd calls `op`, about to run without the quantization of its last call.

    Unless that was asked for: by an `autocast` in force, or a `fuser.checkpoint` of what ran without quantization.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    if in_backward and not is_replaying() and not FP8GlobalStateManager.quantization_state.autocast_depth:
        raise RuntimeError(
            f"{op.__class__.__name__} is computed again in the backward pass, outside of the autocast of its forward "
            "pass, so without quantization: use fuser.checkpoint instead of torch.utils.checkpoint.checkpoint, with "
            "any use_reentrant"
        )


def _unregistered(meta: dict[str, Any] | None) -> dict[str, Any] | None:
    """State of a mode without its place in the global buffers and its process group, which can't be copied."""
    if meta is None:
        return None
    kept = {name: value for name, value in meta.items() if name != _BUFFER_POSITION}
    return {**kept, "fp8_group": None}


class ExtraTensorOperation(BasicOperation):
    """A basic operation with extra inputs or outputs: it computes in `fuser_forward` and `fuser_backward` alone."""

    def op_forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{type(self).__name__} has extra tensors. It overrides `fuser_forward` instead of `op_forward`."
        )

    def op_backward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{type(self).__name__} has extra tensors. It overrides `fuser_backward` instead of `op_backward`."
        )


class FusedOperation(_CalledAlone):
    """Several basic operations computed at once.

    It holds no state of its own. A fusion of only one pass must be interchangeable with the unfused operations: forward
    leaves in each context what the basic operation's backward reads.
    `basic_ops`: what it stands for, in order; `ValueError` if empty.
    """

    is_fused_op = True

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)
        if len(self.basic_ops) == 0:
            raise ValueError(
                "Attempted to construct a fused operation without specifying its corresponding basic operations"
            )

    def get_input_quantizer(self) -> Any:
        return self.basic_ops[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Any:
        return self.basic_ops[-1].get_grad_output_quantizer()

    def pre_first_fuser_forward(self) -> None:
        for op in self.basic_ops:
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.basic_ops:
            op.pre_fuser_forward(requires_grad=requires_grad)

    def forward(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> Any:
        """Run the basic operations by themselves, fused as the registered fusions decide."""
        return run_alone(self, input, extra_inputs, basic_op_kwargs)
