"""`build_part`: initial values from seed and name, freezing, and third-party modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mimo.hooks import PluginError
from mimo.model import DECODER, DecoderConfig, EncoderSpec, EncoderStages, Frozen, Stage, TensorSupport
from mimo.model.runtime import MimoModel, Part, Split, TensorAxis, build_part, gradient_of, local
from mimo.topology import Grid, StageId

CONFIG = DecoderConfig(vocabulary=7, hidden=8, layers=2, heads=2, intermediate=6, attention_bias=True, tied=True)


def _build(
    spec: Any = DECODER, config: Any = CONFIG, *, name: str = "language", seed: int = 1, pp: int = 1, stage: int = 0,
    frozen: Frozen = frozenset(), chunks: int = 1, first: Part | None = None,
) -> Part:  # fmt: skip
    return build_part(
        spec,
        config,
        grid=Grid(name=name, ranks=range(pp), pp=pp),
        stage=Stage(stage, pp * chunks),
        seed=seed,
        axis=TensorAxis.single(),
        mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
        device=torch.device("cpu"),
        hidden=4,
        frozen=frozen,
        first=first,
    )


def _values(part: Part) -> dict[str, Tensor]:
    return {name: local(parameter.detach()) for name, parameter in part.parameters.items()}


def _check_initial(_rank: int) -> None:
    before = torch.random.get_rng_state()
    first = _values(_build())
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    again, other_seed, other_name = _values(_build()), _values(_build(seed=2)), _values(_build(name="writer"))
    fixed = {name for name in first if name.endswith(("bias", "norm.weight"))}
    for name, value in first.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again[name])
        assert torch.equal(value, other_seed[name]) == (name in fixed), name
        assert torch.equal(value, other_name[name.replace("language", "writer")]) == (name in fixed), name
    one, other = (first[f"language.layers.{index}.mlp.up.weight"] for index in (0, 1))
    assert not torch.equal(one, other)
    deeper = _values(_build(config=attrs.evolve(CONFIG, layers=3, tied=False)))
    assert all(torch.equal(deeper[name], value) for name, value in first.items())


def test_initial_values_follow_from_seed_and_name(run_ranks: Callable[..., list[Any]]) -> None:
    """Nothing else matters: not the random state, not the other layers; and that state is left as it was."""
    run_ranks(1, _check_initial)


def _check_tied(_rank: int) -> None:
    first, last = _build(pp=2, stage=0), _build(pp=2, stage=1)
    assert first.tied_copies == frozenset()
    assert last.tied_copies == {"language.embedding.weight"}
    assert torch.equal(_values(first)["language.embedding.weight"], _values(last)["language.embedding.weight"])
    assert not any(name.startswith("language.layers.0.") for name in last.parameters)
    assert _build().tied_copies == frozenset()
    assert _build(config=attrs.evolve(CONFIG, tied=False), pp=2, stage=1).tied_copies == frozenset()


def test_tied_copy(run_ranks: Callable[..., list[Any]]) -> None:
    """The last stage holds the embedding too, begun from the same name, and says that stage 0 owns it."""
    run_ranks(1, _check_tied)


def _check_chunks(_rank: int) -> None:
    config = attrs.evolve(CONFIG, layers=4)
    whole = _values(_build(config=config))
    for first in (None, _build(config=config, pp=2, chunks=2)):
        stages = [_build(config=config, pp=2, chunks=2, stage=stage, first=first) for stage in range(4)]
        assert [stage.id for stage in stages] == [StageId("language", index) for index in range(4)]
        layers = [{name.split(".")[2] for name in stage.parameters if ".layers." in name} for stage in stages]
        assert layers == [{"0"}, {"1"}, {"2"}, {"3"}]
        found = {name: value for stage in stages for name, value in _values(stage).items()}
        assert found.keys() == whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in found.items())


def test_a_rank_may_build_several_stages(run_ranks: Callable[..., list[Any]]) -> None:
    """Stages of several chunks hold what the same stages on ranks of their own would."""
    run_ranks(1, _check_chunks)


def _check_shared(_rank: int) -> None:
    config, name = attrs.evolve(CONFIG, layers=4), "language.embedding.weight"
    first = _build(config=config, pp=2, chunks=2)
    last = _build(config=config, pp=2, chunks=2, stage=3, first=first)
    separate = _build(config=config, pp=2, chunks=2, stage=3)
    assert last.parameters[name] is first.parameters[name]
    assert separate.parameters[name] is not first.parameters[name]
    model = MimoModel([first, last])
    assert model.parts_of("language") == (first, last)
    numbers = sum(value.numel() for value in model.parameters_by_name.values())
    assert sum(value.numel() for value in model.parameters()) == numbers
    untied = attrs.evolve(config, tied=False)
    head = _build(config=untied, pp=2, chunks=2, stage=3, first=_build(config=untied, pp=2, chunks=2))
    assert name not in head.parameters


def test_first_and_last_stage_of_a_rank_share_what_is_tied(run_ranks: Callable[..., list[Any]]) -> None:
    """Where one rank holds both, as in a V, the embedding is one parameter, counted once."""
    run_ranks(1, _check_shared)


def _check_frozen(_rank: int) -> None:
    def trained(frozen: Frozen) -> set[str]:
        return {name.split(".")[1] for name, value in _build(frozen=frozen).parameters.items() if value.requires_grad}

    assert trained(frozenset()) == {"embedding", "layers", "norm"}
    assert trained(frozenset({"layers"})) == {"embedding", "norm"}
    assert trained(frozenset({"embedding", "head"})) == {"layers"}
    assert trained(True) == set()


def test_frozen_parts_need_no_gradient(run_ranks: Callable[..., list[Any]]) -> None:
    """What lies under a frozen part's prefixes is not trained, the rest is."""
    run_ranks(1, _check_frozen)


class Scale(nn.Module):
    """Holds a parameter that it can't draw again, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(4))
        self.offset: Tensor
        self.register_buffer("offset", torch.full((4,), 2.0))
        self.names = torch.arange(3).tolist()  # can't be done on the meta device

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


class ThirdParty(nn.Module):
    """Written without us in mind."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(4, 4)
        first.bias = nn.Parameter(torch.rand(4))
        self.layers = nn.ModuleDict({"0": first, "1": Scale(), "2": Scale()})
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = first.weight

    def forward(
        self, items: Sequence[Mapping[str, Tensor]], _sizes: Any = None, hidden: Tensor | None = None
    ) -> Tensor:
        rows: Tensor = torch.stack([item["x"] for item in items]) if hidden is None else hidden
        for layer in self.layers.values():
            rows = layer(rows)
        return rows


def _cut(module: nn.Module, stage: Stage) -> nn.Module:
    assert isinstance(module, ThirdParty)
    for index in set(range(3)) - set(stage.layers(3)):
        del module.layers[str(index)]
    if not stage.is_first:
        del module.again
    return module


THIRD_PARTY = EncoderSpec(
    name="stranger",
    config=DecoderConfig,
    measure=lambda raw: (1,),
    rows=lambda config, size: 1,
    prepare=lambda config, raw: {},
    build=lambda config, hidden: ThirdParty(),
)
STAGED = attrs.evolve(
    THIRD_PARTY,
    stages=EncoderStages(
        layers=lambda config: 3,
        message_rows=lambda config, size: 1,
        width=lambda config: 4,
        cut=_cut,
        parts=lambda config, stage: frozenset(),
    ),
)


def _check_third_party(_rank: int) -> None:
    part = _build(THIRD_PARTY, name="vision")
    assert not part.staged
    values = _values(part)
    assert set(values) == {
        "vision.layers.0.weight",
        "vision.layers.0.bias",
        "vision.layers.1.factor",
        "vision.layers.2.factor",
    }
    module = part.module
    assert isinstance(module, ThirdParty)
    assert module.again._parameters["weight"] is module.layers["0"]._parameters["weight"]
    torch.manual_seed(3)
    assert all(torch.equal(value, values[name]) for name, value in _values(_build(THIRD_PARTY, name="vision")).items())
    other = _values(_build(THIRD_PARTY, name="vision", seed=2))
    assert not torch.equal(other["vision.layers.1.factor"], values["vision.layers.1.factor"])
    assert not torch.equal(values["vision.layers.1.factor"], values["vision.layers.2.factor"])
    scale = module.layers["1"]
    assert isinstance(scale, Scale)
    assert torch.equal(scale.offset, torch.full((4,), 2.0))
    for pp in (2, 3):
        stages = [_build(STAGED, name="vision", pp=pp, stage=stage) for stage in range(pp)]
        assert stages[0].staged
        found = {name: value for stage in stages for name, value in _values(stage).items()}
        assert found.keys() == values.keys()
        assert all(torch.equal(value, values[name]) for name, value in found.items())


def test_a_third_party_module(run_ranks: Callable[..., list[Any]]) -> None:
    """Layers that can't draw again, share or need real numbers to be built: values still follow from the seed alone."""
    run_ranks(1, _check_third_party)


class Torch(nn.Module):
    """An encoder of PyTorch's own layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.extra = nn.ParameterList([torch.ones(8), torch.ones(8)])
        self.last = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, hidden))

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        x = torch.stack([item["x"] for item in items]).unsqueeze(1)
        x = self.layer(self.first(x).transpose(1, 2)) * self.extra[0] + self.extra[1]
        found: Tensor = self.last(x).flatten(0, 1)
        return found


def _check_torch_layers(_rank: int) -> None:
    part = _build(attrs.evolve(THIRD_PARTY, build=lambda config, hidden: Torch(hidden)), name="vision")
    plain = Torch(4)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(local(part.parameters[f"vision.{name}"]))
    items = [{"x": row} for row in torch.randn(2, 5)]
    found, wanted = part.encode(items, [(1,), (1,)]), plain(items)
    assert torch.equal(found, wanted)
    for rows in (found, wanted):
        rows.square().sum().backward()
    for name, parameter in plain.named_parameters():
        ours = gradient_of(part.parameters[f"vision.{name}"])
        assert ours is not None
        assert parameter.grad is not None
        assert torch.equal(ours, parameter.grad), name


def test_an_encoder_of_plain_torch_layers(run_ranks: Callable[..., list[Any]]) -> None:
    """PyTorch's own layers work as they are, values and gradients."""
    run_ranks(1, _check_torch_layers)


def _check_bad_plan(_rank: int) -> None:
    bad = TensorSupport(divisible=lambda config: {}, plan=lambda module, axis: {"layers.9.weight": Split(0)})
    with pytest.raises(PluginError, match=r"modules\.vision\.plugin: .*'stranger'.*\['layers\.9\.weight'\]"):
        _build(attrs.evolve(THIRD_PARTY, tensor=bad), name="vision")


def test_a_plan_for_parameters_that_do_not_exist(run_ranks: Callable[..., list[Any]]) -> None:
    """A misspelled name in a tensor plan is refused by name, not left out."""
    run_ranks(1, _check_bad_plan)


class Offsets(nn.Module):
    """Adds two parameters whose gradients autograd gets as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return one row for each item."""
        rows = torch.stack([item["row"] for item in items])
        return (rows + self.one.expand_as(rows)) + self.other.expand_as(rows)


def _encoder(build: Callable[[Any, int], nn.Module], parts: Mapping[str, Sequence[str]] | None = None) -> EncoderSpec:
    return EncoderSpec(
        name="strange",
        config=object,
        measure=lambda _raw: (1,),
        rows=lambda _config, _size: 1,
        prepare=lambda _config, raw: {"row": raw},
        build=build,
        parts=parts or {},
    )


def _check_shared_gradient(_rank: int) -> None:
    part = _build(_encoder(lambda _config, _hidden: Offsets()), object(), name="vision")
    for _ in range(2):
        part.encode([{"row": torch.zeros(3)}], [(1,)]).sum().backward()
    for parameter in part.parameters.values():
        gradient = gradient_of(parameter)
        assert gradient is not None
        assert gradient.tolist() == [2.0, 2.0, 2.0]


def test_two_parameters_never_share_a_gradient(run_ranks: Callable[..., list[Any]]) -> None:
    """Each accumulates its own over microbatches, though autograd hands both the same tensor."""
    run_ranks(1, _check_shared_gradient)


def _check_refused(_rank: int) -> None:
    cases: list[tuple[EncoderSpec, str]] = [
        (
            _encoder(lambda _config, _hidden: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))),
            "no dropout.*Dropout at 1",
        ),
        (_encoder(lambda _config, _hidden: nn.TransformerEncoderLayer(4, 2, 8)), "no dropout.*self_attn"),
        (_encoder(lambda _config, _hidden: nn.BatchNorm2d(3)), "no statistics over a batch.*BatchNorm2d at the top"),
        (
            _encoder(lambda _config, _hidden: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"projector": ["1"]}),
            r"modules\.vision\.plugin: expected every parameter of 'strange' under .* got \['0.weight', '0.bias'\]",
        ),
    ]
    for spec, text in cases:
        with pytest.raises(PluginError, match=text):
            _build(spec, object(), name="vision")


def test_what_would_depend_on_the_layout_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    """Dropout, statistics over a batch, and parameters that no part covers are named."""
    run_ranks(1, _check_refused)
