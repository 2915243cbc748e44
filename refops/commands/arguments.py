"""Turn words of the command line into operations, settings and arrays, or into one line that names the wrong word."""

import argparse
import math
import re
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import get_args, get_origin, get_type_hints

import numpy as np

from refops.activations import ACTIVATIONS
from refops.arguments import BFLOAT16, describe_array, did_you_mean
from refops.commands.usage import UsageError, listed, match_one
from refops.files import SUFFIXES, FileError, UnsupportedTensorError, described, open_tensors, require_file
from refops.formats import FORMATS, FloatFormat
from refops.oracle.operation import MATMUL, OPERATIONS, UPDATE_PARAMETERS, require_operation
from refops.oracle.products.case import PARAMETERS as PRODUCT_PARAMETERS
from refops.scalings import SHORT_NAMES
from refops.survey import SCALINGS

#: Dtypes that a file's words can name.
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "uint8": np.dtype(np.uint8),
}
#: What else the names of dtypes are, as in Triton and PTX.
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
SHORT_DTYPES |= {"half": "float16", "float": "float32"}
VALUE_DTYPES = ("float32", "float16", "bfloat16")
FILES = f"""\
files: FILE[:TENSOR][@DTYPE[:SHAPE]]
  x.npy                          an npy file
  step7.npz:dy                   one tensor of an npz, safetensors or pt file
  x.bin@bfloat16:4096x8192       raw elements, row-major: any other suffix; an
                                 input needs dtype and shape, an output has
                                 those that the operation writes
  x.npy@bfloat16                 raw 2-byte elements (npy cannot say so)
  DTYPE is one of {", ".join(DTYPES)}.

"""


# --- numbers ---------------------------------------------------------------------------------------------------------


def number_argument(text, rule, accepts=lambda value: True):
    """argparse type: a number that `accepts` takes; `rule` says which those are."""
    return _converted(float, text, rule, accepts)


def integer_argument(text, rule, accepts=lambda value: True):
    """argparse type: an integer, decimal or 0x..., that `accepts` takes."""
    return _converted(lambda word: int(word, 0), text, rule, accepts)


def _converted(convert, text, rule, accepts):
    try:
        value = convert(text)
    except ValueError:
        value = None
    if value is None or not accepts(value):
        raise argparse.ArgumentTypeError(f"must be {rule}; got {text!r}")
    return value


#: NumPy has no arrays of more.
MOST_DIMENSIONS = 64


def splits_argument(text):
    """argparse type: 128,0,64 as [128, 0, 64], the rows of each expert."""
    rule = "rows of each expert, integers >= 0 joined by commas such as 128,0,64"
    return [integer_argument(word, rule, lambda rows: rows >= 0) for word in text.split(",")]


def shape_argument(text):
    """argparse type: 64x256 as (64, 256)."""
    return _converted(
        _parse_shape, text, f"at most {MOST_DIMENSIONS} sizes joined by x, such as 64x256", lambda shape: True
    )


def _parse_shape(text):
    if not re.fullmatch(r"\d+(x\d+)*", text, re.ASCII):
        raise ValueError
    sizes = tuple(map(int, text.split("x")))
    if len(sizes) > MOST_DIMENSIONS:
        raise ValueError
    return sizes


# --- operation, scaling, parameters ----------------------------------------------------------------------------------


def add_operation(p, among=OPERATIONS):
    """Add the options that say what was computed: one of the operations in `among`."""
    p.add_argument("--op", metavar="NAME", help=f"one of {', '.join(among)}")
    p.add_argument("--scaling", metavar="NAME", type=str.lower, help="one of the scalings below")
    add_set(p)
    p.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the operation: limit, alpha, beta1, glu_interleave_size, fmt, margin ...; repeatable",
    )


def add_set(p):
    """Add the option that changes a named scaling."""
    p.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the scaling; repeatable"
    )


def operation_of(arguments, among=OPERATIONS):
    """The `Operation` that --op names, one of those in `among`."""
    try:
        return require_operation(arguments.op, among)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def scaling_of(arguments):
    """The settings of --scaling and --set, or None."""
    if arguments.scaling is None:
        if arguments.set:
            raise UsageError(f"--set needs --scaling; got {arguments.set[0]!r} alone")
        return None
    name = SHORT_NAMES.get(arguments.scaling, arguments.scaling)
    return changed(SCALINGS[match_one(name, SCALINGS, "--scaling")], arguments.set).scaling


def changed(named, settings):
    """A named scaling with the fields that --set changes; its name then shows them."""
    if not settings:
        return named
    base = named.scaling
    names, kinds, changes = [f.name for f in fields(base)], get_type_hints(type(base)), {}
    for text in settings:
        name, value = _key_value(text, "--set FIELD=VALUE", names, f"a field of {type(base).__name__}")
        if name in changes:
            raise UsageError(f"--set must give {name} once; got {text!r} as well")
        changes[name] = _parse_setting(name, value, kinds[name], getattr(base, name))
    try:
        scaling = replace(base, **changes)
    except (ValueError, TypeError) as error:
        raise UsageError(f"--set {error}") from None
    return replace(named, name=" ".join((named.name, *settings)), scaling=scaling, description=str(scaling), title="")


def _parse_setting(name, text, kind, current):
    """A field's value from text, by its type: arrays come from a file, "none" is none of several words."""
    kinds = get_args(kind) or (kind,)
    if np.ndarray in map(get_origin, kinds):
        return _random_bits(text)
    if NoneType in kinds:
        return None if text == "none" else text
    return _parse_value(f"--set {name}", text, type(current))


def _parse_value(argument, text, kind):
    words = {"true": True, "false": False}
    try:
        if kind is bool:
            return words[text.lower()]
        if kind is FloatFormat:
            return FORMATS[text.lower()]
        return int(text, 0) if kind is int else kind(text)
    except (ValueError, KeyError):
        rule = {bool: "true or false", FloatFormat: f"one of {', '.join(FORMATS)}", int: "an integer"}
        raise UsageError(f"{argument} must be {rule.get(kind, 'a number')}; got {text!r}") from None


def _random_bits(text):
    """Random bytes from a file: one array, or two that are named rowwise and columnwise."""
    spec = parse_file(text, "--set random_bits")
    arrays = read_file(spec, "--set random_bits")
    if set(arrays) == {"rowwise", "columnwise"}:
        return arrays["rowwise"], arrays["columnwise"]
    if len(arrays) != 1:
        raise UsageError(f"--set random_bits must name one array, or rowwise and columnwise; got {listed(arrays)}")
    return next(iter(arrays.values()))


def params_of(arguments, operation):
    """The parameters of --param, by name."""
    kinds = parameter_kinds(operation)
    params = {}
    for text in arguments.param:
        name, value = _key_value(text, "--param NAME=VALUE", kinds, f"a parameter of {operation.name}")
        if name in params:
            raise UsageError(f"--param must give {name} once; got {text!r} as well")
        params[name] = _parse_value(f"--param {name}", value, kinds[name])
    if operation.kind == "update_delayed_scale" and "fmt" not in params:
        raise UsageError("--param fmt=e4m3 or --param fmt=e5m2 is required for update_delayed_scale; got neither")
    return params


def parameter_kinds(operation):
    """Parameter name -> type of its value."""
    if operation.kind == "update_delayed_scale":
        return dict(zip(UPDATE_PARAMETERS, (FloatFormat, int, str, bool), strict=True))
    if operation is MATMUL:
        return PRODUCT_PARAMETERS
    if operation.activation is None:
        return {}
    activation = ACTIVATIONS[operation.activation]
    kinds = dict.fromkeys(activation.parameters, float)
    if operation.kind.startswith("scaled") and activation.gated:
        kinds["glu_interleave_size"] = int
    return kinds


def _key_value(text, form, names, what):
    """Split KEY=VALUE, or say which keys there are."""
    key, equals, value = text.partition("=")
    if not equals or key not in names:
        there = f"{what}: {', '.join(names)}" if names else f"{what}, which has none"
        raise UsageError(f"{form} must start with {there}; got {text!r}{did_you_mean(key, names)}")
    return key, value


# --- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """FILE[:TENSOR][@DTYPE[:SHAPE]], taken apart."""

    text: str
    path: str
    tensor: str | None
    dtype: np.dtype | None
    shape: tuple[int, ...] | None

    @property
    def raw(self):
        """Whether the file holds bare elements, without a header."""
        return not self.path.lower().endswith(SUFFIXES)


def parse_file(text, argument):
    """Parse FILE[:TENSOR][@DTYPE[:SHAPE]]; `argument` is the option that gave it."""
    path, dtype, shape = text, None, None
    words = re.fullmatch(r"(.+)@([A-Za-z]\w*)(?::([^@/]*))?", text)
    if words:
        path, dtype, shape = words.groups()
        if dtype not in DTYPES:
            hint = did_you_mean(SHORT_DTYPES.get(dtype, dtype), DTYPES)
            raise UsageError(f"{argument} must have one of {', '.join(DTYPES)} after @; got {text!r}{hint}")
        dtype = DTYPES[dtype]
        if shape is not None:
            try:
                shape = _parse_shape(shape)
            except ValueError:
                rule = "sizes joined by x after @DTYPE:, such as x.bin@float32:64x256"
                raise UsageError(f"{argument} must have {rule}; got {text!r}") from None
    tensor = None
    words = re.fullmatch(r"(.+\.(?:safetensors|npz|pt|pth)):(.+)", path, re.IGNORECASE)
    if words:
        path, tensor = words.groups()
    spec = _File(text, path, tensor, dtype, shape)
    if shape is not None and not spec.raw:
        raise UsageError(f"{argument} must have no shape after @ for a {_suffix(path)} file; got {text!r}")
    return spec


def _suffix(path):
    return next(suffix for suffix in SUFFIXES if path.lower().endswith(suffix))


def read_file(spec, argument, name=None):
    """Return arrays of a file by name: the one that `spec` names, or the one called `name`, or all of them."""
    try:
        if spec.raw:
            return {name: read_raw(spec, argument)}
        with open_tensors(spec.path) as tensors:
            by_name = {tensor.name: tensor for tensor in tensors}
            if spec.tensor is not None and spec.tensor not in by_name:
                raise UsageError(f"{argument} must name one of {listed(by_name)} after :; got {spec.tensor!r}")
            chosen = spec.tensor or (name if name in by_name else None)
            wanted = by_name if chosen is None else {chosen: by_name[chosen]}
            return {n: _as_dtype(_bits_of(tensor), spec, argument) for n, tensor in wanted.items()}
    except FileError as error:
        raise UsageError(f"{argument} {error}") from None
    except UnsupportedTensorError as reason:
        raise UsageError(f"{argument} must hold arrays of numbers; got {spec.text!r}: {reason}") from None


def _bits_of(tensor):
    """The array of a stored tensor, or an error that names the tensor."""
    try:
        return tensor.read_bits()
    except UnsupportedTensorError as reason:
        raise UnsupportedTensorError(f"{tensor.name!r} is {reason}") from None


def _as_dtype(array, spec, argument):
    """`array` with raw 2-byte elements as the dtype after @."""
    if spec.dtype is None or array.dtype == spec.dtype:
        return array
    if array.dtype.kind == "u" and array.dtype.itemsize == spec.dtype.itemsize:
        return array.astype(array.dtype.newbyteorder("="), copy=False).view(spec.dtype)
    raise UsageError(
        f"{argument} must be {spec.dtype}, or raw elements of that size; got {describe_array(array)} in {spec.text!r}"
    )


def read_raw(spec, argument, sizes=(), other=lambda entries: ""):
    """The elements of a raw file.

    Args:
        sizes: (shape, dtype) that the file may have where `spec` does not say; with none, it has to.
        other: what else a file of so many elements of the last dtype may hold, in words, or "".
    """
    path = require_file(spec.path)
    if spec.shape is not None:
        sizes = ((spec.shape, spec.dtype),)
    if not sizes:
        raise UsageError(
            f"{argument} must be FILE@DTYPE:SHAPE for raw elements, such as x.bin@bfloat16:64x256 (other suffixes: "
            f"{', '.join(SUFFIXES)}); got {spec.text!r}"
        )
    size = path.stat().st_size
    for shape, dtype in sizes:
        if size == math.prod(shape) * dtype.itemsize:
            return np.fromfile(path, dtype).reshape(shape)
    wanted = " or ".join(
        f"{math.prod(shape) * dtype.itemsize} bytes ({described(dtype, shape)})" for shape, dtype in sizes
    )
    entries, rest = divmod(size, sizes[-1][1].itemsize)
    held = "" if rest else other(entries)
    as_held = held and f", the size of {held}"
    raise UsageError(f"{argument} must hold {wanted}; got {size} bytes in {spec.path!r}{as_held}")
