"""Context managers that switch quantization on, and what this machine does natively.

Behaviour: TE's quantization.py. Every recipe is available on every machine: where the hardware lacks a format, casts
are computed exactly as the hardware would and products in float32 (`fuser.gemm`).
"""

import warnings
from collections.abc import Iterator
from typing import Any

from fuser.quantization.state import FP8GlobalStateManager, _compute_capability, get_default_recipe
from fuser.recipe import Recipe
from fuser.scopes import Scope, scope
from refops.arguments import require_flag, shown

__all__ = [
    "autocast",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]


class autocast:  # noqa: N801 (TE's name)
    """Quantize the work of the operations that are called in this context: those of `fuser.ops`, and modules of torch
    that `fuser.convert` converted. Other modules of torch, and torch's functions, compute as they do without it.

    The innermost context decides, also to switch quantization off. Leaving the outermost one updates the scales of
    delayed scaling, unless it was disabled or gradients are not recorded. An instance can be entered again once it was
    left.

    A context is in force in the thread that entered it, as that of `torch.autocast`; a new thread starts without. What
    is computed again in backward needs it again: `fuser.checkpoint` does that.

    Args:
        enabled: whether operations quantize.
        calibrating: recorded, without effect on operations, as in te.ops.
        recipe: by default `get_default_recipe()`.
        amax_reduction_group: process group over which amaxes of delayed scaling are reduced.

    Raises:
        TypeError: a flag that is no bool, as a recipe given by position. RuntimeError: the instance is active, or the
            recipe isn't supported.
    """

    __slots__ = ("_graph", "_snapshot", "amax_reduction_group", "calibrating", "enabled", "recipe")

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ):
        self.enabled, self.calibrating = _flags("autocast", enabled=enabled, calibrating=calibrating)
        self.recipe = recipe
        self.amax_reduction_group, self._graph = amax_reduction_group, _graph
        self._snapshot: Any = None

    def __enter__(self) -> None:
        if self._snapshot is not None:
            raise RuntimeError("autocast context manager cannot be entered more than once concurrently")
        if self.enabled and self.recipe is not None:
            check_recipe_support(self.recipe)
        self._snapshot = FP8GlobalStateManager.get_autocast_state()
        FP8GlobalStateManager.autocast_enter(
            self.enabled, self.calibrating, self.recipe, self.amax_reduction_group, self._graph
        )

    def __exit__(self, *exception: Any) -> None:
        snapshot, self._snapshot = self._snapshot, None
        FP8GlobalStateManager.set_autocast_state(snapshot)
        FP8GlobalStateManager.autocast_exit(self.enabled, self._graph)


def _flags(context, **flags):
    """The flags of a context manager, each a bool: a recipe given by position would be taken as True."""
    hint = f". A recipe is given as {context}(recipe=...)"
    return [require_flag(value, name, hint) for name, value in flags.items()]


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """Deprecated name of `autocast`."""
    warnings.warn("fp8_autocast is deprecated; use autocast(recipe=...)", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Scope[None]:
    """Make the weights of operations that are constructed in this context quantized.

    Args:
        enabled: whether weights are quantized.
        recipe: by default `get_default_recipe()`.
        preserve_high_precision_init_val: recorded, without effect on operations, as in te.ops.

    Raises:
        TypeError: a flag that is no bool, as a recipe given by position. RuntimeError: the recipe isn't supported.
    """
    flags = _flags(
        "quantized_model_init", enabled=enabled, preserve_high_precision_init_val=preserve_high_precision_init_val
    )
    return _model_init(recipe, *flags)


@scope
def _model_init(recipe: Recipe | None, enabled: bool, preserve_high_precision_init_val: bool) -> Iterator[None]:
    state = FP8GlobalStateManager.quantization_state
    names = ("fp8_parameters", "fp8_recipe", "high_precision_init_val")
    before = {name: getattr(state, name) for name in names}
    if enabled and recipe is not None:
        check_recipe_support(recipe)
    state.fp8_parameters = enabled
    state.fp8_recipe = get_default_recipe() if recipe is None else recipe
    state.high_precision_init_val = preserve_high_precision_init_val
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(state, name, value)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Scope[None]:
    """Deprecated name of `quantized_model_init`."""
    warnings.warn("fp8_model_init is deprecated; use quantized_model_init", DeprecationWarning, stacklevel=2)
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def check_recipe_support(recipe: Recipe) -> None:
    """Raise `RuntimeError` unless operations can work under `recipe`: any recipe of `fuser.recipe` or a subclass."""
    if not isinstance(recipe, Recipe):
        hint = f"; make one of the class: {recipe.__name__}()" if isinstance(recipe, type) else ""
        raise RuntimeError(f"recipe must be an instance of a recipe of fuser.recipe; got {shown(recipe)}{hint}")


# --- what is native -------------------------------------------------------------------------------


def _availability(name, native, needs, return_reason):
    """Always True: with the reason whether it is native or emulated."""
    if not return_reason:
        return True
    capability = _compute_capability()
    where = f"a GPU of compute capability {capability[0]}.{capability[1]}" if capability > (0, 0) else "the CPU"
    if native:
        return True, f"{name}: native on {where}"
    return True, f"{name}: emulated on {where}, bit for bit (native needs a GPU of compute capability {needs})"


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 works: True, everywhere; the reason says whether products are native or emulated."""
    return _availability("FP8", _compute_capability() >= (8, 9), "8.9", return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """As `is_fp8_available`, for MXFP8."""
    return _availability("MXFP8", (10, 0) <= _compute_capability() < (12, 0), "10.x", return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """As `is_fp8_available`, for FP8 with float32 block scales. Its products are emulated on every machine."""
    return _availability("FP8 block scaling", False, "9.0, and this package has no native path yet", return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """As `is_fp8_available`, for NVFP4. Its products are emulated on every machine."""
    return _availability("NVFP4", False, "10.0, and this package has no native path yet", return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """As `is_fp8_available`, for bfloat16."""
    return _availability("bfloat16", _compute_capability() >= (8, 0), "8.0", return_reason)


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """What padded sizes must be divisible by: 32 for MXFP8, 128 for NVFP4, a custom or block recipe's own, else 16."""
    if recipe.mxfp8():
        return 32
    if recipe.nvfp4():
        return 128
    return getattr(recipe, "quantization_alignment", 16)
