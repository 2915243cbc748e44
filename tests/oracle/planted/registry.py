"""What a planted fault is, where it strikes, and the decorator that makes one of a kernel."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Where:
    """The place of a fault: elements of the (M, K) result that the faulty code handles, whether or not it shows there.

    Attributes:
        arrays: outputs that are wrong: "rowwise" and "columnwise" stand for data, scales and amax of a direction,
            "values" for y or dx, "dbias", "drow_scales", "amax" for amax slots alone, "history" and "scale" of a
            delayed update.
        rows, columns: (first, last) of a range, both included; None for all.
        every: ("row" or "column", period, phases): lines whose number modulo `period` is one of `phases`; None for all.
            A block of rows or columns is said by its lines: blocks of 32 that are odd are period 64, phases 32 to 63.
    """

    arrays: tuple[str, ...]
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None
    every: tuple[str, int, tuple[int, ...]] | None = None

    def mask(self, shape):
        """bool (M, K): where it is."""
        m, k = shape
        row, column = np.arange(m)[:, None], np.arange(k)[None, :]
        inside = np.ones((m, k), bool)
        for line, ends in ((row, self.rows), (column, self.columns)):
            if ends is not None:
                inside &= (ends[0] <= line) & (line <= ends[1])
        if self.every is not None:
            what, period, phases = self.every
            inside &= np.isin({"row": row, "column": column}[what] % period, phases)
        return inside


@dataclass(frozen=True, eq=False)
class Planted:
    """One fault.

    Attributes:
        author: whose set it is of: the part of its module's name before the first "_".
        name: unique in that set.
        op, scaling, params, ulp: the call, as for `refops.oracle.check`.
        make: function of a NumPy generator that returns the inputs, name -> array.
        write: the kernel: function of the inputs that returns output name -> array.
        truth: what its author did, in one sentence.
        where: the place.
    """

    author: str
    name: str
    op: str
    scaling: object
    params: dict
    ulp: float
    make: Callable = field(repr=False)
    write: Callable = field(repr=False)
    truth: str
    where: Where

    def inputs(self):
        """The inputs; the same ones each time."""
        return self.make(np.random.default_rng(zlib.crc32(self.name.encode())))

    def outputs(self):
        """What the kernel writes for them."""
        with np.errstate(all="ignore"):
            return self.write(**self.inputs())


#: Every planted fault by author and name.
PLANTED: dict[tuple[str, str], Planted] = {}


def planted(op, make, where, scaling=None, params=None, ulp=2):
    """Decorator of a kernel, function of the inputs by name; its docstring says what its author did wrong."""

    def add(write):
        author, name = write.__module__.rpartition(".")[2].partition("_")[0], write.__name__.replace("_", "-")
        if (author, name) in PLANTED:
            raise ValueError(f"name must be new; got {name!r} a second time")
        truth = " ".join((write.__doc__ or "").split())
        PLANTED[author, name] = Planted(author, name, op, scaling, params or {}, ulp, make, write, truth, where)
        return write

    return add


def normal(shape, dtype=BF16, scale=1.0):
    """Inputs of an operation of one tensor: x of a normal distribution."""
    return lambda rng: {"x": (scale * rng.standard_normal(shape, np.float32)).astype(dtype)}
