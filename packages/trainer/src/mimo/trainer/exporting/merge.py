"""A checkpoint's weights with LoRA merged into them, a few MiB at a time; also written as a new checkpoint.

Shapes: O outputs, I inputs, r the rank; weights of experts have E before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimo.checkpoint import Source, Stream, TensorEntry, write_checkpoint
from mimo.hooks import CheckpointError
from mimo.model import Lora, lora_linear, lora_names
from mimo.trainer.config.names import IMPORTED
from mimo.trainer.config.structure import structure
from mimo.trainer.resume.chain import ChainLink, links_of


class Merged:
    """The module weights of a checkpoint, with LoRA merged into the weights that it adapts.

    Args:
        links: the checkpoint and those that hold what it leaves out.
        sources: the same, opened.

    Attributes:
        manifest: the checkpoint's.
        loras: LoRA settings by module.
        tensors: all merged weights, by name.

    Raises:
        CheckpointError: what LoRA has learned is there in part, or its settings are not.
    """

    def __init__(self, links: Sequence[ChainLink], sources: Sequence[Source]) -> None:
        self.manifest = links[0].manifest
        tables = self.manifest.config.get("modules", {})
        self.loras: dict[str, Lora] = {
            name: structure(table["lora"], Lora, f"modules.{name}.lora")
            for name, table in tables.items()
            if table.get("lora") is not None
        }
        self._source_of = {
            name: source
            for link, source in reversed([*zip(links, sources, strict=True)])
            for name in link.tensors
            if name.partition(".")[0] in self.manifest.topology
        }
        own = {name: source.manifest.tensors[name] for name, source in self._source_of.items()}
        found = [name for name in own if name.partition(".")[0] in self.loras]
        self.linears = frozenset(linear for name in found if (linear := lora_linear(name)) is not None)
        for linear in self.linears:
            wanted = {f"{linear}.weight", *lora_names(linear)}
            if not wanted <= own.keys():
                missing = ", ".join(sorted(wanted - own.keys()))
                where = str(links[0].folder)
                raise CheckpointError(where, expected=f"all that belongs to {linear}", got=f"none of {missing}")
        beside = {name for linear in self.linears for name in lora_names(linear)}
        self.tensors: Mapping[str, TensorEntry] = {name: entry for name, entry in own.items() if name not in beside}

    def elements(self, name: str, begin: int, end: int) -> Iterator[Tensor]:
        """Yield a tensor's elements from ``begin`` to ``end``, the last dim fastest, as `Source.elements` does."""
        chunks = self._source_of[name].elements(name, begin, end)
        linear = name.removesuffix(".weight")
        if not name.endswith(".weight") or linear not in self.linears:
            yield from chunks
            return
        scale = self.loras[name.partition(".")[0]].scale
        down, up = (self.whole(one).float() for one in lora_names(linear))
        for chunk in chunks:
            yield (chunk.float() + scale * _added(down, up, begin, begin + len(chunk))).to(chunk.dtype)
            begin += len(chunk)

    def whole(self, name: str) -> Tensor:
        """Return a small tensor, as the checkpoint holds it."""
        source = self._source_of[name]
        shape = source.manifest.tensors[name].shape
        return torch.cat([chunk.clone() for chunk in source.elements(name, 0, math.prod(shape))]).view(shape)

    def stream(self, name: str) -> Stream:
        """Return a tensor to be written."""
        shape = self.tensors[name].shape
        chunks = partial(self.elements, name, 0, math.prod(shape))
        return Stream(dtype=self._source_of[name].dtype(name), shape=shape, chunks=chunks)


@contextmanager
def open_merged(checkpoint: Path) -> Iterator[Merged]:
    """Open a step's folder, and those that hold what it leaves out.

    Raises:
        CheckpointError: one of them is gone, damaged or not the one that is meant; see `Merged`.
    """
    with ExitStack() as stack:
        links = links_of(checkpoint)
        yield Merged(links, [stack.enter_context(Source(link.folder)) for link in links])


def merge(checkpoint: Path, out: Path) -> Path:
    """Write the weights of a checkpoint without LoRA into a new one of the same step; return its folder.

    Args:
        checkpoint: a step's folder.
        out: holds the step's folder.

    Raises:
        CheckpointError: nothing of the checkpoint is adapted, or it is damaged, or ``out`` holds this step already.
    """
    with open_merged(checkpoint) as merged:
        manifest = merged.manifest
        if not merged.linears:
            raise CheckpointError(
                str(checkpoint), expected="a checkpoint with LoRA in it", got="one without", fix="It needs no merging."
            )
        common = {key: value for key, value in manifest.common.items() if key.partition(".")[0] == IMPORTED}
        return write_checkpoint(
            out,
            {name: merged.stream(name) for name in merged.tensors},
            step=manifest.step,
            config=without_lora(manifest.config),
            topology=manifest.topology,
            common=common,
        )


def without_lora(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the same model without LoRA."""
    tables = config.get("modules", {})
    modules = {name: {key: one for key, one in table.items() if key != "lora"} for name, table in tables.items()}
    return {**config, "modules": modules}


def _added(down: Tensor, up: Tensor, begin: int, end: int) -> Tensor:
    """Return the elements from ``begin`` to ``end`` of the product of ``up`` and ``down``, [.., O, I] flattened."""
    outputs, inputs = up.shape[-2], down.shape[-1]
    first, last = begin // inputs, -(-end // inputs)  # rows of all experts
    parts = [
        up.view(-1, outputs, up.shape[-1])[expert, low:high] @ down.view(-1, *down.shape[-2:])[expert]
        for expert, low, high in _rows(first, last, outputs)
    ]
    return torch.cat(parts).view(-1)[begin - first * inputs : end - first * inputs]


def _rows(first: int, last: int, each: int) -> Iterable[tuple[int, int, int]]:
    """Yield the rows from ``first`` to ``last`` of matrices of ``each`` rows, by matrix."""
    for matrix in range(first // each, -(-last // each)):
        yield matrix, max(first - matrix * each, 0), min(last - matrix * each, each)
