"""Training with dropout against a plain loop that is given the same masks, and what is dropped where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mimo.hooks import ConfigError
from mimo.model import DECODER, DecoderConfig, Lora
from mimo.model.attention import Segments
from mimo.model.draws import fold, keep, key_of_name, threshold_of
from mimo.model.language import Rotation
from mimo.model.runtime import LanguageBatch, LowRank, Part, TensorAxis, build_part, sample_rows, step_key
from mimo.topology import Grid

CONFIG = DecoderConfig(
    vocabulary=11, hidden=12, layers=2, heads=2, intermediate=20, hidden_dropout=0.2, embedding_dropout=0.3
)
STEPS = 3
RATE = 0.1


def _build(config: DecoderConfig = CONFIG, **more: Any) -> Part:
    return build_part(
        DECODER,
        config,
        grid=Grid(name="language", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
        **more,
    )


def _batch(step: int, samples: tuple[int, int] = (4, 9)) -> LanguageBatch:
    tokens = torch.arange(step, step + 8) * 5 % CONFIG.vocabulary
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    batch = LanguageBatch.of(tokens, (tokens * 2 + 1) % CONFIG.vocabulary, positions, lengths=(5, 3))
    numbers = torch.tensor(samples).repeat_interleave(torch.tensor([5, 3]))
    return attrs.evolve(batch, draw_keys=sample_rows(step_key(1, step), numbers, positions))


def _masked(x: Tensor, batch: LanguageBatch, step: int, place: str, rate: float) -> Tensor:
    """Return what is left of rows, by masks that are made one row after the other."""
    rows = []
    for row, sample, position in zip(x, [4] * 5 + [9] * 3, batch.positions.tolist(), strict=True):
        key = fold(fold(fold(step_key(1, step), sample), 0), position)
        kept = keep(fold(key, key_of_name(f"language.{place}")).view(1), len(row), threshold_of(rate))[0]
        rows.append(row * kept / (1 - rate))
    return torch.stack(rows)


def _plain(part: Part, batch: LanguageBatch, step: int) -> Tensor:
    """Return the loss as a plain forward has it, with masks by hand."""
    module: Any = part.module
    x = _masked(module.embedding(batch.tokens), batch, step, "embedding_drop", 0.3)
    segments = Segments.of(batch.lengths, causal=True, rows=8, device="cpu")
    rotation = Rotation.of(batch, CONFIG)
    for index, layer in module.layers.items():
        y = layer.attention(layer.attention_norm(x), segments, rotation)
        x = x + _masked(y, batch, step, f"layers.{index}.attention_drop", 0.2)
        y = layer.mlp(layer.mlp_norm(x))
        x = x + _masked(y, batch, step, f"layers.{index}.mlp_drop", 0.2)
    return torch.nn.functional.cross_entropy(module.head(module.norm(x)), batch.labels, reduction="sum")


def _loss(part: Part, batch: LanguageBatch) -> Tensor:
    with part.drawing(rows=batch.draw_keys):
        return part.language.losses(part.language(batch, {}, None), batch.labels).sum()


def _check_training(_rank: int, recompute: str) -> None:
    ours, plain = _build(recompute=recompute), _build()
    for step in range(1, STEPS + 1):
        own = _loss(ours, _batch(step))
        other = _loss(ours, _batch(step + 10))  # a microbatch between forward and backward
        wanted = _plain(plain, _batch(step), step)
        torch.testing.assert_close(own, wanted)
        (own + 0 * other).backward()
        wanted.backward()
        with torch.no_grad():
            for parameter in (*ours.module.parameters(), *plain.module.parameters()):
                assert parameter.grad is not None
                parameter.sub_(RATE * parameter.grad)
                parameter.grad = None
    for one, another in zip(ours.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(one, another)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_training_agrees_with_a_plain_loop_that_has_the_same_masks(
    run_ranks: Callable[..., list[Any]], recompute: str
) -> None:
    """Losses of each step, and the weights after them, though backwards of several batches wait for each other."""
    run_ranks(1, _check_training, recompute)


def _check_others(_rank: int) -> None:
    part = _build()
    batch = _batch(1)
    losses = [float(_loss(part, one)) for one in (batch, batch, _batch(1, samples=(4, 10)))]
    assert losses[0] == losses[1] != losses[2]
    later = attrs.evolve(batch, draw_keys=_batch(2).draw_keys)
    assert float(_loss(part, later)) != losses[0]
    plain = _build(attrs.evolve(CONFIG, hidden_dropout=0.0, embedding_dropout=0.0))
    still = attrs.evolve(batch, draw_keys=None)
    assert float(_loss(part, still)) == float(_loss(plain, still)) == float(_loss(plain, batch)) != losses[0]


def test_other_steps_and_samples_drop_others_and_the_same_the_same(run_ranks: Callable[..., list[Any]]) -> None:
    """The loss of a batch follows from step and samples; evaluation, which has no keys, drops nothing."""
    run_ranks(1, _check_others)


def _check_places(_rank: int) -> None:
    part: Any = _build()
    batch, x = _batch(1), torch.ones(8, 12)
    layers = [getattr(part.module.layers[index], name) for index in "01" for name in ("attention_drop", "mlp_drop")]
    with part.drawing(rows=batch.draw_keys):
        found = [layer(x) for layer in [*layers, part.module.embedding_drop]]
    assert all(not torch.equal(one == 0, other == 0) for one in found for other in found if one is not other)


def test_each_place_has_a_mask_of_its_own(run_ranks: Callable[..., list[Any]]) -> None:
    """Layers, both parts of a layer, and modules."""
    run_ranks(1, _check_places)


FROZEN: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "nothing": ({}, [True, True, True]),
    "all": ({"frozen": True}, [False, False, False]),
    "a part": ({"frozen": frozenset({"embedding"})}, [False, True, True]),
    "a pattern": ({"frozen": frozenset({"layers.0.*"})}, [True, False, True]),
    "all but what is added": (
        {"frozen": True, "lora": Lora(rank=2, targets=("layers.1.mlp.up",))},
        [True, True, True],
    ),
}


def _check_frozen(_rank: int, name: str) -> None:
    keys, expected = FROZEN[name]
    module: Any = _build(**keys).module
    layers = (module.embedding_drop, module.layers["0"].mlp_drop, module.layers["1"].mlp_drop)
    assert [layer.site is not None for layer in layers] == expected


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_frozen_drops_nothing(run_ranks: Callable[..., list[Any]], name: str) -> None:
    """But where a module learns by what is added to its linears."""
    run_ranks(1, _check_frozen, name)


def _check_low_rank(_rank: int) -> None:
    config = attrs.evolve(CONFIG, hidden_dropout=0.0, embedding_dropout=0.0)
    part = _build(config, frozen=True, lora=Lora(rank=2, alpha=3.0, targets=("*.up",), dropout=0.4))
    up: Any = part.module.get_submodule("layers.1.mlp.up")
    assert isinstance(up.lora, LowRank)
    torch.nn.init.normal_(up.lora.up)
    batch, x = _batch(1), torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    dropped = _masked(x, batch, 1, "layers.1.mlp.up.lora", 0.4)
    expected = x @ up._parameters["weight"].t() + 1.5 * dropped @ up.lora.down.t() @ up.lora.up.t()
    with part.drawing(rows=batch.draw_keys):
        torch.testing.assert_close(up(x), expected)
    torch.testing.assert_close(up(x), x @ up.weight.t())


def test_low_rank_adaptation_drops_for_itself_alone(run_ranks: Callable[..., list[Any]]) -> None:
    """What a linear itself reads is whole: W x + scale · up · down · dropped x."""
    run_ranks(1, _check_low_rank)


@pytest.mark.parametrize("key", ["hidden_dropout", "embedding_dropout"])
@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rates_of_the_decoder_are_refused_by_their_path(key: str, rate: float) -> None:
    """At 1 nothing would be left."""
    with pytest.raises(ConfigError, match=rf"modules\.language\.config\.{key}: expected a rate of 0 or more and less"):
        DecoderConfig(**{key: rate})  # type: ignore[arg-type]


def test_rates_of_low_rank_adaptation_are_refused() -> None:
    """By the key; whoever reads the table puts its path before it."""
    with pytest.raises(ConfigError, match=r"^dropout: expected a rate of 0 or more and less than 1, got 1\.5"):
        Lora(rank=2, targets=("*",), dropout=1.5)
