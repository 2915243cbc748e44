"""Measure the bounds of activations that tests and reports use, and write them down: errors, instructions, budgets.

    python tests/measured/measure_activations.py              every activation
    python tests/measured/measure_activations.py mish mishglu these alone; the entries of others stay

Writes `activations.json` beside this file and `cuda_kernels/row_budgets.json`. Instructions need numba-cuda, budgets
also ptxas and nvdisasm, all from pip; no GPU.
"""

import json
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "refops", "cuda_kernels", "oracle"))]

import numpy as np  # noqa: E402
from independent import BF16, FP16, F, all_values, round_float64  # noqa: E402
from instructions import float_instructions, ptx_of_formulas  # noqa: E402
from interval_widths import widths  # noqa: E402

from cuda_kernels import catalogue, compile_report  # noqa: E402
from refops.activations import ACTIVATIONS, bind_activation  # noqa: E402

TABLE, BUDGETS = Path(__file__).with_name("activations.json"), ROOT / "cuda_kernels" / "row_budgets.json"


def functions(names):
    """ "FUNCTION.value" and "FUNCTION.slope" -> (activation, method of `BoundActivation`), each once."""
    found = {}
    for name in names:
        for function, methods in zip(
            ACTIVATIONS[name].functions, (("value", "derivative"), ("gate", "gate_slope")), strict=False
        ):
            for which, method in zip(("value", "slope"), methods, strict=True):
                found.setdefault(f"{function.name}.{which}", (name, method))
    return found


def errors(name, method, dtype):
    """(largest absolute error where |f| < 100, number of outputs that are not the nearest) of all inputs of a dtype."""
    x = all_values(dtype).astype(F)
    x = x[np.isfinite(x)]
    function = getattr(bind_activation(name, {}), method)
    truth, y = function(x.astype(np.float64), true=True), function(x)
    with np.errstate(all="ignore"):
        largest = np.abs(y.astype(np.float64) - truth)[(np.abs(truth) < 100) & ~np.isnan(y)].max()
        misrounded = (y.astype(dtype).astype(F) != round_float64(truth, dtype)) & ~np.isnan(y)
    return float(f"{largest:.2g}"), int(misrounded.sum())


def budgets(name):
    """Instructions for each byte of bf16 -> MXFP8 rowwise, rounded up to the next twentieth: accurate on (9, 0) and
    (10, 0, "a"), with fast math on both."""
    found = []
    (entry,) = [entry for entry in catalogue.catalogue() if entry.name == f"{name} bf16 -> MXFP8"]
    for fast_math in (False, True):
        for target in ((9, 0), (10, 0, "a")):
            measured = compile_report.compile_entry(entry, target, fast_math)
            found.append(math.ceil(round(measured.instr_per_byte * 20, 6)) / 20)
    return found


def merged(old, new, wanted):
    """`old` with the entries of `new`; nothing of what is no longer in `wanted`."""
    return {key: new.get(key, old.get(key)) for key in sorted(wanted)}


def main(names):
    """Measure the activations called `names`, or all."""
    old = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    every, chosen = functions(ACTIVATIONS), functions(names or ACTIVATIONS)
    found = {key: [errors(*of, dtype) for dtype in (BF16, FP16)] for key, of in chosen.items()}
    ptx = ptx_of_formulas(names)["accurate"]
    new = {
        "largest_error": {key: [error for error, _ in pair] for key, pair in found.items()},
        "misrounded": {key: [count for _, count in pair] for key, pair in found.items()},
        "instructions": {key: dict(sorted(float_instructions(text).items())) for key, text in ptx.items()},
    }
    table = {kind: merged(old.get(kind, {}), rows, every) for kind, rows in new.items()}
    ulps = {name: [int(width) for width in widths(name)] for name in names or ACTIVATIONS}
    table["interval_widths"] = merged(old.get("interval_widths", {}), ulps, ACTIVATIONS)
    write(TABLE, table)
    kernels = [kernel for name in ACTIVATIONS for kernel in (name, f"d{name}")]
    measured = {kernel: budgets(kernel) for name in names or ACTIVATIONS for kernel in (name, f"d{name}")}
    old = json.loads(BUDGETS.read_text(encoding="utf-8")) if BUDGETS.exists() else {}
    write(BUDGETS, merged(old, measured, kernels))


def write(path, table):
    """A row a line."""
    inner = re.compile(r"(?<=: )[\[{]\n[^\[\]{}]*?[\]}]")
    text = inner.sub(lambda match: json.dumps(json.loads(match[0])), json.dumps(table, indent=1))
    path.write_text(text + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
