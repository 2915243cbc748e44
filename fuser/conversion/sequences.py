"""`torch.nn.Sequential` in which neighbours that were converted run as one pipeline."""

from __future__ import annotations

from typing import Any

import torch

from fuser.conversion.modules import (
    Converted,
    ConvertedProduct,
    in_graph,
    ready,
    refuse_dtypes,
    run_eagerly,
)
from fuser.fuser import OperationFuser
from fuser.recipe import Recipe
from fuser.sequential import HoldsFusers, fusers_of
from fuser.tracing import NotScriptable, WhenTraced, outside_compile, refuse_proxy


class ConvertedSequential(HoldsFusers, NotScriptable, torch.nn.Sequential):
    """`torch.nn.Sequential` in which neighbours that were converted run as one pipeline; see `convert`.

    A module with hooks runs by itself, for torch to run the hooks, and so does a linear layer whose input is padded.
    It works as torch's list of modules; slices, sums and multiples of it are of its class.
    """

    _joined: WhenTraced
    _pipelines: dict[tuple[int, int], OperationFuser]

    def __init__(self, *args: Any) -> None:  # torch calls it for a slice
        super().__init__(*args)
        self.start_pipelines()

    def start_pipelines(self) -> None:
        """Begin without pipelines; a call makes those that it needs."""
        self._pipelines, self._joined = {}, WhenTraced(self._prepare)

    def __add__(self, other: Any) -> ConvertedSequential:
        return ConvertedSequential(*super().__add__(other))

    def __radd__(self, other: Any) -> ConvertedSequential:
        if not isinstance(other, torch.nn.Sequential):
            return NotImplemented
        return ConvertedSequential(*torch.nn.Sequential.__add__(other, self))

    def __mul__(self, other: int) -> ConvertedSequential:
        return ConvertedSequential(*super().__mul__(other))

    def forward(self, input: Any) -> Any:
        """Like the forward of torch's container."""
        refuse_proxy(input, self)
        return self._run(input) if in_graph() else outside_compile(run_eagerly, self, input)

    def _run(self, input: Any) -> Any:
        children: list[Any] = list(self)
        joined = self._joined.value if in_graph() else _joining(children)
        x, start = input, 0
        while start < len(children):
            stop = _end_of_run(children, joined, start)
            if stop - start > 1 and not children[start].takes(x):
                stop = start + 1
            if stop - start > 1 and self._is_padded(children[start:stop], x):
                stop = _end_of_run(children, joined, start, padded=True)
            x = self._run_pipeline(x, start, stop) if stop - start > 1 else children[start](x)
            start = stop
        return x

    def _is_padded(self, run: list[Converted], x: torch.Tensor) -> bool:
        with run[0].quantizing():
            return any([isinstance(child, ConvertedProduct) and child.rows_short_of_blocks(x) > 0 for child in run])

    def _run_pipeline(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        run: list[Any] = list(self)[start:stop]
        if in_graph():
            for child in run:
                reason = child._why_outside()
                if reason:
                    return outside_compile(self._run_pipeline, x, start, stop, reason=reason)
        with ready(run, x):
            pipeline = self._pipelines[start, stop] if in_graph() else self._pipeline_of(start, stop)
            refuse_dtypes(pipeline, x)
            return pipeline(x)

    def _prepare(self) -> tuple[bool, ...]:
        """Make the pipelines that a compiled call may need. Returns which children join the ones before them."""
        children = list(self)
        joined = _joining(children)
        for start in range(len(children)):
            if joined[start] and joined[start - 1] and not any(map(_pads, children)):
                continue  # runs begin at their first, or after it if its dtype leaves that to torch
            for padded in (False, True):
                stop = _end_of_run(children, joined, start, padded=padded)
                if stop - start > 1:
                    self._pipeline_of(start, stop)
        return joined

    def fusers(self) -> list[tuple[OperationFuser, Recipe | None]]:
        """The fusers of the runs of converted modules in it, and of its other children."""
        found: list[tuple[OperationFuser, Recipe | None]] = []
        children: list[Any] = list(self)
        joined, start = _joining(children), 0
        while start < len(children):
            first, stop = children[start], _end_of_run(children, joined, start)
            is_run = stop - start > 1
            found += [(self._pipeline_of(start, stop), first.recipe)] if is_run else fusers_of(first)
            start = stop
        return found

    def _pipeline_of(self, start: int, stop: int) -> OperationFuser:
        """The pipeline of a run of children, with the operations and parameters that they have now."""
        run: list[Any] = list(self)[start:stop]
        operations = [op for child in run for op in child.pipeline()._basic_ops]
        pipeline = self._pipelines.get((start, stop))
        if pipeline is None or pipeline._basic_ops != operations:
            pipeline = self._pipelines[start, stop] = OperationFuser(operations)
        return pipeline


def _joining(children: list[Any]) -> tuple[bool, ...]:
    """For each child, whether it may run in one pipeline with the one before it."""
    if torch.nn.modules.module._has_any_global_hook():
        return (False,) * len(children)
    runs = list(map(_runs_in_pipelines, children))
    return tuple(
        i > 0 and runs[i - 1] and runs[i] and children[i - 1].recipe == child.recipe and _takes_all_dtypes(child)
        for i, child in enumerate(children)
    )


def _runs_in_pipelines(child: Any) -> bool:
    if not isinstance(child, Converted) or "forward" in vars(child):
        return False
    hooked = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks
    return not hooked and child._has_values()


def _takes_all_dtypes(child: Any) -> bool:
    """False for a norm without eps: the operations before it decide which dtype it gets."""
    return getattr(child, "eps", 0) is not None


def _pads(child: Any) -> bool:
    return isinstance(child, ConvertedProduct) and child.pad


def _end_of_run(children: list[Any], joined: tuple[bool, ...], start: int, *, padded: bool = False) -> int:
    """The end of the children that run as one pipeline from `start` on. `padded`: those that pad run by themselves."""
    stop = start + 1
    while (
        stop < len(children) and joined[stop] and not (padded and (_pads(children[stop - 1]) or _pads(children[stop])))
    ):
        stop += 1
    return stop
