"""Targets of `fuser`: functions, quantizers, quantized tensors, pipelines, state, recipes, products, fused formulas."""

import contextlib
import copy
import io
import pickle
import warnings

import hostile
import numpy as np
from arguments_fuzz import FLOAT_DTYPES, contents, parameters, shape, spoiled, wrong
from harness import CheckError, DocumentedError, require, target

import refops
from arrays import same_bits
from refops.activations import ACTIVATIONS, DEFAULT_PARAMETERS
from refops.activations.declaration import forms
from refops.scalings import NAMED

NEEDS = ("fuser.functional", "fuser.ops", "fuser.gemm", "fuser.jit", "fuser.distributed", "cuda_kernels.host")
#: What fuser documents: TE's assertions, and torch's errors for state, besides the house's.
ERRORS = {
    "documented": (ValueError, TypeError, RuntimeError, AssertionError, KeyError, NotImplementedError),
    "says": "",
}


def gradient(name):
    """TE's name of a gradient."""
    prefix, separator, last = name.rpartition("_")
    return f"{prefix}{separator}d{last}"


def public_functions():
    """Public name in `fuser.functional` -> (activation, kind)."""
    made = {}
    for name in ACTIVATIONS:
        made |= {
            name: (name, "forward"),
            gradient(name): (name, "backward"),
            f"dbias_{gradient(name)}": (name, "dbias"),
        }
        if name in refops.SCALED_ACTIVATIONS:
            made |= {f"scaled_{name}": (name, "scaled"), f"scaled_{gradient(name)}": (name, "scaled_backward")}
    return made


# --- arguments --------------------------------------------------------------------------------------------------------


def torch_tensor(case, sizes=None, dtype=None, *, fits=None, requires_grad=0.1):
    """A torch tensor of any content and strides."""
    dtype = dtype or case.choose(FLOAT_DTYPES)
    array = contents(case, shape(case, low=1, fits=fits) if sizes is None else sizes, dtype)
    tensor = hostile.torch_tensor(array)
    how = case.below(6)
    if how == 0 and tensor.ndim > 1:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif how == 1 and tensor.ndim:
        tensor = tensor.repeat_interleave(2, -1)[..., ::2]
    if case.chance(requires_grad):
        tensor.requires_grad_()
    return tensor


def wrong_torch(case):
    """A value that no tensor argument is meant for."""
    import torch

    return case.choose(
        [
            lambda: wrong(case),
            lambda: torch.zeros(4, 32, dtype=torch.float64),
            lambda: torch.zeros(4, 32, dtype=torch.int32),
            lambda: torch.zeros(4, 32, dtype=torch.complex64),
            lambda: torch.zeros(4, 32, dtype=torch.float8_e4m3fn),
            lambda: torch.zeros(4, 32).to_sparse(),
            lambda: torch.zeros(4, 32, device="meta"),
            lambda: torch.tensor(1.0),
            lambda: torch.zeros(3, 5, 7),
            lambda: torch.nn.Parameter(torch.zeros(4, 32)),
            lambda: np.zeros((4, 32), np.float32),
        ]
    )()


def to_numpy(tensor):
    """The bits of a tensor as a NumPy array."""
    from fuser.dispatch import as_numpy

    return np.array(as_numpy(tensor.detach().contiguous()), order="C")


def quantizer(case, *, right=False):
    """(name, quantizer) of any settings."""
    import torch

    from fuser import DType

    name = case.choose(QUANTIZERS)
    usages = case.choose([{}, {"rowwise": True, "columnwise": False}, {"rowwise": False, "columnwise": True}])
    fp8 = case.choose([DType.kFloat8E4M3, DType.kFloat8E5M2])
    options = dict(usages)
    if name == "Float8Quantizer":
        options |= {
            "scale": torch.full((1,), float(case.choose([1.0, 0.5, 100.0]))),
            "amax": torch.zeros(1),
            "fp8_dtype": fp8,
        }
    elif name == "Float8CurrentScalingQuantizer":
        options |= {"fp8_dtype": fp8, "force_pow_2_scales": case.chance(0.5), "amax_epsilon": case.choose([0.0, 1e-3])}
    elif name == "Float8BlockQuantizer":
        options |= {"fp8_dtype": fp8, "block_scaling_dim": case.choose([1, 2]), "force_pow_2_scales": case.chance(0.5)}
    elif name == "MXFP8Quantizer":
        options |= {"fp8_dtype": fp8, "with_2d_quantization": case.chance(0.3)}
    elif name == "BlockScaledQuantizer":
        options |= {"scaling": case.choose([row.scaling for row in NAMED.values() if row.scaling.layout.block])}
    else:
        options |= case.choose(
            [
                {},
                {"with_rht": True, "with_post_rht_amax": True},
                {"stochastic_rounding": True},
                {"with_2d_quantization": True},
            ]
        )
    if not right:
        options = spoiled(case, options, 0.3)
    return name, case.call(f"fuser.{name}", **options, **ERRORS)


# --- functional -------------------------------------------------------------------------------------------------------


@target("functional", [f"fuser.functional.{name}" for name in public_functions()], cases=700, seconds=120, needs=NEEDS)
def functional(case):
    """Every named function: shape and dtype of the result; unquantized, what the other packages give."""
    public, (name, kind) = case.choose(list(public_functions().items()))
    gated = ACTIVATIONS[name].gated
    x = torch_tensor(case, fits=case.choose([2, 64]))
    out = (*x.shape[:-1], x.shape[-1] // (1 + gated))
    tensors = [x]
    if kind in ("backward", "dbias", "scaled_backward"):
        tensors.insert(0, torch_tensor(case, out, to_numpy(x).dtype))
    if kind.startswith("scaled"):
        tensors.append(torch_tensor(case, (int(np.prod(x.shape[:-1])),)))
    options = {k: v for k, v in parameters(case, name).items()}
    chosen = None
    if case.chance(0.35):
        _, chosen = quantizer(case, right=True)
        options["quantizer"] = chosen
    if case.chance(0.2):
        tensors[case.below(len(tensors))] = wrong_torch(case)
    elif case.chance(0.1):
        options[case.choose([*DEFAULT_PARAMETERS, "quantizer", "glu_interleave_size"])] = wrong(case)
    y = case.call(f"fuser.functional.{public}", *tensors, **options, changes=("quantizer",), **ERRORS)
    if any(tensor is not x for tensor in tensors[-1:]) and not kind.startswith("scaled"):
        return
    result = y[1] if kind == "dbias" else y[0] if kind == "scaled_backward" else y
    if result is None:
        return
    expected = x.shape if kind in ("backward", "dbias", "scaled_backward") else out
    require(tuple(result.shape) == tuple(expected), "another shape", result.shape, expected)
    if chosen is None and options.get("quantizer") is None and kind == "forward":
        params = {k: v for k, v in options.items() if k in ACTIVATIONS[name].parameters}
        report = refops.oracle.check(name, to_numpy(x), to_numpy(result), params=params, diagnose=False)
        require(report.ok, f"the oracle rejects it: {report}")
    if chosen is not None:
        require(tuple(result.dequantize().shape) == tuple(expected), "dequantizes to another shape")


GENERIC = ("activation", "activation_grad", "dbias_activation_grad", "scaled_activation", "scaled_activation_grad")


@target(
    "functional_by_name",
    [f"fuser.functional.{name}" for name in (*GENERIC, "gradient_name")],
    cases=200,
    seconds=120,
    needs=NEEDS,
)
def functional_by_name(case):
    """The functions that take the activation's name."""
    public = case.choose(GENERIC)
    name = (
        case.choose([*ACTIVATIONS, "nothing", "", None]) if case.chance(0.3) else case.choose(refops.SCALED_ACTIVATIONS)
    )
    x = torch_tensor(case, fits=2)
    gated = name in ACTIVATIONS and ACTIVATIONS[name].gated
    dy = torch_tensor(case, (*x.shape[:-1], x.shape[-1] // (1 + gated)), to_numpy(x).dtype)
    scales = torch_tensor(case, (int(np.prod(x.shape[:-1])),))
    tensors = {"activation": [x], "scaled_activation": [x, scales], "scaled_activation_grad": [dy, x, scales]}.get(
        public, [dy, x]
    )
    if case.chance(0.2):
        tensors[case.below(len(tensors))] = wrong_torch(case)
    if isinstance(name, str) and name in ACTIVATIONS:
        case.call("fuser.functional.gradient_name", name)
    case.call(f"fuser.functional.{public}", name, *tensors, **ERRORS)


# --- quantizers and quantized tensors ---------------------------------------------------------------------------------

QUANTIZERS = (
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
    "Float8BlockQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "BlockScaledQuantizer",
)


@target(
    "quantizers",
    [
        *(f"fuser.{name}" for name in QUANTIZERS),
        *(f"fuser.functional.{n}" for n in ("quantize", "dequantize", "bgrad_quantize")),
    ],
    cases=450,
    seconds=120,
    needs=NEEDS,
)
def quantizers(case):
    """A quantizer is refused, or gives refops' bits, refuses tensors by name, and its tensors go back."""
    import torch

    name, chosen = quantizer(case)
    repr(chosen), chosen.copy()
    x = torch_tensor(case, fits=32) if case.chance(0.85) else wrong_torch(case)
    how = case.below(4)
    if how == 0:
        q = case.call("fuser.functional.quantize", x, chosen, changes=(1,), **ERRORS)
    elif how == 1:
        result = case.call("fuser.functional.bgrad_quantize", x, chosen, changes=(1,), **ERRORS)
        q = result[1]
    else:
        try:
            q = chosen(x)
        except ERRORS["documented"] as error:
            raise DocumentedError(str(error)) from error
    if not isinstance(x, torch.Tensor) or x.device.type == "meta" or x.is_sparse:
        return
    require(tuple(q.shape) == tuple(x.shape), "another shape", q.shape)
    values = case.call(
        "fuser.functional.dequantize", q, case.choose([torch.float32, torch.float16, torch.bfloat16]), **ERRORS
    )
    require(tuple(values.shape) == tuple(x.shape), "dequantizes to another shape")
    if (
        x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and name != "Float8Quantizer"
        and chosen.layout_scaling().random is None
    ):
        usages = chosen.get_usages()
        if not (usages["rowwise"] or usages["columnwise"]):
            return
        expected = refops.quantize(
            to_numpy(x), chosen.scaling(), rowwise=usages["rowwise"], columnwise=usages["columnwise"]
        )
        for field, tensor in q.buffers.tensors.items():
            if getattr(chosen.scaling(), "rht", False) and "columnwise" in field:
                continue
            require(same_bits(to_numpy(tensor), getattr(expected, field)), f"{field} is not refops'", chosen)


TENSORS = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor", "BlockScaledTensor")


@target(
    "quantized_tensors",
    [
        "fuser.prepare_for_saving",
        "fuser.restore_from_saved",
        "fuser.restore_from_func_ctx",
        *(f"fuser.{t}" for t in TENSORS),
    ]
    + [f"fuser.quantization.{t}Storage" for t in TENSORS],
    cases=350,
    seconds=120,
    needs=NEEDS,
)
def quantized_tensors(case):
    """torch's operations on quantized tensors work on their values; saving and loading gives the same codes."""
    import torch

    _, chosen = quantizer(case, right=True)
    x = torch_tensor(case, (case.choose([32, 64]), case.choose([32, 64, 128])), requires_grad=0)
    q = chosen(x)
    values = q.dequantize()
    kind = type(q).__name__
    case.call(f"fuser.{kind}", q.buffers, quantizer=chosen, **ERRORS)
    storage = case.call(f"fuser.quantization.{kind}Storage", q.buffers, quantizer=chosen, **ERRORS)
    flat, objects = case.call(
        "fuser.prepare_for_saving", *case.choose([(q, None), (storage, x), (), (storage, storage)]), **ERRORS
    )
    case.call("fuser.restore_from_saved", objects, flat, **ERRORS)

    class Context:
        tensor_objects = objects
        saved_tensors = tuple(flat)

    with contextlib.suppress(DocumentedError):
        case.call("fuser.restore_from_func_ctx", Context(), **ERRORS)
    operations = {
        "view": lambda t: t.view(-1, 32),
        "t": lambda t: t.t(),
        "detach": lambda t: t.detach(),
        "clone": lambda t: t.clone(),
        "add": lambda t: t + 1,
        "mul_": lambda t: t.clone().mul_(2),
        "slice": lambda t: t[:16],
        "index": lambda t: t[[0, 5]],
        "float": lambda t: t.float(),
        "to": lambda t: t.to(torch.float16),
        "matmul": lambda t: t @ t.t(),
        "cat": lambda t: torch.cat([t, t]),
        "sum": lambda t: t.sum(),
        "split": lambda t: t.split(16)[0],
        "repr": repr,
        "deepcopy": copy.deepcopy,
        "bad index": lambda t: t[10**6],
        "bad view": lambda t: t.view(7, 11),
        "zeros_like": torch.zeros_like,
        "copy_": lambda t: t.clone().copy_(x),
        "empty_like": torch.empty_like,
        "numpy": lambda t: t.numpy(),
        "tolist": lambda t: t.tolist()[:1],
        "isnan": torch.isnan,
        "expand": lambda t: t.expand(2, *t.shape),
        "storage": lambda t: t.untyped_storage().nbytes(),
        "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    }
    name = case.choose(list(operations))
    try:
        result = operations[name](q)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise DocumentedError(f"{name}: {error}") from error
    if name in ("view", "t", "slice", "index", "cat", "split", "expand", "add", "clone", "detach") and isinstance(
        result, torch.Tensor
    ):
        expected = operations[name](values)
        require(result.shape == expected.shape, f"{name} gives another shape", result.shape, expected.shape)
    if name in ("deepcopy", "pickle", "clone", "detach"):
        require(same_bits(to_numpy(result.dequantize()), to_numpy(values)), f"{name} changes values")
    buffer = io.BytesIO()
    torch.save({"q": q}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["q"]
    require(same_bits(to_numpy(loaded.dequantize()), to_numpy(values)), "saving changes values")


# --- recipes ----------------------------------------------------------------------------------------------------------

RECIPES = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
    "BlockScaledRecipe",
)


def recipe(case, *, right=False):
    """A recipe of any settings."""
    from fuser.recipe import Format

    name = case.choose(RECIPES)
    options = {}
    if name == "DelayedScaling":
        options = {
            "margin": case.choose([0, 1, -2]),
            "amax_history_len": case.choose([1, 4, 1024]),
            "amax_compute_algo": case.choose(["max", "most_recent"]),
        }
    elif name == "NVFP4BlockScaling":
        options = {
            flag: case.chance(0.5) for flag in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
        }
    elif name == "MXFP8BlockScaling":
        options = {"enable_2d_quantization": case.chance(0.3)}
    elif name == "BlockScaledRecipe":
        blocks = [row.scaling for row in NAMED.values() if row.scaling.layout.block]
        options = {"scaling": case.choose(blocks), "gradient": case.choose([None, *blocks])}
    if name in RECIPES[:2] and case.chance(0.5):
        options["fp8_format"] = case.choose([Format.E4M3, Format.HYBRID])
    if not right and options:
        options = {k: v for k, v in spoiled(case, options, 0.3).items() if not isinstance(v, np.ndarray)}
        if case.chance(0.1):
            options["fp8_format"] = case.choose([Format.E5M2, "E4M3", None])
        if case.chance(0.1):
            options["backward_override"] = case.choose(["high_precision", "dequantized", "x", 1])
    return case.call(f"fuser.recipe.{name}", **options, **ERRORS)


AVAILABLE = (
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
)


@target(
    "recipes",
    [
        *(f"fuser.recipe.{name}" for name in (*RECIPES, "CustomRecipe", "MMParams", "QParams", "Recipe", "Format")),
        *(
            f"fuser.{name}"
            for name in (
                *AVAILABLE,
                "get_default_recipe",
                "get_align_size_for_quantization",
                "autocast",
                "backend",
                "products",
                "current_products",
                "quantized_model_init",
            )
        ),
        *(
            f"fuser.quantization.{name}"
            for name in ("check_recipe_support", "QuantizerRole", "FP8GlobalStateManager", "DelayedScalingRequest")
        ),
        *(
            f"fuser.quantization.{n}State"
            for n in (
                "DelayedScalingRecipe",
                "Float8BlockScalingRecipe",
                "Float8CurrentScalingRecipe",
                "MXFP8BlockScalingRecipe",
                "NVFP4BlockScalingRecipe",
                "BlockScaledRecipe",
                "CustomRecipe",
            )
        ),
    ],
    cases=300,
    needs=NEEDS,
)
def recipes(case):
    """Recipes are refused, or print, compare, give states and contexts that nest and leave nothing behind."""
    from fuser.quantization import FP8GlobalStateManager, RecipeState
    from fuser.recipe import PRODUCTS, Format

    for name in AVAILABLE:
        case.call(f"fuser.{name}", case.chance(0.5))
    case.call("fuser.get_default_recipe")
    case.call("fuser.recipe.MMParams", case.chance(0.5))
    case.call("fuser.recipe.QParams", **{k: case.chance(0.5) for k in ("power_2_scale", "random_hadamard_transform")})
    case.call("fuser.recipe.Recipe")
    case.call("fuser.recipe.CustomRecipe", lambda role: None, **ERRORS)
    case.call("fuser.recipe.Format", Format.E4M3.value)
    case.call("fuser.quantization.FP8GlobalStateManager")
    case.call("fuser.quantization.DelayedScalingRequest")
    case.call("fuser.quantization.QuantizerRole", "linear", "weight", case.choose(["a", "\u202e", ""]))
    given = recipe(case) if case.chance(0.9) else wrong(case)
    repr(given)
    case.call("fuser.quantization.check_recipe_support", given, **ERRORS)
    case.call("fuser.get_align_size_for_quantization", given, **ERRORS)
    require(repr(copy.copy(given)) == repr(given), "a copy differs", given)
    mode, count = case.choose(["forward", "backward", "forward", "both"]), case.choose([1, 3, 6, 0])
    state = recipe_state(type(given), mode, count, case)
    require(isinstance(state, RecipeState), "no state", state)
    made = state.make_quantizers()
    require(len(made) == count, "another number of quantizers", len(made))
    before = FP8GlobalStateManager.get_autocast_state()
    selected = case.call("fuser.current_products")
    promotion = {"promotion": case.choose([None, 32, 256, "split", 31, "x", 1.5])} if case.chance(0.5) else {}
    with (
        case.call("fuser.backend", case.choose(["auto", "reference", "exact", "float64", "x", 1]), **ERRORS),
        case.call("fuser.products", case.choose([*PRODUCTS, "float32", "x", 1]), **promotion, **ERRORS),
    ):
        with (
            case.call("fuser.autocast", True, recipe=given, **ERRORS),
            case.call("fuser.quantized_model_init", True, recipe=given, **ERRORS),
        ):
            pass
        with (
            contextlib.suppress(ZeroDivisionError),
            case.call("fuser.autocast", case.chance(0.5), recipe=given, **ERRORS),
        ):
            raise ZeroDivisionError
    after = FP8GlobalStateManager.get_autocast_state()
    require(repr(before) == repr(after), "a context left something behind", before, after)
    require(case.call("fuser.current_products") == selected, "a context left a card behind", selected)


def recipe_state(kind, mode, count, case):
    """The recipe state of a recipe class, through its public class."""
    names = {name: f"{name.removesuffix('Recipe')}RecipeState" for name in RECIPES}
    options = {"scaling": NAMED["mxfp8-floor"].scaling} if kind.__name__ == "BlockScaledRecipe" else {}
    given = case.call(f"fuser.recipe.{kind.__name__}", **options, **ERRORS)
    if case.chance(0.2):
        custom = case.call("fuser.recipe.CustomRecipe", lambda role=None: None, **ERRORS)
        case.call("fuser.quantization.CustomRecipeState", custom, mode="forward", num_quantizers=1, **ERRORS)
    return case.call(f"fuser.quantization.{names[kind.__name__]}", given, mode=mode, num_quantizers=count, **ERRORS)


# --- pipelines --------------------------------------------------------------------------------------------------------

REPORTS = ("PlannedOp", "FusionReport", "EdgeReport", "SavedTensor", "PipelineReport", "Explanation")
ACTIVATION_OPS = ("GELU", "ReLU", "SiLU", "SReLU", "QGELU")
GATED_OPS = ("SwiGLU", "GEGLU", "GLU", "ReGLU", "SReGLU", "QGEGLU", "ClampedSwiGLU", "SiTUGLU")
OTHER_OPS = (
    "Identity",
    "ConstantScale",
    "Dropout",
    "LayerNorm",
    "RMSNorm",
    "L2Normalization",
    "Bias",
    "Quantize",
    "Reshape",
    "AllReduce",
    "AllGather",
    "ReduceScatter",
)


def operation(case, width):
    """(operation, width of its output)."""
    name = case.choose(["Linear", "BasicLinear", "Linear", *ACTIVATION_OPS, *GATED_OPS, *OTHER_OPS, "MakeExtraOutput"])
    path, more = f"fuser.ops.{name}", {"changes": (), **ERRORS}
    if name in ("Linear", "BasicLinear"):
        out = case.choose([32, 64, 96])
        bias = {"bias": case.chance(0.5)} if name == "Linear" else {}
        return case.call(path, width, out, **bias, **more), out
    if name in GATED_OPS:
        interleave = (
            {"glu_interleave_size": case.choose([None, 32])}
            if name in ("SwiGLU", "ClampedSwiGLU", "SiTUGLU") and case.chance(0.2)
            else {}
        )
        return case.call(path, **interleave, **more), width // 2
    if name in ACTIVATION_OPS:
        return case.call(path, cache_quantized_input=case.chance(0.3), **more), width
    if name == "ConstantScale":
        return case.call(path, case.choose([2.0, 0.0, -1.5]), **more), width
    if name == "Dropout":
        return case.call(path, case.choose([0.0, 0.5, 0.1]), **more), width
    if name in ("LayerNorm", "RMSNorm"):
        return case.call(path, width, zero_centered_gamma=case.chance(0.3), **more), width
    if name == "Bias":
        return case.call(path, width, **more), width
    if name == "Reshape":
        return case.call(path, (-1, width), **more), width
    if name == "Quantize":
        return case.call(path, case.chance(0.7), case.chance(0.5), **more), width
    if name in ("AllReduce", "AllGather", "ReduceScatter"):
        group_of_one()
    return case.call(path, **more), width


def group_of_one():
    """A process group of this process alone: torch has no default group else."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@target(
    "pipelines",
    [
        *(
            f"fuser.ops.{n}"
            for n in ("Linear", "BasicLinear", "Sequential", "MakeExtraOutput", *ACTIVATION_OPS, *GATED_OPS, *OTHER_OPS)
        ),
        "fuser.explain",
        *(f"fuser.explanation.{name}" for name in REPORTS),
        "fuser.checkpoint",
        "fuser.OperationFuser",
    ],
    cases=300,
    seconds=120,
    needs=NEEDS,
)
def pipelines(case):
    """Random pipelines under random recipes: forward, backward, explain, checkpoint; shapes as expected."""
    import torch

    torch.manual_seed(case.number)
    width = first = case.choose([32, 64, 128])
    ops = []
    for _ in range(case.below(5, 1)):
        op, width = operation(case, width)
        ops.append(op)
        if width < 32 or width % 32:
            break
    model = case.call("fuser.ops.Sequential", *ops, **ERRORS)
    dtype = case.choose([torch.float32, torch.bfloat16, torch.float16])
    if case.chance(0.7):
        model = model.to(dtype)
    sizes = case.choose([(32, first), (2, 16, first), (64, first), (32, first + 1), (0, first), (first,), (3, first)])
    x = torch.randn(sizes, dtype=dtype, requires_grad=case.chance(0.8))
    if case.chance(0.05):
        x = wrong_torch(case)
    context = contextlib.nullcontext()
    if case.chance(0.6):
        context = case.call("fuser.autocast", True, recipe=recipe(case, right=True), **ERRORS)

    def forward():
        with context:
            if case.number % 4 == 1:
                return case.call("fuser.checkpoint", model, x, changes=(0,), **ERRORS)
            return model(x)

    try:
        y = forward()
    except ERRORS["documented"] as error:
        raise DocumentedError(str(error)) from error
    y, *_ = y if isinstance(y, tuple) else (y,)
    if x.dim() == 0 or x.shape[-1] != first:  # no operation of these minds the width
        return
    require(
        y.shape[-1] == width and y.numel() // max(width, 1) == x.numel() // max(first, 1),
        "another shape",
        y.shape,
        width,
    )
    require(torch.isfinite(y).all() or dtype is torch.float16 or y.numel() == 0, "not finite")
    if y.requires_grad:
        y.float().sum().backward()
        require(x.grad is None or x.grad.shape == x.shape, "a gradient of another shape")
        for parameter in model.parameters():
            require(parameter.grad is None or parameter.grad.shape == parameter.shape, "a gradient of another shape")
    explanation = case.call(
        "fuser.explain", model, x.detach() if case.chance(0.5) else None, quiet=True, changes=(0,), **ERRORS
    )
    require(str(explanation) and explanation.mermaid() and explanation.to_dict(), "an explanation without text")
    rebuild_reports(case, explanation)
    case.call("fuser.OperationFuser", ops, changes=(0,), **ERRORS)


def torch_module(case, width):
    """(module of torch, width of its output)."""
    import torch

    name = case.choose(
        ["Linear", "Linear", "Linear", "LayerNorm", "RMSNorm", "GELU", "ReLU", "SiLU", "Tanh", "Dropout"]
    )
    cls = getattr(torch.nn, name)
    if name == "Linear":
        out = case.choose([32, 64, 48, 10])
        return cls(width, out, bias=case.chance(0.7)), out
    if name in ("LayerNorm", "RMSNorm"):
        return cls(width, elementwise_affine=case.chance(0.8)), width
    return (cls(approximate=case.choose(["tanh", "none"])) if name == "GELU" else cls()), width


CONVERSIONS = ["convert", "compare", "load_scaling_state", "scaling_state", "statistics"]


@target("conversions", [f"fuser.{name}" for name in CONVERSIONS], cases=100, seconds=120, needs=NEEDS)
def conversions(case):
    """Random models of torch are converted, compared and recorded under random recipes; the same model comes back."""
    import torch

    torch.manual_seed(case.number)
    width = first = case.choose([32, 64])
    modules = []
    for _ in range(case.below(5, 1)):
        module, width = torch_module(case, width)
        modules.append(module)
    model = torch.nn.Sequential(*modules)
    if case.chance(0.3):
        model = model.to(case.choose([torch.bfloat16, torch.float16, torch.float64]))
    names, pad = list(model.state_dict()), case.chance(0.7)
    given = recipe(case, right=True)
    rule = case.choose(
        [given, given, {"*": given}, {"0": given}, {"none*": given}, lambda name, module: given, "x", None]
    )
    x = torch.randn(case.choose([(32, first), (2, 16, first), (5, first), (first,), (0, first)]), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what stays in high precision
        converted = case.call("fuser.convert", model, rule, pad=pad, inplace=case.chance(0.5), changes=(0,), **ERRORS)
    require(list(converted.state_dict()) == names, "other names of parameters")
    x = x.to(next(iter(model.parameters()), x).dtype)
    try:
        y = converted(x)
    except ERRORS["documented"] as error:
        raise DocumentedError(str(error)) from error
    require(y.shape == (*x.shape[:-1], width), "another shape", y.shape, width)
    kept = case.call("fuser.scaling_state", converted, **ERRORS)
    case.call("fuser.load_scaling_state", converted, kept, changes=(0,), **ERRORS)
    if case.chance(0.3):
        recorded = case.call("fuser.statistics", converted, changes=(0,), **ERRORS)
        with recorded:
            converted(x).float().sum().backward()
        require(str(recorded) and len(recorded.rows()) == len(recorded.records), "records without text")
    if case.chance(0.3):
        found = case.call("fuser.compare", model, x, given, pad=pad, quiet=True, changes=(0,), **ERRORS)
        require(str(found) and found.rows(), "a comparison without text")


PLAIN_OPS = ("Linear", "BasicLinear", "Bias", "ConstantScale", "Identity", "LayerNorm", "RMSNorm", "L2Normalization")
SMOOTH_OPS = ("GELU", "SiLU", "SReLU", "QGELU", "SwiGLU", "GEGLU", "GLU", "SReGLU", "QGEGLU")


def plain_operation(name, op, constant):
    """The same operation in plain torch, as a function of x and of the operation's parameters by name."""
    import torch
    from torch.nn import functional

    from fuser.torch_words import TORCH

    def declared(activation):  # torch has no such function
        value = forms(ACTIVATIONS[activation].act.body, TORCH).value
        return lambda x: value(x, None)

    unary = {
        "GELU": lambda x: functional.gelu(x, approximate="tanh"),
        "SiLU": functional.silu,
        "SReLU": declared("srelu"),
        "QGELU": declared("qgelu"),
        "ReLU": functional.relu,
    }
    gates = {"SwiGLU": "SiLU", "GEGLU": "GELU", "SReGLU": "SReLU", "QGEGLU": "QGELU", "ReGLU": "ReLU"}

    def gated(x):
        act, gate = x.chunk(2, -1)
        return (torch.sigmoid(act) if name == "GLU" else unary[gates[name]](act)) * gate

    def of(x, p):
        if name in ("Linear", "BasicLinear"):
            return functional.linear(x, p["weight"], p.get("bias"))
        if name == "LayerNorm":
            return functional.layer_norm(x, x.shape[-1:], p["weight"], p["bias"], op.eps)
        if name == "RMSNorm":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + op.eps) * p["weight"]
        if name == "L2Normalization":
            return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + op.eps)
        if name == "Bias":
            return x + p["bias"]
        return x * constant if name == "ConstantScale" else x if name == "Identity" else unary.get(name, gated)(x)

    return of


@target(
    "plain_pipelines",
    [f"fuser.ops.{name}" for name in (*PLAIN_OPS, *SMOOTH_OPS, "ReLU", "ReGLU")],
    cases=200,
    needs=NEEDS,
)
def plain_pipelines(case):
    """Without a recipe a pipeline computes what plain torch computes in float64: values and every gradient."""
    import torch

    torch.manual_seed(case.number)
    width = first = case.choose([32, 64])
    names = [case.choose([*PLAIN_OPS, *SMOOTH_OPS]) for _ in range(case.below(5, 1))]
    if case.chance(0.2):  # first alone: behind an operation the sign at the corner is a matter of rounding
        names[0] = case.choose(["ReLU", "ReGLU"])
    ops, functions = [], []
    for name in names:
        if width < 8:
            break
        arguments = {"Linear": (width, 64), "BasicLinear": (width, 64), "ConstantScale": (1.5,)}.get(name, ())
        if name in ("Bias", "LayerNorm", "RMSNorm"):
            arguments = (width,)
        op = case.call(f"fuser.ops.{name}", *arguments)
        ops.append(op)
        functions.append(plain_operation(name, op, 1.5))
        width = 64 if arguments[1:] else width // (1 + (name in GATED_OPS))
    with torch.no_grad():
        for op in ops:
            for parameter in op.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
    x = torch.randn(16, first, requires_grad=True)
    y = case.call("fuser.ops.Sequential", *ops)(x)
    dy = torch.randn(y.shape)
    y.backward(dy)
    exact = x.detach().double().requires_grad_()
    parameters_ = [{n: p.detach().double().requires_grad_() for n, p in op.named_parameters()} for op in ops]
    expected = exact
    for function, values in zip(functions, parameters_, strict=True):
        expected = function(expected, values)
    expected.backward(dy.double())
    pairs = [("y", y, expected), ("the gradient of x", x.grad, exact.grad)]
    for op, values in zip(ops, parameters_, strict=True):
        pairs += [(f"the gradient of {n}", p.grad, values[n].grad) for n, p in op.named_parameters()]
    for what, got, wanted in pairs:
        error = float((got.detach().double() - wanted.detach()).norm())
        # float32's 2**-24 a few hundred times: of products of up to 64 terms and of chained derivatives
        require(error <= 1e-4 * float(wanted.detach().norm()) + 1e-6, f"{what} is another than torch's", names, error)


DISPATCH = (
    "as_numpy",
    "as_torch",
    "current_backend",
    "Buffers",
    "untraced",
    "activation",
    "activation_grad",
    "scaled_activation",
    "scaled_activation_grad",
    "quantize",
    "activation_quantize",
    "activation_grad_quantize",
    "dequantize",
    "swizzled",
    "unswizzled",
    "computes_in",
    "amax",
    "update_delayed_scale",
    "gemm",
)


@target("dispatch", [f"fuser.dispatch.{name}" for name in DISPATCH], cases=400, seconds=60, needs=NEEDS)
def dispatch(case):
    """Under the backend "reference" every function of `fuser.dispatch` gives refops' bits; views share memory."""
    import torch

    name = DISPATCH[case.number % len(DISPATCH)]
    path, dtype = f"fuser.dispatch.{name}", case.choose(FLOAT_DTYPES)
    act = case.choose([n for n in ACTIVATIONS if "scaled" not in name or n in refops.SCALED_ACTIVATIONS])
    x = contents(case, (128, 256), dtype)
    dy = contents(case, (128, 256 // (1 + ACTIVATIONS[act].gated)), dtype)
    tensor, scaling = hostile.torch_tensor(x), refops.MXFP8Scaling(case.choose([refops.E4M3, refops.E5M2]))
    with case.call("fuser.backend", "reference"):
        if name == "current_backend":
            require(case.call(path) == "reference", "another backend")
        elif name == "computes_in":
            require(case.call(path, tensor.dtype) and not case.call(path, torch.float64), "another answer")
            require(not case.call(path, wrong(case)), "computes in what is no dtype")
        elif name == "untraced":
            require(case.call(path, lambda value: value + 1)(1) == 2, "a wrapped function differs")
        elif name == "as_numpy":
            require(case.call(path, tensor).ctypes.data == tensor.data_ptr(), "a copy")
            require(same_bits(case.call(path, tensor), x), "other bits")
        elif name == "as_torch":
            back = case.call(path, x)
            require(back.data_ptr() == x.ctypes.data and same_bits(to_numpy(back), x), "a copy, or other bits")
        elif name == "amax":
            finite = np.abs(x.astype(np.float32))
            wanted = np.fmax.reduce(finite, axis=None, initial=0)
            require(float(case.call(path, tensor)) == float(wanted), "another amax")
        elif name == "update_delayed_scale":
            history, scale = np.abs(contents(case, (4, 3), np.float32)), np.full(3, 2, np.float32)
            got = case.call(path, torch.from_numpy(history), torch.from_numpy(scale), refops.E4M3)
            wanted = refops.update_delayed_scale(history, scale, refops.E4M3)
            require(all(map(same_bits, map(to_numpy, got), wanted)), "another history or scale")
        elif name == "gemm":
            quantized = [case.call("fuser.dispatch.quantize", tensor, scaling) for _ in range(2)]
            wanted = refops.gemm(*[refops.quantize(x, scaling)] * 2, "blackwell", out_dtype=np.float32)
            require(same_bits(to_numpy(case.call(path, *quantized, "blackwell")), wanted), "another product")
        elif name in ("Buffers", "dequantize", "swizzled", "unswizzled"):
            buffers = case.call("fuser.dispatch.quantize", tensor, scaling, columnwise=case.chance(0.5))
            fields = {field: getattr(buffers, field) for field in buffers.__dataclass_fields__}
            buffers = case.call("fuser.dispatch.Buffers", **fields)
            q = refops.quantize(x, scaling, columnwise=buffers.columnwise_data is not None)
            if name == "swizzled":
                same_buffers(case.call(path, buffers), q.swizzled())
            elif name == "unswizzled":
                same_buffers(case.call(path, case.call("fuser.dispatch.swizzled", buffers)), q)
            elif name == "dequantize":
                require(same_bits(to_numpy(case.call(path, buffers)), refops.dequantize(q)), "other values")
            else:
                same_buffers(buffers, q)
        else:
            names = () if name == "quantize" else (act, "dy") if "grad" in name else (act,)
            scales = (np.linspace(0.5, 2, 128, dtype=np.float32),) if "scaled" in name else ()
            arrays = (*((dy,) if len(names) == 2 else ()), x, *scales)
            last = (scaling,) if "quantize" in name else ()
            got = case.call(path, *names[:1], *map(hostile.torch_tensor, arrays), *last)
            wanted = getattr(refops, name)(*names[:1], *arrays, *last)
            if last:
                same_buffers(got, wanted)
            else:
                pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
                require(all(same_bits(to_numpy(one), two) for one, two in pairs), "other values", act)


def same_buffers(buffers, q):
    """`Buffers` of refops' bits."""
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
        one, two = getattr(buffers, name), getattr(q, name)
        require((one is None) == (two is None), f"{name} is in one result alone")
        require(one is None or same_bits(to_numpy(one), two), f"{name} differs")
    require(buffers.with_gemm_swizzled_scales == q.with_gemm_swizzled_scales, "another order of the scales")


@target("compat", [f"fuser.compat.{n}" for n in ("install", "uninstall", "reason")], cases=20, needs=NEEDS)
def compat(case):
    """TE's names are there between the two calls, however often each is called, and are this package's objects."""
    import sys

    import fuser

    require(case.call("fuser.compat.reason", "transformer_engine.pytorch.Linear"), "no reason")
    if case.chance(0.5):
        paths = ["transformer_engine.pytorch.Linear.forward", "torch.nn", "transformer_engine", "", wrong(case)]
        case.call("fuser.compat.reason", case.choose(paths))
    for _ in range(case.below(3, 1)):
        case.call("fuser.compat.install")
    import transformer_engine.pytorch as te

    require(te.ops.Linear is fuser.ops.Linear and te.autocast is fuser.autocast, "other objects")
    for _ in range(case.below(3, 1)):
        case.call("fuser.compat.uninstall")
    require(not any(name.startswith("transformer_engine") for name in sys.modules), "names were left")


def rebuild_reports(case, explanation):
    """Each class of `fuser.explanation`, called with the fields of one of its objects, gives an equal one."""
    pipelines = explanation.pipelines
    found = [explanation, *pipelines]
    for pipeline in pipelines:
        saved = [tensor for tensors in (pipeline.saved or {}).values() for tensor in tensors]
        for some in (pipeline.forward, pipeline.fusions, pipeline.edges, saved):
            found += some[:1]
    for value in found:
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        require(case.call(f"fuser.explanation.{type(value).__name__}", **fields) == value, "another object", value)


SCALED_OPS = ("ScaledSwiGLU", "ScaledSReLU", "ScaledClampedQGeGLU", "ScaledSiTUGLU")


@target(
    "ops_with_inputs",
    [
        *(
            f"fuser.ops.{name}"
            for name in (*SCALED_OPS, "AddExtraInput", "GroupedLinear", "is_op_fuser_grouped_tensor_path_supported")
        )
    ],
    cases=250,
    seconds=120,
    needs=NEEDS,
)
def ops_with_inputs(case):
    """Operations with further inputs."""
    import torch

    x = torch.randn(32, 64, requires_grad=case.chance(0.7))
    case.call(
        "fuser.ops.is_op_fuser_grouped_tensor_path_supported",
        recipe(case, right=True) if case.chance(0.7) else None,
        torch.bfloat16,
        **ERRORS,
    )
    name = case.choose([*SCALED_OPS, "AddExtraInput", "GroupedLinear"])
    if name == "AddExtraInput":
        extra = torch.randn(case.choose([(32, 64), (32, 64), (64,), (3, 5)]))
        op = case.call("fuser.ops.AddExtraInput", in_place=case.chance(0.3))
    elif name == "GroupedLinear":
        extra = torch.tensor(
            case.choose([[16, 16], [0, 32], [32, 0], [16, 17], [-1, 33], [32]]),
            dtype=case.choose([torch.int64, torch.int32, torch.float32]),
        )
        op = case.call(
            "fuser.ops.GroupedLinear", case.choose([2, 2, 2, 1, 0, -1]), 64, 32, bias=case.chance(0.5), **ERRORS
        )
    else:
        extra = torch.rand(case.choose([(32,), (32, 1), (31,), ()]))
        op = case.call(f"fuser.ops.{name}", **ERRORS)
    context = contextlib.nullcontext()
    if case.chance(0.5):
        context = case.call("fuser.autocast", True, recipe=recipe(case, right=True), **ERRORS)
    try:
        with context:
            y = op(x, extra)
            if y.requires_grad:
                y.sum().backward()
    except ERRORS["documented"] as error:
        raise DocumentedError(str(error)) from error
    require(y.shape[0] == 32, "another shape", y.shape)


@target("extra_state", ["fuser.ops.Linear"], cases=400, seconds=60, needs=NEEDS)
def extra_state(case):
    """State of operations in a checkpoint: whole it comes back, damaged or pickled it is refused and never executed."""
    import torch

    from fuser import extra_state as states

    model = case.call("fuser.ops.Linear", 32, 32, bias=False)
    with case.call("fuser.autocast", True, recipe=case.call("fuser.recipe.DelayedScaling", amax_history_len=4)):
        model(torch.randn(32, 32)).sum().backward()
    state = model.state_dict()
    names = [name for name in state if name.endswith("_extra_state")]
    require(names, "no extra state", list(state))
    name = names[0]
    whole = state[name].numpy().tobytes()
    payload = pickle.dumps({"scale_fwd": hostile.Payload(case.canary, case.below(3)), "recipe": None})
    made = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(1), "x": hostile.Payload(case.canary)}, made)
    data = case.choose(
        [
            lambda: whole,
            lambda: hostile.mutated(case, whole, payload),
            lambda: hostile.mutated(case, whole, whole),
            lambda: payload,
            lambda: made.getvalue(),
            lambda: hostile.mutated(case, payload, whole),
            lambda: pickle.dumps({}),
            lambda: b"",
            lambda: hostile.safetensors_bytes(
                {"__metadata__": {"state": case.choose(["{}", "[]", "1", "[" * 50000, "null"])}}, b""
            ),
            lambda: hostile.safetensors_bytes(
                {
                    "x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]},
                    "__metadata__": {"state": "{}"},
                },
                b"",
            ),
            lambda: case.rng.bytes(case.below(200)),
        ]
    )()
    given = torch.tensor(list(data), dtype=torch.uint8)
    if case.chance(0.1):
        given = case.choose([given.float(), given.reshape(1, -1), given.to(torch.int64), torch.ones(3)])
    state[name] = given
    other = case.call("fuser.ops.Linear", 32, 32, bias=False)
    try:
        states.unpack(given)
        other.load_state_dict(state)
    except (RuntimeError, ValueError, TypeError) as error:
        require(data != whole or given.dtype != torch.uint8 or given.ndim != 1, "whole state is refused", error)
        raise DocumentedError(str(error)) from error
    if data == whole:
        with case.call("fuser.autocast", True, recipe=case.call("fuser.recipe.DelayedScaling", amax_history_len=4)):
            other(torch.randn(32, 32))


FUSION_NAMES = ("register_forward_fusion", "register_backward_fusion", "register_forward_backward_fusion")


@target("fusions", ["fuser.fusions", *(f"fuser.{name}" for name in FUSION_NAMES)], cases=100, needs=NEEDS)
def fusions(case):
    """Fusions of a user's are registered for a scope, and gone after it; what they return is checked."""
    import torch

    from fuser import fuser as manager

    def unchanged(ops, **options):
        return ops

    def raising(ops, **options):
        raise ValueError("no fusion; got ops")

    function = case.choose([unchanged, raising, lambda ops, **options: None, lambda ops: ops, wrong(case)])
    before = repr([len(v) for v in vars(manager.OperationFuser).values() if isinstance(v, list)])
    model = case.call("fuser.ops.Sequential", case.call("fuser.ops.Linear", 32, 32), case.call("fuser.ops.GELU"))
    with case.call("fuser.fusions", **{case.choose(["forward", "backward", "forward_backward"]): function}, **ERRORS):
        try:
            model(torch.randn(4, 32, requires_grad=True)).sum().backward()
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise DocumentedError(str(error)) from error
        finally:
            pass
    require(
        before == repr([len(v) for v in vars(manager.OperationFuser).values() if isinstance(v, list)]),
        "fusions were left",
    )
    name = case.choose(FUSION_NAMES)
    kinds = {n: list(v) for n, v in vars(manager.OperationFuser).items() if isinstance(v, list)}
    try:
        case.call(f"fuser.{name}", unchanged)
    finally:
        for n, v in kinds.items():
            getattr(manager.OperationFuser, n)[:] = v


# --- products, compiled functions, collectives ------------------------------------------------------------------------

GEMMS = ("gemm", "linear_forward", "linear_dgrad", "linear_wgrad", "native_obstacle")


@target(
    "products",
    [
        *(f"fuser.gemm.{name}" for name in (*GEMMS, "MMParams", "reads_swizzled_scales")),
        "fuser.get_device_compute_capability",
    ],
    cases=350,
    seconds=60,
    needs=NEEDS,
)
def products(case):
    """Matrix products of plain and quantized operands: shapes, float64's result within rounding, refusals by name."""
    import torch

    case.call("fuser.gemm.MMParams", case.choose([None, torch.float32]), case.chance(0.5))
    require(len(case.call("fuser.get_device_compute_capability")) == 2, "no major and minor number")
    require(not case.call("fuser.gemm.reads_swizzled_scales", torch.device("cpu")), "the CPU reads GEMM order")
    name = case.choose(GEMMS)
    m, n, k = (case.choose([0, 16, 32, 64, 33]) for _ in range(3))
    sizes = {"linear_forward": ((m, k), (n, k)), "linear_dgrad": ((m, n), (n, k)), "linear_wgrad": ((m, n), (m, k))}
    left, right = sizes.get(name, ((n, k), (m, k)))
    if case.chance(0.1):
        left = shape(case, low=1)
    operands = [torch_tensor(case, sizes_) for sizes_ in (left, right)]
    finite = all(
        torch.isfinite(t.float()).all() and t.float().abs().max() < 1e6 if t.numel() else True for t in operands
    )
    exact = [t.detach().double() for t in operands]
    for i in range(2):
        if case.chance(0.3):
            with contextlib.suppress(ValueError, DocumentedError):
                operands[i] = quantizer(case, right=True)[1](operands[i].detach())
                exact[i] = None
        elif case.chance(0.08):
            operands[i], exact[i] = wrong_torch(case), None
    options = {}
    if name != "native_obstacle":
        if case.chance(0.2):
            options["bias"] = torch_tensor(case, (case.choose([n, k, 3]),))
        if case.chance(0.2):
            options["out_dtype"] = case.choose([torch.float32, torch.bfloat16, torch.int32, "float32", None])
        if case.chance(0.1):
            options["alpha"] = case.choose([2.0, 0.0, float("nan"), "x", None])
        if case.chance(0.1):
            options["accumulate"] = True
        if case.chance(0.1):
            options["beta"] = 0.5
    if name in ("gemm", "native_obstacle") and case.chance(0.4):
        options["layout"] = case.choose(["TN", "NN", "NT", "TT", 1])
    card = case.choose(["hopper", "blackwell"]) if case.chance(0.2) and name != "native_obstacle" else "float32"
    with case.call("fuser.products", card):
        y = case.call(f"fuser.gemm.{name}", *operands, **options, **ERRORS)
    if name == "native_obstacle":
        require(y is None or isinstance(y, str), "no words", y)
        return
    if finite and not options and name != "gemm" and all(e is not None for e in exact):
        a, b = exact
        expected = a @ b.t() if name == "linear_forward" else a @ b if name == "linear_dgrad" else a.t() @ b
        require(y.shape == expected.shape, "another shape", y.shape)
        bound = 2.0**-7 * (
            a.abs() @ b.abs().t()
            if name == "linear_forward"
            else a.abs() @ b.abs()
            if name == "linear_dgrad"
            else a.abs().t() @ b.abs()
        )
        bound = bound + 2.0**-24
        if expected.numel() and float(expected.abs().max()) < 6e4:
            require(bool(((y.double() - expected).abs() <= bound).all()), "another product")


JIT_ACTIVATIONS = ("gelu", "silu", "relu", "qgelu", "srelu")
JIT = [
    *(
        f"{form}"
        for a in JIT_ACTIVATIONS
        for form in (
            f"{a}_fused_",
            f"bias_{a}_fused_",
            f"d{a}_fused_",
            f"bgrad_d{a}_fused_",
            f"bias_{a}_fused",
            f"bgrad_d{a}_fused",
        )
    ),
    "l2normalization_fused",
    "l2normalization_fused_",
    "l2normalization_fwd_fused",
    "l2normalization_fwd_fused_",
    "l2normalization_backward_fused",
    "l2normalization_backward_fused_",
    "bias_dropout_add",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_fused_train_",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_inference_",
    "get_bias_dropout_add",
]
JIT_SETTINGS = (
    "compilation",
    "compilation_enabled",
    "dropout_fuser",
    "is_in_onnx_export_mode",
    "jit_fuser",
    "lazy_compile",
    "no_torch_dynamo",
    "onnx_export",
    "set_jit_fusion_options",
)
WARMUPS = tuple(
    f"warmup_jit_{name}{suffix}"
    for name in ("bias_dropout_add", "bias_gelu", "l2normalization")
    for suffix in ("", "_all_dtypes")
)
#: torch's own errors pass: these functions are formulas in torch.
TORCH_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)


@target(
    "jit_functions",
    [f"fuser.jit.{name}" for name in (*JIT, *JIT_SETTINGS, *WARMUPS)],
    cases=400,
    seconds=60,
    needs=NEEDS,
)
def jit_functions(case):
    """torch.compile's fusions, run uncompiled: shapes and dtypes, and modes that end with their block."""
    import torch

    from fuser import jit

    before = jit.compilation_enabled(), jit.is_in_onnx_export_mode()
    with case.call("fuser.jit.compilation", False):
        require(not case.call("fuser.jit.compilation_enabled"), "compilation is on")
        with case.call("fuser.jit.onnx_export", case.chance(0.5)):
            case.call("fuser.jit.is_in_onnx_export_mode")
        if case.chance(0.2):
            for name in ("jit_fuser", "dropout_fuser", "lazy_compile"):
                wrapped = case.call(f"fuser.jit.{name}", lambda x: x + 1)
                require(wrapped(1) == 2, "a wrapped function differs")
            case.call("fuser.jit.set_jit_fusion_options")
            require(case.call("fuser.jit.no_torch_dynamo")(lambda x: x)(3) == 3, "a wrapped function differs")
        warm(case)
        name = case.choose(JIT)
        x = torch_tensor(case, (8, 32), requires_grad=0.3)
        bias, dy = (
            torch_tensor(case, case.choose([(32,), (32,), (1,), (8,)])),
            torch_tensor(case, (8, 32), requires_grad=0),
        )
        if case.chance(0.1):
            x = wrong_torch(case)
            if (isinstance(x, torch.Tensor) and x.is_complex()) or isinstance(x, complex):
                x = None  # torch warns that it drops the imaginary part
        given = {
            "l2normalization_backward_fused": (dy, x, torch.ones(8, 1), 1e-6),
            "bias_dropout_add": (x, bias, dy, 0.1, True),
            "get_bias_dropout_add": (case.chance(0.5),),
        }
        given["l2normalization_backward_fused_"] = given["l2normalization_backward_fused"]
        args = given.get(name)
        if args is None and name.startswith("l2"):
            args = (x, 1e-6)
        elif args is None and name.startswith("bias_dropout"):
            args = (x, bias, dy, case.choose([0.0, 0.5, 1.0, 2.0]))
        elif args is None and name.startswith("bgrad"):
            args = (dy, x, bias)
        elif args is None and name.startswith("bias"):
            args = (x, bias if case.chance(0.8) or name.endswith("_") else None)
        elif args is None:
            args = (dy, x) if name.startswith("d") else (x,)
        try:
            y = jit_call(case, f"fuser.jit.{name}", args)
        except TORCH_ERRORS as error:
            raise DocumentedError(str(error)) from error
        if name == "get_bias_dropout_add":
            return
        first = y[-1] if isinstance(y, tuple) and name.startswith("bgrad") else y[0] if isinstance(y, tuple) else y
        require(first.dtype in (torch.float32, torch.float16, torch.bfloat16, x.dtype), "another dtype", first.dtype)
    require(before == (jit.compilation_enabled(), jit.is_in_onnx_export_mode()), "a mode was left on")


def jit_call(case, name, args):
    """`Case.call`, torch's own errors passed on."""
    try:
        return case.call(name, *args, documented=())
    except CheckError as failure:
        raise failure.__cause__ or failure from failure


def warm(case):
    """A warm-up of tiny sizes, now and then."""
    import torch

    if case.number % 10 == 0:
        name = WARMUPS[case.number // 10 % len(WARMUPS)]
        sizes = (8, 2, 2) if name.endswith("_all_dtypes") else (8, case.choose([torch.float32, torch.bfloat16]), 2, 2)
        case.call(f"fuser.jit.{name}", *sizes)


COLLECTIVES = (
    "all_reduce",
    "gather_along_first_dim",
    "reduce_amax",
    "reduce_scatter_along_first_dim",
    "reduce_scatter_by_all_reduce",
)


@target(
    "collectives",
    [
        f"fuser.distributed.{name}"
        for name in (*COLLECTIVES, "get_distributed_rank", "get_distributed_world_size", "is_initialized")
    ],
    cases=80,
    needs=NEEDS,
)
def collectives(case):
    """Without a process group, or in a group of one, a collective gives back its tensor."""
    if case.chance(0.5):
        group_of_one()
    require(case.call("fuser.distributed.get_distributed_world_size") == 1, "more than one process")
    require(case.call("fuser.distributed.get_distributed_rank") in (0, -1), "another rank")
    case.call("fuser.distributed.is_initialized")
    x = torch_tensor(case, (4, 32), requires_grad=0)
    expected = to_numpy(x)
    y = case.call(f"fuser.distributed.{case.choose(COLLECTIVES)}", x, changes=(0,), **ERRORS)
    require(same_bits(to_numpy(y), expected), "other values")
