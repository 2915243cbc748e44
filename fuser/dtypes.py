"""Element types by TE's names, and what each is called in torch and in `refops`.

    DType.kFloat8E4M3.torch          torch.float8_e4m3fn
    DType.kFloat8E4M3.format         refops.E4M3
    DType.of(torch.bfloat16)         DType.kBFloat16

`DType` has the names and values of `transformer_engine_torch.DType`. Nothing here computes.
"""

# ruff: noqa: N815  (the names are TE's)

from enum import IntEnum
from functools import cached_property
from typing import Any

import torch

import refops
from refops.arguments import say_who, shown


class DType(IntEnum):
    """Element types with TE's names and numbers (`NVTEDType`)."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the `DType` of a `DType`, its number, a torch dtype or a `refops` format.

        Raises:
            TypeError: anything else. ValueError: a number that stands for no type.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            if value not in cls._value2member_map_:
                raise ValueError(f"dtype must be a DType, 0 to {max(cls)}; got {value}")
            return cls(value)
        found = _FROM.get(value) if isinstance(value, torch.dtype | refops.ElementFormat) else None
        if found is None:
            raise TypeError(f"dtype must be a DType, a torch dtype or a refops format that TE has; got {shown(value)}")
        return found

    @cached_property
    def torch(self) -> torch.dtype:
        """The torch dtype; for kFloat4E2M1 the packed one, two elements per byte. ValueError if torch has none."""
        if self not in _TORCH:
            raise ValueError(f"torch {torch.__version__} has no dtype for {self.name}")
        return _TORCH[self]

    @cached_property
    def format(self) -> Any:
        """The `refops` format of an 8- or 4-bit float; ValueError for other types."""
        if self not in _FORMATS:
            raise ValueError(f"dtype must be one of {', '.join(d.name for d in _FORMATS)}; got {self.name}")
        return _FORMATS[self]


_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt16: torch.int16,
    DType.kInt32: torch.int32,
    DType.kInt64: torch.int64,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
# Newer than the oldest torch that the package runs on.
for _dtype, _name in ((DType.kFloat8E8M0, "float8_e8m0fnu"), (DType.kFloat4E2M1, "float4_e2m1fn_x2")):
    if hasattr(torch, _name):
        _TORCH[_dtype] = getattr(torch, _name)

_FORMATS = {
    DType.kFloat8E4M3: refops.E4M3,
    DType.kFloat8E5M2: refops.E5M2,
    DType.kFloat8E8M0: refops.E8M0,
    DType.kFloat4E2M1: refops.E2M1,
}
_FROM: dict[Any, DType] = {name: dtype for table in (_TORCH, _FORMATS) for dtype, name in table.items()}

#: The dtypes that ops compute in.
HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)


def torch_dtype(value, name="dtype"):
    """Return the torch dtype of a torch dtype, `DType` or number; TypeError or ValueError as `DType.of`, of `name`."""
    if isinstance(value, torch.dtype):
        return value
    try:
        return DType.of(value).torch
    except (TypeError, ValueError) as error:
        if name != "dtype":
            say_who(error, name)
        raise


def require_torch_tensor(value, name):
    """Raise TypeError unless it is a dense torch tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor; got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got {value.layout} of shape {tuple(value.shape)}")
