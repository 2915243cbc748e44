"""Linear transformation with a bias, made of basic operations.

Behaviour: TE's ops/linear.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuser.basic.basic_linear import BasicLinear
from fuser.basic.bias import Bias
from fuser.basic.collectives import AllReduce, ReduceScatter
from fuser.op import BasicOperation, FusedOperation

_PARAMETERS = ("weight", "bias")


class Linear(FusedOperation):
    """`y = x W^T + b` for `x` of shape (..., in_features); the result is (..., out_features).

    `weight`: (out_features, in_features), `bias`: (out_features,) or None. Both belong to the basic operations; the
    names here are aliases, also when they are assigned to. In a state dict they appear once, under `basic_ops`.
    Arguments: those of `BasicLinear`, and `bias`. With `tensor_parallel_mode="row"` the bias is added before the
    reduction, so its shard on each rank covers part of the sum.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: torch.distributed.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        mode, group, size, sequence_parallel, local_in, _ = BasicLinear._canonicalize_tensor_parallelism(
            mode=tensor_parallel_mode,
            process_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            in_features=in_features,
            out_features=out_features,
        )
        by_rows = mode == "row"  # then the reduction is an operation of its own, after the bias
        linear = BasicLinear(
            local_in if by_rows else in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=None if by_rows else mode,
            tensor_parallel_group=None if by_rows else group,
            sequence_parallel=sequence_parallel and not by_rows,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        ops: list[BasicOperation] = [linear]
        if bias:
            size = out_features * size if by_rows else out_features
            parallel = mode is not None
            ops.append(Bias(size, device=device, dtype=dtype, tensor_parallel=parallel, tensor_parallel_group=group))
        if by_rows:
            ops.append(ReduceScatter(group) if sequence_parallel else AllReduce(group))

        super().__init__(ops)
        self._has_bias = bias

    # The aliases are looked up at every access: they follow when a basic operation replaces a deferred parameter, and
    # when `to_empty` does.

    def _basic_op(self, index: int) -> Any:
        """`self.basic_ops[index]` without `__getattr__`, which looks into `_parameters` first."""
        return self.__dict__["_modules"]["basic_ops"]._modules[str(index)]

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter | None]:
        """torch's dict of a module's own parameters."""
        own = self.__dict__["_parameters"]
        if "_has_bias" in self.__dict__:
            own.update(weight=self.weight, bias=self.bias)
        return own

    @_parameters.setter
    def _parameters(self, value: dict[str, torch.nn.Parameter | None]) -> None:
        self.__dict__["_parameters"] = value

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Linear:
        """As torch's. The basic operations do their parameters; the aliases must not be cast and quantized again."""
        if not recurse:
            for op in self.basic_ops:
                op._apply(fn, recurse=False)
        has_bias = self.__dict__.pop("_has_bias")  # no aliases without it
        for name in _PARAMETERS:
            self._parameters.pop(name, None)
        try:
            return super()._apply(fn, recurse)
        finally:
            self._has_bias = has_bias

    @property
    def weight(self) -> torch.nn.Parameter:
        """(out_features, in_features), or this rank's part of it."""
        return self._basic_op(0).weight

    @weight.setter
    def weight(self, value: torch.nn.Parameter) -> None:
        self.register_parameter("weight", value)

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """(out_features,), or this rank's part of it."""
        return self._basic_op(1).bias if self._has_bias else None

    @bias.setter
    def bias(self, value: torch.nn.Parameter | None) -> None:
        self.register_parameter("bias", value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter; `weight` and `bias` with the basic operation that owns them."""
        if name not in _PARAMETERS:
            super().register_parameter(name, param)
        elif name == "weight" or self._has_bias:
            setattr(self._basic_op(_PARAMETERS.index(name)), name, param)
        elif param is not None:
            raise ValueError("Attempted to set bias parameter in Linear operation that does not have bias enabled")

    def state_dict(self, *, prefix: str = "", **kwargs: Any) -> Any:
        """The state without the aliases."""
        state_dict = super().state_dict(prefix=prefix, **kwargs)
        for name in _PARAMETERS:
            state_dict.pop(prefix + name, None)
        return state_dict

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str], *args: Any
    ) -> None:
        """The aliases need no values: the basic operations load theirs, and report what they miss."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)
        for name in _PARAMETERS:
            if prefix + name in missing_keys:
                missing_keys.remove(prefix + name)
