"""Compiled layers: how many graphs they take, where these end, what they save, and that they compute the same."""

from __future__ import annotations

import random
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mimo.hooks import ConfigError
from mimo.model import DECODER, HYBRID, DecoderConfig, EncoderSpec, HybridConfig, LanguageModelSpec, Lora, Stage
from mimo.model.runtime import (
    NO_LABEL,
    Compilation,
    LanguageBatch,
    Mamba,
    Moe,
    Part,
    TensorAxis,
    build_part,
    check_backend,
    compilation_of,
    gradient_of,
    local,
    sample_rows,
    step_key,
)
from mimo.testing import fork_ranks
from mimo.topology import Grid

BREAKS = {"Moe": Moe.stays_eager, "Mamba": Mamba.stays_eager}
"""What layers leave out of their graphs, and why: nothing else ends one."""
BATCHES = 20
DENSE = DecoderConfig(
    vocabulary=11, hidden=16, layers=2, heads=4, kv_heads=2, intermediate=40, tied=True, attention_bias=True,
    mlp_bias=True, query_key_norm=True,
)  # fmt: skip
DROPPING = attrs.evolve(DENSE, hidden_dropout=0.3)
MIXED = DecoderConfig(
    vocabulary=11, hidden=16, layers=3, heads=4, intermediate=24, experts=4, dense_layers=1, balance_loss=0.1,
)  # fmt: skip
MAMBA = HybridConfig(
    vocabulary=11, hidden=16, pattern="M*-", heads=4, intermediate=24, mamba_heads=4, mamba_head_dim=4,
    mamba_state=4,
)  # fmt: skip


def _build(config: Any, *, spec: LanguageModelSpec = DECODER, tensor: int = 1, **more: Any) -> Part:
    mesh = init_device_mesh("cpu", (tensor,), mesh_dim_names=("tp",))
    return build_part(
        spec,
        config,
        grid=Grid(name="language", ranks=tuple(range(tensor)), tp=tensor),
        seed=1,
        axis=TensorAxis.of(mesh, sequence_parallel=tensor > 1),
        mesh=mesh,
        expert_mesh=DeviceMesh("cpu", [[0]], mesh_dim_names=("ep", "etp")) if tensor == 1 else None,
        device=torch.device("cpu"),
        **more,
    )


def _batches(count: int, *, multiple: int = 1) -> list[LanguageBatch]:
    """Return ragged batches, each with its number of samples, rows and padding."""
    rng, found = random.Random(3), list[LanguageBatch]()
    for _ in range(count):
        lengths = [rng.randint(0, 9) for _ in range(rng.randint(1, 5))]
        rows = -(-(sum(lengths) + rng.randint(1, 3)) // multiple) * multiple
        tokens = (torch.arange(rows) * 5) % 11
        labels = tokens.roll(-1).masked_fill(torch.arange(rows) >= sum(lengths), NO_LABEL)
        keys = sample_rows(step_key(1, len(found)), torch.zeros(rows, dtype=torch.long), torch.arange(rows))
        batch = LanguageBatch.of(tokens, labels, torch.arange(rows), lengths=tuple(lengths))
        found.append(attrs.evolve(batch, draw_keys=keys))
    return found


def _gradients(part: Part, batches: Sequence[LanguageBatch]) -> dict[str, Tensor]:
    losses = []
    for batch in batches:
        with part.drawing(rows=batch.draw_keys if part.draw_keys.is_read else None):
            hidden = part.language(batch, {}, None)
            losses.append(part.language.losses(hidden, batch.labels).sum() + sum(batch.aux_losses.losses.values()))
    with part.defer_weight_grads() as later:
        torch.stack(losses).sum().backward()
    later()
    return {name: local(found) for name, one in part.parameters.items() if (found := gradient_of(one)) is not None}


CASES: dict[str, tuple[LanguageModelSpec, Any, dict[str, Any]]] = {
    "dense": (DECODER, DENSE, {}),
    "experts": (DECODER, MIXED, {"recompute": "full"}),
    "dropping, selective, lora, split": (
        DECODER,
        DROPPING,
        {
            "recompute": "selective",
            "splits_backward": True,
            "lora": Lora(rank=2, targets=("*mlp*",), dropout=0.2),
            "frozen": frozenset({"embedding"}),
        },
    ),
    "hybrid": (HYBRID, MAMBA, {}),
}  # fmt: skip


EXPECTED = {
    "dense": (1, set()),
    "experts": (3, {"Moe"}),  # dense ones, and of the others what comes before and behind
    "dropping, selective, lora, split": (2, set()),  # the first layer has no gradient to hand on
    "hybrid": (2, set()),  # those of attention and of dense parts: others are eager whole
}
"""How many graphs `BATCHES` ragged batches take, and what ends them."""


@attrs.frozen
class Compared:
    """What a compiled model does beside the same that runs eagerly.

    Args:
        graphs: how many were made.
        breaks: what ends them.
        deviation: by how much gradients differ, of their own norm at most.
        repeated: whether a second run gives the same bits.
        saved: bytes saved for a backward, by the compiled and by the eager one.
    """

    graphs: int
    breaks: set[str]
    deviation: float
    repeated: bool
    saved: tuple[int, int]


def _compare_case(_rank: int, name: str) -> Compared:
    from torch._dynamo.utils import counters

    spec, config, more = CASES[name]
    eager, part = (_build(config, spec=spec, **more, compile_backend=backend) for backend in ("", "aot_eager"))
    wanted, found = (_gradients(one, _batches(BATCHES)) for one in (eager, part))
    found = {path: gradient.clone() for path, gradient in found.items()}
    for parameter in part.module.parameters():
        parameter.grad = None
    again = _gradients(part, _batches(BATCHES))
    assert found.keys() == wanted.keys() == again.keys()
    return Compared(
        graphs=counters["stats"]["unique_graphs"],
        breaks={next(place for place, why in BREAKS.items() if why in text) for text in counters["graph_break"]},
        deviation=max(float((found[path] - one).norm() / one.norm().clamp_min(1e-3)) for path, one in wanted.items()),
        repeated=all(torch.equal(found[path], again[path]) for path in found),
        saved=(_saved(part), _saved(eager)),
    )


class _Saved:
    """A tensor that is saved for a backward, as long as it is."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()  # else an output would hold its own graph


def _saved(part: Part) -> int:
    """Return the bytes that a forward keeps for its backward, beside weights."""
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(x: Tensor) -> _Saved:
        saved.add(found := _Saved(x))
        return found

    (batch,) = _batches(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.x):
        hidden = part.language(batch, {}, None)
    assert hidden.requires_grad
    storages = {one.x.untyped_storage().data_ptr(): one.x.untyped_storage().nbytes() for one in saved}
    weights = {local(one).untyped_storage().data_ptr() for one in part.parameters.values()}
    return sum(size for place, size in storages.items() if place not in weights)


class Foreign(nn.Module):
    """A layer of a third party over rows of one item [1, T, W]: with a step that depends on what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)
        self.left_out = LeftOut()

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, T, W] of ``x`` [1, T, W]."""
        x = x + self.product(x)
        if float(x.detach().sum()) > 0:  # no graph has that
            x = x.sin()
        y: Tensor = self.left_out(x)
        return x + y


class LeftOut(nn.Module):
    """A part of it that nobody compiles."""

    stays_eager = "it asks whether it is"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [1, T, W] twice."""
        assert not torch.compiler.is_compiling()
        return 2 * x


class ForeignTower(nn.Module):
    """Two layers over each item by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(Foreign() for _ in range(2))

    def forward(self, items: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the rows of all items [T, W]."""
        found = [item["rows"].unsqueeze(0) for item in items]
        for layer in self.layers:
            found = [layer(x) for x in found]
        return torch.cat(found, 1).squeeze(0)


@attrs.frozen(kw_only=True)
class ForeignConfig:
    """Settings of it: none."""


FOREIGN = EncoderSpec(
    name="foreign",
    config=ForeignConfig,
    measure=lambda item: (len(item),),
    rows=lambda _config, size: size[0],
    prepare=lambda _config, item: {"rows": item},
    build=lambda _config, _hidden: ForeignTower(),
    recompute={"full": lambda module: [part.forward for part in module.modules() if isinstance(part, Foreign)]},
)


def _encode(_rank: int) -> int:
    """Compare an encoder of a third party with and without compilation; return the graphs of all items."""
    from torch._dynamo.utils import counters

    rng, results = torch.Generator().manual_seed(0), []
    items = [{"rows": torch.randn(rows, 8, generator=rng)} for rows in (3, 5, 2, 7, 4)]
    for backend in ("", "aot_eager"):
        part = build_part(
            FOREIGN,
            ForeignConfig(),
            grid=Grid(name="vision", ranks=(0,)),
            seed=1,
            axis=TensorAxis.single(),
            mesh=DeviceMesh("cpu", [0], mesh_dim_names=("tp",)),
            device=torch.device("cpu"),
            hidden=8,
            compile_backend=backend,
        )
        rows = part.encode(items, [(len(item["rows"]),) for item in items])
        rows.square().sum().backward()
        results.append([rows, *(gradient_of(one) for one in part.parameters.values())])
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager)
    return counters["stats"]["unique_graphs"]


def _run_kernels(_rank: int) -> float:
    """Return by how much gradients by compiled kernels differ, of their own norm at most."""
    config = attrs.evolve(DROPPING, layers=1)
    more: dict[str, Any] = {"recompute": "selective", "splits_backward": True}
    wanted, found = (
        _gradients(_build(config, **more, compile_backend=backend), _batches(1)) for backend in ("", "inductor")
    )
    return max(float((found[path] - one).norm() / one.norm().clamp_min(1e-3)) for path, one in wanted.items())


ALWAYS = ("experts",)
"""Layers that end no graph and others that do."""
EACH = {name: pytest.param(name, marks=() if name in ALWAYS else pytest.mark.soak) for name in CASES}


@cache
def compared(name: str) -> Compared:
    """Return what a process of its own has seen of a case; prints where graphs end."""
    (found,) = fork_ranks(1, _compare_case, name)
    assert isinstance(found, Compared)
    print(name, found.graphs, found.breaks)
    return found


@pytest.mark.parametrize("name", EACH.values())
def test_ragged_batches_share_graphs_that_end_at_listed_places_alone(name: str) -> None:
    """Twenty batches of other rows and samples take one graph of dense layers; others end at what stays eager."""
    found = compared(name)
    assert (found.graphs, found.breaks) == EXPECTED[name]


@pytest.mark.parametrize("name", EACH.values())
def test_compiled_layers_compute_the_same(name: str) -> None:
    """Gradients agree to rounding with what layers compute eagerly, and are the same bits each time."""
    found = compared(name)
    assert found.deviation <= 1e-5
    assert found.repeated


@pytest.mark.parametrize("name", [case for name, case in EACH.items() if name != "hybrid"])
def test_compiled_layers_save_no_more(name: str) -> None:
    """Whatever recomputation leaves to be saved, a graph doesn't add to it.

    A layer of attention alone does: its graph saves queries, keys and values in the order of rows too.
    """
    by_compiled, by_eager = compared(name).saved
    assert by_compiled <= by_eager


def _train_split(_rank: int) -> tuple[int, dict[str, int]]:
    """Return the graphs of layers over two tensor ranks with sequence parallelism, once they agree with eager ones."""
    from torch._dynamo.utils import counters

    config = attrs.evolve(DROPPING, layers=1)
    eager, part = (_build(config, tensor=2, compile_backend=backend) for backend in ("", "aot_eager"))
    wanted, found = (_gradients(one, _batches(4, multiple=2)) for one in (eager, part))
    for path, gradient in wanted.items():
        torch.testing.assert_close(found[path], gradient, rtol=1e-4, atol=1e-4)
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def test_collectives_of_tensor_ranks_are_nodes_of_the_graph() -> None:
    """With sequence parallelism too nothing ends it."""
    assert fork_ranks(2, _train_split) == [(1, {})] * 2


def _read_by_cache(_rank: int) -> None:
    from torch._dynamo.utils import counters

    by_backend: list[list[Tensor]] = []
    for backend in ("", "aot_eager"):
        one = _build(DENSE, compile_backend=backend)
        module: Any = one.module
        cache = module.new_decode_cache()
        found: list[Tensor] = []
        by_backend.append(found)
        for rows in (5, 1, 2):
            tokens = torch.arange(rows)
            batch = LanguageBatch.of(tokens, tokens, tokens, lengths=(rows,))
            with torch.no_grad():
                found.append(one.language(attrs.evolve(batch, decode_cache=cache), {}, None))
        empty = LanguageBatch.of(tokens[:0], tokens[:0], tokens[:0], lengths=(0,))
        found.append(one.language(empty, {}, None))
    assert all(torch.equal(x, y) for x, y in zip(*by_backend, strict=True))
    assert not counters["stats"]


def test_what_a_cache_grows_by_and_no_rows_are_computed_eagerly() -> None:
    """So that a token more, or a lane without a sample, takes no graph of its own."""
    fork_ranks(1, _read_by_cache)


def test_layers_of_third_parties_are_compiled_as_far_as_they_can_be() -> None:
    """Graphs end where PyTorch can't follow, and before a part that is to stay eager; all items share them."""
    (graphs,) = fork_ranks(1, _encode)
    assert 2 <= graphs <= 6  # before the branch, and behind it on either side


@pytest.mark.soak  # a compiler is run a dozen times
def test_kernels_compute_the_same() -> None:
    """They write to what their graph needs no more, and not to what attention and deferred gradients read."""
    try:
        check_backend("inductor", torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))
    (deviation,) = fork_ranks(1, _run_kernels)
    assert deviation <= 1e-5


def test_a_backend_without_what_it_compiles_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs, and not by a compiler's own error in the first step."""
    monkeypatch.setenv("CXX", "none-such")
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "none-such"))
    with pytest.raises(ConfigError) as refused:
        check_backend("inductor", torch.device("cpu"))
    assert str(refused.value) == (
        "run.compile: expected a C++ compiler, with which 'inductor' compiles for cpu, got none on this machine. "
        "Install it, or set run.compile to false."
    )
    check_backend("aot_eager", torch.device("cpu"))
    check_backend("", torch.device("cpu"))


def _fail(_graph: Any, _inputs: Any) -> Any:
    msg = "no such instruction"
    raise RuntimeError(msg)


def _refuse_in_first_step(_rank: int) -> str:
    """Return what a layer's first forward says whose compiler fails, once one that fails by itself has said that."""
    torch._dynamo.register_backend(name="failing", compiler_fn=_fail)
    (batch,), said = _batches(1), list[str]()
    for part in (_build(DENSE, compile_backend="failing"), _build(DENSE, compile_backend="eager")):
        layer: Any = next(iter(cast("Any", part.module).layers.values()))
        if said:
            delattr(layer, next(name for name, _ in layer.named_children()))
        try:
            part.language(batch, {}, None)
        except Exception as error:  # noqa: BLE001 - whichever it is
            said.append(f"{type(error).__name__}: {error}")
    return "\n".join(said)


def test_a_compiler_that_fails_names_the_setting() -> None:
    """And the layer; errors of layers themselves are theirs."""
    (found,) = fork_ranks(1, _refuse_in_first_step)
    first, second = found.split("\n", 1)
    assert first == (
        "ConfigError: run.compile: expected layers that PyTorch can compile with 'failing', got BackendCompilerFailed "
        "for Layer: backend='failing' raised: RuntimeError: no such instruction. Set it to false; a plugin says by "
        "compiles = False that its layers can't be compiled."
    )
    assert second.startswith("AttributeError"), second


def test_what_of_a_module_is_compiled_is_said() -> None:
    """Its layers, of each what stays eager and why; or why none is."""
    whole: Any = HYBRID.build(attrs.evolve(MAMBA, pattern="ME*-", experts=4), Stage())
    assert compilation_of(HYBRID, whole, name="language") == Compilation(
        layers={"HybridLayer": 2}, eager={"MambaLayer": Mamba.stays_eager, "MoeLayer": Moe.stays_eager}
    )
    for spec, why in (
        (attrs.evolve(HYBRID, compiles=False), "the plugin 'hybrid' says that its layers can't be compiled"),
        (attrs.evolve(HYBRID, recompute={}), "the plugin 'hybrid' names no layers, by recompute['full']"),
    ):
        assert compilation_of(spec, whole, name="language") == Compilation(layers={}, eager={"": why})
    for layer in whole.layers.values():
        layer.stays_eager = "of what it reads"
    assert compilation_of(HYBRID, whole, name="language") == Compilation(layers={}, eager={"": "of what it reads"})
