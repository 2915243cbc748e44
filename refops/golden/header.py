"""The header of a golden file: what made it, and what each of its arrays is. Plain data, read off the declarations."""

import hashlib
import json
import math
from typing import get_args, get_type_hints

import numpy as np

import refops
from refops.arguments import shown
from refops.files import FileError
from refops.formats import FORMATS, ElementFormat, FloatFormat, IntegerFormat
from refops.golden.matrix import settings_fields
from refops.oracle.operation import INTERLEAVE
from refops.quantization.result import DIRECTIONS
from refops.scalings import SCALINGS
from refops.scalings.arithmetic import REFERENCE

#: What is said of the order of scale bytes; swizzled ones by whether the array is swizzled along its transpose.
NOT_SWIZZLED = "not swizzled"
SWIZZLED = {
    False: "then swizzled in tiles of 128 x 4",
    True: "then transposed and swizzled in tiles of 128 x 4 (the array's shape is that before)",
}
#: Version of the layout of golden files that are written.
LAYOUT = 2
#: What a header must hold besides its digest: key -> type. "swizzled_scales" is there only where it is true.
_FIELDS = {"operation": str, "parameters": dict, "scaling": dict | None, "arrays": dict, "refops": str}
#: Every layout that is read -> the key that tells the copies, and its type: "columnwise" was the argument.
_COPIES = {1: ("columnwise", bool), 2: ("copies", list)}


def make_header(recipe, case, arrays):
    """Return the header of the file that a `Recipe` makes of a `Case`, its digest included."""
    header = {
        "layout": LAYOUT,
        "refops": refops.__version__,
        "operation": recipe.op,
        "parameters": {name: _to_json(value) for name, value in recipe.params.items()},
        "scaling": settings_as_dict(recipe.scaling),
        "shape": list(recipe.shape),
        "dtype": recipe.dtype.name,
        "seed": recipe.seed,
        "inputs": recipe.inputs,
        "copies": [copy for copy in DIRECTIONS if any(name.endswith(f".{copy}_data") for name in arrays)],
        **({"swizzled_scales": True} if recipe.swizzled_scales else {}),
        "arrays": {
            name: {"dtype": a.dtype.name, "shape": list(a.shape), "description": describe(name, case)}
            for name, a in arrays.items()
        },
    }
    return header | {"digest": digest(header, arrays)}


def parse_header(text, path):
    """Return the header of the file `path` from its JSON text, None where it has none.

    Raises:
        FileError: it is none, or that of another layout.
    """
    try:
        header = json.loads(text) if text is not None else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or any(not isinstance(header.get(k), t) for k, t in _FIELDS.items()):
        raise FileError(f"must be a golden file, as refops golden writes them; got {str(path)!r}: it has no header")
    layout = header.get("layout")
    if type(layout) is not int or layout not in _COPIES:  # not True, which is 1 too
        read = " or ".join(map(str, _COPIES))
        raise FileError(
            f"must be a golden file of layout {read}; got {str(path)!r} of layout {layout!r}, written by refops "
            f"{header['refops']}"
        )
    key, kind = _COPIES[layout]
    if not isinstance(header.get(key), kind):
        raise FileError(
            f"must be a golden file of layout {layout}, whose header has {key}, a {kind.__name__}; got {str(path)!r} "
            f"with {shown(header.get(key))}"
        )
    return header


def reads_columnwise(header):
    """Whether a header is that of a dequantization of the columnwise copy."""
    if "columnwise" in header:
        return header["columnwise"]
    return header["operation"] == "dequantize" and header["copies"] == ["columnwise"]


def as_layout(header, layout):
    """The header, without its digest, in `layout`, which may be an earlier one."""
    made = {key: value for key, value in header.items() if key != "digest"} | {"layout": layout}
    if layout == 1:
        made["columnwise"] = reads_columnwise(header)
        del made["copies"]
    return made


def digest(header, arrays):
    """SHA-256 of the header without its digest, and of the arrays' names, dtypes, shapes and bytes."""
    described = {key: value for key, value in header.items() if key != "digest"}
    sha = hashlib.sha256(canonical_json(described).encode())
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(f"\n{name} {array.dtype.name} {list(array.shape)}\n".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def canonical_json(value):
    """One line of ASCII, keys sorted."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# --- settings and parameters as JSON ----------------------------------------------------------------------------------


def settings_as_dict(scaling):
    """All fields of settings by name, with their class; None for None."""
    if scaling is None:
        return None
    return {"class": type(scaling).__name__} | {f: _to_json(getattr(scaling, f)) for f in settings_fields(scaling)}


def settings_from_dict(described):
    """Undo `settings_as_dict`.

    Raises:
        ValueError: an unknown class; whatever the settings raise.
    """
    if described is None:
        return None
    classes = {cls.__name__: cls for cls in SCALINGS}
    values = dict(described)
    name = values.pop("class", None)
    if name not in classes:
        raise ValueError(f"scaling must be one of {', '.join(classes)}; got {name!r}")
    formats = _format_fields(classes[name])
    return classes[name](**{field: _from_json(value, field in formats) for field, value in values.items()})


def params_from_header(header):
    """The parameters of the operation, by name."""
    return {name: _from_json(value, name == "fmt") for name, value in header["parameters"].items()}


def _to_json(value):
    if isinstance(value, ElementFormat):
        return value.name
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value, is_format):
    if is_format and value is not None:
        return FORMATS[value]
    return float(value) if value in ("inf", "-inf") else value


def _format_fields(cls):
    """Names of the fields of a class of settings that hold a format (or None): "fmt", others by their type."""
    kinds = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(cls).items()}
    formats = (ElementFormat, FloatFormat, IntegerFormat)
    return {"fmt"} | {name for name, of in kinds.items() if any(kind in formats for kind in of)}


# --- what each array is -----------------------------------------------------------------------------------------------


def describe(full_name, case):
    """How an array of the file of a `Case` is laid out; `full_name` such as "output.columnwise_data"."""
    name = full_name.split(".", 1)[1]
    described = _of_operation(case)
    if name in described:
        return f"{described[name]}; row-major"
    copy, part = name.split("_", 1)
    if copy == "amax":
        copy, part = part, copy
    what = _OF_COPY[part](case.scaling, copy == "columnwise")
    if case.swizzled_scales and part == "scale_inv":
        return what.replace(NOT_SWIZZLED, SWIZZLED[case.scaling.layout.scales_inner_first[copy == "columnwise"]])
    return f"{what}; row-major"


def _of_operation(case):
    """Name -> sentence, for the arrays that no scaling writes."""
    x = "[act | gate] along the last dimension" if case.gated else "the tensor"
    size = case.params.get(INTERLEAVE)
    return {
        "x": f"act and gate in turns of {size} columns, act first" if size else x,
        "y": "the result, rounded once",
        "dx": "gradient of x: [d_act | d_gate]" if case.gated else "gradient of x",
        "dy": "gradient of the output",
        "dbias": "sum of the gradient (of x, for quantize) over all but the last dimension; any order of summation",
        "row_scales": "one factor for each row",
        "drow_scales": "gradient of row_scales; any order of summation",
        "scale": "scale of each tensor",
        "amax_history": "amaxes [step, tensor], row 0 the newest",
    }


def _order(first, second):
    return f"[{first}, {second}]"


def _elements(transposed):
    """The order of elements as they are stored."""
    return _order("column", "row") if transposed else _order("row", "column")


def _data(scaling, columnwise):
    layout, order = scaling.layout, _elements(scaling.layout.data_transposed(columnwise))
    if layout.data_transposed(columnwise):
        order += ": the transposed matrix" + (", packed along rows" if layout.packed > 1 else "")
    elif columnwise:
        order += ", not transposed, scaled along columns"
    packing = "one a byte" if layout.packed == 1 else "two a byte, the element of even index in the low four bits"
    return f"{scaling.fmt!r} codes {order}, {packing}"


def _scale_order(scaling, columnwise):
    """What the dimensions of stored scales run over."""
    layout = scaling.layout
    if layout.block is None:
        return "one for the tensor"
    (line, outer), (_, inner) = layout.oriented((("row", "M"), ("column", "K")), columnwise)
    tiles = layout.run[0] > 1
    names = f"tile along {outer}" if tiles else line, f"{'tile' if tiles else 'block'} along {inner}"
    return _order(*(names[::-1] if layout.scales_inner_first[columnwise] else names))


def _scales(scaling, columnwise):
    layout = scaling.layout
    if layout.block is None:
        return "float32 decode scale, one for the tensor"
    what = "float32 decode scales" if layout.scale_format is None else f"{layout.scale_format!r} scale bytes"
    return ", ".join([f"{what} {_scale_order(scaling, columnwise)}", *_padding(layout, columnwise)])


def _padding(layout, columnwise):
    """What is said of padding and of the order for GEMMs."""
    outer, blocks = layout.padding
    if outer > 1 and blocks > 1:
        lines, along = layout.oriented(("rows", "columns"), columnwise)
        yield f"{lines} padded with zeros to a multiple of {outer} and blocks along {along} to one of {blocks}"
    elif outer > 1 or blocks > 1:
        second = (outer > 1) == layout.scales_inner_first[columnwise]
        yield f"{'second' if second else 'first'} dimension padded with zeros to a multiple of {max(outer, blocks)}"
    if layout.scale_order == "gemm":
        yield NOT_SWIZZLED


def _amax(scaling, columnwise):
    each = "each column" if columnwise else "each row"
    return f"float32 amax of {each if scaling.layout.amax == 'rows' else 'the tensor'}"


def _global_encode_scale(scaling, columnwise):
    top, _ = scaling.tensor_scale(REFERENCE)(np.float32(1))
    return f"float32 S_enc = {int(top)} / amax, one for each amax"


#: What an array is called beside its copy -> f(scaling, columnwise) -> what it is.
_OF_COPY = {
    "data": _data,
    "scale_inv": _scales,
    "amax": _amax,
    "block_amax": lambda *copy: f"float32 amax of the block of each scale {_scale_order(*copy)}, no padding",
    "encode_scale": lambda *copy: (
        f"float32 factor that each element is multiplied with before the cast, {_scale_order(*copy)}, no padding"
    ),
    "global_encode_scale": _global_encode_scale,
    "random_bits": lambda scaling, columnwise: f"random byte of each element, {_elements(columnwise)}",
}
