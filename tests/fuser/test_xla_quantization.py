"""`fuser.xla`: quantization without an activation, bit for bit `refops`; scaling modes, recipes, what is refused."""

import copy
import inspect
import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp  # noqa: E402
from scaled_tensors import (  # noqa: E402
    SETTINGS,
    assert_same_quantized,
    assert_same_raw,
    quantizer_of,
    random,
    rows,
    run_python,
)

import refops  # noqa: E402
from fuser import recipe, xla  # noqa: E402
from fuser.xla import ScalingMode, TensorUsage, compute, helper  # noqa: E402
from tiers import sampled  # noqa: E402

ROWWISE, COLWISE, BOTH = xla.QuantizeLayout
MODES = {mode.name.removesuffix("_SCALING"): mode for mode in ScalingMode}
NONE, DELAYED, MX, CURRENT, FP4, FP4_2D = ScalingMode
GROUPED = (DELAYED, CURRENT, MX)
STATE = (7, 1, 9, 2)


@pytest.fixture(params=["ffi", "callback", "reference"])
def route(request):
    """Both routes to the kernels, and `refops` behind the same calls."""
    if request.param != "reference":
        with xla.route(request.param):
            yield request.param
    else:
        dispatch = pytest.importorskip("fuser.dispatch")
        with dispatch.backend("reference"):
            yield request.param


def named(mode):
    return mode.name


def copies(layout):
    return {"rowwise": layout.has_rowwise, "columnwise": layout.has_colwise}


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
    assert quantizer is None or quantizer.q_dtype in mode.get_compatible_q_dtypes()
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


def test_padding_is_put_on_and_taken_off():
    for mode, colwise in ((MX, False), (MX, True), (FP4, True), (FP4_2D, False), (CURRENT, False)):
        shape, axis = (2, 32, 64), 2
        bare = mode.get_scale_shape(
            shape, is_colwise=colwise, is_padded=False, flatten_axis=axis, broadcast_2d_scale_shape_to_1d=True
        )
        scales = jnp.arange(1, 1 + np.prod(bare), dtype=jnp.float32).reshape(bare)
        padded = xla.apply_padding_to_scale_inv(scales, mode, shape, colwise, axis)
        assert padded.shape == mode.get_scale_shape(
            shape, is_colwise=colwise, flatten_axis=axis, broadcast_2d_scale_shape_to_1d=True
        )
        assert padded.sum() == scales.sum()
        assert_same_raw(xla.remove_padding_from_scale_inv(padded, mode, shape, colwise, axis), scales)


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


def test_names_for_checkpoints_and_axes():
    quantizer = xla.BlockScaleQuantizer(checkpoint_name="scaled")
    jaxpr = jax.make_jaxpr(lambda x: quantizer.quantize(x).rowwise_tensor.checkpoint(quantizer).data)(
        jnp.ones((32, 32))
    )
    assert "name=scaled" in str(jaxpr)
    tensor = quantizer.quantize(jnp.ones((32, 32)))
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
            lambda v: xla.quantize(v, quantizer).rowwise_tensor.data,
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
        return quantizer, xla.quantize(v, quantizer).rowwise_tensor.data

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


# --- quantize and quantize_dbias ----------------------------------------------------------------------


@sampled(("mode", "layout"), list(product(SETTINGS, xla.QuantizeLayout)), 4, in_all=4, ids=named)
def test_quantize_bits(route, mode, layout):
    x = random((32, 2, 64), jnp.bfloat16)
    wanted, sums = refops.quantize(rows(x), SETTINGS[mode], **copies(layout), dbias=True)
    for wrap in (lambda f: f, jax.jit):
        tensor = wrap(lambda v: xla.quantize(v, quantizer_of(mode, layout), flatten_axis=1))(x)
        assert_same_quantized(tensor, wanted)
        tensor, dbias = wrap(lambda v: xla.quantize_dbias(v, quantizer_of(mode, layout), flatten_axis=-2))(x)
        assert_same_quantized(tensor, wanted)
        assert dbias.dtype == x.dtype and dbias.shape == (2, 64)
        assert_same_raw(dbias.reshape(-1), sums)
    assert xla.quantize_dbias(x, quantizer_of(mode, layout), is_dbias=False, flatten_axis=1)[1] is None


def test_without_a_quantizer():
    x = random((4, 8), jnp.float16)
    assert xla.quantize(x, None).data is x
    tensor, dbias = xla.quantize_dbias(xla.NoScaleTensor(x), None)
    assert tensor.data is x and dbias.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(dbias), np.asarray(x, np.float32).sum(0), rtol=1e-3, atol=1e-3)
    assert xla.quantize_dbias(x, None, is_dbias=False)[1] is None


def test_an_amax_that_is_known(route):
    """Current scaling takes it, so that an activation and a cast are what the fused call is."""
    x = random((32, 1, 64), jnp.bfloat16)
    y = xla.act_lu(x, ("gelu",), output_amax_when_no_scaling=True)
    fused = xla.act_lu(x, ("gelu",), quantizer_of(CURRENT, BOTH))
    for a, b in zip(
        *map(jax.tree_util.tree_leaves, (xla.quantize(y, quantizer_of(CURRENT, BOTH)), fused)), strict=True
    ):
        assert_same_raw(a, b)
    for mode in (DELAYED, MX):
        for a, b in zip(
            *map(jax.tree_util.tree_leaves, (xla.quantize(z, quantizer_of(mode)) for z in (y, y.data))), strict=True
        ):
            assert_same_raw(a, b)
    with pytest.raises(ValueError, match="x must have no amax for NVFP4_1D_SCALING, whose kernel takes"):
        xla.quantize(y, quantizer_of(FP4))
    assert_same_raw(
        xla.quantize(replace(y, amax=None), quantizer_of(FP4)).data, xla.quantize(y.data, quantizer_of(FP4)).data
    )


def test_what_quantize_refuses():
    x = random((32, 64))
    with pytest.raises(TypeError, match="quantizer must be a Quantizer or None; got str"):
        xla.quantize(x, "mxfp8")
    grouped = xla.QuantizerFactory.create(scaling_mode=MX, n_groups=2)
    for call in (lambda: xla.quantize(x, grouped), lambda: xla.act_lu(x[:, None], ("gelu",), grouped)):
        with pytest.raises(TypeError, match="got GroupedQuantizer, which grouped_quantize takes"):
            call()
    with pytest.raises(TypeError, match="quantizer must be a GroupedQuantizer or None; got BlockScaleQuantizer"):
        xla.grouped_quantize(x, quantizer_of(MX))
    with pytest.raises(ValueError, match=r"amax_scope must be AmaxScope\.LOCAL"):
        xla.quantize(x, None, amax_scope=2)
    for call, quantizer in ((xla.quantize, quantizer_of(MX)), (xla.grouped_quantize, grouped)):
        with pytest.raises(TypeError, match=r"x must be float32, float16 or bfloat16; got int32 of shape \(2, 32\)"):
            call(jnp.ones((2, 32), jnp.int32), quantizer)


# --- NVFP4: Hadamard transform and stochastic rounding ------------------------------------------------


#: Whether the columnwise copy is transformed, and whether codes are rounded stochastically.
TRANSFORMED = ((True, False), (False, True), (True, True))


@sampled(
    ("rht", "stochastic", "layout"),
    [(*one, layout) for one in TRANSFORMED for layout in xla.QuantizeLayout],
    4,
    in_all=3,
)
def test_hadamard_transform_and_stochastic_rounding_bits(route, rht, stochastic, layout):
    options = {"seed": 7 | 1 << 32, "offset": 9 | 2 << 32} if stochastic else {}
    scaling = refops.NVFP4Scaling(rht=rht and layout.has_colwise, stochastic_rounding=stochastic, **options)
    x, dz = random((64, 1, 128), jnp.bfloat16), random((64, 128), jnp.bfloat16, seed=1)

    def quantizer(state):
        state = state if stochastic else None
        return xla.NVFP4Quantizer(use_rht=rht, stochastic_rounding_rng_state=state, q_layout=layout)

    for state in (jnp.asarray(STATE, jnp.uint32), jnp.asarray([STATE, (0, 0, 0, 0)], jnp.uint32)):
        for wrap in (lambda f: f, jax.jit):
            tensor = wrap(lambda v, s: xla.quantize(v, quantizer(s), flatten_axis=1))(x, state)
            assert_same_quantized(tensor, refops.quantize(rows(x), scaling, **copies(layout)))
    colwise = {BOTH: lambda q: q.colwise_tensor, COLWISE: lambda q: q}.get(layout)
    assert colwise is None or colwise(tensor).has_rht_applied == rht
    if route == "ffi":
        tensor = xla.act_lu(x, ("gelu",), quantizer(state))
        assert_same_quantized(tensor, refops.activation_quantize("gelu", rows(x), scaling, **copies(layout)))
        tensor = xla.dact_lu(dz, x, ("gelu",), quantizer(state))
        wanted = refops.activation_grad_quantize("gelu", np.asarray(dz), rows(x), scaling, **copies(layout))
        assert_same_quantized(tensor, wanted)


def test_dequantize_undoes_the_transform():
    x = random((64, 2, 128), jnp.bfloat16)
    tensor = xla.quantize(x, xla.NVFP4Quantizer(use_rht=True, q_layout=COLWISE), flatten_axis=1)
    wanted = refops.dequantize(refops.quantize(rows(x), refops.NVFP4Scaling(rht=True), rowwise=False, columnwise=True))
    values = replace(tensor, dq_dtype=jnp.float32).dequantize().reshape(256, 64).T
    np.testing.assert_allclose(values, wanted, rtol=0, atol=16 * 2.0**-24 * np.abs(wanted).max())  # 16 float32 terms
    y = xla.activation(x[:, :1], ("gelu",), xla.NVFP4Quantizer(use_rht=True, q_layout=COLWISE))
    want = xla.activation(x[:, :1], ("gelu",))
    assert float(jnp.linalg.norm(y - want) / jnp.linalg.norm(want)) < 0.15


def test_a_random_state_is_the_caller_s():
    x = random((32, 64))
    states = [jnp.asarray(s, jnp.uint32) for s in (STATE, STATE, (8, 1, 9, 2), (7, 1, 9, 3))]
    quantizers = [xla.NVFP4Quantizer(stochastic_rounding_rng_state=s, q_layout=ROWWISE) for s in states]
    first, same, *others = (np.asarray(xla.quantize(x, q).data) for q in quantizers)
    assert (first == same).all() and all((first != other).any() for other in others)
    again = jax.tree_util.tree_map(lambda leaf: leaf, quantizers[0])
    assert_same_raw(again.stochastic_rounding_rng_state, states[0])
    for wrong in (jnp.zeros((4,), jnp.float32), jnp.zeros((2,), jnp.uint32), jnp.zeros((1, 1, 4), jnp.uint32)):
        with pytest.raises(ValueError, match="stochastic_rounding_rng_state must be uint32 of shape"):
            xla.NVFP4Quantizer(stochastic_rounding_rng_state=wrong)
    with pytest.raises(ValueError, match="rht cannot be combined with two_d"):
        xla.NVFP4Quantizer(scaling_mode=FP4_2D, use_rht=True)


# --- groups -------------------------------------------------------------------------------------------


def grouped_quantizer(mode, layout, n_groups):
    quantizers = tuple(quantizer_of(mode, layout) for _ in range(n_groups))
    return xla.GroupedQuantizer(scaling_mode=mode, q_layout=layout, n_groups=n_groups, quantizers=quantizers)


def assert_same_groups(tensor, groups, mode):
    """A grouped tensor against `refops.quantize` of each group: codes, scales in GEMM order, amaxes; the rest 0."""
    singles = (
        [tensor] if isinstance(tensor, xla.GroupedScaledTensor1x) else [tensor.rowwise_tensor, tensor.colwise_tensor]
    )
    for single in singles:
        name = "columnwise" if single.is_colwise else "rowwise"
        made = [refops.quantize(g, SETTINGS[mode], rowwise=True, columnwise=True).swizzled() for g in groups]
        codes = np.concatenate([getattr(q, f"{name}_data").ravel() for q in made])
        np.testing.assert_array_equal(np.asarray(single.data).view(np.uint8), codes)
        scales = np.concatenate([getattr(q, f"{name}_scale_inv").ravel() for q in made])
        found = np.asarray(single.scale_inv)
        found = found.view(np.uint8) if mode.is_block_scaling else found
        np.testing.assert_array_equal(found[: scales.size], scales)
        assert not found[scales.size :].any()
        if made[0].amax_rowwise is None:
            assert single.amax is None
        else:
            np.testing.assert_array_equal(np.asarray(single.amax), np.concatenate([q.amax_rowwise for q in made]))


@sampled(("mode", "layout"), product(GROUPED, xla.QuantizeLayout), 2, in_all=1, ids=named)
def test_grouped_bits(route, mode, layout):
    x = random((160, 96), jnp.bfloat16)
    for sizes in ((32, 96, 32), (160, 0, 0), (0, 64, 96)):
        ends = np.cumsum(sizes)[:-1]
        groups = np.split(np.asarray(x), ends)
        for wrap in (lambda f: f, jax.jit):
            quantizer = grouped_quantizer(mode, layout, 3)
            tensor = wrap(xla.grouped_quantize)(x, quantizer, jnp.asarray(sizes))
            assert_same_groups(tensor, groups, mode)
            np.testing.assert_array_equal(
                tensor.get_tensor(TensorUsage.LHS).group_sizes, sizes
            ) if layout is BOTH else None
    weights = random((3, 32, 64))
    tensor = xla.grouped_quantize(weights, grouped_quantizer(mode, layout, 3))
    assert_same_groups(tensor, np.asarray(weights), mode)


@sampled("mode", GROUPED[::-1], 3, in_all=1, ids=named)
def test_grouped_tensors_dequantize_to_their_groups(mode):
    x, sizes, weights = random((160, 96)), (32, 0, 128), random((3, 32, 64))
    tensor = xla.grouped_quantize(x, grouped_quantizer(mode, BOTH, 3), jnp.asarray(sizes))
    of_weights = xla.grouped_quantize(weights, grouped_quantizer(mode, BOTH, 3))
    for grouped, groups in ((tensor, jnp.split(x, np.cumsum(sizes)[:-1])), (of_weights, weights[:, None])):
        for single in (grouped.rowwise_tensor, grouped.colwise_tensor):
            for values, group in zip(single.dequantize(), groups, strict=True):
                turned = single.data_layout == "T"
                if turned and group.ndim == 3:  # the first axis counts the groups
                    group = group.swapaxes(1, 2)
                elif turned:
                    group = group.T
                assert values.shape == group.shape and values.dtype == x.dtype
                np.testing.assert_allclose(values, group, rtol=2**-3, atol=2**-4)
    leaves, tree = jax.tree_util.tree_flatten(tensor)
    again = jax.tree_util.tree_unflatten(tree, leaves)
    assert again.shape == tensor.shape and again.rowwise_tensor.pre_swizzled == mode.is_block_scaling
    known = jax.jit(lambda t: jnp.stack(t.rowwise_tensor.dequantize()))(of_weights)
    assert known.shape == (3, 1, 32, 64)


def test_delayed_scaling_of_groups_has_a_state_each():
    quantizer, x = (
        grouped_quantizer(DELAYED, ROWWISE, 2),
        jnp.concatenate([jnp.full((4, 32), 2.0), jnp.full((8, 32), 7.0)]),
    )

    @jax.jit
    def step(quantizer, x, sizes):
        return quantizer, xla.grouped_quantize(x, quantizer, sizes).data

    quantizer, _ = step(quantizer, x, jnp.asarray([4, 8]))
    assert [float(q.scale[0]) for q in quantizer.quantizers] == [224.0, 64.0]
    with pytest.raises(ValueError, match="must take it as an argument"):
        jax.jit(lambda v: xla.grouped_quantize(v, quantizer, jnp.asarray([4, 8])).data)(x)


def test_groups_without_a_quantizer_and_their_bias_gradients():
    x, sizes = random((6, 8)), jnp.asarray([4, 0, 2])
    tensor = xla.grouped_quantize(x, None, sizes)
    assert isinstance(tensor, xla.GroupedNoScaleTensor) and tensor.dequantize() is x and tensor.shape == (6, 8)
    assert xla.grouped_quantize(tensor, None) is tensor and tensor.group_sizes is sizes
    assert xla.grouped_quantize(x, None).group_sizes.tolist() == [1] * 6
    wanted = [x[:4].sum(0), np.zeros(8), x[4:].sum(0)]
    np.testing.assert_allclose(jax.jit(xla.grouped_dbias)(x, sizes), wanted, rtol=1e-6)


def test_what_groups_refuse(route):
    x = random((64, 64))
    with pytest.raises(ValueError, match="GroupedQuantizer needs scaling_mode DELAYED_TENSOR_SCALING, CURRENT"):
        xla.QuantizerFactory.create(scaling_mode=FP4, n_groups=2, q_dtype=jnp.float4_e2m1fn)
    with pytest.raises(ValueError, match=r"one group for each of 2 quantizers; got \(3,\)"):
        xla.grouped_quantize(x, grouped_quantizer(MX, ROWWISE, 2), jnp.asarray([32, 16, 16]))
    for sizes, layout, message in (
        ((32, 31), ROWWISE, "group_sizes must add up to the 64 rows of x; got"),
        ((96, -32), ROWWISE, "group_sizes must add up to the 64 rows of x; got"),
        ((48, 16), COLWISE, "each a multiple of 32 for columnwise blocks"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(xla.grouped_quantize(x, grouped_quantizer(MX, layout, 2), jnp.asarray(sizes)).data)
    operands = [np.array([32, 32], np.int32), np.zeros((64, 64), np.float32), *np.ones((2, 2), np.float32)]
    for sizes, message in (
        ((4096, 1, 512, 1, 2), "rowwise_scale_inv must have room"),
        ((8, 1, 1024, 1, 2), "rowwise_data must have 4096"),
        ((4096, 1, 1024, 1, 1), "updated_amax must have 2"),
    ):
        memory = [np.zeros(size * 4, np.uint8) for size in sizes]
        dtypes = ("float8_e4m3fn", "float8_e4m3fn", "float8_e8m0fnu", "float8_e8m0fnu", "float32")
        results = [compute.Buffer(m, (size,), dtype) for m, size, dtype in zip(memory, sizes, dtypes, strict=True)]
        buffers = [compute.Buffer(o.reshape(-1).view(np.uint8), o.shape, o.dtype.name) for o in operands]
        with pytest.raises(ValueError, match=message):
            compute.run(compute.Call("grouped", 0, 2, 0), compute.HostPlace(), buffers, results)
    with pytest.raises(ValueError, match=r"scale_inv must have shape \(2,\) for groups of shape \(4, 8\)"):
        xla.ScaledTensorFactory.create_1x(
            jnp.zeros(32), jnp.ones(3), scaling_mode=CURRENT, first_dims=jnp.asarray([1, 3]), original_shape=(4, 8)
        )
    with pytest.raises(ValueError, match="original_shape must be given"):
        xla.ScaledTensorFactory.create_1x(jnp.zeros(32), jnp.ones(1), first_dims=jnp.asarray([4]))


# --- recipes ------------------------------------------------------------------------------------------


def test_sets_of_quantizers_by_mode():
    create = xla.QuantizerFactory.create_set
    assert jax.tree_util.tree_leaves(xla.noop_quantizer_set) == [] and xla.noop_quantizer_set.x is None
    made = create(scaling_mode=MX, fwd_dtype=jnp.float8_e4m3fn, bwd_dtype=jnp.float8_e5m2, checkpoint_name="q")
    assert [q.q_dtype for q in (made.x, made.kernel, made.dgrad)] == [jnp.float8_e4m3fn] * 2 + [jnp.float8_e5m2]
    assert all(q.q_layout is BOTH and q.checkpoint_name == "q" for q in (made.x, made.kernel, made.dgrad))
    one = create(scaling_mode=MX, is_2x2x=False)
    assert [q.q_layout for q in (one.x, one.kernel, one.dgrad)] == [ROWWISE, COLWISE, ROWWISE]
    one = create(scaling_mode=CURRENT, is_2x2x=False, n_groups=3)
    assert one.kernel.q_layout is ROWWISE and len(one.kernel.quantizers) == 3
    assert len(create(2, scaling_mode=DELAYED)) == 2
    assert isinstance(jax.jit(lambda s: s)(made).dgrad, xla.BlockScaleQuantizer)


def test_sets_of_quantizers_by_recipe():
    create, fp4 = xla.QuantizerFactory.create_set, recipe.NVFP4BlockScaling()
    scope = xla.autocast(enabled=True, recipe=fp4)
    with scope:
        assert xla.get_global_quantize_recipe() is fp4
    with scope, scope:
        assert xla.get_global_quantize_recipe() is fp4
        made = create()
        with xla.autocast(enabled=False), pytest.raises(AttributeError):
            create().x.q_dtype  # noqa: B018  # None
        with pytest.raises(ValueError, match="scaling_mode, fwd_dtype and bwd_dtype must be None with a recipe"):
            create(scaling_mode=MX)
    assert xla.get_global_quantize_recipe() is None
    assert [q.scaling_mode for q in (made.x, made.kernel, made.dgrad)] == [FP4, FP4_2D, FP4]
    state = jnp.asarray(STATE, jnp.uint32)
    plain, transformed = xla.QuantizeMeta(), xla.QuantizeMeta(use_rht=True)
    gradient = xla.QuantizeMeta.merge(transformed, xla.QuantizeMeta(stochastic_rounding_rng_state=state))
    made = create(fp8_recipe=fp4, quantize_meta_set=xla.QuantizeMetaSet(x=transformed, kernel=plain, grad=gradient))
    assert (made.x.use_rht, made.kernel.use_rht, made.dgrad.use_rht) == (True, False, True)
    assert made.dgrad.stochastic_rounding_rng_state is state and made.x.stochastic_rounding_rng_state is None
    with pytest.raises(ValueError, match="quantize_meta_set must be given with fp8_recipe"):
        create(fp8_recipe=fp4)
    with pytest.raises(ValueError, match="they differ in use_rht"):
        xla.QuantizeMeta.merge(transformed, xla.QuantizeMeta(use_rht=False))
    with pytest.raises(ValueError, match="mesh_resource must be None"), xla.autocast(mesh_resource="mesh"):
        pass
    with pytest.raises(TypeError, match=r"enabled must be .*recipe=\.\.\.\)"), xla.autocast(fp4):
        pass  # by position it would be true, and the default recipe would run


def test_what_a_recipe_says():
    config = xla.get_quantize_config_with_recipe(recipe.DelayedScaling(margin=3, amax_history_len=5))
    assert (config.MARGIN, config.AMAX_HISTORY_LEN, config.AMAX_COMPUTE_ALGO.value) == (3, 5, "max")
    assert (jnp.float8_e4m3fn, jnp.float8_e5m2) == (config.FWD_DTYPE, config.BWD_DTYPE) and config.is_fp8_enabled()
    modes = [xla.get_quantize_config_with_recipe(r).mode for r in xla.get_supported_quantization_recipes()]
    assert modes == [DELAYED, CURRENT, MX, FP4]
    flat = xla.get_quantize_config_with_recipe(recipe.NVFP4BlockScaling(disable_2d_quantization=True, disable_rht=True))
    assert flat.get_scaling_mode(xla.TensorSource.KERNEL) is FP4 and flat.DISABLE_RHT
    assert xla.get_quantize_config_with_recipe(None).get_scaling_mode(xla.TensorSource.X) is NONE
    for wrong in (recipe.DelayedScaling(reduce_amax=False), recipe.Float8BlockScaling()):
        with pytest.raises(ValueError, match="fp8_recipe must"):
            xla.get_quantize_config_with_recipe(wrong)
    with pytest.raises(TypeError, match="fp8_recipe must be a recipe or None; got 'mxfp8'"):
        xla.get_quantize_config_with_recipe("mxfp8")


def test_everything_is_supported():
    assert set(xla.get_supported_scaling_modes()) == set(ScalingMode) - {NONE}
    assert all(xla.is_scaling_mode_supported(mode) == (True, "") for mode in ScalingMode)
    with pytest.warns(DeprecationWarning, match="use is_scaling_mode_supported"):
        assert helper.is_fp8_available() == (True, "")
    with pytest.warns(DeprecationWarning, match="use autocast"), xla.fp8_autocast(True, recipe.MXFP8BlockScaling()):
        assert xla.get_global_quantize_recipe().mxfp8()
    assert xla.update_collections({"a": 2}, {"a": 1, "b": 3}) == {"a": 2, "b": 3}


# --- TE's names ---------------------------------------------------------------------------------------

#: What public scripts import, TE's own tests included.
NAMES = {
    "transformer_engine.jax": "autocast fp8_autocast update_collections NVTE_FP8_COLLECTION_NAME cpp_extensions",
    "transformer_engine.jax.cpp_extensions": "quantize quantize_dbias grouped_quantize grouped_dbias act_lu dact_lu "
    "quantize_dact_dbias AmaxScope",
    "transformer_engine.jax.cpp_extensions.quantization": "quantize quantize_dbias grouped_quantize grouped_dbias",
    "transformer_engine.jax.cpp_extensions.amax": "AmaxScope",
    "transformer_engine.jax.quantize": "helper QuantizerFactory QuantizerSet QuantizeLayout QuantizeMeta "
    "QuantizeMetaSet ScaledTensor ScaledTensor1x ScaledTensor2x GroupedScaledTensor1x GroupedNoScaleTensor "
    "NoScaleTensor ScalingMode TensorUsage TensorSource "
    "GroupedQuantizer noop_quantizer_set compute_scale_from_amax is_scaling_mode_supported "
    "get_supported_quantization_recipes get_quantize_config_with_recipe get_global_quantize_recipe update_collections",
    "transformer_engine.jax.quantize.helper": "_format2dtypes AmaxComputeAlgo TensorSource autocast fp8_autocast "
    "is_fp8_available is_scaling_mode_supported get_supported_scaling_modes get_supported_quantization_recipes "
    "get_global_quantize_recipe get_quantize_config_with_recipe update_collections apply_padding_to_scale_inv "
    "remove_padding_from_scale_inv NVTE_FP8_COLLECTION_NAME",
    "transformer_engine.jax.quantize.metadata": "QuantizeMeta QuantizeMetaSet",
    "transformer_engine.jax.quantize.misc": "QuantizeLayout",
}


def test_scripts_find_te_s_names():
    imports = "\n".join(f"from {module} import {', '.join(names.split())}" for module, names in NAMES.items())
    code = f"""
import jax.numpy as jnp
import fuser.compat
fuser.compat.install()
{imports}
import transformer_engine.jax.cpp_extensions as tex
import transformer_engine.jax.quantize.helper
from transformer_engine.common.recipe import Format
assert transformer_engine.jax.quantize.helper is helper and transformer_engine.jax.quantize is not tex.quantize
assert _format2dtypes(Format.HYBRID) == (jnp.float8_e4m3fn, jnp.float8_e5m2)
for mode in helper.get_supported_scaling_modes():
    q = QuantizerFactory.create(scaling_mode=mode, q_layout=QuantizeLayout.ROWWISE_COLWISE)
    tensor, dbias = tex.quantize_dbias(jnp.ones((32, 32)), q)
    assert tensor.get_tensor(TensorUsage.LHS).dequantize().shape == (32, 32) and (dbias == 32).all()
print("ok")
"""
    assert run_python(code).strip() == "ok"
