"""One training step of a model: what `compare` runs, and what it keeps of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fuser.common import copied, name_of
from fuser.comparison.findings import Coverage
from fuser.conversion import Plan, carried_out
from fuser.conversion.modules import CONVERTED, Converted
from fuser.conversion.reasons import FP8_QUANTIZERS, own_matrices, refused_on_gpus
from fuser.conversion.rules import Rule
from fuser.op import BasicOperation, FusibleOperation
from fuser.pipeline import ForwardStep, forward_observers, rows_before_padding
from fuser.quantization.contexts import autocast
from fuser.quantization.quantizers import is_computing_again
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.storage import QuantizedTensorStorage
from fuser.recipe import Recipe
from fuser.recording import (
    QuantizationRecord,
    layer_of,
    operations_of,
    quantizers_of,
    quantizing_layers,
    statistics,
)
from refops.arguments import say_who, shown

#: A delayed scale has settled if its relative change from one step to the next is at most this.
MOST_CHANGE = 0.1


@dataclass
class Calls:
    """Tensors of layers, by name, one for each call; without rows that `pad` appended.

    Attributes:
        outputs: of the layers whose outputs are seen.
        inputs: of the layers that do not take what another one in the same pipeline returns.
        first: every layer that was called -> the first one in its pipeline, of which `inputs` has the rows.
    """

    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What is compared of a step.

    Attributes:
        output: the tensors of the model's output, without its loss.
        calls: of its layers.
        gradients: of its parameters, by name.
        unmeasured, idle, warmed_up, left, coverage, refused_on_gpus: see `RecipeComparison`.
    """

    loss: float
    output: list[torch.Tensor]
    calls: Calls
    gradients: dict[str, torch.Tensor]
    records: list[QuantizationRecord]
    unmeasured: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    warmed_up: bool = True
    left: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    refused_on_gpus: list[str] = field(default_factory=list)


def step_under(name: str, model: torch.nn.Module, rule: Rule, plan: Plan, batch: Any, loss: Any, pad: bool) -> Outcome:
    """Run a step of a copy of a model, converted as planned. An error of plain text begins with the rule's name."""
    duplicate = carried_out(model, plan, pad=pad, inplace=False)
    try:
        step = run_step(duplicate, rule, batch, loss)
    except Exception as error:
        if [str(error)] == list(error.args):
            say_who(error, f"Under {name}")
        raise
    left, idle = plan.left, step.idle
    if not isinstance(rule, Recipe):  # no `autocast` is around the step (`_quantizing`)
        operations = _layers_of_operations(duplicate)
        left, idle = [*left, *plan.left_to_autocast], [layer for layer in idle if layer not in operations]
    refused = _refused_on_gpus(duplicate, step.records, pad)
    return replace(step, left=left, idle=idle, coverage=_coverage(duplicate, step.idle), refused_on_gpus=refused)


def _refused_on_gpus(model: torch.nn.Module, records: Sequence[QuantizationRecord], pad: bool) -> list[str]:
    """`refused_on_gpus` of what was quantized in a step."""
    names = {
        name_of(layer, of) for quantizer, layer, of in quantizers_of(model) if isinstance(quantizer, FP8_QUANTIZERS)
    }
    operands = [(record.layer, record.tensor, record.shape) for record in records if record.name in names]
    return refused_on_gpus(operands, pad=pad)


def run_step(model: torch.nn.Module, rule: Rule, batch: Any, loss: Any) -> Outcome:
    """Run a step of a model that may be changed, outside of the caller's `autocast`.

    Where it turns out to have delayed scales, which start from 1, the step is run again until they settle, and the
    last one counts. One more step uncovers the gradients of one more layer at worst, so the steps are at most two more
    than there are states, of which each layer has two.
    """
    devices = {tensor.device for tensor in [*model.parameters(), *model.buffers()] if tensor.device.type == "cuda"}
    put_back = _saved_buffers(model)
    with FP8GlobalStateManager.set_aside(), torch.enable_grad():
        found = _run_once(model, rule, batch, loss, devices)
        states = [s for forward in (True, False) for s in FP8GlobalStateManager.registered_states(forward)]
        found.warmed_up = not states
        for state in states:
            state.warned_of_jump = True  # steps that are run again
        for _ in range(len(states) + 2):
            if found.warmed_up:
                break
            used = [state.scale.clone() for state in states]
            put_back()
            model.zero_grad()
            found = _run_once(model, rule, batch, loss, devices)
            found.warmed_up = all(
                torch.allclose(state.scale, before, rtol=MOST_CHANGE, atol=0, equal_nan=True)
                for state, before in zip(states, used, strict=True)
            )
    return found


def _run_once(model: torch.nn.Module, rule: Rule, batch: Any, loss: Any, devices: set[torch.device]) -> Outcome:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        recorder = None
        if any(op.num_quantizers("forward") for _, op in operations_of(model)):
            recorder = stack.enter_context(statistics(model))
        calls = stack.enter_context(_listening(model))
        with _quantizing(rule):
            result = _call(model, batch)
        value = _loss_of(result, loss)
        if value.requires_grad:
            value.backward()
    output = [t.detach() for t in _tensors(result) if t is not value and t.numel() > 1]
    calls.outputs[""] = output
    return Outcome(
        loss=value.item(),
        output=output,
        calls=calls,
        gradients={name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        records=[] if recorder is None else recorder.records,
        unmeasured=[] if recorder is None else recorder.unmeasured,
        idle=[] if recorder is None else recorder.idle,
    )


def _saved_buffers(model: torch.nn.Module) -> Callable[[], None]:
    """Remember a model's buffers; the result restores their names, shapes and values."""
    present = {module: dict(module._buffers) for module in model.modules()}
    values = {buffer: buffer.detach().clone() for buffer in model.buffers()}

    def put_back() -> None:
        for module, buffers in present.items():
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values.items():
                buffer.resize_(value.shape).copy_(value)

    return put_back


def _quantizing(rule: Rule) -> contextlib.AbstractContextManager[Any]:
    """Put the recipe in force around the model if it is a single one: operations of `fuser.ops` in it quantize, too."""
    if rule is None:
        return autocast(enabled=False)
    return autocast(recipe=rule) if isinstance(rule, Recipe) else contextlib.nullcontext()


def _call(model: torch.nn.Module, batch: Any) -> Any:
    batch = copied(dict(batch) if isinstance(batch, Mapping) else batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _tensors(result: Any) -> list[torch.Tensor]:
    """The floating-point tensors in an output: in sequences, mappings and dataclasses."""
    found = []
    for leaf in tree_leaves(_fields_of(result)):
        if isinstance(leaf, torch.Tensor):
            found += [leaf] if leaf.is_floating_point() else []
        elif _fields_of(leaf) is not leaf:
            found += _tensors(leaf)
    return found


def _fields_of(result: Any) -> Any:
    """A mapping, dataclass or namespace as a dict; anything else as it is."""
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, SimpleNamespace):
        return dict(vars(result))
    if is_dataclass(result) and not isinstance(result, type):
        return {entry.name: getattr(result, entry.name) for entry in fields(result)}
    return result


def _loss_of(result: Any, loss: Any) -> torch.Tensor:
    own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is not None:
        value, rule = loss(result), "loss must return a scalar tensor"
    elif own is not None:
        value, rule = own, "loss must be given for an output whose own loss is no scalar tensor"
    else:
        return _made_loss(result)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ValueError(f"{rule}; got {shown(value)}")
    return value


def _made_loss(result: Any) -> torch.Tensor:
    """The only number in the output, or the randomly weighted sum of all of its numbers."""
    tensors = _tensors(result)
    if not tensors:
        raise ValueError(
            "loss must be given for an output in which no floating-point tensors are found, in lists, mappings and "
            f"dataclasses; got one of type {type(result).__name__}"
        )
    if len(tensors) == 1 and tensors[0].numel() == 1:
        return tensors[0]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=generator).to(t.device) for t in tensors]
    sums = [(t.float() * w).sum() / max(1, t.numel()) ** 0.5 for t, w in zip(tensors, weights, strict=True)]
    return torch.stack([one.to(sums[0].device) for one in sums]).sum()


@contextlib.contextmanager
def _listening(model: torch.nn.Module) -> Iterator[Calls]:
    """Collect what layers take and return: of operations from their pipelines, which hooks would split.

    Calls that a backward pass makes again, under a checkpoint, are left out.
    """
    calls = Calls()
    operations = list(operations_of(model))
    layer_with = {op: layer for layer, op in operations}
    ending = set(dict(operations).values())

    def observe(fuser: Any, step: ForwardStep) -> None:
        if is_computing_again():
            return
        first, last = fuser._basic_ops[0], fuser._basic_ops[step.basic_op_indices[-1]]
        if first in layer_with and step.basic_op_indices[0] == 0:
            calls.inputs.setdefault(layer_with[first], []).append(_own_rows(step.input))
        for index in step.basic_op_indices:
            layer = layer_with.get(fuser._basic_ops[index])
            if layer is not None:
                calls.first[layer] = layer_with.get(first, layer)
        if last in ending:
            calls.outputs.setdefault(layer_with[last], []).append(_own_rows(step.output))

    handles = []
    for name, module in model.named_modules():
        is_layer = isinstance(module, tuple(CONVERTED)) or any(True for _ in module.parameters(False))
        runs_operations = isinstance(module, (FusibleOperation, Converted))
        if name and is_layer and not runs_operations and layer_of(name) == name:

            def keep(_: Any, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                if is_computing_again():
                    return
                calls.first[name] = name
                for found, tensors in ((calls.inputs, [args, kwargs]), (calls.outputs, result)):
                    found.setdefault(name, []).extend(tensor.detach() for tensor in _tensors(tensors)[:1])

            handles.append(module.register_forward_hook(keep, with_kwargs=True))
    forward_observers.append(observe)
    try:
        yield calls
    finally:
        forward_observers.remove(observe)
        for handle in handles:
            handle.remove()


def _own_rows(tensor: Any) -> torch.Tensor:
    """A tensor of a pipeline without the rows that `pad` appended."""
    plain = (tensor.dequantize() if isinstance(tensor, QuantizedTensorStorage) else tensor).detach()
    rows = rows_before_padding.get()
    return plain if rows is None else plain[:rows]


def _coverage(model: torch.nn.Module, idle: Sequence[str]) -> Coverage:
    """The coverage of a model in a step in which nothing was quantized of the layers `idle`."""
    matrices: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        is_operation = isinstance(module, BasicOperation) and module.num_quantizers("forward")
        if own := [*(module.parameters() if is_operation else own_matrices(module).values())]:
            matrices.setdefault(layer_of(name), []).extend(own)
    quantized = set(quantizing_layers(model)) & matrices.keys() - set(idle)
    every = sum(parameter.numel() for parameter in model.parameters())
    held = {parameter for layer in quantized for parameter in matrices[layer]}
    share = sum(one.numel() for one in held) / every if every else 0.0
    return Coverage(len(quantized), len(matrices), share, len(quantized & _layers_of_operations(model)))


def _layers_of_operations(model: torch.nn.Module) -> set[str]:
    """The layers that are operations of `fuser.ops`."""
    return {layer_of(name) for name, module in model.named_modules() if isinstance(module, FusibleOperation)}
