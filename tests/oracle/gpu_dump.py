"""Dump what a GPU really writes, and judge it: real kernels for the oracle, on a machine that has a CUDA device.

    python tests/oracle/gpu_dump.py dump DIR [--device cuda|cpu] [--parts torch,numba,triton] [--elements 262144]
    python tests/oracle/gpu_dump.py judge DIR [--json FILE] [--seconds 120]
    python tests/oracle/gpu_dump.py run DIR [...]            both
    python tests/oracle/gpu_dump.py sample DIR FILE.npz      every 32nd row of what TE's formula gave, for test_gpu.py

Run it from the root of a clone. `dump` needs NumPy and whatever makes the kernels (torch, numba-cuda, triton; each part
whose package is missing or whose kernels fail is recorded as such, and the others go on). `judge` needs NumPy and
ml_dtypes and runs anywhere. Between them lie raw arrays (npz files below 15 MB) and a manifest of what each one is.

It is a measurement, not a test: it exits with 1 only where a part that was asked for could not run at all, and says in
the JSON, for every case, the smallest permitted error (ulp) under which the oracle calls it right, and what the oracle
says at the case's own. `expected` is what was predicted when the case was written.

Kernels:
    torch    torch's silu, gelu, glu and relu with their gradients, casts to FP8, scales and casts composed of torch
             operations, sums over rows, the Hadamard transform as a matrix product (tensor cores on a GPU).
    numba    TE's float32 formulas of every activation and gradient, multiply-adds contracted as the compiler likes;
             again with fast math; sums of bias and row-scale gradients with atomic additions.
    triton   swiglu -> MXFP8 and gelu -> FP8 (delayed scaling), with Triton's own exp and with libdevice's.
"""

import argparse
import json
import math
import platform
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import numpy as np

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 asks for it, NumPy 2.5 dropped it
    np.row_stack = np.vstack

UNAVAILABLE = {}  # part -> why its package cannot be used
try:
    from numba import cuda
except Exception as error:
    cuda = None
    UNAVAILABLE["numba"] = f"{type(error).__name__}: {error}"
try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except Exception as error:
    triton = None
    UNAVAILABLE["triton"] = f"{type(error).__name__}: {error}"

F = np.float32
LARGEST_FILE = 15 << 20
LADDER = (0, 1, 2, 4, 8, 16, 64, 256, 4096)
#: Rows from one that `sample` keeps to the next.
SAMPLED = 32
ROOT = Path(__file__).resolve().parents[2]

UNARY = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "situglu")
PARAMETERS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, "beta1": 4.0, "beta2": 25.0}


# --- inputs ---------------------------------------------------------------------------------------


def all_bfloat16():
    """Every bfloat16 value as float32, (256, 256)."""
    return (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32).reshape(256, 256)


def to_bfloat16_bits(values):
    """uint16 patterns of finite float32 `values` rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bias = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + bias) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16_bits(bits):
    """float32 values of uint16 patterns."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def mixed_float32(count, seed):
    """float32 of many sizes: normal, a log-uniform spread over 60 binades, the region where gelu's tail cancels."""
    rng = np.random.default_rng(seed)
    parts = [
        rng.standard_normal(count // 2) * 3.0,
        rng.uniform(-12.0, 12.0, count // 4),
        np.where(rng.random(count // 8) < 0.5, -1.0, 1.0) * np.exp2(rng.uniform(-40.0, 20.0, count // 8)),
    ]
    parts.append(rng.uniform(-110.0, 110.0, count - sum(map(len, parts))))
    values = np.concatenate(parts).astype(np.float32)
    rng.shuffle(values)
    return values


# --- what a dump consists of ----------------------------------------------------------------------


class Dump:
    """Cases and arrays on their way to a directory."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.cases, self.parts, self._pending, self._pending_bytes, self._files = [], {}, {}, 0, 0
        self._stored = {}

    def store(self, array, dtype=None):
        """Keep `array` and return its reference: [file, key, dtype name, shape]. Raw bits are named by `dtype`."""
        array = np.ascontiguousarray(array)
        identity = (array.tobytes(), str(array.dtype), dtype, array.shape)
        if identity in self._stored:
            return self._stored[identity]
        if self._pending and self._pending_bytes + array.nbytes > LARGEST_FILE:
            self.flush()
        key = f"a{len(self._pending)}"
        self._pending[key] = array
        self._pending_bytes += array.nbytes
        reference = [f"arrays_{self._files}.npz", key, dtype or str(array.dtype), list(array.shape)]
        self._stored[identity] = reference
        return reference

    def flush(self):
        """Write the pending arrays."""
        if self._pending:
            np.savez(self.directory / f"arrays_{self._files}.npz", **self._pending)
            self._pending, self._pending_bytes = {}, 0
            self._files += 1

    def add(self, name, op, inputs, outputs, *, scaling=None, params=None, ulp=2, expected="right", derive=None):
        """Record one case. `inputs` and `outputs`: name -> array, or (array of raw bits, dtype name)."""

        def references(arrays):
            return {
                key: self.store(*value) if isinstance(value, tuple) else self.store(value)
                for key, value in arrays.items()
            }

        self.cases.append(
            {
                "name": name,
                "op": op,
                "scaling": scaling,
                "params": params or {},
                "inputs": references(inputs),
                "outputs": references(outputs),
                "ulp": ulp,
                "expected": expected,
                "derive": derive,
            }
        )

    def finish(self, environment):
        """Write what is left and the manifest."""
        self.flush()
        manifest = {"environment": environment, "parts": self.parts, "cases": self.cases}
        (self.directory / "manifest.json").write_text(json.dumps(manifest, indent=1))


def environment(device):
    """Versions and the device's name."""
    found = {"python": platform.python_version(), "numpy": np.__version__, "device": device}
    for package in ("torch", "numba", "numba_cuda", "triton", "ml_dtypes"):
        with suppress(Exception):
            found[package] = getattr(__import__(package), "__version__", "unknown")
    with suppress(Exception):
        import torch

        found["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            found["card"] = torch.cuda.get_device_name(0)
            found["capability"] = list(torch.cuda.get_device_capability(0))
    return found


# --- torch ----------------------------------------------------------------------------------------


def dump_torch(dump, device, elements):
    """torch's own kernels."""
    import torch
    import torch.nn.functional as functional

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

    def host(tensor):
        tensor = tensor.detach().contiguous().cpu()
        name = names.get(tensor.dtype)
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(np.uint16), name
        if name is None and tensor.dtype != torch.uint8:
            return tensor.view(torch.uint8).numpy(), "uint8"
        return tensor.numpy()

    every = {
        torch.float32: torch.from_numpy(mixed_float32(elements, 1).reshape(512, -1)),
        torch.bfloat16: torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(torch.bfloat16),
        torch.float16: torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(torch.float16),
    }
    every = {dtype: x.reshape(-1, 256).to(device) for dtype, x in every.items()}

    functions = (
        ("silu", "silu", functional.silu, ("right", "right but for the last bits: torch multiplies dy and s first")),
        (
            "gelu",
            "gelu tanh",
            lambda x: functional.gelu(x, approximate="tanh"),
            ("right", "right but for NaN from |x| = 1.8e19, where torch's x * x overflows"),
        ),
        ("gelu", "gelu erf", functional.gelu, ("wrong: erf-gelu",) * 2),
        ("relu", "relu", functional.relu, ("wrong: nan-propagated (float32 has no NaN here)",) * 2),
    )
    generator = torch.Generator().manual_seed(2)
    for op, label, function, expected in functions:
        for dtype, x in every.items():
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            dump.add(f"torch {label} {names[dtype]}", op, {"x": host(x)}, {"y": host(y)}, expected=expected[0])
            dy = torch.randn(y.shape, generator=generator).to(device).to(dtype)
            y.backward(dy)
            inputs, outputs = {"dy": host(dy), "x": host(x)}, {"dx": host(leaf.grad)}
            dump.add(f"torch d{label} {names[dtype]}", f"d{op}", inputs, outputs, expected=expected[1])
    for dtype in every:  # torch's glu is act * sigmoid(gate): its second half is TE's first
        x = torch.randn((256, 512), generator=generator).to(device).to(dtype) * 3
        act, gate = x[:, :256], x[:, 256:]
        leaf = torch.cat([gate, act], dim=1).requires_grad_()
        y = functional.glu(leaf)
        dump.add(f"torch glu {names[dtype]}", "glu", {"x": host(x)}, {"y": host(y)})
        dy = torch.randn(y.shape, generator=generator).to(device).to(dtype)
        y.backward(dy)
        dx = torch.cat([leaf.grad[:, 256:], leaf.grad[:, :256]], dim=1)
        expected = "right but for the last bits: torch factors it otherwise (and its CPU kernel works in 16 bits)"
        inputs = {"dy": host(dy), "x": host(x)}
        dump.add(f"torch dglu {names[dtype]}", "dglu", inputs, {"dx": host(dx)}, expected=expected)

    formats = (("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0))
    for fmt, code_dtype, largest in formats:
        scaling = ["DelayedScaling", {"fmt": fmt, "scale": 1.0}]
        for dtype, x in every.items():
            inside = torch.where(x.float().abs() <= largest, x, torch.ones_like(x))  # NaN and beyond: 1
            name = f"torch cast {names[dtype]} to {fmt}"
            outputs = {"rowwise_data": host(inside.to(code_dtype))}
            dump.add(f"{name}, in range", "quantize", {"x": host(inside)}, outputs, scaling=scaling)
            outputs = {"rowwise_data": host(x.to(code_dtype))}
            expected = "wrong: no-saturation (right where torch saturates)"
            dump.add(f"{name}, all", "quantize", {"x": host(x)}, outputs, scaling=scaling, expected=expected)

    for dtype in every:
        x = (torch.randn((512, 256), generator=generator) * 3).to(device).to(dtype)
        _dump_torch_scalings(dump, torch, host, x, names[dtype])
    _dump_torch_sums(dump, torch, host, device, generator, names)
    _dump_torch_hadamard(dump, torch, host, device, generator)
    if device == "cuda":
        torch.cuda.synchronize()


def _dump_torch_scalings(dump, torch, host, x, dtype_name):
    """Scales and casts of three formats composed of torch operations on the device."""
    wide = x.float()
    inputs = {"x": host(x)}
    largest = torch.tensor(448.0, device=x.device)

    amax = wide.abs().amax()
    scale = largest / amax
    outputs = {
        "rowwise_data": host((wide * scale).to(torch.float8_e4m3fn)),
        "rowwise_scale_inv": host((torch.ones_like(scale) / scale).reshape(1)),
        "amax_rowwise": host(amax.reshape(1)),
    }
    dump.add(f"torch current {dtype_name}", "quantize", inputs, outputs, scaling=["CurrentScaling", {"fmt": "e4m3"}])

    blocks = wide.reshape(len(x), -1, 32)
    bits = (blocks.abs().amax(2) * torch.tensor(F(1) / F(448), device=x.device)).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    multiplier = ((254 - exponent) << 23).view(torch.float32)
    outputs = {
        "rowwise_data": host((blocks * multiplier[..., None]).reshape(x.shape).to(torch.float8_e4m3fn)),
        "rowwise_scale_inv": host(exponent.to(torch.uint8)),
    }
    dump.add(f"torch mxfp8 {dtype_name}", "quantize", inputs, outputs, scaling=["MXFP8Scaling", {"fmt": "e4m3"}])

    blocks = wide.reshape(len(x), -1, 128)
    quotient = torch.full_like(blocks[:, :, 0], 448.0) / blocks.abs().amax(2)
    scale = (quotient.view(torch.int32) & -0x800000).view(torch.float32)
    outputs = {
        "rowwise_data": host((blocks * scale[..., None]).reshape(x.shape).to(torch.float8_e4m3fn)),
        "rowwise_scale_inv": host((torch.ones_like(scale) / scale).T),
    }
    scaling = ["BlockScaling", {"fmt": "e4m3", "block_dim": 1}]
    dump.add(f"torch block 1x128 {dtype_name}", "quantize", inputs, outputs, scaling=scaling)


def _dump_torch_sums(dump, torch, host, device, generator, names):
    """Bias gradients: torch's sum over rows."""
    for dtype, name in names.items():
        shape = (4096, 64)
        spread = torch.exp2(torch.randint(-6, 7, shape, generator=generator).float())
        x = (torch.randn(shape, generator=generator) * spread).to(device).to(dtype)
        dbias = x.float().sum(0).to(dtype)
        inputs, scaling = {"x": host(x)}, ["MXFP8Scaling", {"fmt": "e4m3"}]
        dump.add(f"torch dbias {name}", "quantize", inputs, {"dbias": host(dbias)}, scaling=scaling)


def _dump_torch_hadamard(dump, torch, host, device, generator):
    """The 16-point transform as one matrix product; the quantization after it is the judge's."""
    mask = 0xD7E8
    index = np.arange(16)
    parity = np.array([[bin(i & j).count("1") & 1 for j in index] for i in index])
    signs = np.where((mask >> index) & 1, -1.0, 1.0)
    matrix = (signs[:, None] * np.where(parity, -0.25, 0.25)).astype(np.float32)
    matrix = torch.from_numpy(matrix).to(device)
    for label, spread in (("narrow", 0), ("wide", 20)):
        size = torch.exp2(torch.randint(-spread, spread + 1, (512, 256), generator=generator).float())
        x = (torch.randn((512, 256), generator=generator) * size).to(device).to(torch.bfloat16)
        groups = x.T.contiguous().reshape(-1, 16)
        for kind, product in (
            ("bfloat16 product", groups @ matrix.to(torch.bfloat16)),
            ("float32 product", (groups.float() @ matrix).to(torch.bfloat16)),
        ):
            dump.add(
                f"torch Hadamard transform, {label}, {kind}",
                "quantize",
                {"x": host(x)},
                {"transform": host(product.reshape(256, 512))},
                scaling=["NVFP4Scaling", {"rht": True}],
                expected="right (tensor cores truncate: recorded)" if spread else "right",
                derive="nvfp4-of-transform",
            )


# --- Numba: TE's formulas -------------------------------------------------------------------------

ZERO, HALF, ONE, TWO = F(0), F(0.5), F(1), F(2)
SQRT_2_OVER_PI, GELU_CUBIC = F(0.79788456), F(0.03567741)
GELU_RATIO, GELU_SLOPE, QGELU_ALPHA = F(0.044715), F(0.1070322243), F(1.702)
LIMIT, ALPHA, OFFSET = F(PARAMETERS["limit"]), F(PARAMETERS["alpha"]), F(PARAMETERS["glu_linear_offset"])
BETA1, BETA2 = F(PARAMETERS["beta1"]), F(PARAMETERS["beta2"])


def numba_formulas(fastmath):
    """Name -> (value, derivative, gate, gate slope) as device functions, in TE's float32 order."""

    def device(function):
        return cuda.jit(device=True, inline=True, fastmath=fastmath)(function)

    # math.exp and math.tanh of a float32 compile to CUDA's expf and tanhf; Python floats would make it all float64.
    @device
    def sigmoid(x):
        return ONE / (ONE + F(math.exp(-x)))

    @device
    def dsigmoid(x):
        s = sigmoid(x)
        return s * (ONE - s)

    @device
    def gelu(x):
        return x * (HALF + HALF * F(math.tanh(x * (SQRT_2_OVER_PI + GELU_CUBIC * x * x))))

    @device
    def dgelu(x):
        t = F(math.tanh(SQRT_2_OVER_PI * x * (ONE + GELU_RATIO * x * x)))
        return HALF * x * ((ONE - t * t) * (SQRT_2_OVER_PI + GELU_SLOPE * x * x)) + HALF * (ONE + t)

    @device
    def qgelu(x):
        return x * sigmoid(QGELU_ALPHA * x)

    @device
    def dqgelu(x):
        z = QGELU_ALPHA * x
        return z * dsigmoid(z) + sigmoid(z)

    @device
    def relu(x):
        return x if x > ZERO else ZERO

    @device
    def drelu(x):
        return ONE if x > ZERO else ZERO

    @device
    def srelu(x):
        return x * x if x > ZERO else ZERO

    @device
    def dsrelu(x):
        return TWO * x if x > ZERO else ZERO

    @device
    def silu(x):
        return x * sigmoid(x)

    @device
    def dsilu(x):
        return x * dsigmoid(x) + sigmoid(x)

    @device
    def clamped_silu(x):
        c = x if x <= LIMIT else LIMIT
        return c * sigmoid(ALPHA * c)

    @device
    def dclamped_silu(x):
        c = x if x <= LIMIT else LIMIT
        slope = ALPHA * c * dsigmoid(ALPHA * c) + sigmoid(ALPHA * c)
        return slope if x <= LIMIT else ZERO

    @device
    def situ(x):
        return BETA1 * F(math.tanh(x / BETA1)) * sigmoid(x)

    @device
    def dsitu(x):
        t = F(math.tanh(x / BETA1))
        s = sigmoid(x)
        return (ONE - t * t) * s + BETA1 * t * s * (ONE - s)

    @device
    def identity_gate(g):
        return g

    @device
    def identity_slope(g):
        return ONE

    @device
    def clamped_gate(g):
        low = g if g >= -LIMIT else -LIMIT
        return (low if low <= LIMIT else LIMIT) + OFFSET

    @device
    def clamped_slope(g):
        return ONE if (g <= LIMIT and g >= -LIMIT) else ZERO

    @device
    def situ_gate(g):
        return BETA2 * F(math.tanh(g / BETA2))

    @device
    def situ_slope(g):
        t = F(math.tanh(g / BETA2))
        return ONE - t * t

    plain = (identity_gate, identity_slope)
    return {
        "gelu": (gelu, dgelu, *plain),
        "qgelu": (qgelu, dqgelu, *plain),
        "relu": (relu, drelu, *plain),
        "srelu": (srelu, dsrelu, *plain),
        "silu": (silu, dsilu, *plain),
        "glu": (sigmoid, dsigmoid, *plain),
        "geglu": (gelu, dgelu, *plain),
        "qgeglu": (qgelu, dqgelu, *plain),
        "reglu": (relu, drelu, *plain),
        "sreglu": (srelu, dsrelu, *plain),
        "swiglu": (silu, dsilu, *plain),
        "clamped_swiglu": (clamped_silu, dclamped_silu, clamped_gate, clamped_slope),
        "situglu": (situ, dsitu, situ_gate, situ_slope),
    }


def unary_kernels(formulas, fastmath):
    """(forward, backward) kernels of flat float32 arrays."""
    value, derivative = formulas[:2]

    def forward(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = value(x[i])

    def backward(dy, x, dx):
        i = cuda.grid(1)
        if i < x.size:
            dx[i] = derivative(x[i]) * dy[i]

    return tuple(cuda.jit(fastmath=fastmath)(kernel) for kernel in (forward, backward))


def gated_kernels(formulas, fastmath):
    """(forward, backward) kernels of flat float32 arrays whose rows are [act | gate] of width 2H."""
    value, derivative, gate, gate_slope = formulas

    def forward(x, y, width):
        i = cuda.grid(1)
        if i < y.size:
            j = i // width * width + i
            y[i] = value(x[j]) * gate(x[j + width])

    def backward(dy, x, dx, width):
        i = cuda.grid(1)
        if i < dy.size:
            j = i // width * width + i
            dx[j] = derivative(x[j]) * dy[i] * gate(x[j + width])
            dx[j + width] = gate_slope(x[j + width]) * dy[i] * value(x[j])

    return tuple(cuda.jit(fastmath=fastmath)(kernel) for kernel in (forward, backward))


def launch(kernel, threads, *arguments):
    """Run a kernel over `threads` threads and wait."""
    block = min(256, max(1, threads))
    kernel[-(-threads // block), block](*arguments)
    cuda.synchronize()


def run_unary(formulas, x, dy, fastmath):
    """(y, dx) on the device, float32."""
    forward, backward = unary_kernels(formulas, fastmath)
    flat, y, dx = x.reshape(-1), np.zeros(x.size, np.float32), np.zeros(x.size, np.float32)
    device_x, device_y, device_dx = cuda.to_device(flat), cuda.to_device(y), cuda.to_device(dx)
    launch(forward, flat.size, device_x, device_y)
    launch(backward, flat.size, cuda.to_device(dy.reshape(-1)), device_x, device_dx)
    return device_y.copy_to_host().reshape(x.shape), device_dx.copy_to_host().reshape(x.shape)


def run_gated(formulas, x, dy, fastmath):
    """(y, dx) on the device, float32; x is (rows, 2H)."""
    forward, backward = gated_kernels(formulas, fastmath)
    width = x.shape[1] // 2
    y, dx = np.zeros(dy.size, np.float32), np.zeros(x.size, np.float32)
    device_x, device_y, device_dx = cuda.to_device(x.reshape(-1)), cuda.to_device(y), cuda.to_device(dx)
    launch(forward, dy.size, device_x, device_y, width)
    launch(backward, dy.size, cuda.to_device(dy.reshape(-1)), device_x, device_dx, width)
    return device_y.copy_to_host().reshape(dy.shape), device_dx.copy_to_host().reshape(x.shape)


def dump_numba(dump, device, elements):
    """TE's formulas compiled by Numba."""
    side = max(1, int(elements**0.5) // 32) * 32
    count = side * side
    tensors = {"float32": (mixed_float32(count, 3).reshape(side, side), mixed_float32(count, 4).reshape(side, side))}
    rng = np.random.default_rng(5)
    exhaustive = all_bfloat16() if elements >= 1 << 16 else all_bfloat16()[::8, :side]
    shuffled = from_bfloat16_bits(to_bfloat16_bits(rng.standard_normal(exhaustive.shape) * 4))
    tensors["bfloat16"] = (exhaustive, shuffled)
    failures = []
    for fastmath in (False, True):
        formulas = numba_formulas(fastmath)
        for dtype, (act, gate) in tensors.items():
            if fastmath and dtype == "float32":
                continue  # every bfloat16 value says enough, in a quarter of the bytes
            _dump_elementary(dump, act, fastmath, dtype)
            dy = rng.standard_normal(act.shape).astype(np.float32)
            dy = dy if dtype == "float32" else from_bfloat16_bits(to_bfloat16_bits(dy))
            for name in (*UNARY, *GATED):
                try:
                    _dump_formula(dump, name, formulas[name], act, gate, dy, dtype, fastmath)
                except Exception as error:
                    failures.append(f"{name} {dtype} fastmath={fastmath}: {type(error).__name__}: {error}"[:400])
    for step in (_dump_atomic_dbias, _dump_atomic_row_scales):
        try:
            step(dump, rng, 128 if elements < 1 << 16 else 2048)
        except Exception as error:
            failures.append(f"{step.__name__}: {type(error).__name__}: {error}"[:400])
    if failures:
        dump.parts["numba failures"] = failures


def _dump_elementary(dump, x, fastmath, dtype):
    """expf, tanhf and the reciprocal by themselves."""

    def exponential(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = math.exp(x[i])

    def hyperbolic_tangent(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = math.tanh(x[i])

    def reciprocal(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = ONE / x[i]

    for name, kernel in (("exp", exponential), ("tanh", hyperbolic_tangent), ("reciprocal", reciprocal)):
        device_y = cuda.to_device(np.zeros(x.size, np.float32))
        launch(cuda.jit(fastmath=fastmath)(kernel), x.size, cuda.to_device(x.reshape(-1)), device_y)
        outputs = {"y": device_y.copy_to_host().reshape(x.shape)}
        label = f"numba {name} at {dtype} values{', fast math' if fastmath else ''}"
        expected = "recorded" if fastmath else "within 2 ulp"
        dump.add(label, None, {"x": x}, outputs, derive=f"elementary {name}", expected=expected)


def _dump_formula(dump, name, formulas, act, gate, dy, dtype, fastmath):
    def as_input(values):
        return values if dtype == "float32" else (to_bits(values), "bfloat16")

    def to_bits(values):  # the values are bfloat16 numbers already, NaN and inf among them
        return (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    if name in UNARY:
        x = act
        y, dx = run_unary(formulas, x, dy, fastmath)
    else:
        x = np.concatenate([act, gate], axis=1)
        y, dx = run_gated(formulas, x, dy, fastmath)
    label = f"{name} {dtype}{', fast math' if fastmath else ''}"
    expected = "recorded" if fastmath else "right"
    dump.add(f"numba {label}", name, {"x": as_input(x)}, {"y": y}, expected=expected)
    inputs = {"dy": as_input(dy), "x": as_input(x)}
    dump.add(f"numba d{label}", f"d{name}", inputs, {"dx": dx}, expected=expected)


def _dump_atomic_dbias(dump, rng, rows):
    """dgelu's bias gradient, unrounded terms added with atomics in whatever order the threads come."""
    derivative = numba_formulas(False)["gelu"][1]

    def kernel(dy, x, dbias, columns):
        i = cuda.grid(1)
        if i < x.size:
            cuda.atomic.add(dbias, i % columns, derivative(x[i]) * dy[i])

    columns = 64
    x = from_bfloat16_bits(to_bfloat16_bits(rng.standard_normal((rows, columns)) * 2))
    spread = np.exp2(rng.integers(-6, 7, (rows, columns)))
    dy = from_bfloat16_bits(to_bfloat16_bits(rng.standard_normal((rows, columns)) * spread))
    device_dbias = cuda.to_device(np.zeros(columns, np.float32))
    launch(
        cuda.jit(kernel), x.size, cuda.to_device(dy.reshape(-1)), cuda.to_device(x.reshape(-1)), device_dbias, columns
    )
    dbias = (to_bfloat16_bits(device_dbias.copy_to_host()), "bfloat16")
    inputs = {"dy": (to_bfloat16_bits(dy), "bfloat16"), "x": (to_bfloat16_bits(x), "bfloat16")}
    scaling = ["MXFP8Scaling", {"fmt": "e4m3"}]
    dump.add("numba dgelu dbias bfloat16, atomics", "dgelu", inputs, {"dbias": dbias}, scaling=scaling)
    device_dbias = cuda.to_device(np.zeros(columns, np.float32))
    launch(
        cuda.jit(kernel), x.size, cuda.to_device(dy.reshape(-1)), cuda.to_device(x.reshape(-1)), device_dbias, columns
    )
    inputs, outputs = {"dy": dy, "x": x}, {"dbias": device_dbias.copy_to_host()}
    dump.add("numba dgelu dbias float32, atomics", "dgelu", inputs, outputs, scaling=scaling)


def _dump_atomic_row_scales(dump, rng, rows):
    """scaled_dswiglu's gradient of the row scales, added with atomics."""
    value = numba_formulas(False)["silu"][0]

    def kernel(dy, x, drow_scales, width):
        i = cuda.grid(1)
        if i < dy.size:
            row = i // width
            j = row * width + i
            cuda.atomic.add(drow_scales, row, dy[i] * (value(x[j]) * x[j + width]))

    width = 96
    x = rng.standard_normal((rows, 2 * width)).astype(np.float32) * F(2)
    dy = rng.standard_normal((rows, width)).astype(np.float32)
    row_scales = rng.random(rows).astype(np.float32)
    device_sums = cuda.to_device(np.zeros(rows, np.float32))
    launch(cuda.jit(kernel), dy.size, cuda.to_device(dy.reshape(-1)), cuda.to_device(x.reshape(-1)), device_sums, width)
    inputs = {"dy": dy, "x": x, "row_scales": row_scales}
    dump.add("numba scaled_dswiglu, atomics", "scaled_dswiglu", inputs, {"drow_scales": device_sums.copy_to_host()})


# --- Triton ---------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _sigmoid(x, ACCURATE: tl.constexpr):
        if ACCURATE:
            return tl.div_rn(1.0, 1.0 + libdevice.exp(-x))
        return 1.0 / (1.0 + tl.exp(-x))

    @triton.jit
    def _swiglu_mxfp8(x_ptr, data_ptr, scale_ptr, width, ACCURATE: tl.constexpr):
        """One program: one row, 128 columns, four blocks of 32. bfloat16 comes and is rounded to in float32 bits."""
        row, first = tl.program_id(0), tl.program_id(1) * 128
        columns = first + tl.arange(0, 128)
        act = tl.load(x_ptr + row * 2 * width + columns).to(tl.float32)
        gate = tl.load(x_ptr + row * 2 * width + width + columns).to(tl.float32)
        y = (act * _sigmoid(act, ACCURATE)) * gate
        y = tl.reshape(y.to(tl.bfloat16).to(tl.float32), (4, 32))
        amax = tl.max(tl.abs(y), axis=1)
        bits = (amax * 0.002232142857142857).to(tl.int32, bitcast=True)
        exponent = bits >> 23
        mantissa = bits & 0x7FFFFF
        up = (mantissa != 0) & ((exponent != 0) | (mantissa > 0x400000))
        exponent = exponent + up.to(tl.int32)
        multiplier = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        codes = (y * tl.expand_dims(multiplier, 1)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(data_ptr + row * width + columns, tl.reshape(codes, (128,)))
        tl.store(scale_ptr + row * (width // 32) + first // 32 + tl.arange(0, 4), exponent.to(tl.uint8))

    @triton.jit
    def _gelu_delayed(x_ptr, scale_ptr, data_ptr, amax_ptr, ACCURATE: tl.constexpr):
        """One program: 1024 elements; TE's formula, its amax before the scale, E4M3."""
        index = tl.program_id(0) * 1024 + tl.arange(0, 1024)
        x = tl.load(x_ptr + index).to(tl.float32)
        u = x * (0.79788456 + (0.03567741 * x) * x)
        t = 2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0
        if ACCURATE:
            t = libdevice.tanh(u)
        y = x * (0.5 + 0.5 * t)
        tl.atomic_max(amax_ptr, tl.max(tl.abs(y), axis=0))
        codes = (y * tl.load(scale_ptr)).to(tl.float8e4nv)
        tl.store(data_ptr + index, codes.to(tl.uint8, bitcast=True))


def dump_triton(dump, device, elements):
    """Two fused Triton kernels, each with Triton's fast exp and with libdevice's functions."""
    import torch

    generator = torch.Generator().manual_seed(6)
    rows, width = max(8, min(1024, elements // 256)), 256
    failures = []
    for accurate in (False, True):
        if accurate and device == "cpu":
            continue  # Triton's interpreter has no libdevice
        label = "libdevice" if accurate else "Triton's exp"
        try:
            x = (torch.randn((rows, 2 * width), generator=generator) * 3).to(torch.bfloat16).to(device)
            data = torch.zeros((rows, width), dtype=torch.uint8, device=device)
            scales = torch.zeros((rows, width // 32), dtype=torch.uint8, device=device)
            _swiglu_mxfp8[(rows, width // 128)](x, data, scales, width, ACCURATE=accurate)
            bits = x.cpu().view(torch.int16).numpy().view(np.uint16)
            outputs = {"rowwise_data": data.cpu().numpy(), "rowwise_scale_inv": scales.cpu().numpy()}
            scaling = ["MXFP8Scaling", {"fmt": "e4m3"}]
            dump.add(
                f"triton swiglu mxfp8, {label}",
                "swiglu",
                {"x": (bits, "bfloat16")},
                outputs,
                scaling=scaling,
                expected="right" if accurate else "recorded",
            )
        except Exception as error:
            failures.append(f"swiglu mxfp8, {label}: {type(error).__name__}: {error}"[:600])
        try:
            x = (torch.randn((rows, width), generator=generator) * 3).to(device)
            scale = torch.tensor([37.5], device=device)
            data = torch.zeros((rows, width), dtype=torch.uint8, device=device)
            amax = torch.zeros(1, device=device)
            _gelu_delayed[(rows * width // 1024,)](x, scale, data, amax, ACCURATE=accurate)
            outputs = {
                "rowwise_data": data.cpu().numpy(),
                "rowwise_scale_inv": (F(1) / scale.cpu().numpy()).astype(np.float32),
                "amax_rowwise": amax.cpu().numpy(),
            }
            dump.add(
                f"triton gelu delayed, {label}",
                "gelu",
                {"x": x.cpu().numpy()},
                outputs,
                scaling=["DelayedScaling", {"fmt": "e4m3", "scale": 37.5}],
                expected="right" if accurate else "recorded",
            )
        except Exception as error:
            failures.append(f"gelu delayed, {label}: {type(error).__name__}: {error}"[:600])
    if failures:
        dump.parts["triton failures"] = failures


PARTS = {"torch": dump_torch, "numba": dump_numba, "triton": dump_triton}


# --- judging --------------------------------------------------------------------------------------


def load_arrays(directory, references):
    """Arrays of one case, with their dtypes; ml_dtypes gives bfloat16."""
    import ml_dtypes

    arrays = {}
    for name, (file, key, dtype, shape) in references.items():
        with np.load(directory / file) as archive:
            array = archive[key]
        array = array.view(np.dtype(ml_dtypes.bfloat16)) if dtype == "bfloat16" else array
        arrays[name] = array.reshape(shape)
    return arrays


def make_scaling(description):
    """The settings that a manifest names."""
    import refops

    if description is None:
        return None
    kind, fields = description
    fields = dict(fields)
    if "fmt" in fields:
        fields["fmt"] = refops.FORMATS[fields["fmt"]]
    return getattr(refops, kind)(**fields)


def ulp_distance(got, truth):
    """Largest distance of float32 `got` from float64 `truth` in ulp of the truth's binade, over finite truths."""
    with np.errstate(all="ignore"):
        single = truth.astype(np.float32)
        spacing = np.maximum(np.spacing(np.abs(single)), F(2.0**-149)).astype(np.float64)
        distance = np.abs(got.astype(np.float64) - truth) / spacing
    usable = np.isfinite(single) & np.isfinite(truth)
    classes = np.isnan(got) != np.isnan(truth)
    return distance[usable], int(classes.sum())


def judge_elementary(case, inputs, outputs):
    """Errors of exp, tanh and the reciprocal: there is no operation of that name, so counts alone."""
    x, y = inputs["x"].astype(np.float64), outputs["y"]
    with np.errstate(all="ignore"):
        truth = {"exp": np.exp, "tanh": np.tanh, "reciprocal": lambda v: 1.0 / v}[case["derive"].split()[1]](x)
    distance, wrong_class = ulp_distance(y, truth)
    normal = np.abs(truth) >= 2.0**-126
    normal_distance, _ = ulp_distance(y[normal], truth[normal])
    return {
        "largest_error_ulp": float(np.nanmax(distance, initial=0)),
        "largest_error_ulp_of_normal_results": float(np.nanmax(normal_distance, initial=0)),
        "nan_or_not": wrong_class,
    }


def judge_case(case, directory):
    """What the oracle says about one case."""
    from refops import oracle

    inputs, outputs = load_arrays(directory, case["inputs"]), load_arrays(directory, case["outputs"])
    if case["derive"] and case["derive"].startswith("elementary"):
        return judge_elementary(case, inputs, outputs)
    scaling = make_scaling(case["scaling"])
    if case["derive"] == "nvfp4-of-transform":
        import refops

        q = refops.quantize(outputs["transform"], refops.NVFP4Scaling())
        outputs = {
            "columnwise_data": q.rowwise_data,
            "columnwise_scale_inv": q.rowwise_scale_inv,
            "amax_columnwise": q.amax_rowwise,
        }
    inputs = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    settings = {"scaling": scaling, "params": case["params"]}
    result = {"smallest_ulp": None, "wrong": {}}
    for ulp in LADDER:
        report = oracle.check(case["op"], inputs, outputs, ulp=ulp, diagnose=False, **settings)
        if ulp == case["ulp"]:
            result["ok"] = bool(report.ok)
        result["wrong"][str(ulp)] = {array.name: int(array.wrong) for array in report.arrays if array.wrong}
        if report.ok:
            result["smallest_ulp"] = ulp
            break
    result.setdefault("ok", result["smallest_ulp"] is not None)
    if not result["ok"]:
        report = oracle.check(case["op"], inputs, outputs, ulp=case["ulp"], **settings)
        result["diagnosis"] = [
            {"names": list(e.names), "explained": float(e.explained), "exact": bool(e.exact)} for e in report.diagnosis
        ]
    return result


def judge(directory, seconds):
    """Return the results for every case of a dump."""
    sys.path.insert(0, str(ROOT))
    directory = Path(directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    results, start = [], time.monotonic()
    for case in manifest["cases"]:
        entry = {"name": case["name"], "expected": case["expected"]}
        if time.monotonic() - start > seconds:
            entry["error"] = f"not judged: {seconds} s were over"
        else:
            begun = time.monotonic()
            try:
                entry.update(judge_case(case, directory))
            except Exception as error:
                entry["error"] = f"{type(error).__name__}: {error}"[:600]
            entry["seconds"] = round(time.monotonic() - begun, 2)
        results.append(entry)
        print(_line(entry), flush=True)
    judged = [r for r in results if "ok" in r]
    counts = {
        "cases": len(results),
        "judged": len(judged),
        "right": sum(r["ok"] for r in judged),
        "right where expected": sum(r["ok"] for r in judged if r["expected"].startswith("right")),
        "expected right": sum(r["expected"].startswith("right") for r in judged),
        "errors": sum("error" in r for r in results),
    }
    print(counts)
    return {"environment": manifest["environment"], "parts": manifest["parts"], "counts": counts, "cases": results}


def sample(directory, path):
    """Write every `SAMPLED`th row of the cases that are functions of their row to one npz file."""
    directory = Path(directory)
    manifest = json.loads((directory / "manifest.json").read_text())
    arrays, cases = {}, []
    for case in manifest["cases"]:
        by_row = case["op"] and not case["derive"] and case["scaling"] is None and not case["op"].startswith("scaled")
        if not by_row or set(case["outputs"]) & {"dbias"} or "fast math" in case["name"]:
            continue
        kept = {"name": case["name"], "op": case["op"], "expected": case["expected"], "inputs": {}, "outputs": {}}
        for group in ("inputs", "outputs"):
            for name, array in load_arrays(directory, case[group]).items():
                file, key, dtype, _ = case[group][name]
                key = f"{Path(file).stem}_{key}"
                arrays[key] = np.ascontiguousarray(array[::SAMPLED]).view(f"u{array.dtype.itemsize}")
                kept[group][name] = [key, dtype]
        cases.append(kept)
    manifest = {"environment": manifest["environment"], "cases": cases}
    arrays["manifest"] = np.frombuffer(json.dumps(manifest).encode(), np.uint8)
    np.savez_compressed(path, **arrays)
    print(f"{len(cases)} cases in {path}, {Path(path).stat().st_size:,} bytes")


def plain(value):
    """`value` for JSON: infinite and NaN errors as text."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _line(entry):
    if "error" in entry:
        said = entry["error"]
    elif "ok" in entry:
        said = ("right" if entry["ok"] else "WRONG") + f", smallest ulp {entry['smallest_ulp']}"
        if entry.get("diagnosis"):
            said += f", {' + '.join(entry['diagnosis'][0]['names'])}"
    else:
        said = f"largest error {entry['largest_error_ulp_of_normal_results']:.2f} ulp"
    return f"{entry['name']:50} {said} (expected: {entry['expected']})"


# --- command line ---------------------------------------------------------------------------------


def make_dump(arguments):
    """Run the parts and write the dump; True if each one ran."""
    dump = Dump(arguments.directory)
    for part in arguments.parts.split(","):
        begun = time.monotonic()
        if part in UNAVAILABLE:
            dump.parts[part] = f"unavailable: {UNAVAILABLE[part]}"
        else:
            try:
                PARTS[part](dump, arguments.device, arguments.elements)
                dump.parts[part] = f"ran, {time.monotonic() - begun:.1f} s"
            except Exception:
                dump.parts[part] = "failed: " + traceback.format_exc()[-1500:]
        print(part, dump.parts[part], flush=True)
    dump.finish(environment(arguments.device))
    print(f"{len(dump.cases)} cases in {dump.directory}", {k: v for k, v in dump.parts.items() if "failures" in k})
    return all(dump.parts[part].startswith("ran") for part in arguments.parts.split(","))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("dump", "judge", "run", "sample"))
    parser.add_argument("directory")
    parser.add_argument("file", nargs="?", help="of sample")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--parts", default="torch,numba,triton")
    parser.add_argument("--elements", type=int, default=1 << 18, help="size of float32 inputs")
    parser.add_argument("--json", default=None, help="where the results go (default DIR/results.json)")
    parser.add_argument("--seconds", type=float, default=120, help="time to spend on judging")
    arguments = parser.parse_args()
    ran = True
    if arguments.command == "sample":
        sample(arguments.directory, arguments.file)
    if arguments.command in ("dump", "run"):
        ran = make_dump(arguments)
    if arguments.command in ("judge", "run"):
        results = judge(arguments.directory, arguments.seconds)
        path = Path(arguments.json or Path(arguments.directory) / "results.json")
        path.write_text(json.dumps(plain(results), indent=1, allow_nan=False))
        print(f"results in {path}")
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main())
