"""Dumps of kernels that follow two conventions at once: the slowest searches of the oracle."""

import time

import ml_dtypes
import numpy as np

import refops
from refops import oracle
from refops.oracle.conventions import CONVENTIONS
from refops.oracle.geometry import crop, whole
from refops.oracle.operation import Case
from refops.oracle.replay import Setting

BF16 = np.dtype(ml_dtypes.bfloat16)
M, K = 224, 352
MXFP8 = refops.MXFP8Scaling(refops.E4M3)
RHT = refops.NVFP4Scaling(rht=True)
STOCHASTIC = refops.NVFP4Scaling(stochastic_rounding=True, seed=7, rht=True)

#: What took longest: operation, scaling, whether with dbias, two conventions with their choices, and the names.
SLOW = {
    "stochastic": ("quantize", STOCHASTIC, False, ("missing-factor", "max"), ("scale-off-by-one", (1, "both"))),
    "transformed": (
        "quantize",
        RHT,
        False,
        ("neighbour-block-scale", ("stored", 1)),
        ("subnormal-codes-flushed", "codes"),
    ),
    "both ends": (
        "quantize",
        STOCHASTIC,
        False,
        ("neighbour-block-scale", ("both", 1)),
        ("input-shifted", ("x", "", 0, -16)),
    ),
    "activation": ("gelu", RHT, False, ("nibble-sign-leaks", ("low", "copied")), ("scale-off-by-one", (-1, "stored"))),
    "dbias": ("dgelu", MXFP8, True, ("erf-gelu", "float64"), ("other-limit", 127)),
}


def normal(shape=(M, K), seed=0, dtype=BF16):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def dump_of(op, scaling, dbias, *faults, shape=(M, K)):
    """(inputs, outputs of both copies): those of a kernel that follows some conventions."""
    x = normal(shape)
    inputs = {"dy": normal(shape, 1), "x": x} if op.startswith("d") else {"x": x}
    options = {"columnwise": True, **({"dbias": True} if dbias else {})}
    if op == "quantize":
        result = refops.quantize(*inputs.values(), scaling, **options)
    else:
        function = refops.activation_grad_quantize if "dy" in inputs else refops.activation_quantize
        result = function(op.removeprefix("d"), *inputs.values(), scaling, **options)
    q, sums = result if dbias else (result, None)
    outputs = {name: array.copy() for name, array in vars(q).items() if isinstance(array, np.ndarray)}
    case = Case(op, inputs, scaling, {})
    setting = Setting(case, {}, {**outputs, **({"dbias": sums} if dbias else {})})
    setting.probe = whole(setting.shape)
    replay = setting.replay()
    for name, choice in faults:
        CONVENTIONS[name].apply(replay, choice)
    for name, made in replay.run(whole(setting.shape), list(outputs)).items():
        part = crop(case, name, outputs[name], whole(setting.shape))
        part[...] = made.reshape(part.shape)
    if dbias:
        outputs["dbias"] = replay.dbias(slice(0, shape[1]))
    return inputs, outputs


def judged(kind):
    """(report, processor seconds) of a row of `SLOW`."""
    op, scaling, dbias, *faults = SLOW[kind]
    inputs, outputs = dump_of(op, scaling, dbias, *faults)
    oracle.check(op, inputs, outputs, scaling=scaling, diagnose=False)  # tables are made once
    start = time.process_time()
    report = oracle.check(op, inputs, outputs, scaling=scaling)
    return report, time.process_time() - start
