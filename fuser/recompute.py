"""`checkpoint`: compute activations again in backward instead of keeping them, under the quantization of forward.

torch's own checkpoint calls the function again in the backward pass, where the `autocast` of the forward pass may be
over and its scales updated. Outside of an `autocast` that is an error (`fuser.op`); inside of another one than that of
the forward pass, the recipe and its scales may be others.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from fuser.cards import products_again, settings_of_products
from fuser.dispatch import backend, current_backend
from fuser.quantization.quantizers import delayed_scales
from fuser.quantization.state import FP8GlobalStateManager
from fuser.tracing import WhenTraced, leave_for, outside_compile

_left_alone = WhenTraced(functools.partial(leave_for, "fuser.checkpoint calls its function in backward again"))


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`; backward computes it again instead of keeping its tensors.

    Outputs, gradients, scales and amax histories are those of a plain call, under every recipe: the second run has the
    `autocast`, the backend, the products and the delayed scales of the first one, records no amaxes and updates no
    scales. As TE's `checkpoint`, whose default is the reentrant kind.

    Args:
        function: e.g. a `Sequential`. It must do the same in both runs.
        use_reentrant: torch's older implementation: at least one argument must require gradients.
        kwargs: the function's, and those of `torch.utils.checkpoint.checkpoint` (`preserve_rng_state`, ...).

    Raises:
        RuntimeError: the function updates delayed scales and uses them afterwards.
    """
    if torch.compiler.is_dynamo_compiling():
        options = {"use_reentrant": use_reentrant, "reason": _left_alone.value}
        return outside_compile(checkpoint, function, *args, **options, **kwargs)
    run = _Run(function, use_reentrant)
    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)


class _Run:
    """A function whose later calls repeat the first one's settings."""

    def __init__(self, function: Callable[..., Any], use_reentrant: bool) -> None:
        self._function, self._use_reentrant = function, use_reentrant
        self._grad_enabled = torch.is_grad_enabled()
        self._settings: tuple | None = None
        self._depth = FP8GlobalStateManager.quantization_state.autocast_depth
        self._backend, self._products = current_backend(), settings_of_products()
        self._scales: dict[int, tuple[torch.Tensor, float]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._settings is not None:
            with self._again(), delayed_scales(self._scales, replay=True):
                return self._function(*args, **kwargs)
        self._settings = FP8GlobalStateManager.get_autocast_state()
        with delayed_scales(self._scales, replay=False):
            result = self._function(*args, **kwargs)
        if self._use_reentrant and self._grad_enabled and self._scales and _any_requires_grad(args):
            # The second run has the graph, and is the first module if this one would have been.
            FP8GlobalStateManager.is_first_fp8_module()
        return result

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        state = FP8GlobalStateManager.quantization_state
        present = FP8GlobalStateManager.get_autocast_state(), state.autocast_depth, state.recomputing
        FP8GlobalStateManager.set_autocast_state(self._settings)
        state.autocast_depth = self._depth
        # The first run of the reentrant kind has no gradients, and so updates nothing.
        state.recomputing = state.recomputing or not self._use_reentrant
        try:
            with backend(self._backend), products_again(self._products):
                yield
        finally:
            settings, state.autocast_depth, state.recomputing = present
            FP8GlobalStateManager.set_autocast_state(settings)


def _any_requires_grad(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
