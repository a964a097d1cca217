"""What installed plugins can read of published Hugging Face folders. Free of torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import attrs

from mimo.hooks import ConfigError, discover
from mimo.model import ENCODERS, GENERATORS, LANGUAGE_MODELS, HfFamily, ModuleSpec, noun_of
from mimo.trainer.config.settings import LANGUAGE


@attrs.frozen(kw_only=True)
class Reader:
    """A plugin that can read a family, and the module for which it does."""

    module: str
    spec: ModuleSpec
    family: HfFamily


def split_word(word: str) -> tuple[str, Path]:
    """Return of ``module=folder`` both, and of a folder alone an empty name and the folder."""
    name, equals, folder = word.partition("=")
    return (name, Path(folder)) if equals and not Path(word).exists() else ("", Path(word))


def readers_of(modules: Iterable[tuple[str, ModuleSpec]]) -> tuple[Reader, ...]:
    """Return all that the plugins of these modules can read."""
    return tuple(Reader(module=name, spec=spec, family=family) for name, spec in modules for family in spec.hf)


def installed_readers(name: str) -> tuple[Reader, ...]:
    """Return the families that installed plugins name, for the module ``name``; see `installed_modules`."""
    return readers_of(installed_modules(name))


def installed_modules(name: str, plugins: Collection[str] = ()) -> list[tuple[str, ModuleSpec]]:
    """Return what installed plugins can be the module ``name``; without a name, all but language models have their own.

    Only the language model has a name that is fixed.

    Args:
        name: of the module.
        plugins: names of those that are wanted; of plugins that can be the same module, or of one kind where each is a
            module of its own, all are if none is named.
    """
    found: list[tuple[str, ModuleSpec]] = []
    for module, specs in _choices(name):
        wanted = [spec for spec in specs if spec.name in plugins] or specs
        found += [(module or spec.name, spec) for spec in wanted]
    return found


def check_plugins(plugins: Iterable[str], names: Iterable[str]) -> None:
    """Refuse plugins of which one can be none of the modules ``names``; see `installed_modules`.

    Raises:
        ConfigError: one of this name isn't installed, or can't be such a module.
    """
    known = dict.fromkeys(spec.name for name in names for _, specs in _choices(name) for spec in specs)
    for plugin in plugins:
        if plugin not in known:
            expected = f"one of {', '.join(known)}" if known else "none, as none of this kind is installed"
            raise ConfigError("--plugin", expected=expected, got=repr(plugin))


def check_table(name: str, spec: ModuleSpec) -> None:
    """Refuse the module ``name`` if its plugin has no table of published weights.

    Raises:
        ConfigError: naming the plugin.
    """
    if not spec.hf and spec.hf_any is None:
        raise ConfigError(
            f"modules.{name}.plugin",
            expected="one with a table of published weights, `hf` of its spec",
            got=f"{noun_of(spec)} {spec.name!r}, which has none",
            fix="Name another module, or give the plugin a table; `mimo models` lists what can be read and written.",
        )


def _choices(name: str) -> list[tuple[str, Sequence[ModuleSpec]]]:
    """Return the plugins that can be a module, and its name, empty where each has its own."""
    languages = [*discover(LANGUAGE_MODELS).values()]
    encoders, generators = [*discover(ENCODERS).values()], [*discover(GENERATORS).values()]
    if name == LANGUAGE:
        return [(LANGUAGE, languages)]
    return [(name, [*encoders, *generators])] if name else [(LANGUAGE, languages), ("", encoders), ("", generators)]
