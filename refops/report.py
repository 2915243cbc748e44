"""`refops report`: every operation and path, checked against something that does not share its code.

Three parts: golden vectors made by other implementations (`refops.conformance`), checks of each operation against an
independent statement of what it must give (below), and a survey of real tensors. A *backend* is a module with refops' calls;
today refops itself. What it is checked against is always refops' definitions, float64 arithmetic or ml_dtypes.

A check can fail: every comparison is counted element by element, and an exception inside one counts as a difference. Not a
test suite: wrong arguments, error messages and statistics are `tests/`' business.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

import refops
from refops import conformance
from refops.activations import ACTIVATIONS, bind_activation
from refops.arguments import BFLOAT16
from refops.files import UnsupportedTensor, open_tensors
from refops.formats import E2M1, FORMATS, encode_by_definition
from refops.ops import SCALED_ACTIVATIONS
from refops.quantization.nvfp4 import quantize_nvfp4
from refops.quantization.per_tensor import scale_from_amax
from refops.rounding import ROUNDING_MODES, philox, philox_bytes, round_once
from refops.scaling import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    NVFP4Scaling,
)
from refops.survey import (
    SCALINGS,
    cast_dequantized,
    cast_values,
    decode_scales,
    element_codes,
    measure,
    tensor_facts,
)
from refops.tiles import InputSource, tile_elements

BACKENDS = {"refops": refops}
REPOSITORY = Path(refops.__file__).parent.parent
VECTORS = REPOSITORY / "tests" / "vectors"
REAL_TENSORS = REPOSITORY / "tests" / "data" / "minilm_ffn.safetensors"
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

#: Section -> what it shows, in the order of the report.
SECTIONS = {
    "vectors": "Golden vectors: refops against arrays that other implementations made",
    "activations": "Activations: forward, gradient and row-scaled, against their float64 truth",
    "casts": "Casts: codes of each format against the definition, and against ml_dtypes",
    "scalings": "Scalings: rowwise and columnwise, float32, float16 and bfloat16, synthetic and real tensors",
    "fused": "Fused operations: activation_quantize and activation_grad_quantize against separate calls",
    "helpers": "Helpers: what the operations are built from and what goes with them",
    "survey": "Real tensors: signal to quantization noise (SQNR, dB) under every scaling",
}

#: float32 unit roundoff.
U = 2.0**-24
#: Permitted error of an activation in units of U times |f| + |x| (times the gate), before rounding to the output dtype.
FORWARD_UNITS = 4
#: Permitted error of a gradient in units of U times |dy| (|f'| + 1) (times the gate).
GRADIENT_UNITS = 16


@dataclass(frozen=True)
class Check:
    """The outcome of one kind of check on one subject.

    Attributes:
        section: key of `SECTIONS`.
        subject: operation or scaling.
        against: what it was checked against.
        comparisons: how many arrays were compared.
        values: how many elements.
        differing: how many elements did not agree.
        explained: how many of those a documented divergence accounts for.
        divergence: that divergence, or "".
        first: the first element that differs without explanation, or "".
    """

    section: str
    subject: str
    against: str
    comparisons: int
    values: int
    differing: int = 0
    explained: int = 0
    divergence: str = ""
    first: str = ""

    @property
    def unexplained(self):
        """Differences that no documented divergence accounts for."""
        return self.differing - self.explained


@dataclass(frozen=True)
class Task:
    """A check to run: `run(tally)` reports what it compares."""

    section: str
    subject: str
    against: str
    run: Callable


class Tally:
    """Counts what a task compares and remembers the first difference."""

    def __init__(self):
        self.comparisons = self.values = self.differing = 0
        self.first = ""

    def equal(self, label, got, expected):
        """Compare two arrays bit by bit (any NaN equals any NaN); None stands for an array that is not there."""
        if got is None or expected is None or got.shape != expected.shape or got.dtype != expected.dtype:
            same = got is None and expected is None
            self.holds(label, np.array([same]), lambda _: f"got {_outline(got)}, expected {_outline(expected)}")
            return
        same = got == expected
        if got.dtype.kind not in "ui":
            same = np.where(same, np.signbit(got) == np.signbit(expected), np.isnan(got) & np.isnan(expected))
        self.holds(label, same, lambda i: f"got {_number(got[i])}, expected {_number(expected[i])}")

    def holds(self, label, ok, describe=lambda index: "the rule does not hold"):
        """Count a bool array of verdicts; `describe(index)` says what is wrong at an index."""
        ok = np.asarray(ok, bool)
        self.comparisons += 1
        self.values += ok.size
        wrong = ok.size - int(np.count_nonzero(ok))
        self.differing += wrong
        if wrong and not self.first:
            index = tuple(int(i) for i in np.argwhere(~ok)[0])
            self.first = f"{label}{list(index)}: {describe(index)}"

    def quantized(self, label, got, expected):
        """Compare all arrays of two `Quantized`."""
        for field in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
            self.equal(f"{label} {field}", getattr(got, field), getattr(expected, field))

    def amaxes(self, label, got, expected):
        """Compare the amaxes of two `Quantized`."""
        for field in ("amax_rowwise", "amax_columnwise"):
            self.equal(f"{label} {field}", getattr(got, field), getattr(expected, field))


def _outline(array):
    return "nothing" if array is None else f"{array.dtype} of shape {array.shape}"


def _number(value):
    return f"0x{int(value):02X}" if value.dtype.kind in "ui" else f"{float(value):.9g}"


def run_task(task):
    """Run one task; an exception inside it is a difference, not a crash."""
    tally = Tally()
    try:
        with np.errstate(all="ignore"):
            task.run(tally)
    except Exception as error:  # a backend may raise anything; the report must still end with a verdict
        tally.holds("", np.array([False]))
        tally.first = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    return Check(
        task.section, task.subject, task.against, tally.comparisons, tally.values, tally.differing, first=tally.first
    )


# --- inputs ------------------------------------------------------------------------------------------------------------


def synthetic_tensors():
    """Return name -> float32 (M, K). Sizes are odd on purpose: no multiple of 128, one that nothing divides."""
    rng = np.random.default_rng(20240229)
    wide = _wide(rng, 96, 288)
    special = rng.standard_normal((32, 96)).astype(np.float32)
    special[0, :6] = [np.nan, np.inf, -np.inf, -0.0, 3.0e38, -65504]
    special[1] = np.nan
    special[2, 40] = np.inf
    special[5, 3::7] = -np.nan
    zero = np.zeros((32, 32), np.float32)
    zero[::2] = -0.0
    return {
        "gaussian": rng.standard_normal((64, 160)).astype(np.float32),
        "wide": wide,
        "special": special,
        "zero": zero,
        "ragged": _wide(rng, 37, 75),
    }


def _wide(rng, m, k):
    """Finite float32 (m, k) with heavy tails, outlier rows, zero blocks, signed zeros, subnormals, ties and tiny rows."""
    x = (rng.standard_normal((m, k)) * np.exp(2 * rng.standard_normal((m, k)))).astype(np.float32)
    x[3 % m] *= 1e4
    x[7 % m] *= np.float32(1e-6)
    x[11 % m, : k // 2] = 0
    x[11 % m, 1::3] = -0.0
    x[13 % m, ::5] = 1e-40
    x[17 % m] = np.resize([1.0625, 1.1875, 17, 19, -0.25, 0.75, 2.5, 5, 3.5, 1.25, -2.5, 6, 448, -464], k)
    return x


def real_tensors(path=REAL_TENSORS):
    """Return name -> array of the tensors in a file that refops can quantize; none where there is no file.

    Raises:
        FileError: the file is there but cannot be read.
    """
    if not Path(path).exists():
        return {}
    found = {}
    with open_tensors(path) as tensors:
        for tensor in tensors:
            try:
                found[tensor.name] = tensor.load()[0]
            except UnsupportedTensor:
                continue
    return found


def _every_dtype(tensors):
    """Yield (label, tensor) for each float32 tensor in each dtype."""
    for name, x in tensors.items():
        for dtype in DTYPES:
            yield f"{name} {dtype.name}", x.astype(dtype)


def _finite(x, dtype):
    """`x` in `dtype`, clipped where float16 would overflow."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(dtype)


# --- activations -------------------------------------------------------------------------------------------------------


def activation_tasks(ops, real):
    """Activations, their gradients and the row-scaled ones against float64."""
    tasks = []
    for name in ACTIVATIONS:
        task = partial(Task, "activations", name)
        tasks += [
            task("float64 truth", partial(_check_forward, ops, name, real)),
            task("float64 truth of the gradient", partial(_check_gradient, ops, name, real)),
            task("float64 sum (dbias)", partial(_check_dbias, ops, name)),
        ]
        if name in SCALED_ACTIVATIONS:
            tasks.append(task("float64 truth, row-scaled", partial(_check_scaled, ops, name)))
            if ACTIVATIONS[name].gated:
                tasks.append(task("interleaved = separate halves", partial(_check_interleaved, ops, name)))
    return tasks


def _activation_inputs(name, real, dtypes=DTYPES):
    """Yield (label, x, dy): x is [act | gate] for gated activations, everything finite."""
    rng = np.random.default_rng(7)
    act, gate, dy = _wide(rng, 48, 160), _wide(rng, 48, 160), _wide(rng, 48, 160)
    for dtype in dtypes:
        yield f"{name} {dtype.name} wide", _finite(_join(name, act, gate), dtype), _finite(dy, dtype)
    for layer in ("layer0", "layer3"):
        x, dy = real.get(f"{layer}.ffn.pre_activation"), real.get(f"{layer}.ffn.grad_activation")
        if x is not None and dy is not None and x.shape == dy.shape:
            yield f"{name} {x.dtype} {layer}", _join(name, x, x[::-1]), dy


def _join(name, act, gate):
    return np.concatenate([act, gate], axis=-1) if ACTIVATIONS[name].gated else act


def _halves(name, x):
    """(act, gate or None) in float64."""
    x = x.astype(np.float64)
    return np.split(x, 2, axis=-1) if ACTIVATIONS[name].gated else (x, None)


def _magnitudes(bound, act, gate):
    """What an activation's permitted errors are relative to: (|f| + |x|, |f'| + 1, |g| + 1, |g'| + 1); 1 without a gate."""
    value = np.abs(bound.value(act, true=True)) + np.abs(act)
    slope = np.abs(bound.derivative(act, true=True)) + 1
    if gate is None:
        return value, slope, 1.0, 1.0
    return value, slope, np.abs(bound.gate(gate, true=True)) + 1, np.abs(bound.gate_slope(gate, true=True)) + 1


def _holds_enclosure(tally, label, got, truth, permitted):
    """Every `got` lies between the roundings of truth - permitted and truth + permitted (rounding is monotone)."""
    permitted = permitted + 2.0**-140  # products that are subnormal on the way
    low, high = round_once(truth - permitted, got.dtype), round_once(truth + permitted, got.dtype)
    tally.holds(label, (low <= got) & (got <= high), lambda i: f"got {_number(got[i])}, truth {truth[i]:.9g}")


def _check_forward(ops, name, real, tally):
    bound = bind_activation(name, {})
    for label, x, _ in _activation_inputs(name, real):
        act, gate = _halves(name, x)
        value, _, gate_size, _ = _magnitudes(bound, act, gate)
        for out_dtype in (x.dtype, np.float32):
            y = ops.activation(name, x, out_dtype=out_dtype)
            _holds_enclosure(tally, label, y, bound.truth(act, gate), FORWARD_UNITS * U * value * gate_size)


def _gradient_bounds(bound, dy, act, gate):
    """float64 gradient and its permitted error, each [d_act | d_gate] for gated activations."""
    value, slope, gate_size, gate_slope = _magnitudes(bound, act, gate)
    d_act = GRADIENT_UNITS * U * np.abs(dy) * slope * gate_size
    if gate is None:
        return bound.truth_grad(dy, act), d_act
    d_gate = FORWARD_UNITS * U * np.abs(dy) * value * gate_slope
    return np.concatenate(bound.truth_grad(dy, act, gate), -1), np.concatenate([d_act, d_gate], -1)


def _check_gradient(ops, name, real, tally):
    bound = bind_activation(name, {})
    for label, x, dy in _activation_inputs(name, real):
        truth, permitted = _gradient_bounds(bound, dy.astype(np.float64), *_halves(name, x))
        for out_dtype in (x.dtype, np.float32):
            _holds_enclosure(tally, label, ops.activation_grad(name, dy, x, out_dtype=out_dtype), truth, permitted)


def _check_dbias(ops, name, tally):
    """The bias gradient is within the bound of any float32 summation order of the stored gradient."""
    for label, x, dy in _activation_inputs(name, {}):
        dx, dbias = ops.activation_grad(name, dy, x, dbias=True)
        judged = np.isfinite(dx.astype(np.float32)).all(axis=0)  # float16 overflows in some columns
        terms = dx[:, judged].astype(np.float64)
        _holds_enclosure(tally, label, dbias[judged], terms.sum(axis=0), len(terms) * U * np.abs(terms).sum(axis=0))


def _check_scaled(ops, name, tally):
    bound = bind_activation(name, {})
    for label, x, dy in _activation_inputs(name, {}):
        act, gate = _halves(name, x)
        value, _, gate_size, _ = _magnitudes(bound, act, gate)
        scales = np.linspace(-1.5, 2, len(x)).astype(np.float32)
        s, dy64 = scales.astype(np.float64)[:, None], dy.astype(np.float64)
        y = ops.scaled_activation(name, x, scales)
        permitted = (FORWARD_UNITS + 1) * U * value * gate_size
        truth = bound.truth(act, gate)
        _holds_enclosure(tally, label, y, truth * s, permitted * np.abs(s))
        dx, dscales = ops.scaled_activation_grad(name, dy, x, scales)
        _holds_enclosure(tally, f"{label} dx", dx, *_gradient_bounds(bound, dy64 * s, act, gate))
        terms, slack = dy64 * truth, np.abs(dy64) * permitted
        bounds = (len(terms[0]) * U * np.abs(terms) + slack).sum(axis=1)
        _holds_enclosure(tally, f"{label} drow_scales", dscales, terms.sum(axis=1), bounds)


def _check_interleaved(ops, name, tally):
    """glu_interleave_size=32 gives what the plain layout gives after the columns are put in order."""
    for label, x, dy in _activation_inputs(name, {}):
        m, width = x.shape
        scales = np.linspace(0.5, 2, m).astype(np.float32)
        mixed = x.reshape(m, 2, width // 64, 32).swapaxes(1, 2).reshape(m, width)
        call = partial(ops.scaled_activation, name, row_scales=scales)
        tally.equal(label, call(x=mixed, glu_interleave_size=32), call(x=x))
        grad = partial(ops.scaled_activation_grad, name, dy, row_scales=scales)
        (dx, dscales), (dx_mixed, dscales_mixed) = grad(x=x), grad(x=mixed, glu_interleave_size=32)
        ordered = dx_mixed.reshape(m, width // 64, 2, 32).swapaxes(1, 2).reshape(m, width)
        tally.equal(f"{label} dx", ordered, dx)
        tally.equal(f"{label} drow_scales", dscales_mixed, dscales)


# --- casts -------------------------------------------------------------------------------------------------------------

#: The same formats as ml_dtypes implements them.
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
}


def cast_tasks(ops):
    """encode and decode of every format."""
    tasks = []
    for fmt in FORMATS.values():
        task = partial(Task, "casts", repr(fmt))
        tasks += [
            task("definition: search the grid in float64", partial(_check_encode, ops, fmt)),
            task("ml_dtypes' table", partial(_check_decode, ops, fmt)),
        ]
        if fmt.signed:  # ml_dtypes rounds E8M0 to nearest and has no zero rule for it
            tasks.append(task("ml_dtypes' cast, clipped to the largest value", partial(_check_ml_dtypes, ops, fmt)))
        if fmt.has_subnormals:
            tasks.append(task("share of 256 random bytes that round up", partial(_check_stochastic, ops, fmt)))
    return tasks


def _cast_inputs(fmt):
    """Yield (dtype name, array): all 65 536 values of the 16-bit dtypes; grid, midpoints, neighbours, random float32 bits."""
    patterns = np.arange(65536, dtype=np.uint16)
    yield "float16", patterns.view(np.float16)
    yield "bfloat16", patterns.view(BFLOAT16)
    points = np.concatenate([fmt.grid, (fmt.grid[1:] + fmt.grid[:-1]) / 2, fmt.grid[-1] * np.array([1.01, 1.1, 2])])
    points = points.astype(np.float32)
    near = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))])
    random_bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32)
    yield "float32", np.concatenate([near, -near, random_bits])


def _check_encode(ops, fmt, tally):
    for dtype, x in _cast_inputs(fmt):
        modes = ROUNDING_MODES if dtype == "float32" else ("nearest_even",)
        for rounding in modes:
            for saturate in (True, False):
                got = ops.encode(x, fmt, rounding=rounding, saturate=saturate)
                expected = encode_by_definition(x.astype(np.float64), fmt, saturate, rounding)
                tally.equal(f"{dtype} {rounding} saturate={saturate} ", got, expected)


def _check_decode(ops, fmt, tally):
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    tally.equal("decode", ops.decode(codes, fmt), codes.view(ML_DTYPES[fmt.name]).astype(np.float32))


def _check_ml_dtypes(ops, fmt, tally):
    for dtype, x in _cast_inputs(fmt):
        x = x[~np.isnan(x)]
        clipped = np.clip(x.astype(np.float32), -fmt.max, fmt.max)
        tally.equal(f"{dtype} ", ops.encode(x, fmt), clipped.astype(ML_DTYPES[fmt.name]).view(np.uint8))


def _check_stochastic(ops, fmt, tally):
    """Over all 256 random bytes a value goes to its two neighbours only, up in proportion to where it lies between them."""
    grid = fmt.grid.astype(np.float32)
    below, above = grid[:-1, None], grid[1:, None]
    sixteenths = (np.arange(16) / 16).astype(np.float32)
    x = np.repeat((below + (above - below) * sixteenths).reshape(-1, 1), 256, axis=1)
    bits = np.tile(np.arange(256, dtype=np.uint8), (len(x), 1))
    values = ops.decode(ops.encode(x, fmt, rounding="stochastic", random_bits=bits), fmt)
    low, high = np.repeat(below, 16), np.repeat(above, 16)
    tally.holds("neighbours", (values == low[:, None]) | (values == high[:, None]))
    expected = np.tile(np.arange(16) * 16, len(grid) - 1)
    tally.equal("rounded up", np.count_nonzero(values == high[:, None], axis=1), expected)


# --- scalings ----------------------------------------------------------------------------------------------------------


def scaling_tasks(ops, real):
    """quantize and dequantize of every scaling, both directions."""
    tasks = []
    for named in SCALINGS.values():
        task = partial(Task, "scalings", named.name)
        tasks += [
            task("rounding interval of each code, float64", partial(_over_directions, ops, named, real, _check_rounding)),
            task("scale from amax, float64", partial(_over_directions, ops, named, real, _check_scale)),
            task("signs, NaN, infinity", partial(_over_directions, ops, named, real, _check_specials)),
            task("columnwise = rowwise of the transpose", partial(_check_transpose, ops, named, real)),
            task("other tiles, directions apart", partial(_check_tiles, ops, named, real)),
        ]
    return tasks


def _allowed(named, x):
    """Whether a scaling takes a shape: NVFP4 needs multiples of 16, row-scaled columnwise 32."""
    if not isinstance(named.scaling, NVFP4Scaling):
        return True
    multiple = 32 if named.scaling.row_scaled else 16
    m, k = int(np.prod(x.shape[:-1])), x.shape[-1]
    return m % multiple == 0 and k % multiple == 0


def _scaling_inputs(named, real):
    """Yield (label, tensor): synthetic tensors in every dtype, real ones in their own."""
    for label, x in (*_every_dtype(synthetic_tensors()), *real.items()):
        if _allowed(named, x):
            yield f"{named.name} {label}", x


@dataclass(frozen=True)
class Stored:
    """One direction of a `Quantized` and what it was made from, all as (outer, inner): blocks run along the inner axis.

    Attributes:
        scaling: its settings.
        values: float64, what was cast.
        codes: uint8.
        decode: float64, each element's decode scale.
        restored: float64, code value times decode scale.
        amax: the amax that the `Quantized` carries, or None.
    """

    scaling: object
    values: np.ndarray
    codes: np.ndarray
    decode: np.ndarray
    restored: np.ndarray
    amax: np.ndarray | None


def _over_directions(ops, named, real, check, tally):
    for label, x in _scaling_inputs(named, real):
        for columnwise in (False, True):
            q = ops.quantize(x, named.scaling, rowwise=not columnwise, columnwise=columnwise)
            arrays = [cast_values(x, q).reshape(q.matrix_shape), element_codes(q), decode_scales(q), cast_dequantized(q)]
            values, codes, decode, restored = (a.T for a in arrays) if columnwise else arrays
            check(
                tally,
                f"{label} {'columnwise' if columnwise else 'rowwise'} ",
                Stored(
                    named.scaling,
                    values.astype(np.float64),
                    codes,
                    decode.astype(np.float64),
                    restored.astype(np.float64),
                    q.amax_columnwise if columnwise else q.amax_rowwise,
                ),
            )


def _split_sign(codes, fmt):
    """(magnitude code, negative?)."""
    sign = np.uint8(1 << (fmt.bits - 1))
    return codes & ~sign, codes & sign != 0


def _check_rounding(tally, label, stored):
    """|x| / decode scale lies where elements with this code come from: between the midpoints to the code's neighbours.

    Stochastic rounding: between the neighbours themselves. The float32 roundings on the way are allowed for. Left out: scales so
    small that float32 holds them with few bits or the kernel clamps them, and infinite ones.
    """
    fmt = stored.scaling.fmt
    magnitude, _ = _split_sign(stored.codes, fmt)
    smallest = 2.0**-127 if isinstance(stored.scaling, MXFP8Scaling) else 2.0**-110
    judged = np.isfinite(stored.values) & np.isfinite(stored.decode) & (stored.decode >= smallest)
    middle = (fmt.grid[1:] + fmt.grid[:-1]) / 2
    low, high = np.append(0, middle), np.append(middle, np.inf)
    if getattr(stored.scaling, "stochastic_rounding", False):
        low, high = np.append(0, fmt.grid[:-1]), np.append(fmt.grid[1:], np.inf)
    code = np.minimum(magnitude, fmt.largest_code)
    scaled = np.abs(stored.values) / stored.decode
    slack = 2.0**-20
    inside = (scaled >= low[code] * (1 - slack)) & (scaled <= high[code] * (1 + slack)) & (magnitude <= fmt.largest_code)
    tally.holds(
        label,
        inside[judged],
        lambda i: f"code 0x{stored.codes[judged][i]:02X} for scaled magnitude {scaled[judged][i]:.9g}",
    )
    product = fmt.values[stored.codes].astype(np.float64) * stored.decode
    off = np.abs(stored.restored - product) > np.abs(product) * 2.0**-22
    off &= np.abs(product) < np.finfo(np.float32).max
    tally.holds(f"{label}dequantized", ~off[judged], lambda i: f"got {stored.restored[judged][i]:.9g}")


def _check_specials(tally, label, stored):
    """Signs are kept, NaN becomes NaN (E2M1: +6), infinity the largest value."""
    fmt = stored.scaling.fmt
    magnitude, negative = _split_sign(stored.codes, fmt)
    is_nan = np.isnan(stored.values)
    expected_nan = fmt.largest_code if fmt.nan_code is None else fmt.nan_code
    tally.holds(f"{label}sign", (negative == np.signbit(stored.values))[~is_nan])
    tally.holds(f"{label}NaN", stored.codes[is_nan] == expected_nan)
    tally.holds(f"{label}inf", magnitude[np.isinf(stored.values)] == fmt.largest_code)
    tally.holds(f"{label}NaN only from NaN", magnitude[~is_nan] <= fmt.largest_code)


def _block_maxima(stored, rows, length):
    """(finite amax, has an infinity?) of each block, by float64 reductions of their own."""
    starts = np.arange(0, stored.values.shape[0], rows), np.arange(0, stored.values.shape[1], length)

    def reduce(array):
        return np.maximum.reduceat(np.maximum.reduceat(array, starts[1], axis=1), starts[0], axis=0)

    magnitude = np.abs(stored.values)
    return reduce(np.where(np.isfinite(magnitude), magnitude, 0)), reduce(np.isinf(magnitude))


def _check_scale(tally, label, stored):
    """Each block's amax over its decode scale lands where the scaling puts it (the interval of its rounding rule)."""
    scaling, shape = stored.scaling, stored.values.shape
    if isinstance(scaling, DelayedScaling):
        tally.holds(label, np.abs(stored.decode * float(np.float32(scaling.scale)) - 1) <= 2.0**-23)
        return
    if isinstance(scaling, NVFP4Scaling):
        _check_nvfp4_scale(tally, label, stored)
        return
    if isinstance(scaling, CurrentScaling):
        rows, length = shape
    else:
        two_d = scaling.two_d if isinstance(scaling, MXFP8Scaling) else scaling.block_dim == 2
        rows, length = (scaling.block_size if two_d else 1), scaling.block_size
    amax, infinite = _block_maxima(stored, rows, length)
    top = amax / stored.decode[::rows, ::length]
    largest = float(scaling.fmt.max)
    if isinstance(scaling, MXFP8Scaling) and scaling.scale_rounding == "floor":
        power = 2.0 ** np.floor(np.log2(largest))
        ok = (top >= power) & (top < 2 * power)
    elif isinstance(scaling, MXFP8Scaling) or scaling.power_2_scale:
        ok = (top > largest / 2) & (top <= largest * (1 + 2.0**-22))
    else:
        ok = np.abs(top / largest - 1) <= 2.0**-22
    judged = ~infinite & (amax > 2.0**-100)
    tally.holds(label, ok[judged], lambda i: f"amax over decode scale is {top[judged][i]:.9g}")


def _check_nvfp4_scale(tally, label, stored):
    """The block maximum lands on 6 (4over6: or 4) up to half a step of the E4M3 scale; the stored amax is the tensor's."""
    scaling, edge = stored.scaling, stored.scaling.block_size
    amax, infinite = _block_maxima(stored, edge if scaling.two_d else 1, edge)
    axis = 1 if scaling.row_scaled else None
    tensor_amax = np.where(infinite.any(axis, keepdims=True), np.inf, amax.max(axis, keepdims=True))
    tally.equal(f"{label}amax", stored.amax, tensor_amax.ravel().astype(np.float32))
    decode = stored.decode[:: edge if scaling.two_d else 1, ::edge]
    # Beyond FLT_MAX / 448 the decode scale itself overflows, as TE's does.
    judged = np.isfinite(decode) & (tensor_amax > 2.0**-100) & (amax > 0)
    scale = decode * 6 * scaling.e4m3_max / tensor_amax  # the E4M3 value, to a few float32 roundings
    half_step = np.maximum(2.0**-4, 2.0**-10 / scale) + 2.0**-18
    top = amax / decode
    ok = np.abs(top / 6 - 1) <= half_step
    if scaling.four_over_six:
        ok |= np.abs(top / 4 - 1) <= half_step
    flushed = amax / tensor_amax * scaling.e4m3_max <= 2.0**-10 * (1 + 2.0**-18)
    ok = np.where(decode == 0, flushed, ok)
    tally.holds(label, ok[judged], lambda i: f"block amax over decode scale is {top[judged][i]:.9g}")


def _check_transpose(ops, named, real, tally):
    """The columnwise copy is the rowwise copy of the transpose (RHT: of the transformed transpose)."""
    for label, x in _scaling_inputs(named, real):
        if x.ndim != 2:
            continue
        scaling, transposed = named.scaling, np.ascontiguousarray(x.T)
        row_scaling = scaling
        if isinstance(scaling, NVFP4Scaling) and scaling.rht:
            transposed = ops.hadamard_transform(transposed, scaling.sign_mask)
            row_scaling = replace(scaling, rht=False)
        elif isinstance(scaling, NVFP4Scaling) and scaling.stochastic_rounding:
            bits = np.random.default_rng(3).integers(0, 256, transposed.shape, dtype=np.uint8)
            scaling = row_scaling = replace(scaling, random_bits=bits)
        column = ops.quantize(x, scaling, rowwise=False, columnwise=True)
        row = ops.quantize(transposed, row_scaling)
        stored_transposed = isinstance(scaling, MXFP8Scaling)
        data, scales = (column.columnwise_data, column.columnwise_scale_inv)
        tally.equal(f"{label} data", data.T if stored_transposed else data, row.rowwise_data)
        tally.equal(f"{label} scales", scales.T if stored_transposed else scales, row.rowwise_scale_inv)
        tally.equal(f"{label} amax", column.amax_columnwise, row.amax_rowwise)


def _check_tiles(ops, named, real, tally):
    """Smaller tiles, and each direction made alone, give the same bits."""
    for label, x in _scaling_inputs(named, real):
        both = ops.quantize(x, named.scaling, columnwise=True)
        with tile_elements(1):
            small = ops.quantize(x, named.scaling, columnwise=True)
            values = ops.dequantize(small)
        tally.quantized(label, small, both)
        tally.equal(f"{label} dequantized", values, ops.dequantize(both))
        row = ops.quantize(x, named.scaling)
        column = ops.quantize(x, named.scaling, rowwise=False, columnwise=True)
        apart = replace(
            row,
            columnwise_data=column.columnwise_data,
            columnwise_scale_inv=column.columnwise_scale_inv,
            amax_columnwise=column.amax_columnwise,
        )
        tally.quantized(label, apart, both)
        tally.amaxes(label, apart, both)


# --- fused operations --------------------------------------------------------------------------------------------------


def fused_tasks(ops, real):
    """activation_quantize and activation_grad_quantize of every scaling, over every activation and dtype."""
    tasks = []
    for named in SCALINGS.values():
        task = partial(Task, "fused", named.name)
        tasks += [
            task("activation, then quantize", partial(_check_fused_forward, ops, named, real)),
            task("activation_grad with dbias, then quantize", partial(_check_fused_gradient, ops, named, real)),
        ]
    return tasks


def quantize_separately(rounded, unrounded, scaling, columnwise):
    """What a fused operation must give, from the activation's output rounded to the input dtype and in float32.

    Delayed scaling quantizes the unrounded values. Current scaling and NVFP4 quantize the rounded ones with the amax of the
    unrounded ones. MXFP8, block scaling, NVFP4 with RHT or row scaling quantize the rounded tensor as it is.
    """
    if isinstance(scaling, DelayedScaling):
        return refops.quantize(unrounded, scaling, columnwise=columnwise)
    if isinstance(scaling, CurrentScaling):
        amax = np.fmax.reduce(np.abs(unrounded), axis=None, initial=np.float32(0)).reshape(1)
        scale = scale_from_amax(amax, scaling.fmt, epsilon=scaling.amax_epsilon, power_2=scaling.power_2_scale)
        result = refops.quantize(rounded, DelayedScaling(scaling.fmt, float(scale[0])), columnwise=columnwise)
        return replace(result, amax_rowwise=amax, amax_columnwise=amax if columnwise else None)
    if isinstance(scaling, NVFP4Scaling) and not (scaling.rht or scaling.row_scaled):
        return quantize_nvfp4(InputSource(rounded), InputSource(unrounded), scaling, True, columnwise)
    return refops.quantize(rounded, scaling, columnwise=columnwise)


def _fused_inputs(named, real):
    """Yield (label, activation, x, dy): every activation in every dtype, specials included; GELU on real tensors."""
    rng = np.random.default_rng(11)
    act, gate, dy = _wide(rng, 32, 160), _wide(rng, 32, 160), _wide(rng, 32, 160)
    act[0, :7] = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-42, -0.0]
    dy[1, :3] = [np.nan, np.inf, -np.inf]
    for name in ACTIVATIONS:
        for dtype in DTYPES:
            yield f"{named.name} {name} {dtype.name}", name, _join(name, act, gate).astype(dtype), dy.astype(dtype)
        finite = [_wide(np.random.default_rng(13), 32, 64) for _ in range(3)]
        x = _join(name, *finite[:2]).astype(BFLOAT16)
        yield f"{named.name} {name} finite", name, x, finite[2].astype(BFLOAT16)
    for label, x, dy in _activation_inputs("gelu", real, dtypes=()):
        yield f"{named.name} {label}", "gelu", x, dy


def _check_fused_forward(ops, named, real, tally):
    for label, name, x, _ in _fused_inputs(named, real):
        got = ops.activation_quantize(name, x, named.scaling, columnwise=True)
        rounded, unrounded = refops.activation(name, x), refops.activation(name, x, out_dtype=np.float32)
        expected = quantize_separately(rounded, unrounded, named.scaling, True)
        tally.quantized(label, got, expected)
        tally.amaxes(label, got, expected)


def _check_fused_gradient(ops, named, real, tally):
    for label, name, x, dy in _fused_inputs(named, real):
        got, dbias = ops.activation_grad_quantize(name, dy, x, named.scaling, columnwise=True, dbias=True)
        rounded, rounded_dbias = refops.activation_grad(name, dy, x, dbias=True)
        unrounded, unrounded_dbias = refops.activation_grad(
            name, dy.astype(np.float32), x.astype(np.float32), dbias=True
        )
        expected = quantize_separately(rounded, unrounded, named.scaling, True)
        tally.quantized(label, got, expected)
        tally.amaxes(label, got, expected)
        fused_sum = isinstance(named.scaling, DelayedScaling | MXFP8Scaling)
        tally.equal(f"{label} dbias", dbias, unrounded_dbias.astype(x.dtype) if fused_sum else rounded_dbias)


# --- helpers -----------------------------------------------------------------------------------------------------------


def helper_tasks(ops):
    """The functions beside the operations."""
    task = partial(Task, "helpers")
    return [
        task("hadamard_transform", "float64 product with the matrix", partial(_check_hadamard, ops)),
        task("hadamard_transform", "its inverse", partial(_check_hadamard_inverse, ops)),
        task("swizzle, unswizzle", "index formula of the GEMM layout", partial(_check_swizzle, ops)),
        task("pack_fp4, unpack_fp4", "nibble by nibble", partial(_check_packing, ops)),
        task("update_delayed_scale", "the rule, entry by entry", partial(_check_delayed_update, ops)),
        task("block_scales_as_mxfp8", "the float32 scales", partial(_check_block_scales, ops)),
        task("quantize with dbias", "float64 sum", partial(_check_quantize_dbias, ops)),
        task("philox", "known answers of cuRAND's Philox 4x32-10", _check_philox),
        task("stochastic rounding", "the same Philox bytes handed in", partial(_check_philox_bits, ops)),
    ]


def _check_hadamard(ops, tally):
    for label, x in _every_dtype({"gaussian": synthetic_tensors()["gaussian"]}):
        for sign_mask in (0xD7E8, 0, 0x1234):
            index = np.arange(16)
            parity = np.array([[bin(i & j).count("1") % 2 for j in index] for i in index])
            signs = np.array([-1.0 if sign_mask >> i & 1 else 1.0 for i in index])
            matrix = signs[:, None] * np.where(parity, -0.25, 0.25)
            groups = x.astype(np.float64).reshape(-1, 16)
            truth, size = (groups @ matrix).reshape(x.shape), (np.abs(groups) @ np.abs(matrix)).reshape(x.shape)
            _holds_enclosure(tally, label, ops.hadamard_transform(x, sign_mask), truth, 2.0**-48 * size)


def _check_hadamard_inverse(ops, tally):
    x = synthetic_tensors()["gaussian"]
    back = ops.hadamard_transform(ops.hadamard_transform(x), inverse=True)
    # Sixteen outputs, each rounded by at most U of at most the group's norm, meet again in every element.
    norm = np.sqrt((x.astype(np.float64) ** 2).reshape(-1, 16).sum(axis=1)).repeat(16).reshape(x.shape)
    _holds_enclosure(tally, "inverse", back, x.astype(np.float64), 4 * U * norm)


def _check_swizzle(ops, tally):
    rows, columns = 256, 12
    scales = np.random.default_rng(5).integers(0, 256, (rows, columns), dtype=np.uint8)
    expected = np.zeros(rows * columns, np.uint8)
    for i in range(rows):
        for j in range(columns):
            tile = (i // 128) * (columns // 4) + j // 4
            expected[tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4] = scales[i, j]
    swizzled = ops.swizzle(scales)
    tally.equal("swizzle", swizzled.ravel(), expected)
    tally.equal("unswizzle", ops.unswizzle(swizzled), scales)
    x = synthetic_tensors()["wide"]
    for named in SCALINGS.values():
        if isinstance(named.scaling, MXFP8Scaling | NVFP4Scaling):
            q = ops.quantize(x, named.scaling, columnwise=True)
            tally.quantized(f"{named.name} swizzled and back", q.swizzled().unswizzled(), q)
            tally.equal(f"{named.name} values", ops.dequantize(q.swizzled()), ops.dequantize(q))


def _check_packing(ops, tally):
    codes = np.random.default_rng(6).integers(0, 16, (8, 32), dtype=np.uint8)
    packed = np.array([[int(r[i]) + 16 * int(r[i + 1]) for i in range(0, 32, 2)] for r in codes], np.uint8)
    tally.equal("pack_fp4", ops.pack_fp4(codes), packed)
    tally.equal("unpack_fp4", ops.unpack_fp4(packed), codes)


def _check_delayed_update(ops, tally):
    rng = np.random.default_rng(8)
    for fmt in (FORMATS["e4m3"], FORMATS["e5m2"]):
        for length in (1, 2, 5):
            for algorithm in ("max", "most_recent"):
                history = rng.exponential(3, (length, 40)).astype(np.float32)
                history[:, :4] = [[0, np.inf, 1e-37, 0]] * length
                history[0, 4:8] = 0
                scale = rng.exponential(50, 40).astype(np.float32)
                new_history, new_scale = ops.update_delayed_scale(history, scale, fmt, algorithm=algorithm)
                for column in range(40):
                    before = list(history[:, column])
                    after, expected = _delayed_rule(before, scale[column], fmt, algorithm)
                    tally.equal(f"history {column} ", new_history[:, column], np.array(after, np.float32))
                    # In float64; one float32 division away.
                    tally.holds(f"scale {column} ", np.abs(new_scale[column : column + 1] / expected - 1) <= 2 * U)


def _delayed_rule(before, scale, fmt, algorithm):
    """(history, scale in float64) of one column: roll, clear row 0, max / amax; nothing changes where the newest amax is 0."""
    if before[0] == 0:
        return before, float(scale)
    after = [0, *before[2:], before[0]][: len(before)]
    amax = float(max(before)) if algorithm == "max" else float(before[0])
    if not np.isfinite(amax):
        return after, float(scale)
    return after, min(float(fmt.max) / amax, float(np.finfo(np.float32).max))


def _check_block_scales(ops, tally):
    x = synthetic_tensors()["wide"]
    for block_dim in (1, 2):
        q = ops.quantize(x, BlockScaling(FORMATS["e4m3"], block_dim), columnwise=True)
        for columnwise, scales in zip((False, True), ops.block_scales_as_mxfp8(q), strict=True):
            one = replace(q, rowwise_data=None) if columnwise else q
            decode = decode_scales(one).T if columnwise else decode_scales(one)
            outer, inner = decode.shape
            bytes_of_blocks = ops.unswizzle(scales)[:outer, : -(-inner // 32)]
            values = np.repeat(ops.decode(bytes_of_blocks, FORMATS["e8m0"]), 32, axis=1)[:, :inner]
            tally.equal(f"block_dim={block_dim} columnwise={columnwise} ", values, np.ascontiguousarray(decode))


def _check_quantize_dbias(ops, tally):
    for dtype in DTYPES:
        x = _finite(synthetic_tensors()["wide"], dtype)
        for named in SCALINGS.values():
            _, dbias = ops.quantize(x, named.scaling, dbias=True)
            terms = x.astype(np.float64)
            permitted = len(terms) * U * np.abs(terms).sum(axis=0)
            _holds_enclosure(tally, f"{named.name} {dtype.name}", dbias, terms.sum(axis=0), permitted)


def _check_philox(tally):
    known = {
        (0, 0, 0): [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        (1234, 7, 5): [0x78352B63, 0x8FB42772, 0x2160D7EA, 0x7F6082EA],
    }
    for (seed, offset, subsequence), words in known.items():
        tally.equal(f"seed {seed}", philox(seed, offset, [subsequence])[0], np.array(words, np.uint32))


def _check_philox_bits(ops, tally):
    x = synthetic_tensors()["wide"]
    m, k = x.shape
    scaling = NVFP4Scaling(stochastic_rounding=True, seed=99, offset=5)
    numbers = np.arange(2 * m * k // 16)
    row_bits, column_bits = philox_bytes(scaling.seed, scaling.offset, numbers).reshape(2, m * k)
    given = replace(scaling, random_bits=(row_bits.reshape(m, k), column_bits.reshape(k, m)))
    tally.quantized("Philox", ops.quantize(x, scaling, columnwise=True), ops.quantize(x, given, columnwise=True))
    halves = np.full((64, 16), 0.25, np.float32)
    halves[:, 0] = 6  # the scale is 1: every other element lies halfway between 0 and 0.5
    codes = element_codes(ops.quantize(halves, scaling))[:, 1:]
    tally.holds("halves go to a neighbour", codes <= encode_by_definition(np.array(0.5), E2M1, True, "nearest_even"))
    tally.holds("halves go both ways", np.unique(codes).size == 2)


# --- the whole report --------------------------------------------------------------------------------------------------


def operation_tasks(ops, real):
    """Every task of the sections between "vectors" and "survey"."""
    return [
        *activation_tasks(ops, real),
        *cast_tasks(ops),
        *scaling_tasks(ops, real),
        *fused_tasks(ops, real),
        *helper_tasks(ops),
    ]


def vector_checks(directory):
    """Compare with the golden vectors in `directory`: one `Check` a comparison."""
    return [
        Check(
            "vectors",
            f"{c.file}: {c.subject}",
            c.peer,
            1,
            c.elements,
            c.differing,
            c.explained,
            c.divergence,
            "" if c.ok else f"{c.differing - c.explained} of {c.elements} elements",
        )
        for c in conformance.compare_vectors(directory)
    ]


@dataclass(frozen=True)
class Report:
    """Everything that `refops report` found.

    Attributes:
        backend: name of the module under test.
        sections: sections that were run.
        checks: list of `Check`.
        survey: list of (tensor name, `TensorFacts`, list of `Measurement`).
        missing: what was not found and therefore not checked, one sentence each.
        seconds: wall time.
    """

    backend: str
    sections: list
    checks: list
    survey: list
    missing: list
    seconds: float

    @property
    def unexplained(self):
        """Number of elements that differ without a documented reason."""
        return sum(c.unexplained for c in self.checks)

    @property
    def ok(self):
        """Whether nothing differs without a documented reason."""
        return all(c.unexplained == 0 for c in self.checks)

    @property
    def verdict(self):
        """The report in one line."""
        values, comparisons = (sum(getattr(c, what) for c in self.checks) for what in ("values", "comparisons"))
        explained = sum(c.explained for c in self.checks)
        parts = [
            f"{'PASS' if self.ok else 'FAIL'}: {spaced(values)} values checked in {spaced(comparisons)} comparisons",
            f"{spaced(self.unexplained)} unexplained difference{'' if self.unexplained == 1 else 's'}",
        ]
        if explained:
            parts.append(f"{spaced(explained)} documented")
        if not self.checks:
            parts = ["PASS: nothing was compared"]
        return ", ".join(parts) + f" ({self.seconds:.1f} s)" + "".join(f"; {m}" for m in self.missing)

    def as_dict(self):
        """Plain data for JSON."""
        return {
            "backend": self.backend,
            "version": refops.__version__,
            "ok": self.ok,
            "verdict": self.verdict,
            "seconds": self.seconds,
            "missing": self.missing,
            "checks": [{**asdict(c), "unexplained": c.unexplained} for c in self.checks],
            "survey": [
                {"tensor": name, **asdict(facts), "scalings": [m.as_dict() for m in measurements]}
                for name, facts, measurements in self.survey
            ],
        }


def spaced(number):
    """12345678 -> "12 345 678"."""
    return f"{number:,}".replace(",", " ")


def make_report(backend="refops", *, vectors=VECTORS, data=REAL_TENSORS, sections=tuple(SECTIONS), progress=None):
    """Run the report.

    Args:
        backend: key of `BACKENDS`.
        vectors: directory of golden vectors; absent is noted, not an error.
        data: file of real tensors; absent is noted, not an error.
        sections: which sections to run.
        progress: called as progress(done, total, what) before each step and once at the end.

    Raises:
        FileError: `data` is there but cannot be read.
    """
    start = time.perf_counter()
    ops, vectors, data = BACKENDS[backend], Path(vectors), Path(data)
    real, missing = {}, []
    if set(sections) - {"vectors", "casts", "helpers"}:
        real = real_tensors(data)
        if not real:
            missing.append(f"no real tensors at {data}")
    tasks = [t for t in operation_tasks(ops, real) if t.section in sections]
    surveyed = list(real.items()) if "survey" in sections else []
    total, done = len(tasks) + len(surveyed) + 1, 0

    def step(what):
        nonlocal done
        if progress is not None:
            progress(done, total, what)
        done += 1

    checks, survey = [], []
    step("golden vectors")
    if "vectors" in sections:
        if vectors.is_dir():
            try:
                checks += vector_checks(vectors)
            except Exception as error:  # as in run_task: an error is a failed check, not a lost report
                checks.append(Check("vectors", "compare_vectors", str(vectors), 1, 1, 1, first=f"raised {error!r}"))
        else:
            missing.append(f"no golden vectors at {vectors}")
    for task in tasks:
        step(f"{task.section}: {task.subject}")
        checks.append(run_task(task))
    for name, x in surveyed:
        step(f"survey: {name}")
        survey.append((name, tensor_facts(x), [measure(x, named) for named in SCALINGS.values()]))
    step("done")
    return Report(backend, list(sections), checks, survey, missing, time.perf_counter() - start)
