"""`fuser.xla`: quantization without an activation, bit for bit `refops`; scaling modes, recipes, what is refused."""

import copy
import inspect
import pickle

import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp  # noqa: E402
from scaled_tensors import (  # noqa: E402
    SETTINGS,
    assert_same_raw,
    quantizer_of,
    random,
)

from fuser import xla  # noqa: E402
from fuser.xla import ScalingMode, TensorUsage  # noqa: E402

ROWWISE, COLWISE, BOTH = xla.QuantizeLayout
MODES = {mode.name.removesuffix("_SCALING"): mode for mode in ScalingMode}
NONE, DELAYED, MX, CURRENT, FP4, FP4_2D = ScalingMode


def named(mode):
    return mode.name


# --- scaling modes ------------------------------------------------------------------------------------


def test_members_are_te_s_properties_and_methods():
    """Read in TE 2.20's quantize/scaling_modes.py and misc.py."""
    properties = "is_block_scaling is_nvfp4_scaling is_mxfp8_scaling is_colwise_transposed"
    methods = (
        "is_tensor_scaling is_1d_block_scaling get_compatible_q_dtypes get_scale_dtype get_scale_shape "
        "get_scale_shape_2x get_quantize_layout get_grouped_scale_shape get_grouped_scale_shape_2x "
        "get_shardy_sharding_rules"
    )
    layout = "has_rowwise has_colwise is_rowwise_colwise is_rowwise_only is_colwise_only"
    for cls, names, is_property in (
        (ScalingMode, properties, True),
        (ScalingMode, methods, False),
        (xla.QuantizeLayout, layout, True),
    ):
        for name in names.split():
            assert isinstance(inspect.getattr_static(cls, name), property) == is_property, name
    assert [(m.is_rowwise_only, m.is_colwise_only) for m in xla.QuantizeLayout] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    with pytest.raises(NotImplementedError, match="no sharding rules"):
        MX.get_shardy_sharding_rules((32, 32), "x", -1, BOTH)


@pytest.mark.parametrize(
    ("mode", "tensor", "block", "fp4", "mx", "transposed", "dtypes"),
    [
        (NONE, False, False, False, False, False, "float32 float16 bfloat16"),
        (DELAYED, True, False, False, False, True, "float8_e4m3fn float8_e5m2"),
        (CURRENT, True, False, False, False, True, "float8_e4m3fn float8_e5m2"),
        (MX, False, True, False, True, False, "float8_e4m3fn float8_e5m2"),
        (FP4, False, True, True, False, True, "float4_e2m1fn"),
        (FP4_2D, False, True, True, False, True, "float4_e2m1fn"),
    ],
    ids=MODES,
)
def test_what_a_mode_says_of_itself(mode, tensor, block, fp4, mx, transposed, dtypes):
    assert (mode.is_tensor_scaling(), mode.is_1d_block_scaling(), mode.is_block_scaling) == (tensor, block, block)
    assert (mode.is_nvfp4_scaling, mode.is_mxfp8_scaling, mode.is_colwise_transposed) == (fp4, mx, transposed)
    wanted = {getattr(jnp, name) for name in dtypes.split()}
    assert mode.get_compatible_q_dtypes() == wanted
    quantizer = xla.QuantizerFactory.create(scaling_mode=mode)
    assert quantizer is None or quantizer.q_dtype.type in mode.get_compatible_q_dtypes()
    layouts = [mode.get_quantize_layout(usage) for usage in TensorUsage]  # LHS, LHS_TRANS, RHS, RHS_TRANS
    assert layouts == ([ROWWISE] * 4 if mode is NONE else [ROWWISE, COLWISE, COLWISE, ROWWISE])


def test_defaults_of_scale_shapes():
    """Squares are not repeated unless asked; `flatten_axis` is that of layout "N" also for transposed data."""
    for name in ("get_scale_shape", "get_scale_shape_2x"):
        parameters = inspect.signature(getattr(ScalingMode, name)).parameters
        assert parameters["broadcast_2d_scale_shape_to_1d"].default is False
    assert FP4_2D.get_scale_shape((32, 64)) == (128, 4)
    assert FP4_2D.get_scale_shape((32, 64), is_padded=False) == (2, 4)
    assert FP4_2D.get_scale_shape_2x((32, 64), False) == ((2, 4), (4, 2))
    assert FP4_2D.get_scale_shape((32, 64), is_padded=False, broadcast_2d_scale_shape_to_1d=True) == (32, 4)
    assert FP4.get_scale_shape((64, 16, 32), "T", True, flatten_axis=1) == (64, 16, 4)
    assert FP4.get_scale_shape((64, 16, 32), "T", True, flatten_axis=2) == (128, 16, 2)


@pytest.mark.parametrize(
    ("shape", "groups", "padded", "unpadded"),
    [  # (G - 1) alignments and what is left of rows or blocks, rounded up, times the other side
        ((256, 128), 3, ((2 * 128 + 256) * 4, (2 * 4 + 8) * 128), (256 * 4, 8 * 128)),
        ((4, 64, 64), 4, ((3 * 128 + 256) * 4, (3 * 4 + 8) * 128), (256 * 2, 8 * 64)),
        ((32, 32), 8, ((7 * 128 + 128) * 4, (7 * 4 - 4) * 128), (32, 32)),
    ],
)
def test_scale_shapes_of_groups(shape, groups, padded, unpadded):
    assert [n for (n,) in MX.get_grouped_scale_shape_2x(shape, groups)] == list(padded)
    assert [n for (n,) in MX.get_grouped_scale_shape_2x(shape, groups, is_padded=False)] == list(unpadded)
    for mode in (NONE, CURRENT, DELAYED):
        assert mode.get_grouped_scale_shape(shape, groups, is_colwise=True) == (groups,)
    with pytest.raises(ValueError, match="needs a multiple of 32 along axis 0"):
        MX.get_grouped_scale_shape((40, 32), 2, is_colwise=True)


# --- tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", SETTINGS, ids=named)
def test_a_tensor_has_the_copy_that_a_product_takes_or_says_that_it_lacks_it(mode):
    x = random((32, 64))
    both = quantizer_of(mode, BOTH).quantize(x)
    for usage in TensorUsage:
        wanted = both.rowwise_tensor if usage in (TensorUsage.LHS, TensorUsage.RHS_TRANS) else both.colwise_tensor
        assert both.get_tensor(usage) is wanted and wanted.get_tensor(usage) is wanted
    with pytest.raises(ValueError, match=r"usage TensorUsage.RHS needs the columnwise copy"):
        both.rowwise_tensor.get_tensor(TensorUsage.RHS)
    assert xla.NoScaleTensor(x).get_tensor(TensorUsage.RHS).data is x


def test_names_of_axes_are_refused():
    tensor = quantizer_of(MX).quantize(jnp.ones((32, 32)))
    assert tensor.apply_sharding_constraint_by_logical_axes(()) is tensor and tensor.checkpoint(None) is tensor
    with pytest.raises(NotImplementedError, match=r"jax.lax.with_sharding_constraint; got logical_axis_names=\('b',\)"):
        tensor.apply_sharding_constraint_by_logical_axes(("b",))


def test_the_factory_puts_two_copies_together():
    q = quantizer_of(FP4, BOTH).quantize(random((32, 64)))
    row, column = q.rowwise_tensor, q.colwise_tensor
    arrays = row.data, row.scale_inv, column.data, column.scale_inv, row.amax, column.amax
    again = xla.ScaledTensorFactory.create_2x(*arrays, FP4, jnp.float32, "NT", -1, colwise_has_rht_applied=True)
    assert_same_raw(again.rowwise_tensor.dequantize(), row.dequantize())
    assert again.colwise_tensor.has_rht_applied and again.colwise_tensor.flatten_axis == 1


# --- delayed scaling and traces -----------------------------------------------------------------------


def test_a_delayed_quantizer_from_outside_of_a_traced_function_is_refused():
    """It would keep a tracer for its scale, or the scale that it had at the first call."""
    quantizer = xla.DelayedScaleQuantizer()
    scale = quantizer.scale
    for transform in (
        jax.jit,
        jax.vmap,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda c, v: (c, f(v)), 0, x),
        lambda f: lambda x: jax.jit(jax.vmap(f))(x),
    ):
        for f in (
            lambda v: quantizer.quantize(v).rowwise_tensor.data,
            lambda v: xla.act_lu(v[..., None, :], ("gelu",), quantizer).rowwise_tensor.data,
        ):
            with pytest.raises(ValueError, match="must take it as an argument and return it; got one from outside"):
                transform(f)(jnp.ones((2, 4, 32)))
    with pytest.raises(ValueError, match="must take it as an argument and return it"):
        jax.jit(lambda v: xla.activation(v, ("gelu",), quantizer))(jnp.ones((4, 1, 32)))
    assert quantizer.scale is scale


def test_a_delayed_quantizer_is_an_argument_or_made_inside():
    x, made = jnp.full((4, 32), 2.0), xla.DelayedScaleQuantizer()

    def step(quantizer, v):
        return quantizer, quantizer.quantize(v).rowwise_tensor.data

    for quantizer in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        for _ in range(2):
            quantizer, _ = jax.jit(step)(quantizer, x)
        assert float(quantizer.scale[0]) == 224.0
        step(quantizer, x)  # outside again
    jax.vmap(lambda v: step(xla.DelayedScaleQuantizer(), v)[1])(jnp.ones((2, 4, 32)))
    scanned, _ = jax.lax.scan(step, made, jnp.ones((2, 4, 32)))
    assert float(scanned.scale[0]) == 448.0 and float(made.scale[0]) == 1.0

    def slope(quantizer, v):
        return jax.grad(lambda u: xla.activation(u, ("gelu",), quantizer).sum())(v)

    assert_same_raw(jax.jit(slope)(made, x[:, None]), slope(made, x[:, None]))
