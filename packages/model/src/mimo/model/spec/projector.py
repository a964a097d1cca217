"""What brings an encoder's rows to the width of the language model: settings, number of rows and work. Free of torch.

`mimo.model.runtime.Projector` says what is computed. A grid is (down, across): the patches of one picture, or of
whatever else an encoder sees as one; its rows lie row by row, after the class tokens that the encoder has put there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from mimo.hooks import ConfigError, check_at_most
from mimo.model.spec.encoder_flops import Activation
from mimo.model.spec.flops import OpCost, linear_cost
from mimo.model.spec.limits import MAX_HEADS, MAX_LAYERS, MAX_LEARNED_ROWS, MAX_WIDTH

PatchGrid: TypeAlias = tuple[int, int]

RESAMPLER_RATIO = 4
"""How much wider than a resampler its feed-forward parts are inside."""

_WHERE = "config.projector"  # where encoders keep it
_LIMITS: Mapping[str, int] = {
    "hidden": MAX_WIDTH,
    "queries": MAX_LEARNED_ROWS,
    "heads": MAX_HEADS,
    "layers": MAX_LAYERS,
}
_UNUSED: Mapping[str, tuple[str, ...]] = {
    "linear": ("hidden", "activation", "queries", "heads", "layers"),
    "mlp": ("queries", "heads", "layers"),
    "resampler": ("bias",),
}


@attrs.frozen(kw_only=True)
class ProjectorConfig:
    """Settings of a projector, ``modules.<name>.config.projector``.

    Args:
        kind: ``linear``: one product; ``mlp``: two with an activation between; ``resampler``: a fixed number of learned
            queries for each grid, which attend to its rows (Alayrac et al. 2022, arXiv:2204.14198, section 3.1).
        hidden: width inside an mlp, 0 for that of the language model's rows; width inside a resampler.
        shuffle: side of the squares of neighbouring rows that become one, as many times as wide (pixel shuffle; Chen et
            al. 2024, arXiv:2404.16821, section 3.1): 1, 2 or 4.
        norm: of the rows, shuffled if they are, before all else: ``none``, ``layer`` or ``rms``.
        activation: of an mlp, and inside a resampler.
        bias: whether the products of ``linear`` and ``mlp`` have one.
        queries: of a resampler, rows that a grid becomes.
        heads: of a resampler's attention.
        layers: of a resampler.

    Raises:
        ConfigError: a value is out of range, or of no use to the kind.
    """

    kind: Literal["linear", "mlp", "resampler"] = "mlp"
    hidden: int = 0
    shuffle: int = 1
    norm: Literal["none", "layer", "rms"] = "none"
    activation: Activation = "gelu"
    bias: bool = True
    queries: int = 64
    heads: int = 8
    layers: int = 2

    def __attrs_post_init__(self) -> None:
        """Refuse what is out of range, and what would be ignored."""
        check_at_most(self, _LIMITS, where=_WHERE)
        if self.shuffle not in (1, 2, 4):
            raise _refused("shuffle", "1, 2 or 4", self.shuffle)
        for key in _UNUSED[self.kind]:
            if (value := getattr(self, key)) != getattr(attrs.fields(ProjectorConfig), key).default:
                raise _refused(key, f"none, since a projector of kind {self.kind!r} has no use for it", value)
        for key in ("queries", "heads", "layers"):
            if getattr(self, key) < 1:
                raise _refused(key, "1 or more", getattr(self, key))
        if self.hidden < 0:
            raise _refused("hidden", "0 or more", self.hidden)
        if self.kind == "resampler" and (not self.hidden or self.hidden % self.heads):
            raise _refused("hidden", f"the resampler's own width, a multiple of heads = {self.heads}", self.hidden)


def projected_rows(config: ProjectorConfig, grid: PatchGrid, *, class_tokens: int = 0) -> int:
    """Return the rows that a grid becomes.

    Args:
        config: of the projector.
        grid: whose sides the shuffle must divide.
        class_tokens: class tokens that stay before it.
    """
    down, across = grid
    assert down % config.shuffle == across % config.shuffle == 0, (grid, config.shuffle)
    return config.queries if config.kind == "resampler" else class_tokens + down * across // config.shuffle**2


def projected_grid(
    config: ProjectorConfig, grids: Sequence[PatchGrid], *, class_tokens: int = 0
) -> tuple[int, int, int] | None:
    """Return how many frames, rows down and across an item's rows are, as `EncoderSpec` wants its ``grid``.

    Args:
        config: of the projector.
        grids: of the item, all the same: each is a frame.
        class_tokens: class tokens that stay before each grid; with these, as out of a resampler, rows lie in no grid.
    """
    if class_tokens or config.kind == "resampler":
        return None
    down, across = grids[0]
    return len(grids), down // config.shuffle, across // config.shuffle


def projector_divisible(config: ProjectorConfig) -> Mapping[str, int]:
    """Return the counts that ``tp`` must divide, as `TensorSupport` wants them."""
    return {"projector.heads": config.heads} if config.kind == "resampler" else {}


def projector_cost(
    config: ProjectorConfig, grids: Sequence[PatchGrid], *, width: int, hidden: int, class_tokens: int = 0
) -> OpCost:
    """Return what a forward of a projector takes.

    Args:
        config: of the projector.
        grids: of all items.
        width: of the encoder's rows.
        hidden: of the language model's.
        class_tokens: class tokens that stay before each grid.
    """
    inputs = width * config.shuffle**2
    seen = [class_tokens + down * across // config.shuffle**2 for down, across in grids]
    rows = sum(seen)
    work = OpCost(copied=rows * inputs)
    if config.norm != "none":
        work += OpCost(copied=rows * inputs, weights=inputs * (2 if config.norm == "layer" else 1))
    if config.kind == "linear":
        return work + linear_cost(rows, inputs, hidden, bias=config.bias)
    if config.kind == "mlp":
        return work + _mlp(rows, inputs, config.hidden or hidden, hidden, bias=config.bias)
    asked, inner = len(seen) * config.queries, config.hidden
    layer = linear_cost(asked, inner, inner, bias=True) + linear_cost(asked, inner, inner, bias=True)
    layer += linear_cost(rows, inputs, inner) + linear_cost(rows, inputs, inner, bias=True, shared=True)
    layer += OpCost(inner=4.0 * config.queries * rows * inner)
    layer += _mlp(asked, inner, RESAMPLER_RATIO * inner, inner)
    # Kept: the queries and their norm, twice; what they ask, and find with its log-sum; keys and values.
    split = asked * (2.0 * inner + config.heads) + rows * 2.0 * inner
    layer += OpCost(copied=4.0 * asked * inner, split=split, weights=4 * inner)
    work = sum([layer] * config.layers, work) + linear_cost(asked, inner, hidden, bias=True)
    return work + OpCost(copied=2.0 * asked * inner, weights=config.queries * inner + 2 * inner)


def _mlp(rows: int, inputs: int, middle: int, outputs: int, *, bias: bool = True) -> OpCost:
    products = linear_cost(rows, inputs, middle, bias=bias) + linear_cost(rows, middle, outputs, bias=bias)
    return products + OpCost(split=2.0 * rows * middle)


def _refused(key: str, expected: str, got: Any) -> ConfigError:
    return ConfigError(f"{_WHERE}.{key}", expected=expected, got=repr(got))
