"""Launches on a GPU: streams, CUDA graphs, threads, autograd's thread, a second device, other libraries' arrays."""

import threading

import numpy as np
from gpu_cases import DTYPES, OnHost, Torch, draw, judge, same_quantized

import cuda_kernels
import refops
from refops import E4M3

MXFP8 = refops.MXFP8Scaling(E4M3)
SETTINGS = {
    "mxfp8": MXFP8,
    "current": refops.CurrentScaling(E4M3),
    "nvfp4": refops.NVFP4Scaling(),
    "delayed": refops.DelayedScaling(E4M3, 2.0),
}


def expected_of(x, scaling):
    """The reference, both directions."""
    return refops.quantize(x, scaling, columnwise=True)


def on_a_stream(device, rng):
    """Work goes to the current stream, behind a long kernel that writes the input."""
    torch = device.torch
    stream = torch.cuda.Stream(device.device)
    for scaling in SETTINGS.values():
        x = draw(rng, (256, 512), DTYPES[2])
        source, given = device.put(x), device.put(np.zeros_like(x))
        torch.cuda.synchronize(device.number)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            given.copy_(source)
            q = cuda_kernels.quantize(given, scaling, columnwise=True)
            host = OnHost(device, q)
        assert host.arrays
        same_quantized(device, q, expected_of(x, scaling))
    assert torch.cuda.current_stream(device.number) == torch.cuda.default_stream(device.number)


def in_a_graph(device, rng):
    """Captured after a warm-up; replays follow a changed input."""
    torch = device.torch
    for scaling in SETTINGS.values():
        given = device.put(draw(rng, (256, 512), DTYPES[2]))
        side = torch.cuda.Stream(device.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            cuda_kernels.quantize(given, scaling, columnwise=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = cuda_kernels.quantize(given, scaling, columnwise=True)
        for _ in range(3):
            x = draw(rng, (256, 512), DTYPES[2])
            given.copy_(device.put(x))
            graph.replay()
            torch.cuda.synchronize(device.number)
            same_quantized(device, q, expected_of(x, scaling))


def in_threads(work, count=8):
    """Run work(number) in fresh threads and raise what the first failing one raised."""
    failures = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


def from_threads(device, rng):
    """Fresh threads, on the default stream and on their own; kernels that nobody compiled before."""
    inputs = [draw(rng, (128, 256), DTYPES[i % 3]) for i in range(8)]
    given = [device.put(x) for x in inputs]
    results = [None] * 8
    fmt = refops.E5M2

    def work(i):
        stream = device.torch.cuda.Stream(device.device) if i % 2 else None
        with device.torch.cuda.stream(stream):
            for _ in range(10):
                results[i] = cuda_kernels.quantize(given[i], refops.MXFP8Scaling(fmt), columnwise=True)
        device.torch.cuda.synchronize(device.number)

    device.torch.cuda.synchronize(device.number)
    in_threads(work)
    for x, q in zip(inputs, results, strict=True):
        same_quantized(device, q, expected_of(x, refops.MXFP8Scaling(fmt)))


def in_backward(device, rng):
    """Called from autograd's own thread."""
    torch = device.torch

    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return cuda_kernels.activation("silu", x)

        @staticmethod
        def backward(ctx, dy):
            return cuda_kernels.activation_grad("silu", dy, *ctx.saved_tensors)

    x, dy = draw(rng, (64, 128), DTYPES[2]), draw(rng, (64, 128), DTYPES[2])
    leaf = device.put(x).requires_grad_()
    y = Silu.apply(leaf)
    y.backward(device.put(dy))
    judge("silu", x, device.get(y))
    judge("dsilu", {"dy": dy, "x": x}, {"dx": device.get(leaf.grad)})


def on_a_second_device(device, rng):
    """The tensor's device counts, and the current one stays as it is."""
    torch = device.torch
    if torch.cuda.device_count() < 2:
        return "skipped: one device"
    other, before = Torch(1), torch.cuda.current_device()
    x = draw(rng, (128, 256), DTYPES[2])
    q = cuda_kernels.quantize(other.put(x), MXFP8, columnwise=True)
    assert q.rowwise_data.device.index == 1 and torch.cuda.current_device() == before
    same_quantized(other, q, expected_of(x, MXFP8))


def of_cupy(device, rng):
    """CuPy arrays in, CuPy arrays out."""
    try:
        import cupy
    except ImportError:
        return "skipped: no CuPy"
    x = draw(rng, (128, 256), DTYPES[0])
    q = cuda_kernels.quantize(cupy.asarray(x), MXFP8, columnwise=True)
    assert isinstance(q.rowwise_data, cupy.ndarray)
    host, expected = q.to_host(), expected_of(x, MXFP8)
    assert np.array_equal(host.rowwise_data, expected.rowwise_data)
    assert np.array_equal(host.columnwise_data, expected.columnwise_data)


def of_numba(device, rng):
    """Numba device arrays in, Numba device arrays out."""
    from numba import cuda

    x = draw(rng, (128, 256), DTYPES[0])
    q = cuda_kernels.quantize(cuda.to_device(x), MXFP8)
    assert np.array_equal(q.to_host().rowwise_data, refops.quantize(x, MXFP8).rowwise_data)


def large_tensors(device, rng):
    """More than 2^31 elements: every block of rows repeats the same values, so its codes must too."""
    torch = device.torch
    free, _ = torch.cuda.mem_get_info(device.number)
    rows, columns, period = 131_200, 16_384, 64
    if free < 10 * rows * columns:
        return "skipped: too little memory"
    x = draw(rng, (period, columns), DTYPES[2])
    q = cuda_kernels.quantize(device.put(x).repeat(rows // period, 1), MXFP8)
    expected = refops.quantize(x, MXFP8)
    codes = q.rowwise_data.view(rows // period, period, columns)
    wanted = device.put(expected.rowwise_data)
    assert all(torch.equal(codes[i], wanted) for i in (0, 1, rows // period - 2, rows // period - 1))
    assert bool((codes == wanted).all(dim=2).all())


def cases():
    """Every check; those that may leave the device broken come last."""
    for function in (in_backward, from_threads, on_a_stream, in_a_graph, on_a_second_device, of_cupy, of_numba):
        yield function.__name__.replace("_", " "), function
    yield "large tensors", large_tensors
