"""CUDA tensors for a torch that was built without CUDA: CPU tensors whose memory is the software GPU's.

    with installed():
        x = torch.zeros((4, 4), device="cuda:0")      # x.is_cuda, x.device, x.data_ptr() as on a GPU
        y = cuda_kernels.activation("silu", x)         # the kernel runs on the software GPU, in torch's current stream

torch's own operations run on the CPU, when they are called: each waits for the current stream of its device, and the
software GPU is told which bytes it uses in that stream, so that its report of work in no order covers them. Streams,
events, devices, threads and autograd are torch's own or behave as torch's. Its limits:

- CUDA graphs hold what the software GPU is asked to do: kernels, fills, copies. An operation of torch that computes
  something raises while a stream captures; views, `empty`, `zeros` and copies between tensors do not.
- Autograd runs the backward pass of these tensors in the thread that calls `backward`, as for CPU tensors, and in the
  current stream, not in the streams of the forward pass.
- A module's parameters are made on a device (`device="cuda"`), not moved to one: `Module.to("cuda")` keeps their class.
- C++ and the dispatcher see CPU tensors: what asks there, such as `torch.compile`, does not see a GPU. That holds for
  wrapper subclasses too (`fuser.QuantizedTensor`): torch without CUDA cannot put one of a GPU into an autograd graph.
"""

import ctypes
import threading
import weakref
from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_map

from cuda_kernels.emulator import driver_calls, loading
from cuda_kernels.emulator.driver_calls import ADDRESS, HANDLE, checked

SIZE = ctypes.c_size_t
#: Functions that make a tensor; those of `_IN_ORDER` leave the CPU out of it.
FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
_IN_ORDER = ("empty", "zeros")
_RELAXED, _NON_BLOCKING, _DISABLE_TIMING = 2, 1, 2
_original = {name: getattr(torch, name) for name in FACTORIES}
_cpu_to, _cpu_copy = torch.Tensor.to, torch.Tensor.copy_
_original_wrapper, _original_device = torch.Tensor._make_wrapper_subclass, torch._C.TensorBase.device
_local = threading.local()  # of a thread: .device, .streams (device -> handle of its current one), .graph


def call(name, *arguments):
    """Call the driver; DeviceError where it refuses, and no reset: a fault stays, as on a GPU."""
    code = getattr(loading.driver(), name)(*arguments)
    if code:
        said = ctypes.c_char_p()
        loading.driver().cuGetErrorString(code, ctypes.byref(said))
        raise driver_calls.DeviceError(said.value.decode())


# --- memory -----------------------------------------------------------------------------------------


def _allocate(size, device):
    """A buffer of a device; given back in the order of the current stream, as torch's allocator does.

    What is allocated while a stream captures lives as long as the graph, whose replays use it.
    """
    address, stream = ADDRESS(), _handle_of(device)
    capturing = _capturing(device)
    with driver_calls.current(device), _relaxed() if capturing else _nothing():
        if capturing:
            call("cuMemAlloc_v2", ctypes.byref(address), SIZE(size))
        else:
            call("cuMemAllocAsync", ctypes.byref(address), SIZE(size), HANDLE(stream))
    buffer = (ctypes.c_uint8 * size).from_address(address.value)
    weakref.finalize(buffer, _give_back, address, None if capturing else stream, device).atexit = False
    if capturing:
        _local.graph.kept.append(buffer)
    return buffer


def _give_back(address, stream, device):
    with driver_calls.current(device), _relaxed():
        if stream is None:
            loading.driver().cuMemFree_v2(address)
        else:
            loading.driver().cuMemFreeAsync(address, HANDLE(stream))


@contextmanager
def _nothing():
    yield


@contextmanager
def _relaxed():
    """Calls that a capture of this thread would forbid."""
    mode = ctypes.c_int(_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _empty(shape, dtype, device):
    """A tensor in the memory of a device, full of what nobody wrote."""
    meta = _original["empty"](shape, dtype=dtype, device="meta")
    size = meta.numel() * meta.element_size()
    if not size:
        return _posing(_original["empty"](shape, dtype=dtype), device)
    plain = torch.frombuffer(_allocate(size, device), dtype=torch.uint8).view(meta.dtype).reshape(meta.shape)
    return _posing(plain, device)


def _posing(plain, device):
    """A CPU tensor in the memory of a device as one of that device."""
    made = torch.Tensor._make_subclass(CudaTensor, plain)
    made.number = device
    return made


def _plain(value):
    """The CPU tensor behind one of a device, whose memory it shares."""
    with torch._C._DisableTorchDispatch():
        return value.as_subclass(torch.Tensor)


def _copied(value, device):
    """A tensor's copy on a device, in the order of the current stream."""
    if isinstance(value, CudaTensor):
        return _copy_between(_empty(value.shape, value.dtype, device), value)
    source = value.detach().contiguous()
    made = _empty(value.shape, value.dtype, device)
    size = source.numel() * source.element_size()
    if size:
        with driver_calls.current(device):
            pointers = ADDRESS(made.data_ptr()), HANDLE(source.data_ptr())
            call("cuMemcpyHtoDAsync_v2", *pointers, SIZE(size), HANDLE(_handle_of(device)))
    return made


def _copy_between(target, source):
    """Copy a tensor of a device to one of the same shape and dtype, which is contiguous, in the current stream."""
    source = source.contiguous()
    size = source.numel() * source.element_size()
    if size:
        with driver_calls.current(target.number):
            pointers = ADDRESS(target.data_ptr()), ADDRESS(source.data_ptr())
            call("cuMemcpyDtoDAsync_v2", *pointers, SIZE(size), HANDLE(_handle_of(target.number)))
    return target


# --- tensors ----------------------------------------------------------------------------------------


class CudaTensor(torch.Tensor):
    """A tensor on the software GPU. `number` is its device's."""

    number = 0
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: torch.device("cuda", self.number))
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Run an operation on the CPU, in the order of the current stream; its results are on the same device."""
        given = _Given(func, args, kwargs or {})
        return given.result()

    def cpu(self, memory_format=torch.preserve_format):
        """A copy on the host, after the work of the current stream."""
        return _on_host(self)

    def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
        """The tensor itself, or a copy on another device."""
        return self.to(torch.device("cuda", _number_of(device)))

    def numpy(self, **options):
        """Refused, as by torch."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self, **options):
        return f"{self.cpu()!r} on {self.device}"

    def __deepcopy__(self, memo):
        return self.detach().clone()


class _Given:
    """An operation of the dispatcher, and the tensors that it is given."""

    def __init__(self, func, args, kwargs):
        self.func, self.kwargs = func, dict(kwargs)
        self.tensors = {}  # id of a CPU tensor -> the tensor of a device that it stands for
        self.used = []  # (tensor of a device, whether it is written)
        schema = func._schema
        aliases = [one.alias_info for one in schema.returns]
        self.views = bool(aliases) and all(alias and not alias.is_write for alias in aliases)
        written = [bool(one.alias_info and one.alias_info.is_write) for one in schema.arguments]
        names = {one.name: number for number, one in enumerate(schema.arguments)}
        self.args = [tree_map(lambda one, n=n: self._take(one, written[n]), value) for n, value in enumerate(args)]
        for name, value in kwargs.items():
            self.kwargs[name] = tree_map(lambda one, n=name: self._take(one, written[names[n]]), value)
        self.device = self._common_device()
        if "device" in self.kwargs and torch.device(self.kwargs["device"] or "cpu").type == "cuda":
            self.device = _number_of(self.kwargs["device"])
            self.kwargs["device"] = torch.device("cpu")

    def _take(self, value, written):
        if not isinstance(value, CudaTensor):
            return value
        plain = _plain(value)
        self.tensors[id(plain)] = value
        self.used.append((value, written))
        return plain

    def _common_device(self):
        numbers = {value.number for value, _ in self.used}
        if len(numbers) > 1 and "copy" not in self.func.__name__:
            found = " and ".join(f"cuda:{number}" for number in sorted(numbers))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two: {found}")
        return self.used[0][0].number

    def result(self):
        """What the operation gives, on the device."""
        if not self.views:
            self._enter()
        result = self.func(*self.args, **self.kwargs)
        return tree_map(self._settled, result)

    def _enter(self):
        """Wait for the current stream, and tell it what is read and written there."""
        if _capturing(self.device):
            raise RuntimeError(f"{self.func} runs on the CPU and cannot be captured in a graph")
        stream = HANDLE(_handle_of(self.device))
        with driver_calls.current(self.device):
            for value, written in self.used:
                begin, size = _extent(value)
                if size:
                    label = f"torch's {self.func}".encode()
                    call("emulator_use", stream, label, ADDRESS(begin), SIZE(size), int(written))
            call("cuStreamSynchronize", stream)

    def _settled(self, value):
        if not isinstance(value, torch.Tensor) or isinstance(value, CudaTensor):
            return value
        if id(value) in self.tensors:
            return self.tensors[id(value)]
        if self.views or (value.numel() and _is_on_device(value)):
            return _posing(value, self.device)
        return _copied(value, self.device)


def _extent(value):
    """(first address, bytes) from a tensor's first element to its last."""
    if not value.numel():
        return 0, 0
    steps = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), (steps + 1) * value.element_size()


def _is_on_device(value):
    return loading.driver().cuMemGetAddressRange_v2(None, None, ADDRESS(value.data_ptr())) == 0


def _on_host(value):
    """A CPU tensor with what a device's tensor holds, after the work of the current stream."""
    stream = HANDLE(_handle_of(value.number))
    with driver_calls.current(value.number):
        begin, size = _extent(value)
        if size:
            call("emulator_use", stream, b"torch's copy to the host", ADDRESS(begin), SIZE(size), 0)
        call("cuStreamSynchronize", stream)
    return _plain(value.detach()).clone()


class _Moved(torch.autograd.Function):
    """A copy to another device; the gradient goes back."""

    @staticmethod
    def forward(ctx, value, device):
        ctx.before = value.device
        return _on_host(value) if device.type == "cpu" else _copied(value, device.index)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.before), None


def _to(self, *args, **options):
    """`torch.Tensor.to` for devices of both kinds."""
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if not args and "other" in options:
        other = options.pop("other")
        args = (other.device, other.dtype)
    copy = options.get("copy", False)
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **options)
    kept = {name: value for name, value in options.items() if name in ("memory_format",)}
    if device is not None and device.type == "cuda":
        device = torch.device("cuda", _number_of(device))
    elsewhere = device is not None and device != self.device
    involved = isinstance(self, CudaTensor) or (device is not None and device.type == "cuda")
    if not involved:
        return _cpu_to(self, *args, **options)
    moved = _Moved.apply(self, device) if elsewhere else self
    if dtype is not None and dtype != moved.dtype:
        return _cpu_to(moved, dtype, **kept)
    return moved.clone() if copy and not elsewhere else moved


def _copy_(self, source, non_blocking=False):
    """`torch.Tensor.copy_`: between contiguous tensors of devices a copy of the driver, which a graph may hold."""
    alike = self.shape == source.shape and self.dtype == source.dtype
    both = isinstance(self, CudaTensor) and isinstance(source, CudaTensor)
    if both and alike and self.is_contiguous() and not (self.requires_grad or source.requires_grad):
        return _copy_between(self, source)
    if isinstance(source, CudaTensor) != isinstance(self, CudaTensor):
        source = source.to(self.device)
    return _cpu_copy(self, source, non_blocking)


def _factory(name):
    def make(*args, device=None, requires_grad=False, **options):
        if device is None or torch.device(device).type != "cuda":
            given = {} if device is None else {"device": device}
            return _original[name](*args, requires_grad=requires_grad, **given, **options)
        number = _number_of(device)
        options.pop("pin_memory", None)
        if name in _IN_ORDER:
            meta = _original["empty"](*args, device="meta", **options)
            made = _empty(meta.shape, meta.dtype, number)
            if name == "zeros" and made.numel():
                _fill_with_zeros(made)
        else:
            made = _copied(_original[name](*args, device="cpu", **options), number)
        return made.requires_grad_(requires_grad)

    return make


def _fill_with_zeros(tensor):
    size = SIZE(tensor.numel() * tensor.element_size())
    with driver_calls.current(tensor.number):
        stream = HANDLE(_handle_of(tensor.number))
        call("cuMemsetD8Async", ADDRESS(tensor.data_ptr()), ctypes.c_uint8(0), size, stream)


def _wrapper(cls, size, *args, device=None, **options):
    """`torch.Tensor._make_wrapper_subclass`, which says of a tensor of a GPU that it is one of the CPU."""
    if device is None or torch.device(device).type != "cuda":
        return _original_wrapper(cls, size, *args, device=device, **options)
    made = _original_wrapper(cls, size, *args, device=torch.device("cpu"), **options)
    made.posing_as = torch.device("cuda", _number_of(device))
    return made


def _device_of(tensor):
    """`torch.Tensor.device`."""
    return getattr(tensor, "posing_as", None) or _original_device.__get__(tensor)


# --- devices, streams, events -----------------------------------------------------------------------


def _number_of(device):
    """The number of a device: an int, "cuda", "cuda:1", a torch.device, or None for the current one."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def current_device():
    """`torch.cuda.current_device`."""
    return getattr(_local, "device", 0)


def device_count():
    """`torch.cuda.device_count`."""
    return len(loading.settings().targets)


def _handle_of(device):
    """Handle of the current stream of a device in this thread."""
    return getattr(_local, "streams", {}).get(device, 0)


class Stream:
    """`torch.cuda.Stream`: it does not wait for the default stream. `cuda_stream` is the handle."""

    def __init__(self, device=None, *, handle=None):
        self.device_index = _number_of(device)
        self.device = torch.device("cuda", self.device_index)
        if handle is None:
            made = HANDLE()
            with driver_calls.current(self.device_index):
                call("cuStreamCreate", ctypes.byref(made), _NON_BLOCKING)
            handle = made.value
        self.cuda_stream = handle

    def __eq__(self, other):
        return isinstance(other, Stream) and (self.device, self.cuda_stream) == (other.device, other.cuda_stream)

    def __hash__(self):
        return hash((self.device_index, self.cuda_stream))

    def _call(self, name, *arguments):
        with driver_calls.current(self.device_index):
            call(name, *arguments)

    def synchronize(self):
        """Wait for its work."""
        self._call("cuStreamSynchronize", HANDLE(self.cuda_stream))

    def record_event(self, event=None):
        """Record an event in it."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        """Later work waits for an event."""
        self._call("cuStreamWaitEvent", HANDLE(self.cuda_stream), event.handle, 0)

    def wait_stream(self, other):
        """Later work waits for all work of another stream."""
        self.wait_event(other.record_event())


class Event:
    """`torch.cuda.Event`, made on the device on which it is recorded first."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self._flags = 0 if enable_timing else _DISABLE_TIMING
        self._device, self.handle = None, HANDLE()

    def _call(self, name, *arguments):
        with driver_calls.current(self._device):
            call(name, *arguments)

    def record(self, stream=None):
        """Record it in a stream, the current one if not given."""
        stream = stream or current_stream()
        if self._device is None:
            self._device = stream.device_index
            self._call("cuEventCreate", ctypes.byref(self.handle), self._flags)
        self._call("cuEventRecord", self.handle, HANDLE(stream.cuda_stream))

    def wait(self, stream=None):
        """Later work of a stream waits for it."""
        (stream or current_stream()).wait_event(self)

    def synchronize(self):
        """Wait for it."""
        self._call("cuEventSynchronize", self.handle)

    def elapsed_time(self, end):
        """Milliseconds until another event."""
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime_v2", ctypes.byref(milliseconds), self.handle, end.handle)
        return milliseconds.value


def current_stream(device=None):
    """`torch.cuda.current_stream`."""
    number = _number_of(device)
    return Stream(number, handle=_handle_of(number))


def default_stream(device=None):
    """`torch.cuda.default_stream`."""
    return Stream(_number_of(device), handle=0)


@contextmanager
def use_device(device):
    """`torch.cuda.device`."""
    before, _local.device = current_device(), _number_of(device)
    checked(loading.driver().cuCtxPushCurrent_v2(driver_calls.context(_local.device)))
    try:
        yield
    finally:
        loading.driver().cuCtxPopCurrent_v2(None)
        _local.device = before


def set_device(device):
    """`torch.cuda.set_device`."""
    _local.device = _number_of(device)
    checked(loading.driver().cuCtxSetCurrent(driver_calls.context(_local.device)))


@contextmanager
def use_stream(stream):
    """`torch.cuda.stream`."""
    if stream is None:
        yield
        return
    with use_device(stream.device_index):
        before = _handle_of(stream.device_index)
        _local.streams = getattr(_local, "streams", {}) | {stream.device_index: stream.cuda_stream}
        try:
            yield
        finally:
            _local.streams = _local.streams | {stream.device_index: before}


def synchronize(device=None):
    """`torch.cuda.synchronize`."""
    with driver_calls.current(_number_of(device)):
        call("cuCtxSynchronize")


def get_device_capability(device=None):
    """`torch.cuda.get_device_capability`."""
    return loading.settings().capabilities[_number_of(device)]


def mem_get_info(device=None):
    """`torch.cuda.mem_get_info`: (free, total) bytes."""
    free, total = SIZE(), SIZE()
    with driver_calls.current(_number_of(device)):
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


# --- graphs -----------------------------------------------------------------------------------------


def _capturing(device):
    status = ctypes.c_int()
    handle = _handle_of(device)
    if handle:
        with driver_calls.current(device):
            call("cuStreamIsCapturing", HANDLE(handle), ctypes.byref(status))
    return status.value != 0


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph=False):
        self.device, self._executable = current_device(), HANDLE()
        self.kept = []  # memory that was allocated for it

    def replay(self):
        """Launch it in the current stream."""
        with driver_calls.current(self.device):
            call("cuGraphLaunch", self._executable, HANDLE(_handle_of(self.device)))

    def begin(self, stream):
        """Begin to capture a stream."""
        call("cuStreamBeginCapture_v2", HANDLE(stream.cuda_stream), 0)

    def end(self, stream):
        """End it, and make an executable graph of what was captured."""
        graph = HANDLE()
        call("cuStreamEndCapture", HANDLE(stream.cuda_stream), ctypes.byref(graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_uint64(0))
        call("cuGraphDestroy", graph)


@contextmanager
def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    """`torch.cuda.graph`: what is launched inside becomes the graph, on a stream of its own if none is given."""
    synchronize()
    stream = stream or Stream()
    with use_stream(stream):
        cuda_graph.begin(stream)
        _local.graph = cuda_graph
        try:
            yield
        finally:
            cuda_graph.end(stream)


# --- putting it into torch --------------------------------------------------------------------------

_INHERITED = object()
_OF_CUDA = {
    "CUDAGraph": CUDAGraph,
    "Event": Event,
    "Stream": Stream,
    "_sleep": lambda cycles: None,
    "current_device": current_device,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "device": use_device,
    "device_count": device_count,
    "empty_cache": lambda: None,
    "get_device_capability": get_device_capability,
    "graph": graph,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: _capturing(current_device()),
    "mem_get_info": mem_get_info,
    "set_device": set_device,
    "stream": use_stream,
    "synchronize": synchronize,
}
_OF_TENSORS = {
    "_make_wrapper_subclass": staticmethod(_wrapper),
    "copy_": _copy_,
    "cuda": lambda self, device=None, **_: self.to(f"cuda:{_number_of(device)}"),
    "device": property(_device_of),
    "is_cuda": property(lambda self: _device_of(self).type == "cuda"),
    "to": _to,
}


@contextmanager
def installed():
    """A context in which torch has the tensors, streams and devices of this file."""
    changes = [(torch, name, _factory(name)) for name in FACTORIES]
    changes += [(torch.cuda, name, value) for name, value in _OF_CUDA.items()]
    changes += [(torch.Tensor, name, value) for name, value in _OF_TENSORS.items()]
    before = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
