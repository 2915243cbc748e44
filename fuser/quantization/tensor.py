"""Quantized tensors as `torch.Tensor`s: what autograd, modules, optimizers and `torch.save` see.

Every operation without a handler works on the dequantized values and gives a plain tensor; one that writes into a
quantized tensor quantizes the new values into its memory. Views, clones, copies and moves between devices
keep the format; so do parts along dimension 0 that end between blocks, which is how FSDP shards them
(`fuser.quantization.sharding`).

Behaviour: TE's quantized_tensor.py and tensor/*.py, without its patch of `torch.nn.Module` (see
`KeepsQuantizedParameters`).
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fuser.dispatch import unswizzled, untraced
from fuser.dtypes import HIGH_PRECISION, DType
from fuser.quantization import sharding
from fuser.quantization.quantizer import Quantizer, ValueQuantizer, _StraightThrough
from fuser.quantization.steps import forget_values, keep_values, kept_values
from fuser.quantization.storage import (
    QUANTIZERS,
    BlockScaledTensorStorage,
    BufferStorage,
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
)
from fuser.torch_load import rebuild_quantized_tensor, register
from refops import scalings
from refops.arguments import shown, with_article
from refops.formats import FORMATS

__all__ = [
    "BlockScaledTensor",
    "Float8BlockwiseQTensor",
    "Float8Tensor",
    "KeepsQuantizedParameters",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "QuantizedTensor",
]

aten = torch.ops.aten
register()


#: Calls the storage's method where `torch.Tensor` has one of the same name, earlier in the MRO.
_STORAGE: Any = BufferStorage


class WrapperTensor(torch.Tensor):
    """A tensor whose data are in other tensors.

    Operations without a handler work on its values and give plain tensors; one that writes puts the new values back.
    """

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl
    #: aten operation -> function(operation, args, kwargs).
    _handlers: ClassVar[dict[Any, Any]] = {}

    def plain_values(self) -> torch.Tensor:
        """The plain tensor that is stood for."""
        raise NotImplementedError(f"{type(self).__name__} has no values of its own")

    def take_values(self, values: torch.Tensor) -> None:
        """Write `values`, of this shape, into the data."""
        raise NotImplementedError(f"{type(self).__name__} takes no values")

    def held_quantizers(self) -> list[Any]:
        """The quantizers of the data, for values that are written later."""
        raise NotImplementedError(f"{type(self).__name__} does not say which quantizers it holds")

    def alias(self) -> Any:
        """A tensor of the same data."""
        raise NotImplementedError(f"{type(self).__name__} has no views")

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """A tensor of what `function` makes of each plain tensor of the data; quantizers are shared."""
        raise NotImplementedError(f"{type(self).__name__} does not say in which tensors its data are")

    def copy_quantizers(self) -> None:
        """Keep copies of the quantizers, without amax reduction groups: ranks may clone, and write, alone."""
        raise NotImplementedError(f"{type(self).__name__} does not say which quantizers it holds")

    def expand_as(self, other: Any) -> Any:
        """An identity in the graph for `x.expand_as(x)`, the idiom that finds a parameter's gradient accumulator."""
        return _StraightThrough.apply(self, torch.Tensor.detach) if other is self else super().expand_as(other)

    def untyped_storage(self) -> Any:
        """Empty: the data are in other tensors."""
        return torch.UntypedStorage(0, device=self.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            composed = func.decompose(*args, **kwargs)  # elsewhere torch does that before it comes here
            if composed is not NotImplemented:
                return composed
            if _views_a_normal_tensor(func, args):  # the view is one too: torch gives both one version counter
                with torch.inference_mode(False), torch.no_grad():
                    return cls.__torch_dispatch__(func, types, args, kwargs)
        handler = cls._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if func.namespace == "c10d":
            raise NotImplementedError(
                f"{func} on {with_article(cls.__name__)}: give it the tensor's buffers, or its values"
            )
        if func._schema.is_mutable:
            return _run_in_place(func, args, kwargs)
        return _run_plain(func, args, kwargs)


def new_wrapper(
    cls: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, *, stride: Any = None, requires_grad: bool = False
) -> Any:
    """A tensor without memory, by default of the strides of a contiguous one."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype, layout=torch.strided, device=device, requires_grad=requires_grad
    )


class QuantizedTensor(WrapperTensor):
    """Base of tensors with quantized data: shape, nominal dtype and device of a contiguous tensor, without its memory.

    Concrete classes join it with a storage class, whose attributes they have. `float()`, `half()`, `bfloat16()` and
    `to(dtype=...)` with another dtype give plain tensors; `cpu()`, `to(device=...)`, `detach()`, `clone()`, `view(...)`
    keep the data quantized. Gradients are plain tensors of the nominal dtype.
    """

    buffers_class: ClassVar[Any]  # of the storage that a concrete class joins
    _quantizer: Any
    #: Of a slice: the tensor that it was taken from, and where it starts. Writes to the slice go there too.
    _slice_of: tuple["QuantizedTensor", int] | None = None

    def __new__(cls, *args: Any, requires_grad: bool = False, **fields: Any) -> Any:
        """Wrap `buffers` (with `quantizer`, or None) without a copy; or what TE's constructor takes.

        That is `shape` and `dtype`, then by name what the storage's takes (`from_te`).
        """
        if len(args) == 1 and isinstance(args[0], cls.buffers_class) and fields.keys() <= {"quantizer"}:
            buffers, quantizer = args[0], fields.get("quantizer")
        else:
            buffers, quantizer = _constructor_arguments(cls, args, fields)
        self = new_wrapper(cls, tuple(buffers.shape), buffers.dtype, buffers.device, requires_grad=requires_grad)
        self.buffers, self._quantizer = buffers, quantizer
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is done by `__new__`."""

    @classmethod
    def make_like(cls, tensor: Any, *, shape: Any = None, dtype: Any = None, requires_grad: bool = False) -> Any:
        """A tensor of the same data, with another nominal dtype or (like a view) another shape."""
        buffers = tensor.buffers if shape is None else tensor.viewed_buffers(tuple(shape))
        buffers = buffers if dtype is None else replace(buffers, dtype=dtype)
        made = type(tensor)(buffers, quantizer=tensor._quantizer, requires_grad=requires_grad)
        if tensor._slice_of is not None and shape is None:
            made._slice_of = tensor._slice_of
        return made

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """A tensor of the same data with another nominal dtype."""
        return self.make_like(self, dtype=dtype)

    @untraced
    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The plain tensor that is stood for, in the nominal dtype or `dtype`. Gradients pass straight through."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _StraightThrough.apply(self, lambda tensor: _STORAGE.dequantize(tensor, dtype=dtype))
        return _STORAGE.dequantize(self, dtype=dtype)

    def float(self) -> torch.Tensor:
        """Dequantize to float32."""
        return self.dequantize(dtype=torch.float32)

    def half(self) -> torch.Tensor:
        """Dequantize to float16."""
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self) -> torch.Tensor:
        """Dequantize to bfloat16."""
        return self.dequantize(dtype=torch.bfloat16)

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: Any = None) -> Any:
        """As the storage's; autograd sees an in-place change."""
        with torch.no_grad():
            _STORAGE.quantize_(self, tensor, noop_flag=noop_flag)
        if not self.is_inference():
            torch.autograd.graph.increment_version(self)
        return self

    def set_buffers(self, new: Any) -> None:
        """As the storage's. Of a slice the rows are also written where they were taken from, before anything changes.

        Raises:
            RuntimeError: a scale of the whole tensor would have to change, and with it the other rows; or the whole
                tensor has a copy that can't be made for these rows.
        """
        self._write_through(new)
        _STORAGE.set_buffers(self, new)

    def _write_through(self, new):
        """A slice remembers where it was taken from. It does not see what is written there later."""
        if self._slice_of is None or self.numel() == 0:
            return
        whole, start = self._slice_of
        new = unswizzled(new) if new.with_gemm_swizzled_scales else new
        part = type(self)(new, quantizer=self._quantizer)
        if part.stored_format() != whole.stored_format():
            raise RuntimeError(f"rows in {part.buffers.scaling} can't be written into {whole.buffers.scaling}")
        part.update_usage(**{f"{direction}_usage": used for direction, used in whole.get_usages().items()})
        sharding.put_rows(whole.buffers, start, part.buffers)
        forget_values(whole)
        whole._write_through(whole.buffers)

    def plain_values(self) -> torch.Tensor:
        """As `dequantize`, without autograd."""
        return _STORAGE.dequantize(self)

    def take_values(self, values: torch.Tensor) -> None:
        """As `quantize_`, without autograd."""
        _STORAGE.quantize_(self, values)

    def held_quantizers(self) -> list[Any]:
        """Its own, if it has one."""
        return [] if self._quantizer is None else [self._quantizer]

    def alias(self) -> Any:
        """`make_like(self)`."""
        return self.make_like(self)

    def mapped(self: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """A tensor of buffers that `function` makes of those of this one."""
        return type(self)(self.map_buffers(function), quantizer=self._quantizer)

    def copy_quantizers(self) -> None:
        """Keep a copy of the quantizer, without an amax reduction group."""
        self._quantizer = None if self._quantizer is None else self._quantizer.copy_for_result()

    @property
    def data(self) -> Any:
        """As `torch.Tensor.data`: detached, of the same data. Assigning a plain tensor quantizes its values.

        If they equal the present values, in any dtype (as after `half()`), codes and scales stay.
        """
        return self.detach()

    @data.setter
    def data(self, value):
        self._slice_of = None  # other memory now, as of a plain tensor
        with torch.no_grad():
            if isinstance(value, QuantizedTensor):
                if type(value) is not type(self):
                    wanted = with_article(type(self).__name__)
                    raise TypeError(f"data must be {wanted} or a plain tensor; got {type(value).__name__}")
                if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
                    torch._C.TensorBase.data.__set__(self, value.detach())
                self.buffers = value.buffers
                self._quantizer = self._quantizer if value._quantizer is None else value._quantizer
            elif self._stands_for(value):
                if value.dtype != self.dtype:
                    self.data = self.to_dtype(value.dtype)
            elif value.shape != self.shape or value.device != self.device or value.dtype != self.dtype:
                quantizer = self._get_quantizer().copy()
                quantizer.set_usage(**self.get_usages())
                quantizer.internal = False
                self.data = quantizer(value)
            else:
                _STORAGE.quantize_(self, value)

    def _stands_for(self, value):
        if value.shape != self.shape or value.device != self.device or value.device.type == "meta":
            return False
        if value.dtype not in HIGH_PRECISION or not any(self.get_usages().values()):
            return False
        return torch.equal(value, _STORAGE.dequantize(self, dtype=value.dtype))

    def __repr__(self, *, tensor_contents=None):
        copies = " + ".join(d for d, made in self.get_usages().items() if made) or "no data"
        readable = any(self.get_usages().values()) and self.device.type in ("cpu", "cuda")
        values = _STORAGE.dequantize(self) if readable else f"shape={tuple(self.shape)}, {self.device}"
        return f"{type(self).__name__}({values}, {copies}, {self._described()}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
            )
        duplicate = type(self)(
            self.map_buffers(lambda tensor: copy.deepcopy(tensor, memo)),
            quantizer=copy.deepcopy(self._quantizer, memo),
            requires_grad=self.requires_grad,
        )
        memo[id(self)] = duplicate
        if self.grad is not None:
            duplicate.grad = copy.deepcopy(self.grad, memo)
        not_own = ("buffers", "_quantizer", "_slice_of")
        own = {name: value for name, value in self.__dict__.items() if name not in not_own}
        duplicate.__dict__.update(copy.deepcopy(own, memo))
        return duplicate

    def __reduce_ex__(self, protocol):
        return rebuild_quantized_tensor, (
            _name_of_class(type(self)),
            self._saved_fields(),
            _scaling_as_plain(getattr(self.buffers, "scaling", None)),
            tuple(self.shape),
            self.dtype,
            getattr(self.buffers, "with_gemm_swizzled_scales", False),
            _quantizer_as_plain(self._quantizer),
            self.requires_grad,
            getattr(self, "_is_param", False),
        )

    @property
    def __tensor_flatten__(self):
        """Hidden from torch (storages have it): torch.compile would trace into buffers that only kernels understand.

        Without it the compiler leaves code that touches a quantized tensor to Python, with the same results.
        """
        raise AttributeError("__tensor_flatten__: quantized tensors are not traced by torch.compile")

    def fsdp_pre_all_gather(
        self, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        """Called by FSDP2 on a shard: (arrays to gather along dimension 0, metadata for `fsdp_post_all_gather`).

        At the first call the quantizer begins to take amaxes over the ranks of `mesh`, where scales are per tensor.

        Raises:
            ValueError: `orig_size` can't be sharded in this format; the message names parameter and rule.
        """
        return sharding.pre_all_gather(self, mesh, orig_size, module)

    def fsdp_post_all_gather(self, all_gather_outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        """Called by FSDP2 with what was gathered: (the whole tensor, its arrays that are no views of that).

        `out`: the tensor of an earlier call. It takes the new data, in its own memory; nothing is returned.

        Raises:
            RuntimeError: shards were quantized with different scales.
            ValueError: the operation follows a recipe with other blocks now.
        """
        return sharding.post_all_gather(self, all_gather_outputs, metadata, param_dtype, out)


def _says_the_same(name, given, value):
    """Whether an argument is the dtype, device or stride that the others say."""
    if name == "fake_dtype":
        return given is value
    if name == "device":
        return isinstance(given, str | torch.device) and torch.device(given) == value
    return isinstance(given, tuple | list) and tuple(given) == value


def _constructor_arguments(cls, args, fields):
    """(buffers, quantizer) of a constructor's arguments: those here, or TE's, which begin with shape and dtype."""
    if args and isinstance(args[0], cls.buffers_class):
        return cls.constructor_arguments(args, fields)
    own = dict(zip(("shape", "dtype"), args, strict=False))
    own |= {name: fields.pop(name) for name in ("shape", "dtype", "fake_dtype", "device", "stride") if name in fields}
    buffers, quantizer = cls.constructor_arguments((), fields)
    shape, dtype = tuple(own.get("shape", buffers.shape)), own.get("dtype", buffers.dtype)
    wanted = {"fake_dtype": dtype, "device": buffers.device, "stride": torch.empty(shape, device="meta").stride()}
    for name, value in wanted.items():
        given = own.get(name)
        if given is not None and not _says_the_same(name, given, value):
            raise ValueError(f"{name} must be {value}, as the other arguments say; got {shown(given)}")
    if shape != buffers.shape:
        buffers = BufferStorage(buffers).viewed_buffers(shape)
    return replace(buffers, dtype=dtype), quantizer


# --- dispatch -------------------------------------------------------------------------------------


def _views_a_normal_tensor(func, args):
    """Whether torch takes the result of an operation for a view of a tensor that was made without inference mode."""
    views = any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
    return views and not args[0].is_inference()


def _plain(value):
    if not isinstance(value, WrapperTensor):
        return value
    kept = kept_values(value)
    return value.plain_values() if kept is None else kept


def _run_plain(func, args, kwargs):
    """Run an operation on the values of its arguments."""
    return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _run_in_place(func, args, kwargs):
    """Run an operation that writes on the values of its arguments, and write the new ones into those that changed."""
    written = []

    def unwrap(argument, value):
        writes = argument.alias_info is not None and argument.alias_info.is_write

        def unwrap_one(item):
            plain = _plain(item)
            if writes and plain is not item:
                written.append((item, plain))
            return plain

        return tree_map(unwrap_one, value)

    parameters = func._schema.arguments
    named = {parameter.name: parameter for parameter in parameters}
    plain_args = [unwrap(parameter, value) for parameter, value in zip(parameters, args, strict=False)]
    plain_kwargs = {name: unwrap(named[name], value) for name, value in kwargs.items()}
    result = func(*plain_args, **plain_kwargs)
    for wrapper, plain in written:
        wrapper.take_values(plain)
        keep_values(wrapper, plain)
    owners = {id(plain): wrapper for wrapper, plain in written}
    return tree_map(lambda item: owners.get(id(item), item), result)


def _detach(func, args, kwargs):
    return args[0].alias()


def _clone(func, args, kwargs):
    cloned = args[0].mapped(torch.clone)
    cloned.copy_quantizers()
    return cloned


def _to_copy(func, args, kwargs):
    (tensor,) = args
    if kwargs.get("dtype") not in (None, tensor.dtype):
        return _run_plain(func, args, kwargs)
    device, non_blocking = kwargs.get("device") or tensor.device, kwargs.get("non_blocking", False)
    return tensor.mapped(lambda t: t.to(device, non_blocking=non_blocking, copy=True))


WrapperTensor._handlers = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
}


def _view(func, args, kwargs):
    tensor, shape = args
    try:
        return QuantizedTensor.make_like(tensor, shape=shape)
    except ValueError:  # a last dimension that blocks don't allow: the values in that shape
        return _run_plain(func, args, kwargs)


def _empty_like(func, args, kwargs):
    """`empty_like(tensor)` and `tensor.new_empty(shape)`: quantized where the format takes shape and dtype."""
    tensor = args[0]
    shape = tuple(args[1]) if len(args) > 1 else tuple(tensor.shape)
    dtype = kwargs.get("dtype") or tensor.dtype
    if tensor._quantizer is None or dtype not in HIGH_PRECISION:
        return _run_plain(func, args, kwargs)
    quantizer = tensor._quantizer.copy()
    quantizer.set_usage(**tensor.get_usages())
    quantizer.internal = False
    try:
        return quantizer.make_empty(shape, dtype=dtype, device=kwargs.get("device") or tensor.device)
    except ValueError:
        return _run_plain(func, args, kwargs)


def _new_zeros(func, args, kwargs):
    """Quantized in the shape of a part that `_split` gives, else plain."""
    tensor, (rows, *others) = args[0], args[1] or (0,)
    fits = rows and tuple(others) == tuple(tensor.shape[1:]) and tensor.shape[0] % rows == 0
    if not fits or sharding.cut_obstacle(tensor.buffers, [rows]) is not None:
        return torch.zeros(args[1], **{"dtype": tensor.dtype, "device": tensor.device} | kwargs)
    made = _empty_like(func, args, kwargs)
    if isinstance(made, QuantizedTensor):
        for array in made.buffers.tensors.values():
            array.zero_()
    return made


def _split(func, args, kwargs):
    """Parts along dimension 0 stay quantized where all end between blocks and are equal; they are copies."""
    tensor, sizes, dim = (*args, kwargs.get("dim", 0))[:3]
    count = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [sizes] * (count // sizes) + [count % sizes] * (count % sizes > 0) if sizes else [0]
    obstacle = sharding.cut_obstacle(tensor.buffers, sizes, dim)
    if obstacle is None and len(set(sizes)) > 1:
        obstacle = f"parts must have the same number of rows; they have {', '.join(map(str, sizes))}"
    if obstacle is not None:
        if isinstance(tensor, torch.nn.Parameter):
            message = f"{type(tensor).__name__} of shape {tuple(tensor.shape)} is split in high precision: {obstacle}"
            warnings.warn(message, UserWarning, stacklevel=2)
        return _run_plain(func, args, kwargs)
    ends = list(itertools.accumulate(sizes))
    return [_rows(tensor, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _rows(tensor, start, stop):
    quantizer = None if tensor._quantizer is None else tensor._quantizer.copy_for_result()
    return type(tensor)(sharding.take_rows(tensor.buffers, start, stop), quantizer=quantizer)


def _slice(func, args, kwargs):
    tensor, *given = args
    given = dict(zip(("dim", "start", "end", "step"), given, strict=False)) | kwargs
    dim = given.get("dim", 0)
    start, stop, step = slice(given.get("start"), given.get("end"), given.get("step")).indices(tensor.shape[dim])
    if (start, stop, step) == (0, tensor.shape[dim], 1):
        return QuantizedTensor.make_like(tensor)
    if step != 1 or stop < start or sharding.cut_obstacle(tensor.buffers, [start, stop - start], dim) is not None:
        return _run_plain(func, args, kwargs)
    part = _rows(tensor, start, stop)
    part._slice_of = tensor, start
    return part


def _as_strided(func, args, kwargs):
    tensor, shape, strides = args[:3]
    same = (tuple(shape), tuple(strides)) == (tuple(tensor.shape), tensor.stride())
    if same and not (args[3] if len(args) > 3 else kwargs.get("storage_offset")):
        return QuantizedTensor.make_like(tensor)
    return _run_plain(func, args, kwargs)


def _copy(func, args, kwargs):
    destination, source = args[:2]
    if not isinstance(destination, QuantizedTensor):
        dtype = destination.dtype if destination.dtype in HIGH_PRECISION else torch.float32
        destination.copy_(_STORAGE.dequantize(source, dtype=dtype))
        return destination
    buffers = _buffers_for(destination, source) if isinstance(source, QuantizedTensor) else None
    if buffers is not None:
        destination.set_buffers(buffers)
    else:
        values = _plain(source).expand(destination.shape)
        _STORAGE.quantize_(destination, values)
        keep_values(destination, values, copy=True)
    return destination


def _collective(func, args, kwargs):
    """A collective of torch.distributed on values; what it writes to, its first argument, is quantized anew."""
    outputs, *inputs = args
    plain = tree_map(_plain, outputs)
    _, work = func(plain, *tree_map(_plain, inputs), **kwargs)
    work.wait()
    for quantized, values in zip(tree_leaves(outputs), tree_leaves(plain), strict=True):
        if quantized is not values:
            _STORAGE.quantize_(quantized, values)
    return outputs, work


def _buffers_for(destination, source):
    """The data of `source` in the copies that `destination` has; None if they can't be taken as they are.

    TE takes them from a tensor with a quantizer of the same type and with the same copies. One from a file may have no
    quantizer, and a copy more or less (where one follows from the other) changes no code: both are taken too.
    """
    types = {type(t._quantizer) for t in (destination, source) if t._quantizer is not None}
    usages = destination.get_usages()
    if len(types) > 1 or not any(usages.values()) or source.shape != destination.shape:
        return None
    if type(source) is not type(destination) or source.stored_format() != destination.stored_format():
        return None
    view = QuantizedTensor.make_like(source)
    try:
        view.update_usage(rowwise_usage=usages["rowwise"], columnwise_usage=usages["columnwise"])
    except RuntimeError:  # a copy is missing and its codes can't be told from the other's
        return None
    return view.buffers


QuantizedTensor._handlers = WrapperTensor._handlers | {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._pin_memory.default: lambda func, args, kwargs: args[0].mapped(torch.Tensor.pin_memory),
    aten.empty_like.default: _empty_like,
    aten.new_empty.default: _empty_like,
    aten.new_zeros.default: _new_zeros,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.slice.Tensor: _slice,
    aten.as_strided.default: _as_strided,
    aten.copy_.default: _copy,
    aten.numel.default: lambda func, args, kwargs: args[0].shape.numel(),
    aten.is_pinned.default: lambda func, args, kwargs: all(t.is_pinned() for t in args[0].buffers.tensors.values()),
}

if torch.distributed.is_available():
    _COLLECTIVES = "broadcast_", "allreduce_", "allgather_", "_allgather_base_", "scatter_", "reduce_scatter_"
    QuantizedTensor._handlers.update((getattr(torch.ops.c10d, name).default, _collective) for name in _COLLECTIVES)


# --- formats --------------------------------------------------------------------------------------

# Ignored: `size` and `view` have two definitions, torch's (more overloads than hints here can say) is the one in force.


class Float8Tensor(QuantizedTensor, Float8TensorStorage):  # type: ignore[misc]
    """FP8 with one scale (delayed or current scaling)."""


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):  # type: ignore[misc]
    """FP8 with an E8M0 scale for 32 elements."""


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):  # type: ignore[misc]
    """FP8 with float32 scales for 1x128 elements or 128x128 tiles."""


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):  # type: ignore[misc]
    """E2M1 with an E4M3 scale for 16 elements and a float32 amax for the tensor."""


class BlockScaledTensor(QuantizedTensor, BlockScaledTensorStorage):  # type: ignore[misc]
    """Blocks with scales of their own, by any declared scaling."""


# --- files ----------------------------------------------------------------------------------------


def _scaling_as_plain(scaling):
    """The settings as a dict of strings and numbers, and of formats by name. Not what plays no part in equality."""
    if scaling is None:
        return None
    plain = {f.name: getattr(scaling, f.name) for f in fields(scaling) if f.compare}
    for name, value in plain.items():
        if value in FORMATS.values():
            plain[name] = {"format": value.name}
    return {"class": type(scaling).__name__, **plain}


def _scaling_from_plain(plain):
    settings = dict(plain)
    by_name = {cls.__name__: cls for cls in scalings.SCALINGS}
    name = settings.pop("class")
    if name not in by_name:
        raise ValueError(f"the file has a tensor in {name}, a scaling that refops.scalings does not declare")
    for field, value in settings.items():
        if field == "fmt" and isinstance(value, str):  # files of version 0.1.0
            value = {"format": value}
        if isinstance(value, dict):
            settings[field] = FORMATS[value["format"]]
    return by_name[name](**settings)


def _quantizer_as_plain(quantizer):
    """Class and settings; None for delayed scaling (its scale and amax belong to the model's recipe state) and for
    quantizers that are not of this package."""
    if type(quantizer) not in QUANTIZERS.values() or not isinstance(quantizer, ValueQuantizer):
        return None
    settings = {name: int(v) if isinstance(v, DType) else v for name, v in quantizer.settings().items()}
    if "scaling" in settings:
        settings["scaling"] = _scaling_as_plain(settings["scaling"])
    for name, part in settings.items():
        if isinstance(part, Quantizer):
            settings[name] = _quantizer_as_plain(part)
            if settings[name] is None:
                return None
    return {"class": type(quantizer).__name__, **settings}


def _quantizer_from_plain(plain):
    if plain is None:
        return None
    settings = dict(plain)
    if "scaling" in settings:
        settings["scaling"] = _scaling_from_plain(settings["scaling"])
    for name, part in settings.items():
        if isinstance(part, dict):
            settings[name] = _quantizer_from_plain(part)
    return QUANTIZERS[settings.pop("class")](**settings)


def _made_by_name():
    """Name -> class, of the tensors of this package."""
    return {cls.tensor_class.__name__: cls.tensor_class for cls in QUANTIZERS.values()}


def _name_of_class(kind):
    """The class that a tensor is loaded as: of a caller's subclass the base that is here, as in TE."""
    known = [base.__name__ for base in kind.__mro__ if base in _made_by_name().values()]
    if not known:
        raise TypeError(f"{kind.__name__} can't be pickled: it derives from none of {', '.join(_made_by_name())}")
    return known[0]


def rebuild(name, tensors, scaling, shape, dtype, with_gemm_swizzled_scales, quantizer, requires_grad, is_parameter):
    """The tensor that `__reduce_ex__` took apart, for `torch.load`. The arguments are tensors, strings and numbers."""
    settings: dict[str, Any] = {"shape": tuple(shape), "dtype": dtype}
    if scaling is not None:
        settings |= {"scaling": _scaling_from_plain(scaling), "with_gemm_swizzled_scales": with_gemm_swizzled_scales}
    made = _made_by_name()[name]
    buffers = made.buffers_class(**tensors, **settings)
    tensor = made(buffers, quantizer=_quantizer_from_plain(quantizer), requires_grad=requires_grad)
    return torch.nn.Parameter(tensor, requires_grad=requires_grad) if is_parameter else tensor


# --- modules --------------------------------------------------------------------------------------


class KeepsQuantizedParameters:
    """Mixin for a `torch.nn.Module` (before it in the bases): casts and moves keep quantized parameters quantized.

    `module.half()` gives a quantized parameter another nominal dtype, `module.to(device)` moves its buffers; the
    parameter stays the same object and its codes the same. TE replaces `torch.nn.Module.half` and its kin for all
    modules of the process; here `_apply`, through which all of them go (also those of a containing module), is
    overridden where it matters. In a module without the mixin a cast assigns the plain tensor of the new dtype to
    `parameter.data`, which keeps codes and scales too, but dequantizes to see that it may.
    """

    def _apply(self, fn, recurse=True):
        quantized = {name: p for name, p in self._parameters.items() if isinstance(p, WrapperTensor)}
        _check_casts(self, fn)
        self._parameters.update(dict.fromkeys(quantized))
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(quantized)
        for parameter in quantized.values():
            _apply_to_quantized(parameter, fn)
        return self


def _check_casts(module, fn):
    """Raise before anything is cast, for a quantized parameter that can't have its new dtype."""
    for name, parameter in module._parameters.items():
        shard = getattr(parameter, "_local_tensor", None)
        quantized = shard if isinstance(shard, QuantizedTensor) else parameter
        if not isinstance(quantized, QuantizedTensor):
            continue
        dtype = fn(torch.empty(0, dtype=quantized.dtype, device=quantized.device)).dtype
        if dtype not in HIGH_PRECISION:
            raise TypeError(
                f"dtype of {type(module).__name__}.{name}, which is quantized, must be float32, float16 or bfloat16; "
                f"got {dtype}"
            )
        if quantized is shard and dtype != shard.dtype:
            raise RuntimeError(
                f"{type(module).__name__}.{name} is sharded and quantized: cast it from {shard.dtype} to {dtype} "
                "before fully_shard"
            )


def _apply_to_quantized(parameter, fn):
    """Give `parameter` the dtype and device that `fn` gives a plain tensor like it."""
    with torch.no_grad():
        target = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
        if (target.dtype, target.device) == (parameter.dtype, parameter.device):
            return
        grad, parameter.grad = parameter.grad, None
        move = torch.empty_like if parameter.is_meta else torch.Tensor.to  # from meta: a module's to_empty
        converted = move(parameter, device=target.device).to_dtype(target.dtype)
        if torch._has_compatible_shallow_copy_type(parameter, converted):
            parameter.data = converted
        else:  # to or from the meta device
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(converted, requires_grad=parameter.requires_grad))
        parameter.grad = None if grad is None else fn(grad)
