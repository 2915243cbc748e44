"""What the tests of `fuser.xla` share: settings of every scaling mode, a scaled tensor against `refops.Quantized`,
and code in a process of its own."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np

import refops
from arrays import raw
from fuser import xla
from fuser.xla.tensors import ScaledTensor1x

#: Mode -> what cuda_kernels is told; delayed scaling with the scale of the tests.
SCALE = 4.0
SETTINGS = {
    xla.ScalingMode.DELAYED_TENSOR_SCALING: refops.DelayedScaling(refops.E4M3, SCALE),
    xla.ScalingMode.CURRENT_TENSOR_SCALING: refops.CurrentScaling(refops.E4M3),
    xla.ScalingMode.MXFP8_1D_SCALING: refops.MXFP8Scaling(refops.E4M3),
    xla.ScalingMode.NVFP4_1D_SCALING: refops.NVFP4Scaling(),
    xla.ScalingMode.NVFP4_2D_SCALING: refops.NVFP4Scaling(two_d=True),
}


def random(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * 3, dtype)


def quantizer_of(mode, layout=xla.QuantizeLayout.ROWWISE, **options):
    if mode is xla.ScalingMode.DELAYED_TENSOR_SCALING:
        options["scale"] = jnp.full((1,), SCALE, jnp.float32)
    return xla.QuantizerFactory.create(scaling_mode=mode, q_layout=layout, **options)


def assert_same_raw(a, b):
    """The same bits, whatever they are called: codes may be uint8 or a float8."""
    np.testing.assert_array_equal(raw(a), raw(b))


def rows(x):
    """(..., 1 or 2, n) as rows [act | gate], a NumPy matrix."""
    x = np.asarray(x)
    return x.reshape(-1, x.shape[-2] * x.shape[-1])


def assert_same_quantized(tensor, q):
    """A scaled tensor against a `refops.Quantized`: codes, scales without padding, amax."""
    copies = [tensor] if isinstance(tensor, ScaledTensor1x) else [tensor.rowwise_tensor, tensor.colwise_tensor]
    for copy in copies:
        name = "columnwise" if copy.is_colwise else "rowwise"
        codes = np.asarray(copy.data).view(np.uint8)
        if copy.scaling_mode.is_nvfp4_scaling:
            pairs = codes.reshape(-1, 2)
            codes = pairs[:, 0] | (pairs[:, 1] << 4)
        np.testing.assert_array_equal(codes.ravel(), getattr(q, f"{name}_data").ravel())
        scales, wanted = np.asarray(copy.scale_inv), getattr(q, f"{name}_scale_inv")
        if copy.scaling_mode.is_block_scaling:
            axis = copy.flatten_axis
            scales = scales.view(np.uint8).reshape(int(np.prod(scales.shape[:axis])), -1)
            wanted = wanted[: scales.shape[0], : scales.shape[1]]
        np.testing.assert_array_equal(scales, wanted)
        if getattr(q, f"amax_{name}") is not None:
            np.testing.assert_array_equal(np.asarray(copy.amax), getattr(q, f"amax_{name}"))


def run_python(code, **environment):
    """Run code in a new process with this one's path; return what it printed."""
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
