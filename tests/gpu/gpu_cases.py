"""The cases of `gpu_check`: what is called on which arrays, and what the result must be.

A case is a name and a function of (device, rng) that raises where a result is wrong. The same cases run on a GPU with
torch tensors, on the software GPU with NumPy arrays in its memory and, at smaller shapes, in the simulator. Inputs come
from `rng`, new in every run.
"""

from dataclasses import dataclass

import numpy as np
from simulated_cases import DTYPES, RHT, SCALINGS, directions_of, gated, granularity, misaligned

import cuda_kernels
import exactness
import refops
from arrays import assert_same_bits
from cuda_kernels.operands import Spec
from refops import oracle

F = np.float32
BOTH = SCALINGS | RHT
LAYOUTS = ("plain", "misaligned", "strided", "transposed")
MAIN = ("delayed-e5m2", "current", "block-1x128", "block-128x128", "mxfp8", "mxfp8-2d", "nvfp4-1x16", "nvfp4-16x16")
PARAMETERS = {
    "clamped_swiglu": {"limit": 1.5, "alpha": 0.5, "glu_linear_offset": -0.25},
    "situglu": {"beta1": 0.5, "beta2": 3.0},
}
WITH_ROW_SCALES = ("swiglu", "situglu", "clamped_swiglu", "srelu")
SPECIALS = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x7F7F0000, 0x00800000], np.uint32
)


# --- kernels by themselves --------------------------------------------------------------------------

#: Name -> (kernel, descriptions of its arguments).
ALONE: dict[str, tuple] = {}


@dataclass(frozen=True)
class Alone(Spec):
    """A kernel of `ALONE`."""

    name: str

    title = "a kernel by itself"

    def operands(self):
        return tuple(ALONE[self.name][1])

    def build(self, target):
        return ALONE[self.name][0]


def alone(name, kernel, described):
    """The `Spec` of a kernel that belongs to no family; its name is its own."""
    ALONE[name] = kernel, described
    return Alone(name)


# --- devices ----------------------------------------------------------------------------------------


class Sized:
    """A device whose cases have the size that it has time for: `size` is "small", "medium" or "large"."""

    size = "large"

    def __enter__(self):
        """Ready for cases."""
        return self

    def __exit__(self, *error):
        """Nothing to give back."""

    def sized(self, *, small, medium, large):
        """The one that goes with the device's size."""
        return {"small": small, "medium": medium, "large": large}[self.size]


class Simulated(Sized):
    """NumPy arrays and small shapes."""

    name, size = "simulated", "small"

    def put(self, array, layout="plain"):
        """The array with another layout in memory."""
        if layout == "strided":
            return np.repeat(array, 2, axis=-1)[..., ::2]
        return {"misaligned": misaligned, "transposed": np.asfortranarray}.get(layout, np.asarray)(array)

    def get(self, array):
        """The array itself."""
        return array

    def poison(self):
        """Nothing: the simulator poisons what it allocates."""

    def run(self, key, kernel, described, values, grid, block):
        """Launch a kernel on arrays."""
        from cuda_kernels.launch import launcher_for

        launcher_for(0).launch(alone(key, kernel, described), values, grid, block, 0)


class Emulated(Sized):
    """NumPy arrays in the memory of the software GPU, at shapes of a few tiles."""

    name, size = "emulated", "medium"

    def __init__(self, target, **behaviour):
        from cuda_kernels.emulator import device_for

        self.context, self.number = cuda_kernels.emulated(target=target, **behaviour), device_for(target)

    def __enter__(self):
        """From here on the public calls take NumPy arrays."""
        self.context.__enter__()
        return self

    def __exit__(self, *error):
        """The public calls are as before."""
        self.context.__exit__(*error)

    def put(self, array, layout="plain"):
        """A copy in device memory, contiguous ("plain"), or not, or at an address that is not aligned."""
        array = np.ascontiguousarray(array)
        if layout == "misaligned":
            buffer = self._copy(np.concatenate([array.reshape(-1)[:1], array.reshape(-1)]))
            return buffer[1:].reshape(array.shape)
        if layout == "strided":
            return self._copy(np.repeat(array, 2, axis=-1))[..., ::2]
        if layout == "transposed" and array.ndim > 1:
            return self._copy(np.swapaxes(array, -1, -2)).swapaxes(-1, -2)
        return self._copy(array)

    def _copy(self, array):
        from cuda_kernels.emulator import driver_calls

        return driver_calls.to_device(array, self.number)

    def get(self, array):
        """A copy outside of device memory."""
        from cuda_kernels.emulator import driver_calls

        return driver_calls.to_host(array, self.number) if driver_calls.is_on_device(array) else array

    def poison(self):
        """Nothing: device memory is poisoned where it is allocated."""

    def run(self, key, kernel, described, values, grid, block):
        """Launch a kernel on arrays and numbers."""
        from cuda_kernels.launch import launcher_for

        flat = [value.ctypes.data if isinstance(value, np.ndarray) else value for value in values]
        launcher_for(self.number).launch(alone(key, kernel, described), flat, grid, block, 0)


class Torch(Sized):
    """CUDA tensors of torch."""

    name, size = "cuda", "large"

    def __init__(self, number=0):
        import torch

        self.torch, self.number, self.device = torch, number, f"cuda:{number}"

    def put(self, array, layout="plain"):
        """A copy on the device, contiguous ("plain"), or not, or from an address that is not aligned."""
        array = np.ascontiguousarray(array)
        tensor = self._copy(array).reshape(array.shape)
        if layout == "misaligned":
            buffer = self.torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=self.device)
            buffer[1:] = tensor.reshape(-1)
            tensor = buffer[1:].reshape(tensor.shape)
        elif layout == "strided":
            tensor = tensor.repeat_interleave(2, dim=-1)[..., ::2]
        elif layout == "transposed" and tensor.ndim > 1:
            tensor = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        return tensor

    def _copy(self, array):
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view(np.int16).copy()).to(self.device).view(self.torch.bfloat16)
        return self.torch.from_numpy(array.copy()).to(self.device)

    def get(self, tensor):
        """A copy as a NumPy array."""
        import ml_dtypes

        tensor = tensor.detach().contiguous()
        if tensor.dtype == self.torch.bfloat16:
            return tensor.view(self.torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return tensor.cpu().numpy()

    def poison(self, megabytes=64):
        """Fill what the allocator hands out next with 0xA5: what a kernel leaves out shows."""
        sizes = [megabytes << 20] + [1 << k for k in range(9, 22)] * 4
        blocks = [self.torch.full((n,), 0xA5, dtype=self.torch.uint8, device=self.device) for n in sizes]
        del blocks

    def run(self, key, kernel, described, values, grid, block):
        """Launch a kernel on tensors and numbers."""
        from cuda_kernels.launch import launcher_for

        flat = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in values]
        stream = self.torch.cuda.current_stream(self.number).cuda_stream
        launcher_for(self.number).launch(alone(key, kernel, described), flat, grid, block, stream)


class OnHost:
    """A quantized tensor's arrays on the host."""

    def __init__(self, device, q):
        self.arrays = {name: device.get(array) for name, array in q.arrays.items()}
        self.shape, self.scaling = q.shape, q.scaling


# --- inputs -----------------------------------------------------------------------------------------


def draw(rng, shape, dtype, special=False):
    """Heavy-tailed values of many sizes; with `special` also NaN, infinities, zeros, subnormals."""
    x = (rng.standard_t(2, shape) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1)))).astype(F)
    x.reshape(-1)[:: int(rng.integers(50, 100))] = 0
    if special and x.size:
        places = rng.integers(0, x.size, max(4, x.size // 200))
        x.reshape(-1)[places] = rng.choice(SPECIALS, places.size).view(F)
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def draw_moderate(rng, shape, dtype):
    """Values on which approximate exponentials keep their bound: no results below 2^-126."""
    return np.clip(rng.standard_normal(shape) * 4, -60, 60).astype(dtype)


def draw_exact(rng, shape, dtype):
    """Small multiples of 1/4: sums of them are exact."""
    return (rng.integers(-16, 17, shape) / 4).astype(dtype)


def shapes_of(device, scaling, kind):
    """A shape that the scaling allows: "whole" vectors and tiles, or "ragged"."""
    unit = granularity(scaling)
    if kind == "whole":
        return device.sized(small=(32, 64), medium=(128, 512), large=(512, 768))
    return device.sized(
        small={1: (33, 40), 16: (32, 48), 32: (32, 32)},
        medium={1: (131, 277), 16: (144, 272), 32: (160, 288)},
        large={1: (259, 397), 16: (272, 400), 32: (288, 416)},
    )[unit]


# --- comparisons ------------------------------------------------------------------------------------


def same_quantized(device, q, expected):
    """Every array has the reference's bits, padding included."""
    host = OnHost(device, q)
    names = {name for name in host.arrays if getattr(expected, name) is not None}
    assert names == set(host.arrays), f"arrays {sorted(host.arrays)}"
    for name, array in host.arrays.items():
        assert_same_bits(array, getattr(expected, name), name)


def judge(op, inputs, outputs, **options):
    """Raise unless the oracle accepts the outputs."""
    oracle.check(op, inputs, outputs, **options).raise_for_mismatch()


# --- quantize ---------------------------------------------------------------------------------------


def quantize_case(name, kind, layout, dtype, directions, *, special=False, dbias=False, swizzled=False):
    """One call of `quantize`, bit for bit."""
    scaling = BOTH[name]
    rowwise, columnwise = directions
    what = ", ".join(w for w, on in (("special", special), ("dbias", dbias), ("swizzled", swizzled)) if on)
    label = f"quantize {name} {kind} {layout} {dtype} {'R' * rowwise}{'C' * columnwise} {what}".rstrip()

    def run(device, rng):
        shape = shapes_of(device, scaling, kind)
        exact = dbias or name in RHT
        x = draw_exact(rng, shape, dtype) if exact else draw(rng, shape, dtype, special)
        flags = {"rowwise": rowwise, "columnwise": columnwise, "dbias": dbias}
        given = device.put(x, layout)
        device.poison()
        got = cuda_kernels.quantize(given, scaling, swizzled_scales=swizzled, **flags)
        expected = refops.quantize(x, scaling, **flags)
        if dbias:
            assert_same_bits(device.get(got[1]), expected[1], "dbias")
            got, expected = got[0], expected[0]
        same_quantized(device, got, expected.swizzled() if swizzled else expected)

    return label, run


def quantize_cases():
    """Every scaling with every layout; the main ones with every dtype and direction; special values, sums, swizzles."""
    for number, name in enumerate(BOTH):
        directions = directions_of(BOTH[name])
        for i, layout in enumerate(LAYOUTS):
            turn = number + i
            kind = ("whole", "ragged")[turn % 2] if layout != "misaligned" else "whole"
            yield quantize_case(name, kind, layout, DTYPES[turn % 3], directions[(turn // 2) % len(directions)])
        yield quantize_case(name, "ragged", "plain", DTYPES[(number + 1) % 3], directions[-1], special=True)
        yield quantize_case(
            name, "ragged", "plain", DTYPES[number % 3], directions[number % len(directions)], dbias=True
        )
    for name in MAIN:
        for dtype in DTYPES:
            for directions in directions_of(SCALINGS[name]):
                yield quantize_case(name, "whole", "plain", dtype, directions, special=True)
    for name in ("mxfp8", "mxfp8-2d", "nvfp4-1x16", "nvfp4-16x16"):
        yield quantize_case(name, "ragged", "plain", DTYPES[2], (True, True), swizzled=True)


# --- activations ------------------------------------------------------------------------------------


def fronts(device, rng, name, kind, dtype, fast, special):
    """(dy, x) of an activation."""
    m, h = (
        device.sized(small=(5, 32), medium=(64, 256), large=(256, 512))
        if kind == "whole"
        else device.sized(small=(3, 27), medium=(67, 141), large=(131, 397))
    )
    width = 2 * h if gated(name) else h
    if fast:
        return draw_moderate(rng, (m, h), dtype), draw_moderate(rng, (m, width), dtype)
    return draw(rng, (m, h), dtype, special), draw(rng, (m, width), dtype, special)


def activation_case(name, kind, layout, dtype, fast=False, special=False, **params):
    """An activation and its gradient with column sums, judged."""
    label = f"{name} {kind} {layout} {dtype}{' fast' * fast}{' special' * special}{' parameters' * bool(params)}"

    def run(device, rng):
        dy, x = fronts(device, rng, name, kind, dtype, fast, special)
        given_dy, given_x = device.put(dy, layout), device.put(x, layout)
        options, rule = {"fast_math": fast, **params}, {"params": params, **({"ulp": 8} if fast else {})}
        device.poison()
        judge(name, x, device.get(cuda_kernels.activation(name, given_x, **options)), **rule)
        if special:
            outputs = {"dx": device.get(cuda_kernels.activation_grad(name, given_dy, given_x, **options))}
        else:
            dx, dbias = cuda_kernels.activation_grad(name, given_dy, given_x, dbias=True, **options)
            outputs = {"dx": device.get(dx), "dbias": device.get(dbias)}
        judge(f"d{name}", {"dy": dy, "x": x}, outputs, **rule)

    return label, run


def fused_case(name, scaling_name, kind, layout, dtype, directions, fast=False):
    """An activation and its gradient, quantized in the same call, judged."""
    scaling = BOTH[scaling_name]
    label = f"{name} -> {scaling_name} {kind} {layout} {dtype} {directions}{' fast' * fast}"

    def run(device, rng):
        m, h = shapes_of(device, scaling, kind)
        width, draws = (2 * h if gated(name) else h), draw_moderate if fast else draw
        dy, x = draws(rng, (m, h), dtype), draws(rng, (m, width), dtype)
        given_dy, given_x = device.put(dy, layout), device.put(x, layout)
        flags = {"rowwise": directions[0], "columnwise": directions[1], "fast_math": fast}
        rule = {"scaling": scaling, **({"ulp": 8} if fast else {})}
        device.poison()
        q = cuda_kernels.activation_quantize(name, given_x, scaling, **flags)
        judge(name, x, OnHost(device, q).arrays, **rule)
        q, dbias = cuda_kernels.activation_grad_quantize(name, given_dy, given_x, scaling, dbias=True, **flags)
        judge(f"d{name}", {"dy": dy, "x": x}, OnHost(device, q).arrays | {"dbias": device.get(dbias)}, **rule)

    return label, run


def scaled_case(name, dtype, scales_dtype, interleave):
    """A row-scaled activation and its gradients, judged."""

    def run(device, rng):
        m, h = device.sized(small=(3, 64), medium=(67, 256), large=(131, 512))
        dy, x = draw(rng, (m, h), dtype), draw(rng, (m, 2 * h if gated(name) else h), dtype)
        scales = draw(rng, (m,), scales_dtype)
        given = device.put(x), device.put(scales)
        options = {"glu_interleave_size": interleave}
        device.poison()
        y = cuda_kernels.scaled_activation(name, *given, **options)
        judge(f"scaled_{name}", {"x": x, "row_scales": scales}, device.get(y), params=options)
        got = cuda_kernels.scaled_activation_grad(name, device.put(dy), *given, **options)
        outputs = dict(zip(("dx", "drow_scales"), map(device.get, got), strict=True))
        judge(f"scaled_d{name}", {"x": x, "row_scales": scales, "dy": dy}, outputs, params=options)

    return f"scaled {name} {dtype} {scales_dtype} {interleave}", run


def exact_case(name):
    """An activation and its gradient in exact arithmetic: the bits of the reference."""

    def run(device, rng):
        dy, x = exactness.tensors(name, np.dtype(F), 1 << 14)
        given_dy, given_x, exact = device.put(dy), device.put(x), {"arithmetic": "exact"}
        device.poison()
        with np.errstate(all="ignore"):
            y, dx = refops.activation(name, x), refops.activation_grad(name, dy, x)
        exactness.compare(device.get(cuda_kernels.activation(name, given_x, **exact)), y, name)
        exactness.compare(device.get(cuda_kernels.activation_grad(name, given_dy, given_x, **exact)), dx, f"d{name}")

    return f"exact {name}", run


def activation_cases():
    """Every activation, accurate and fast, some exact; fused with every scaling; row scales."""
    for number, name in enumerate(refops.ACTIVATIONS):
        for i, layout in enumerate(LAYOUTS[:3]):
            dtype = DTYPES[(number + i) % 3]
            yield activation_case(name, "whole", layout, dtype, **(PARAMETERS.get(name, {}) if i else {}))
        yield activation_case(name, "ragged", "plain", DTYPES[number % 3], special=True)
        yield activation_case(name, "whole", "plain", DTYPES[(number + 1) % 3], fast=True)
        yield fused_case(name, "mxfp8", "whole", "plain", DTYPES[2], (True, number % 2 == 0))
        yield fused_case(name, "delayed-e5m2", "whole", "plain", DTYPES[number % 3], (True, number % 2 == 1), fast=True)
    for number, name in enumerate(BOTH):
        directions = directions_of(BOTH[name])[-1]
        for i, activation in enumerate(("swiglu", "gelu")):
            yield fused_case(
                activation, name, ("whole", "ragged")[i], LAYOUTS[number % 2], DTYPES[number % 3], directions
            )
    for number, name in enumerate(WITH_ROW_SCALES):
        for interleave in (0, 32) if gated(name) else (0,):
            yield scaled_case(name, DTYPES[number % 3], DTYPES[(number + 1) % 3], interleave)
    for name in ("gelu", "swiglu", "situglu"):
        yield exact_case(name)


# --- the other calls --------------------------------------------------------------------------------


def dequantize_case(name, dtype):
    """Back to a dtype from each direction; swizzled and back."""
    scaling = BOTH[name]

    def run(device, rng):
        x = (draw_exact if name in RHT else draw)(rng, shapes_of(device, scaling, "ragged"), DTYPES[2])
        for rowwise, columnwise in directions_of(scaling)[:2]:
            flags = {"rowwise": rowwise, "columnwise": columnwise}
            q, expected = cuda_kernels.quantize(device.put(x), scaling, **flags), refops.quantize(x, scaling, **flags)
            device.poison()
            y = device.get(cuda_kernels.dequantize(q, dtype=dtype))
            if name in RHT and columnwise:
                judge("dequantize", OnHost(device, q).arrays, y, scaling=scaling)
            else:
                assert_same_bits(y, refops.dequantize(expected, dtype=dtype), "dequantized")
            if isinstance(scaling, refops.MXFP8Scaling | refops.NVFP4Scaling):
                same_quantized(device, q.swizzled(), expected.swizzled())
                same_quantized(device, q.swizzled().unswizzled(), expected)

    return f"dequantize {name} {dtype}", run


def all_16_bits(device, rng):
    """`encode` of every bfloat16 and float16, and `decode` of every code."""
    for dtype in DTYPES[1:]:
        x = np.arange(1 << 16, dtype=np.uint16)[:: device.sized(small=97, medium=1, large=1)].view(dtype)
        for fmt in refops.FORMATS.values():
            if fmt == refops.E8M0:
                continue
            assert_same_bits(
                device.get(cuda_kernels.encode(device.put(x), fmt)), refops.encode(x, fmt), f"{dtype} to {fmt}"
            )
    for fmt in refops.FORMATS.values():
        codes = np.arange(len(fmt.values), dtype=np.uint8)
        got, expected = device.get(cuda_kernels.decode(device.put(codes), fmt)), refops.decode(codes, fmt)
        assert_same_bits(np.where(got != got, F(0), got), np.where(got != got, F(0), expected), f"values of {fmt}")
        assert np.array_equal(got != got, expected != expected), f"NaN codes of {fmt}"


def amax_of_tensors(device, rng):
    """`amax`, NaN ignored."""
    for dtype in DTYPES:
        for shape in ((1,), (37, 3), (33, 264)):
            x = draw(rng, shape, dtype, special=True)
            expected = np.fmax.reduce(np.abs(x).astype(F), axis=None, initial=F(0))[None]
            assert_same_bits(
                device.get(cuda_kernels.amax(device.put(x, "misaligned"))), expected, f"amax {dtype} {shape}"
            )


def hadamard(device, rng):
    """Transform and inverse of exact inputs."""
    for dtype, inverse in ((DTYPES[0], False), (DTYPES[1], True), (DTYPES[2], False)):
        x = draw_exact(rng, (5, 80), dtype)
        got = device.get(cuda_kernels.hadamard_transform(device.put(x), 0xD7E8, inverse=inverse))
        assert_same_bits(got, refops.hadamard_transform(x, 0xD7E8, inverse=inverse), f"hadamard {dtype}")


def delayed_update(device, rng):
    """History and scale of the next step."""
    history, scale = np.abs(draw(rng, (4, 300), DTYPES[0], special=True)), np.linspace(0.5, 2, 300, dtype=F)
    for algorithm in ("max", "most_recent"):
        options = {"algorithm": algorithm, "margin": 1}
        got = cuda_kernels.update_delayed_scale(device.put(history), device.put(scale), refops.E4M3, **options)
        expected = refops.update_delayed_scale(history, scale, refops.E4M3, **options)
        for one, other in zip(got, expected, strict=True):
            assert_same_bits(device.get(one), other, f"delayed scale {algorithm}")


def empty_tensors(device, rng):
    """Tensors without elements."""
    for name in ("delayed-e5m2", "current", "block-1x128", "mxfp8"):
        for shape in ((0, 64), (32, 0)):
            x = np.zeros(shape, DTYPES[2])
            q = cuda_kernels.quantize(device.put(x), SCALINGS[name], columnwise=True)
            same_quantized(device, q, refops.quantize(x, SCALINGS[name], columnwise=True))


def given_random_bits(device, rng):
    """NVFP4 rounded stochastically with given bits."""
    m, k = device.sized(small=(32, 48), medium=(144, 272), large=(288, 400))
    bits = [rng.integers(0, 256, shape).astype(np.uint8) for shape in ((m, k), (k, m))]
    scaling = refops.NVFP4Scaling(stochastic_rounding=True, random_bits=tuple(bits))
    x = draw(rng, (m, k), DTYPES[2])
    got = cuda_kernels.quantize(device.put(x), scaling, columnwise=True)
    same_quantized(device, got, refops.quantize(x, scaling, columnwise=True))


def naive_kernels(device, rng):
    """The teaching kernels against the package's own results."""
    from cuda_kernels.naive import NAIVE

    m, k = 40, 128
    x = draw(rng, (m, k), DTYPES[2])
    reference = refops.quantize(x, refops.MXFP8Scaling(refops.E4M3))
    for name in ("mxfp8 naive", "mxfp8 coalesced"):
        row, codes, scales = NAIVE[name], device.put(np.zeros((m, k), np.uint8)), device.put(np.zeros((m, 4), np.uint8))
        values = [device.put(x), codes, scales, m, k]
        device.run(("naive", name), row.kernel, list(row.arguments.values()), values, *row.shape(m, k))
        assert_same_bits(device.get(codes), reference.rowwise_data, name)
    row, y = NAIVE["dequantize naive"], device.put(np.zeros_like(x))
    values = [device.put(reference.rowwise_data), device.put(reference.rowwise_scale_inv), y, m, k]
    device.run(("naive", "dequantize"), row.kernel, list(row.arguments.values()), values, *row.shape(m, k))
    assert_same_bits(device.get(y), refops.dequantize(reference, dtype=x.dtype), "dequantize naive")
    reference = refops.quantize(x, refops.DelayedScaling(refops.E4M3, 3.0), columnwise=True)
    for name in ("fp8 transpose naive", "fp8 transpose coalesced"):
        row, rows, columns = NAIVE[name], *(device.put(np.zeros(s, np.uint8)) for s in ((m, k), (k, m)))
        values = [device.put(x), device.put(F([3])), rows, columns, m, k]
        device.run(("naive", name), row.kernel, list(row.arguments.values()), values, *row.shape(m, k))
        assert_same_bits(device.get(rows), reference.rowwise_data, name)
        assert_same_bits(device.get(columns), reference.columnwise_data, name)


def call_cases():
    """Everything but quantize and activations."""
    for number, name in enumerate(BOTH):
        yield dequantize_case(name, DTYPES[number % 3])
    for function in (all_16_bits, amax_of_tensors, hadamard, delayed_update, empty_tensors, given_random_bits):
        yield function.__name__, function
    yield "naive kernels", naive_kernels


def sanitized_cases():
    """A few cases that touch every kind of kernel, for compute-sanitizer."""
    for name in ("mxfp8", "nvfp4-1x16", "block-128x128", "delayed-e5m2", "mxfp8-2d", "nvfp4-mae-2d"):
        yield quantize_case(name, "ragged", "plain", DTYPES[2], (True, True))
    yield quantize_case("mxfp8", "ragged", "misaligned", DTYPES[1], (True, False), dbias=True)
    yield fused_case("swiglu", "mxfp8", "whole", "plain", DTYPES[2], (True, True))
    yield scaled_case("swiglu", DTYPES[2], DTYPES[0], 32)
    yield "amax_of_tensors", amax_of_tensors
    yield "naive kernels", naive_kernels
