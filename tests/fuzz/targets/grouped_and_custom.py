"""Targets of `fuser`: grouped tensors, hybrid and identity quantizers, quantizers by role, master weights, layouts."""

import contextlib
import math
import re
import warnings

import numpy as np
from arguments_fuzz import FLOAT_DTYPES, wrong
from harness import DocumentedError, require, target

import refops
from arrays import same_bits
from targets.torch_front import ERRORS, NEEDS, group_of_one, quantizer, to_numpy, torch_tensor, wrong_torch

#: What the functions here document.
REFUSALS = {"documented": (ValueError, TypeError, NotImplementedError), "says": ""}


def call_by_name(case, path, arguments, *, also=(), changes=(), hostile=0.3):
    """Call by keyword, at times first with one wrong argument: an error must name an argument of the call, or `also`.

    What the first call returns, if anything, is not judged: some wrong values are right.
    """
    if case.chance(hostile):
        bad = wrong_torch(case) if case.chance(0.4) else wrong(case)
        with contextlib.suppress(DocumentedError):
            spoiled = {**arguments, case.choose(list(arguments)): bad}
            call_by_name(case, path, spoiled, also=also, changes=changes, hostile=0)
    try:
        return case.call(path, **arguments, changes=changes, **REFUSALS)
    except DocumentedError as refused:
        text = str(refused.__cause__)
        words = "|".join((*arguments, *also))
        require(re.search(rf"(?<![a-z])({words})(?![a-z])", text), f"{path}: the error names no argument", text)
        raise


def matrix(case, rows, columns):
    """A matrix of any content."""
    return torch_tensor(case, (rows, columns), requires_grad=0)


def require_same_values(one, other, what):
    """Two quantized tensors, or storages, of the same values."""
    require(same_bits(*(to_numpy(tensor.dequantize().float()) for tensor in (one, other))), f"{what} has other values")


def repeats(chosen):
    """Whether a quantizer makes the same of a tensor each time."""
    from fuser import Float8Quantizer, IdentityQuantizer

    if isinstance(chosen, IdentityQuantizer):
        return True
    return not isinstance(chosen, Float8Quantizer) and chosen.layout_scaling().random is None


# --- grouped tensors --------------------------------------------------------------------------------------------------


def grouped_arguments(case):
    """Arguments of `group_quantize`, and the rows of each member."""
    import torch

    unit, count = case.choose([32, 128]), case.below(4, 1)
    rows = [unit * case.below(3) for _ in range(count)]
    if case.chance(0.3):
        rows = [unit] * count
    x = matrix(case, sum(rows) + case.choose([0, 0, unit]), case.choose([32, 128]))
    arguments = {
        "tensor": x,
        "quantizer": quantizer(case, right=True)[1],
        "num_tensors": count,
        "first_dims": torch.tensor(rows, dtype=case.choose([torch.int64, torch.int64, torch.int64, torch.int32])),
    }
    if len(set(rows)) == 1 and x.shape[0] == sum(rows) and case.chance(0.5):
        arguments["first_dims"] = None
    return arguments, rows


@target(
    "grouped_tensors",
    [
        *(f"fuser.functional.{name}" for name in ("group_quantize", "group_dequantize", "bgrad_group_quantize")),
        "fuser.GroupedTensor",
        "fuser.quantization.GroupedTensorStorage",
    ],
    cases=250,
    seconds=60,
    needs=NEEDS,
)
def grouped_tensors(case):
    """Each member of a group is what its quantizer makes of its rows alone; the group made of its own fields, too."""
    import torch

    arguments, rows = grouped_arguments(case)
    own, x = arguments["quantizer"], arguments["tensor"]
    also = ("member", "rows", "shape", "K", "dtype", "usage", "copy")
    if case.chance(0.3):
        path = "fuser.functional.bgrad_group_quantize"
        group, sums = call_by_name(case, path, arguments, also=also, changes=("quantizer",))
        require(tuple(sums.shape) == (len(rows), x.shape[1]), "sums of another shape", sums.shape)
    else:
        arguments["noop_flag"] = None
        path = "fuser.functional.group_quantize"
        group = call_by_name(case, path, arguments, also=also, changes=("quantizer",))
    members, starts = group.split_into_quantized_tensors(), np.cumsum([0, *rows])
    require(len(members) == len(rows), "another number of members", len(members))
    if repeats(own):
        for member, start, height in zip(members, starts, rows, strict=False):
            require_same_values(member, own(x[start : start + height]), "a member")
    fields = {
        "data" if name == "rowwise_data" else name: getattr(group, name)
        for name in ("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax")
    }
    dims = {name: getattr(group, name) for name in ("first_dims", "last_dims", "tensor_offsets")}
    made = case.choose(["fuser.GroupedTensor", "fuser.quantization.GroupedTensorStorage"])
    own_fields = {
        "shape": group.logical_shape,
        "dtype": group.fake_dtype,
        "num_tensors": group.num_tensors,
        "quantizer": group.quantizer,
    }
    again = call_by_name(case, made, own_fields | fields | dims, hostile=0, changes=("quantizer",))
    for one, two in zip(again.split_into_quantized_tensors(), members, strict=True):
        require_same_values(one, two, "a member of the group made anew")
    values = call_by_name(
        case,
        "fuser.functional.group_dequantize",
        {"input": group, "otype": case.choose([torch.float32, torch.bfloat16])},
        also=("dtype",),
    )
    require(tuple(values.logical_shape) == tuple(group.logical_shape), "another logical shape", values.logical_shape)


@target("grouped_splits", ["fuser.functional.split_quantize"], cases=200, seconds=60, needs=NEEDS)
def grouped_splits(case):
    """Each run of rows is what its quantizer makes of it, or itself."""
    rows = [32 * case.below(3) for _ in range(case.below(4))]
    quantizers = [quantizer(case, right=True)[1] if case.chance(0.7) else None for _ in rows]
    sections = [case.choose([-1, 33, 10**6, 1.5, "a", None]) if case.chance(0.05) else size for size in rows]
    if case.chance(0.1):
        quantizers = [*quantizers, wrong(case)][case.below(2) :]
    x = matrix(case, sum(rows) + case.choose([0, 32]), case.choose([32, 64, 128]))
    given = {"tensor": x, "split_sections": sections, "quantizer_list": quantizers, "disable_bulk_allocation": False}
    also = ("split ", "quantizers", "shape")
    runs = call_by_name(case, "fuser.functional.split_quantize", given, also=also, changes=("quantizer_list",))
    require([run.shape[0] for run in runs] == sections, "other runs", [run.shape for run in runs])


@target(
    "grouped_offsets",
    [f"fuser.functional.{name}" for name in ("splits_to_offsets", "splits_to_offsets_multi")],
    cases=200,
    needs=NEEDS,
)
def grouped_offsets(case):
    """Offsets are NumPy's running sums."""
    import torch

    sizes = [case.choose([0, 1, 32, 1000]) for _ in range(case.below(5))]
    splits, width = torch.tensor(sizes, dtype=torch.int64), case.choose([1, 64, 0, -1])
    sums = np.cumsum([0, *sizes])
    if case.chance(0.5):
        given = {"first_dims": splits, "logical_last_dim": width}
        offsets = call_by_name(case, "fuser.functional.splits_to_offsets", given)
        require(offsets.tolist() == (sums * width).tolist(), "other offsets", offsets)
        return
    count = case.below(3)
    given = {
        "split_sizes": splits.to(case.choose([torch.int64, torch.int32])),
        "device": "cpu",
        "strides": [case.choose([1, 64]) for _ in range(count)],
        "include_leading_zero": [case.chance(0.5) for _ in range(count + case.chance(0.1))],
        "dtypes": [case.choose([torch.int32, torch.int64, torch.int64, torch.float32]) for _ in range(count)],
    }
    copied, results = call_by_name(case, "fuser.functional.splits_to_offsets_multi", given)
    require(copied.tolist() == sizes and copied.dtype is torch.int64, "other sizes", copied)
    for got, stride, leading, dtype in zip(
        results, given["strides"], given["include_leading_zero"], given["dtypes"], strict=True
    ):
        require(got.dtype is dtype and got.tolist() == (sums * stride)[not leading :].tolist(), "other offsets", got)


# --- hybrid and identity ----------------------------------------------------------------------------------------------

HYBRID = ("HybridQuantizer", "HybridQuantizedTensor", "HybridQuantizedTensorStorage")
IDENTITY = ("IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage")


@target("hybrid", [f"fuser.{name}" for name in HYBRID], cases=250, seconds=60, needs=NEEDS)
def hybrid(case):
    """Each direction of a hybrid tensor is what its quantizer makes; its class takes buffers, and TE's arguments."""
    pair = [case.call("fuser.IdentityQuantizer") if case.chance(0.2) else quantizer(case)[1] for _ in range(2)]
    given = {
        "rowwise_quantizer": pair[0],
        "columnwise_quantizer": pair[case.chance(0.95)],
        "columnwise_source": case.choose(["original", "rowwise_dequantized"]),
    }
    chosen = call_by_name(case, "fuser.HybridQuantizer", given, changes=tuple(given))
    require(repr(chosen.copy()) == repr(chosen), "a copy differs", chosen)
    x = matrix(case, case.choose([32, 64, 128]), case.choose([64, 128])) if case.chance(0.9) else wrong_torch(case)
    q = case.call("fuser.functional.quantize", x, chosen, changes=(1,), **ERRORS)
    of_rows = given["rowwise_quantizer"]
    if repeats(of_rows):
        require_same_values(q.rowwise_sub_storage, of_rows(x), "the rowwise part")
    made = case.choose(HYBRID[1:])
    again = case.call(f"fuser.{made}", q.buffers, quantizer=chosen, changes=("quantizer",), **ERRORS)
    require_same_values(again, q, "the tensor of the same buffers")
    parts = {
        "rowwise_storage": q.rowwise_sub_storage,
        "columnwise_storage": q.columnwise_sub_storage,
        "quantizer": chosen,
    }
    again = call_by_name(case, f"fuser.{made}", parts, changes=tuple(parts))
    require(tuple(again.shape if made == HYBRID[1] else again.size()) == tuple(x.shape), "another shape")


@target("identity", [f"fuser.{name}" for name in IDENTITY], cases=200, needs=NEEDS)
def identity(case):
    """An identity quantizer casts, and no more; its tensors are the values."""
    import torch

    given = {"dtype": case.choose([None, torch.float32, torch.bfloat16]), "rowwise": True, "columnwise": False}
    chosen = call_by_name(case, "fuser.IdentityQuantizer", given)
    x = matrix(case, case.choose([0, 3, 32]), case.choose([1, 64])) if case.chance(0.9) else wrong_torch(case)
    q = case.call("fuser.functional.quantize", x, chosen, changes=(1,), **ERRORS)
    if x.device.type == "meta" or x.is_sparse:
        return
    wanted = x.detach().to(chosen.dtype or x.dtype)
    require(
        q.dtype is wanted.dtype and torch.equal(*(torch.nan_to_num(t.float()) for t in (q.dequantize(), wanted))),
        "other values",
        q.dtype,
    )
    made = case.choose(IDENTITY[1:])
    again = case.call(f"fuser.{made}", q.buffers, quantizer=chosen, changes=("quantizer",), **ERRORS)
    require(tuple(again.size()) == tuple(x.shape), "another shape")
    fields = {"hp_data": wanted, "fake_dtype": case.choose([None, torch.float32]), "quantizer": chosen}
    again = call_by_name(case, f"fuser.{made}", fields, changes=("quantizer",))
    require(tuple(again.size()) == tuple(x.shape), "another shape")


# --- quantizers by role -----------------------------------------------------------------------------------------------

ZOO = (
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
)
BUILT_IN = ("current_scaling", "delayed_scaling", "float8_block_scaling", "high_precision", "mxfp8", "nvfp4")
FACTORIES = (
    *(f"fuser.custom_recipes.quantizer_factories.{name}_factory" for name in BUILT_IN),
    *(f"fuser.custom_recipes.quantizer_factory_zoo.{name}" for name in ZOO),
    *(f"fuser.custom_recipes.reference.{name}_factory" for name in ("current_scaling_ref", "nvfp4_ref_rht_2d")),
)


@target("role_factories", FACTORIES, cases=250, seconds=60, needs=NEEDS)
def role_factories(case):
    """A factory gives a new quantizer for each call, which quantizes; a recipe of it runs forward and backward."""
    import torch
    from harness import resolve

    from fuser import quantization

    warnings.filterwarnings("ignore", "nvfp4_row_scaled_fwd_mxfp8_bwd_factory makes row-scaled NVFP4 for")
    path = case.choose(FACTORIES)
    role = None
    if case.chance(0.9):
        kinds, tensors = (
            ["linear", "grouped_linear", "other", ""],
            ["input", "weight", "grad_output", "output", "x", ""],
        )
        role = case.call("fuser.quantization.QuantizerRole", case.choose(kinds), case.choose(tensors))
    one = call_by_name(case, path, {"role": role}, hostile=0.2)
    two = case.call(path, role)
    if isinstance(one, quantization.QuantizerRequest):
        require(one == two, "another request", one, two)
    else:
        require(one is not two and repr(one) == repr(two), "no new quantizer of the same settings", one, two)
        x = matrix(case, 64, 128)
        q = case.call("fuser.functional.quantize", x, one, changes=(1,), **ERRORS)
        require(tuple(q.dequantize().shape) == tuple(x.shape), "dequantizes to another shape")
    if case.chance(0.2):
        recipe = case.call("fuser.recipe.CustomRecipe", resolve(path), **ERRORS)
        model, x = case.call("fuser.ops.Linear", 64, 32), torch.randn(32, 64, requires_grad=True)
        with case.call("fuser.autocast", True, recipe=recipe, **ERRORS):
            y = model(x)
        y.sum().backward()
        require(tuple(y.shape) == (32, 32) and x.grad.shape == x.shape, "another shape", y.shape)


REFERENCE = (
    "CurrentScalingQuantizerRef",
    "CurrentScalingTensorRef",
    "NVFP4QuantizerRef",
    "NVFP4TensorRef",
)


@target(
    "reference_quantizers",
    [f"fuser.custom_recipes.reference.{name}" for name in REFERENCE],
    cases=200,
    seconds=60,
    needs=NEEDS,
)
def reference_quantizers(case):
    """TE's reference quantizers give refops' codes, shown without padding; their tensors are made of their buffers."""
    import torch

    from fuser.custom_recipes.reference import Fp4Formats

    base = "fuser.custom_recipes.reference"
    if case.chance(0.5):
        kind = "CurrentScaling"
        dtype = case.choose([torch.float8_e4m3fn, torch.float8_e5m2])
        given = {"dtype": dtype, "pow_2_scales": case.chance(0.5), "eps": case.choose([0.0, 1e-3])}
    else:
        kind = "NVFP4"
        given = {
            "dtype": Fp4Formats.E2M1,
            "quant_tile_shape": case.choose([(1, 16), (16, 16)]),
            "pow_2_scales": False,
            "row_scaled_nvfp4": case.chance(0.2),
            "nvfp4_use_4over6": case.chance(0.2),
            "nvfp4_4over6_err_mode": case.choose(["MAE", "MSE"]),
            "with_rht": case.chance(0.2),
        }
    given |= {"rowwise": case.chance(0.8), "columnwise": case.chance(0.5)}
    also = ("fp8_dtype", "force_pow_2_scales", "amax_epsilon", "rht", "two_d", "row_scaled", "four_over_six")
    chosen = call_by_name(case, f"{base}.{kind}QuantizerRef", given, also=also)
    require(repr(chosen.copy()) == repr(chosen), "a copy differs", chosen)
    x = matrix(case, case.choose([32, 64, 128]), case.choose([16, 64, 128]))
    q = case.call("fuser.functional.quantize", x, chosen, changes=(1,), **ERRORS)
    m, k = x.shape
    packed = 1 + (kind == "NVFP4")
    for data, sizes in ((q.data, (m, k // packed)), (q.data_t, (k, m // packed))):
        require(data is None or tuple(data.shape) == sizes, "codes of another shape", data, sizes)
    if kind == "CurrentScaling" and q.data is not None:
        scaling = refops.CurrentScaling(chosen._casting().layout_scaling().fmt, **current_options(chosen))
        require(
            same_bits(to_numpy(q.buffers.rowwise_data), refops.quantize(to_numpy(x), scaling).rowwise_data), "codes"
        )
    again = case.call(f"{base}.{kind}TensorRef", q.buffers, quantizer=chosen, changes=("quantizer",), **ERRORS)
    require_same_values(again, q, "the tensor of the same buffers")


def current_options(chosen):
    """Options of refops' current scaling, of a reference quantizer."""
    scaling = chosen._casting().layout_scaling()
    return {name: getattr(scaling, name) for name in scaling.__dataclass_fields__ if name != "fmt"}


SMALL = ("cast_from_fp4x2", "cast_to_fp4x2", "get_wgrad_sign_vector", "roundup_div")


@target("reference_functions", [f"fuser.custom_recipes.reference.{name}" for name in SMALL], cases=200, needs=NEEDS)
def reference_functions(case):
    """Casts to E2M1 and back are refops'; signs are 1 and -1; the quotient is math's."""
    import torch

    name, base = case.choose(SMALL), "fuser.custom_recipes.reference"
    if name == "get_wgrad_sign_vector":
        signs = case.call(f"{base}.{name}")
        require(signs.shape == (16,) and set(signs.tolist()) == {1.0, -1.0}, "other signs", signs)
    elif name == "roundup_div":
        x, y = case.choose([0, 1, 15, 16, 10**9]), case.choose([1, 16, 7, 0])
        require(call_by_name(case, f"{base}.{name}", {"x": x, "y": y}) == math.ceil(x / y), "another quotient", x, y)
    else:
        x = matrix(case, case.choose([0, 1, 16]), case.choose([2, 32, 33]))
        codes = call_by_name(case, f"{base}.cast_to_fp4x2", {"x": x})
        require(same_bits(to_numpy(codes), refops.pack_fp4(refops.encode(to_numpy(x.float()), refops.E2M1))), "codes")
        given = {"x": codes, "dq_dtype": case.choose([torch.float32, torch.bfloat16, torch.float16])}
        back = call_by_name(case, f"{base}.cast_from_fp4x2", given)
        require(back.dtype is given["dq_dtype"] and back.shape == x.shape, "another shape or dtype", back.shape)


# --- master weights ---------------------------------------------------------------------------------------------------


def weight_quantizer(case):
    """A quantizer for weights; most formats can be written in ranges."""
    from fuser import DType

    fp8 = {"fp8_dtype": DType.kFloat8E4M3}
    name, options = case.choose(
        [
            ("Float8CurrentScalingQuantizer", fp8),
            ("Float8BlockQuantizer", {**fp8, "block_scaling_dim": 2}),
            ("MXFP8Quantizer", fp8),
            ("NVFP4Quantizer", {"with_2d_quantization": True}),
            ("IdentityQuantizer", {}),
            (None, None),
        ]
    )
    return quantizer(case, right=True)[1] if name is None else case.call(f"fuser.{name}", **options)


@target(
    "master_weights",
    ["fuser.quantize_master_weights", "fuser.post_all_gather_processing", "fuser.quantization.replace_raw_data"],
    cases=250,
    seconds=60,
    needs=NEEDS,
)
def master_weights(case):
    """A whole master weight gives the quantizer's own codes; part of one leaves the rest; memory can be replaced."""
    import torch

    group_of_one()
    quantizers = [weight_quantizer(case) for _ in range(case.below(3, 1))]
    originals = [matrix(case, 128, case.choose([64, 128])) for _ in quantizers]
    weights = [chosen(x) for chosen, x in zip(quantizers, originals, strict=True)]
    masters = [torch.randn(weight.shape) for weight in weights]
    whole = case.chance(0.7)
    starts = [0 if whole else case.choose([0, 64, 4096, -1, 10**9]) for _ in weights]
    if not whole:
        masters = [None if case.chance(0.2) else master.reshape(-1)[: case.choose([64, 1000])] for master in masters]
    given = {
        "model_weights": weights,
        "master_weights": masters,
        "start_offsets": starts,
        "group": None,
        "manual_post_all_gather_processing": case.chance(0.5),
    }
    also = ("weights?", "shard", "ranges")
    call_by_name(case, "fuser.quantize_master_weights", given, also=also, changes=("model_weights",))
    call_by_name(
        case, "fuser.post_all_gather_processing", {"model_weights": weights}, also=also, changes=("model_weights",)
    )
    for weight, chosen, master in zip(weights, quantizers, masters, strict=True):
        if whole and repeats(chosen):
            require_same_values(weight, chosen(master.to(weight.dtype)), "the weight")
    weight = weights[0]
    codes = getattr(weight.buffers, "hp_data", None)
    codes = getattr(weight.buffers, "rowwise_data", None) if codes is None else codes
    if codes is not None:
        values = to_numpy(weight.dequantize())
        memory = torch.empty(case.choose([codes.shape, codes.shape, (3,)]), dtype=codes.dtype)
        given = {"tensor": weight, "new_raw_data": memory}
        call_by_name(case, "fuser.quantization.replace_raw_data", given, changes=tuple(given))
        require(same_bits(to_numpy(weight.dequantize()), values), "other values in the new memory")


# --- the order of gated halves ----------------------------------------------------------------------------------------


@target(
    "interleaving",
    [
        *(f"fuser.{name}_glu_tensor" for name in ("interleave", "deinterleave")),
        *(f"fuser.dispatch.{name}" for name in ("interleave", "deinterleave")),
    ],
    cases=200,
    needs=NEEDS,
)
def interleaving(case):
    """NumPy's blocks in turns, and back again."""
    size, rows = case.choose([1, 2, 16, 32, 0, -1]), case.choose([0, 64, 128, 33])
    x = torch_tensor(case, case.choose([(rows,), (rows, 8), (rows, 2, 3)]), case.choose(FLOAT_DTYPES), requires_grad=0)
    if case.chance(0.5):
        names, given = (
            [f"fuser.{name}_glu_tensor" for name in ("interleave", "deinterleave")],
            {"interleave_size": size},
        )
        axis = 0
    else:
        axis = case.choose([0, 0, -1, -1, x.ndim - 1, 5, -9])
        names, given = ["fuser.dispatch.interleave", "fuser.dispatch.deinterleave"], {"size": size, "dim": axis}
    y = call_by_name(case, names[0], {"tensor": x, **given})
    array = np.moveaxis(to_numpy(x), axis, 0)
    halves = array.reshape(2, len(array) // (2 * size), size, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
    require(same_bits(to_numpy(y), np.moveaxis(halves, 0, axis)), "another order")
    require(
        same_bits(to_numpy(call_by_name(case, names[1], {"tensor": y, **given}, hostile=0)), to_numpy(x)), "not undone"
    )
