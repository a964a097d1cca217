"""From the settings of small models to jobs, with installed plugins and some of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import attrs
import synthetic
import torch
from sketch import SKETCH
from tables import Table
from torch import Tensor, nn

from mimo.data import DATASETS
from mimo.hooks import Kind, Registry, UserError, discover
from mimo.model import ENCODERS, GENERATORS
from mimo.schedule import SCHEDULES
from mimo.trainer import Job, read_settings, resolve
from mimo.trainer.runtime import KINDS

CPU = torch.device("cpu")


@functools.cache
def _installed(kind: Kind[Any]) -> Registry[Any]:
    """Ask what is installed once: it takes a fifth of a second, and each rank of each case would ask."""
    return discover(kind)


def prepare() -> None:
    """Do once what every process that makes a job would have to do."""
    for kind in KINDS:
        _installed(kind)


def find(kind: Kind[Any], name: str, where: str) -> Any:
    """Find installed plugins and some of ours.

    Those are the synthetic dataset, ``1f1b-v``, which lays the chunks of ``1f1b`` in a V, the generator ``sketch``, and
    encoders as others may write them: ``shy-vit`` runs no layer and gives rows without a graph where it has no picture;
    the rows of ``counting-vit`` follow from how often it was called, those of ``greedy-vit`` from how many pictures it
    has seen.
    """
    if kind is DATASETS and name == "synthetic":
        return synthetic.mimo_register_datasets()[0]
    if kind is GENERATORS and name == SKETCH.name:
        return SKETCH
    if kind is SCHEDULES and name == "1f1b-v":
        return attrs.evolve(find(kind, "1f1b", where), name=name, placement=lambda _config: "v")
    if kind is ENCODERS and name in THIRD_PARTY:
        spec = find(kind, "vit", where)
        build = functools.partial(THIRD_PARTY[name], spec.build)
        return attrs.evolve(spec, name=name, build=build, tensor=None, stages=None, context=None, recompute={})
    return _installed(kind).find(name, where)


def _shy(build: Callable[[Any, int], nn.Module], config: Any, hidden: int) -> nn.Module:
    module = build(config, hidden)
    run = type(module).forward

    def forward(self: nn.Module, items: Sequence[Any]) -> Tensor:
        return cast("Tensor", run(self, items)) if items else torch.zeros(0, hidden)

    module.__class__ = type("Shy", (type(module),), {"forward": forward})
    return module


def _counting(build: Callable[[Any, int], nn.Module], config: Any, hidden: int, *, pictures: bool) -> nn.Module:
    module = build(config, hidden)
    module.register_buffer("seen", torch.zeros(()))
    run = type(module).forward

    def forward(self: Any, items: Sequence[Any]) -> Tensor:
        self.seen += len(items) if pictures else 1
        rows: Tensor = run(self, items) * (1 + 1e-3 * self.seen)
        return rows

    module.__class__ = type("Counting", (type(module),), {"forward": forward})
    return module


THIRD_PARTY: Mapping[str, Callable[..., nn.Module]] = {
    "shy-vit": _shy,
    "counting-vit": functools.partial(_counting, pictures=False),
    "greedy-vit": functools.partial(_counting, pictures=True),
}


@functools.cache
def _jobs() -> dict[str, Job]:
    """Return the jobs that were resolved before this process was forked, by what their settings say."""
    return {}


def resolve_ahead(*args: object) -> None:
    """Resolve those settings among the arguments of ranks of which nothing is read from files, once for all of them.

    A search for the order of a step takes longer than to train it.
    """
    _jobs().clear()
    for settings in args:
        if isinstance(settings, dict) and settings.get("data", {}).get("plugin") == "synthetic":
            with suppress(UserError):  # which those that want the job meet too
                _jobs()[repr(settings)] = resolve(read_settings(settings), find=find)


def make_job(settings: Table) -> Job:
    """Resolve settings, or take what `resolve_ahead` made of them."""
    return _jobs().pop(repr(settings), None) or resolve(read_settings(settings), find=find)
