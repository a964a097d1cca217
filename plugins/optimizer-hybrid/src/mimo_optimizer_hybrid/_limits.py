"""Settings that the plugin and the optimizer share, and what they may be. Free of torch."""

from __future__ import annotations

from typing import Literal

from mimo.hooks import ConfigError

BUCKET_BYTES = 32 * 2**20
STAGING_BYTES = 512 * 2**20


def check_fraction(fraction: float | Literal["auto"]) -> None:
    """Refuse what is no share.

    Raises:
        ConfigError: it is neither a number from 0 to 1 nor ``auto``.
    """
    if fraction != "auto" and not (isinstance(fraction, int | float) and 0 <= fraction <= 1):
        raise ConfigError(
            "optimizer.fraction",
            expected="the share of the optimizer's state that the host holds, from 0 to 1, or 'auto'",
            got=repr(fraction),
            fix="0 leaves all on the device, 1 holds all in host memory.",
        )
