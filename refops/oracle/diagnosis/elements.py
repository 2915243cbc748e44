"""Arrays of a dump as matrices in the orientation of the tensor: one FP4 code a byte, one scale a run."""

from typing import NamedTuple

import numpy as np

from refops.formats import unpack_fp4
from refops.oracle.diagnosis.comparison import same
from refops.oracle.diagnosis.probes import SUM_ARRAYS
from refops.oracle.geometry import VALUES, Geometry, crop, repeat


class Cells(NamedTuple):
    """An array on a region.

    Attributes:
        got, reference, wrong: matrices in the orientation of the tensor.
        fmt: format of its codes, or None.
        edge: (rows, columns) of the elements that an entry covers.
    """

    got: np.ndarray
    reference: np.ndarray
    wrong: np.ndarray
    fmt: object
    edge: tuple[int, int]

    def spread(self, marks, shape):
        """Marks of entries as marks of the elements, (R, C)."""
        return repeat(marks, self.edge, shape)


def is_of_tensor(case, name):
    """Whether an output belongs to the whole tensor, as its scale or amax does, and to no rectangle."""
    if name.endswith("_scale_inv"):
        return Geometry.of(case.scaling, name).run is None
    return name.startswith("amax") and (case.scaling is None or case.scaling.layout.amax != "rows")


def turned(case, name, stored):
    """A stored crop of an output as a matrix in the orientation of the tensor; codes one per byte."""
    if name in VALUES:
        return stored
    if name in SUM_ARRAYS:
        return stored.reshape(1, -1) if SUM_ARRAYS[name] == "column" else stored.reshape(-1, 1)
    if name.startswith("amax"):
        return stored[None, :] if name.endswith("columnwise") else stored[:, None]
    geometry = Geometry.of(case.scaling, name)
    if name.endswith("_data"):
        if geometry.packed == 2:
            stored = np.repeat(stored, 2, axis=1) if stored.dtype == bool else unpack_fp4(np.ascontiguousarray(stored))
        return stored.T if geometry.transposed else stored
    return stored.T if geometry.scales_transposed else stored


def edge_of(case, name, shape):
    """(rows, columns) of the elements that an entry of an output covers, in a region of `shape`."""
    if name in VALUES or name.endswith("_data"):
        return 1, 1
    if name in SUM_ARRAYS:
        return (shape[0], 1) if SUM_ARRAYS[name] == "column" else (1, shape[1])
    if name.startswith("amax"):
        return (shape[0], 1) if name.endswith("columnwise") else (1, shape[1])
    return Geometry.of(case.scaling, name).run


def cells(case, name, region, outputs, reference, wrong):
    """The `Cells` of an output on a region; None for what belongs to the whole tensor."""
    if is_of_tensor(case, name):
        return None
    fmt = case.slots[name].fmt
    got, expected, marked = (turned(case, name, crop(case, name, a[name], region)) for a in (outputs, reference, wrong))
    if name.endswith("_data"):
        fmt = case.scaling.fmt
        if Geometry.of(case.scaling, name).packed == 2:
            marked = marked & (got != expected)
    return Cells(got, expected, marked, fmt, edge_of(case, name, region.shape))


def other_scales(case, name, region, outputs, reference):
    """bool (R, C): codes of `name` that lie under another scale than the reference's; None where there are none."""
    scales = name.replace("_data", "_scale_inv")
    if not name.endswith("_data") or scales not in outputs:
        return None
    geometry = Geometry.of(case.scaling, name)
    got, expected = (geometry.scales(a[scales], region.rows, region.columns) for a in (outputs, reference))
    differs = ~same(np.ascontiguousarray(got), np.ascontiguousarray(expected), case.slots[scales].fmt)
    if not differs.any():
        return None
    return np.broadcast_to(geometry.expand(differs, region.shape), region.shape)


def stored_marks(case, name, marks):
    """Marks of elements, (R, C), as marks of the codes of `name` as stored: either code of a byte marks it."""
    geometry = Geometry.of(case.scaling, name)
    marks = marks.T if geometry.transposed else marks
    return marks[:, 0::2] | marks[:, 1::2] if geometry.packed == 2 else marks


def differ(found):
    """Where `Cells` and the reference hold different values; any NaN equals any other."""
    return ~same(found.got, found.reference, found.fmt)
