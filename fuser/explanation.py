"""What the fuser does with a model: which fusions fire, which do not and why, what quantizes for what, what is saved.

`explain(module)` plans without running; `explain(module, input)` runs one forward pass and measures. Neither changes
the model's parameters, amax histories or random numbers (a forward pass materializes deferred parameters, as any). The
plan comes from the registered fusion functions themselves (`fusion_steps`), reasons from `WindowFusion.candidates`,
which decides with the same code; of other fusion functions only what they did is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cuda_kernels.messages import silent
from fuser.cards import current_products
from fuser.common import copied, is_quantized_tensor
from fuser.fused_pattern import Candidate
from fuser.fuser import OperationFuser, fusion_steps
from fuser.op import BasicOperation, FusedOperation, FusibleOperation
from fuser.pipeline import ForwardStep, forward_observers
from fuser.quantization.contexts import autocast
from fuser.quantization.grouped import GroupedTensorStorage
from fuser.quantization.hybrid import HybridBuffers
from fuser.quantization.identity import IdentityBuffers
from fuser.quantization.quantizer import Quantizer
from fuser.quantization.state import FP8GlobalStateManager
from fuser.quantization.storage import BufferStorage
from fuser.recipe import Recipe
from fuser.recording import operations_of
from fuser.sequential import HoldsFusers, Sequential, fusers_of
from refops.arguments import shown
from refops.quantization.result import stored_layout


@dataclass
class PlannedOp:
    """One step of a pass: an operation and the basic operations it stands for."""

    name: str
    basic_ops: list[int]


@dataclass
class FusionReport:
    """A window that a fusion looked at. `reason`: why it did not fire, None if it did."""

    fusion: str
    direction: str  # "forward", "backward", or "both"
    basic_ops: list[int]
    fired: bool
    reason: str | None = None


@dataclass
class EdgeReport:
    """Data between steps. `quantizer`: what the receiver asks for; `quantized`: what it got (None: not measured)."""

    direction: str
    source: int  # basic operation
    target: int
    quantizer: str | None
    quantized: bool | None = None


@dataclass
class SavedTensor:
    """A tensor kept for backward. `bytes`: of memory that it alone keeps alive; `theory`: from its shape and format.

    `shared`: its memory is a parameter's or counted already, so `bytes` is 0.
    """

    shape: tuple[int, ...]
    format: str
    bytes: int
    theory: int
    shared: bool = False


@dataclass
class PipelineReport:
    """One `OperationFuser`: the basic operations and what becomes of them. Operations are named by their position.

    `modules`: the name in the target of the module that each basic operation is or is a part of, as in
    `named_modules`; "" for the target itself.
    `products`: how products are computed, "float32" or a card (`fuser.products`), and how that is promoted where a
    scope says so.
    """

    basic_ops: list[str]
    modules: list[str]
    recipe: str | None
    products: str
    first_op_requiring_backward: int
    forward: list[PlannedOp]
    backward: list[PlannedOp]
    fusions: list[FusionReport]
    edges: list[EdgeReport]
    saved: dict[int, list[SavedTensor]] | None = None  # by basic operation; None: not measured

    @property
    def saved_bytes(self) -> int | None:
        """Bytes kept for backward, parameters not counted."""
        if self.saved is None:
            return None
        return sum(tensor.bytes for tensors in self.saved.values() for tensor in tensors)


@dataclass
class Explanation:
    """What `explain` found. `str()` and `.text` give a text, `.mermaid()` a graph, `.to_dict()` plain data for JSON."""

    pipelines: list[PipelineReport] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)

    @property
    def fired(self) -> list[FusionReport]:
        return [fusion for pipeline in self.pipelines for fusion in pipeline.fusions if fusion.fired]

    @property
    def not_fired(self) -> list[FusionReport]:
        return [fusion for pipeline in self.pipelines for fusion in pipeline.fusions if not fusion.fired]

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        return "\n\n".join(_text_of(number, pipeline) for number, pipeline in enumerate(self.pipelines))

    def mermaid(self) -> str:
        """A Mermaid flowchart: a node for each step with its basic operations and saved bytes, formats on the edges."""
        lines = ["flowchart TB"]
        for number, pipeline in enumerate(self.pipelines):
            for direction in ("forward", "backward"):
                lines += _mermaid_of(f"p{number}{direction[0]}", direction, pipeline)
        return "\n".join(lines)


# ---------------------------------------------------------------------- finding out


def explain(
    target: torch.nn.Module | OperationFuser,
    input: torch.Tensor | None = None,
    *extra_inputs: torch.Tensor,
    recipe: Any = None,
    quiet: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Print and return which fusions fire in the pipelines of `target`, which do not and why, and what it costs.

    `target`: an operation, a `Sequential`, an `OperationFuser`, or any module that has such inside. `input`,
    `extra_inputs`, `kwargs`: what to call it with; with an input the data on each edge and the bytes saved for backward
    are measured in a real forward pass.
    `recipe`: the recipe to assume; by default the one of the `autocast` around the call, if any, else for each module
    the one that `fuser.convert` bound to it. `quiet`: do not print.
    `ValueError` if there is nothing to explain, `TypeError` for a target of another kind.
    """
    if not isinstance(target, torch.nn.Module | OperationFuser):
        got = type(target).__name__ if isinstance(target, torch.Tensor) else shown(target)
        raise TypeError(f"target must be a module or an OperationFuser, as in explain(model, input); got {got}")
    if recipe is None:
        recipe = _recipe_in_force()
    decided = recipe is not None or FP8GlobalStateManager.quantization_state.autocast_depth > 0
    layers: dict[torch.nn.Module, str] = {}
    if isinstance(target, torch.nn.Module):
        layers = {op: layer for layer, op in operations_of(target)}
    with silent() if quiet else contextlib.nullcontext(), _undisturbed(target), torch.enable_grad():
        if input is None:
            pipelines = [_plan(fuser, recipe if decided else bound, layers) for fuser, bound in fusers_of(target)]
        else:
            with _under(recipe):
                pipelines = _measure(target, input, extra_inputs, kwargs, layers)
    if not pipelines:
        raise ValueError(f"There is nothing to explain: {type(target).__name__} runs no fusible operations")
    explanation = Explanation(pipelines)
    if not quiet:
        print(explanation)
    return explanation


def _modules_of(target: torch.nn.Module | OperationFuser) -> list[torch.nn.Module]:
    roots = target._ops if isinstance(target, OperationFuser) else [target]
    modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
    inside = [fuser for module in modules if isinstance(module, HoldsFusers) for fuser, _ in module.fusers()]
    return list(dict.fromkeys([*modules, *(op for fuser in inside for op in fuser._basic_ops)]))


def _recipe_in_force() -> Recipe | None:
    return FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None


def _under(recipe: Recipe | None) -> contextlib.AbstractContextManager[None]:
    """A context, as in graph capture: nothing is registered for amax reduction, nothing is updated at the end."""
    return contextlib.nullcontext() if recipe is None else autocast(recipe=recipe, _graph=True)


@contextlib.contextmanager
def _undisturbed(target: torch.nn.Module | OperationFuser) -> Iterator[None]:
    """Give operations a fresh recipe state for the time being, and put all back afterwards."""
    modules = _modules_of(target)
    ops = [module for module in modules if isinstance(module, BasicOperation)]
    weights = [param for op in ops for param in op.parameters(recurse=False) if is_quantized_tensor(param)]
    names = ("_fp8_metas", "_quantizers", "_suspended_recipe_state", "_recipe_key")
    set_aside: list[tuple[Any, str]] = [(op, name) for op in ops for name in names]
    set_aside += [(weight, "_quantizer") for weight in weights]  # takes the fresh state's without a word
    set_aside += [(module, "_module_groups") for module in modules if isinstance(module, Sequential)]
    kept = [(op, "_extra_tensor_channels_locked") for op in ops]
    present = [(holder, name, getattr(holder, name)) for holder, name in (*set_aside, *kept)]
    for holder, name in set_aside:
        setattr(holder, name, None)
    devices = {param.device for op in ops for param in op.parameters() if param.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for holder, name, value in present:
            setattr(holder, name, value)


def _plan(fuser: OperationFuser, recipe: Any, layers: dict[torch.nn.Module, str]) -> PipelineReport:
    """The plan for a training step in which the input takes part in backward."""
    present = fuser._forward_ops, fuser._backward_ops, fuser.first_op_requiring_backward
    try:
        with _under(recipe):
            for op in fuser._basic_ops:
                op.reset_recipe_state(recipe=recipe)
            fuser.first_op_requiring_backward = 0
            fuser.fuse_ops(recipe)
            return _report(fuser, recipe, layers)
    finally:
        fuser._forward_ops, fuser._backward_ops, fuser.first_op_requiring_backward = present


def _measure(
    target: torch.nn.Module | OperationFuser,
    input_: torch.Tensor,
    extra_inputs: Sequence[torch.Tensor],
    kwargs: dict[str, Any],
    layers: dict[torch.nn.Module, str],
) -> list[PipelineReport]:
    reports: list[PipelineReport] = []
    seen_storages: set[int] = set()
    kept: list[Any] = []  # tensors stay alive, so that no address is used twice

    def observe(fuser: OperationFuser, step: ForwardStep) -> None:
        if step.basic_op_indices[0] == 0:
            reports.append(_report(fuser, _recipe_in_force(), layers))
            reports[-1].saved = {}
            params = (param for op in fuser._basic_ops for param in op.parameters())
            seen_storages.update(part.untyped_storage().data_ptr() for param in params for part in _parts(param))
        report = reports[-1]
        for index, context in zip(step.basic_op_indices, step.contexts, strict=True):
            to_save = context.to_save or () if context.requires_grad else ()
            tensors = [tensor for tensor in to_save if tensor is not None]
            report.saved[index] = [_saved_tensor(tensor, seen_storages) for tensor in tensors]
            kept.extend(tensors)
        for edge in report.edges:
            if edge.direction == "forward" and edge.source == step.basic_op_indices[-1]:
                edge.quantized = is_quantized_tensor(step.output)

    # Operations may write into their extra inputs, and into buffers among the keyword arguments.
    copies, kwargs = copied(list(extra_inputs)), copied(kwargs)
    forward_observers.append(observe)
    try:
        kept.append(target(input_, *copies, **kwargs))
    finally:
        forward_observers.remove(observe)
    return reports


def _report(fuser: OperationFuser, recipe: Any, layers: dict[torch.nn.Module, str]) -> PipelineReport:
    def planned(ops: list[tuple[FusibleOperation, list[int]]]) -> list[PlannedOp]:
        return [PlannedOp(type(op).__name__, list(indices)) for op, indices in ops]

    return PipelineReport(
        basic_ops=[type(op).__name__ for op in fuser._basic_ops],
        modules=[layers.get(op, "") for op in fuser._basic_ops],
        recipe=None if recipe is None else type(recipe).__name__,
        products=str(current_products()),
        first_op_requiring_backward=fuser.first_op_requiring_backward,
        forward=planned(fuser._forward_ops),
        backward=planned(fuser._backward_ops),
        fusions=_fusions(fuser, recipe),
        edges=_edges(fuser, recipe),
    )


def _fusions(fuser: OperationFuser, recipe: Any) -> list[FusionReport]:
    joint, both = _fusions_of_pass("both", fuser.forward_backward_fusion_functions, list(fuser._basic_ops), recipe)
    _, forward = _fusions_of_pass("forward", fuser.forward_fusion_functions, list(joint), recipe)
    _, backward = _fusions_of_pass("backward", fuser.backward_fusion_functions, list(joint), recipe)
    return both + forward + backward


def _fusions_of_pass(
    direction: str, functions: Sequence[Any], ops: list[FusibleOperation], recipe: Any
) -> tuple[list[FusibleOperation], list[FusionReport]]:
    reports: list[FusionReport] = []
    owner: dict[int, str] = {}  # basic operation -> fusion of this pass that took it
    after = ops
    for function, before, after in fusion_steps(functions, ops, recipe):
        if not hasattr(function, "candidates"):
            kept = {id(op) for op in before}
            new = [position for position, op in enumerate(after) if id(op) not in kept]
            found = [(Candidate(type(after[i]).__name__, i, i + 1, (after[i],)), after) for i in new]
        else:
            found = [(candidate, before) for candidate in function.candidates(before, recipe)]
            taken = _candidates_taken(function, ops, before, recipe, owner)
            found += [(candidate, ops) for candidate in taken]
        for candidate, looked_at in found:
            indices = _basic_indices(candidate, looked_at)
            reports.append(FusionReport(candidate.fusion, direction, indices, candidate.fired, candidate.reason))
            if candidate.fired:
                owner.update(dict.fromkeys(indices, candidate.fusion))
    return after, reports


def _candidates_taken(
    function: Any, ops: list[FusibleOperation], before: list[FusibleOperation], recipe: Any, owner: dict[int, str]
) -> Iterator[Candidate]:
    """Windows that would fire if an earlier fusion had not taken one of their operations."""
    starts = _basic_starts(before)
    for candidate in function.candidates(ops, recipe):
        takers = {owner[i] for i in _basic_indices(candidate, ops) if i in owner}
        places = _basic_starts(ops)[candidate.start : candidate.stop]
        present = all(
            place in starts[:-1] and before[starts.index(place)] is op
            for place, op in zip(places, candidate.operations, strict=True)
        )
        if candidate.fired and takers and not present:
            reason = f"{' and '.join(sorted(takers))}, registered before, took an operation of it"
            yield dataclasses.replace(candidate, reason=reason)


def _basic_starts(ops: Sequence[FusibleOperation]) -> list[int]:
    """The first basic operation of each operation, and the number of all."""
    sizes = (len(op.basic_ops) if isinstance(op, FusedOperation) else 1 for op in ops)
    return list(itertools.accumulate(sizes, initial=0))


def _basic_indices(candidate: Candidate, ops: Sequence[FusibleOperation]) -> list[int]:
    """The basic operations in the candidate's range of `ops`: by position, as an operation may occur several times."""
    starts = _basic_starts(ops)
    return list(range(starts[candidate.start], starts[candidate.stop]))


def _edges(fuser: OperationFuser, recipe: Any) -> list[EdgeReport]:
    ops = fuser._basic_ops
    edges = []
    for _, indices in fuser._forward_ops[:-1]:
        quantizer = ops[indices[-1] + 1].get_input_quantizer()
        edges.append(EdgeReport("forward", indices[-1], indices[-1] + 1, _quantizer_name(quantizer)))
    override = getattr(recipe, "backward_override", None)
    for _, indices in reversed(fuser._backward_ops[1:]):
        quantizer = ops[indices[0] - 1].get_grad_output_quantizer() if override is None else None
        edges.append(EdgeReport("backward", indices[0], indices[0] - 1, _quantizer_name(quantizer)))
    return edges


def _quantizer_name(quantizer: Any) -> str | None:
    """The class of a quantizer, with the name of its scaling if the class takes any, and with any parts."""
    if quantizer is None:
        return None
    settings = quantizer.settings()
    details = [settings["scaling"].title] if "scaling" in settings else []
    for name, part in settings.items():
        if isinstance(part, Quantizer):
            dtype = part.settings().get("fp8_dtype")
            format_ = "" if dtype is None else f" {dtype.format.name.upper()}"
            details.append(f"{name.removesuffix('_quantizer')} {_quantizer_name(part)}{format_}")
    return type(quantizer).__name__ + (f" ({', '.join(details)})" if details else "")


def _parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that hold the data of a tensor."""
    if isinstance(tensor, GroupedTensorStorage):
        return [buffer for buffer in tensor.get_data_tensors() if buffer is not None]
    if not is_quantized_tensor(tensor):
        return [tensor]
    values = tensor.buffers.tensors if isinstance(tensor, BufferStorage) else vars(tensor)
    return [value for value in values.values() if isinstance(value, torch.Tensor)]


def _saved_tensor(tensor: Any, seen_storages: set[int]) -> SavedTensor:
    """Bytes that saving `tensor` keeps alive: whole storages, each counted once."""
    measured, shared = 0, False
    for part in _parts(tensor):
        storage = part.untyped_storage()
        if storage.nbytes() and storage.data_ptr() in seen_storages:
            shared = True
        else:
            seen_storages.add(storage.data_ptr())
            measured += storage.nbytes()
    if isinstance(tensor, BufferStorage):
        name, theory = _quantized_theory(tensor)
    elif is_quantized_tensor(tensor):
        name, theory = type(tensor).__name__, measured
    else:
        name, theory = _plain_theory(tensor)
    return SavedTensor(tuple(tensor.size()), name, measured, theory, shared and measured == 0)


def _plain_theory(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()


def _quantized_theory(tensor: Any) -> tuple[str, int]:
    """The format of a quantized tensor, and the bytes of its present copies by the layout rules of the scaling."""
    buffers = tensor.buffers
    if isinstance(buffers, HybridBuffers):
        theories = [_quantized_theory(part) for part in buffers.parts.values()]
        return " and ".join(name for name, _ in theories), sum(size for _, size in theories)
    if isinstance(buffers, IdentityBuffers):
        return _plain_theory(buffers.hp_data)
    copies = [direction for direction, used in tensor.get_usages().items() if used]
    total = sum(
        torch.Size(shape).numel() * dtype.itemsize
        for name, (shape, dtype) in stored_layout(buffers.scaling, tuple(buffers.shape)).items()
        if getattr(buffers, name) is not None
    )
    return f"{type(buffers.scaling).__name__} {'+'.join(copies)}", total


# ---------------------------------------------------------------------- showing


def _names(pipeline: PipelineReport, indices: Sequence[int]) -> str:
    return ", ".join(f"{i} {pipeline.basic_ops[i]}" for i in indices)


def _names_by_module(pipeline: PipelineReport) -> str:
    """All basic operations, those of a module together behind its name."""
    groups = []
    for module, group in itertools.groupby(range(len(pipeline.basic_ops)), lambda i: pipeline.modules[i]):
        names = _names(pipeline, list(group))
        groups.append(f"{module} [{names}]" if module else names)
    return ", ".join(groups)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def _text_of(number: int, pipeline: PipelineReport) -> str:
    lines = [f"Pipeline {number}: {_names_by_module(pipeline)}"]
    lines.append(f"  recipe: {pipeline.recipe or 'none'}")
    if pipeline.products != "float32":
        lines.append(f"  products: {pipeline.products}")
    skipped = pipeline.first_op_requiring_backward
    for direction, steps in (("forward", pipeline.forward), ("backward", pipeline.backward[::-1])):
        lines.append(f"  {direction}:")
        for step in steps:
            note = "  (not run: nothing before it requires a gradient)" if direction == "backward" else ""
            note = note if step.basic_ops[-1] < skipped else ""
            lines.append(f"    {step.name} [{_names(pipeline, step.basic_ops)}]{note}")
    lines.append("  fusions considered:" if pipeline.fusions else "  fusions considered: none, no types match")
    for fusion in pipeline.fusions:
        verdict = "fired" if fusion.fired else f"not fired: {fusion.reason}"
        lines.append(f"    {fusion.direction} {fusion.fusion} [{_names(pipeline, fusion.basic_ops)}] {verdict}")
    quantized = [edge for edge in pipeline.edges if edge.quantizer or edge.quantized]
    if quantized:
        lines.append("  quantized data between operations:")
        outcomes = {None: "asked for", True: "emitted by the source", False: "left to the receiver"}
        for edge in quantized:
            lines.append(
                f"    {edge.direction} {_names(pipeline, [edge.source])} -> {_names(pipeline, [edge.target])}: "
                f"{edge.quantizer or 'quantized already'}, {outcomes[edge.quantized]}"
            )
    if pipeline.saved is not None:
        lines.append(f"  saved for backward: {_bytes(pipeline.saved_bytes)}")
        for index, tensors in sorted(pipeline.saved.items()):
            for tensor in tensors:
                size = f"{_bytes(tensor.bytes)} (theory {_bytes(tensor.theory)})"
                size = "no memory of its own" if tensor.shared else size
                lines.append(f"    {_names(pipeline, [index])}: {tensor.shape} {tensor.format}, {size}")
    return "\n".join(lines)


def _mermaid_of(prefix: str, direction: str, pipeline: PipelineReport) -> list[str]:
    steps = pipeline.forward if direction == "forward" else pipeline.backward[::-1]
    lines = [f'  subgraph {prefix}["{direction}"]', "    direction LR"]
    for number, step in enumerate(steps):
        label = step.name
        if len(step.basic_ops) > 1:
            label += "<br/>" + "<br/>".join(_names(pipeline, [i]) for i in step.basic_ops)
        if direction == "forward" and pipeline.saved is not None:
            saved = sum(tensor.bytes for i in step.basic_ops for tensor in pipeline.saved.get(i, []))
            label += f"<br/>saves {_bytes(saved)}"
        shape = ('[["', '"]]') if len(step.basic_ops) > 1 else ('["', '"]')
        lines.append(f"    {prefix}{number}{shape[0]}{label}{shape[1]}")
    edges = [edge for edge in pipeline.edges if edge.direction == direction]
    for number, edge in enumerate(edges):
        arrow = f'-- "{edge.quantizer}" -->' if edge.quantizer and edge.quantized is not False else "-->"
        lines.append(f"    {prefix}{number} {arrow} {prefix}{number + 1}")
    return [*lines, "  end"]
