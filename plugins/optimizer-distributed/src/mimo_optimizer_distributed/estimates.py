"""What spreading parameters over data lanes holds and sends, from shapes: for any plugin that spreads them.

`mimo_optimizer_distributed.spec.sharded_optimizer` takes `laid` and `sent` as such. Free of torch.

FSDP2 pads each parameter to pieces of one length, and keeps the padding in pieces and in what is gathered of them; a
whole gradient, and an optimizer's state, have none of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import attrs

from mimo.optimizer.estimates import (
    WEIGHT_BYTES,
    LaidBytes,
    Lanes,
    Numbers,
    ParameterShape,
    PartShapes,
    SentBytes,
    replicated,
)
from mimo_optimizer_distributed.sharding import Shard, Sharding


def laid(part: PartShapes, config: Sharding) -> LaidBytes:
    """Tell what `mimo_optimizer_distributed.spec.shard` makes of a part, as it says where it leaves all whole."""
    has_experts = any(one.experts for one in part.parameters)
    most = max(part.lanes.size, part.expert_lanes.size if has_experts else 1)
    if most == 1 and part.number_bytes == WEIGHT_BYTES:
        return replicated(part)
    left = [one for one in part.parameters if not _can_be_spread(one)]
    given = [one for one in part.parameters if _can_be_spread(one)]
    rest = replicated(attrs.evolve(part, parameters=tuple(left), number_bytes=WEIGHT_BYTES))
    pieces = [piece_of(one, part.lanes_of(one)) for one in part.parameters if one.trained]
    spread_ = _SpreadBytes(
        part=part,
        parameters=given,
        shard="optimizer" if most == 1 else config.shard,
        gathers_ahead=config.overlap_param_gather is not False,
    )
    return LaidBytes(
        pieces=tuple(pieces),
        weights=rest.weights + sum(spread_.padded(one) * WEIGHT_BYTES for one in given),
        gathered=spread_.gathered,
        gradients=rest.gradients + spread_.gradients,
        gathered_inside=spread_.gathered_inside,
        gradients_inside=spread_.gradients_inside,
    )


def sent(numbers: Numbers, config: Sharding) -> SentBytes:
    """Tell what is sent round a ring of lanes: gradients to their pieces, parameters back from them.

    What is gathered once a step is what the step has changed.
    """
    lanes = numbers.lanes
    share = (lanes.size - 1) / lanes.size
    reduced = share * WEIGHT_BYTES * numbers.trained
    copies = 2 * (lanes.copies - 1) / lanes.copies * WEIGHT_BYTES * numbers.trained / lanes.size
    if config.shard == "full":
        gathered = share * numbers.number_bytes * numbers.all
        return SentBytes(step=copies, forward=gathered, backward=gathered, grad_accumulation=reduced)
    once = copies + share * numbers.number_bytes * numbers.trained
    if config.shard == "gradients":
        return SentBytes(step=once, grad_accumulation=reduced)
    return SentBytes(step=once + reduced)


def piece_of(parameter: ParameterShape, lanes: Lanes) -> ParameterShape:
    """Return a lane's piece, cut along dim 0 as `torch.chunk` does: it may be shorter than others, and empty."""
    if not _can_be_spread(parameter):
        return parameter
    length, *others = parameter.shape
    each = -(-length // lanes.size)
    start = min(lanes.index * each, length)
    return attrs.evolve(
        parameter,
        shape=(min(start + each, length) - start, *others),
        ranks=parameter.ranks * lanes.size,
        total=parameter.numbers if parameter.total is None else parameter.total,
    )


@attrs.frozen(kw_only=True)
class _SpreadBytes:
    """Parameters of a part that are spread, and when they are whole."""

    part: PartShapes
    parameters: Sequence[ParameterShape]
    shard: Shard
    gathers_ahead: bool

    def padded(self, parameter: ParameterShape) -> int:
        """Return the numbers of each lane's piece, the same on all."""
        return piece_of(parameter, attrs.evolve(self.part.lanes_of(parameter), index=0)).numbers

    @property
    def gathered(self) -> int:
        return 0 if self.shard == "full" else self._whole(self.parameters)

    @property
    def gathered_inside(self) -> int:
        """What belongs to no layer, and a layer, beside what of its neighbour is gathered while it computes.

        What one lane alone holds is no message, and is copied when its layer begins.
        """
        if self.shard != "full":
            return 0
        layers = list(self._layers())
        whole = [self._whole(layer) for layer in layers]
        ahead = [self._whole([one for one in layer if self.part.lanes_of(one).size > 1]) for layer in layers]
        most = max(whole, default=0)
        if self.gathers_ahead:
            forward = (here + following for here, following in zip(whole, ahead[1:], strict=False))
            backward = (here + before for here, before in zip(whole[1:], ahead, strict=False))
            most = max([most, *forward, *backward])
        return self._whole([one for one in self.parameters if one.layer is None]) + most

    @property
    def gradients(self) -> int:
        """Those of pieces where every backward reduces them, and otherwise all of them until the step does."""
        if self.shard == "optimizer":
            return WEIGHT_BYTES * self._trained
        return sum(WEIGHT_BYTES * self.padded(one) for one in self.parameters if one.trained)

    @property
    def gradients_inside(self) -> int:
        """Those of a backward: in fp32 until they are reduced, or in the layers' precision until they are added."""
        if self.shard != "optimizer":
            return WEIGHT_BYTES * self._trained
        return 0 if self.part.number_bytes == WEIGHT_BYTES else self.part.number_bytes * self._trained

    @property
    def _trained(self) -> int:
        return sum(one.numbers for one in self.parameters if one.trained)

    def _layers(self) -> Iterator[list[ParameterShape]]:
        inside = sorted((one for one in self.parameters if one.layer is not None), key=lambda one: one.layer or 0)
        for _, layer in groupby(inside, key=lambda one: one.layer):
            yield list(layer)

    def _whole(self, parameters: Sequence[ParameterShape]) -> int:
        """Return the bytes of parameters as they are gathered, padding included."""
        numbers = sum(self.padded(one) * self.part.lanes_of(one).size for one in parameters)
        return numbers * self.part.number_bytes


def _can_be_spread(parameter: ParameterShape) -> bool:
    return bool(parameter.shape) and parameter.floating and not parameter.whole
