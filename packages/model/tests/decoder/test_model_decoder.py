"""The decoder on one rank against a decoder written out here, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mimo.model import DECODER, DecoderConfig, Stage
from mimo.model.runtime import (
    NO_LABEL,
    LanguageBatch,
    LanguageStage,
    MimoModel,
    Part,
    TensorAxis,
    build_part,
    gradient_of,
    local,
)
from mimo.topology import Grid, StageId

CONFIGS = {
    "plain": DecoderConfig(vocabulary=11, hidden=12, layers=2, heads=2, intermediate=20),
    "grouped": DecoderConfig(vocabulary=7, hidden=10, layers=3, heads=6, kv_heads=2, head_dim=4, intermediate=9),
    "everything": DecoderConfig(
        vocabulary=9, hidden=8, layers=2, heads=4, kv_heads=1, intermediate=6, attention_bias=True, mlp_bias=True,
        tied=True, rope_theta=500.0, norm_eps=1e-3,
    ),
}  # fmt: skip


def _build(config: DecoderConfig) -> Part:
    part = build_part(
        DECODER,
        config,
        grid=Grid(name="language", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
    )
    with torch.no_grad():  # biases start at zero and norms at one, where a mistake would not show
        for index, parameter in enumerate(part.module.parameters()):
            piece = local(parameter)
            piece.copy_(torch.randn(piece.shape, generator=torch.Generator().manual_seed(index)) * 0.3 + 0.1)
    return part


def _batch(config: DecoderConfig) -> tuple[LanguageBatch, dict[str, Tensor]]:
    """Three samples, one of them empty, two encoders' rows, two rows of padding."""
    lengths = (5, 0, 3)
    tokens = torch.arange(10) * 5 % config.vocabulary
    labels = (tokens * 2 + 1) % config.vocabulary
    labels[[1, 2, 8, 9]] = NO_LABEL
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 0])
    placeholders = {"vision": torch.tensor([1, 2]), "audio": torch.tensor([6])}
    generator = torch.Generator().manual_seed(3)
    rows = {name: torch.randn(len(at), config.hidden, generator=generator) for name, at in placeholders.items()}
    return (
        LanguageBatch.of(tokens=tokens, labels=labels, positions=positions, lengths=lengths, placeholders=placeholders),
        rows,
    )


def _reference(  # noqa: C901 - the whole model on one page is the point
    config: DecoderConfig, weights: dict[str, Tensor], batch: LanguageBatch, rows: dict[str, Tensor]
) -> Tensor:
    """Sum of the losses, in double loops where the decoder packs."""

    def linear(name: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return x @ weights[f"{name}.weight"].T + (0 if bias is None else bias)

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turn(x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.tensor([position * config.rope_theta ** (-i / half) for i in range(half)])
        complex_x = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half), angle)
        return torch.cat((complex_x.real, complex_x.imag), -1)

    width, group = config.head_width, config.heads // config.key_value_heads
    total = torch.zeros(())
    start = 0
    for length in batch.lengths:
        x = weights["embedding.weight"][batch.tokens[start : start + length]].clone()
        for name, at in batch.placeholders.items():
            for row, position in zip(rows[name], at.tolist(), strict=True):
                if start <= position < start + length:
                    x[position - start] = row
        for layer in range(config.layers):
            path = f"layers.{layer}"
            y = norm(f"{path}.attention_norm", x)
            query, key, value = (linear(f"{path}.attention.{n}", y) for n in ("query", "key", "value"))
            heads = []
            for head in range(config.heads):
                mine = slice(head * width, (head + 1) * width)
                its = slice(head // group * width, (head // group + 1) * width)
                for_each = []
                for t in range(length):
                    q = turn(query[t, mine], t)
                    scores = torch.stack([q @ turn(key[s, its], s) for s in range(t + 1)]) / math.sqrt(width)
                    for_each.append(scores.softmax(0) @ value[: t + 1, its])
                heads.append(torch.stack(for_each) if for_each else x.new_zeros(0, width))
            x = x + linear(f"{path}.attention.output", torch.cat(heads, -1))
            y = norm(f"{path}.mlp_norm", x)
            gate = linear(f"{path}.mlp.gate", y)
            x = x + linear(f"{path}.mlp.down", gate * gate.sigmoid() * linear(f"{path}.mlp.up", y))
        output = weights["embedding.weight" if config.tied else "head.weight"]
        logits = norm("norm", x) @ output.T
        for t in range(length):
            label = int(batch.labels[start + t])
            if label != NO_LABEL:
                total = total - logits[t].log_softmax(0)[label]
        start += length
    return total


def _gradient(parameter: nn.Parameter) -> Tensor:
    gradient = gradient_of(parameter)
    assert gradient is not None
    return gradient


def _check_decoder(_rank: int, config: DecoderConfig) -> None:
    part = _build(config)
    weights = {
        name.removeprefix("language."): local(parameter.detach()).clone().requires_grad_()
        for name, parameter in part.parameters.items()
    }
    batch, rows = _batch(config)
    ours = {name: x.clone().requires_grad_() for name, x in rows.items()}
    theirs = {name: x.clone().requires_grad_() for name, x in rows.items()}
    wanted = _reference(config, weights, batch, theirs)
    wanted.backward()
    hidden = part.language(batch, ours, None)
    assert hidden.shape == (10, config.hidden)
    losses = part.language.losses(hidden, batch.labels)
    losses.sum().backward()
    assert not losses[batch.labels == NO_LABEL].any()
    torch.testing.assert_close(losses.sum(), wanted, rtol=1e-5, atol=0)
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    assert gradients.keys() == weights.keys()
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, gradient in gradients.items():
        found = _gradient(part.parameters[f"language.{name}"])
        assert (found - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-3 * whole), name
    for name in rows:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-4, atol=1e-6)
    logits = part.language.logits(hidden)
    assert logits.shape == (10, config.vocabulary)
    assert torch.equal(part.language.greedy(hidden), logits.argmax(1))
    assert isinstance(part.module, LanguageStage)
    part.module.loss_rows = 3
    with torch.no_grad():
        torch.testing.assert_close(part.language.losses(hidden, batch.labels), losses.detach(), rtol=1e-6, atol=0)
        assert torch.equal(part.language.greedy(hidden), logits.argmax(1))


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_decoder_written_out(run_ranks: Callable[..., list[Any]], name: str) -> None:
    """Loss and every gradient, those of the encoders' rows included, are those of the formulas sample by sample."""
    run_ranks(1, _check_decoder, CONFIGS[name])


def _check_padding(_rank: int) -> None:
    config = CONFIGS["everything"]
    part = _build(config)
    batch, rows = _batch(config)
    used = sum(batch.lengths)

    def run(batch: LanguageBatch) -> tuple[Tensor, dict[str, Tensor]]:
        part.module.zero_grad()
        losses = part.language.losses(part.language(batch, rows, None), batch.labels)
        losses.sum().backward()
        return losses, {name: _gradient(parameter) for name, parameter in part.parameters.items()}

    short = attrs.evolve(batch, **{name: getattr(batch, name)[:used] for name in ("tokens", "labels", "positions")})
    losses, gradients = run(batch)
    short_losses, short_gradients = run(short)
    assert torch.equal(losses[:used], short_losses)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, short_gradients[name], rtol=0, atol=1e-6)


def test_padding_at_the_end_changes_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    """Rows after the last sample take part in neither attention nor loss, and give no gradient."""
    run_ranks(1, _check_padding)


def _check_empty(_rank: int) -> None:
    part = _build(CONFIGS["everything"])
    none = torch.zeros(0, dtype=torch.long)
    for lengths in ((), (0, 0)):
        batch = LanguageBatch.of(
            tokens=none, labels=none, positions=none, lengths=lengths, placeholders={"vision": none}
        )
        rows = {"vision": torch.zeros(0, 8, requires_grad=True)}
        hidden = part.language(batch, rows, None)
        losses = part.language.losses(hidden, none)
        losses.sum().backward()
        assert losses.shape == (0,)
        assert rows["vision"].grad is not None
        assert part.language.greedy(hidden).shape == (0,)
    no_label, _ = _batch(CONFIGS["everything"])
    no_label = attrs.evolve(no_label, labels=torch.full((10,), NO_LABEL), placeholders={})
    losses = part.language.losses(part.language(no_label, {}, None), no_label.labels)
    losses.sum().backward()
    assert losses.tolist() == [0.0] * 10
    for parameter in part.parameters.values():
        gradient = gradient_of(parameter)
        assert gradient is None or not gradient.any()


def test_a_microbatch_of_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    """No rows, samples without tokens, and rows without a label run forward and backward; gradients are zero."""
    run_ranks(1, _check_empty)


def _check_bfloat16(_rank: int) -> None:
    config = CONFIGS["plain"]
    options: dict[str, Any] = {
        "grid": Grid(name="language", ranks=(0,)), "seed": 1, "axis": TensorAxis.single(),
        "mesh": DeviceMesh("cpu", [0], mesh_dim_names=("tp",)), "device": torch.device("cpu"),
    }  # fmt: skip
    full, half = build_part(DECODER, config, **options), build_part(DECODER, config, dtype=torch.bfloat16, **options)
    batch, rows = _batch(config)
    hidden = half.language(batch, rows, None)
    losses = half.language.losses(hidden, batch.labels)
    losses.sum().backward()
    assert hidden.dtype == torch.bfloat16
    assert losses.dtype == torch.float32
    torch.testing.assert_close(
        losses, full.language.losses(full.language(batch, rows, None), batch.labels), rtol=2e-2, atol=0
    )
    for name, parameter in half.parameters.items():
        assert torch.equal(local(parameter), local(full.parameters[name]).bfloat16())
        assert _gradient(parameter).dtype == torch.bfloat16


def test_bfloat16_computes_in_it_and_sums_losses_in_fp32(run_ranks: Callable[..., list[Any]]) -> None:
    """Parameters are the fp32 values rounded; losses come out in fp32."""
    run_ranks(1, _check_bfloat16)


def _check_names(_rank: int) -> None:
    part = _build(attrs.evolve(CONFIGS["everything"], tied=False))
    model = MimoModel([part])
    assert model.parts == {StageId("language", 0): part}
    assert model.parts_of("language") == (part,)
    assert model.parts_of("vision") == ()
    names = set(model.parameters_by_name)
    layer = {f"attention.{name}.{leaf}" for name in ("query", "key", "value", "output") for leaf in ("weight", "bias")}
    layer |= {f"mlp.{name}.{leaf}" for name in ("gate", "up", "down") for leaf in ("weight", "bias")}
    layer |= {"attention_norm.weight", "mlp_norm.weight"}
    wanted = {f"layers.{index}.{name}" for index in range(2) for name in layer}
    wanted |= {"embedding.weight", "norm.weight", "head.weight"}
    assert names == {f"language.{name}" for name in wanted}
    assert sum(1 for _ in model.parameters()) == len(names)


def test_names(run_ranks: Callable[..., list[Any]]) -> None:
    """Parameters are named by module and path, the model's being those of its parts."""
    run_ranks(1, _check_names)


def test_stage_parts() -> None:
    """Each stage says which parts it holds; the last holds the embedding too where it is tied."""
    config = CONFIGS["everything"]
    assert DECODER.stage_parts(config, Stage()) == {"embedding", "layers", "head"}
    assert DECODER.stage_parts(config, Stage(0, 3)) == {"embedding", "layers"}
    assert DECODER.stage_parts(config, Stage(1, 3)) == {"layers"}
    assert DECODER.stage_parts(config, Stage(2, 3)) == {"embedding", "layers", "head"}
    assert DECODER.stage_parts(attrs.evolve(config, tied=False), Stage(2, 3)) == {"layers", "head"}
