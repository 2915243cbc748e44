"""The interface between a fuser and its operations.

Behaviour: TE's ops/op.py. The classes to derive from are in `fuser.op`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fuser.quantization.tensor import KeepsQuantizedParameters
from fuser.tracing import NotScriptable


@dataclass
class OperationContext:
    """What one basic operation keeps from one forward call to its backward. Operations may set further attributes.

    `saved_tensors`: in backward, the tensors given to `save_for_backward`. `requires_grad`: whether the operation takes
    part in backward, set before its forward.
    """

    requires_grad: bool = True
    saved_tensors: Any = field(default=None, init=False)
    to_save: tuple[Any, ...] | None = field(default=None, init=False)
    _saved_tensors_range: tuple[int, int] | None = field(default=None, init=False)

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors (or quantized storages, or None) for backward. A second call replaces the first."""
        self.to_save = tensors

    if TYPE_CHECKING:  # the attributes that operations set

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class FusibleOperation(KeepsQuantizedParameters, NotScriptable, torch.nn.Module, metaclass=abc.ABCMeta):
    """A step that an `OperationFuser` can run: a basic operation or a fused one."""

    # What some operations have, which a module's `__getattr__` would hide from a type checker
    basic_ops: Any  # of a fused one, a ModuleList of operations
    _pipeline: Any  # what graphs of torch.compile take for it where it is called by itself
    _quantizers: dict[str, list[Any]] | None  # of a basic one, by mode; None without a recipe
    op_forward: Callable[..., Any]  # of a basic one
    reset_recipe_state: Callable[..., None]  # of a basic one
    passed_through: Callable[[torch.Tensor], torch.Tensor | None]
    fuse_forward_ops: ClassVar[Callable[..., list[Any]]]
    fuse_backward_ops: ClassVar[Callable[..., list[Any]]]
    fuse_forward_backward_ops: ClassVar[Callable[..., list[Any]]]

    @property
    @abc.abstractmethod
    def is_fused_op(self) -> bool:
        """Whether it stands for several basic operations."""

    @property
    def computes_alone(self) -> bool:
        """Whether its `fuser_forward` does no more than call its `op_forward`, which a fuser then calls itself."""
        return False

    #: Whether its output is a quantized tensor under a recipe, also where it is the last operation.
    returns_quantized: bool = False

    def graph_obstacle(self) -> str:
        """Why a graph of torch.compile can't have this operation, said of it ("has ..."); "" if it can.

        For that its forward must work on tensors that have no elements, with sizes that are symbols. An operation of
        your own says "" if its does.
        """
        if type(self).__module__.startswith("fuser."):
            return ""
        return 'is not an operation of fuser: it may be a part of a graph if its graph_obstacle() returns ""'

    def transformed(self, input_: torch.Tensor) -> torch.Tensor:
        """The output for a tensor of torch.func's transforms; `RuntimeError` where these can't be."""
        raise RuntimeError(f"torch.func can't transform {type(self).__name__}: of fuser's operations, only activations")

    def pre_first_fuser_forward(self) -> None:
        """Called once before the first forward of a fuser, e.g. to materialize deferred parameters."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before every forward of a fuser, e.g. to set what the quantizers must produce."""

    def get_input_quantizer(self) -> Any:
        """The quantizer whose format this operation wants its input in, or None."""
        return None

    def get_grad_output_quantizer(self) -> Any:
        """The quantizer whose format this operation wants its output gradient in, or None."""
        return None

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: Any,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[Any, Iterable[Iterable[torch.Tensor]]]:
        """Forward. Lists have one entry per basic operation.

        `prev_op_grad_output_quantizer`: format that the previous operation wants this one's input gradient in.
        `next_op_input_quantizer`: format that the next operation wants this one's output in.
        Returns the output and the extra outputs of each basic operation.
        """
        raise NotImplementedError(f"Forward pass is not implemented for operation ({self.__class__.__name__})")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[Any, Iterable[Iterable[torch.Tensor | None]], Iterable[Iterable[torch.Tensor | None]]]:
        """Backward. Returns the gradients of the input and, per basic operation, of parameters and extra inputs."""
        raise NotImplementedError(f"Backward pass is not implemented for operation ({self.__class__.__name__})")
