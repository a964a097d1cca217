"""What installed plugins can read of published Hugging Face folders. Free of torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import attrs

from mimo.hooks import ConfigError, discover
from mimo.model import ENCODERS, LANGUAGE_MODELS, EncoderSpec, HfFamily, LanguageModelSpec
from mimo.trainer.config.settings import LANGUAGE

Spec: TypeAlias = EncoderSpec | LanguageModelSpec


@attrs.frozen(kw_only=True)
class Reader:
    """A plugin that can read a family, and the module for which it does."""

    module: str
    spec: Spec
    family: HfFamily


def split_word(word: str) -> tuple[str, Path]:
    """Return of ``module=folder`` both, and of a folder alone an empty name and the folder."""
    name, equals, folder = word.partition("=")
    return (name, Path(folder)) if equals and not Path(word).exists() else ("", Path(word))


def readers_of(modules: Iterable[tuple[str, Spec]]) -> tuple[Reader, ...]:
    """Return all that the plugins of these modules can read."""
    return tuple(Reader(module=name, spec=spec, family=family) for name, spec in modules for family in spec.hf)


def installed_readers(name: str) -> tuple[Reader, ...]:
    """Return the families that installed plugins name, for the module ``name``; see `installed_modules`."""
    return readers_of(installed_modules(name))


def installed_modules(name: str, plugins: Collection[str] = ()) -> list[tuple[str, Spec]]:
    """Return what installed plugins can be the module ``name``; without a name, encoders have their plugin's.

    Only the language model has a name that is fixed.

    Args:
        name: of the module.
        plugins: names of those that are wanted; of encoders, or of language models, of which none is named, all are.
    """
    found: list[tuple[str, Spec]] = []
    for module, specs in _kinds(name):
        wanted = [spec for plugin, spec in specs.items() if plugin in plugins] or list(specs.values())
        found += [(module or spec.name, spec) for spec in wanted]
    return found


def check_plugins(plugins: Iterable[str], names: Iterable[str]) -> None:
    """Refuse plugins of which one can be none of the modules ``names``; see `installed_modules`.

    Raises:
        ConfigError: one of this name isn't installed, or can't be such a module.
    """
    known = dict.fromkeys(plugin for name in names for _, specs in _kinds(name) for plugin in specs)
    for plugin in plugins:
        if plugin not in known:
            expected = f"one of {', '.join(known)}" if known else "none, as none of this kind is installed"
            raise ConfigError("--plugin", expected=expected, got=repr(plugin))


def _kinds(name: str) -> list[tuple[str, Mapping[str, Spec]]]:
    """Return the plugins that can be a module, and its name, empty where each has its own."""
    encoders, languages = discover(ENCODERS), discover(LANGUAGE_MODELS)
    found: list[tuple[str, Mapping[str, Spec]]] = []
    found += [(LANGUAGE, languages)] if name in {"", LANGUAGE} else []
    found += [(name, encoders)] if name != LANGUAGE else []
    return found
