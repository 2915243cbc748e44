"""What quantization is in force, and the state that recipes keep: scales and amax histories.

`FP8GlobalStateManager` holds the settings of the innermost `autocast` and the registry of delayed-scaling states. Their
scales are updated when the outermost `autocast` ends (forward) and when a backward pass ends. A `RecipeState` belongs
to one operation and one direction; it makes that operation's quantizers.

Behaviour: TE's quantization.py, except: a state that nobody uses any more leaves the registry, and a state whose recipe
or process group changes is updated by its present one.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from fuser import dispatch
from fuser.distributed import get_distributed_world_size, reduce_amax
from fuser.dtypes import DType
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.quantizers import (
    BlockScaledQuantizer,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fuser.quantization.storage import deep_copy
from fuser.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, Recipe
from fuser.tracing import OLD_TORCH, define_operator
from refops.arguments import shown

__all__ = [
    "BlockScaledRecipeState",
    "CustomRecipeState",
    "DelayedScalingRecipeState",
    "DelayedScalingRequest",
    "FP8GlobalStateManager",
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
    "QuantizerRequest",
    "QuantizerRole",
    "RecipeState",
]

#: A gradient's amax is warned of from this many times what its delayed scale makes the format's largest number. Chosen,
#: not measured: elements larger than amax / 256 saturate then, which of a normal distribution, whose largest element is
#: some 4 standard deviations, are 99%; batches that differ and a loss scale that doubles stay below. Which share of the
#: elements saturates is not counted: a few may be larger than all others.
MOST_ABOVE_RANGE = 256
_INPUT_LIKE = ("input", "weight", "output")
_GRADIENTS = ("grad_output", "grad_input")


@dataclass(frozen=True)
class QuantizerRole:
    """What a quantizer quantizes.

    Attributes:
        module_type: "linear", "grouped_linear", ... or "".
        tensor_type: "input", "weight", "output", "grad_output", "grad_input", or "": told from the position.
        name: of the module.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclass(frozen=True)
class QuantizerRequest:
    """Base of what a `CustomRecipe`'s factory returns where the operation has to keep state for the quantizer."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """What a `CustomRecipe`'s factory returns for a slot with delayed scaling. Fields as `DelayedScaling`.

    All requests of one state must be equal: they share one scale tensor and one amax history.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True

    def recipe(self) -> DelayedScaling:
        """The recipe with these values."""
        return DelayedScaling(**{f.name: getattr(self, f.name) for f in fields(self)}, backward_override=None)


def get_fp8_dtype(recipe: Any, *, forward: bool) -> DType:
    """Element type of forward or backward tensors under a recipe's `fp8_format`."""
    if recipe.fp8_format == Format.E4M3 or (recipe.fp8_format == Format.HYBRID and forward):
        return DType.kFloat8E4M3
    return DType.kFloat8E5M2


# --- recipe states --------------------------------------------------------------------------------


class RecipeState(ABC):
    """The state of one operation in one direction, and the maker of its quantizers.

    Attributes:
        recipe, num_quantizers, device, roles: what it was made with.
        mode: "forward" or "backward".
    """

    recipe: Any
    mode: str

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: list[QuantizerRole] | None = None,
    ) -> RecipeState:
        """The state for a recipe.

        Args:
            recipe: one of `fuser.recipe`'s, or of a subclass.
            mode: "forward" or "backward".
            num_quantizers: number of quantizers.
            device: where scales and amaxes are; by default torch's default device (TE: the current GPU).
            roles: what each quantizer quantizes; None tells it from the position.

        Raises:
            ValueError: unknown recipe or mode, or another number of roles than of quantizers.
        """
        for predicate, state_class in _STATE_CLASSES.items():
            if isinstance(recipe, Recipe) and getattr(recipe, predicate)():
                return state_class(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)
        raise ValueError(f"{type(recipe).__name__} is not a recognized recipe")

    def __init__(self, recipe, *, mode, num_quantizers=1, device=None, roles=None):
        if mode not in ("forward", "backward"):
            raise ValueError(f"mode must be 'forward' or 'backward'; got {shown(mode)}")
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(f"roles must have one entry per quantizer, {num_quantizers}; got {len(roles)}")
        self.recipe, self.mode, self.num_quantizers, self.roles = recipe, mode, num_quantizers, roles
        self.device = torch.get_default_device() if device is None else torch.device(device)

    def __deepcopy__(self, memo):
        # A process group has no copy, and recipes are shared by the operations of a model.
        return deep_copy(self, memo, shared=("group", "recipe"))

    def __getstate__(self):
        """For pickles: a process group stays with its processes, and a copy is not registered yet."""
        return {name: value for name, value in self.__dict__.items() if name != "_serial"} | (
            {"group": None} if "group" in self.__dict__ else {}
        )

    @abstractmethod
    def make_quantizers(self) -> list[Quantizer]:
        """One quantizer a slot, with both usages."""

    def follow(self, recipe: Recipe, *, device: torch.device | None = None) -> None:
        """Take the values of another recipe of the same type; quantizers made from now on have them.

        Those that a pending backward pass holds keep their scales, and their amaxes still count.
        """
        self.recipe = recipe
        self.device = self.device if device is None else device

    def reconnect(self, quantizers: list[Quantizer], others: Iterable[Quantizer] = ()) -> None:  # noqa: B027
        """Make the quantizers of a copy view the copied tensors: a pickled view has its own memory, or version.

        Of `others`, e.g. a quantized weight's, those follow that share a scale with one of `quantizers`.
        """

    @property
    def delayed_state(self) -> DelayedScalingRecipeState | None:
        """The part of this state that holds scales and amax histories, if any."""
        return None

    @property
    def dtype(self) -> DType:
        """Element type of this direction."""
        return get_fp8_dtype(self.recipe, forward=self.mode == "forward")

    def _slot_tensor_type(self, idx: int) -> str:
        """The kind of tensor of slot `idx`: its role's, else by position."""
        if self.roles is not None and self.roles[idx] is not None:
            tensor_type = self.roles[idx].tensor_type
            if tensor_type in _INPUT_LIKE + _GRADIENTS:
                return tensor_type
        return _INPUT_LIKE[idx % 3] if self.mode == "forward" else _GRADIENTS[idx % 2]

    def _qparams(self, tensor_type: str, prefix: str) -> Any:
        """The recipe's `QParams` of a kind of tensors: of weights, of gradients, or else of inputs."""
        kind = {"weight": "fwd_weight", "grad_output": "bwd_grad", "grad_input": "bwd_grad"}.get(tensor_type, "fwd_inp")
        return getattr(self.recipe, f"{prefix}_quant_{kind}")


class DelayedScalingRecipeState(RecipeState):
    """Delayed scaling.

    Attributes:
        scale: float32 (num_quantizers,), ones at first.
        amax_history: float32 (amax_history_len, num_quantizers), zeros at first. Row 0 collects the present amaxes.
        group: the process group of the amax reduction, as of the last registration.
        keeps_unseen: whether an update leaves everything as it is if no tensor was seen since the last one. Where each
            module is a context of its own, the updates of all others come between two of its steps.
    """

    _serial: int  # in the registry; unset until it is put there
    #: Whether it has warned of a gradient that its scale did not fit, or must not.
    warned_of_jump = False

    def __init__(self, recipe, *, mode, num_quantizers=1, device=None, roles=None):
        super().__init__(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)
        # Tensors made in inference mode could not be updated outside of it.
        with torch.inference_mode(False):
            self.scale = torch.ones(num_quantizers, dtype=torch.float32, device=self.device)
            self.amax_history = torch.zeros(
                recipe.amax_history_len, num_quantizers, dtype=torch.float32, device=self.device
            )
        self.group, self.keeps_unseen = None, False
        self._scale_unit = self._unit_of_scales()
        self._amaxes = []

    def make_quantizers(self):
        self._connect_amaxes()
        return [Float8Quantizer(self.scale[i], self._amaxes[i], self.dtype) for i in range(self.num_quantizers)]

    def _connect_amaxes(self):
        """Make `_amaxes` view row 0 of the history, in place: quantizers of earlier recipe values hold them too."""
        views = [self.amax_history[0][i].reshape(1) for i in range(self.num_quantizers)]
        if any(amax.device != self.amax_history.device for amax in self._amaxes):
            self._amaxes = []
        for amax, view in zip(self._amaxes, views, strict=False):
            amax.set_(view)
        self._amaxes = self._amaxes or views

    def _unit_of_scales(self):
        """What is divided by an amax to get a scale."""
        return self.dtype.format.max * 2.0**-self.recipe.margin

    def follow(self, recipe, *, device=None):
        """See `RecipeState.follow`. The history is cut, or padded with zeros at its end. A scale that came from an amax
        is converted to the new format and margin."""
        super().follow(recipe, device=device)
        with torch.no_grad(), torch.inference_mode(False):
            self.scale, history = self.scale.to(self.device), self.amax_history.to(self.device)
            rows, length = len(history), recipe.amax_history_len
            if length != rows:
                padding = history.new_zeros(max(0, length - rows), self.num_quantizers)
                history = torch.cat([history[:length], padding])
            self.amax_history = history
            self._connect_amaxes()
            unit, before = self._unit_of_scales(), self._scale_unit
            self._scale_unit = unit
            if unit != before:
                # Another tensor: pending backward passes still cast to the old format.
                updated = self.amax_history[1:].sum(0) > 0
                self.scale = torch.where(updated, self.scale * (unit / before), self.scale)

    def reconnect(self, quantizers, others=()):
        self._connect_amaxes()
        for i, quantizer in enumerate(quantizers):
            sharing = [other for other in others if getattr(other, "scale", None) is quantizer.scale]
            scale = self.scale[i]
            for holder in (quantizer, *sharing):
                holder.scale, holder.amax, holder._read_scale = scale, self._amaxes[i], None

    @property
    def delayed_state(self):
        return self

    def has_first_scales(self) -> bool:
        """Whether no update has set a scale. Row 0 does not count: a pass without gradients may have filled it."""
        return bool((self.scale == 1).all()) and not self.amax_history[1:].any()

    def _warn_of_jump(self) -> None:
        """Warn once if the scales of gradients, not the first ones, were far from what this step's amaxes want.

        On the CPU alone: elsewhere one would wait for the amaxes.
        """
        if self.mode != "backward" or self.warned_of_jump or self.scale.device.type != "cpu":
            return
        fmt = self.dtype.format
        largest = (self.amax_history[0] * self.scale).tolist()
        for slot, value in enumerate(largest):
            if MOST_ABOVE_RANGE * float(fmt.max) <= value < math.inf:
                times = f"{value / float(fmt.max):.0f} times"
                what = f"{times} the largest number of its format: what is larger than that saturated"
            elif 0 < value < float(fmt.smallest_subnormal) / 2:
                what = "below the smallest number of its format: all of it became zero"
            else:
                continue
            if self.has_first_scales():
                return
            self.warned_of_jump = True
            role = self.roles[slot] if self.roles else None
            warnings.warn(
                f"{role.name if role and role.name else 'delayed scaling'}: the gradient of an output has changed so "
                f"much since the steps before that its largest element, times the delayed scale, is {what}. The next "
                "steps have scales of this one; one layer adapts after the other",
                UserWarning,
                stacklevel=2,
            )
            return

    def update_scales(self) -> None:
        """Take the amaxes of row 0 into the history and compute the next scales, in place."""
        self._warn_of_jump()
        recipe = self.recipe
        fmt, custom = self.dtype.format, recipe.scaling_factor_compute_algo
        algorithm = recipe.amax_compute_algo
        # TE's fused update leaves alone a tensor that this step did not see; its Python path and callables always roll.
        fused = not callable(algorithm) and custom is None and os.getenv("NVTE_UNFUSED_FP8_UPDATE", "0") != "1"
        amaxes = []

        def remember(history):
            amaxes.append(algorithm(history) if callable(algorithm) else _amax_of(history, algorithm))
            return amaxes[0]

        with torch.no_grad():
            history, scale = dispatch.update_delayed_scale(
                self.amax_history, self.scale, fmt, margin=recipe.margin, algorithm=algorithm if fused else remember
            )
            if custom is not None:
                fp8_max = torch.tensor(float(fmt.max), device=self.scale.device)
                scale = custom(amaxes[0].to(self.scale.device), self.scale.clone(), fp8_max, recipe)
            self.amax_history.copy_(history)
            self.scale.copy_(scale)


def _amax_of(history, algorithm):
    return history.amax(dim=0) if algorithm == "max" else history[0].clone()


class _WithoutState(RecipeState):
    """Each slot's quantizer follows from the recipe and the kind of its tensor."""

    def make_quantizers(self):
        return [self._make_quantizer(i, self._slot_tensor_type(i)) for i in range(self.num_quantizers)]


class Float8CurrentScalingRecipeState(_WithoutState):
    """Per-tensor current scaling: no state."""

    def _make_quantizer(self, idx, tensor_type):
        return Float8CurrentScalingQuantizer(self.dtype, force_pow_2_scales=self.recipe.use_power_2_scales)


class MXFP8BlockScalingRecipeState(_WithoutState):
    """MXFP8: no state."""

    def _make_quantizer(self, idx, tensor_type):
        role = self.roles[idx] if self.roles is not None else None
        of_linear = role is not None and role.module_type in ("linear", "grouped_linear")
        is_weight = of_linear and self.mode == "forward" and tensor_type == "weight"
        return MXFP8Quantizer(self.dtype, with_2d_quantization=bool(self.recipe.enable_2d_quantization and is_weight))


class Float8BlockScalingRecipeState(_WithoutState):
    """FP8 with float32 block scales: no state."""

    def _make_quantizer(self, idx, tensor_type):
        qparams = self._qparams(tensor_type, "fp8")
        operand = "w" if tensor_type == "weight" else "grad" if tensor_type in _GRADIENTS else "x"
        return Float8BlockQuantizer(
            self.dtype,
            amax_epsilon=qparams.amax_epsilon,
            force_pow_2_scales=qparams.power_2_scale,
            block_scaling_dim=getattr(self.recipe, f"{operand}_block_scaling_dim"),
        )


class NVFP4BlockScalingRecipeState(_WithoutState):
    """NVFP4: no state."""

    @property
    def dtype(self):
        return DType.kFloat4E2M1

    def _make_quantizer(self, idx, tensor_type):
        recipe, qparams = self.recipe, self._qparams(tensor_type, "fp4")
        kind = "weights" if tensor_type == "weight" else "activations"
        is_gradient = tensor_type in _GRADIENTS
        four_over_six = not is_gradient and recipe.nvfp4_4over6 in (kind, "all")
        return NVFP4Quantizer(
            with_rht=qparams.random_hadamard_transform,
            with_post_rht_amax=qparams.random_hadamard_transform,
            with_2d_quantization=qparams.fp4_2d_quantization,
            stochastic_rounding=qparams.stochastic_rounding,
            row_scaled_nvfp4=recipe.row_scaled_activation and self.mode == "forward" and tensor_type != "weight",
            nvfp4_use_4over6=four_over_six,
            nvfp4_e4m3_max=256 if four_over_six and recipe.nvfp4_4over6_e4m3_use_256 in (kind, "all") else 448,
            nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
        )


class BlockScaledRecipeState(_WithoutState):
    """Blocks by any declared scaling: no state."""

    def _make_quantizer(self, idx, tensor_type):
        return BlockScaledQuantizer(self.recipe.scaling_of(tensor_type))


class CustomRecipeState(RecipeState):
    """Quantizers from `recipe.qfactory(role)`; `DelayedScalingRequest`s share one delayed-scaling state."""

    def __init__(self, recipe, *, mode, num_quantizers=1, device=None, roles=None):
        super().__init__(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)
        self._delayed = None
        self._delayed_slots = []

    @property
    def delayed_state(self):
        return self._delayed

    def reconnect(self, quantizers, others=()):
        if self._delayed is not None:
            self._delayed.reconnect([quantizers[slot] for slot in self._delayed_slots], others)

    def make_quantizers(self):
        if self.roles is None:
            warnings.warn(
                "CustomRecipe in an operation without quantizer roles: the factory gets the tensor type by position",
                UserWarning,
                stacklevel=2,
            )
        made = [self.recipe.qfactory(self._role(i)) for i in range(self.num_quantizers)]
        for i, quantizer in enumerate(made):
            if not isinstance(quantizer, Quantizer | DelayedScalingRequest):
                raise ValueError(
                    "CustomRecipe's qfactory must return a Quantizer or a DelayedScalingRequest for every role; "
                    f"got {shown(quantizer)} for {self._role(i)}"
                )
        return self._with_delayed_scaling(made)

    def _role(self, idx):
        if self.roles is not None and self.roles[idx] is not None:
            return self.roles[idx]
        return QuantizerRole(tensor_type=self._slot_tensor_type(idx))

    def _with_delayed_scaling(self, made):
        """`made` with a quantizer of one shared state for each request."""
        slots = [i for i, quantizer in enumerate(made) if isinstance(quantizer, DelayedScalingRequest)]
        self._delayed, before = None, self._delayed if slots == self._delayed_slots else None
        self._delayed_slots = slots
        if not slots:
            return made
        if any(made[i] != made[slots[0]] for i in slots):
            raise ValueError(
                f"All DelayedScalingRequests of an operation must be equal; got {[made[i] for i in slots]}"
            )
        recipe = made[slots[0]].recipe()
        if before is None:
            before = DelayedScalingRecipeState(recipe, mode=self.mode, num_quantizers=len(slots), device=self.device)
        else:
            before.follow(recipe, device=self.device)
        self._delayed = before
        for slot, quantizer in zip(slots, before.make_quantizers(), strict=True):
            made[slot] = quantizer
        return made


#: Predicate of a recipe -> its state.
_STATE_CLASSES: dict[str, Callable[..., RecipeState]] = {
    "delayed": DelayedScalingRecipeState,
    "mxfp8": MXFP8BlockScalingRecipeState,
    "float8_current_scaling": Float8CurrentScalingRecipeState,
    "float8_block_scaling": Float8BlockScalingRecipeState,
    "nvfp4": NVFP4BlockScalingRecipeState,
    "block_scaled": BlockScaledRecipeState,
    "custom": CustomRecipeState,
}


# --- global state ---------------------------------------------------------------------------------


class _Registry:
    """The delayed-scaling states of all threads, in order of registration, without those that nobody uses any more."""

    def __init__(self):
        self._states: weakref.WeakValueDictionary[int | None, DelayedScalingRecipeState] = weakref.WeakValueDictionary()
        self._kept: list[DelayedScalingRecipeState] = []
        self._next = 0
        self._lock = threading.RLock()  # garbage collection under the lock may run code that comes here

    def __len__(self):
        return len(self._states)

    def add(self, state: DelayedScalingRecipeState, *, keep: bool) -> int:
        """Serial number of a state, which is put here unless it is here; `keep`: also when nobody uses it."""
        with self._lock:
            if self._states.get(getattr(state, "_serial", None)) is not state:
                state._serial, self._next = self._next, self._next + 1
                self._states[state._serial] = state
                self._kept += [state] * keep
            return state._serial

    def states(self) -> list[DelayedScalingRecipeState]:
        """The states that are alive."""
        with self._lock:
            return list(self._states.values())


@dataclass
class FP8GlobalState:
    """The settings in force in one thread, and the registry of delayed-scaling states, which all threads share."""

    registered: _Registry
    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_distributed_group: Any = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    #: Whether the outermost context was entered in a backward pass, by a recomputation.
    entered_in_backward: bool = False
    #: Whether the forward pass that runs has already updated the scales before (`fuser.recompute`).
    recomputing: bool = False
    fp8_parameters: bool = False
    high_precision_init_val: bool = False


class _StateOfThread(threading.local):
    """Holds each thread's `FP8GlobalState`. A new thread starts without quantization, as with `torch.autocast`.

    The state is an object of its own: torch.compile loses writes to a `threading.local`.
    """

    def __init__(self, registered: _Registry):
        self.state = FP8GlobalState(registered)


class _ManagerType(type):
    _of_thread: Any
    quantization_state: FP8GlobalState = property(  # type: ignore[assignment]
        operator.attrgetter("_of_thread.state"), doc="The state of the calling thread."
    )


#: What `autocast` saves on entry and puts back on exit.
_SNAPSHOT = (
    "fp8_enabled",
    "fp8_calibration",
    "fp8_recipe",
    "fp8_distributed_group",
    "is_first_fp8_module",
    "fp8_graph_capturing",
)


class FP8GlobalStateManager(metaclass=_ManagerType):
    """The one global state, through classmethods, by TE's names. Nothing here is meant to be instantiated.

    What `autocast` and `quantized_model_init` set is in force in the thread that called them (TE: in all threads).
    """

    _of_thread: ClassVar[_StateOfThread] = _StateOfThread(_Registry())

    @classmethod
    def reset(cls) -> None:
        """Forget everything, for all threads: no quantization, no registered states."""
        cls._of_thread = _StateOfThread(_Registry())

    # --- what is in force -----------------------------------------------------------------------------

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether the innermost `autocast` is enabled."""
        return cls._of_thread.state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether the innermost `autocast` has `calibrating=True`. No operation acts on it, as in te.ops."""
        return cls._of_thread.state.fp8_calibration

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe in force; the default recipe outside of `autocast` and `quantized_model_init`."""
        recipe = cls._of_thread.state.fp8_recipe
        return get_default_recipe() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The process group of amax reductions."""
        return cls._of_thread.state.fp8_distributed_group

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether parameters that are made now are quantized (`quantized_model_init`)."""
        return cls._of_thread.state.fp8_parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """The `preserve_high_precision_init_val` of `quantized_model_init`. No operation acts on it, as in te.ops."""
        return cls._of_thread.state.high_precision_init_val

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether a CUDA graph is being captured: then scales are not registered or updated."""
        if cls._of_thread.state.fp8_graph_capturing:
            return True
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Whether the caller is the first to ask since the outermost `autocast` was entered. The next one isn't."""
        first = cls._of_thread.state.is_first_fp8_module
        cls._of_thread.state.is_first_fp8_module = False
        return first

    # --- autocast -------------------------------------------------------------------------------------

    @classmethod
    def get_autocast_state(cls) -> tuple:
        """A snapshot for `set_autocast_state`."""
        return tuple(getattr(cls._of_thread.state, name) for name in _SNAPSHOT)

    @classmethod
    def set_autocast_state(cls, snapshot: tuple) -> None:
        """Put back what `get_autocast_state` returned."""
        for name, value in zip(_SNAPSHOT, snapshot, strict=True):
            setattr(cls._of_thread.state, name, value)

    @classmethod
    @contextlib.contextmanager
    def set_aside(cls) -> Iterator[None]:
        """Outside of every context that the calling thread is in, with a registry of its own: what is registered keeps
        its scales meanwhile, also for other threads."""
        state = cls._of_thread.state
        present = vars(state).copy()
        vars(state).update(vars(FP8GlobalState(_Registry())))
        try:
            yield
        finally:
            vars(state).update(present)

    @classmethod
    def autocast_enter(
        cls, enabled: bool, calibrating: bool, recipe: Recipe | None, group: Any = None, graph: bool = False
    ) -> None:
        """Set what `autocast` says; the first module is the first of the outermost context."""
        state = cls._of_thread.state
        state.fp8_enabled, state.fp8_calibration = enabled, calibrating
        state.fp8_recipe = get_default_recipe() if recipe is None else recipe
        state.fp8_distributed_group, state.fp8_graph_capturing = group, graph
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
            in_graph = torch.compiler.is_dynamo_compiling()
            state.entered_in_backward = not in_graph and torch._C._current_graph_task_id() != -1
        state.autocast_depth += 1

    @classmethod
    def autocast_exit(cls, enabled: bool, graph: bool = False) -> None:
        """Leave a context; the outermost one, if it was enabled and gradients are recorded, updates forward scales."""
        state = cls._of_thread.state
        state.autocast_depth -= 1
        outermost = state.autocast_depth == 0
        if enabled and outermost and not graph and not state.recomputing and torch.is_grad_enabled():
            cls.reduce_and_update_fp8_tensors(forward=True)

    # --- delayed scaling ------------------------------------------------------------------------------

    @classmethod
    def get_meta_tensor_key(cls, forward: bool = True) -> str:
        """The key of a direction's state in an operation's meta dict."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def get_fwd_bwd_key(cls, forward: bool = True) -> str:
        """ "forward" or "backward"."""
        return "forward" if forward else "backward"

    @classmethod
    def get_buffer_info(cls) -> str:
        """The key of the registration in an operation's meta dict."""
        return "buffer_index_and_autocast_key"

    @classmethod
    def get_unique_autocast_key(cls, recipe: Recipe, group: Any) -> str:
        """What states must share to be reduced together."""
        return f"recipe={recipe!r},group={id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, recipe: Recipe, group: Any) -> str:
        """`get_unique_autocast_key` of one direction."""
        return f"{cls.get_fwd_bwd_key(forward)}_{cls.get_unique_autocast_key(recipe, group)}"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any], keeps_unseen: bool = False) -> None:
        """Register the delayed-scaling states of an operation's meta dict for updates. Any number of calls do as one.

        `keeps_unseen`: see `DelayedScalingRecipeState`.
        The states follow the dict's "recipe" and "fp8_group". `fp8_meta[get_buffer_info()]` becomes a list of serial
        number and key for each state. A copied dict (`copy.deepcopy` of an operation) registers its own states.
        """
        positions = []
        for forward in (True, False):
            holder = fp8_meta.get(cls.get_meta_tensor_key(forward))
            state = None if holder is None else holder.delayed_state
            if state is None:
                continue
            if holder is state:
                state.recipe = fp8_meta["recipe"]
            state.group = fp8_meta.get("fp8_group")
            state.keeps_unseen = keeps_unseen
            key = cls.get_key_in_buffer(forward, state.recipe, state.group)
            positions += [cls._register(state), key]
        if positions:
            fp8_meta[cls.get_buffer_info()] = positions

    @classmethod
    def _register(cls, state: DelayedScalingRecipeState) -> int:
        """Serial number of a state in the registry, where it is put unless it is there."""
        # All ranks must reduce the same list: with several, a state stays until `reset`, as in TE.
        shared = state.recipe.reduce_amax and get_distributed_world_size(state.group) > 1
        return cls._of_thread.state.registered.add(state, keep=shared)

    @classmethod
    def registered_states(cls, forward: bool = True) -> list[DelayedScalingRecipeState]:
        """The delayed-scaling states of a direction, in order of registration."""
        mode = cls.get_fwd_bwd_key(forward)
        return [state for state in cls._of_thread.state.registered.states() if state.mode == mode]

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Update the scales of every registered state of a direction from its amaxes.

        First, where `recipe.reduce_amax`, the amaxes of all states that share recipe and group become the largest over
        the group. A tensor that no rank has seen since the last update keeps its history and scale.
        """
        if torch.compiler.is_dynamo_compiling() and not OLD_TORCH:
            torch.ops.fuser.update_scales(forward)
            return
        groups: dict[str, list[DelayedScalingRecipeState]] = {}
        for state in cls.registered_states(forward):
            groups.setdefault(cls.get_key_in_buffer(forward, state.recipe, state.group), []).append(state)
        for states in groups.values():
            if states[0].recipe.reduce_amax:
                cls._reduce_amaxes(states, states[0].group)
            for state in states:
                if not state.keeps_unseen or state.amax_history[0].any():
                    state.update_scales()

    @staticmethod
    def _reduce_amaxes(states: Iterable[DelayedScalingRecipeState], group: Any) -> None:
        if get_distributed_world_size(group) == 1:
            return
        with torch.no_grad():
            rows = [state.amax_history[0] for state in states]
            reduced = reduce_amax(torch.cat(rows), group)
            for row, amaxes in zip(rows, reduced.split([len(row) for row in rows]), strict=True):
                row.copy_(amaxes)


define_operator(
    "update_scales",
    "(bool forward) -> ()",
    lambda forward: FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward),
    lambda forward: None,
)


def get_default_recipe() -> Recipe:
    """The recipe where none is given: MXFP8 on GPUs of compute capability 10.x, current scaling from 12.0 on, else
    delayed scaling (also without a GPU)."""
    capability = _compute_capability()
    if (10, 0) <= capability < (12, 0):
        return MXFP8BlockScaling()
    if capability >= (12, 0):
        return Float8CurrentScaling()
    return DelayedScaling()


def _compute_capability() -> tuple[int, int]:
    """That of the current GPU; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
