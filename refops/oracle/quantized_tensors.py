"""Quantized tensors of any package as arrays by name, and the names that a user may give to arrays.

Nothing is imported: a tensor is known by its attributes. These are

- the names of `refops.Quantized`, which the results of kernel packages have too, or `buffers` that have them (`fuser`);
- TE's names, `_rowwise_data`, `_rowwise_scale_inv`, `_amax_rowwise` and the columnwise ones (MXFP8, FP8 blocks, NVFP4);
- TE's names of FP8 with one scale, `_data`, `_scale_inv`, `_transpose`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from refops.arguments import BFLOAT16, did_you_mean, require_high_precision_dtype, shown, with_article
from refops.formats import FORMATS

#: Every array of a `Quantized`, rowwise first.
QUANTIZED_ARRAYS = (
    "rowwise_data",
    "rowwise_scale_inv",
    "amax_rowwise",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax_columnwise",
)
#: Parts of a copy by the names that kernels' authors give them -> TE's.
_PARTS = {
    **dict.fromkeys(("data", "codes"), "{}_data"),
    **dict.fromkeys(("scale_inv", "scale", "scales"), "{}_scale_inv"),
    "amax": "amax_{}",
}
#: Other names of arrays of a `Quantized`; a part without a direction is the rowwise one.
ALIASES = {
    **{part: full.format("rowwise") for part, full in _PARTS.items()},
    **{f"{copy}_{part}": full.format(copy) for copy in ("rowwise", "columnwise") for part, full in _PARTS.items()},
    **{f"_{name}": name for name in QUANTIZED_ARRAYS},
    "_data": "rowwise_data",
    "_scale_inv": "rowwise_scale_inv",
    "_transpose": "columnwise_data",
}


def full_name(name, known):
    """The name in `known` that `name` stands for; `name` itself if there is none."""
    return name if name in known else ALIASES.get(name, name)


def name_hint(name, known):
    """What an error message adds about a name that is not in `known`: the public names that are like it."""
    public = (alias for alias, full in ALIASES.items() if full in known and not alias.startswith("_"))
    return did_you_mean(name, (*known, *public))


@dataclass(frozen=True)
class QuantizedParts:
    """What a quantized tensor holds.

    Attributes:
        kind: name of its class.
        arrays: name, one of `QUANTIZED_ARRAYS` -> array of any library.
        scaling: its settings, None where the tensor does not say them.
        fmt: its element format, None where neither it nor its settings say it.
        swizzled_scales: whether its scales are in GEMM order.
        shape: shape of the unquantized tensor, None where it is that of the data.
        dtype: nominal dtype, None where it is none of NumPy's and ml_dtypes'.
    """

    kind: str
    arrays: dict[str, Any]
    scaling: Any = None
    fmt: Any = None
    swizzled_scales: bool = False
    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] | None = None

    def require_scaling(self, scaling, name):
        """Raise ValueError where the tensor, argument `name`, was made with another kind of settings or format."""
        theirs, ours = self.scaling, scaling
        if theirs is not None and (type(theirs) is not type(ours) or theirs.fmt != ours.fmt):
            raise ValueError(f"{name} must be of the kind of {ours}; got {with_article(self.kind)} with {theirs}")
        if self.fmt not in (None, ours.fmt):
            kind = with_article(self.kind)
            raise ValueError(f"{name} must have codes of {ours.fmt!r}; got {kind} of {self.fmt!r}")


def is_quantized(value):
    """Whether a value is a quantized tensor, of this package or another."""
    own = any(hasattr(held, "rowwise_data") and hasattr(held, "scaling") for held in (value, _buffers_of(value)))
    return own or hasattr(value, "_rowwise_data") or (hasattr(value, "_data") and hasattr(value, "_scale_inv"))


def parts_of(value):
    """The `QuantizedParts` of a quantized tensor (see `is_quantized`)."""
    buffers = _buffers_of(value)
    own = buffers if hasattr(buffers, "rowwise_data") else value
    if hasattr(own, "rowwise_data"):
        return QuantizedParts(
            type(value).__name__,
            arrays_of(own),
            own.scaling,
            swizzled_scales=bool(getattr(own, "with_gemm_swizzled_scales", False)),
            shape=None if getattr(own, "shape", None) is None else tuple(own.shape),
            dtype=_dtype_of(own),
        )
    return QuantizedParts(
        type(value).__name__,
        _te_arrays(value),
        fmt=_format_of(value),
        swizzled_scales=bool(getattr(value, "_with_gemm_swizzled_scales", False)),
        dtype=_dtype_of(value),
    )


def arrays_of(q):
    """The arrays that a `Quantized`, or a kernel package's own result, holds: name -> array."""
    arrays = {name: getattr(q, name, None) for name in QUANTIZED_ARRAYS}
    return {name: array for name, array in arrays.items() if array is not None}


def with_arrays(given, whole):
    """Return (name -> array, the tensors' `QuantizedParts`) of a dict whose values may be quantized tensors.

    Args:
        given: name -> array, or quantized tensor under one of the names `whole`, which stands for all of its arrays.
        whole: names of the result as a whole.

    Raises:
        ValueError: a quantized tensor under another name, or an array that two of them give.
    """
    arrays, tensors = {}, []
    for name, value in given.items():
        held = {name: value}
        if is_quantized(value):
            if name not in whole:
                raise ValueError(f"a quantized tensor must be named {' or '.join(whole)}; got {shown(name)}")
            tensors.append(parts_of(value))
            held = tensors[-1].arrays
        twice = [one for one in held if one in arrays]
        if twice:
            raise ValueError(f"outputs must hold {twice[0]} once; got it twice ({shown(name)} holds it too)")
        arrays |= held
    return arrays, tensors


def is_swizzled(outputs):
    """Whether outputs, a quantized tensor or a dict that holds one, say that their scales are in GEMM order."""
    values = outputs.values() if isinstance(outputs, dict) else (outputs,)
    return any(parts_of(value).swizzled_scales for value in values if is_quantized(value))


def _buffers_of(value):
    try:
        buffers = getattr(value, "buffers", None)
    except NotImplementedError:  # a subclass of fuser's tensors that holds none
        return None
    return None if callable(buffers) else buffers  # a torch.nn.Module has a method of this name


def _te_arrays(value):
    """The arrays of a tensor with TE's names."""
    if hasattr(value, "_rowwise_data"):
        arrays = {name: getattr(value, f"_{name}", None) for name in QUANTIZED_ARRAYS}
    else:  # FP8 with one scale, the same for both copies
        data, transposed = value._data, getattr(value, "_transpose", None)
        if getattr(value, "_transpose_invalid", False):
            transposed = None
        arrays = {
            "rowwise_data": data,
            "rowwise_scale_inv": None if data is None else value._scale_inv,
            "columnwise_data": transposed,
            "columnwise_scale_inv": None if transposed is None else value._scale_inv,
        }
    return {name: array for name, array in arrays.items() if array is not None}


def _format_of(value):
    """The element format of a tensor with TE's names, such as E4M3 of kFloat8E4M3; None where it does not say it."""
    dtypes = (getattr(value, name, None) for name in ("_fp8_dtype", "_fp4_dtype"))
    said = str(next((dtype for dtype in dtypes if dtype is not None), "")).lower()
    return next((fmt for fmt in FORMATS.values() if fmt.name in said), None)


def _dtype_of(value):
    """Nominal dtype, torch's by its name."""
    name = str(getattr(value, "dtype", "")).removeprefix("torch.")
    try:
        return BFLOAT16 if name == "bfloat16" else require_high_precision_dtype(name, "dtype")
    except TypeError:
        return None
