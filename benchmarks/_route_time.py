"""Seconds in which a rank finds its routes of a microbatch, for placements of four encoders on 1,024 ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from mimo.data import DATASETS, DatasetSpec, SplitName, Tokenizer
from mimo.hooks import ItemInfo, Kind
from mimo.trainer import Job, read_settings, resolve
from mimo.trainer.runtime import Microbatch, RouteCache, find_installed

SAMPLES = 64
ROWS = 256
SIDE = 32
"""Pixels of a picture's side: with patches of 2, it becomes `ROWS` rows."""
ENCODERS = ("vision", "audio", "radio", "depth")
SP = {"sequence_parallel": True}
PLACEMENTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "all on all ranks": {
        "language": {"ranks": "0-1023", "dp": 16, "cp": 4, "tp": 16, **SP},
        "vision": {"ranks": "0-1023", "dp": 64, "tp": 16},
        "audio": {"ranks": "0-1023", "dp": 1024},
        "radio": {"ranks": "0-1023", "dp": 16, "cp": 4, "tp": 16, **SP},
        "depth": {"ranks": "0-1023", "dp": 128, "cp": 2, "tp": 4},
    },
    "each on its own": {
        "language": {"ranks": "512-1023", "dp": 8, "cp": 4, "tp": 16, **SP},
        "vision": {"ranks": "0-127", "dp": 8, "tp": 16},
        "audio": {"ranks": "128-255", "dp": 128},
        "radio": {"ranks": "256-383", "dp": 4, "cp": 2, "tp": 16, **SP},
        "depth": {"ranks": "384-511", "dp": 16, "cp": 2, "tp": 4},
    },
    "each on its own, into tensor groups": {
        "language": {"ranks": "512-1023", "dp": 64, "tp": 8},
        "vision": {"ranks": "0-127", "dp": 8, "tp": 16},
        "audio": {"ranks": "128-255", "dp": 128},
        "radio": {"ranks": "256-383", "dp": 4, "cp": 2, "tp": 16, **SP},
        "depth": {"ranks": "384-511", "dp": 16, "cp": 2, "tp": 4},
    },
}


@attrs.frozen(kw_only=True)
class MixedConfig:
    """Samples of an item of each modality, with texts of uneven length between them."""

    longest_text: int = 100


@attrs.frozen
class Mixed:
    """As many samples as a microbatch has."""

    config: MixedConfig
    tokenizer: Tokenizer

    def __len__(self) -> int:
        """Return the number of samples."""
        return SAMPLES

    def tokens(self, sample: int) -> Sequence[int]:
        """Return the placeholders, each after some words."""
        choice = random.Random(sample)
        parts = [f"{'word ' * choice.randint(1, self.config.longest_text)}<{modality}>" for modality in ENCODERS]
        return [*self.tokenizer.encode(" ".join(parts)), self.tokenizer.end]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        """Return an item of each modality."""
        return [
            ItemInfo(sample=sample, index=index, modality=modality, size=(SIDE, SIDE))
            for index, modality in enumerate(ENCODERS)
        ]

    def raw(self, _sample: int, _index: int) -> Any:
        """Nothing is encoded here."""
        msg = "nothing is encoded here"
        raise AssertionError(msg)

    def where(self, sample: int) -> str:
        """Name a sample."""
        return f"mixed:{sample}"


def _open(config: MixedConfig, tokenizer: Tokenizer, _split: SplitName) -> Mixed:
    return Mixed(config, tokenizer)


def _find(kind: Kind[Any], name: str, where: str) -> Any:
    if kind is DATASETS and name == "mixed":
        return DatasetSpec(name="mixed", config=MixedConfig, open=_open)
    return find_installed(kind, name, where)


def make_job(placement: Mapping[str, Mapping[str, Any]]) -> Job:
    """Resolve a run of four encoders."""
    vit = {"patch": 2, "channels": 1, "width": 64, "layers": 1, "heads": 16, "intermediate": 64}
    decoder = {"hidden": 64, "layers": 1, "heads": 16, "intermediate": 64}
    language = placement["language"]
    settings = {
        "run": {"name": "routes", "steps": 1, "global_batch": SAMPLES, "micro_batch": SAMPLES // language["dp"]},
        "data": {"plugin": "mixed", "max_tokens": 4096},
        "tokenizer": {"plugin": "word", "words": ["word"]},
        "modules": {
            "language": {"plugin": "decoder", "config": decoder, **language},
            **{name: {"plugin": "vit", "modality": name, "config": vit, **placement[name]} for name in ENCODERS},
        },
    }
    return resolve(read_settings(settings), find=_find)


def measure(placement: str, *, ranks: int) -> Iterator[float]:
    """Yield the seconds of ``ranks`` ranks, spread over the world: all routes of a new layout of rows."""
    job = make_job(PLACEMENTS[placement])
    assert job.train is not None
    layouts = Microbatch(job, job.train, range(SAMPLES)).layouts
    for rank in range(0, job.world, job.world // ranks):
        edges = [edge for edge in job.graph.edges if rank in job.edge_ranks(edge)]
        batch = Microbatch(job, job.train, range(SAMPLES), RouteCache())
        batch.__dict__["layouts"] = layouts  # every rank reads tokens and headers anyway, routes or not
        start = time.perf_counter()
        for edge in edges:
            batch.route(edge, rank)
        yield time.perf_counter() - start
