"""No quantization, where quantizers are expected: the tensor itself, in both directions.

A `CustomRecipe` keeps tensors in high precision with an `IdentityQuantizer`, and one direction of a tensor with a
`HybridQuantizer` of which it is a part. Products read what is held as the plain tensor that it is.

Behaviour: TE's tensor/identity_tensor.py and tensor/storage/identity_tensor_storage.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fuser import recipe as recipes
from fuser.dtypes import require_torch_tensor, torch_dtype
from fuser.quantization.quantizer import ValueQuantizer
from fuser.quantization.storage import DIRECTIONS, QUANTIZERS, BufferStorage, buffer_property, resolve_shape
from fuser.quantization.tensor import QuantizedTensor

__all__ = ["IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage"]


@dataclass(frozen=True, kw_only=True)
class IdentityBuffers:
    """What an identity tensor holds: `hp_data`, of `shape`, or None; `dtype` is the nominal one.

    `hp_data` is contiguous, as the wrapper tensor says: a tensor that is not is copied.
    """

    hp_data: torch.Tensor | None = None
    shape: tuple
    dtype: torch.dtype

    def __post_init__(self):
        if self.hp_data is not None:
            require_torch_tensor(self.hp_data, "hp_data")
            object.__setattr__(self, "hp_data", self.hp_data.contiguous())

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """name -> tensor, if it is there."""
        return {} if self.hp_data is None else {"hp_data": self.hp_data}

    @property
    def device(self) -> torch.device | None:
        """Where the tensor is; None without one."""
        return None if self.hp_data is None else self.hp_data.device

    def operand(self, columnwise: bool) -> torch.Tensor | None:
        """What a product reads: the plain tensor."""
        return self.hp_data


class IdentityTensorStorage(BufferStorage):
    """`_hp_data`: the tensor, in high precision. It is both copies."""

    buffers_class, data_fields = IdentityBuffers, ("hp_data",)
    _hp_data = buffer_property("hp_data")

    @classmethod
    def _buffers_of(cls, quantizer, hp_data, dtype):
        require_torch_tensor(hp_data, "hp_data")
        dtype = hp_data.dtype if dtype is None else torch_dtype(dtype, "fake_dtype")
        return IdentityBuffers(hp_data=hp_data, shape=tuple(hp_data.shape), dtype=dtype)

    @staticmethod
    def from_te(*, hp_data: torch.Tensor, fake_dtype: torch.dtype | None = None, quantizer: Any = None) -> Any:
        """The arguments of TE's constructor."""
        return quantizer, hp_data, fake_dtype

    def _described(self) -> str:
        return "not quantized"

    def _copies_hold_the_same_codes(self) -> bool:
        return False

    def get_usages(self) -> dict[str, bool]:
        """True for both directions, as long as there is data."""
        return dict.fromkeys(DIRECTIONS, self._hp_data is not None)

    def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """(the tensor, None)."""
        return self._hp_data, None

    def _dequantized(self, dtype, *, columnwise):
        self._require_data()
        return self._hp_data.to(self._dtype if dtype is None else dtype)

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Nothing to keep, make or drop: one tensor is both copies."""

    def viewed_buffers(self, shape: tuple) -> IdentityBuffers:
        """Of a view: the same memory, in any shape."""
        shape = resolve_shape(shape, self.numel())
        return self.map_buffers(lambda tensor: tensor.view(shape), shape=shape)

    def stored_format(self) -> tuple:
        """All identity tensors can take each other's data."""
        return (IdentityTensorStorage,)


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):  # type: ignore[misc]
    """A tensor in high precision that passes for a quantized one."""


class IdentityQuantizer(ValueQuantizer):
    """A quantizer that quantizes nothing.

    Args:
        dtype: what tensors are cast to, and what `make_empty` makes whatever it is asked for, as in TE; None keeps the
            dtype that is given. Without a cast, the result shares memory with an input that is contiguous.
        rowwise, columnwise: usages; the one tensor serves both.
    """

    tensor_class, storage_class = IdentityTensor, IdentityTensorStorage
    _recipe_class = recipes.CustomRecipe

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = None if dtype is None else torch_dtype(dtype)

    def settings(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {"dtype": self.dtype, **super().settings()}

    def quantize_buffers(
        self, tensor: torch.Tensor, *, rowwise: bool | None = None, columnwise: bool | None = None
    ) -> Any:
        """The tensor, in this quantizer's dtype."""
        if tensor.is_complex():
            raise TypeError(f"tensor must be real; got {tensor.dtype} of shape {tuple(tensor.shape)}")
        data = tensor.detach().to(tensor.dtype if self.dtype is None else self.dtype)
        return IdentityBuffers(hp_data=data, shape=tuple(data.shape), dtype=data.dtype)

    def _empty_buffers(self, shape, *, dtype, **options):
        dtype = self.dtype or dtype
        return IdentityBuffers(hp_data=torch.empty(shape, dtype=dtype, **options), shape=shape, dtype=dtype)

    def is_requantization_safe(self) -> bool:
        """True: values stay as they are."""
        return True


QUANTIZERS["IdentityQuantizer"] = IdentityQuantizer
