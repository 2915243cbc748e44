"""What converted modules become: classes of torch whose forward runs operations, with the module's parameters."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize

from fuser import ops
from fuser.common import in_autocast
from fuser.dispatch import computes_in
from fuser.fuser import OperationFuser
from fuser.op import BasicOperation
from fuser.pipeline import padding
from fuser.quantization.contexts import autocast, get_align_size_for_quantization, quantized_model_init
from fuser.quantization.quantizers import is_replaying, notes_scales
from fuser.quantization.state import FP8GlobalStateManager
from fuser.recipe import Recipe
from fuser.sequential import HoldsFusers
from fuser.tracing import (
    OLD_TORCH,
    NotScriptable,
    WhenTraced,
    leave_for,
    outside_compile,
    refuse_proxy,
    refuse_strict_export,
)
from refops.arguments import shown

_COMPUTED = (
    "operations of fuser can't be part of a graph: a weight or bias is no plain parameter, but a tensor that "
    "a parametrization, a weight norm, FSDP or functional_call put in its place, or the transposed one of a Conv1D"
)
#: How names end of what `torch.nn.utils` computes a weight from: prune, weight_norm and spectral_norm.
_COMPUTED_FROM = re.compile("_(orig|mask|g|v|u)$")
_REPLACED = (
    "operations of fuser can't be part of a graph: a parameter was replaced in the compiled function, "
    "as by functional_call"
)


class Notice:
    """Whether a module of those that one call of `convert` converted has warned of scales that nothing has set."""

    given = False


class Converted(HoldsFusers, NotScriptable, torch.nn.Module):
    """Mixin of the classes that modules get: their forward runs operations, which read the module's parameters."""

    recipe: Recipe | None
    pad: bool
    _name: str
    _pipeline: OperationFuser | None
    _ready: WhenTraced
    _notice: Notice
    _made_for: tuple[Any, ...]
    _make_operations: Callable[..., list[BasicOperation]]

    def extra_repr(self) -> str:
        """torch's text, the recipe's class, and the card where the recipe names one."""
        recipe = self.recipe and type(self.recipe).__name__
        card = f"products={self.recipe.products!r}" if self.recipe and self.recipe.products else ""
        return ", ".join(filter(None, [super().extra_repr(), f"recipe={recipe}", card]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Like the forward of torch's module, under the module's recipe or that of the `autocast` around the call."""
        refuse_proxy(input, self)
        if not in_graph():
            return outside_compile(run_eagerly, self, input)
        reason = self._why_outside()
        return outside_compile(self._run, input, reason=reason) if reason else self._run(input)

    def _run(self, input: torch.Tensor) -> torch.Tensor:
        if not self.takes(input):
            return super().forward(input)
        with ready([self], input):
            return self._call_operations(input)

    def _call_operations(self, input: torch.Tensor) -> torch.Tensor:
        return self._pipeline_for(input)(input)

    def takes(self, input: torch.Tensor) -> bool:
        """Whether operations compute this input; torch computes what they can't: shapes without values and float64."""
        return isinstance(input, torch.Tensor) and not input.is_meta and computes_in(input.dtype)

    def _has_values(self) -> bool:
        """Whether no parameter is on the meta device. Computed ones are not looked at: each access may differ."""
        parameters = self.parameters() if self._modules else self._parameters.values()
        return not any([value is not None and value.is_meta for value in parameters])

    def pipeline(self) -> OperationFuser:
        """The operations that stand for this module, with the parameters that it has now."""
        present = self._present()
        made_for = ([(name, value.shape) for name, value in present.items()], self._settings(present))
        if self._pipeline is None or self._made_for != made_for:
            self._pipeline = OperationFuser(of_module(self._make_operations(present), self._name))
            self._made_for = made_for
        for basic in self._pipeline._basic_ops:
            for name in basic._parameters.keys() & present.keys():
                basic._parameters[name] = present[name]
        return self._pipeline

    def _present(self) -> dict[str, Any]:
        """The weight and bias that operations compute with now."""
        return {name: value for name in ("weight", "bias") if (value := getattr(self, name, None)) is not None}

    def _pipeline_for(self, input: torch.Tensor) -> OperationFuser:
        """`pipeline()`; while torch.compile traces, the one that was made before. See `refuse_dtypes`."""
        pipeline: Any = self._pipeline if in_graph() else self.pipeline()
        refuse_dtypes(pipeline, input)
        return pipeline

    def _prepare(self) -> str:
        """Make the pipeline for a compiled call. Returns why there can't be one, or ""."""
        leave_for(_REPLACED)
        warn_of_first_scales([self])
        values = [value for op in self.pipeline()._basic_ops for value in op._parameters.values()]
        plain = all(type(value) in (torch.nn.Parameter, type(None)) for value in values)
        return "" if plain else leave_for(_COMPUTED)

    def _why_outside(self) -> str:
        """Why a call that is traced can't be part of the graph; "" if it can."""
        reason = self._ready.value
        if reason:
            return reason
        for op in self._pipeline._basic_ops:  # type: ignore[union-attr]
            for name, value in op._parameters.items():
                present = getattr(self, name, None)
                if present is not None and present is not value:
                    return _REPLACED
        return ""

    def _settings(self, present: dict[str, torch.Tensor]) -> Any:
        """The other arguments of its operations; `present`: its weight and bias."""
        return ()

    def fusers(self) -> list[tuple[OperationFuser, Recipe | None]]:
        """The pipeline of its operations, with its recipe."""
        return [(self.pipeline(), self.recipe)]

    def quantizing(self) -> contextlib.AbstractContextManager[Any]:
        """The `autocast` in which this module computes: the caller's, if there is one, else its own."""
        if FP8GlobalStateManager._of_thread.state.autocast_depth:
            return contextlib.nullcontext()
        if not torch.compiler.is_dynamo_compiling():
            self._refuse_computing_again()
        return autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def _refuse_computing_again(self) -> None:
        """`RuntimeError` if autograd calls a module whose quantization is not that of its last call.

        Calls of `fuser.checkpoint`, and in an `autocast`, have that.
        """
        if torch._C._current_graph_task_id() == -1 or is_replaying() or self._pipeline is None:
            return
        key: Any = self._pipeline._basic_ops[0]._recipe_key
        before = None if key is None else key[0]
        present = None if self.recipe is None else repr(self.recipe)
        if before == present and (self.recipe is None or not self.recipe.delayed()):
            return
        why = "with scales that were updated since" if before == present else "under another recipe than"
        raise RuntimeError(
            f"{self._name or type(self).__name__} is computed again in the backward pass, {why} its forward pass: use "
            "fuser.checkpoint instead of torch.utils.checkpoint.checkpoint, with any use_reentrant"
        )


def ready(run: Sequence[Converted], input: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The `autocast` in which modules of one recipe compute an input in a pipeline; what stands against it is said.

    What a weight's dtype says of the input's is left to `refuse_dtypes`, which asks the pipeline.
    """
    if not in_graph():
        _refuse_distributed(run, input)
        warn_of_first_scales(run)
    return run[0].quantizing()


def _refuse_distributed(modules: Iterable[Converted], input: torch.Tensor) -> None:
    """`RuntimeError` for a parameter or an input that is a DTensor: operations would compute with this rank's part."""
    given = [("input", input), *itertools.chain.from_iterable(module._parameters.items() for module in modules)]
    for name, value in given:
        if is_a(value, "torch.distributed.tensor", "DTensor"):
            raise RuntimeError(
                f"operations of a converted model take plain tensors; got a DTensor as {name}, as parallelize_module "
                "makes them for tensor parallelism. Shard with fully_shard or DistributedDataParallel, write the layer "
                "as fuser.ops.Linear(tensor_parallel_mode=...), or leave it to torch by the filter of convert"
            )


def refuse_dtypes(pipeline: OperationFuser, input: torch.Tensor) -> None:
    """`ValueError` for a weight of a dtype that operations don't compute in; `RuntimeError` for an input of another
    dtype than a weight that multiplies, as torch's outside of `torch.autocast`."""
    if in_autocast(input):
        return
    operations: list[Any] = pipeline._basic_ops
    for op in operations:
        weight = op._parameters.get("weight") if op.num_quantizers("forward") else None
        if weight is None:
            continue
        which = f"the weight of {op.name!r}" if op.name else "the weight"
        if not computes_in(weight.dtype):
            raise ValueError(
                "model must have weights of float32, float16 or bfloat16, or of float64 under "
                f"fuser.backend('float64'), where it was converted; {which} is of {weight.dtype}. Give it one of these "
                "dtypes, or make it torch's again: fuser.convert(model, None)"
            )
        if weight.dtype != input.dtype:
            raise RuntimeError(
                f"input must have the dtype of {which}, {weight.dtype}, as for torch's layer outside of "
                f"torch.autocast; got {input.dtype}"
            )


def is_a(value: Any, home: str, name: str) -> bool:
    """Whether a value is of class `name` of module `home`; False before that is imported."""
    return isinstance(value, getattr(sys.modules.get(home), name, ()))


def warn_of_first_scales(modules: Iterable[Converted]) -> None:
    """Warn once if a forward pass without gradients, of modules by their own recipes, casts with scales of 1.

    Such a pass updates no scales, so that those after it do the same. Not in `fuser.checkpoint`, whose reentrant kind
    runs without gradients first.
    """
    if torch.is_grad_enabled() or notes_scales() or FP8GlobalStateManager._of_thread.state.autocast_depth:
        return
    if FP8GlobalStateManager.fp8_graph_capturing():
        return
    for module in modules:
        is_delayed = isinstance(module, ConvertedProduct) and module.recipe is not None and module.recipe.delayed()
        if not is_delayed or module._notice.given:
            continue
        operations: list[Any] = [] if module._pipeline is None else module._pipeline._basic_ops
        if not operations or operations[0]._has_first_scales():
            module._notice.given = True
            warnings.warn(
                f"{module._name or type(module).__name__}: delayed scaling has seen no step, so its scales are still "
                "1, and small values become zero. A forward pass without gradients does not change that. First call "
                "the model with gradients enabled, as many times as it has linear layers in a row, or load scales: "
                "fuser.load_scaling_state, or a pickled model (the state dict has none)",
                UserWarning,
                stacklevel=2,
            )


def run_eagerly(module: Any, input: Any) -> Any:
    """Call a module outside of a graph. Errors about input that `convert` can fix say how."""
    if isinstance(input, torch.Tensor) and input.is_nested:
        raise RuntimeError(
            f"input of {type(module).__name__} must be no nested tensor: those come from the fast path of a "
            "TransformerEncoder in eval mode, which convert switches off where it gets the encoder, not a layer of it"
        )
    try:
        return module._run(input)
    except ValueError as error:
        if "M % " in str(error) and "pad=True" not in str(error):
            error.args = (f"{error}; fuser.convert(..., pad=True) pads M of linear layers", *error.args[1:])
        raise


def in_graph() -> bool:
    """Whether torch.compile traces this call, and can have pipelines as operators of its graph."""
    if not torch.compiler.is_dynamo_compiling() or OLD_TORCH:
        return False
    refuse_strict_export()
    return True


class ConvertedProduct(Converted):
    """What converted layers share that multiply by a weight and may add a bias."""

    def _make_operations(self, present: dict[str, torch.Tensor]) -> list[BasicOperation]:
        return linear_operations(present["weight"].shape, "bias" in present)

    def takes(self, input: torch.Tensor) -> bool:
        """An input with a dtype that operations don't take is an error: nothing stays in high precision unnoticed."""
        return isinstance(input, torch.Tensor) and not input.is_meta and self._has_values()

    def rows_short_of_blocks(self, input: torch.Tensor) -> int:
        """How many rows of zeros `pad` appends to an input under the recipe in force; 0 without one."""
        if not self.pad or not FP8GlobalStateManager.is_fp8_enabled():
            return 0
        return -math.prod(input.shape[:-1]) % get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())

    def _call_operations(self, input: torch.Tensor) -> torch.Tensor:
        short, pipeline = self.rows_short_of_blocks(input), self._pipeline_for(input)
        if not short:
            return pipeline(input)
        rows = input.reshape(-1, input.shape[-1])
        with contextlib.nullcontext() if in_graph() else padding(rows.shape[0]):
            y = pipeline(torch.nn.functional.pad(rows, (0, 0, 0, short)))
        return y[: rows.shape[0]].view(*input.shape[:-1], y.shape[-1])


class ConvertedLinear(ConvertedProduct, torch.nn.Linear):
    """`torch.nn.Linear` as `ops.BasicLinear` and `ops.Bias`; see `convert`."""


class ConvertedConv1D(ConvertedProduct):
    """GPT-2's `Conv1D`, of `transformers` or alike, as `ops.BasicLinear` and `ops.Bias`; see `convert`.

    Its weight stays (in_features, out_features): operations see it transposed. torch.compile leaves a call as it is,
    between the compiled parts.
    """

    def extra_repr(self) -> str:
        """nf and nx, as GPT-2's class prints them, then recipe and card."""
        module: Any = self
        nx, nf = module.weight.shape
        return f"nf={nf}, nx={nx}, {super().extra_repr()}"

    __repr__ = torch.nn.Module.__repr__

    def _present(self) -> dict[str, Any]:
        present = super()._present()
        return {**present, "weight": present["weight"].t()}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles name the original class; loading makes the converted one again."""
        made: Any = super().__reduce_ex__(protocol)
        _, _, *state = made
        return _new_conv1d, (torch_class(self),), *state


def _new_conv1d(cls: type) -> Converted:
    made: Any = object.__new__(_conversion_of_conv1d(cls))
    return made


def _conversion_of_conv1d(cls: type) -> type[Converted]:
    if cls not in CONVERTED:
        CONVERTED[cls] = type("ConvertedConv1D", (ConvertedConv1D, cls), {})
    return CONVERTED[cls]


def _is_conv1d(module: torch.nn.Module) -> bool:
    """Whether a module, of a class named `Conv1D`, computes x @ weight + bias with the attributes that it has now.

    One that holds tensors or modules beside weight and bias is none: it may use them once they have other values.
    """
    cls: Any = torch_class(module)
    children: dict[str, Any] = dict(module._modules)
    tensors: dict[str, Any] = {**module._parameters, **module._buffers, **children.pop("parametrizations", {})}
    operands = {_COMPUTED_FROM.sub("", name) for name, value in tensors.items() if value is not None}
    if children or operands not in ({"weight"}, {"weight", "bias"}):
        return False
    if any(value.ndim != 2 for name, value in module._parameters.items() if value is not None and name != "bias"):
        return False
    count = functools.partial(torch.arange, dtype=torch.float64, device="cpu")  # whatever autocast and device there are
    nx, nf = 3, 5
    weight, bias, x = count(nx * nf).view(nx, nf), count(nf), count(8 * nx).view(2, 4, nx)
    wanted = x @ weight + bias if "bias" in operands else x @ weight
    own = {name: value for name, value in vars(module).items() if name not in ("weight", "bias", "forward")}
    own |= {"nx": nx, "nf": nf, "_buffers": {}, "_modules": {}, "_parameters": {"weight": torch.nn.Parameter(weight)}}
    own["_parameters"]["bias"] = torch.nn.Parameter(bias) if "bias" in operands else None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            probe: Any = object.__new__(cls)
            probe.__dict__.update(own)
            return all(torch.equal(cls.forward(probe.train(training), x), wanted) for training in (True, False))
    except Exception:  # of a forward that needs more than these, or other arguments
        return False


class _ConvertedNorm(Converted):
    def _settings(self, present: dict[str, torch.Tensor]) -> Any:
        module: Any = self
        return module.eps, tuple(module.normalized_shape), present["weight"].dtype, present["weight"].device

    def _make_operations(self, present: dict[str, torch.Tensor]) -> list[BasicOperation]:
        module: Any = self
        op = getattr(ops, torch_class(module).__name__)(
            module.normalized_shape,
            eps=torch.finfo(torch.float32).eps if module.eps is None else module.eps,
            device=present["weight"].device,
            dtype=present["weight"].dtype,
        )
        return [op.requires_grad_(False)]  # a bias that the module does not have stays zero

    def takes(self, input: torch.Tensor) -> bool:
        """Not in 16 bits without eps: the default that torch adds then has changed between versions."""
        module: Any = self
        return super().takes(input) and self._has_values() and (module.eps is not None or input.itemsize == 4)


class ConvertedLayerNorm(_ConvertedNorm, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` as `ops.LayerNorm`; see `convert`."""


class ConvertedRMSNorm(_ConvertedNorm, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` as `ops.RMSNorm`; see `convert`."""


class _ConvertedActivation(Converted):
    def _make_operations(self, present: dict[str, torch.Tensor]) -> list[BasicOperation]:
        return [getattr(ops, torch_class(self).__name__)()]


class ConvertedGELU(_ConvertedActivation, torch.nn.GELU):
    """`torch.nn.GELU(approximate="tanh")` as `ops.GELU`; see `convert`."""


class ConvertedReLU(_ConvertedActivation, torch.nn.ReLU):
    """`torch.nn.ReLU` as `ops.ReLU`; see `convert`."""


class ConvertedSiLU(_ConvertedActivation, torch.nn.SiLU):
    """`torch.nn.SiLU` as `ops.SiLU`; see `convert`."""


def require_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {shown(model)}")


#: Class of torch -> what its modules become.
CONVERTED: dict[type, type[Converted]] = {
    cls.__bases__[1]: cls
    for cls in (ConvertedLinear, ConvertedLayerNorm, ConvertedRMSNorm, ConvertedGELU, ConvertedReLU, ConvertedSiLU)
}


def conversion_of(module: torch.nn.Module) -> type[Converted] | None:
    """What a module becomes; None: it stays what it is."""
    cls = torch_class(module)
    if cls.__name__ == "Conv1D":
        return _conversion_of_conv1d(cls) if _is_conv1d(module) else None
    return CONVERTED.get(cls)


def torch_class(module: torch.nn.Module) -> type:
    """The class of a module without its conversion and parametrizations."""
    cls = type(module)
    if isinstance(module, Converted):
        return next(base for base in cls.__mro__ if base in CONVERTED)
    return cls.__bases__[0] if parametrize.is_parametrized(module) else cls


def linear_operations(weight: Any, with_bias: bool) -> list[BasicOperation]:
    """The operations for a weight of a shape."""
    out_features, in_features = weight
    # On meta: the parameters are the module's, whose values and random numbers are drawn already.
    with quantized_model_init(enabled=False):
        made: list[BasicOperation] = [ops.BasicLinear(in_features, out_features, device="meta")]
    return [*made, ops.Bias(out_features, device="meta")] if with_bias else made


def of_module(operations: list[BasicOperation], name: str) -> list[BasicOperation]:
    """Operations with the name that a CustomRecipe's roles show, whose scales keep still while others take their turn.

    In `torch.autocast` norms and activations have the dtypes of torch's.

    Each converted module quantizes in a context of its own, and leaving that updates what is registered anywhere.
    """
    for op in operations:
        op.__dict__["name"] = name
        op._keeps_unseen_scales = op._dtypes_of_torch = True
    return operations
