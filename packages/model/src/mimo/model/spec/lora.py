"""Low-rank adaptation of a module's linears, as settings say it; free of torch.

Beside a linear's frozen weight W [O, I] stand ``down`` [r, I] and ``up`` [O, r], and the linear computes with
W + alpha / r · up · down (Hu et al. 2021, arXiv:2106.09685, section 4.1).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import attrs

from mimo.hooks import ConfigError, is_rate
from mimo.model.spec.limits import MAX_WIDTH

_DOWN, _UP = ".lora.down", ".lora.up"


@attrs.frozen(kw_only=True)
class Lora:
    """Which linears of a module are adapted, and how.

    Args:
        rank: of what is added to each, r.
        alpha: what is added is multiplied by ``alpha / rank``; 0 for the rank.
        targets: patterns (`fnmatch`) of paths of linears inside the module, ``layers.*.attention.query``.
        dropout: the rate at which features of a linear's rows are dropped for what is added (0 or more, less than 1),
            while it is trained.

    Raises:
        ConfigError: a value is out of range.
    """

    rank: int
    alpha: float = 0.0
    targets: tuple[str, ...] = ()
    dropout: float = attrs.field(default=0.0, validator=is_rate())

    def __attrs_post_init__(self) -> None:
        """Refuse what is out of range."""
        if not 1 <= self.rank <= MAX_WIDTH:
            raise ConfigError("rank", expected=f"1 to {MAX_WIDTH}", got=repr(self.rank))
        if not 0 <= self.alpha < float("inf"):
            raise ConfigError("alpha", expected="a finite number of 0 or more; 0: the rank", got=repr(self.alpha))
        if not self.targets:
            raise ConfigError(
                "targets",
                expected="patterns of the paths of linears inside the module",
                got="none",
                fix='"*" takes all of them.',
            )

    @property
    def scale(self) -> float:
        """What the product of ``up`` and ``down`` is multiplied by."""
        return (self.alpha or self.rank) / self.rank

    def takes(self, path: str) -> bool:
        """Tell whether the linear at ``path`` is one of its targets."""
        return any(fnmatchcase(path, pattern) for pattern in self.targets)


def lora_names(linear: str) -> tuple[str, str]:
    """Return the names of ``down`` and ``up`` beside a linear."""
    return f"{linear}{_DOWN}", f"{linear}{_UP}"


def lora_linear(name: str) -> str | None:
    """Return beside which linear a parameter of this name adapts it; None for a parameter that does not."""
    return next((name.removesuffix(end) for end in (_DOWN, _UP) if name.endswith(end)), None)
