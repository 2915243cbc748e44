"""A product and its dump, bound and checked: `ProductCase`."""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from refops.arguments import (
    require_choice,
    require_flag,
    require_high_precision,
    require_number,
    require_tensor,
    shown,
)
from refops.formats import FloatFormat, require_format
from refops.oracle.dumps import Slot, as_numpy, fit, native
from refops.oracle.operation import MATMUL, Case, named_arrays
from refops.oracle.products.cards import has_short_sums, require_card
from refops.oracle.products.operands import Operand, direction_of
from refops.oracle.products.product import Product
from refops.oracle.quantized_tensors import ALIASES, QUANTIZED_ARRAYS, is_quantized, name_hint
from refops.products import CARDS
from refops.quantization.result import matrix_shape
from refops.scalings import NAMED, named

#: Axes of a and b as they are stored -> whether the contracted one comes first in each.
LAYOUTS = {"mk,nk": (False, False), "mk,kn": (False, True), "km,nk": (True, False), "km,kn": (True, True)}
#: TE's names of layouts, in calls that give the operands in the other order, gemm(b, a) -> those of `LAYOUTS`.
TE_LAYOUTS = {"TN": "mk,nk", "NN": "mk,kn", "NT": "km,kn"}
OPERANDS = ("a", "b")
#: Parameter -> type of its value.
PARAMETERS = {
    "layout": str,
    "alpha": float,
    "beta": float,
    "a_fmt": FloatFormat,
    "b_fmt": FloatFormat,
    "card": str,
    "split_accumulator": bool,
    "sums": str,
}
#: What sums are right: those in float32 alone, or besides all that the few bits of Hopper's FP8 unit may give.
SUMS = ("float32", "short")
#: Names of inputs: a whole operand, what is added, and the arrays of a quantized operand one by one.
INPUTS = (*OPERANDS, "bias", "c", *(f"{name}_{array}" for name in OPERANDS for array in QUANTIZED_ARRAYS))


def input_name(name):
    """The one of `INPUTS` that a name stands for; the name itself if it stands for none."""
    operand, _, part = name.partition("_")
    return f"{operand}_{ALIASES.get(part, part)}" if part and operand in OPERANDS else name


class ProductCase:
    """One product, its arguments checked.

    Attributes:
        operation: the `Operation`.
        inputs: input name -> what was given: NumPy arrays, or quantized tensors as they came.
        scaling: settings by operand, "a" and "b"; None where an operand is plain.
        params: as given.
        operands: "a" and "b" -> `Operand`.
        slots: {"y": `Slot`}.
        card: the card whose bits are demanded, or None. split_accumulator: whether its accumulator is emptied, or None.
        sums: one of `SUMS`, or None.
    """

    operation, quantizes = MATMUL, False

    def __init__(self, inputs, scaling=None, params=None, *, swizzled_scales=False):
        self.params = self._check_params(params)
        self.layout = self.params.get("layout", "mk,nk")
        self.swizzled_scales = require_flag(swizzled_scales, "swizzled_scales")
        given = self._check_inputs(inputs)
        self.inputs = {name: value if _is_quantized(value) else as_numpy(value, name) for name, value in inputs.items()}
        scalings = self._check_scaling(scaling, given)
        self._leading = {}
        self.operands = {
            name: self._operand(name, given[name], scalings[name], contracted_first)
            for name, contracted_first in zip(OPERANDS, LAYOUTS[self.layout], strict=True)
        }
        self.scaling = {name: operand.scaling for name, operand in self.operands.items()}
        a, b = self.operands.values()
        if a.k != b.k:
            raise ValueError(
                f"a and b must have one contracted size with layout {self.layout!r}; got {a.k} in a and {b.k} in b"
            )
        self._check_transforms(a, b)
        shape = (*self._leading["a"], b.rows)
        self.slots = {"y": Slot("y", "values", shape, shape, self._nominal_dtype())}
        self.bias = self._added("bias", given.get("bias"), (b.rows,))
        self.c = self._added("c", given.get("c"), shape)
        if self.c is None and "beta" in self.params:
            raise ValueError(f"beta needs c, which it multiplies; got beta={self.params['beta']} without")
        self.card, self.split_accumulator = self.params.get("card"), self.params.get("split_accumulator")
        self.sums = self.params.get("sums")
        if self.sums == "short" and not has_short_sums(self.product(np.dtype(np.float32))):
            raise ValueError(
                "sums must be 'float32' for operands that Hopper's FP8 unit does not multiply; got 'short'"
            )
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
        layout = params.get("layout", "mk,nk")
        if isinstance(layout, str) and layout in TE_LAYOUTS:
            raise ValueError(
                f"layout must be one of {', '.join(map(repr, LAYOUTS))}; got {layout!r}: "
                f"gemm(b, a, layout={layout!r}) is {TE_LAYOUTS[layout]!r} here"
            )
        require_choice(layout, "layout", tuple(LAYOUTS))
        if "card" in params:
            require_choice(params["card"], "card", CARDS)
        if "split_accumulator" in params:
            require_flag(params["split_accumulator"], "split_accumulator")
            if "card" not in params:
                raise ValueError(f"split_accumulator needs card; got {params['split_accumulator']} without")
        if "sums" in params:
            require_choice(params["sums"], "sums", SUMS)
            if "card" in params:
                raise ValueError(f"sums goes without card, whose bits say all; got {params['sums']!r} beside")
        for name in ("a_fmt", "b_fmt"):
            if name in params:
                require_format(params[name], name=name)
        for name in ("alpha", "beta"):
            if name in params:
                params[name] = float(require_number(params[name], name))
        return params

    def _check_inputs(self, inputs):
        """Operand, bias or c -> what was given; the arrays of a quantized operand in a dict."""
        if not isinstance(inputs, dict):
            raise TypeError(f"inputs must be a dict with a and b for matmul; got {shown(inputs)}")
        checked, parts = {}, {name: {} for name in OPERANDS}
        for name, value in inputs.items():
            full = input_name(name) if isinstance(name, str) else name
            if full in (*OPERANDS, "bias", "c"):
                checked[name] = value
            elif full in INPUTS:
                parts[full[0]][full[2:]] = value
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

    def _check_scaling(self, scaling, given):
        """Settings by operand, as given."""
        quantized = [name for name in OPERANDS if _is_quantized(given[name])]
        scalings = scaling if isinstance(scaling, dict) else dict.fromkeys(quantized, scaling)
        unknown = [name for name in scalings if name not in quantized]
        if unknown or (scaling is not None and not quantized):
            got = shown(unknown[0] if unknown else scaling)
            raise ValueError(f"scaling must hold settings of quantized operands, of a and b; got {got}")
        made = {name: None if scalings.get(name) is None else named(scalings[name]) for name in OPERANDS}
        for name in OPERANDS:
            fmt = self.params.get(f"{name}_fmt")
            if fmt is not None and made[name] is None:
                raise ValueError(f"{name}_fmt needs scaling, whose format it replaces; got {fmt!r} without")
            if fmt is not None:
                made[name] = replace(made[name], fmt=fmt)
        return made

    def _operand(self, name, value, scaling, contracted_first):
        if not _is_quantized(value):
            array = require_tensor(native(as_numpy(value, name)), name)
            self._leading[name] = array.shape[:-1] if not contracted_first else array.shape[-1:]
            return Operand.plain(name, array.reshape(matrix_shape(array.shape)), contracted_first)
        if isinstance(value, dict) and scaling is None:
            raise ValueError(f"scaling is required where {name} is given by its arrays; got None")
        try:
            q = self._quantized(value, scaling)
        except (TypeError, ValueError) as error:
            fitting = self._fitting(value) if isinstance(value, dict) else []
            hint = f" (is the scaling {' or '.join(fitting)}?)" if fitting else ""
            raise type(error)(f"{name} must be a quantized operand of matmul; got one of which {error}{hint}") from None
        self._leading[name] = q.shape[-1:] if contracted_first else q.shape[:-1]
        columnwise = contracted_first
        if getattr(q, f"{direction_of(columnwise)}_data") is None:
            if q.scaling.layout.block is not None:
                wanted, held = map(direction_of, (columnwise, not columnwise))
                raise ValueError(
                    f"{name} must hold its {wanted} copy with layout {self.layout!r}; got the {held} one alone"
                )
            columnwise = not columnwise
        return Operand.read(name, q, columnwise, turned=columnwise != contracted_first)

    def _quantized(self, value, scaling):
        """The `Quantized` of an operand."""
        return Case("dequantize", value, scaling, swizzled_scales=self._swizzled(scaling)).inputs["q"]

    def _fitting(self, arrays):
        """The first name of each kind and layout of scalings that have such arrays."""
        found = {}
        for name, row in NAMED.items():
            with suppress(TypeError, ValueError):
                self._quantized(arrays, row.scaling)
                found.setdefault((type(row.scaling), row.scaling.layout), name)
        return list(found.values())

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

    def _added(self, name, value, shape):
        """float64, the bias or c; None without."""
        if value is None:
            return None
        array = require_high_precision(native(as_numpy(value, name)), name)
        whole = (self.operands["a"].rows, shape[-1]) if len(shape) > 1 else shape
        if array.shape not in (shape, whole):
            raise ValueError(f"{name} must have shape {shape}; got {array.shape}")
        return array.astype(np.float64).reshape(whole)

    # --- what it is -------------------------------------------------------------------------------

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


def _is_quantized(value):
    """Whether an operand is a quantized tensor, or the arrays of one."""
    return isinstance(value, dict) or is_quantized(value)
