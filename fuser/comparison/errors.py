"""What a step under a recipe differs in from another one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from fuser.comparison.findings import LayerComparison, RecipeComparison
from fuser.comparison.steps import Calls, Outcome
from fuser.recording import QuantizationRecord, grouped, layer_of

#: From this relative error of a layer's input on, or this error of a row relative to the distance between rows, rows
#: may be others.
OTHER_ROWS = 0.7
#: How many rows of a layer's input are looked up among all of its rows, those with the largest errors.
MOST_LOOKED_UP = 256


def _vanished(record: QuantizationRecord) -> QuantizationRecord:
    """The record of an all-zero tensor which is not zero in the step that is compared with: its error is 1.0, 0 dB.

    A gradient of a matrix is not zero, so neither operand of its product, the input and the output's gradient, is.
    """
    if record.tensor.startswith("weight"):
        return record
    return replace(record, measurement=replace(record.measurement, sqnr_db=0.0))


def compared_steps(name: str, base: Outcome, step: Outcome) -> RecipeComparison:
    """Compare a step with another one. Of a parameter that has no gradient in one of them it is zero there."""
    own: dict[str, list[str]] = {}  # layer -> names of its parameters
    for parameter in {**base.gradients, **step.gradients}:
        own.setdefault(layer_of(parameter.rpartition(".")[0]), []).append(parameter)
    learning = {
        layer
        for layer, names in own.items()
        if any(
            name in base.gradients and base.gradients[name].ndim > 1 and base.gradients[name].any() for name in names
        )
    }
    records = grouped(
        [_vanished(record) if record.all_zero and record.layer in learning else record for record in step.records],
        lambda record: record.layer,
    )

    def gradient_error(names: Sequence[str]) -> float | None:
        found = [step.gradients[n] if n in step.gradients else torch.zeros_like(base.gradients[n]) for n in names]
        wanted = [base.gradients[n] if n in base.gradients else torch.zeros_like(step.gradients[n]) for n in names]
        return relative_error(found, wanted)

    return RecipeComparison(
        name,
        step.loss,
        abs(step.loss - base.loss) / abs(base.loss) if base.loss else abs(step.loss),
        relative_error(step.output, base.output),
        gradient_error(list({**base.gradients, **step.gradients})),
        [
            LayerComparison(
                layer,
                None if moved else relative_error(step.calls.outputs.get(layer, []), base.calls.outputs.get(layer, [])),
                gradient_error(own.get(layer, [])),
                tuple(records.get(layer, [])),
                moved,
            )
            for layer in dict.fromkeys(itertools.chain(base.calls.outputs, own))
            for moved in [_moved(layer, base.calls, step.calls)]
        ],
        step.left,
        step.coverage,
        step.warmed_up,
        step.unmeasured,
        step.idle,
        step.refused_on_gpus,
    )


def _moved(layer: str, base: Calls, step: Calls) -> bool:
    """Whether a layer's calls have other rows than in the step that is compared with, as far as they tell."""
    if not layer:
        return False
    if (layer in base.first) != (layer in step.first):
        return True
    if layer not in base.outputs:
        return False
    first = step.first[layer]
    found, wanted = step.inputs.get(first, []), base.inputs.get(first, [])
    if not found or not wanted:
        return False
    if [one.numel() for one in found] != [other.numel() for other in wanted]:
        return True
    error = relative_error(found, wanted)
    return error is not None and (error >= OTHER_ROWS or _exchanged(found, wanted))


def _exchanged(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """Whether a row of an input is one that the layer had in another place in the step that is compared with.

    Then its error is as large as rows are apart, and that other row is not half as far from it as its own. Rows that
    became alike do not count.
    """
    every = [*found, *wanted]
    if len({one.shape[-1:] for one in every}) > 1 or not all(one.ndim > 1 and one.numel() for one in every):
        return False
    a, b = (torch.cat([one.reshape(-1, one.shape[-1]).float() for one in tensors]) for tensors in (found, wanted))
    errors, apart = (a - b).norm(dim=1).nan_to_num(0.0), (b - b.mean(0)).norm() / len(b) ** 0.5
    looked_up = errors.topk(min(MOST_LOOKED_UP, len(errors))).indices
    looked_up = looked_up[errors[looked_up] >= OTHER_ROWS * apart]
    if not len(looked_up) or not apart > 0:
        return False
    nearest, others = torch.cdist(a[looked_up], b).scatter_(1, looked_up[:, None], math.inf).min(1)
    alike = (a[looked_up] - a[others]).norm(dim=1) < (b[looked_up] - b[others]).norm(dim=1) / 2
    return bool(((nearest < errors[looked_up] / 2) & ~alike).any())


def relative_error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float | None:
    """||found - wanted|| / ||wanted|| over all tensors; None if there are none, or if they do not match."""
    sizes = [other.numel() for other in wanted]
    if not sum(sizes) or [one.numel() for one in found] != sizes:
        return None
    a, b = (torch.cat([one.flatten().double() for one in tensors]) for tensors in (found, wanted))
    difference, size = (a - b).norm().item(), b.norm().item()
    return difference / size if size else (math.inf if difference else 0.0)
