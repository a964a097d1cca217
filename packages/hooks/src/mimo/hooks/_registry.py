"""What discovery returns: the specs of one kind by name, and the plugins that they came from."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar

import attrs

from mimo.hooks._errors import ConfigError
from mimo.hooks._installed import PluginEntry

S = TypeVar("S")


def _read_only(specs: Mapping[str, S]) -> Mapping[str, S]:
    return MappingProxyType(dict(specs))


@attrs.frozen(kw_only=True, eq=False)
class Registry(Mapping[str, S]):
    """The installed specs of one kind, by the name that users write.

    Args:
        noun: what messages call one of them, ``encoder``.
        specs: by name, in the order of their plugins' names, and within a plugin in its own order.
        entries: the plugins that registered them, in that order.
    """

    noun: str
    specs: Mapping[str, S] = attrs.field(converter=_read_only)
    entries: tuple[PluginEntry, ...]

    def __getitem__(self, name: str) -> S:
        return self.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def find(self, name: str, where: str) -> S:
        """Return the spec of this name.

        Args:
            name: as the user wrote it.
            where: path of the setting that holds the name, ``modules.vision.plugin``.

        Raises:
            ConfigError: nothing of this name is installed; the message lists the installed names, and the nearest one.
        """
        if name in self.specs:
            return self.specs[name]
        known = {spec.casefold(): spec for spec in self.specs}
        near = difflib.get_close_matches(name.casefold(), known, n=1)
        suggestion = f'Did you mean "{known[near[0]]}"? ' if near else ""
        raise ConfigError(
            where,
            expected=f"an installed {self.noun} ({', '.join(sorted(self.specs)) or 'there is none'})",
            got=repr(name),
            fix=f"{suggestion}It may be misspelled or not installed; `mimo plugins` lists what is.",
        )
