"""What an operation takes and returns, by name: how the oracle sees the operations of `refops`.

`Case` binds a call of all but "matmul", which `refops.oracle.products` binds: which operation, its checked inputs and
settings. It knows the arrays that a kernel writes (`slots`) and what the reference writes there (`reference`).

| op                                   | inputs              | outputs             | with a scaling                 |
|--------------------------------------|---------------------|---------------------|--------------------------------|
| an activation: "gelu", "swiglu", ... | x                   | y                   | the arrays of a `Quantized`    |
| its gradient: "dgelu", "dswiglu" ... | dy, x               | dx, dbias           | the arrays of one, dbias       |
| "scaled_swiglu", ...                 | x, row_scales       | y                   |                                |
| "scaled_dswiglu", ...                | dy, x, row_scales   | dx, drow_scales     |                                |
| "quantize"                           | x                   |                     | the arrays of one, dbias       |
| "dequantize"                         | the arrays of one   | y                   |                                |
| "update_delayed_scale"               | amax_history, scale | amax_history, scale |                                |
| "matmul"                             | a, b, bias, c       | y                   |                                |

Short names of outputs: data (or codes), scale_inv (or scale, scales), amax stand for rowwise_data, rowwise_scale_inv,
amax_rowwise; columnwise_codes, columnwise_scales and their like for the columnwise ones (`ALIASES`). A quantized tensor
of any package stands for all of its arrays (`refops.oracle.quantized_tensors`).
"""

import math
from dataclasses import dataclass

import numpy as np

from refops import ops
from refops.activations import ACTIVATIONS, bind_activation
from refops.arguments import (
    BFLOAT16,
    did_you_mean,
    require_flag,
    require_high_precision_dtype,
    require_tensor,
    shown,
    with_article,
)
from refops.oracle.dumps import Slot, as_numpy, fit, native
from refops.oracle.geometry import Geometry
from refops.oracle.quantized_tensors import (
    QUANTIZED_ARRAYS,
    QuantizedParts,
    arrays_of,
    full_name,
    is_quantized,
    name_hint,
    parts_of,
    with_arrays,
)
from refops.quantization.delayed import update_delayed_scale
from refops.quantization.layout import one_order
from refops.quantization.quantize import check_shape
from refops.quantization.result import Quantized, stored_layout
from refops.scalings import named
from refops.tiles import InputSource, RowLayout

#: Parameters of "update_delayed_scale"; `fmt` is required.
UPDATE_PARAMETERS = ("fmt", "margin", "algorithm", "keep_unused")
INTERLEAVE = "glu_interleave_size"
#: Names that a quantized tensor may have among outputs: it is the result, whatever the operation calls that.
RESULTS = ("q", "y", "dx")


@dataclass(frozen=True)
class Operation:
    """An operation by name.

    Attributes:
        name: canonical name, a key of `OPERATIONS`.
        kind: the function of `refops` that computes it: "activation", "activation_grad", "scaled_activation",
            "scaled_activation_grad", "quantize", "dequantize" or "update_delayed_scale".
        activation: a key of `refops.ACTIVATIONS`, or None.
        inputs: names of the arrays that it reads.
        outputs: names of the arrays that it writes without a scaling.
        takes_scaling: whether its result can be quantized.
    """

    name: str
    kind: str
    activation: str | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    takes_scaling: bool = False

    @property
    def needs_scaling(self):
        """Whether it has no meaning without a scaling; a `Quantized` brings its own."""
        return self.kind in ("quantize", "dequantize")

    @property
    def gated(self):
        """Whether the input row is [act | gate]."""
        return self.activation is not None and ACTIVATIONS[self.activation].gated


def _operations():
    rows = []
    for name in ACTIVATIONS:
        rows.append(Operation(name, "activation", name, ("x",), ("y",), True))
        rows.append(Operation(f"d{name}", "activation_grad", name, ("dy", "x"), ("dx", "dbias"), True))
    for name in ops.SCALED_ACTIVATIONS:
        rows.append(Operation(f"scaled_{name}", "scaled_activation", name, ("x", "row_scales"), ("y",)))
        rows.append(
            Operation(
                f"scaled_d{name}", "scaled_activation_grad", name, ("dy", "x", "row_scales"), ("dx", "drow_scales")
            )
        )
    rows.append(Operation("quantize", "quantize", None, ("x",), (), True))
    rows.append(Operation("dequantize", "dequantize", None, ("q",), ("y",)))
    update = ("amax_history", "scale")
    rows.append(Operation("update_delayed_scale", "update_delayed_scale", None, update, update))
    return {row.name: row for row in rows}


#: Every operation by name.
OPERATIONS = _operations()
#: The product of two operands, each quantized by itself or plain: `refops.oracle.products` binds and judges its calls.
MATMUL = Operation("matmul", "matmul", None, ("a", "b"), ("y",))
#: Every operation that `refops.oracle.check` judges.
JUDGED = OPERATIONS | {MATMUL.name: MATMUL}
#: TE puts the d elsewhere in these.
_TE_SPELLINGS = {"clamped_dswiglu": "dclamped_swiglu", "scaled_clamped_dswiglu": "scaled_dclamped_swiglu"}


def require_operation(op, among=OPERATIONS):
    """Return the `Operation` named `op` in `among`; ValueError names similar ones."""
    name = _TE_SPELLINGS.get(op, op) if isinstance(op, str) else op
    if isinstance(name, str) and name in among:
        return among[name]
    raise ValueError(f"op must be one of {', '.join(among)}; got {shown(op)}{did_you_mean(name, among)}")


class Case:
    """One call of an operation, its arguments checked.

    Attributes:
        operation: the `Operation`.
        inputs: input name -> array; for dequantize {"q": Quantized}.
        scaling: settings, or None.
        params: parameters of the activation, glu_interleave_size, or those of the scale update.
        slots: output name -> `Slot`, everything that the operation can write.
        swizzled_scales: whether the dump's scales are in GEMM order.
    """

    def __init__(self, op, inputs, scaling=None, params=None, *, swizzled_scales=False):
        self.operation = require_operation(op)
        self.params = self._check_params(params)
        self.scaling = self._check_scaling(scaling)
        self.swizzled_scales = self._check_swizzled(swizzled_scales)
        self.inputs = self._check_inputs(inputs)
        self._check_call()
        self.slots = self._make_slots()

    # --- checks -----------------------------------------------------------------------------------

    def _check_params(self, params):
        if params is not None and not isinstance(params, dict):
            raise TypeError(f"params must be a dict of parameter names and values; got {shown(params)}")
        params, operation = dict(params or {}), self.operation
        if operation.kind == "update_delayed_scale":
            allowed = UPDATE_PARAMETERS
            if "fmt" not in params:
                raise ValueError(
                    f"params must hold fmt, refops.E4M3 or refops.E5M2, for {operation.name}; got {params}"
                )
        else:
            allowed = ACTIVATIONS[operation.activation].parameters if operation.activation else ()
            allowed += (INTERLEAVE,) * operation.kind.startswith("scaled")
        unknown = [name for name in params if name not in allowed]
        if unknown:
            takes = ", ".join(allowed) or "none"
            hint = did_you_mean(unknown[0], allowed)
            raise ValueError(f"params must be among those of {operation.name} ({takes}); got {shown(unknown[0])}{hint}")
        return params

    def _check_call(self):
        """Let the operation check that inputs, parameters and scaling fit before shapes are derived from them."""
        kind, name = self.operation.kind, self.operation.activation
        if kind in ("dequantize", "update_delayed_scale"):
            return
        if kind.startswith("scaled"):
            interleave, params = self.params.get(INTERLEAVE, 0), self._activation_params
            ops.ScaledRows(name, self.inputs["x"], self.inputs["row_scales"], interleave, params)
            return
        source = self.source
        if self.scaling is not None:
            if name is not None:
                ops.check_fusable(source, self.scaling)
            check_shape(self.scaling, source.tensor_shape, source.shape, columnwise=False)

    def _check_scaling(self, scaling):
        name = self.operation.name
        if scaling is None:
            if self.operation.kind == "quantize":
                raise ValueError("scaling is required for quantize: a setting such as refops.MXFP8Scaling; got None")
            return None
        if not (self.operation.takes_scaling or self.operation.needs_scaling):
            raise ValueError(f"scaling must be None for {name}, which does not quantize; got {shown(scaling)}")
        return named(scaling)

    def _check_swizzled(self, swizzled_scales):
        fixed = self.scaling is not None and self.scaling.layout.scale_order == "fixed"
        if require_flag(swizzled_scales, "swizzled_scales") and fixed:
            why = f"{type(self.scaling).__name__}: {one_order(self.scaling)}"
            raise ValueError(f"swizzled_scales must be False with {why}; got True")
        return swizzled_scales

    def _check_inputs(self, inputs):
        operation = self.operation
        if operation.kind == "dequantize":
            return {"q": self._quantized_input(inputs)}
        if not isinstance(inputs, dict):
            if len(operation.inputs) != 1:
                expected = ", ".join(operation.inputs)
                raise TypeError(f"inputs must be a dict with {expected} for {operation.name}; got {shown(inputs)}")
            inputs = {operation.inputs[0]: inputs}
        for name in operation.inputs:
            if name not in inputs:
                got = ", ".join(map(str, inputs)) or "nothing"
                raise ValueError(f"inputs must hold {', '.join(operation.inputs)} for {operation.name}; got {got}")
        unknown = [name for name in inputs if name not in operation.inputs]
        if unknown:
            expected = ", ".join(operation.inputs)
            hint = did_you_mean(unknown[0], operation.inputs)
            raise ValueError(
                f"inputs must hold {expected} alone for {operation.name}; got {shown(unknown[0])} too{hint}"
            )
        arrays = {name: native(as_numpy(inputs[name], name)) for name in operation.inputs}
        if operation.kind == "update_delayed_scale":
            return arrays
        return {name: require_tensor(array, name) for name, array in arrays.items()}

    def _quantized_input(self, inputs):
        if isinstance(inputs, dict) and set(inputs) == {"q"}:
            inputs = inputs["q"]
        tensor = parts_of(inputs) if is_quantized(inputs) else None
        if tensor is not None and tensor.scaling is not None:
            if self.scaling not in (None, tensor.scaling):
                raise ValueError(f"scaling must be that of the {tensor.kind}, {tensor.scaling}; got {self.scaling}")
            self.scaling = tensor.scaling
        if isinstance(inputs, Quantized):
            return inputs
        if tensor is None and not isinstance(inputs, dict):
            raise TypeError(f"inputs must be a Quantized or a dict of its arrays for dequantize; got {shown(inputs)}")
        if self.scaling is None:
            of = "a dict of arrays" if tensor is None else f"{with_article(tensor.kind)}, which does not say it"
            raise ValueError(f"scaling is required to dequantize {of}; got None")
        if tensor is None:
            tensor = QuantizedParts("dict", named_arrays(inputs, QUANTIZED_ARRAYS, "inputs"))
        tensor.require_scaling(self.scaling, "inputs")
        return self._quantized_of(tensor)

    def _quantized_of(self, tensor):
        """The `Quantized` of a tensor's `QuantizedParts` with the scaling of the case."""
        inputs = tensor.arrays
        direction = "rowwise" if "rowwise_data" in inputs else "columnwise"
        if f"{direction}_data" not in inputs:
            raise ValueError(f"inputs must hold rowwise_data or columnwise_data for dequantize; got {list(inputs)}")
        shape = tensor.shape
        if shape is None:
            stored = as_numpy(inputs[f"{direction}_data"], f"{direction}_data").shape
            shape = _shape_of_data(stored, self.scaling, direction)
        slots, swizzled = quantized_slots(self.scaling, shape), self.swizzled_scales or tensor.swizzled_scales
        arrays = {}
        for name, value in inputs.items():
            if name not in slots:
                raise ValueError(f"inputs must hold {', '.join(slots)} for {self.scaling}; got {name}")
            arrays[name], padding_given = fit(value, slots[name])
            if swizzled and not padding_given:
                raise ValueError(f"{name} must have its padding when swizzled, {slots[name].shape}; got without")
        return Quantized(
            **arrays,
            scaling=self.scaling,
            shape=shape,
            dtype=np.dtype(np.float32) if tensor.dtype is None else tensor.dtype,
            with_gemm_swizzled_scales=swizzled,
        )

    # --- what it writes ---------------------------------------------------------------------------

    @property
    def quantizes(self):
        """Whether the outputs are a Quantized's arrays."""
        return self.scaling is not None and self.operation.kind != "dequantize"

    def _make_slots(self):
        kind, x = self.operation.kind, self.inputs.get("x")
        if kind == "dequantize":
            q = self.inputs["q"]
            return {"y": _values_slot("y", q.shape, BFLOAT16)}
        if kind == "update_delayed_scale":
            history, scale = self.inputs["amax_history"], self.inputs["scale"]
            return {
                "amax_history": Slot("amax_history", "amax", history.shape, history.shape, np.dtype(np.float32)),
                "scale": Slot("scale", "amax", scale.shape, scale.shape, np.dtype(np.float32)),
            }
        shape = self.result_shape
        if self.quantizes:
            slots = quantized_slots(self.scaling, shape)
            if kind != "activation":
                slots["dbias"] = _values_slot("dbias", shape[-1:], x.dtype)
            return slots
        if kind in ("activation", "scaled_activation"):
            return {"y": _values_slot("y", shape, x.dtype)}
        slots = {"dx": _values_slot("dx", shape, x.dtype)}
        if kind == "activation_grad":
            slots["dbias"] = _values_slot("dbias", shape[-1:], x.dtype)
        else:
            row_scales = self.inputs["row_scales"]
            slots["drow_scales"] = _values_slot("drow_scales", row_scales.shape, row_scales.dtype)
        return slots

    @property
    def is_empty(self):
        """Whether an input has no elements."""
        return any(math.prod(array.shape) == 0 for array in self.inputs.values())

    @property
    def gated(self):
        """Whether the input row is [act | gate]."""
        return self.operation.gated

    @property
    def result_shape(self):
        """Shape of the tensor that is computed, before any quantization."""
        if self.operation.kind == "dequantize":
            return self.inputs["q"].shape
        x = self.inputs["x"]
        if self.gated and not self.operation.kind.endswith("grad"):
            return (*x.shape[:-1], x.shape[-1] // 2)
        return x.shape

    @property
    def matrix_shape(self):
        """(M, K) of that tensor: its leading dimensions merged; () where none is computed, or a scalar."""
        shape = () if self.operation.kind == "update_delayed_scale" else self.result_shape
        return (math.prod(shape[:-1]), shape[-1]) if shape else ()

    @property
    def bound(self):
        """The activation with its parameters, None where there is none."""
        name = self.operation.activation
        return None if name is None else bind_activation(name, self._activation_params)

    @property
    def source(self):
        """`Source` of what "quantize", an activation or its gradient computes, float32 before any rounding."""
        if self.operation.kind == "quantize":
            return InputSource(self.inputs["x"])
        kinds = {"activation": ops.ActivationSource, "activation_grad": ops.ActivationGradSource}
        return kinds[self.operation.kind](self.bound, *self.inputs.values())

    @property
    def row_layout(self):
        """Where act and gate lie in a row of x: one run each, or runs of glu_interleave_size."""
        width = self.inputs["x"].shape[-1] // (1 + self.gated)
        return RowLayout(self.params.get(INTERLEAVE, 0) or max(width, 1))

    @property
    def _activation_params(self):
        return {name: value for name, value in self.params.items() if name != INTERLEAVE}

    def fit_outputs(self, outputs):
        """Return (arrays, unpadded): output name -> array as stored, and the names whose padding was not given.

        Raises:
            ValueError: no output, an unknown name, a shape that contradicts the operation.
            TypeError: a dtype that does.
        """
        outputs = self.name_outputs(outputs)
        arrays, unpadded = {}, set()
        for name, slot in self.slots.items():
            if name in outputs:
                arrays[name], padding_given = fit(outputs[name], slot)
                if not padding_given:
                    unpadded.add(name)
        return arrays, unpadded

    def name_outputs(self, outputs):
        """Return output name -> array, as given, of what `oracle.check` takes as outputs; errors as `fit_outputs`."""
        if is_quantized(outputs):
            outputs = {"q": outputs}
        elif not isinstance(outputs, dict):
            if len(self.slots) > 1 and self.operation.kind not in ("activation_grad", "scaled_activation_grad"):
                expected = ", ".join(self.slots)
                raise TypeError(f"outputs must be a dict of {expected}, or a Quantized; got {shown(outputs)}")
            outputs = {next(iter(self.slots)): outputs}
        outputs, tensors = with_arrays(outputs, RESULTS)
        if tensors and not self.quantizes:
            kind = with_article(tensors[0].kind)
            raise ValueError(f"scaling is required where outputs hold a quantized tensor; got {kind}")
        for tensor in tensors:
            tensor.require_scaling(self.scaling, "outputs")
        hint = ""
        if self.operation.takes_scaling and self.scaling is None:
            hint = "; codes and scales are the outputs with a scaling: give scaling"
        outputs = named_arrays(outputs, self.slots, "outputs", hint)
        if not outputs:
            raise ValueError(f"outputs must hold at least one of {', '.join(self.slots)}; got none")
        return outputs

    # --- what the reference writes ----------------------------------------------------------------

    def reference(self, outputs):
        """Return what the reference writes for each of `outputs`: name -> array (only its dtype is used for values)."""
        kind, activation = self.operation.kind, self.operation.activation
        if kind == "dequantize":
            return {"y": ops.dequantize(self.inputs["q"], dtype=outputs["y"].dtype)}
        if kind == "update_delayed_scale":
            history, scale = update_delayed_scale(*self.inputs.values(), **self.params)
            return {"amax_history": history, "scale": np.asarray(scale)}
        dbias = {"dbias": True} if "dbias" in outputs else {}
        if self.quantizes:
            return self._quantized_reference(outputs, dbias)
        name = "dx" if "dx" in self.slots else "y"
        out_dtype = outputs[name].dtype if name in outputs else None
        function = getattr(ops, kind)
        result = function(activation, *self.inputs.values(), out_dtype=out_dtype, **self.params, **dbias)
        results = result if isinstance(result, tuple) else (result,)
        named = dict(zip((n for n in self.slots if n != "dbias" or dbias), results, strict=True))
        for other in ("dbias", "drow_scales"):
            if other in named:
                _require_same_dtype(other, named[other], outputs)
        return named

    def _quantized_reference(self, outputs, dbias):
        columnwise = any("columnwise" in name for name in outputs)
        rowwise = any("rowwise" in name for name in outputs) or not columnwise
        directions = {"rowwise": rowwise, "columnwise": columnwise}
        tensors = self.inputs.values()
        if self.operation.kind == "quantize":
            result = ops.quantize(*tensors, self.scaling, **directions, **dbias)
        elif self.operation.kind == "activation":
            result = ops.activation_quantize(
                self.operation.activation, *tensors, self.scaling, **directions, **self.params
            )
        else:
            result = ops.activation_grad_quantize(
                self.operation.activation, *tensors, self.scaling, **directions, **dbias, **self.params
            )
        q, sums = result if dbias else (result, None)
        named = arrays_of(q)
        if sums is not None:
            named["dbias"] = sums
            _require_same_dtype("dbias", sums, outputs)
        return named


def _require_same_dtype(name, expected, outputs):
    if name in outputs and outputs[name].dtype != expected.dtype:
        raise TypeError(f"{name} must be {expected.dtype}; got {outputs[name].dtype}")


def named_arrays(given, known, what, hint=""):
    """Return the entries of `given` under their full names; ValueError, with the hint, for a name not in `known`."""
    named = {}
    for name, value in given.items():
        full = full_name(name, known)
        if full not in known:
            similar = name_hint(name, known)
            raise ValueError(f"{what} must be among {', '.join(known)}; got {shown(name)}{similar}{hint}")
        if full in named:
            raise ValueError(f"{what} must hold {full} once; got it twice ({shown(name)} is the same)")
        named[full] = value
    return named


def _values_slot(name, shape, dtype):
    return Slot(name, "values", tuple(shape), tuple(shape), require_high_precision_dtype(dtype, name))


def quantized_slots(scaling, shape):
    """Return array name -> `Slot` for everything that a Quantized of a tensor of `shape` can hold."""
    slots = {}
    layout = stored_layout(scaling, shape)
    for name in QUANTIZED_ARRAYS:
        if name not in layout:
            continue
        stored, dtype = layout[name]
        if name.endswith("_data"):
            slots[name] = Slot(name, "codes", stored, stored, dtype, scaling.fmt, scaling.layout.packed)
        elif name.startswith("amax"):
            slots[name] = Slot(name, "amax", stored, stored, dtype)
        else:
            tensor, own = (math.prod(shape[:-1]), shape[-1]), scaling.layout
            valid = Geometry.of(scaling, name).valid_scale_shape(tensor)
            slots[name] = Slot(name, "scales", stored, valid, dtype, own.scale_format, layout=own, tensor=tensor)
    return slots


def _shape_of_data(stored, scaling, direction):
    """Return the tensor's shape from that of its data."""
    if not stored:
        raise ValueError(f"{direction}_data must have at least one dimension; got a scalar")
    layout = scaling.layout
    if not layout.data_transposed(direction == "columnwise"):
        return (*stored[:-1], layout.packed * stored[-1])
    k, *leading = stored
    return (*(layout.packed * size for size in leading), k)
