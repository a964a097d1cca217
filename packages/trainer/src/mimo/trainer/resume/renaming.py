"""Names here as they are in a checkpoint, by ``load.rename``: prefixes of whole keys, of which the longest counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from mimo.trainer.config.names import OPTIMIZER


def _somewhere(prefixes: Mapping[str, str]) -> Mapping[str, str]:
    """Return prefixes, for those of what is taken from nowhere such as no checkpoint has."""
    return {here: there or f".{here}" for here, there in prefixes.items()}


@attrs.frozen
class Renaming:
    """Prefixes of names here, and what the checkpoint has instead: nothing of what is taken from nowhere."""

    prefixes: Mapping[str, str] = attrs.field(converter=_somewhere)

    @classmethod
    def of(cls, rename: Mapping[str, str], asked: Iterable[str]) -> Renaming:
        """Return what settings say, for the states of renamed parameters too where any are asked for.

        Args:
            rename: as in ``load.rename``.
            asked: names here.
        """
        states = {f"{OPTIMIZER}.{here}": f"{OPTIMIZER}.{there}" for here, there in cls(rename).prefixes.items()}
        own = cls(states)
        used = {own.prefix_of(name) for name in asked}
        return cls({**{here: there for here, there in states.items() if here in used}, **rename})

    def prefix_of(self, name: str) -> str | None:
        """Return the prefix by which a name is renamed; None if it is not."""
        found = [prefix for prefix in self.prefixes if name == prefix or name.startswith(f"{prefix}.")]
        return max(found, key=len, default=None)

    def modules_there(self, module: str) -> frozenset[str]:
        """Return the modules of the checkpoint in which a module here, or a part of it, can be."""
        parts = [there for here, there in self.prefixes.items() if here.startswith(f"{module}.")]
        return frozenset(name.partition(".")[0] for name in (self.there(module), *parts))

    def there(self, name: str) -> str:
        """Return the name in the checkpoint."""
        prefix = self.prefix_of(name)
        return name if prefix is None else self.prefixes[prefix] + name.removeprefix(prefix)
