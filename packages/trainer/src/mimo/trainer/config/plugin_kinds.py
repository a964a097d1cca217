"""The kinds of plugin that a run is made of, and where its plugins come from."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from mimo.data import ANSWER_METRICS, DATASETS, TOKENIZERS
from mimo.hooks import Kind, discover
from mimo.model import ENCODERS, GENERATORS, LANGUAGE_MODELS
from mimo.optimizer import OPTIMIZERS
from mimo.schedule import SCHEDULES
from mimo.trainer.config.settings import LANGUAGE

S = TypeVar("S")

KINDS: tuple[Kind[Any], ...] = (
    ENCODERS,
    LANGUAGE_MODELS,
    GENERATORS,
    OPTIMIZERS,
    SCHEDULES,
    DATASETS,
    TOKENIZERS,
    ANSWER_METRICS,
)


class Find(Protocol):
    """Finds the spec of a plugin, or refuses its name at the setting ``where``."""

    def __call__(self, kind: Kind[S], name: str, where: str) -> S:
        """Return the spec."""


def module_kind(name: str, *, distil: object, fed_by: object) -> Kind[Any]:
    """Return the kind of a module's plugin, by its name and what two keys of its table hold, which may be nothing."""
    if name == LANGUAGE or distil:
        return LANGUAGE_MODELS
    return GENERATORS if fed_by else ENCODERS


def find_installed(kind: Kind[S], name: str, where: str) -> S:
    """Return the spec of an installed plugin; see `Find`."""
    return discover(kind, where=where).find(name, where)
