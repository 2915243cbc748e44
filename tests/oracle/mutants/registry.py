"""What a mutant is, and the two decorators that make one of a function. Its name seeds it: none changes another."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

import refops
from mutants import data as tensors
from mutants.kernels import BF16, Kernel


@dataclass(frozen=True, eq=False)
class Mutant:
    """One seeded fault: a kernel's dump that is wrong, and what the oracle should say of it.

    Attributes:
        name: unique.
        op, scaling, params: the call, as for `refops.oracle.check`.
        dtype, shape: of x (of the tensor for dequantize; of the history for the scale update).
        kind: "convention", a systematic fault with a name, or "corruption", wrong entries here and there.
        expected: names that are right as the first answer: one, or two where both explain the same dump.
            For a corruption: names that are true of it as well (mostly none).
        both: the fault is the two of `expected` together.
        data: name of a function in `mutants.data`.
        rowwise, columnwise, dbias: what is written.
        ulp: what the check permits; 0 where the fault is smaller than 2 float32 ulp.
        seed: of the data and of where a corruption strikes.
        write: Kernel -> outputs, with the fault.
        sentence: what the author of the kernel did.
    """

    name: str
    op: str
    scaling: object
    params: dict
    dtype: np.dtype
    shape: tuple[int, ...]
    kind: str
    expected: tuple[str, ...]
    both: bool
    data: str
    rowwise: bool
    columnwise: bool
    dbias: bool
    ulp: float
    seed: int
    write: Callable = field(repr=False)
    sentence: str = ""

    @property
    def family(self):
        """Heading in the score's table."""
        if self.op in ("dequantize", "update_delayed_scale"):
            return self.op
        if self.scaling is None:
            return "gradient" if self.op.removeprefix("scaled_").startswith("d") else "activation"
        return type(self.scaling).__name__.removesuffix("Scaling")

    @property
    def inputs(self):
        """The arrays that the kernel reads: name -> array; shared, not to be written."""
        return make_inputs(
            self.op, self.scaling, self.dtype, self.shape, self.data, self.rowwise, self.columnwise, self.seed
        )

    def kernel(self):
        """The right kernel for these inputs."""
        flags = {"rowwise": self.rowwise, "columnwise": self.columnwise, "dbias": self.dbias}
        return Kernel(self.op, self.scaling, self.params, self.inputs, seed=self.seed, **flags)

    def dump(self):
        """(inputs, outputs): what went in, and the wrong arrays that came out."""
        with np.errstate(all="ignore"):
            return self.inputs, self.write(self.kernel())

    def right_outputs(self, outputs):
        """What `refops` itself writes for the names in `outputs`."""
        inputs, params = self.inputs, self.params
        if self.op == "dequantize":
            return {"y": refops.dequantize(inputs["q"], dtype=outputs["y"].dtype)}
        if self.op == "update_delayed_scale":
            history, scale = refops.update_delayed_scale(inputs["amax_history"], inputs["scale"], **params)
            return {"amax_history": history, "scale": scale}
        kernel = self.kernel()
        dbias = {"dbias": True} if self.dbias else {}
        if self.scaling is None:
            scaled = "scaled_" if "row_scales" in inputs else ""
            function = getattr(refops, f"{scaled}activation{'_grad' if kernel.gradient else ''}")
            result = function(kernel.activation, *inputs.values(), **params, **dbias)
            names = ("dx", "drow_scales" if scaled else "dbias") if kernel.gradient else ("y",)
            return dict(zip(names, result if isinstance(result, tuple) else (result,), strict=False))
        directions = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        if self.op == "quantize":
            result = refops.quantize(inputs["x"], self.scaling, **directions, **dbias)
        elif kernel.gradient:
            result = refops.activation_grad_quantize(
                kernel.activation, *inputs.values(), self.scaling, **directions, **dbias, **params
            )
        else:
            result = refops.activation_quantize(kernel.activation, inputs["x"], self.scaling, **directions, **params)
        q, sums = result if self.dbias else (result, None)
        return {name: sums if name == "dbias" else getattr(q, name) for name in outputs}

    def named_right(self, explanation):
        """Whether the oracle's explanation is the one expected."""
        names = set(explanation.names)
        return names == set(self.expected) if self.both else len(names) == 1 and names <= set(self.expected)


@lru_cache(maxsize=8)
def make_inputs(op, scaling, dtype, shape, data, rowwise, columnwise, seed):
    """The inputs of an operation; x from the function of `mutants.data` called `data`."""
    rng = np.random.default_rng(seed)
    if op == "update_delayed_scale":
        return getattr(tensors, data)(shape, rng)
    x = getattr(tensors, data)(shape, dtype, rng)
    if op == "dequantize":
        return {"q": refops.quantize(x, scaling, rowwise=rowwise, columnwise=columnwise)}
    if op == "quantize":
        return {"x": x}
    name = op.removeprefix("scaled_")
    inputs = {"x": x}
    gradient = name not in refops.ACTIVATIONS
    if gradient:
        gated = refops.ACTIVATIONS[name[1:]].gated
        dy = tensors.normal((*shape[:-1], shape[-1] // 2 if gated else shape[-1]), dtype, rng)
        inputs = {"dy": dy, "x": x}
    if op.startswith("scaled_"):
        inputs["row_scales"] = rng.uniform(0.05, 1, int(np.prod(shape[:-1]))).astype(np.float32)
    return inputs


#: Every mutant by name.
MUTANTS = {}


def convention(expected, op, scaling=None, params=None, *, both=False, **settings):
    """Decorator: the function writes what a kernel with a wrong convention writes. `expected`: a name or several."""
    names = (expected,) if isinstance(expected, str) else tuple(expected)
    return _register("convention", names, both, op, scaling, params, **settings)


def corruption(op, scaling=None, params=None, *, also=(), **settings):
    """Decorator: the function writes right outputs with wrong entries. `also`: names that are true of them too."""
    return _register("corruption", tuple(also), False, op, scaling, params, **settings)


def _register(
    kind,
    expected,
    both,
    op,
    scaling,
    params,
    *,
    shape,
    dtype=BF16,
    data="normal",
    rowwise=True,
    columnwise=False,
    dbias=False,
    ulp=2,
):
    def add(write):
        name = write.__name__.replace("_", "-")
        assert name not in MUTANTS, f"{name} twice"
        seed, sentence = zlib.crc32(name.encode()), (write.__doc__ or "").strip()
        MUTANTS[name] = Mutant(
            name=name,
            op=op,
            scaling=scaling,
            params=params or {},
            dtype=np.dtype(dtype),
            shape=shape,
            kind=kind,
            expected=expected,
            both=both,
            data=data,
            rowwise=rowwise,
            columnwise=columnwise,
            dbias=dbias,
            ulp=ulp,
            seed=seed,
            write=write,
            sentence=sentence,
        )
        return write

    return add
