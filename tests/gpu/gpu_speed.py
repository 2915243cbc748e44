"""The benchmark of `gpu_check`: device time of each operation beside a copy of the same bytes, and host time per call.

Device time is the median between two CUDA events around a call, queued behind a kernel that only waits, so that the
host is ahead. Inputs take turns, each larger than the L2 cache. Bytes are those that must move: inputs once, results
once; a kernel at the copy's rate moves nothing else.
"""

import statistics
import time
from functools import partial

import cuda_kernels
import refops
from refops import E4M3

ROWS = COLUMNS = 8192
COPIES, REPEATS = 3, 15
MXFP8 = refops.MXFP8Scaling(E4M3)
BOTH = {"columnwise": True}


def tensors_in(value):
    """The tensors of a result: a tensor, a tuple, a `Quantized`."""
    if isinstance(value, tuple):
        return [tensor for one in value for tensor in tensors_in(one)]
    if hasattr(value, "arrays"):
        return list(value.arrays.values())
    return [value] if hasattr(value, "data_ptr") else []


def bytes_of(tensors):
    """Bytes of different tensors."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


class Clock:
    """Times calls on one device."""

    def __init__(self, torch):
        self.torch = torch

    def seconds(self, call, inputs, repeats=REPEATS):
        """Median seconds of call(*inputs[i]) on the device."""
        for given in (*inputs, *inputs[:1]):
            call(*given)
        self.torch.cuda.synchronize()
        events = []
        for i in range(repeats):
            start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.torch.cuda._sleep(2_000_000)
            start.record()
            call(*inputs[i % len(inputs)])
            end.record()
            events.append((start, end))
            if i % 5 == 4:
                self.torch.cuda.synchronize()
        self.torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in events) / 1e3

    def host_microseconds(self, call, count=200):
        """Host time of a call that queues little work."""
        for _ in range(20):
            call()
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        spent = time.perf_counter() - start
        self.torch.cuda.synchronize()
        return spent / count * 1e6


def randoms(torch, width, count=1, rows=ROWS):
    """`COPIES` tuples of bfloat16 tensors (rows, width)."""
    make = partial(torch.randn, (rows, width), device="cuda", dtype=torch.bfloat16)
    return [tuple(make() for _ in range(count)) for _ in range(COPIES)]


def copy_rate(torch, clock):
    """Bytes a second of a device-to-device copy, reads and writes."""
    inputs = [(torch.empty_like(x), x) for (x,) in randoms(torch, 2 * COLUMNS)]
    seconds = clock.seconds(lambda y, x: y.copy_(x), inputs)
    return 2 * inputs[0][0].numel() * 2 / seconds


def operations(fast_math):
    """name -> (kind of input, call)."""
    c, fast = cuda_kernels, {"fast_math": fast_math}
    block, square = refops.BlockScaling(E4M3, 1), refops.BlockScaling(E4M3, 2)
    delayed, current, nvfp4 = refops.DelayedScaling(E4M3, 2.0), refops.CurrentScaling(E4M3), refops.NVFP4Scaling()
    casts = {
        "MXFP8": (MXFP8, {}),
        "MXFP8 both": (MXFP8, BOTH),
        "MXFP8 32x32 both": (refops.MXFP8Scaling(E4M3, two_d=True), BOTH),
        "delayed FP8": (delayed, {}),
        "delayed FP8 + transpose": (delayed, BOTH),
        "current FP8": (current, {}),
        "current FP8 + transpose": (current, BOTH),
        "1x128 blocks": (block, {}),
        "1x128 blocks both": (block, BOTH),
        "128x128 blocks both": (square, BOTH),
        "NVFP4": (nvfp4, {}),
        "NVFP4 both": (nvfp4, BOTH),
        "NVFP4 16x16 both": (refops.NVFP4Scaling(two_d=True), BOTH),
        "NVFP4 stochastic": (refops.NVFP4Scaling(stochastic_rounding=True, seed=1), {}),
        "NVFP4 RHT both": (refops.NVFP4Scaling(rht=True), BOTH),
        "NVFP4 4over6": (refops.NVFP4Scaling(four_over_six="mae"), {}),
    }
    found = {}
    if not fast_math:
        found = {n: ("x", partial(c.quantize, scaling=s, **o)) for n, (s, o) in casts.items()}
        found["amax"] = ("x", c.amax)
    found["gelu"] = ("x", partial(c.activation, "gelu", **fast))
    found["swiglu"] = ("gated", partial(c.activation, "swiglu", **fast))
    found["gelu -> delayed FP8 + transpose"] = ("x", partial(_quantized, "gelu", delayed, BOTH | fast))
    found["gelu -> MXFP8"] = ("x", partial(_quantized, "gelu", MXFP8, fast))
    found["swiglu -> MXFP8"] = ("gated", partial(_quantized, "swiglu", MXFP8, fast))
    found["swiglu -> MXFP8 both"] = ("gated", partial(_quantized, "swiglu", MXFP8, BOTH | fast))
    found["swiglu -> NVFP4 both"] = ("gated", partial(_quantized, "swiglu", nvfp4, BOTH | fast))
    found["dgelu + dbias -> MXFP8 both"] = ("dy x", partial(_gradient, "gelu", MXFP8, BOTH | fast))
    found["dgelu + dbias -> delayed FP8 + transpose"] = ("dy x", partial(_gradient, "gelu", delayed, BOTH | fast))
    found["dswiglu -> MXFP8 both"] = ("dy gated", partial(_gradient, "swiglu", MXFP8, BOTH | fast, dbias=False))
    return found


def _quantized(name, scaling, options, x):
    return cuda_kernels.activation_quantize(name, x, scaling, **options)


def _gradient(name, scaling, options, dy, x, dbias=True):
    return cuda_kernels.activation_grad_quantize(name, dy, x, scaling, dbias=dbias, **options)


def inputs_of(torch, kind):
    """`COPIES` tuples of inputs; widths so that every input has `COLUMNS` or half as many outputs."""
    if kind == "dy gated":
        gated = randoms(torch, 2 * COLUMNS)
        return [(dy, x) for (dy,), (x,) in zip(randoms(torch, COLUMNS), gated, strict=True)]
    return randoms(torch, 2 * COLUMNS if kind == "gated" else COLUMNS, 2 if kind == "dy x" else 1)


def warming_cases():
    """Each operation on small tensors, as cases of `gpu_check`: the same kernels, whose PTX is on disk afterwards."""
    for fast_math in (False, True):
        for name, (kind, call) in operations(fast_math).items():

            def run(device, rng, kind=kind, call=call):
                width = 512 if "gated" in kind else 256
                make = partial(device.torch.randn, device=device.device, dtype=device.torch.bfloat16)
                given = [make((256, 256))] * kind.startswith("dy") + [make((256, width))]
                assert all(bytes_of([one]) for one in tensors_in(call(*given)))

            yield f"{name}{' fast' * fast_math}", run


def measured(clock, call, inputs, rate):
    """Seconds, bytes and share of the copy's rate of a call."""
    moved = bytes_of(inputs[0]) + bytes_of(tensors_in(call(*inputs[0])))
    seconds = clock.seconds(call, inputs)
    return {"us": seconds * 1e6, "GB/s": moved / seconds / 1e9, "of copy": moved / seconds / rate}


def naive_call(torch, name):
    """The call of a teaching kernel; it returns the kernel's results."""
    from gpu_cases import Torch

    from cuda_kernels.naive import NAIVE

    row, device = NAIVE[name], Torch()
    shape = row.shape(ROWS, COLUMNS)
    make = partial(torch.zeros, device="cuda", dtype=torch.uint8)
    sizes = {
        "codes": ROWS * COLUMNS,
        "rowwise": ROWS * COLUMNS,
        "columnwise": ROWS * COLUMNS,
        "scales": ROWS * COLUMNS // 32,
    }
    if name.startswith("nvfp4"):
        sizes |= {"codes": ROWS * COLUMNS // 2, "scales": ROWS * COLUMNS // 16}
    sizes |= {"y": 2 * ROWS * COLUMNS, "sums": 2 * COLUMNS, "dx": 4 * ROWS * COLUMNS, "drow_scales": 4 * ROWS}
    results = {n: make(sizes[n]) for n in row.arguments if n in sizes}
    given = {
        "scale": torch.full((1,), 2.0, device="cuda"),
        "amax": torch.full((1,), 500.0, device="cuda"),
        "tensor_scales": torch.tensor([500.0, 0.002], device="cuda"),
        "row_scales": torch.ones(ROWS, device="cuda"),
    }
    fixed = results | given | {"rows": ROWS, "columns": COLUMNS}

    def call(*inputs):  # x, or dy and x
        given = dict(zip((n for n in row.arguments if n in ("dy", "x")), inputs, strict=True))
        values = [(given | fixed)[n] for n in row.arguments]
        device.run(("naive", name), row.kernel, list(row.arguments.values()), values, *shape)
        return tuple(results.values())

    return call


# --- what others would write ------------------------------------------------------------------------


def torch_swiglu_mxfp8(torch):
    """swiglu -> MXFP8 in torch operations, compiled."""

    def swiglu_mxfp8(x):
        act, gate = x.float().chunk(2, dim=-1)
        y = (torch.nn.functional.silu(act) * gate).to(torch.bfloat16).float().view(x.shape[0], -1, 32)
        bits = (y.abs().amax(-1) * (1 / 448)).view(torch.int32)
        code = ((bits + 0x7FFFFF) >> 23).clamp(0, 254)
        factor = ((254 - code) << 23).view(torch.float32)
        codes = (y * factor[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(x.shape[0], -1), code.to(torch.uint8)

    return torch.compile(swiglu_mxfp8, dynamic=False)


def triton_swiglu_mxfp8(torch):
    """swiglu -> MXFP8 in Triton, rowwise."""
    from gpu_triton import swiglu_mxfp8

    def call(x):
        codes = torch.empty((x.shape[0], x.shape[1] // 2), dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((x.shape[0], x.shape[1] // 64), dtype=torch.uint8, device=x.device)
        swiglu_mxfp8(x, codes, scales)
        return codes, scales

    return call


def agreement(torch, call, x):
    """Share of codes that another implementation of swiglu -> MXFP8 has as ours."""
    ours = cuda_kernels.activation_quantize("swiglu", x, MXFP8)
    return float((call(x)[0].view(torch.uint8) == ours.rowwise_data).float().mean())


# --- the part ---------------------------------------------------------------------------------------


def overheads(torch, clock):
    """Host microseconds of calls on a tiny tensor, and of the launch alone."""
    from cuda_kernels.directions import direction_of
    from cuda_kernels.families.scales import TensorScales
    from cuda_kernels.launch import launcher_for

    x, gated = (torch.randn((16, w), device="cuda", dtype=torch.bfloat16) for w in (64, 128))
    calls = {
        "activation": lambda: cuda_kernels.activation("gelu", x),
        "quantize MXFP8": lambda: cuda_kernels.quantize(x, MXFP8),
        "quantize MXFP8 both": lambda: cuda_kernels.quantize(x, MXFP8, columnwise=True),
        "quantize current": lambda: cuda_kernels.quantize(x, refops.CurrentScaling(E4M3)),
        "swiglu -> MXFP8": lambda: cuda_kernels.activation_quantize("swiglu", gated, MXFP8),
        "torch gelu": lambda: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    a, b = torch.zeros(1, device="cuda"), torch.zeros(2, device="cuda")
    spec = TensorScales(direction_of(refops.NVFP4Scaling(), False))
    values, stream = [a.data_ptr(), b.data_ptr(), 1], torch.cuda.current_stream().cuda_stream
    launcher, one = launcher_for(torch.cuda.current_device()), (1, 1, 1)
    calls["launch alone"] = lambda: launcher.launch(spec, values, one, one, stream)
    return {name: clock.host_microseconds(call) for name, call in calls.items()}


def run(record, deadline):
    """Fill record.results; whatever fails is recorded and the rest goes on."""
    import torch

    from cuda_kernels.naive import NAIVE

    clock, results = Clock(torch), record.results
    rate = results["copy GB/s"] = copy_rate(torch, clock) / 1e9
    print(f"  copy {rate:.0f} GB/s", flush=True)
    record.attempt("overheads", lambda: results.__setitem__("host us", overheads(torch, clock)))
    jobs = [("accurate", name, *job) for name, job in operations(False).items()]
    jobs += [("fast", name, *job) for name, job in operations(True).items()]
    of_values = [name for name, row in NAIVE.items() if "x" in row.arguments]  # others read codes
    kinds = {"swiglu naive": "gated", "scaled gradient naive": "dy gated", "scaled gradient coalesced": "dy gated"}
    jobs += [("naive", name, kinds.get(name, "x"), None) for name in of_values]
    jobs.sort(key=lambda job: ("gated", "x", "dy x", "dy gated").index(job[2]))
    kept = None, None
    for group, name, kind, call in jobs:
        if time.monotonic() > deadline:
            record.skip(f"{group} {name}")
            continue
        if group == "naive":
            call = naive_call(torch, name)
        if kept[0] != kind:
            kept = None, None
            torch.cuda.empty_cache()
            kept = kind, inputs_of(torch, kind)

        def measure(group=group, name=name, call=call, inputs=kept[1]):
            found = results.setdefault(group, {})[name] = measured(clock, call, inputs, rate * 1e9)
            print(f"  {group} {name}: {found['us']:.0f} us, {found['of copy']:.0%} of copy", flush=True)

        record.attempt(f"{group} {name}", measure)
    others(record, deadline, torch, clock, rate * 1e9)


def others(record, deadline, torch, clock, rate):
    """swiglu -> MXFP8 as others write it; a failure here is a note, not a fault."""
    inputs = inputs_of(torch, "gated")
    for name, make in (("triton", triton_swiglu_mxfp8), ("torch.compile", torch_swiglu_mxfp8)):
        if time.monotonic() > deadline:
            record.skip(f"others {name}")
            continue
        try:
            call = make(torch)
            found = measured(clock, call, inputs, rate)
            found["codes as ours"] = agreement(torch, call, inputs[0][0])
        except Exception as error:
            found = {"not measured": f"{type(error).__name__}: {str(error)[:300]}"}
        record.results.setdefault("swiglu -> MXFP8 by others", {})[name] = found
        print(f"  {name}: {found}", flush=True)
