"""XLA's side of a custom call, in Python: a call frame in memory, and the functions that a handler asks."""

import ctypes

import numpy as np

from fuser.xla import ffi


class FakeRuntime:
    """What XLA passes to a handler, built in memory: a call frame, and the functions of its API in Python."""

    def __init__(self, operands=(), results=(), attributes=None, stage=ffi.EXECUTE):
        self.kept, self.errors, self.allocated, self.freed = [], [], [], []
        self.fails = None
        functions = {name: self._keep(ffi._FUNCTION(getattr(self, name))) for name in FakeRuntime.SERVICES}
        addresses = {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in functions.items()}
        self.api = self._keep(ffi.Api(struct_size=ctypes.sizeof(ffi.Api), **addresses))
        self.frame = ffi.CallFrame(
            struct_size=ctypes.sizeof(ffi.CallFrame),
            api=ctypes.addressof(self.api),
            context=4242,
            stage=stage,
            operands=self.arguments(operands),
            results=self.arguments(results),
            attributes=self.attributes(attributes or {}),
        )

    SERVICES = (
        "error_create",
        "error_get_message",
        "error_destroy",
        "stream_get",
        "device_ordinal_get",
        "device_memory_allocate",
        "device_memory_free",
    )

    def _keep(self, thing):
        self.kept.append(thing)
        return thing

    def _address(self, thing):
        return ctypes.addressof(self._keep(thing))

    def arguments(self, arrays):
        numbers = {name: number for number, name in ffi.DTYPES.items()}
        pointers = []
        for array in arrays:
            self._keep(array)
            dims = (ctypes.c_int64 * array.ndim)(*array.shape)
            raw = ffi._BUFFER.pack(48, 0, numbers[array.dtype.name], array.ctypes.data, array.ndim, self._address(dims))
            pointers.append(self._address(ctypes.create_string_buffer(raw, len(raw))))
        values = (ctypes.c_void_p * len(pointers))(*pointers)
        return ffi.Arguments(size=len(pointers), values=self._address(values))

    def attributes(self, named):
        kinds, names, values = [], [], []
        for name, value in sorted(named.items()):
            kind, address = self.attribute(value)
            kinds.append(kind)
            names.append(self.span(name))
            values.append(address)
        count = len(kinds)
        return ffi.Attributes(
            struct_size=ctypes.sizeof(ffi.Attributes),
            size=count,
            types=self._address((ctypes.c_int32 * count)(*kinds)),
            names=self._address((ctypes.c_void_p * count)(*names)),
            values=self._address((ctypes.c_void_p * count)(*values)),
        )

    def span(self, text):
        data = self._keep(ctypes.create_string_buffer(text.encode()))
        packed = ffi._SPAN.pack(ctypes.addressof(data), len(text.encode()))
        return self._address(ctypes.create_string_buffer(packed, len(packed)))

    def attribute(self, value):
        numbers = {name: number for number, name in ffi.DTYPES.items()}
        if isinstance(value, str):
            return 4, self.span(value)
        if isinstance(value, dict):
            return 2, self._address(self.attributes(value))
        self._keep(value := np.asarray(value))
        if value.ndim:
            packed = ffi._ARRAY_ATTRIBUTE.pack(numbers[value.dtype.name], value.size, value.ctypes.data)
        else:
            packed = ffi._SCALAR_ATTRIBUTE.pack(numbers[value.dtype.name], value.ctypes.data)
        return (1 if value.ndim else 3), self._address(ctypes.create_string_buffer(packed, len(packed)))

    def error_create(self, address):
        request = ffi.ErrorCreate.from_address(address)
        self.errors.append((request.code, request.message.decode()))
        return 99

    def error_get_message(self, address):
        ffi.ErrorMessage.from_address(address).message = self._keep(b"no such thing")

    def error_destroy(self, address):
        self.errors.append(("destroyed", ffi.ErrorDestroy.from_address(address).error))

    def stream_get(self, address):
        request = ffi.StreamGet.from_address(address)
        assert (request.struct_size, request.context) == (ctypes.sizeof(ffi.StreamGet), 4242)
        if self.fails:
            return 55
        request.stream = 0x7F00DEADBEEF

    def device_ordinal_get(self, address):
        ffi.DeviceOrdinalGet.from_address(address).ordinal = 3

    def device_memory_allocate(self, address):
        request = ffi.MemoryAllocate.from_address(address)
        assert request.alignment == 16
        self.allocated.append(request.size)
        request.data = 0x1000

    def device_memory_free(self, address):
        request = ffi.MemoryFree.from_address(address)
        self.freed.append((request.data, request.size))

    def call(self, handler):
        return handler(ctypes.addressof(self.frame))
