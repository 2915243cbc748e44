"""What a golden file is made from, its name, and the matrix that covers every operation and scaling."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from refops import scalings
from refops.activations import ACTIVATIONS
from refops.arguments import (
    BFLOAT16,
    require_choice,
    require_flag,
    require_high_precision_dtype,
    require_integer,
    shown,
)
from refops.formats import E4M3, E5M2, ElementFormat
from refops.golden.inputs import INPUT_KINDS
from refops.oracle.operation import INTERLEAVE, OPERATIONS, require_operation
from refops.scalings import Scaling, named
from refops.scalings.declaration import normalise
from refops.survey import SCALINGS
from refops.tiles import round_up

#: Elements that a golden file's tensor may have: they travel as files, and are made in one piece.
MOST_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of a golden file.

    Attributes:
        op: name of the operation (`refops.oracle.operation.OPERATIONS`).
        scaling: settings, or the name of a row of `refops.survey.SCALINGS`, or None.
        shape: shape of x; of the tensor that a dequantization gives back; of amax_history.
        dtype: dtype of x and dy; of a dequantization's result. None: bfloat16, or float32 where nothing else is
            allowed.
        seed: 64-bit integer.
        inputs: kind of numbers, a key of `refops.golden.inputs.INPUT_KINDS`.
        params: parameters of the operation.
        columnwise: whether a dequantization reads the columnwise copy.
        swizzled_scales: whether scales are in the order that GEMMs read (`Quantized.swizzled`).
    """

    op: str
    scaling: Scaling | str | None = None
    shape: tuple[int, ...] = (64, 128)
    dtype: Any = None
    seed: int = 0
    inputs: str = "mixed"
    params: dict[str, Any] = field(default_factory=dict)
    columnwise: bool = False
    swizzled_scales: bool = False

    def __post_init__(self):
        operation = require_operation(self.op)
        scaling = self.scaling
        if scaling is not None:
            scaling = named(scaling)
            if type(scaling) not in scalings.SCALINGS:
                raise ValueError(
                    f"scaling must be of a declared class, which golden files name, not of one derived from it; "
                    f"got {scaling}"
                )
        if operation.needs_scaling and scaling is None:
            raise ValueError(f"scaling is required for {operation.name}; got None")
        if scaling is not None and scaling.random is not None and scaling.random.bits is not None:
            raise ValueError("scaling must take its random bits from seed and offset; got random_bits")
        if require_flag(self.columnwise, "columnwise") and operation.kind != "dequantize":
            held = "values, and no copy" if scaling is None else "both copies without it"
            raise ValueError(
                f"columnwise must be left out for {operation.name}: its file holds {held}, and only a dequantization "
                f"chooses the copy that it reads; got True"
            )
        if require_flag(self.swizzled_scales, "swizzled_scales"):
            require_gemm_order(scaling)
        update = operation.kind == "update_delayed_scale"
        default = np.float32 if update else BFLOAT16
        dtype = default if self.dtype is None else require_high_precision_dtype(self.dtype, "dtype")
        dtype = np.dtype(dtype)
        if update and dtype != np.float32:
            raise ValueError(f"dtype must be float32 for update_delayed_scale; got {dtype}")
        if not isinstance(self.shape, tuple | list) or not self.shape:
            raise ValueError(f"shape must be a tuple of at least one size; got {shown(self.shape)}")
        shape = tuple(require_integer(size, "shape", low=0, high=1 << 31) for size in self.shape)
        if np.prod(shape, dtype=object) > MOST_ELEMENTS:
            raise ValueError(f"shape must have at most 2^26 elements; got {shape}")
        if not isinstance(self.params, dict):
            raise TypeError(f"params must be a dict of parameter names and values; got {shown(self.params)}")
        normalise(
            self,
            op=operation.name,
            scaling=scaling,
            dtype=dtype,
            shape=shape,
            seed=require_integer(self.seed, "seed", low=0, high=1 << 64),
            inputs=require_choice(self.inputs, "inputs", tuple(INPUT_KINDS)),
            params=dict(self.params),
        )

    @property
    def file_name(self) -> str:
        """Name of the file: every argument is in it, so two recipes never share one."""
        parts = [self.op]
        if self.scaling is not None:
            parts.append(scaling_label(self.scaling))
        parts += [f"{name}={_plain_text(value)}" for name, value in sorted(self.params.items())]
        if self.op == "dequantize":
            parts.append("columnwise" if self.columnwise else "rowwise")
        parts += ["swizzled"] * self.swizzled_scales
        parts += [self.dtype.name, "x".join(map(str, self.shape)), self.inputs, f"seed{self.seed}"]
        return re.sub(r"[^A-Za-z0-9_.=+-]", "_", "__".join(parts)) + ".safetensors"


def require_gemm_order(scaling):
    """Raise ValueError unless there is a scaling whose scales have an order of their own for GEMMs."""
    if scaling is None:
        raise ValueError("swizzled_scales must be False without a scaling; got True")
    if scaling.layout.scale_order != "gemm":
        name = type(scaling).__name__
        raise ValueError(f"swizzled_scales must be False with {name}, whose scales have one order; got True")


def scaling_label(scaling):
    """The name of `scaling` in the table of scalings, or the closest one's and what differs: "mxfp8+two_d=True".

    A class without a row there has its own name and all its settings.
    """
    candidates = []
    for row in SCALINGS.values():
        if type(row.scaling) is type(scaling):
            differing = [f for f in settings_fields(scaling) if getattr(scaling, f) != getattr(row.scaling, f)]
            candidates.append((len(differing), row.name, differing))
    without_row = 0, type(scaling).__name__, settings_fields(scaling)
    _, name, differing = min(candidates, key=lambda candidate: candidate[0], default=without_row)
    return "+".join([name, *(f"{f}={_plain_text(getattr(scaling, f))}" for f in differing)])


def settings_fields(scaling):
    """Names of the fields of settings that equality compares: plain text can hold them."""
    return [f.name for f in fields(scaling) if f.compare]


def _plain_text(value):
    return value.name if isinstance(value, ElementFormat) else str(value)


def golden_matrix(seed: int = 0) -> Iterator[Recipe]:
    """Yield the `Recipe` of every golden file of the whole matrix.

    Every operation under every scaling that it takes and in every dtype, with both copies and all sums; shapes of more
    than one block in both directions, ragged where the scaling allows it; numbers of every kind.
    """
    for operation in OPERATIONS.values():
        if operation.kind == "update_delayed_scale":
            yield from _updates(seed)
            continue
        for scaling in _scalings_of(operation):
            for columnwise in (False, True) if operation.kind == "dequantize" else (False,):
                for dtype, inputs, ragged in _VARIANTS:
                    shape = _shape(scaling, ragged, operation.gated)
                    yield Recipe(operation.name, scaling, shape, dtype, seed, inputs, columnwise=columnwise)
        yield from _other_parameters(operation, seed)


def _scalings_of(operation):
    """Every scaling that it takes by name, after None if it can do without one."""
    names = SCALINGS if operation.takes_scaling or operation.needs_scaling else ()
    return (*names,) if operation.needs_scaling else (None, *names)


#: (dtype, kind of numbers, whether the shape is ragged).
_VARIANTS = (
    ("float32", "mixed", False),
    ("float16", "mixed", True),
    ("bfloat16", "mixed", False),
    ("bfloat16", "rounding", False),
    ("float32", "extreme", True),
    ("float16", "extreme", False),
    ("bfloat16", "extreme", True),
    ("float32", "special", False),
    ("float16", "special", True),
    ("bfloat16", "special", False),
    ("float32", "tiny", True),
    ("bfloat16", "tiny", False),
)


def _shape(scaling, ragged, gated):
    """Shape of x: small, but several blocks in both directions; the last row and column of blocks partial if ragged."""
    factor, settings = 1 + gated, None if scaling is None else SCALINGS[scaling].scaling
    if settings is None or settings.layout.block is None:
        return (3, 7, factor * 33) if ragged else (16, factor * 64)
    layout, (_, size) = settings.layout, settings.layout.block
    if not ragged:
        return (2, size, factor * max(2 * size, 64))
    if layout.shape_multiple > 1:  # blocks are never partial, but scales are padded
        multiple = round_up(32, layout.columnwise_multiple)
        return (multiple, factor * 3 * multiple)
    rows, columns = (size + 2, size + 4) if size > 64 else (size + 5, 2 * size + 11)
    return (rows, factor * round_up(columns, settings.gate_multiple if gated else 1))


def _other_parameters(operation, seed):
    """An activation with parameters off their defaults; one scaled by row, with act and gate interleaved."""
    if operation.activation is None:
        return
    if operation.takes_scaling:
        params = {p.name: p.other for p in ACTIVATIONS[operation.activation].declared}
        for scaling in (None, "mxfp8") if params else ():  # one is enough: no parameter reaches a cast
            shape = _shape("mxfp8", False, operation.gated)
            yield Recipe(operation.name, scaling, shape, "bfloat16", seed, params=params)
    elif operation.gated:
        yield Recipe(operation.name, None, (2, 8, 256), "bfloat16", seed, params={INTERLEAVE: 32})


def _updates(seed):
    for fmt in (E4M3, E5M2):
        for algorithm in ("max", "most_recent"):
            for margin, keep_unused, inputs in (
                (0, True, "mixed"),
                (3, False, "extreme"),
                (-2, True, "special"),
                (0, True, "tiny"),
            ):
                params = {"fmt": fmt, "margin": margin, "algorithm": algorithm, "keep_unused": keep_unused}
                yield Recipe("update_delayed_scale", None, (16, 12), "float32", seed, inputs, params)
    yield Recipe("update_delayed_scale", None, (1,), "float32", seed, params={"fmt": E4M3})
