"""A generator's spec: what it says, and what of a layout it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mimo.hooks import CheckpointError, ConfigError
from mimo.model import GeneratorSpec, HfFamily, HfTensor, check_module, hf_families, noun_of, supported_axes
from mimo.model.runtime import TensorAxis, build_part, read_hf, write_hf
from mimo.topology import Grid


@attrs.frozen
class _Config:
    pass


class _Mean(nn.Module):
    """Says of each item how far its values are from what the mean of its rows makes of them."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, 1)

    def forward(self, items: Any, rows: Tensor, spans: Any, keys: Tensor) -> Tensor:
        made = [self.out(rows[start:stop].sum(0, keepdim=True)) for start, stop in spans]
        losses = [(item["value"] - one).square().flatten() for item, one in zip(items, made, strict=True)]
        return torch.cat([rows.new_zeros(0), *losses]) + 0 * len(keys)


SPEC = GeneratorSpec(
    name="mean",
    config=_Config,
    measure=lambda raw: (len(raw),),
    targets=lambda _config, size: size[0],
    prepare=lambda _config, raw: {"value": torch.tensor(raw)},
    build=lambda _config, hidden: _Mean(hidden),
)


def _part(**settings: Any) -> Any:
    return build_part(
        SPEC,
        _Config(),
        grid=Grid(name="drawer", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
        hidden=4,
        **settings,
    )


def test_a_generator_is_built_and_gives_a_loss_for_each_target(run_ranks: Callable[..., list[Any]]) -> None:
    """Of no item it gives none."""
    run_ranks(1, _check_losses)


def _check_losses(_rank: int) -> None:
    part = _part()
    assert set(part.parameters) == {"drawer.out.weight", "drawer.out.bias"}
    rows = torch.arange(12.0).view(3, 4)
    items = [SPEC.prepare(_Config(), raw) for raw in ([1.0], [2.0, 3.0])]
    losses = part.target_losses(items, rows, [(0, 1), (1, 3)], torch.zeros(2, dtype=torch.int64))
    assert losses.shape == (3,)
    assert part.target_losses([], rows[:0], [], torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_its_defaults_are_those_of_a_placeholder_of_one_row() -> None:
    """It reads the rows before that."""
    assert (SPEC.reads(_Config()), SPEC.rows(_Config())) == ("before", 1)
    assert noun_of(SPEC) == "generator"
    assert supported_axes(SPEC) == ()


def test_it_reads_and_writes_published_weights_by_a_table() -> None:
    """As every module does; the plugin's families are those of its spec, none where it has no table."""
    family = HfFamily(
        model_type="mean",
        architecture="MeanModel",
        settings=lambda _published: {},
        describe=lambda _config: {},
        tensors=lambda _config: [
            HfTensor(ours="out.weight", theirs="head.weight", dims=(1, 0)),
            HfTensor(ours="out.bias", theirs="head.bias"),
        ],
    )
    spec = attrs.evolve(SPEC, hf=[family])
    assert (hf_families(SPEC, _Config()), hf_families(spec, _Config())) == ((), (family,))
    one, other = spec.build(_Config(), 4), spec.build(_Config(), 4)
    written = write_hf(one, family, _Config())
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == {"head.weight": (4, 1), "head.bias": (1,)}
    assert read_hf(other, family, _Config(), written) == ()
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"weights of mean: expected .*, got head\.bias is missing"):
        read_hf(other, family, _Config(), {"head.weight": written["head.weight"]})


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"tp": 2}, "modules.drawer.tp: expected 1, since generator 'mean' has no tensor plan"),
        ({"cp": 2}, "modules.drawer.cp: expected 1, since generator 'mean' has no context parallelism"),
        ({"pp": 2}, "modules.drawer.pp: expected 1, since generator 'mean' has no pipeline stages"),
    ],
)
def test_axes_that_it_does_not_have_are_refused(axes: dict[str, int], text: str) -> None:
    """Each by its path."""
    with pytest.raises(ConfigError, match=text):
        check_module(SPEC, _Config(), grid=Grid(name="drawer", ranks=(0, 1), **axes))
