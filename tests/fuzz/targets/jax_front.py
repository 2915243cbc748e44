"""Targets of `fuser.xla`: functions with and without quantizers, under jit and grad, and what they are told with."""

import numpy as np
from arguments_fuzz import FLOAT_DTYPES, NUMBERS, contents
from harness import DocumentedError, require, target

import refops

NEEDS = ("fuser.xla", "cuda_kernels.host")
ERRORS = {"documented": (ValueError, TypeError, KeyError), "says": ""}
QUANTIZERS = ("CurrentScaleQuantizer", "DelayedScaleQuantizer", "BlockScaleQuantizer", "NVFP4Quantizer")


def activation_type(case):
    """An activation type, mostly one that there is."""
    from fuser.xla.settings import ActivationEnum

    if case.chance(0.1):
        return case.choose(
            [("nothing",), (), "gelu", ["gelu"], ("linear", "gelu"), ("gelu", "linear", "linear"), None, 1]
        )
    return case.choose(list(ActivationEnum))


def quantizer(case):
    """A quantizer or None."""
    from fuser import xla

    if case.chance(0.4):
        return None
    name = case.choose([*QUANTIZERS, "factory"])
    options = {"q_layout": case.choose([0, 1, 2, xla.QuantizeLayout.ROWWISE])}
    if case.chance(0.1):
        options["q_layout"] = case.choose([3, -1, "N", None])
    if case.chance(0.2):
        options["q_dtype"] = case.choose(["float8_e5m2", "float32", None, 1])
    if name == "factory":
        return case.call("fuser.xla.QuantizerFactory", changes=()) and case.call(
            "fuser.xla.QuantizerFactory.create", 1, case.choose([*xla.ScalingMode, 9]), **options, **ERRORS
        )
    if name == "DelayedScaleQuantizer":
        options["amax_compute_algo"] = case.choose(["max", "most_recent", "mean"])
    return case.call(f"fuser.xla.{name}", **options, **ERRORS)


def jax_array(case, sizes, dtype):
    import jax.numpy as jnp

    return jnp.asarray(contents(case, sizes, dtype))


@target(
    "xla_functions",
    [
        *(
            f"fuser.xla.{n}"
            for n in (
                "act_lu",
                "dact_lu",
                "quantize_dact_dbias",
                "activation",
                "route",
                "current_route",
                "QuantizerFactory",
                *QUANTIZERS,
            )
        ),
    ],
    cases=120,
    seconds=180,
    needs=NEEDS,
)
def xla_functions(case):
    """Forward and gradient: shape, dtype, the oracle's verdict; jit gives the same."""
    import jax
    import numpy as np

    from fuser.xla.settings import ACTIVATION_NAMES, ActivationEnum

    kind = activation_type(case)
    halves = len(kind) if isinstance(kind, tuple | list) else 1
    dtype = case.choose(FLOAT_DTYPES)
    sizes = (
        *case.choose([(32,), (2, 16), (1,), (0,), (64,)]),
        halves if case.chance(0.93) else 3,
        case.choose([32, 64, 33]),
    )
    x = jax_array(case, sizes, dtype)
    if case.chance(0.05):
        x = jax.numpy.zeros((4, 2, 32), jax.numpy.int32)
    chosen = quantizer(case)
    name = case.choose(["act_lu", "dact_lu", "quantize_dact_dbias", "activation"])
    args = [x, kind]
    if name in ("dact_lu", "quantize_dact_dbias"):
        args.insert(0, jax_array(case, (*x.shape[:-2], x.shape[-1]), dtype))
    if case.chance(0.05):
        try:
            with case.call("fuser.xla.route", case.choose(["x", None, 1, b"ffi"]), **ERRORS):
                require(False, "a route that there is not")
        except (ValueError, TypeError) as error:
            raise DocumentedError(str(error)) from error
    with case.call("fuser.xla.route", case.choose(["ffi", "ffi", "callback"])):
        require(case.call("fuser.xla.current_route") in ("ffi", "callback"), "another route")
        try:
            y = case.call(f"fuser.xla.{name}", *args, quantizer=chosen, changes=("quantizer",), **ERRORS)
            jax.block_until_ready(y)
        except jax.errors.JaxRuntimeError as error:
            raise DocumentedError(str(error)) from error
    result = y[0] if name == "quantize_dact_dbias" else y
    expected = x.shape if name in ("dact_lu", "quantize_dact_dbias") else (*x.shape[:-2], x.shape[-1])
    values = result.dequantize() if hasattr(result, "dequantize") else result
    if chosen is None:
        require(
            values.shape == expected and values.dtype == x.dtype, "another shape or dtype", values.shape, values.dtype
        )
        if name in ("act_lu", "activation"):
            op = ACTIVATION_NAMES[ActivationEnum[tuple(kind) if not isinstance(kind, str) else (kind,)]]
            rows = np.asarray(x).reshape(*x.shape[:-2], halves * x.shape[-1])
            report = refops.oracle.check(op, rows, np.asarray(values), diagnose=False)
            require(report.ok, f"the oracle rejects it: {report}")
    elif name != "activation":
        require(values.size == int(np.prod(expected)), "another size", values.shape)


@target(
    "xla_quantization",
    [
        *(
            f"fuser.xla.{n}"
            for n in (
                "quantize",
                "quantize_dbias",
                "grouped_quantize",
                "grouped_dbias",
                "GroupedQuantizer",
                "apply_padding_to_scale_inv",
                "remove_padding_from_scale_inv",
            )
        ),
    ],
    cases=120,
    seconds=120,
    needs=NEEDS,
)
def xla_quantization(case):
    """Tensors and groups of them: shapes, sums, and scales whose padding goes on and off."""
    import jax

    from fuser import xla

    dtype, axis = case.choose(FLOAT_DTYPES), case.choose([-1, -1, -1, 1, 0, 3])
    x = jax_array(case, (case.choose([32, 64, 96, 0]), *case.choose([(), (), (2,)]), case.choose([32, 64, 48])), dtype)
    if case.chance(0.05):
        x = jax.numpy.zeros((32, 32), jax.numpy.int32)
    with case.call("fuser.xla.route", case.choose(["ffi", "callback"])):
        try:
            if case.chance(0.5):
                _quantize_one(case, x, axis)
            else:
                _quantize_groups(case, x, axis)
        except jax.errors.JaxRuntimeError as error:
            raise DocumentedError(str(error)) from error
    mode = case.choose(list(xla.ScalingMode))
    shape = mode.get_scale_shape((32, 64), is_padded=False, broadcast_2d_scale_shape_to_1d=True)
    scales = jax_array(case, shape, np.float32)
    padded = case.call("fuser.xla.apply_padding_to_scale_inv", scales, mode, (32, 64))
    again = case.call("fuser.xla.remove_padding_from_scale_inv", padded, mode, (32, 64))
    require(np.array_equal(again, scales, equal_nan=True), "other scales")


def _quantize_one(case, x, axis):
    import jax

    chosen = quantizer(case)
    tensor = case.call("fuser.xla.quantize", x, chosen, axis, changes=(1,), **ERRORS)
    other, dbias = case.call("fuser.xla.quantize_dbias", x, chosen, flatten_axis=axis, changes=(1,), **ERRORS)
    jax.block_until_ready((tensor, other))
    require(dbias.shape == x.shape[axis:] and dbias.dtype == x.dtype, "other sums", dbias)
    require(tensor.dequantize().size == x.size, "another size", tensor.dequantize().shape)


def _quantize_groups(case, x, axis):
    import jax
    import jax.numpy as jnp

    from fuser import xla

    sizes = jnp.asarray(case.choose([(32, x.shape[0] - 32), (x.shape[0], 0), (7, 25), (-32, 64), (0, 0, 32)]))
    options = {"scaling_mode": case.choose(list(xla.ScalingMode)), "q_layout": case.choose([0, 1, 2])}
    chosen = None
    if case.chance(0.9):
        chosen = case.call("fuser.xla.GroupedQuantizer", n_groups=case.choose([2, 2, 3, 0]), **options, **ERRORS)
    tensor = case.call("fuser.xla.grouped_quantize", x, chosen, sizes, axis, changes=(1,), **ERRORS)
    jax.block_until_ready(tensor)
    one = getattr(tensor, "rowwise_tensor", tensor)
    require(one.n_groups == sizes.size and one.data.size == x.size, "other groups", one.shape)
    if chosen is not None:
        require(sum(group.size for group in one.dequantize()) == x.size, "other sizes")
    sums = case.call("fuser.xla.grouped_dbias", x, sizes, **ERRORS)
    require(sums.shape == (sizes.size, x.shape[1]), "other sums", sums.shape)


@target(
    "xla_recipes",
    [
        *(
            f"fuser.xla.{n}"
            for n in (
                "autocast",
                "get_global_quantize_recipe",
                "get_quantize_config_with_recipe",
                "get_supported_quantization_recipes",
                "get_supported_scaling_modes",
                "is_scaling_mode_supported",
                "update_collections",
                "QuantizeMeta",
                "QuantizeMetaSet",
            )
        ),
    ],
    cases=60,
    seconds=60,
    needs=NEEDS,
)
def xla_recipes(case):
    """Sets of quantizers that recipes make."""
    from fuser import recipe, xla

    supported = case.call("fuser.xla.get_supported_quantization_recipes")
    chosen = case.choose([*supported, recipe.Float8BlockScaling(), None, "mxfp8"])
    config = case.call("fuser.xla.get_quantize_config_with_recipe", chosen, **ERRORS)
    require(config.is_fp8_enabled() == (chosen is not None), "another state")
    modes = case.call("fuser.xla.get_supported_scaling_modes")
    mode = case.choose([*modes, xla.ScalingMode.NO_SCALING, 9, "MXFP8"])
    require(case.call("fuser.xla.is_scaling_mode_supported", mode, **ERRORS) == (True, ""), "a mode without support")
    with case.call("fuser.xla.autocast", case.chance(0.8), chosen):
        made = xla.QuantizerFactory.create_set()
        found = case.call("fuser.xla.get_global_quantize_recipe")
    require((made.x is None) == (found is None), "another recipe", found)
    meta = case.call("fuser.xla.QuantizeMeta", use_rht=True)
    case.call("fuser.xla.QuantizeMetaSet", meta, meta, meta)
    require(case.call("fuser.xla.update_collections", {"a": 1}, {"a": 2, "b": 3}) == {"a": 1, "b": 3}, "another value")


SETTINGS = (
    "ActivationParams",
    "ActivationConfig",
    "ClampedSwigluParams",
    "ClampedSwigluConfig",
    "AmaxComputeAlgo",
    "AmaxScope",
    "QuantizeLayout",
    "ScalingMode",
    "TensorSource",
    "TensorUsage",
)
TENSORS = (
    "NoScaleTensor",
    "ScaledTensor1x",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "AbstractBaseTensor",
    "ScaledTensor",
)


@target(
    "xla_settings",
    [*(f"fuser.xla.{n}" for n in (*SETTINGS, *TENSORS, "compute_scale_from_amax"))],
    cases=300,
    seconds=60,
    needs=NEEDS,
)
def xla_settings(case):
    """What the functions are told with, and the tensors that they return, made by hand."""
    import jax.numpy as jnp

    from fuser import xla

    for name in ("AmaxComputeAlgo", "AmaxScope", "QuantizeLayout", "ScalingMode", "TensorSource", "TensorUsage"):
        members = list(getattr(xla, name))
        case.call(f"fuser.xla.{name}", case.choose(members).value)
    for name in ("AbstractBaseTensor", "ScaledTensor", "ScaledTensorFactory"):
        case.call(f"fuser.xla.{name}")
    fields = {f: case.draw(NUMBERS) if case.chance(0.3) else 1.5 for f in ("limit", "alpha", "glu_linear_offset")}
    clamped = case.call(f"fuser.xla.{case.choose(['ClampedSwigluParams', 'ClampedSwigluConfig'])}", **fields, **ERRORS)
    case.call(f"fuser.xla.{case.choose(['ActivationParams', 'ActivationConfig'])}", clamped)
    data = jnp.asarray(case.rng.standard_normal((32, 64)), jnp.float8_e4m3fn)
    case.call("fuser.xla.NoScaleTensor", data)
    mode = case.choose(list(xla.ScalingMode))
    if case.chance(0.6):
        mode, sizes, kind = case.choose(
            [
                (xla.ScalingMode.CURRENT_TENSOR_SCALING, (1,), jnp.float32),
                (xla.ScalingMode.MXFP8_1D_SCALING, (32, 2), jnp.float8_e8m0fnu),
                (xla.ScalingMode.NVFP4_1D_SCALING, (32, 4), jnp.float8_e4m3fn),
                (xla.ScalingMode.NO_SCALING, (0,), jnp.float32),
            ]
        )
        made = case.call("fuser.xla.ScaledTensor1x", data, jnp.ones((1,)), jnp.ones(sizes, kind), mode, jnp.float32)
        require(made.dequantize().shape == data.shape, "another shape")
        case.call("fuser.xla.ScaledTensor2x", made, made)
        return
    sizes = case.choose([(1,), (32, 2), (1, 64), (32, 4), (0,), (5, 5)])
    scales = jnp.ones(sizes, case.choose([jnp.float32, jnp.float8_e4m3fn]))
    axis = case.choose([-1, 1, 0, 5, -3])
    made = case.call(
        "fuser.xla.ScaledTensor1x",
        data,
        jnp.ones((1,)),
        scales,
        mode,
        jnp.float32,
        case.chance(0.3),
        case.choose(["N", "T"]),
        axis,
        **ERRORS,
    )
    require(made.dequantize().shape == data.shape, "another shape")
    case.call("fuser.xla.ScaledTensor2x", made, made)
    amax = jnp.asarray(contents(case, (1,), np.float32))
    scale = case.call(
        "fuser.xla.compute_scale_from_amax", amax, jnp.float8_e4m3fn, case.choose([0.0, 2.0, -3.0]), **ERRORS
    )
    require(scale.shape == (1,) and scale.dtype == jnp.float32, "another shape or dtype", scale)
