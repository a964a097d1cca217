"""LoRA beside linears: what is computed, what is trained, what is left as it was, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations

from mimo.hooks import ConfigError
from mimo.model import (
    DECODER,
    DecoderConfig,
    EncoderSpec,
    Frozen,
    Lora,
    Stage,
    check_training,
    lora_linear,
    lora_names,
    stage_trains,
)
from mimo.model.build.lora import attach_lora
from mimo.model.runtime import GroupedLinear, Linear, LowRank, Part, TensorAxis, build_part, gradient_of, linears, local
from mimo.topology import Grid

CONFIG = DecoderConfig(vocabulary=7, hidden=8, layers=3, heads=2, intermediate=6, attention_bias=True, tied=False)
LORA = Lora(rank=2, alpha=6.0, targets=("layers.[12].attention.*", "head"))


@attrs.frozen
class NoConfig:
    """No settings."""


class ThirdParty(nn.Module):
    """PyTorch's own layers, of which some read the weights of their linears themselves."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, hidden)
        self.attention = nn.MultiheadAttention(hidden, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(hidden, 2, 5, dropout=0.0, batch_first=True)

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return [T, hidden]."""
        rows = self.first(torch.cat([item["rows"] for item in items])).unsqueeze(0)
        attended: Tensor = self.attention(rows, rows, rows, need_weights=False)[0]
        found: Tensor = self.layer(attended)
        return found[0]


THIRD_PARTY = EncoderSpec(
    name="stranger",
    config=NoConfig,
    measure=lambda _raw: (1,),
    rows=lambda _config, _size: 1,
    prepare=lambda _config, raw: raw,
    build=lambda _config, hidden: ThirdParty(hidden),
)


def _build(
    spec: Any = DECODER, config: Any = CONFIG, *, lora: Lora | None = LORA, frozen: Frozen = True, **more: Any
) -> Part:
    return build_part(
        spec,
        config,
        grid=Grid(name="m", ranks=(0,)),
        seed=1,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
        hidden=4,
        frozen=frozen,
        lora=lora,
        **more,
    )


def _check_names_and_values(_rank: int) -> None:
    plain, part = _build(lora=None), _build()
    added = {name for name in part.parameters if lora_linear(name)}
    adapted = [f"m.layers.{index}.attention.{name}" for index in (1, 2) for name in ("query", "key", "value", "output")]
    assert added == {name for linear in [*adapted, "m.head"] for name in lora_names(linear)}
    assert part.parameters.keys() - added == plain.parameters.keys()
    for name, parameter in plain.parameters.items():
        assert torch.equal(local(parameter.detach()), local(part.parameters[name].detach())), name
    again = _build(lora=attrs.evolve(LORA, targets=("*",)), frozen=False)
    for name in added:
        value = local(part.parameters[name].detach())
        assert bool(value.any()) == name.endswith(".down")
        assert torch.equal(value, local(again.parameters[name].detach()))
    assert {name for name, one in part.parameters.items() if one.requires_grad} == added
    trained = {name for name, one in again.parameters.items() if one.requires_grad}
    assert trained >= {"m.embedding.weight", "m.layers.0.attention_norm.weight", *added}
    assert not {"m.head.weight", "m.layers.0.mlp.up.weight", "m.layers.0.attention.query.bias"} & trained
    some = _build(frozen=frozenset({"layers.*"}))
    assert {name for name, one in some.parameters.items() if one.requires_grad} == {
        *added,
        "m.embedding.weight",
        "m.norm.weight",
    }


def test_weights_are_what_they_are_without(run_ranks: Callable[..., list[Any]]) -> None:
    """By name and value; what is added has its own, drawn from seed and name, and alone is trained or more is."""
    run_ranks(1, _check_names_and_values)


def _stirred(part: Part) -> Part:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in part.parameters.items():
            if lora_linear(name):
                local(parameter).normal_(generator=generator)
    return part


def _merge_into(plain: Part, part: Part, lora: Lora) -> None:
    with torch.no_grad():
        for linear in {linear for name in part.parameters if (linear := lora_linear(name)) is not None}:
            down, up = (local(part.parameters[name]) for name in lora_names(linear))
            local(plain.parameters[f"{linear}.weight"]).add_(up @ down * lora.scale)


def _check_third_party(_rank: int) -> None:
    lora = Lora(rank=2, alpha=1.0, targets=("first", "attention.out_proj", "layer.*"))
    part, plain = _stirred(_build(THIRD_PARTY, NoConfig(), lora=lora)), _build(THIRD_PARTY, NoConfig(), lora=None)
    assert {lora_linear(name) for name in part.parameters} - {None} == {
        "m.first",
        "m.attention.out_proj",
        *(f"m.layer.{name}" for name in ("self_attn.out_proj", "linear1", "linear2")),
    }
    items = [{"rows": torch.randn(5, 3)}]
    before = plain.encode(items, [(1,)])
    _merge_into(plain, part, lora)
    wanted = plain.encode(items, [(1,)])
    found = part.encode(items, [(1,)])
    assert (before - wanted).norm() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    learnt = {name for name, one in part.parameters.items() if gradient_of(one) is not None}
    assert learnt == {name for name in part.parameters if lora_linear(name) is not None}
    part.module.eval(), plain.module.eval()
    with torch.no_grad():  # PyTorch's own layers then compute by one kernel, from the weights
        torch.testing.assert_close(part.encode(items, [(1,)]), plain.encode(items, [(1,)]), rtol=1e-5, atol=1e-5)


def test_whoever_reads_a_weight_reads_what_was_added_too(run_ranks: Callable[..., list[Any]]) -> None:
    """Third-party attention and layers compute with it, by their forward or not, with gradients or without."""
    run_ranks(1, _check_third_party)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_linear_computes_with_the_sum(experts: bool, scale: float) -> None:
    """Its own weight and the scaled product of both, with its bias and for some of its outputs."""
    torch.manual_seed(0)
    x = torch.randn(6, 5, dtype=torch.float64)
    linear: Any = GroupedLinear(2, 5, 3) if experts else Linear(5, 3)
    linear.lora = LowRank(2, 5, 3, experts=[2] if experts else [], scale=scale)
    linear.double()
    nn.init.normal_(linear.lora.up)
    merged = linear.weight + scale * linear.lora.up @ linear.lora.down
    torch.testing.assert_close(linear.lora.product(), merged - linear.weight)
    if experts:
        wanted = torch.cat([x[:2] @ merged[0].T, x[2:] @ merged[1].T])
        torch.testing.assert_close(linear(x, [2, 4]), wanted)
        return
    nn.init.normal_(linear.bias)
    torch.testing.assert_close(linear(x), x @ merged.T + linear.bias)
    linear.outputs = slice(1, 3)
    torch.testing.assert_close(linear(x), (x @ merged.T + linear.bias)[:, 1:])


def _check_deferred(_rank: int) -> None:
    items = [{"rows": torch.randn(5, 3)}]
    lora = Lora(rank=2, targets=("first", "layer.linear1"))
    at_once, later = (
        _stirred(_build(THIRD_PARTY, NoConfig(), lora=lora, splits_backward=splits)) for splits in (False, True)
    )
    at_once.encode(items, [(1,)]).square().sum().backward()
    with later.defer_weight_grads() as rest:
        later.encode(items, [(1,)]).square().sum().backward()
    own = {name: one for name, one in later.parameters.items() if one.requires_grad}
    assert set(rest.parameters) == {local(one) for one in own.values()}
    assert all(gradient_of(one) is None for one in own.values())
    rest()
    for name, one in own.items():
        torch.testing.assert_close(gradient_of(one), gradient_of(at_once.parameters[name]))


def test_its_weight_gradients_are_deferred(run_ranks: Callable[..., list[Any]]) -> None:
    """Where a backward is split, beside PyTorch's own linears too."""
    run_ranks(1, _check_deferred)


@pytest.mark.parametrize(
    ("frozen", "targets", "trains"),
    [
        (frozenset({"layers.1.*"}), (), (True, False, True)),
        (frozenset({"layers.*", "embedding"}), (), (False, False, True)),
        (frozenset({"layers.*", "head", "norm.weight"}), (), (True, False, False)),
        (True, ("layers.1.mlp.up",), (False, True, False)),
        (True, ("head",), (False, False, True)),
        (frozenset({"layers.[02]*", "head", "norm.weight"}), ("layers.1.*",), (True, True, False)),
    ],
)
def test_which_stages_train(frozen: Frozen, targets: tuple[str, ...], trains: tuple[bool, ...]) -> None:
    """Those that hold a parameter which no pattern freezes, or a linear that is adapted."""
    lora = Lora(rank=1, targets=targets) if targets else None
    stages = [Stage(index, 3) for index in range(3)]
    found = [stage_trains(DECODER, CONFIG, stage=stage, frozen=frozen, lora=lora) for stage in stages]
    assert tuple(found) == trains


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"rank": 0, "targets": ("*",)}, "rank: expected 1 to 1048576, got 0."),
        ({"rank": 1, "alpha": -1.0, "targets": ("*",)}, "alpha: expected a finite number of 0 or more; 0: the rank"),
        ({"rank": 1}, "targets: expected patterns of the paths of linears inside the module, got none. "),
    ],
)
def test_wrong_settings(keys: dict[str, Any], text: str) -> None:
    """Refused with what was expected."""
    with pytest.raises(ConfigError) as refused:
        Lora(**keys)
    assert str(refused.value).startswith(text)


class Idle(ThirdParty):
    """A layer of which the plugin says that it is not to learn, as of one whose rows nobody reads."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.idle = nn.Linear(3, hidden).requires_grad_(requires_grad=False)


IDLE = attrs.evolve(THIRD_PARTY, build=lambda _config, hidden: Idle(hidden))


def _check_idle(_rank: int) -> None:
    part = _build(IDLE, NoConfig(), lora=Lora(rank=1, targets=("*",)), frozen=False)
    adapted = {lora_linear(name) for name in part.parameters} - {None}
    assert adapted == {
        "m.first",
        "m.attention.out_proj",
        "m.layer.self_attn.out_proj",
        "m.layer.linear1",
        "m.layer.linear2",
    }


def test_what_is_not_to_learn_is_not_adapted(run_ranks: Callable[..., list[Any]]) -> None:
    """There would be no gradient; a pattern that names nothing else matches none."""
    run_ranks(1, _check_idle)
    with pytest.raises(ConfigError, match=r"got 'idle', which matches none\. Known here: first, "):
        check_training(IDLE, NoConfig(), name="m", hidden=8, frozen=frozenset(), lora=Lora(rank=1, targets=("idle",)))


def test_a_linear_whose_weight_is_made_of_others_is_none() -> None:
    """It is left out of what there is; those beside it are adapted."""
    module = nn.ModuleDict({"made": parametrizations.weight_norm(nn.Linear(3, 4)), "plain": nn.Linear(3, 4)})
    assert [path for path, _ in linears(module)] == ["plain"]
    assert set(attach_lora(module, Lora(rank=1, targets=("*",)), {})) == {"plain.lora.down", "plain.lora.up"}


class Shared(nn.Module):
    """Two linears with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight


@pytest.mark.parametrize(
    ("spec", "config", "keys", "text"),
    [
        (
            DECODER,
            CONFIG,
            {"lora": Lora(rank=1, targets=("head", "layers.*.attn.*"))},
            "modules.m.lora.targets: expected patterns of the paths of linears inside m, got 'layers.*.attn.*', which",
        ),
        (
            attrs.evolve(THIRD_PARTY, build=lambda _config, _hidden: Shared()),
            NoConfig(),
            {"lora": Lora(rank=1, targets=("other",))},
            "modules.m.lora.targets: expected linears with weights of their own, got other, whose weight is also one.",
        ),
        (
            THIRD_PARTY,
            NoConfig(),
            {"frozen": frozenset({"layer.*", "frist.weight"})},
            "modules.m.frozen: expected patterns of the paths of parameters inside it, got 'frist.weight', which",
        ),
    ],
    ids=["target", "shared", "frozen"],
)
def test_what_a_module_lacks_is_refused(spec: Any, config: Any, keys: dict[str, Any], text: str) -> None:
    """With what it has, or the closest of it."""
    with pytest.raises(ConfigError) as refused:
        check_training(spec, config, name="m", hidden=8, **{"frozen": frozenset(), **keys})
    assert str(refused.value).startswith(text)
