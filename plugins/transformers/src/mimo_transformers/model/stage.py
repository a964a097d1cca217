"""One pipeline stage of a language model of the library: its own base model, with other stages' layers replaced.

Shapes: T rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from mimo.hooks import ConfigError
from mimo.model import Stage
from mimo.model.runtime import DecodeCache, LanguageBatch, LanguageStage, create_on
from mimo_transformers.family import HfDecoderConfig, base_path_of, new_network, quiet
from mimo_transformers.model.attention import CallRecord, PackedRows, RoutedRows, register_attention
from mimo_transformers.model.drops import replace_drops
from mimo_transformers.model.experts import BridgedGroupedLinear
from mimo_transformers.model.layers import LAYER_ROWS, Passing, bridge_layers, stand_in
from mimo_transformers.model.mixing import mixing
from mimo_transformers.model.modules import (
    BridgedEmbedding,
    BridgedLinear,
    Draw,
    Published,
    fill_buffers,
    turns_by_grids,
    without_contents,
)
from mimo_transformers.model.own import make_own, replace
from mimo_transformers.model.parts import Parts, find_parts, run_base
from mimo_transformers.model.per_sample import mix_in
from mimo_transformers.model.routers import add_balance_loss, find_routers, record_choices
from mimo_transformers.model.small import constants, described


class HfStage(LanguageStage):
    """One pipeline stage of a language model of `transformers`, a `mimo.model.runtime.LanguageModule`.

    Attributes:
        config: of the model.
        record: where a forward takes down what its layers ask for, instead of computing it.
    """

    def __init__(self, config: HfDecoderConfig, stage: Stage) -> None:
        register_attention()
        self.config = config
        self.record: CallRecord | None = None
        library = config.library()
        library.output_router_logits = False  # its own recording is of no use here
        with quiet():
            with create_on("meta"):
                parts = find_parts(new_network(library))
            network = new_network(library)
        shell = without_contents(network)
        draw: Draw = partial(type(network)._init_weights, shell)  # noqa: SLF001 - what the library draws by itself
        base = network.get_submodule(base_path_of(network))
        layers = base.get_submodule(parts.layers)
        paths = {part: path for path, part in network.named_modules()}
        embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
        mixed, here = mixing(described(config)), stage.layers(config.layers)
        routers = {} if config.balance_loss is None else find_routers(network, parts.layers, mixed.parts)
        replace(layers, draw, weights=mixed.weights)
        drops = replace_drops(base)
        for number in routers:
            if number in here:
                record_choices(layers[number], number, routers[number])
        bridge_layers([layer for index, layer in enumerate(layers) if index in here], mixed.parts, mixed.reading)
        fill_buffers(embedding, draw)
        super().__init__(
            config,
            stage,
            lambda index: cast("nn.Module", layers[index]),
            norm=lambda: _one_after(base, parts),
            head=lambda: BridgedLinear(head, draw),
            deepstack=config.deepstack,
        )
        if hasattr(self, "embedding"):
            self.embedding = BridgedEmbedding(embedding, draw)
        if stage.is_first:
            self.before = nn.ModuleDict({_key(path): base.get_submodule(path) for path in parts.before})
            beside = {path: part for path, part in drops.items() if not path.startswith(f"{parts.layers}.")}
            self.drops = nn.ModuleDict({_key(path): part for path, part in beside.items()})  # elsewhere without keys
        self.shared = nn.ModuleDict({_key(path): base.get_submodule(path) for path in parts.buffered})
        for part in (*layers, *self.children()):
            make_own(part, draw, lambda path: constants(described(config)).get(path), paths)
        _leave_out(base, layers, parts, stage, config)
        for index in self.span[: max(0, config.deepstack - self.span.start)]:
            layers[index].register_forward_hook(partial(_add_deep, index), with_kwargs=True)
        network.set_input_embeddings(nn.Identity())
        self._parts, self._routed_layers = parts, len(routers)
        self._turns_by_grids = turns_by_grids(base)
        # No parts: what of them is here is registered above.
        self._networks = (base, _with_head(network, self), layers)

    def forward(self, batch: LanguageBatch, rows: Mapping[str, Tensor], hidden: Tensor | None) -> Tensor:
        """Return this stage's rows [T, H]; see `LanguageModule`."""
        x, positions = self.begin(batch, rows, hidden), batch.positions
        drawn = self.draw_keys.now
        places = batch.grid_positions if self._turns_by_grids else None
        items = batch.items if self.config.bidirectional_items else ()
        cache, count = DecodeCache.of(batch, items=items), len(positions)
        if not count:  # the library's layers take no less than one row: one of padding
            x, positions = functional.pad(x, (0, 0, 0, 1)), functional.pad(positions, (0, 1))
            places = None if places is None else functional.pad(places, (0, 0, 0, 1))
            drawn = attrs.evolve(drawn, rows=None if drawn.rows is None else functional.pad(drawn.rows, (0, 0, 0, 1)))
        x, deep = self.begin_deep(x)
        x = torch.stack((x,))  # [1, T, H], and no view, of which a compiled layer would have a graph of its own
        packed = PackedRows(
            lengths=batch.lengths,
            positions=positions,
            context=self.context,
            cache=cache,
            resumed=None if self.stage.is_first else x,
            deep=deep,
            places=places,
            items=items,
            record=self.record,
            routed={} if self._routed_layers and cache is None and self.record is None else None,
        )
        base, _, layers = self._networks
        try:
            with self.draw_keys.at(drawn):
                found = run_base(base, layers, x, packed).squeeze(0)
        finally:  # else what graphs save would hold logits, which hold these graphs
            routed = packed.take_routed()
        if cache is not None:
            cache.end()
        if routed:
            self._add_balance_loss(batch, routed)
        if not self.stage.is_last:
            assert packed.result is not None
            found = packed.result
        found = found.to(x.dtype)  # some sum up in fp32 from layer to layer
        return deep.join(found, stop=self.span.stop)[:count]

    def _add_balance_loss(self, batch: LanguageBatch, routed: Mapping[int, RoutedRows]) -> None:
        """Add what the routers here come to."""
        add_balance_loss(
            routed,
            batch,
            coefficient=self.config.balance_loss or 0.0,
            layers=self._routed_layers,
            axis=self.axis,
            experts=self.expert_axis,
        )

    @property
    def layers_path(self) -> str:
        """Path of the list of layers in the library's base model."""
        return self._parts.layers

    def new_decode_cache(self) -> DecodeCache:
        """Return an empty KV cache."""
        return DecodeCache()

    def published(self, network: Any) -> dict[str, Published]:
        """Return for each parameter and buffer here, by its path, what it is in a model of the library, ``network``."""
        ends = {"embedding": network.get_input_embeddings(), "head": network.get_output_embeddings()}
        names = {part: path for path, part in network.named_modules()}
        base, parts = base_path_of(network), self._parts
        prefixes = {key: names[part] for key, part in ends.items()} | {"layers": f"{base}.{parts.layers}"}
        prefixes |= dict.fromkeys(["norm"], f"{base}.{parts.after[0]}") if parts.after else {}
        prefixes |= {f"before.{_key(path)}": f"{base}.{path}" for path in parts.before}
        prefixes |= {f"shared.{_key(path)}": f"{base}.{path}" for path in parts.buffered}
        found = {}
        for path in [name for name, _ in [*self.named_parameters(), *self.named_buffers()]]:
            here = next(prefix for prefix in prefixes if path.startswith(f"{prefix}."))
            owner, _, leaf = path.rpartition(".")
            part = self.get_submodule(owner)
            own = part.published[leaf] if isinstance(part, BridgedGroupedLinear) else Published(name=leaf)
            there = owner.rpartition(".")[0] if isinstance(part, BridgedGroupedLinear) else owner
            there = prefixes[here] + there.removeprefix(here)
            found[path] = attrs.evolve(own, name=f"{there}.{own.name}")
        return found

    def read(self, network: Any) -> None:
        """Take all parameters and buffers from a model of the library of the same config; both plain, on the CPU."""
        theirs = dict(network.named_buffers()) | dict(network.named_parameters(remove_duplicate=False))
        published = self.published(network)
        with torch.no_grad():
            for path, tensor in [*self.named_parameters(), *self.named_buffers()]:
                tensor.copy_(published[path].view(theirs[published[path].name]))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, V] as the library's model makes them of its output embedding's: capped, scaled."""
        found = self._networks[1](inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return cast("Tensor", found.squeeze(0))


@attrs.frozen(eq=False)
class _Output:
    """What a base model of the library returns, of which nothing but the last hidden rows is there."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        """Return None: all else that a family's outputs have is optional."""

    def __getitem__(self, index: int | slice) -> Any:
        """Return what lies there in the tuple that the outputs also are."""
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """Mixed into the class of a base model: its last hidden rows are those that it is given."""

    def forward(self, *_given: Any, inputs_embeds: Tensor, **_named: Any) -> _Output:
        """Return them as the library's base models do."""
        return _Output(inputs_embeds)


class _Product(nn.Module):
    """In the place of an output embedding: multiplies with the stage's, whatever holds it."""

    def __init__(self, stage: HfStage) -> None:
        super().__init__()
        self.stage = weakref.ref(stage)  # a reference would be a circle

    @property
    def weight(self) -> Tensor:
        """What it multiplies with, of which a model may want to know the type."""
        stage = self.stage()
        assert stage is not None
        return cast("Tensor", stage.embedding.weight if stage.tied else stage.head.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [1, T, V] of this rank's span of the vocabulary."""
        stage = self.stage()
        assert stage is not None
        return LanguageStage._logits(stage, hidden)  # noqa: SLF001 - of the class above


def _with_head(network: Any, stage: HfStage) -> Any:
    """Return the network with a base model and an output embedding that are the stage's."""
    path = base_path_of(network)
    base = without_contents(network.get_submodule(path))
    mix_in(base, _Given)
    network.set_submodule(path, base)
    network.set_output_embeddings(_Product(stage))
    return network


def _key(path: str) -> str:
    return path.replace(".", "_")


def _one_after(base: Any, parts: Parts) -> nn.Module:
    if not parts.after:
        return nn.Identity()
    if len(parts.after) > 1:
        raise ConfigError(
            "modules.language.config.model_type",
            expected="at most one module with parameters between the last layer and the output embedding",
            got=", ".join(parts.after),
            fix="plugins/transformers/README.md lists the families that can be trained.",
        )
    (path,) = parts.after
    return cast("nn.Module", base.get_submodule(path))


def _add_deep(index: int, _layer: nn.Module, _given: Any, named: Mapping[str, Any], found: Any) -> Any:
    """Return what a layer has, rows [1, T, H] or a tuple that begins with them, with rows of encoders added."""
    rows: PackedRows = named[LAYER_ROWS]
    hidden = found[0] if isinstance(found, tuple) else found
    hidden = rows.deep.add(index, hidden.squeeze(0)).unsqueeze(0)
    return (hidden, *found[1:]) if isinstance(found, tuple) else hidden


def _leave_out(base: Any, layers: Any, parts: Parts, stage: Stage, config: HfDecoderConfig) -> None:
    """Replace in a base model what other stages hold."""
    here = stage.layers(config.layers)
    for index, layer in enumerate(layers):
        if index not in here:
            stand_in(layer, resumes=index == here.start - 1, finishes=index == here.stop, returns=parts.returns)
    absent = [*(parts.before if not stage.is_first else ()), *(parts.after if not stage.is_last else ())]
    for path in absent:
        base.set_submodule(path, Passing(config.hidden))
