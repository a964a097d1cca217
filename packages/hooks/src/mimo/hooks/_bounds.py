"""Upper bounds of settings: the largest that a number may be, refused by its path before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping

from mimo.hooks._errors import ConfigError

_SHOWN_BITS = 4096


def check_at_most(config: object, limits: Mapping[str, float], *, where: str) -> None:
    """Refuse numbers of a config that are larger than anything that could be built or run.

    Args:
        config: has a field of each name.
        limits: by field, the largest number that it may be.
        where: path of the config.

    Raises:
        ConfigError: by the path of the field.
    """
    for name, limit in limits.items():
        value = getattr(config, name)
        if value > limit:
            raise ConfigError(f"{where}.{name}", expected=f"at most {limit}", got=_shown(value))


def _shown(value: float) -> str:
    """Return a number as it is written, unless Python refuses to write so many digits."""
    bits = value.bit_length() if isinstance(value, int) else 0
    return f"a number of {bits} bits" if bits > _SHOWN_BITS else repr(value)
