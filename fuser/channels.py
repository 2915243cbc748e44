"""Named extra-tensor channels: where each operation's extra inputs come from and where its extra outputs go.

Behaviour: TE's ops/op.py, and ops/fuser.py, constructor of `OperationFuser`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fuser.fusible import FusibleOperation
from refops.arguments import shown

Slot = tuple[int, int]  # (basic operation, which of its extra tensors)


class ChanneledOperation(FusibleOperation):
    """The extra tensors of a basic operation: how many it has, and the channels that connect them.

    `num_extra_inputs`, `num_extra_outputs` are set on the class or before `__init__`. `extra_input_names`: what errors
    call the extra inputs, in order.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    extra_input_names: ClassVar[tuple[str, ...]] = ()
    is_fused_op = False

    def __init__(self) -> None:
        super().__init__()
        self._extra_input_channels: list[str | None] = [None] * self.num_extra_inputs
        self._extra_output_channels: list[str | None] = [None] * self.num_extra_outputs
        self._extra_output_to_caller: list[bool] = [True] * self.num_extra_outputs
        self._extra_tensor_channels_locked = False

    def set_extra_input_channel(self, index: int, channel: str | None) -> ChanneledOperation:
        """Take extra input `index` from the extra output that an earlier operation sends to `channel`. Returns self.

        `None`: from the caller again. `IndexError`, `ValueError`, or `RuntimeError` once a fuser has captured the
        routing.
        """
        self._check_channel("input", index, len(self._extra_input_channels), channel)
        self._extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> ChanneledOperation:
        """Send extra output `index` to `channel`, and to the caller if `output_to_caller`. Returns self."""
        if not isinstance(output_to_caller, bool):
            raise TypeError(f"output_to_caller must be a bool (got {shown(output_to_caller)})")
        self._check_channel("output", index, len(self._extra_output_channels), channel)
        self._extra_output_channels[index] = channel
        self._extra_output_to_caller[index] = output_to_caller or channel is None
        return self

    def _check_channel(self, direction: str, index: int, count: int, channel: Any) -> None:
        if not 0 <= index < count:
            raise IndexError(
                f"Extra {direction} index {index} is out of range: "
                f"{self.__class__.__name__} has {count} extra {direction}s"
            )
        if channel is not None and not (isinstance(channel, str) and channel):
            raise ValueError(f"Extra tensor channel must be None or a non-empty string (got {shown(channel)})")
        if self._extra_tensor_channels_locked:
            raise RuntimeError(
                f"Can't change extra tensor channels of {self.__class__.__name__}: "
                "an operation fuser has already captured its channel routing"
            )


def check_extra_inputs(wanted: Iterable[tuple[ChanneledOperation, int]], given: Sequence[Any]) -> None:
    """Raise `ValueError` unless as many extra inputs are given as are wanted, each an operation and its slot."""
    wanted = list(wanted)
    if len(given) == len(wanted):
        return
    described = [
        f"{op.extra_input_names[slot] if slot < len(op.extra_input_names) else f'extra input {slot}'} of "
        f"{type(op).__name__}"
        for op, slot in wanted
    ]
    listed = f"{', '.join(described)}, in this order" if described else "no operation takes one from the caller"
    raise ValueError(
        f"Expected {len(wanted)} extra inputs but got {len(given)}: {listed}. One that an earlier operation makes "
        "comes through a channel instead (set_extra_input_channel)"
    )


@dataclass
class Routes:
    """Where each basic operation's extra tensors come from and go to. Slots are counted per basic operation.

    Attributes:
        input_sources: producer of each extra input; None: the caller.
        public_outputs: the extra outputs that the caller gets, in order.
        external_inputs: the extra inputs that the caller gives, in order.
    """

    input_sources: list[list[Slot | None]]
    public_outputs: list[Slot]

    def __post_init__(self) -> None:
        sources = enumerate(self.input_sources)
        self.external_inputs = [(i, slot) for i, row in sources for slot, source in enumerate(row) if source is None]

    @classmethod
    def of(cls, basic_ops: Sequence[ChanneledOperation]) -> Routes:
        """Resolve the channel names. `ValueError` for a channel with several producers, none, or a later one."""
        producers: dict[str, Slot] = {}
        for i, op in enumerate(basic_ops):
            for slot, channel in enumerate(op._extra_output_channels):
                if channel is None:
                    continue
                if channel in producers:
                    raise ValueError(
                        f"Extra tensor channel {channel!r} has multiple producers (ops {producers[channel][0]} and {i})"
                    )
                producers[channel] = (i, slot)
        sources: list[list[Slot | None]] = []
        for i, op in enumerate(basic_ops):
            sources.append([])
            for channel in op._extra_input_channels:
                source = None if channel is None else producers.get(channel)
                if channel is not None and source is None:
                    raise ValueError(f"Extra tensor channel {channel!r} (consumed by op {i}) has no producer")
                if source is not None and source[0] >= i:
                    raise ValueError(f"Extra tensor channel {channel!r} (consumed by op {i}) has no earlier producer")
                sources[i].append(source)
        public = [
            (i, slot)
            for i, op in enumerate(basic_ops)
            for slot, to_caller in enumerate(op._extra_output_to_caller)
            if to_caller
        ]
        return cls(sources, public)

    def part(self, start: int, stop: int) -> Routes:
        """The routes of operations `start` to `stop` alone: tensors that cross the border go through the caller."""
        sources = [
            [None if source is None or source[0] < start else (source[0] - start, source[1]) for source in row]
            for row in self.input_sources[start:stop]
        ]
        needed_later = {source for row in self.input_sources[stop:] for source in row if source is not None}
        public = sorted(slot for slot in needed_later.union(self.public_outputs) if start <= slot[0] < stop)
        return Routes(sources, [(i - start, slot) for i, slot in public])

    def consumers(self, output: Slot) -> list[int]:
        """The operations that take an extra output."""
        return [i for i, row in enumerate(self.input_sources) if output in row]

    def place_external_inputs(self, extra_inputs: Sequence[Any]) -> list[list[Any]]:
        placed: list[list[Any]] = [[None] * len(row) for row in self.input_sources]
        for (i, slot), tensor in zip(self.external_inputs, extra_inputs, strict=True):
            placed[i][slot] = tensor
        return placed
