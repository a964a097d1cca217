"""Recomputation and split backwards where layers hold collectives: every rank repeats the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from spread import Config, spec_of
from torch import Tensor

from mimo.model import DecoderConfig, Frozen, HybridConfig
from mimo.model.runtime import NO_LABEL, ContextAxis, ExpertAxis, LanguageBatch, Part, TensorAxis, build_part, local
from mimo.topology import ROW_AXES, Grid, Module, ModuleGraph, Recompute, context_spans
from mimo.topology.meshes import Meshes

DENSE = DecoderConfig(
    vocabulary=11, hidden=12, layers=2, heads=6, kv_heads=2, intermediate=10, attention_bias=True, query_key_norm=True
)
EXPERTS = DecoderConfig(
    vocabulary=11, hidden=12, layers=2, heads=4, head_dim=4, intermediate=12, experts=4, shared_intermediate=6,
    dense_layers=1, balance_loss=0.1, z_loss=0.1, expert_bias_rate=0.01,
)  # fmt: skip
HYBRID = HybridConfig(
    vocabulary=11, hidden=12, pattern="ME*-", heads=4, kv_heads=2, head_dim=4, intermediate=10, activation="relu2",
    experts=4, shared_intermediate=6, balance_loss=0.1, mamba_heads=6, mamba_head_dim=3, mamba_groups=3,
    mamba_state=5, mamba_chunk=4,
)  # fmt: skip
LAYERS = frozenset({"layers", "head"})


@attrs.frozen(kw_only=True)
class Layout:
    """A grid, its samples lane by lane, and what is frozen."""

    sizes: dict[str, int]
    config: Config = DENSE
    sequence_parallel: bool = False
    lengths: tuple[tuple[int, ...], ...] = ((6, 0, 5),)
    frozen: Frozen = frozenset()

    @property
    def grid(self) -> Grid:
        """Its grid."""
        ranks = self.sizes.get("dp", 1) * self.sizes.get("cp", 1) * self.sizes.get("tp", 1)
        return Grid(name="language", ranks=range(ranks), **self.sizes)


def _batch(layout: Layout, rank: int) -> LanguageBatch:
    """Return what a rank holds of its lane: its share of each sample, padded where rows are split."""
    place, vocabulary = layout.grid.coordinates(rank), layout.config.vocabulary
    lengths = layout.lengths[place.dp]
    tokens, samples, positions = list[int](), list[int](), list[int]()
    for sample, length in enumerate(lengths):
        for start, stop in context_spans(length, size=layout.grid.cp, rank=place.cp):
            positions += range(start, stop)
            tokens += [(7 * position + 3 * sample + 5 * place.dp) % vocabulary for position in range(start, stop)]
            samples += [sample] * (stop - start)
    padding = -len(tokens) % layout.grid.tp
    labels = [(3 * token + 1) % vocabulary for token in tokens]
    return LanguageBatch(
        tokens=torch.tensor(tokens + [0] * padding, dtype=torch.long),
        labels=torch.tensor(labels + [NO_LABEL] * padding, dtype=torch.long),
        positions=torch.tensor(positions + [0] * padding, dtype=torch.long),
        lengths=lengths,
        placeholders={},
        samples=torch.tensor(samples + [len(lengths)] * padding, dtype=torch.long),
        label_tokens=lengths,
    )


def _build(layout: Layout, meshes: Meshes, rank: int, recompute: Recompute, *, splits_backward: bool) -> Part:
    grid, mesh = layout.grid, meshes.tensor_mesh(layout.grid)
    group, rows = meshes.axes_group(grid, ("ep", "etp")), meshes.axes_group(grid, ROW_AXES)
    return build_part(
        spec_of(layout.config),
        layout.config,
        grid=grid,
        seed=3,
        axis=TensorAxis.of(mesh, sequence_parallel=layout.sequence_parallel),
        mesh=mesh,
        device=torch.device("cpu"),
        context=ContextAxis.of(meshes.axes_group(grid, ("cp",))),
        experts=ExpertAxis.of(grid, rank, group=group, rows=rows),
        expert_mesh=meshes.expert_mesh(grid),
        frozen=layout.frozen,
        recompute=recompute,
        splits_backward=splits_backward,
    )


def _gradients(part: Part, batch: LanguageBatch) -> dict[str, Tensor]:
    losses = part.language.losses(part.language(batch, {}, None), batch.labels)
    with part.defer_weight_grads() as later:
        (losses.sum() + sum(batch.aux_losses.losses.values())).backward()
    later()
    found = {}
    for path, parameter in part.parameters.items():
        assert (parameter.grad is not None) == parameter.requires_grad, path
        if parameter.grad is not None:
            found[path] = local(parameter.grad)
    return found


def _check(rank: int, layout: Layout) -> None:
    module = Module(grid=layout.grid, trains=(True,), experts=layout.config.experts > 0)
    graph = ModuleGraph(modules=(module,), arrows=())
    meshes = Meshes(graph, rank=rank, device_type="cpu")
    wanted = _gradients(_build(layout, meshes, rank, "none", splits_backward=False), _batch(layout, rank))
    ways: tuple[Recompute, ...] = ("none", "selective", "full")
    for way in ways:
        for splits_backward in (False, True):
            part = _build(layout, meshes, rank, way, splits_backward=splits_backward)
            found = _gradients(part, _batch(layout, rank))
            assert found.keys() == wanted.keys()
            for path, gradient in wanted.items():
                if way == "none" or splits_backward:  # by itself each way is bitwise the same, split or not
                    torch.testing.assert_close(found[path], gradient, rtol=1e-5, atol=1e-6, msg=path)
                else:
                    assert torch.equal(found[path], gradient), (way, path)


LAYOUTS = {
    "tp2": Layout(sizes={"tp": 2}),
    "tp3, copied keys": Layout(sizes={"tp": 3}),
    "tp2, rows split": Layout(sizes={"tp": 2}, sequence_parallel=True),
    "tp2, no rows": Layout(sizes={"tp": 2}, sequence_parallel=True, lengths=((),)),
    "cp2": Layout(sizes={"cp": 2}),
    "cp2, a rank without rows": Layout(sizes={"cp": 2}, lengths=((1,),)),
    "cp2, a rank without rows, layers frozen": Layout(sizes={"cp": 2}, lengths=((1,),), frozen=LAYERS),
    "cp2 tp2, rows split": Layout(sizes={"cp": 2, "tp": 2}, sequence_parallel=True),
    "ep2 over lanes, one empty": Layout(sizes={"dp": 2, "ep": 2}, config=EXPERTS, lengths=((5, 3), ())),
    "ep2 over lanes, layers frozen": Layout(
        sizes={"dp": 2, "ep": 2}, config=EXPERTS, lengths=((5, 3), ()), frozen=LAYERS
    ),
    "ep2 over tensor ranks": Layout(sizes={"tp": 2, "ep": 2}, config=EXPERTS),
    "ep2 over tensor ranks, rows split": Layout(sizes={"tp": 2, "ep": 2}, config=EXPERTS, sequence_parallel=True),
    "etp2 over context ranks, one empty": Layout(sizes={"cp": 2, "etp": 2}, config=EXPERTS, lengths=((1,),)),
    "hybrid, cp2": Layout(sizes={"cp": 2}, config=HYBRID),
    "hybrid, cp2, a rank without rows": Layout(sizes={"cp": 2}, config=HYBRID, lengths=((1,),)),
    "hybrid, cp2, a rank without rows, layers frozen": Layout(
        sizes={"cp": 2}, config=HYBRID, lengths=((1,),), frozen=LAYERS
    ),
    "hybrid, tp2 inside of groups, rows split": Layout(sizes={"tp": 2, "ep": 2}, config=HYBRID, sequence_parallel=True),
    "ep2 etp2 over cp2 and tp2": Layout(sizes={"cp": 2, "tp": 2, "ep": 2, "etp": 2}, config=EXPERTS),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives_are_repeated_by_all_alike(run_ranks: Callable[..., list[Any]], name: str) -> None:
    """Nobody waits for a rank without rows, and each rank's gradients are those without recomputation, split or not."""
    layout = LAYOUTS[name]
    run_ranks(len(layout.grid.ranks), _check, layout)
