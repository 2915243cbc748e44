"""Checks of a caller's arguments: each raises an error that names the argument, its value and the rule."""

import difflib
import math
import numbers
from collections.abc import Callable, Collection
from typing import Any

import ml_dtypes
import numpy as np

from refops.hints import Array
from refops.torch_tensors import from_torch, is_torch_tensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: The dtypes of unquantized tensors.
HIGH_PRECISION = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

#: Names of the one-byte dtypes that hold codes: int8, ml_dtypes' small floats, torch's pairs of FP4.
CODE_DTYPES = frozenset(
    {
        "int8",
        "float4_e2m1fn_x2",
        *(name for name in vars(ml_dtypes) if name.startswith(("float8_", "float6_", "float4_"))),
    }
)

#: Characters of a value that an error message shows.
MOST_SHOWN = 300
#: Entries of a tuple or list that are shown one by one.
MOST_ENTRIES = 8


def shown(value: object) -> str:
    """`value` as an error message shows it, on one short line: an array by dtype and shape, a tuple or list that holds
    one by its entries, anything else by repr."""
    if isinstance(value, np.ndarray):
        return describe_array(value)
    if isinstance(value, tuple | list) and any(isinstance(entry, np.ndarray) for entry in value):
        return f"{type(value).__name__} of {', '.join(shown(entry) for entry in value[:MOST_ENTRIES])}"
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({type(value).__name__})"


def say_who(error: Exception, who: str) -> None:
    """Begin an error's message with who raised it, as "GLU" or "group 3"."""
    error.args = (f"{who}: {error}", *error.args[1:])


def similar_names(word: object, names: Any) -> list[str]:
    """The `names` that contain `word`, or else those that are spelled like it; case does not matter."""
    if not isinstance(word, str):
        return []
    text, folded = word.lower(), {name.lower(): name for name in names}
    holding = [name for low, name in folded.items() if len(text) > 2 and text in low]
    return holding or [folded[low] for low in difflib.get_close_matches(text, folded)]


def did_you_mean(word: object, names: Any, home: str = "") -> str:
    """The end of an error message: " (did you mean a, b or c?)", or "" if nothing is like `word`; `home`: a prefix."""
    similar = [f"{home}{name}" for name in similar_names(word, names)[:3]]
    if not similar:
        return ""
    *others, last = similar
    return f" (did you mean {', '.join(others)} or {last}?)" if others else f" (did you mean {last}?)"


def with_article(noun: str) -> str:
    """`noun`, such as the name of a class, after "a" or "an": "an ndarray", "a Tensor", "an MXFP8Tensor"."""
    abbreviated = noun[:1] in tuple("FHLMNRSX") and (noun[1:2].isupper() or noun[1:2].isdigit())  # letters: "em", "ef"
    begins_with_vowel = abbreviated or noun.startswith("nd") or noun[:1].lower() in tuple("aeio")
    return f"{'an' if begins_with_vowel else 'a'} {noun}"


def describe_array(x):
    """What an error message says about an array: its dtype and shape."""
    return f"{x.dtype} of shape {x.shape}"


def dimensions(shape):
    """(2, 32, 64) -> "2x32x64", () -> "scalar"."""
    return "x".join(map(str, shape)) or "scalar"


def as_codes_hint(dtype, name):
    """What an error adds about an array whose codes have another dtype: how to view them as uint8."""
    return f"; hand in {name}.view(np.uint8)" if str(dtype) in CODE_DTYPES else ""


def as_array(x: Any, name: str) -> Array:
    """Return `x` as a NumPy array, raising TypeError if it is no array (a ragged list) or would lose its mask."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array; got a masked array of shape {x.shape}")
    return converted(from_torch if is_torch_tensor(x) else np.asarray, x, name)


def converted(convert: Callable[[Any], Any], x: Any, name: str) -> Array:
    """Return `convert(x)`, raising TypeError that names the argument whatever `x` raises: __array__ may raise anything.

    Args:
        convert: function from what stands for an array to a NumPy array.
    """
    try:
        return convert(x)
    except ValueError as error:
        raise TypeError(f"{name} must be an array; got {shown(x)}") from error
    except Exception as error:  # torch, of a tensor that is not on the CPU, is sparse or holds no numbers
        why = " ".join(str(error).split())[:MOST_SHOWN]
        raise TypeError(f"{name} must convert to a NumPy array; got {type(x).__name__}: {why}") from error


def require_high_precision(x: Any, name: str) -> Array:
    """Return `x` as a NumPy array, raising TypeError unless it is float32, float16 or bfloat16."""
    array = as_array(x, name)
    if array.dtype not in HIGH_PRECISION:
        hint = "; round float64 to float32 first" if array.dtype == np.float64 else ""
        raise TypeError(f"{name} must be float32, float16 or bfloat16{hint}; got {describe_array(array)}")
    return array


def require_tensor(x: Any, name: str) -> Array:
    """Return `x` as an array with at least one dimension and a high-precision dtype."""
    array = require_high_precision(x, name)
    if array.ndim == 0:
        raise ValueError(f"{name} must have at least one dimension (the last one is K); got a scalar")
    return array


def require_high_precision_dtype(dtype, name):
    """Return `dtype` as np.dtype, raising TypeError unless it is float32, float16 or bfloat16."""
    return require_dtype(dtype, name, HIGH_PRECISION, "float32, float16 or bfloat16")


def require_dtype(dtype, name, dtypes, rule):
    """Return `dtype` as np.dtype, raising TypeError, which states the rule, unless it is one of `dtypes`."""
    try:
        resolved = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # NumPy parses strings
        resolved = None
    if resolved not in dtypes:
        raise TypeError(f"{name} must be {rule}; got {shown(dtype)}")
    return resolved


def require_number(value, name, *, positive=False, non_negative=False, finite=True):
    """Return `value` as np.float32, raising unless it is a real number that meets the rule (also once rounded)."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiu":
        value = value.item()  # a scale or an amax as another call returned it
    rule = "a positive number" if positive else "a number >= 0" if non_negative else "a number"
    rule = f"a finite float32: {rule}" if finite else f"{rule} that float32 can hold"
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real | np.floating):
        raise TypeError(f"{name} must be {rule}; got {shown(value)}")
    try:
        with np.errstate(over="ignore"):
            rounded = np.float32(value)
    except OverflowError:  # a Python integer beyond float64
        rounded = np.float32(math.inf if value > 0 else -math.inf)
    overflows = np.isinf(rounded) and value not in (math.inf, -math.inf)
    broken = (
        np.isnan(rounded)
        or overflows
        or (finite and not np.isfinite(rounded))
        or (positive and not rounded > 0)
        or (non_negative and value < 0)  # before rounding: -1e-60 would become -0
    )
    if broken:
        raise ValueError(f"{name} must be {rule}; got {shown(value)}")
    return rounded


def require_integer(value, name, *, low, high):
    """Return `value` as int, raising unless it is an integer with low <= value < high."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer; got {shown(value)}")
    if not low <= value < high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}); got {shown(value)}")
    return int(value)


def require_list(value, name, of):
    """Return `value` as a list, raising TypeError unless it is a collection; `of` says of what."""
    if isinstance(value, str | bytes) or not isinstance(value, Collection) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{name} must be a list of {of}; got {shown(value)}")
    return list(value)


def require_flag(value, name, hint=""):
    """Return `value` as bool, raising TypeError, whose message ends with `hint`, unless it is one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False; got {shown(value)}{hint}")
    return bool(value)


def require_name(value: object, name: str, names: Collection[str]) -> str:
    """Return `value`, raising ValueError, which suggests similar names, unless it is one of `names`."""
    if isinstance(value, str) and value in names:
        return value
    raise ValueError(f"{name} must be one of {', '.join(names)}; got {shown(value)}{did_you_mean(value, names)}")


def require_choice(value: Any, name: str, choices: Collection[Any]) -> Any:
    """Return the one of `choices` that equals `value` (a NumPy integer or string too), else raise ValueError."""
    plain = value.item() if isinstance(value, np.generic) else value
    for choice in choices:
        if type(plain) is type(choice) and plain == choice:
            return choice
    similar = did_you_mean(plain, [choice for choice in choices if isinstance(choice, str)])
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {shown(value)}{similar}")
