"""The same activation of the same input has the same bits through PyTorch, JAX and NumPy, with every scaling.

With the kernels (backend "auto"): `fuser.functional`, `fuser.xla` by both routes, `cuda_kernels.host`; and `refops`
given the same activation, for the casts. With backends "reference" and "exact": `fuser.functional`, `fuser.xla` and
`refops`.
"""

from itertools import product

import numpy as np
import pytest

from tiers import sampled

pytest.importorskip("jax").config.update("jax_platforms", "cpu")
import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402
from scaled_tensors import SCALE, SETTINGS, assert_same_quantized, assert_same_raw, quantizer_of  # noqa: E402

import exactness  # noqa: E402
import refops  # noqa: E402
from cuda_kernels import host  # noqa: E402
from fuser import functional, xla  # noqa: E402
from fuser.dispatch import as_numpy, as_torch, backend  # noqa: E402
from fuser.dtypes import DType  # noqa: E402
from fuser.quantization.quantizers import (  # noqa: E402
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fuser.xla.settings import ACTIVATION_NAMES  # noqa: E402

E4M3, DTYPES = DType.kFloat8E4M3, exactness.DTYPES
MODE = {mode.name.removesuffix("_SCALING"): mode for mode in SETTINGS}
#: Scaling -> PyTorch's quantizer; JAX's and NumPy's are in `scaled_tensors`.
TORCH_QUANTIZERS = {
    "DELAYED_TENSOR": lambda: Float8Quantizer(torch.full((1,), SCALE), torch.zeros(1), E4M3),
    "CURRENT_TENSOR": lambda: Float8CurrentScalingQuantizer(E4M3),
    "MXFP8_1D": lambda: MXFP8Quantizer(E4M3),
    "NVFP4_1D": lambda: NVFP4Quantizer(),
    "NVFP4_2D": lambda: NVFP4Quantizer(with_2d_quantization=True),
}
SCALINGS = ("none", *TORCH_QUANTIZERS)
FORMS = ("forward", "gradient")
TYPE_OF = {ACTIVATION_NAMES[number]: key for key, number in xla.ActivationEnum.items()}
NAMES = tuple(refops.ACTIVATIONS)
M, N = 64, 96


def tensors(name, dtype):
    """(x, dy) as NumPy matrices, [act | gate]."""
    generator = np.random.default_rng(7)
    width = N * (1 + refops.ACTIVATIONS[name].gated)
    return tuple((generator.standard_normal((M, w)) * 3).astype(dtype) for w in (width, N))


def by_numpy(library, name, form, scaling, x, dy):
    """(result, dbias) of `refops` or `cuda_kernels.host`."""
    if form == "forward":
        if scaling == "none":
            return library.activation(name, x), None
        return library.activation_quantize(name, x, SETTINGS[MODE[scaling]], columnwise=True), None
    if scaling == "none":
        return library.activation_grad(name, dy, x, dbias=True)
    return library.activation_grad_quantize(name, dy, x, SETTINGS[MODE[scaling]], columnwise=True, dbias=True)


def by_torch(name, form, scaling, x, dy):
    """(result, dbias) of `fuser.functional`, by TE's names."""
    quantizer = None if scaling == "none" else TORCH_QUANTIZERS[scaling]()
    if form == "forward":
        return getattr(functional, name)(as_torch(x), quantizer), None
    dbias, dx = getattr(functional, f"dbias_{functional.gradient_name(name)}")(as_torch(dy), as_torch(x), quantizer)
    return dx, dbias


def by_jax(name, form, scaling, x, dy):
    """(result, dbias) of `fuser.xla`."""
    quantizer = None if scaling == "none" else quantizer_of(MODE[scaling], xla.QuantizeLayout.ROWWISE_COLWISE)
    x = jnp.asarray(x.reshape(*dy.shape[:-1], -1, dy.shape[-1]))
    if form == "forward":
        return xla.act_lu(x, TYPE_OF[name], quantizer), None
    return xla.quantize_dact_dbias(jnp.asarray(dy), x, TYPE_OF[name], True, quantizer)


def assert_all_same(name, form, scaling, x, dy, library):
    wanted, sums = by_numpy(library, name, form, scaling, x, dy)
    from_torch, torch_sums = by_torch(name, form, scaling, x, dy)
    if scaling == "none":
        assert_same_raw(as_numpy(from_torch), wanted)
    else:
        for field, tensor in from_torch.buffers.tensors.items():
            assert_same_raw(as_numpy(tensor), getattr(wanted, field))
    if form == "gradient":
        assert_same_raw(as_numpy(torch_sums), sums)
    if name not in TYPE_OF:
        return  # SiTU-GLU: TE's JAX interface has no number for it
    from_jax, jax_sums = by_jax(name, form, scaling, x, dy)
    if scaling == "none":
        assert_same_raw(np.asarray(from_jax.data).reshape(wanted.shape), wanted)
    else:
        assert_same_quantized(from_jax, wanted)
    if form == "gradient":
        assert_same_raw(np.asarray(jax_sums).ravel(), sums)


@sampled(("name", "scaling", "route"), product(NAMES, SCALINGS, ["ffi", "callback"]), 7)
def test_kernels(name, scaling, route):
    dtypes = (np.float32, jnp.bfloat16, np.float16) if route == "ffi" else (jnp.bfloat16,)
    for dtype in dtypes:
        x, dy = tensors(name, dtype)
        for form in FORMS:
            with xla.route(route):
                assert_all_same(name, form, scaling, x, dy, host)


@pytest.mark.parametrize("scaling", SCALINGS)
@sampled("name", NAMES, 4)
def test_reference(name, scaling):
    x, dy = tensors(name, jnp.bfloat16)
    for form in FORMS:
        with backend("reference"):
            assert_all_same(name, form, scaling, x, dy, refops)


@sampled(("name", "dtype"), product(NAMES, DTYPES), 7, ids=str)
def test_exact_arithmetic(name, dtype):
    """Every bfloat16 and float16, and as many float32, by both routes; with every scaling ordinary tensors."""
    dy, x = exactness.tensors(name, dtype)
    with np.errstate(all="ignore"), backend("exact"):
        for form in FORMS:
            for route in ("ffi", "callback"):
                with xla.route(route):
                    assert_all_same(name, form, "none", x, dy, refops)
        x, dy = tensors(name, dtype)
        for form in FORMS:
            for scaling in TORCH_QUANTIZERS:
                assert_all_same(name, form, scaling, x, dy, refops)


@pytest.mark.parametrize("scaling", TORCH_QUANTIZERS)
def test_casts_are_those_of_refops(scaling):
    """float32 activations are not rounded before they are cast: `refops` casts the kernel's to the same bits."""
    x, dy = tensors("swiglu", np.float32)
    settings = SETTINGS[MODE[scaling]]
    wanted = refops.quantize(host.activation("swiglu", x), settings, columnwise=True)
    from_torch, _ = by_torch("swiglu", "forward", scaling, x, dy)
    for field, tensor in from_torch.buffers.tensors.items():
        assert_same_raw(as_numpy(tensor), getattr(wanted, field))
    assert_same_quantized(by_jax("swiglu", "forward", scaling, x, dy)[0], wanted)
