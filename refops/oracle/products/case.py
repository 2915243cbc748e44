"""A product and its dump, bound and checked: `ProductCase`."""

import numpy as np

from refops.arguments import (
    require_choice,
    require_flag,
    require_high_precision,
    require_number,
    require_tensor,
    shown,
)
from refops.oracle.dumps import Slot, as_numpy, fit, native
from refops.oracle.operation import MATMUL, Case, named_arrays
from refops.oracle.products.cards import require_card
from refops.oracle.products.operands import Operand, direction_of
from refops.oracle.products.product import Product
from refops.oracle.quantized_tensors import ALIASES, QUANTIZED_ARRAYS, is_quantized, name_hint
from refops.products import CARDS
from refops.quantization.result import matrix_shape
from refops.scalings import named

#: Axes of a and b as they are stored -> whether the contracted one comes first in each.
LAYOUTS = {"mk,nk": (False, False), "mk,kn": (False, True), "km,nk": (True, False), "km,kn": (True, True)}
OPERANDS = ("a", "b")
#: Parameter -> type of its value.
PARAMETERS = {"layout": str, "alpha": float, "beta": float, "card": str, "split_accumulator": bool}
#: Names of inputs: a whole operand, what is added, and the arrays of a quantized operand one by one.
INPUTS = (*OPERANDS, "bias", "c", *(f"{name}_{array}" for name in OPERANDS for array in QUANTIZED_ARRAYS))


class ProductCase:
    """One product, its arguments checked.

    Attributes:
        operation: the `Operation`.
        inputs: input name -> what was given.
        scaling: settings by operand, "a" and "b"; None where an operand is plain.
        params: as given.
        operands: "a" and "b" -> `Operand`.
        slots: {"y": `Slot`}.
        card: the card whose bits are demanded, or None. split_accumulator: whether its accumulator is emptied, or None.
    """

    operation, quantizes = MATMUL, False

    def __init__(self, inputs, scaling=None, params=None, *, swizzled_scales=False):
        self.params = self._check_params(params)
        self.layout = self.params.get("layout", "mk,nk")
        self.swizzled_scales = require_flag(swizzled_scales, "swizzled_scales")
        self.inputs = self._check_inputs(inputs)
        scalings = self._check_scaling(scaling)
        self.operands = {
            name: self._operand(name, scalings[name], contracted_first)
            for name, contracted_first in zip(OPERANDS, LAYOUTS[self.layout], strict=True)
        }
        self.scaling = {name: operand.scaling for name, operand in self.operands.items()}
        a, b = self.operands.values()
        if a.k != b.k:
            raise ValueError(
                f"a and b must have one contracted size with layout {self.layout!r}; got {a.k} in a and {b.k} in b"
            )
        self._check_transforms(a, b)
        shape = (*self._leading, b.rows)
        self.slots = {"y": Slot("y", "values", shape, shape, self._nominal_dtype())}
        self.bias, self.c = self._added("bias", (b.rows,)), self._added("c", shape)
        if self.c is None and "beta" in self.params:
            raise ValueError(f"beta needs c, which it multiplies; got beta={self.params['beta']} without")
        self.card, self.split_accumulator = self.params.get("card"), self.params.get("split_accumulator")
        if self.card is not None:
            require_card(self.product(np.dtype(np.float32)), self.card)

    # --- checks -----------------------------------------------------------------------------------

    def _check_params(self, params):
        if params is not None and not isinstance(params, dict):
            raise TypeError(f"params must be a dict of parameter names and values; got {shown(params)}")
        params = dict(params or {})
        unknown = [name for name in params if name not in PARAMETERS]
        if unknown:
            raise ValueError(f"params must be among {', '.join(PARAMETERS)} for matmul; got {shown(unknown[0])}")
        require_choice(params.get("layout", "mk,nk"), "layout", tuple(LAYOUTS))
        if "card" in params:
            require_choice(params["card"], "card", CARDS)
        if "split_accumulator" in params:
            require_flag(params["split_accumulator"], "split_accumulator")
            if "card" not in params:
                raise ValueError(f"split_accumulator needs card; got {params['split_accumulator']} without")
        for name in ("alpha", "beta"):
            if name in params:
                params[name] = float(require_number(params[name], name))
        return params

    def _check_inputs(self, inputs):
        """Input name -> what was given; the arrays of a quantized operand in a dict under the operand's name."""
        if not isinstance(inputs, dict):
            raise TypeError(f"inputs must be a dict with a and b for matmul; got {shown(inputs)}")
        checked, parts = {}, {name: {} for name in OPERANDS}
        for name, value in inputs.items():
            operand, _, part = name.partition("_") if isinstance(name, str) else (name, "", "")
            if name in (*OPERANDS, "bias", "c"):
                checked[name] = value
            elif operand in OPERANDS and (part in QUANTIZED_ARRAYS or part in ALIASES):
                parts[operand][part] = value
            else:
                known = "a, b, bias, c, or the arrays of a quantized operand such as a_codes and a_scales"
                raise ValueError(f"inputs must be among {known} for matmul; got {shown(name)}{name_hint(name, INPUTS)}")
        for name in OPERANDS:
            if parts[name] and name in checked:
                raise ValueError(f"inputs must hold {name} once; got {name} and {name}_{next(iter(parts[name]))}")
            if parts[name]:
                checked[name] = parts[name]
            if name not in checked:
                raise ValueError(f"inputs must hold a and b for matmul; got {', '.join(map(str, inputs)) or 'nothing'}")
        return checked

    def _check_scaling(self, scaling):
        """Settings by operand, as given."""
        if isinstance(scaling, dict):
            unknown = [name for name in scaling if name not in OPERANDS]
            if unknown:
                raise ValueError(f"scaling must hold settings of a and b; got {shown(unknown[0])}")
            return {name: None if scaling.get(name) is None else named(scaling[name]) for name in OPERANDS}
        return dict.fromkeys(OPERANDS, None if scaling is None else named(scaling))

    def _operand(self, name, scaling, contracted_first):
        value = self.inputs[name]
        if not (is_quantized(value) or isinstance(value, dict)):
            array = require_tensor(native(as_numpy(value, name)), name)
            self.inputs[name] = array
            return Operand.plain(name, array.reshape(matrix_shape(array.shape)), contracted_first)
        try:
            q = Case("dequantize", value, scaling, swizzled_scales=self._swizzled(scaling)).inputs["q"]
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} must be a quantized operand of matmul; got one of which {error}") from None
        self.inputs[name] = q
        columnwise = contracted_first
        if getattr(q, f"{direction_of(columnwise)}_data") is None:
            if q.scaling.layout.block is not None:
                wanted, held = map(direction_of, (columnwise, not columnwise))
                raise ValueError(
                    f"{name} must hold its {wanted} copy with layout {self.layout!r}; got the {held} one alone"
                )
            columnwise = not columnwise
        return Operand.read(name, q, columnwise, turned=columnwise != contracted_first)

    def _swizzled(self, scaling):
        """Whether an operand's scales are in GEMM order, as far as it has an order."""
        return self.swizzled_scales and (scaling is None or scaling.layout.scale_order == "gemm")

    def _check_transforms(self, a, b):
        masks = [o.scaling.hadamard if o.scaling is not None and o.columnwise else None for o in (a, b)]
        if masks[0] != masks[1]:
            raise ValueError(
                f"a and b must have gone through the same Hadamard transform, or none, in the copies that are read; "
                f"got sign masks {masks[0]} and {masks[1]}"
            )

    def _added(self, name, shape):
        """float64, the bias or c; None without."""
        if self.inputs.get(name) is None:
            return None
        array = require_high_precision(native(as_numpy(self.inputs[name], name)), name)
        whole = (self.operands["a"].rows, shape[-1]) if len(shape) > 1 else shape
        if array.shape not in (shape, whole):
            raise ValueError(f"{name} must have shape {shape}; got {array.shape}")
        return array.astype(np.float64).reshape(whole)

    # --- what it is -------------------------------------------------------------------------------

    @property
    def _leading(self):
        """Dimensions of the result before its last one."""
        a = self.inputs["a"]
        return (self.operands["a"].rows,) if LAYOUTS[self.layout][0] else a.shape[:-1]

    def _nominal_dtype(self):
        """dtype to assume of raw 16-bit results."""
        own = [o.elements.dtype if o.quantized is None else o.quantized.dtype for o in self.operands.values()]
        return next((dtype for dtype in own if dtype.itemsize == 2), np.dtype("bfloat16"))

    @property
    def is_empty(self):
        """Whether there is no result, or nothing to add up."""
        return 0 in (self.operands["a"].rows, self.operands["b"].rows, self.operands["a"].k)

    def product(self, dtype):
        """The `Product` whose result is stored in a dtype."""
        alpha, beta = (self.params.get(name, 1.0) for name in ("alpha", "beta"))
        return Product(**self.operands, dtype=dtype, alpha=alpha, beta=beta, bias=self.bias, c=self.c)

    def fit_outputs(self, outputs):
        """Return ({"y": array of its shape}, names without padding: none); errors as `Case.fit_outputs`."""
        if not isinstance(outputs, dict):
            outputs = {"y": outputs}
        given = named_arrays(outputs, self.slots, "outputs")
        if not given:
            raise ValueError("outputs must hold y; got none")
        return {"y": fit(given["y"], self.slots["y"])[0]}, set()
