"""Extra state of operations in a checkpoint: JSON and raw tensors in one uint8 tensor. Nothing is pickled or unpickled.

The bytes are those of a safetensors file: 8 bytes of header length, a JSON header with each tensor's dtype, shape and
byte range (and under `__metadata__` one string, the JSON of what the tensors belong to), then the tensors. So
`safetensors.torch.load` reads them too. TE 2 stores a pickle in a uint8 tensor here, TE 1 a file of torch.save in an
io.BytesIO. Such payloads are recognised without being unpickled, and refused if they carry state.
"""

import dataclasses
import enum
import io
import json
import math
import pickletools
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from fuser import recipe as recipes
from refops.arguments import with_article

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_STATEFUL_KEYS = ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd")


def pack(metadata: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A 1-D uint8 CPU tensor with JSON-able `metadata` and copies of `tensors`; `TypeError` for other dtypes."""
    header: dict[str, Any] = {"__metadata__": {"state": json.dumps(metadata)}}
    chunks, position = [], 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPE_NAMES:
            raise TypeError(f"{name} must be {', '.join(map(str, _DTYPE_NAMES))}; got {tensor.dtype}")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + len(data)],
        }
        chunks.append(data)
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), *chunks])


def unpack(state: torch.Tensor | io.BytesIO | bytes | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """What `pack` was given; None for an empty state and for a pickled one that carries nothing.

    `RuntimeError` for a pickled state that carries something and for bytes of another format, `TypeError` for what is
    no bytes.
    """
    if state is None:
        return None
    data = _bytes_of(state)
    if not data:
        return None
    size = int.from_bytes(data[:8], "little")
    if data[8:9] != b"{" or 8 + size > len(data):
        _check_pickle_is_empty(data)
        return None
    try:
        header = json.loads(data[8 : 8 + size])
        metadata = json.loads(header.pop("__metadata__")["state"])
        return dict(metadata), _unpack_tensors(header, torch.frombuffer(bytearray(data[8 + size :]), dtype=torch.uint8))
    except Exception as error:  # whatever a damaged header provokes, deep down in JSON or torch
        raise RuntimeError(f"Extra state is damaged: {error!r}") from error


def _bytes_of(state: torch.Tensor | io.BytesIO | bytes) -> bytes:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if isinstance(state, bytes | bytearray):
        return bytes(state)
    raise TypeError(f"extra state must be a uint8 tensor, bytes or an io.BytesIO; got {type(state).__name__}")


def _unpack_tensors(header: Mapping[str, Any], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that `header` describes, which lie in `data` one after the other; `ValueError` if they don't."""
    tensors, position = {}, 0
    for name, entry in header.items():
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if min(shape, default=0) < 0 or (start, stop) != (position, position + math.prod(shape) * dtype.itemsize):
            raise ValueError(f"{name} is {entry}, but should start at byte {position}")
        # clone: the slice may start at any byte, a tensor of wider elements may not
        tensors[name] = data[start:stop].clone().view(dtype).reshape(shape)
        position = stop
    if position != len(data):
        raise ValueError(f"there are {len(data)} bytes of tensors, not {position}")
    return tensors


def _check_pickle_is_empty(data: bytes) -> None:
    """Return if a pickle, or that in a file of torch.save, holds no quantization state, judged by its opcodes alone."""
    try:
        data = _pickle_in_file(data) if zipfile.is_zipfile(io.BytesIO(data)) else data
        opcodes = list(pickletools.genops(data))
        if opcodes[0][0].name != "PROTO" or opcodes[-1][2] != len(data) - 1:
            raise ValueError("not one whole pickle")
    except Exception as error:  # pickletools raises whatever a damaged stream provokes
        raise RuntimeError("Extra state is neither in this package's format nor a readable pickle") from error
    names = [argument for _, argument, _ in opcodes if isinstance(argument, str)]
    has_globals = any(code.name in ("GLOBAL", "STACK_GLOBAL", "INST") for code, _, _ in opcodes)
    words = {word for name in names for word in name.replace(".", " ").split()}
    has_state = bool(words.intersection(_STATEFUL_KEYS)) or "DelayedScaling" in words
    stateless = (name for name, kind in vars(recipes).items() if _is_library_class(kind) and not kind.delayed())
    if not has_state and (not has_globals or words.intersection(stateless)):
        return
    raise RuntimeError(
        "Refusing to load pickled Transformer Engine extra state: unpickling can run code from the checkpoint. "
        f"This package never unpickles, whatever {UNSAFE_PICKLE_EXTRA_STATE_ENV} says. Load the checkpoint with "
        "Transformer Engine, read scale and amax_history from its recipe states and store them with "
        "`fuser.extra_state.pack`; or drop the `_extra_state` keys to start with fresh scales."
    )


def _pickle_in_file(data: bytes) -> bytes:
    """The pickle in a file of torch.save, which stores it as it is."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (member,) = (info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError("torch.save does not compress")
        return archive.read(member)


def recipe_to_json(recipe: Any) -> dict[str, Any]:
    """A recipe as JSON: the class in `fuser.recipe` that it is or derives from, and that class's plain fields.

    A function is stored by name; a subclass's name is stored beside its base's. `TypeError` for fields of other types.
    """
    base = _library_class(type(recipe))
    fields = {}
    for field in dataclasses.fields(base):
        value = getattr(recipe, field.name)
        if isinstance(value, enum.Enum):
            value = value.name
        elif callable(value):
            value = {"function": _name_of(value if hasattr(value, "__qualname__") else type(value))}
        elif value is not None and not isinstance(value, (bool, int, float, str)):
            if value == field.default or not field.init:
                continue
            raise TypeError(
                f"{type(recipe).__name__}.{field.name} = {value!r} can't be stored in a checkpoint: "
                "extra state is tensors and JSON, so use one of the named settings"
            )
        if field.init:
            fields[field.name] = value
    entry = {"class": base.__name__, "fields": fields}
    return entry if base is type(recipe) else {**entry, "subclass": _name_of(type(recipe))}


def recipe_from_json(entry: Mapping[str, Any], present: Any = None) -> Any:
    """The recipe that `recipe_to_json` described; `RuntimeError` for one that `fuser.recipe` does not have.

    `present`: the recipe in use where the state goes. Functions are taken from it, as names in a file are never looked
    up; without one the default takes their place (see `differences`).
    """
    try:
        name, given = entry["class"], dict(entry["fields"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"Extra state has no readable recipe: {entry!r}") from error
    kind: Any = getattr(recipes, str(name), None)
    if not _is_library_class(kind):
        raise RuntimeError(f"Extra state names the recipe {name!r}, which fuser.recipe does not have")
    known = {field.name: field for field in dataclasses.fields(kind)}
    fields = {}
    try:
        for field, value in given.items():
            if field not in known:
                raise RuntimeError(f"Extra state gives the recipe {name} a field {field!r}, which it does not have")
            if isinstance(value, Mapping):
                own = getattr(present, field, None)
                if callable(own):
                    fields[field] = own
            else:
                is_format = isinstance(getattr(kind, field, known[field].default), recipes.Format)
                fields[field] = recipes.Format[value] if is_format else value
        return kind(**fields)
    except (KeyError, TypeError, ValueError, AssertionError) as error:  # an unknown format, the recipe's own checks
        raise RuntimeError(f"Extra state has values that the recipe {name} refuses: {error!r}") from error


def differences(entry: Mapping[str, Any], recipe: Any) -> list[str]:
    """What `recipe`, made from `entry`, lacks compared with the stored recipe: its own class, its functions."""
    name = type(recipe).__name__
    lost = []
    if "subclass" in entry:
        lost.append(f"it was {with_article(entry['subclass'])}, now it is {with_article(name)} with its fields")
    for field, value in entry["fields"].items():
        if isinstance(value, Mapping) and not callable(getattr(recipe, field)):
            lost.append(
                f"{name}.{field} was the function {value.get('function')}, now it is {getattr(recipe, field)!r}"
            )
    return lost


def _library_class(kind: type) -> type:
    """`kind`, or the nearest of its bases, that is in `fuser.recipe`; `TypeError` if only `Recipe` is."""
    for base in kind.__mro__:
        if _is_library_class(base):
            return base
    raise TypeError(f"{kind.__name__} can't be stored in a checkpoint: it derives from no recipe of fuser.recipe")


def _name_of(what: Any) -> str:
    return f"{what.__module__}.{what.__qualname__}"


def _is_library_class(kind: Any) -> bool:
    """Whether `kind` is a recipe of `fuser.recipe` that quantizes: any except their base, `Recipe`."""
    is_recipe = isinstance(kind, type) and issubclass(kind, recipes.Recipe) and kind is not recipes.Recipe
    return is_recipe and vars(recipes).get(kind.__name__) is kind
