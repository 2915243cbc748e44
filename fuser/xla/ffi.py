"""XLA custom calls in Python: handlers of XLA's typed FFI written with ctypes. No compiler, no copies.

A handler is a C function that gets a call frame: operands and results as (address, shape, dtype), attributes, and the
execution context. `handler(function)` makes one of a Python function (Frame) -> None; exceptions become XLA errors with
their message. `register()` announces the handlers of this package under TE's target names, for "cpu" and "CUDA".

The structures mirror `xla/ffi/api/c_api.h`, API 0.1; XLA only ever appends fields, and a frame tells how long it is.
Sources: that header; NVIDIA Warp, `warp/_src/jax/xla_ffi.py`, which ships the same technique.
"""

import ctypes
import functools
import struct
import threading
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np

from fuser.xla.compute import ACTIVATION, FLAGS, GRADIENT, GROUPED, QUANTIZE, Buffer, Call, HostPlace, run
from fuser.xla.settings import ClampedSwigluParams

#: The version that handlers ask for. A runtime takes its own minor version and all before.
API_VERSION = (0, 1)
EXECUTE = 3
_METADATA_EXTENSION = 1
_ARRAY, _DICTIONARY, _SCALAR, _STRING = 1, 2, 3, 4
#: XLA's error codes.
INVALID_ARGUMENT, UNIMPLEMENTED, INTERNAL = 3, 12, 13

#: XLA's number of a dtype -> its name.
DTYPES = {
    1: "bool",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "uint8",
    7: "uint16",
    8: "uint32",
    9: "uint64",
    10: "float16",
    11: "float32",
    12: "float64",
    16: "bfloat16",
    19: "float8_e5m2",
    20: "float8_e4m3fn",
    32: "float4_e2m1fn",
    33: "float8_e8m0fnu",
}

#: XLA's number of a dtype -> how `struct` reads a scalar attribute of it.
_SCALARS = {
    number: struct.Struct("=" + letter)
    for number, letter in zip((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), "?bhiqBHIQefd", strict=True)
}


# --- structures -----------------------------------------------------------------------------------------


def _structure(name, *fields):
    """A struct of XLA's FFI: each begins with its size and a list of extensions."""
    return type(name, (Structure,), {"_fields_": [("struct_size", c_size_t), ("extension", c_void_p), *fields]})


class Extension(Structure):
    """First fields of every extension."""

    _fields_ = [("struct_size", c_size_t), ("type", c_int32), ("next", c_void_p)]


ApiVersion = _structure("ApiVersion", ("major", c_int32), ("minor", c_int32))


class Metadata(Structure):
    """What a handler tells about itself."""

    _fields_ = [("struct_size", c_size_t), ("api_version", ApiVersion), ("traits", c_uint32)]


class MetadataExtension(Structure):
    """The extension of a frame that asks for `Metadata`."""

    _fields_ = [("base", Extension), ("metadata", POINTER(Metadata))]


Arguments = _structure("Arguments", ("size", c_int64), ("types", c_void_p), ("values", c_void_p))
Attributes = _structure("Attributes", ("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("values", c_void_p))
ErrorCreate = _structure("ErrorCreate", ("message", c_char_p), ("code", c_int32))
ErrorMessage = _structure("ErrorMessage", ("error", c_void_p), ("message", c_char_p))
ErrorDestroy = _structure("ErrorDestroy", ("error", c_void_p))
StreamGet = _structure("StreamGet", ("context", c_void_p), ("stream", c_void_p))
DeviceOrdinalGet = _structure("DeviceOrdinalGet", ("context", c_void_p), ("ordinal", c_int32))
MemoryAllocate = _structure(
    "MemoryAllocate", ("context", c_void_p), ("size", c_size_t), ("alignment", c_size_t), ("data", c_void_p)
)
MemoryFree = _structure("MemoryFree", ("context", c_void_p), ("size", c_size_t), ("data", c_void_p))

#: XLA's functions, in the order of its table; those that are not used here are numbers.
_FUNCTION = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_API_FUNCTIONS = (
    "error_create",
    "error_get_message",
    "error_destroy",
    "handler_register",
    "stream_get",
    "type_register",
    "execution_context_get",
    "state_set",
    "state_get",
    "device_memory_allocate",
    "device_memory_free",
    "thread_pool_schedule",
    "thread_pool_num_threads",
    "future_create",
    "future_set_available",
    "future_set_error",
    "run_id_get",
    "device_ordinal_get",
)
Api = _structure("Api", ("version", ApiVersion), ("internal", c_void_p), *[(name, c_void_p) for name in _API_FUNCTIONS])
CallFrame = _structure(
    "CallFrame",
    ("api", c_void_p),
    ("context", c_void_p),
    ("stage", c_int32),
    ("operands", Arguments),
    ("results", Arguments),
    ("attributes", Attributes),
    ("future", c_void_p),
)


# --- decoding -------------------------------------------------------------------------------------------

# Buffers: struct_size, extension, dtype, data, rank, dims. `struct` reads them several times faster than ctypes does.
_BUFFER = struct.Struct("@NPiPqP")
_SPAN = struct.Struct("@PN")
_ARRAY_ATTRIBUTE = struct.Struct("@iNP")
_SCALAR_ATTRIBUTE = struct.Struct("@iP")
_read = ctypes.string_at


def _unpack(letter, address, count):
    """Return `count` numbers of a `struct` letter. `address` may be null if `count` is 0."""
    return struct.unpack(f"@{count}{letter}", _read(address, count * struct.calcsize(letter))) if count else ()


def decode_buffer(address):
    """Return the `Buffer` of an XLA_FFI_Buffer; its memory is the address of the data."""
    _, _, dtype, data, rank, dims = _BUFFER.unpack(_read(address, _BUFFER.size))
    if dtype not in DTYPES:
        raise TypeError(f"XLA's dtype number {dtype} is not supported")
    return Buffer(data, _unpack("q", dims, rank), DTYPES[dtype])


class Buffers:
    """The `Buffer`s of operands or results, decoded when they are asked for: most results of a call are not."""

    def __init__(self, arguments):
        self._addresses = _unpack("P", arguments.values, arguments.size)

    def __len__(self):
        return len(self._addresses)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [decode_buffer(address) for address in self._addresses[index]]
        return decode_buffer(self._addresses[index])


def decode_attributes(attributes):
    """Return name -> value: numbers, NumPy arrays, strings, and dicts of these."""
    arrays = ("i", attributes.types), ("P", attributes.names), ("P", attributes.values)
    entries = zip(*(_unpack(letter, address, attributes.size) for letter, address in arrays), strict=True)
    return {_text(name): _ATTRIBUTES[kind](value) for kind, name, value in entries}


def _text(address):
    data, length = _SPAN.unpack(_read(address, _SPAN.size))
    return _read(data, length).decode()


def _scalar(address):
    dtype, value = _SCALAR_ATTRIBUTE.unpack(_read(address, _SCALAR_ATTRIBUTE.size))
    number = _SCALARS[dtype]
    return number.unpack(_read(value, number.size))[0]


def _array(address):
    dtype, size, data = _ARRAY_ATTRIBUTE.unpack(_read(address, _ARRAY_ATTRIBUTE.size))
    dtype = np.dtype(DTYPES[dtype])
    return np.frombuffer(_read(data, size * dtype.itemsize), dtype)


_ATTRIBUTES = {
    _ARRAY: _array,
    _DICTIONARY: lambda address: decode_attributes(Attributes.from_address(address)),
    _SCALAR: _scalar,
    _STRING: _text,
}


class Frame:
    """A call: operands, results (`Buffer`s), attributes, and the runtime's services.

    Raises:
        RuntimeError: by the constructor, if the frame is shorter than the one known here; by services that fail.
    """

    def __init__(self, raw):
        if raw.struct_size < CallFrame.future.offset:
            raise RuntimeError(f"XLA's call frame has {raw.struct_size} bytes; {CallFrame.future.offset} are needed")
        self._raw = raw
        self.operands, self.results = Buffers(raw.operands), Buffers(raw.results)
        self.attributes = decode_attributes(raw.attributes)

    def _ask(self, function, request):
        """Call one of XLA's functions with a request, and return it filled in."""
        api = Api.from_address(self._raw.api)
        if api.struct_size < getattr(Api, function).offset + 8:
            raise NotImplementedError(f"this version of XLA's FFI has no {function}")
        request.struct_size, request.context = ctypes.sizeof(request), self._raw.context
        error = _FUNCTION(getattr(api, function))(ctypes.addressof(request))
        if error:
            raise RuntimeError(f"XLA's {function} failed: {_take_message(api, error)}")
        return request

    def stream(self):
        """Handle of the stream that XLA runs this call on: the CUstream, an int."""
        return self._ask("stream_get", StreamGet()).stream or 0

    def device_ordinal(self):
        """Number of the device."""
        return self._ask("device_ordinal_get", DeviceOrdinalGet()).ordinal

    def allocate(self, size):
        """Return the address of device memory for this call, 16-byte aligned; `free` it before the call returns."""
        return self._ask("device_memory_allocate", MemoryAllocate(size=size, alignment=16)).data

    def free(self, address, size):
        """Give memory back; XLA reuses it in the order of the stream."""
        self._ask("device_memory_free", MemoryFree(size=size, data=address))


def _take_message(api, error):
    """The message of an XLA error, which is destroyed."""
    request = ErrorMessage(struct_size=ctypes.sizeof(ErrorMessage), error=error)
    _FUNCTION(api.error_get_message)(ctypes.addressof(request))
    message = (request.message or b"").decode(errors="replace")
    destroy = ErrorDestroy(struct_size=ctypes.sizeof(ErrorDestroy), error=error)
    _FUNCTION(api.error_destroy)(ctypes.addressof(destroy))
    return message


# --- handlers -------------------------------------------------------------------------------------------


def handler(function):
    """Return a C function for `register_ffi_target` that calls `function(frame)` in the execute stage.

    Keep it alive as long as XLA may call it. Exceptions become XLA errors: ValueError and TypeError INVALID_ARGUMENT,
    NotImplementedError UNIMPLEMENTED, others INTERNAL.
    """

    def call(address):
        raw = CallFrame.from_address(address)
        if raw.extension and Extension.from_address(raw.extension).type == _METADATA_EXTENSION:
            metadata = MetadataExtension.from_address(raw.extension).metadata.contents
            metadata.api_version.major, metadata.api_version.minor = API_VERSION
            metadata.traits = 0
            return None
        if raw.stage != EXECUTE:
            return None
        try:
            function(Frame(raw))
        except BaseException as error:  # an interrupt too: else XLA would take the results for computed
            return _error(raw.api, error)
        return None

    return _FUNCTION(call)


def _error(api, error):
    """Make an XLA error of an exception."""
    code = INTERNAL
    if isinstance(error, ValueError | TypeError):
        code = INVALID_ARGUMENT
    elif isinstance(error, NotImplementedError):
        code = UNIMPLEMENTED
    try:
        message = f"{type(error).__name__}: {error}".encode(errors="replace")
    except Exception:  # an error that can't be shown must not leave the handler without an answer
        message = f"{type(error).__name__}, whose message can't be shown".encode()
    request = ErrorCreate(struct_size=ctypes.sizeof(ErrorCreate), message=message, code=code)
    return _FUNCTION(Api.from_address(api).error_create)(ctypes.addressof(request))


#: Parameters by their values: checking them takes longer than the rest of a call's attributes.
_parameters = functools.lru_cache(maxsize=1024)(ClampedSwigluParams)


def call_of(kind, attributes):
    """Return the `Call` of a frame's attributes, TE's: act_enum, scaling_mode, quantize_layout, act_params, is_dbias,
    output_amax_when_no_scaling, use_rht, stochastic_rounding; and exact. act_params are nested as TE's,
    {"clamped_swiglu": {...}}, or flat."""
    parameters = attributes.get("act_params", {})
    parameters = parameters.get("clamped_swiglu", parameters)
    return Call(
        kind,
        attributes.get("act_enum", 0),
        attributes["scaling_mode"],
        attributes["quantize_layout"],
        **{name: attributes.get(name, False) for name in FLAGS},
        parameters=_parameters(**parameters),
    )


def _compute(kind, frame, place):
    if frame.operands[-1].memory != frame.results[4].memory:
        raise ValueError("amax and updated_amax should be aliased")
    run(call_of(kind, frame.attributes), place, frame.operands, frame.results)


def on_cpu(kind, frame):
    """Compute a frame's call on host memory."""
    _compute(kind, frame, HostPlace())


def on_cuda(kind, frame):
    """Compute a frame's call on its GPU, on XLA's stream."""
    from fuser.xla.cuda import CudaPlace

    with CudaPlace(frame) as place:
        _compute(kind, frame, place)


#: Target name -> what it computes: TE's two, and this package's for tensors that no activation is applied to.
TARGETS = {
    "te_act_lu_ffi": ACTIVATION,
    "te_dact_dbias_quantize_ffi": GRADIENT,
    "fuser_quantize_ffi": QUANTIZE,
    "fuser_grouped_quantize_ffi": GROUPED,
}
TARGET_OF = {kind: target for target, kind in TARGETS.items()}
PLATFORMS = {"cpu": on_cpu, "CUDA": on_cuda}

#: Registered handlers, alive as long as the process: XLA keeps their addresses.
_registered: dict[Any, Any] = {}
_registering = threading.Lock()


def register():
    """Register every target for every platform, once a process."""
    if len(_registered) == len(PLATFORMS) * len(TARGETS):
        return
    import jax

    with _registering:
        for platform, function in PLATFORMS.items():
            for target, kind in TARGETS.items():
                if (platform, target) not in _registered:
                    made = handler(functools.partial(function, kind))
                    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(made), platform=platform)
                    _registered[platform, target] = made
