"""What each backend can do, found by doing it: every operation with every scaling, called and judged.

    python docs/capabilities.py --write         # capabilities.json, beside this file
    python docs/capabilities.py --write mxfp8   # of that, this row

A backend is credited where its call returns and the result is right: the bits of `refops` for casts, scales, amaxes and
dequantization (for `refops` itself `make report` has other judges), the oracle's verdict for activations. It is not
credited where nothing has the settings, or the kernels cannot make them (NotImplementedError). Anything else, a wrong
bit or another error, ends it.
The GPU kernels run in the simulator, as Python, in a process of their own. The tables of README and of the guide are
made of it by `docs/generate.py`, and the tests measure again.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

import refops
from refops import oracle
from refops.survey import SCALINGS

#: Backend -> what the tables call it.
BACKENDS = {
    "refops": "refops",
    "host": "cuda_kernels.host",
    "kernels": "cuda_kernels, GPU kernels (simulated)",
    "torch": "fuser, PyTorch",
    "jax": "fuser.xla, JAX",
}
#: Row of the table -> its head.
TITLES = {"none": "no scaling: float32, float16, bfloat16", **{row.name: row.title for row in SCALINGS.values()}}
RESULTS = Path(__file__).with_name("capabilities.json")
ROWS, COLUMNS = 32, 128
#: An activation of each kind for the table; all of them have a line of their own.
UNARY, GATED = "gelu", "swiglu"
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
FIELDS = tuple(f"{copy}_{name}" for copy in ("rowwise", "columnwise") for name in ("data", "scale_inv"))
AMAXES = ("amax_rowwise", "amax_columnwise")


class WrongResultError(AssertionError):
    """A backend returned something that is not right."""


def inputs(name, dtype=ml_dtypes.bfloat16):
    """(x, dy) of an activation whose output is (ROWS, COLUMNS)."""
    random = np.random.default_rng(0)
    width = COLUMNS * (1 + refops.ACTIVATIONS[name].gated)
    return [random.standard_normal((ROWS, w), np.float32).astype(dtype) for w in (width, COLUMNS)]


# --- judging ----------------------------------------------------------------------------------------


def require_equal(result, expected, what):
    """Raise `WrongResultError` where two arrays differ in a bit, or one is missing."""
    if (result is None) != (expected is None):
        raise WrongResultError(f"{what}: one of the two is missing")
    if expected is not None:
        result = np.asarray(result)
        if result.shape != expected.shape or result.tobytes() != expected.tobytes():
            raise WrongResultError(f"{what}: other bits than refops")


def require_same(q, expected):
    """Raise `WrongResultError` where a quantized tensor, with TE's attribute names, is not `expected` to the bit."""
    for field in (*FIELDS, *AMAXES):
        require_equal(getattr(q, field), getattr(expected, field), field)


def require_right(operation, tensors, outputs, scaling=None):
    """Raise `WrongResultError` where the oracle does not accept `outputs`."""
    report = oracle.check(operation, tensors, outputs, scaling=scaling)
    if not report.ok:
        raise WrongResultError(str(report))


def arrays_of(q):
    """TE's name -> array, of those that `q` has."""
    return {field: getattr(q, field) for field in FIELDS if getattr(q, field) is not None}


# --- the operations, for the backends whose calls are those of refops ---------------------------------


def used(q, scaling):
    """The settings that made `q`: those that were asked for, but for a seed that the backend may draw."""
    if scaling.random is not None:
        scaling = replace(scaling, seed=q.scaling.seed, offset=q.scaling.offset)
    if q.scaling != scaling:
        raise WrongResultError(f"quantized with {q.scaling} instead of {scaling}")
    return scaling


def quantize(library, scaling, **copies):
    x, _ = inputs(UNARY)
    q = library.quantize(x, scaling, **copies)
    require_same(q, refops.quantize(x, used(q, scaling), **copies))


def dequantize(library, scaling):
    """The columnwise copy of RHT is undone in another order of sums: the rowwise copy is compared."""
    x, _ = inputs(UNARY)
    q = library.quantize(x, scaling)
    expected = refops.dequantize(refops.quantize(x, used(q, scaling)))
    require_equal(library.dequantize(q), expected, "dequantized")


def swizzle(library, scaling):
    x, _ = inputs(UNARY)
    q = library.quantize(x, scaling)
    require_same(q.swizzled(), refops.quantize(x, used(q, scaling)).swizzled())


def evaluate(library, name):
    """An activation and its gradient in high precision, of every dtype."""
    for dtype in DTYPES:
        x, dy = inputs(name, dtype)
        require_right(name, x, library.activation(name, x))
        dx, dbias = library.activation_grad(name, dy, x, dbias=True)
        require_right(f"d{name}", {"x": x, "dy": dy}, {"dx": dx, "dbias": dbias})


def activate(library, scaling):
    for name in (UNARY, GATED):
        x, _ = inputs(name)
        if scaling is None:
            require_right(name, x, library.activation(name, x))
        else:
            q = library.activation_quantize(name, x, scaling)
            require_right(name, x, arrays_of(q), used(q, scaling))


def differentiate(library, scaling):
    for name in (UNARY, GATED):
        if scaling is None:
            evaluate(library, name)
            continue
        x, dy = inputs(name)
        q, dbias = library.activation_grad_quantize(name, dy, x, scaling, dbias=True)
        require_right(f"d{name}", {"x": x, "dy": dy}, arrays_of(q) | {"dbias": dbias}, used(q, scaling))


@dataclass(frozen=True)
class Operation:
    """A column of the table.

    Attributes:
        title: its head.
        run: function of (library, scaling) that raises `WrongResultError` or a refusal.
        unscaled: whether it exists without a scaling, too.
        blocks: whether only blocks with one-byte scales have it: other scales are read by GEMMs as they are stored.
    """

    title: str
    run: Callable
    unscaled: bool = False
    blocks: bool = False


OPERATIONS = {
    "rowwise": Operation("cast, rowwise", quantize),
    "columnwise": Operation("both directions", lambda library, s: quantize(library, s, columnwise=True)),
    "dequantize": Operation("dequantize", dequantize),
    "activation": Operation("activation + cast", activate, unscaled=True),
    "gradient": Operation("gradient + bias gradient + cast", differentiate, unscaled=True),
    "swizzle": Operation("scales in GEMM order", swizzle, blocks=True),
}


# --- backends whose calls are others --------------------------------------------------------------------


class Torch:
    """`fuser` by its quantizers and TE's functions, with the calls and results of `refops`."""

    def __init__(self):
        import torch

        from fuser import DType, functional, quantization
        from fuser.dispatch import as_numpy, as_torch, swizzled

        self.torch, self.functional, self.quantization, self.dtype = torch, functional, quantization, DType
        self.as_numpy, self.as_torch, self.swizzled = as_numpy, as_torch, swizzled

    def quantizer(self, scaling, rowwise=True, columnwise=False):
        """The quantizer that has these settings: TE's, or the one for what TE does not offer.

        Raises:
            NotImplementedError: none has.
        """
        made = next((one for one in self._quantizers(scaling) if one.layout_scaling() == scaling), None)
        if made is None:
            if scaling.layout.block is None:
                raise NotImplementedError(f"no quantizer has the settings {scaling}")
            made = self.quantization.BlockScaledQuantizer(scaling)
        made.set_usage(rowwise=rowwise, columnwise=columnwise)
        return made

    def _quantizers(self, scaling):
        """TE's quantizers, with what each can take of the settings; which settings it has then it says itself."""
        quantizers, ones = self.quantization, self.torch.ones(1)
        fmt = self.dtype.kFloat8E5M2 if scaling.fmt == refops.E5M2 else self.dtype.kFloat8E4M3

        def setting(name, other):
            return getattr(scaling, name, other)

        yield quantizers.Float8Quantizer(ones * (scaling.given or 1), self.torch.zeros(1), fmt)
        yield quantizers.Float8CurrentScalingQuantizer(fmt, force_pow_2_scales=setting("power_2_scale", False))
        yield quantizers.Float8BlockQuantizer(
            fmt, rowwise=True, columnwise=False, block_scaling_dim=setting("block_dim", 1)
        )
        yield quantizers.MXFP8Quantizer(fmt)
        yield quantizers.NVFP4Quantizer(
            with_rht=setting("rht", False),
            with_post_rht_amax=setting("rht", False),
            with_2d_quantization=setting("two_d", False),
            stochastic_rounding=setting("stochastic_rounding", False),
            row_scaled_nvfp4=setting("row_scaled", False),
            nvfp4_use_4over6=setting("four_over_six", None) is not None,
            nvfp4_e4m3_max=setting("e4m3_max", 448),
            nvfp4_4over6_err_mode=setting("four_over_six", None) or "mae",
        )

    def quantize(self, x, scaling, **copies):
        return TorchResult(self, self.functional.quantize(self.as_torch(x), self.quantizer(scaling, **copies)))

    def dequantize(self, q):
        return self.as_numpy(self.functional.dequantize(q.tensor, self.torch.float32))

    def activation(self, name, x):
        return self.as_numpy(getattr(self.functional, name)(self.as_torch(x)))

    def activation_quantize(self, name, x, scaling):
        return TorchResult(self, getattr(self.functional, name)(self.as_torch(x), self.quantizer(scaling)))

    def activation_grad(self, name, dy, x, dbias):
        return self._gradient(name, dy, x, None, self.as_numpy)

    def activation_grad_quantize(self, name, dy, x, scaling, dbias):
        return self._gradient(name, dy, x, self.quantizer(scaling), lambda tensor: TorchResult(self, tensor))

    def _gradient(self, name, dy, x, quantizer, result):
        function = getattr(self.functional, f"dbias_{self.functional.gradient_name(name)}")
        dbias, dx = function(self.as_torch(dy), self.as_torch(x), quantizer)
        return result(dx), self.as_numpy(dbias)


class TorchResult:
    """A quantized tensor's arrays by TE's names, as NumPy arrays."""

    def __init__(self, library, tensor, buffers=None):
        self.library, self.tensor, self.buffers = library, tensor, buffers or tensor.buffers

    def __getattr__(self, name):
        found = self.buffers.tensors.get(name)
        return None if found is None else self.library.as_numpy(found)

    @property
    def scaling(self):
        return self.buffers.scaling

    def swizzled(self):
        return TorchResult(self.library, None, self.library.swizzled(self.buffers))


class Jax:
    """`fuser.xla` by its quantizers and TE's functions, with the calls and results of `refops`."""

    def __init__(self):
        import jax

        jax.config.update("jax_platforms", "cpu")
        from fuser import xla
        from fuser.xla import settings

        self.jnp, self.xla, self.settings = jax.numpy, xla, settings
        self.types = {settings.ACTIVATION_NAMES[number]: key for key, number in xla.ActivationEnum.items()}

    def quantizer(self, scaling, rowwise=True, columnwise=False):
        """As `Torch.quantizer`: that of the mode which has these settings."""
        layout = self.xla.QuantizeLayout.ROWWISE_COLWISE if columnwise else self.xla.QuantizeLayout.ROWWISE
        for mode in self.xla.ScalingMode:
            for dtype in mode.data_dtypes:
                if self.settings.scaling_of(mode, self.settings.FORMATS[dtype]) == scaling:
                    scale = {} if scaling.given is None else {"scale": self.jnp.ones((1,), self.jnp.float32)}
                    return self.xla.QuantizerFactory.create(
                        scaling_mode=mode, q_layout=layout, q_dtype=getattr(self.jnp, dtype), **scale
                    )
        raise NotImplementedError(f"no scaling mode has the settings {scaling}")

    def quantize(self, x, scaling, **copies):
        quantizer = self.quantizer(scaling, **copies)
        return JaxResult(quantizer.quantize(self.jnp.asarray(x), dq_dtype=self.jnp.float32), scaling)

    def dequantize(self, q):
        return np.asarray(q.tensor.dequantize())

    def activation(self, name, x):
        return np.asarray(self.xla.act_lu(*self._activation(name, x)).data)

    def activation_quantize(self, name, x, scaling):
        return JaxResult(self.xla.act_lu(*self._activation(name, x), self.quantizer(scaling)), scaling)

    def activation_grad(self, name, dy, x, dbias):
        dx, dbias = self._gradient(name, dy, x, None)
        return np.asarray(dx.data).reshape(x.shape), np.asarray(dbias).ravel()

    def activation_grad_quantize(self, name, dy, x, scaling, dbias):
        dx, dbias = self._gradient(name, dy, x, self.quantizer(scaling))
        return JaxResult(dx, scaling), np.asarray(dbias).ravel()

    def _activation(self, name, x):
        if name not in self.types:
            raise NotImplementedError(f"TE's JAX interface has no {name}")
        halves = 1 + refops.ACTIVATIONS[name].gated
        return self.jnp.asarray(x.reshape(ROWS, halves, -1)), self.types[name]

    def _gradient(self, name, dy, x, quantizer):
        x, kind = self._activation(name, x)
        return self.xla.quantize_dact_dbias(self.jnp.asarray(dy), x, kind, True, quantizer)


class JaxResult:
    """A scaled tensor's arrays by TE's names, in TE's C layout: scales padded, FP4 packed."""

    def __init__(self, tensor, scaling):
        self.tensor, self.scaling = tensor, scaling
        copies = [tensor] if hasattr(tensor, "is_colwise") else [tensor.rowwise_tensor, tensor.colwise_tensor]
        self.arrays = dict.fromkeys((*FIELDS, *AMAXES))
        for copy in copies:
            self._add("columnwise" if copy.is_colwise else "rowwise", copy, scaling)

    def _add(self, name, copy, scaling):
        data = np.asarray(copy.data)
        axis = copy.flatten_axis
        data = data.reshape(int(np.prod(data.shape[:axis])), -1).view(np.uint8)
        scales = np.asarray(copy.scale_inv)
        if copy.scaling_mode.is_block_scaling:
            scales = scales.reshape(int(np.prod(scales.shape[:axis])), -1).view(np.uint8)
            rows, columns = scales.shape
            layout, columnwise = scaling.layout, name == "columnwise"
            row_tile, column_tile = layout.padding[:: -1 if layout.scales_inner_first[columnwise] else 1]
            scales = np.pad(scales, ((0, -rows % row_tile), (0, -columns % column_tile)))
        if scaling.layout.packed == 2:
            data = refops.pack_fp4(data)
        self.arrays[f"{name}_data"], self.arrays[f"{name}_scale_inv"] = data, scales
        if copy.amax is not None and copy.amax.size:
            self.arrays[f"amax_{name}"] = np.asarray(copy.amax)

    def __getattr__(self, name):
        if name in (*FIELDS, *AMAXES):
            return self.arrays[name]
        raise AttributeError(name)

    def swizzled(self):
        raise NotImplementedError("TE's JAX interface has no scales in GEMM order")


# --- the table ------------------------------------------------------------------------------------------


def library_of(backend):
    """What has the calls of `refops` for a backend."""
    if backend == "refops":
        return refops
    if backend == "host":
        from cuda_kernels import host

        return host
    if backend == "kernels":
        import cuda_kernels

        return cuda_kernels
    return {"torch": Torch, "jax": Jax}[backend]()


def offered(call, *arguments):
    """Whether a call is offered: it returns, or is refused."""
    try:
        call(*arguments)
    except NotImplementedError:
        return False
    return True


def operations_of(scaling):
    """The names of the operations that exist with a scaling, None without one."""
    blocks = scaling is not None and scaling.layout.scale_order == "gemm"
    return [k for k, op in OPERATIONS.items() if (op.unscaled if scaling is None else blocks or not op.blocks)]


def measure(backend, rows):
    """Return {"scalings": {scaling: [operations]}, "activations": [names]} of one backend, in this process.

    Args:
        rows: names of scalings, "none" among them, and of activations: what is measured.
    """
    library = library_of(backend)
    scalings = {"none": None} | {name: row.scaling for name, row in SCALINGS.items()}
    found = {name: offered_operations(library, scaling) for name, scaling in scalings.items() if name in rows}
    names = [name for name in refops.ACTIVATIONS if name in rows and offered(evaluate, library, name)]
    return {"scalings": found, "activations": names}


def offered_operations(library, scaling):
    """The names of the operations that a backend has with a scaling, None without one; each was called and judged."""
    return [k for k in operations_of(scaling) if offered(OPERATIONS[k].run, library, scaling)]


def measure_all(rows):
    """Return backend -> what `measure` finds, each in its own process."""
    found = {}
    for backend in BACKENDS:
        environment = os.environ | ({"NUMBA_ENABLE_CUDASIM": "1"} if backend == "kernels" else {})
        command = [sys.executable, __file__, "--backend", backend, *rows]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"{backend}:\n{run.stderr}")
        found[backend] = json.loads(run.stdout)
    return found


def merged(before, found, rows):
    """What was measured before, with the rows that were measured now in their place in the table."""
    scalings = {**before["scalings"], **found["scalings"]}
    names = {*found["activations"], *(name for name in before["activations"] if name not in rows)}
    return {
        "scalings": {name: scalings[name] for name in TITLES if name in scalings},
        "activations": [name for name in refops.ACTIVATIONS if name in names],
    }


def table(found):
    """Markdown: scalings down, backends across; a cell says which operations are offered.

    Args:
        found: what `measure_all` returns.

    Raises:
        ValueError: rows that were not measured.
    """
    _require_measured(found)
    lines = [*_HEAD]
    for name in ("none", *SCALINGS):
        head = f"`{name}`: {TITLES[name]}" if name in SCALINGS else TITLES[name]
        lines.append(f"| {head} | {' | '.join(_scaling_cells(name, found))} |")
    lines.append(f"| {_ALL_ACTIVATIONS} | {' | '.join(_activation_cells(found))} |")
    return "\n".join(lines)


def table_in_short(found):
    """Markdown: the rows of `table` with the same cells in one, under the names that the command line has for them."""
    _require_measured(found)
    alike = {}
    for name in SCALINGS:
        alike.setdefault(tuple(_scaling_cells(name, found)), []).append(f"`{name}`")
    rows = {("no scaling",): _scaling_cells("none", found), (_ALL_ACTIVATIONS,): _activation_cells(found)}
    rows |= {tuple(names): cells for cells, names in alike.items()}
    return "\n".join([*_HEAD, *(f"| {', '.join(names)} | {' | '.join(cells)} |" for names, cells in rows.items())])


_HEAD = ["| | " + " | ".join(BACKENDS.values()) + " |", "|---" * (1 + len(BACKENDS)) + "|"]
_ALL_ACTIVATIONS = f"the {len(refops.ACTIVATIONS)} activations and their gradients"


def _require_measured(found):
    """Raise ValueError where a scaling has no row."""
    lacking = [name for name in ("none", *SCALINGS) if not all(name in found[b]["scalings"] for b in BACKENDS)]
    if lacking:
        command = f"docs/capabilities.py --write {' '.join(lacking)}"
        raise ValueError(f"{RESULTS.name} must have a row for each scaling; {command} measures what it lacks")


def _scaling_cells(name, found):
    """The cells of a scaling's row, or of "none"."""
    expected = operations_of(SCALINGS[name].scaling if name in SCALINGS else None)
    return [_cell(expected, found[backend]["scalings"][name]) for backend in BACKENDS]


def _activation_cells(found):
    """The cells of the row of all activations."""
    return [_cell(list(refops.ACTIVATIONS), found[backend]["activations"]) for backend in BACKENDS]


def _cell(expected, found):
    missing = [OPERATIONS[name].title if name in OPERATIONS else name for name in expected if name not in found]
    if not missing:
        return "all"
    return "-" if not found else f"all but {', '.join(missing)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="scalings and activations; default: all. Others stay as they were")
    parser.add_argument(
        "--backend", choices=BACKENDS, help="measure this one, in this process, and print what it offers"
    )
    parser.add_argument("--write", action="store_true", help=f"measure and write {RESULTS.name}")
    arguments = parser.parse_args()
    everything = (*TITLES, *refops.ACTIVATIONS)
    unknown = set(arguments.rows) - set(everything)
    if unknown:
        parser.error(f"rows must be among {', '.join(everything)}; got {', '.join(sorted(unknown))}")
    rows = arguments.rows or everything
    if arguments.backend:
        print(json.dumps(measure(arguments.backend, rows)))
    elif arguments.write:
        found = measure_all(rows)
        if arguments.rows:
            before = json.loads(RESULTS.read_text())
            found = {backend: merged(before[backend], found[backend], rows) for backend in BACKENDS}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    else:
        try:
            print(table(json.loads(RESULTS.read_text())))
        except ValueError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
