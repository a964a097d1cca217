"""Attention over packed rows for the library's layers: one stateless function, registered under a name of ours.

What a microbatch is, each part of a layer has while the layer runs (`hold_rows`): attention finds it in itself.
Shapes: T rows, N query heads, K key-value heads, D head width, V width of a value; with several tensor ranks N and K
are this rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import PluginError
from mimo.model.runtime import (
    CarriedSegments,
    ContextAxis,
    DecodeCache,
    DeepRows,
    ForGraphs,
    LanguageBatch,
    Segments,
    attend,
    carry,
    content_of,
)
from mimo_transformers.family import ATTENTION

_HELD = "_mimo_held"
"""Attribute of the parts of a layer: the `Held` that all of them have."""
_HEADS = "_mimo_heads"
"""Attribute of attention whose query heads aren't as many for each head of keys."""
_WITHOUT_MEANING = frozenset(
    {"cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids", "use_cache"}
)
"""Keyword arguments of the library's attention that change nothing here."""


@attrs.frozen(kw_only=True)
class AttentionCall:
    """One call of attention in a forward.

    Args:
        heads: of queries.
        keys: heads of keys and values.
        scored: width of each in scores.
        summed: width of each in what is summed by them.
        window: how many rows a row sees at most; 0 for all.
    """

    heads: int
    keys: int
    scored: int
    summed: int
    window: int

    @classmethod
    def of(cls, query: Tensor, value: Tensor, *, window: int) -> AttentionCall:
        """Return the call of queries [T, N, D] and values [T, K, V]."""
        _, heads, scored = query.shape
        return cls(heads=heads, keys=value.shape[1], scored=scored, summed=value.shape[2], window=window)

    @property
    def saved(self) -> int:
        """Elements that it saves of a row: queries, keys and values, what it attends to, and its log-sum."""
        return self.heads * (self.scored + self.summed + 1) + self.keys * (self.scored + self.summed)


@attrs.frozen
class CallRecord:
    """What layers ask for in a forward that only counts.

    Args:
        attention: calls of it.
        chosen: by module of experts, how many of them each row goes to.
    """

    attention: list[AttentionCall] = attrs.field(factory=list)
    chosen: dict[nn.Module, int] = attrs.field(factory=dict)


@attrs.define(eq=False, kw_only=True)
class RoutedRows:
    """What the router of a layer decided of all rows.

    Args:
        logits: [T, E], or more dims in the place of the first.
        chosen: experts of each row, [T, k], and how much each counts, likewise; once they are known.
    """

    logits: Tensor
    chosen: tuple[Tensor, Tensor] | None = None


@attrs.define(eq=False, kw_only=True)
class PackedRows(ForGraphs):
    """The packed rows of one forward, and what passes beside them through the library's own forward.

    Args:
        lengths: rows of each sample, those on other context ranks included.
        positions: [T] of each row in its sample; rows behind the last sample are padding.
        context: over which each sample is split.
        cache: of the sequences that are continued, if any.
        resumed: [1, T, H] rows of the stage before, None on the first stage.
        result: [T, H] rows behind the last layer of this stage, once that has run.
        causal: whether a row sees only itself and earlier rows of its sample.
        deep: rows that are added behind layers of this stage.
        places: [T, 3] of each row in time, down and across, where rows turn by these.
        items: of each sample, or none: the rows of its items, each of which sees all of its item.
        record: where what is asked for is taken down, instead of being computed; None for computing it.
        routed: where layers with routers take down what these decide, by number; None for nowhere.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    context: ContextAxis
    cache: DecodeCache | None
    resumed: Tensor | None
    result: Tensor | None = None
    deep: DeepRows = attrs.field(factory=lambda: DeepRows({}))
    causal: bool = True
    places: Tensor | None = None
    items: Sequence[Sequence[tuple[int, int]]] = ()
    record: CallRecord | None = None
    routed: dict[int, RoutedRows] | None = None
    _segments: dict[int, Segments] = attrs.field(factory=dict, init=False)
    _calls: dict[int | str, int] = attrs.field(factory=dict, init=False)
    _bare: PackedRows | None = attrs.field(default=None, init=False)
    _carried: CarriedRows | None = attrs.field(default=None, init=False)

    @classmethod
    def of(cls, batch: LanguageBatch) -> PackedRows:
        """Return those of a batch of whole samples, on a stage with all layers."""
        return cls(
            lengths=batch.lengths,
            positions=batch.positions,
            context=ContextAxis.single(),
            cache=None,
            resumed=None,
        )

    def for_graphs(self) -> CarriedRows | None:
        """Return what stands for them in a graph; None where sequences are continued, or where nothing is computed."""
        if self.cache is not None or self.record is not None:
            return None
        if self._carried is None:
            # Without rows that graphs compute: these hold what they save, and so they would hold themselves.
            self._bare = attrs.evolve(self, resumed=None, result=None, deep=DeepRows({}))
            self._carried = CarriedRows(carrier=carry(self._bare), causal=self.causal)
        return self._carried

    def take_routed(self) -> dict[int, RoutedRows] | None:
        """Return what routers have taken down, and have nothing taken down any more."""
        routed, self.routed = self.routed, None
        if self._bare is not None:
            self._bare.routed = None
        return routed

    @property
    def sizes(self) -> list[int]:
        """How many rows each sample has that has some, and then the padding."""
        padding = len(self.positions) - sum(self.lengths)
        return [size for size in (*self.lengths, padding) if size]

    def alone(self, count: int) -> PackedRows:
        """Return so many rows that are one sample."""
        positions = torch.arange(count, device=self.positions.device)
        return PackedRows(
            lengths=(count,),
            positions=positions,
            context=self.context,
            cache=None,
            resumed=None,
            causal=self.causal,
            record=self.record,
        )

    def call_of(self, layer: int | str) -> str:
        """Return a name for this call of a layer's part, which may be called several times in one forward."""
        self._calls[layer] = self._calls.get(layer, -1) + 1
        return f"{layer}.{self._calls[layer]}"

    def segments(self, window: int) -> Segments:
        """Return where the samples lie, for layers whose rows see at most ``window`` rows; 0 for all."""
        if self.cache is not None:
            return self.cache.segments(window)
        if window not in self._segments:
            self._segments[window] = Segments.of(
                self.lengths,
                causal=self.causal,
                window=window,
                rows=len(self.positions),
                device=self.positions.device,
                context=self.context,
                items=self.items,
            )
        return self._segments[window]


@attrs.frozen(kw_only=True, eq=False)
class CarriedRows:
    """`PackedRows` for a compiled layer.

    Args:
        carrier: carries them.
        causal: as there.
    """

    carrier: Tensor
    causal: bool

    def segments(self, window: int) -> CarriedSegments:
        """Return what stands for their `PackedRows.segments`."""
        return CarriedSegments(_segments(self.carrier, window))


@torch.library.custom_op("mimo_transformers::segments", mutates_args=())
def _segments(rows: Tensor, window: int) -> Tensor:
    """Return what carries the segments of rows that are carried."""
    whole: PackedRows = content_of(rows)
    return carry(whole.segments(window))


@_segments.register_fake
def _segments_fake(_rows: Tensor, _window: int) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")


class Held:
    """What the parts of a layer have in common.

    Attributes:
        rows: those on which the layer runs, None where it doesn't.
    """

    def __init__(self) -> None:
        self.rows: PackedRows | CarriedRows | None = None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, T, N, V] of packed rows, each to those of its own sample.

    Args:
        module: the layer's attention.
        query: [1, N, T, D].
        key: [1, K, T, D].
        value: [1, K, T, V].
        attention_mask: None; what may be seen follows from the packed rows.
        scaling: of the scores.
        dropout: 0.
        sliding_window: how many rows a row sees at most, itself among them.
        softcap: bounds the scores.
        s_aux: [N] sinks.
        is_causal: as ``module.is_causal`` if None.
        others: what changes nothing.

    Raises:
        PluginError: the layer asks for something else.
    """
    rows = _held_in_any_form(module)
    if rows is None:
        raise _called_from_elsewhere(module)
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _WITHOUT_MEANING)
    if attention_mask is not None or dropout or unknown:
        given = {"attention_mask": attention_mask is not None, "dropout": dropout > 0}
        asked = [*(name for name, is_given in given.items() if is_given), *unknown]
        raise refusal(module, "attention with scaling, a window, a soft cap or sinks alone", ", ".join(asked))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal != rows.causal:
        raise refusal(module, f"attention with is_causal = {rows.causal}", repr(causal))
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if isinstance(rows, PackedRows):
        if rows.record is not None:
            rows.record.attention.append(AttentionCall.of(query, value, window=sliding_window or 0))
            return query.new_zeros(1, *query.shape[:2], value.shape[2]), None
        if rows.cache is not None:
            layer = rows.cache.layer(rows.call_of(cast("int", module.layer_idx)))
            key, value = layer.extend("key", key), layer.extend("value", value)
    segments = rows.segments(sliding_window or 0)
    heads = vars(module).get(_HEADS)
    attended = attend(query, key, value, segments, heads=heads, scale=scaling, soft_cap=softcap, sinks=s_aux)
    return attended.unsqueeze(0), None


def hold_together(layer: nn.Module) -> None:
    """Have all parts of a layer know the rows that `hold_rows` says of one of them."""
    held = Held()
    for part in layer.modules():
        vars(part)[_HELD] = held


@contextmanager
def hold_rows(part: nn.Module, rows: PackedRows | CarriedRows) -> Iterator[None]:
    """Have a part of a layer, and all inside of it, run on these rows within."""
    if not hasattr(part, _HELD):  # it lies in no layer
        hold_together(part)
    held: Held = getattr(part, _HELD)
    before, held.rows = held.rows, rows
    try:
        yield
    finally:
        held.rows = before


def rows_of(part: nn.Module) -> PackedRows:
    """Return the rows on which a part of a layer runs, which is not compiled.

    Raises:
        PluginError: none of its layers does.
    """
    rows = held_rows(part)
    if rows is None:
        raise _called_from_elsewhere(part)
    return rows


def held_rows(part: nn.Module) -> PackedRows | None:
    """Return the rows on which a part of a layer runs, which is not compiled; None if none of its layers does."""
    rows = _held_in_any_form(part)
    if isinstance(rows, CarriedRows):
        whole: PackedRows = content_of(rows.carrier)
        return whole
    return rows


def _held_in_any_form(part: nn.Module) -> PackedRows | CarriedRows | None:
    held: Held | None = getattr(part, _HELD, None)
    return None if held is None else held.rows


def _called_from_elsewhere(part: nn.Module) -> PluginError:
    return refusal(part, "attention inside of layers alone", "a call from elsewhere")


def set_heads(module: nn.Module, heads: Sequence[int]) -> None:
    """Have attention look at these heads of keys and values, one for each query head that it computes."""
    setattr(module, _HEADS, tuple(heads))


def refusal(module: nn.Module, expected: str, got: str) -> PluginError:
    """Return the error of a layer that cannot be packed."""
    return PluginError(
        "modules.language.config.model_type",
        expected=expected,
        got=f"{got}, from {type(module).__name__}",
        fix="plugins/transformers/README.md lists the families that can be trained.",
    )


def register_attention() -> None:
    """Have the library know `packed_attention`; again is fine."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
