"""`Quantizer`: what turns a tensor into a quantized one. The formats are in `fuser.quantization.quantizers`.

A quantizer says how (`scaling()`), which copies (`rowwise_usage`, `columnwise_usage`) and as what (`internal`: a bare
storage, otherwise a `QuantizedTensor`). The cast itself is `fuser.dispatch.quantize`; a fused kernel that makes the
buffers itself hands them to `wrap`.

Behaviour: TE's quantized_tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from fuser import dispatch
from fuser.dispatch import Buffers
from fuser.dtypes import HIGH_PRECISION
from fuser.quantization.storage import DIRECTIONS, BufferStorage, QuantizedTensorStorage, deep_copy, shallow_copy
from fuser.tracing import rehearsing
from refops.arguments import require_flag, with_article
from refops.quantization.result import stored_layout

__all__ = ["Quantizer"]

#: Called as observer(quantizer, original, quantized) after each cast, `original` a function that returns the tensor;
#: `fuser.statistics` listens here.
quantization_observers: list[Callable[[Quantizer, Callable[[], torch.Tensor], Any], None]] = []


def observed(quantizer: Quantizer, original: Callable[[], torch.Tensor], quantized: Any) -> Any:
    """`quantized`, shown to the observers."""
    if not rehearsing():
        for observer in quantization_observers:
            observer(quantizer, original, quantized)
    return quantized


class Quantizer:
    """Builder of quantized tensors.

    Abstract (`TypeError`): a subclass with a `refops` scaling overrides `scaling()` and names `tensor_class` and
    `storage_class`; one with buffers of its own overrides `quantize_buffers` and `make_empty` instead; one with a
    format of its own `quantize_impl` or `quantize`, and `update_quantized` and `make_empty` if it has in-place updates
    and empty tensors.

    Attributes:
        rowwise_usage, columnwise_usage: which copies results have.
        internal: results are bare storages, without autograd.
        optimize_for_gemm: results are mainly read by GEMMs: block scales that these read in an order of their own
            (MXFP8's, NVFP4's) are stored in it, and `_with_gemm_swizzled_scales` of results is True. Values and views
            are the same; slices are plain.
    """

    tensor_class: ClassVar[Any] = None
    storage_class: ClassVar[Any] = None
    _recipe_class: ClassVar[type | None] = None
    #: Names of the attributes that are constructor arguments besides type and usages.
    _options: ClassVar[tuple[str, ...]] = ()

    rowwise_usage: bool
    columnwise_usage: bool
    internal: bool
    optimize_for_gemm: bool

    def __new__(cls, *args, **kwargs):
        ways = ("scaling", "quantize_impl", "quantize", "quantize_buffers", "_cast")
        if all(getattr(cls, name) is getattr(Quantizer, name) for name in ways):
            raise TypeError(f"Can't instantiate abstract class {cls.__name__} without scaling or quantize_impl")
        makes_buffers = all(getattr(cls, name) is getattr(Quantizer, name) for name in ("quantize_impl", "quantize"))
        if makes_buffers and (cls.tensor_class is None or cls.storage_class is None):
            raise TypeError(
                f"{cls.__name__} must name tensor_class and storage_class, which hold what scaling() says: for a "
                "scaling of refops BlockScaledTensor and BlockScaledTensorStorage of fuser.quantization"
            )
        return super().__new__(cls)

    def __init__(self, *, rowwise: bool, columnwise: bool):
        self.rowwise_usage = require_flag(rowwise, "rowwise")
        self.columnwise_usage = require_flag(columnwise, "columnwise")
        self.internal = False
        self.optimize_for_gemm = False

    def __repr__(self):
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings().items())
        return f"{type(self).__name__}({settings})"

    # --- for subclasses -----------------------------------------------------------------------------

    def scaling(self) -> Any:
        """The `refops` settings of one call. Not a property: with stochastic rounding every call has its own seed."""
        raise NotImplementedError(f"{type(self).__name__} class does not implement scaling function")

    def settings(self) -> dict[str, Any]:
        """Constructor arguments of an equal quantizer: plain values, no tensors and no process group."""
        return {**self.get_usages(), **{name: getattr(self, name) for name in self._options}}

    def check_shape(self, shape: Iterable[int]) -> None:
        """Raise `ValueError` unless a tensor of `shape` can be quantized."""

    def is_quantizable(self, tensor: Any) -> bool:
        """Whether the shape of a tensor suits TE's kernels for this format."""
        return True

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Record statistics of a tensor without quantizing it."""

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether an all-gather can move the rowwise copy alone."""
        return False

    def is_requantization_safe(self) -> bool:
        """Whether values that were quantized once stay as they are when they are quantized again."""
        return False

    def _get_compatible_recipe(self) -> type | None:
        """The recipe class whose quantizers these are, or None."""
        return self._recipe_class

    def layout_scaling(self) -> Any:
        """`scaling()` without a new seed: for shapes and formats, which no seed changes."""
        return self.scaling()

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, ...]:
        """Stored shape of the scales of a tensor of `shape`."""
        direction = "columnwise" if columnwise else "rowwise"
        return stored_layout(self.layout_scaling(), tuple(shape))[f"{direction}_scale_inv"][0]

    def get_columnwise_shape(self, shape: Iterable[int]) -> tuple[int, ...]:
        """Stored shape of the columnwise codes of a tensor of `shape`."""
        return stored_layout(self.layout_scaling(), tuple(shape))["columnwise_data"][0]

    # --- usage --------------------------------------------------------------------------------------

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose which copies later results have; None leaves a choice as it is."""
        if rowwise is not None:
            self.rowwise_usage = require_flag(rowwise, "rowwise")
        if columnwise is not None:
            self.columnwise_usage = require_flag(columnwise, "columnwise")

    def get_usages(self) -> dict[str, bool]:
        """{"rowwise": bool, "columnwise": bool}."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    # --- quantizing ---------------------------------------------------------------------------------

    def __call__(self, tensor: torch.Tensor) -> Any:
        """`quantize(tensor)`."""
        return self.quantize(tensor)

    @dispatch.untraced
    def quantize(self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """Quantize a tensor.

        Args:
            tensor: (..., K) float32, float16, bfloat16 or already quantized (it is dequantized first).
            out: quantized tensor or storage that takes the result, in place.
            dtype: nominal dtype of the result, by default that of `tensor`.

        Returns:
            `out`, or a new `QuantizedTensor` (a storage if `internal`). Gradients pass straight through to `tensor`.

        Raises:
            TypeError: another dtype. ValueError: a shape that the format does not take, or neither copy asked for.
        """
        if not isinstance(tensor, torch.Tensor | QuantizedTensorStorage):
            raise TypeError(f"tensor must be a torch tensor or a quantized storage; got {type(tensor).__name__}")
        if out is not None:
            return self.update_quantized(tensor, out)
        needs_grad = isinstance(tensor, torch.Tensor) and tensor.requires_grad
        if needs_grad and torch.is_grad_enabled() and not self.internal:
            return _StraightThrough.apply(tensor, lambda values: self._quantize_as(values, dtype))
        return self._quantize_as(tensor, dtype)

    def _quantize_as(self, tensor, dtype):
        result = self.quantize_impl(plain(tensor))
        if quantization_observers:
            observed(self, lambda: plain(tensor), result)
        if dtype is None or not isinstance(result, BufferStorage) or dtype == result.dtype:
            return result
        return type(result)(replace(result.buffers, dtype=dtype), quantizer=result._quantizer)

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        """Quantize a plain tensor, without autograd."""
        return self._wrap_checked(self.quantize_buffers(tensor))

    def quantize_buffers(
        self, tensor: torch.Tensor, *, rowwise: bool | None = None, columnwise: bool | None = None
    ) -> Buffers:
        """The `Buffers` of a plain tensor; the copies asked for, by default those of this quantizer's usage."""
        rowwise = self.rowwise_usage if rowwise is None else rowwise
        columnwise = self.columnwise_usage if columnwise is None else columnwise
        if not (rowwise or columnwise):
            raise ValueError(f"{type(self).__name__} must have row-wise or column-wise usage; got neither")
        self.check_shape(tensor.shape)
        return self._cast(tensor.detach(), rowwise, columnwise)

    def _cast(self, tensor: torch.Tensor, rowwise: bool, columnwise: bool) -> Buffers:
        return dispatch.quantize(tensor, self.scaling(), rowwise=rowwise, columnwise=columnwise)

    def wrap(self, buffers: Buffers) -> Any:
        """Make buffers, quantized with `scaling()`, a tensor (a storage if `internal`) that knows this quantizer.

        The tensor keeps a copy of the quantizer without its amax reduction group: later changes of usage don't reach
        it, and requantizing it never communicates.

        Raises:
            ValueError: a shape that the format does not take.
        """
        self.check_shape(buffers.shape)
        return self._wrap_checked(buffers)

    def _wrap_checked(self, buffers):
        """`wrap`, of a shape that was checked."""
        self._record(buffers)
        return self._wrapped(self._in_gemm_order(buffers))

    def _wrapped(self, buffers, requires_grad=False):
        quantizer = self.copy_for_result()
        if self.internal:
            return self.storage_class(buffers, quantizer=quantizer)
        return self.tensor_class(buffers, quantizer=quantizer, requires_grad=requires_grad)

    def _in_gemm_order(self, buffers):
        swizzles = isinstance(buffers, Buffers) and self._swizzles(buffers.scaling)
        return dispatch.swizzled(buffers) if swizzles else buffers

    def _swizzles(self, scaling):
        return self.optimize_for_gemm and scaling.layout.scale_order == "gemm"

    def _record(self, buffers: Buffers) -> None:
        """Keep statistics of what was quantized."""

    @dispatch.untraced
    def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize `src` into `dst`, in place: the copies that `dst` has, in its memory.

        Args:
            src: values in the shape of `dst`.
            dst: quantized tensor or storage; one without data gets the copies of this quantizer's usage.
            noop_flag: one element; a value other than 0 leaves `dst` as it is.

        Returns:
            `dst`.

        Raises:
            TypeError: `dst` is not of this quantizer's format. ValueError: shapes differ.
        """
        if self.storage_class is None or not isinstance(dst, self.storage_class):
            wanted = "quantized tensor" if self.storage_class is None else self.storage_class.__name__
            raise TypeError(f"dst must be {with_article(wanted)}; got {type(dst).__name__}")
        if tuple(src.shape) != tuple(dst.shape):
            raise ValueError(f"src must have the shape of dst, {tuple(dst.shape)}; got {tuple(src.shape)}")
        if noop_flag is not None and noop_flag.item() != 0:
            return dst
        usages = dst.get_usages()
        if not any(usages.values()):
            usages = self.get_usages()
        src = plain(src)
        if src.dtype not in HIGH_PRECISION:
            src = src.to(torch.float32)
        device = src.device if dst.buffers.device is None else dst.buffers.device
        buffers = self.quantize_buffers(src.to(device), **usages)
        self._record(buffers)
        dst.set_buffers(self._in_gemm_order(buffers))
        return dst

    def multi_quantize(self, list_of_tensors: Iterable[torch.Tensor]) -> list:
        """Quantize each tensor."""
        return [self(tensor) for tensor in list_of_tensors]

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A tensor (a storage if `internal`) of `shape` whose codes are unset and whose scales and amaxes are 0.

        Args:
            device: by default torch's default device (TE: the current GPU).
        """
        shape = tuple(int(size) for size in shape)
        self.check_shape(shape)
        buffers = self._empty_buffers(shape, dtype=dtype, device=device, pin_memory=pin_memory)
        return self._wrapped(buffers, requires_grad)

    def _empty_buffers(self, shape, *, dtype, **options):
        scaling, usages = self.layout_scaling(), self.get_usages()
        arrays: dict[str, Any] = {}
        for name, (array_shape, array_dtype) in stored_layout(scaling, shape).items():
            if any(usages[d] and d in name for d in DIRECTIONS):
                make = torch.empty if name.endswith("_data") else torch.zeros
                arrays[name] = make(array_shape, dtype=getattr(torch, array_dtype.name), **options)
        swizzled = self._swizzles(scaling)
        return Buffers(**arrays, scaling=scaling, shape=shape, dtype=dtype, with_gemm_swizzled_scales=swizzled)

    # --- copies, equality ----------------------------------------------------------------------------

    def copy(self) -> Any:
        """A shallow copy: usages are its own, scale and amax tensors are shared."""
        return shallow_copy(self)

    def copy_for_result(self) -> Any:
        """The copy that a quantized tensor keeps: without an amax reduction group."""
        return self.copy()

    def __deepcopy__(self, memo):
        # A process group has no copy: it is the same group of processes.
        return deep_copy(self, memo, shared=("amax_reduction_group",))


def plain(tensor):
    """A plain tensor of the values of `tensor`, detached; itself if it is one and needs no gradient."""
    if isinstance(tensor, QuantizedTensorStorage):
        with torch.no_grad():
            return tensor.dequantize()
    return tensor.detach() if tensor.requires_grad else tensor


class ValueQuantizer(Quantizer):
    """A quantizer without state: equal settings make equal quantizers, with equal hashes."""

    def _value(self):
        group = getattr(self, "amax_reduction_group", None)
        return (type(self), self.internal, self.optimize_for_gemm, id(group), *self.settings().items())

    def __eq__(self, other):
        return self._value() == other._value() if isinstance(other, ValueQuantizer) else NotImplemented

    def __hash__(self):
        return hash(self._value())


class _StraightThrough(torch.autograd.Function):
    """`function(tensor)`; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, tensor, function):
        return function(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None
