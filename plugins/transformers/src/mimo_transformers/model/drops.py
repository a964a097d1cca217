"""What takes the place of the library's modules that drop at random: ours, which draw by keys of rows and items.

A model of the library may also drop by a function in the code of a layer, as with ``functional.dropout``. That draws by
PyTorch's generator, wherever it runs, and nothing takes its place.
"""

from __future__ import annotations

from torch import Tensor, nn

from mimo.model.runtime import Dropout, DropPath

_COUNTS = "it draws by how often it has been called"


class BridgedDropout(Dropout):
    """In the place of a dropout of the library, which may serve in several places of a layer."""

    stays_eager = _COUNTS

    @property
    def p(self) -> float:
        """Its rate, which some layers read."""
        return self.rate

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [..., F] with some features at 0, others in each place."""
        return x if self.site is None else self.site.again(self.site.keys.count_call(self)).drop(x)


class BridgedDropPath(DropPath):
    """Likewise, in the place of what drops all that a residual branch adds to an item."""

    stays_eager = _COUNTS

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with all of some items at 0, others in each place."""
        return x if self.site is None else self.site.again(self.site.keys.count_call(self)).drop_paths(x)


def replace_drops(network: nn.Module) -> dict[str, Dropout]:
    """Put parts of ours in the place of the library's modules that drop at random, and return them by their paths."""
    made: dict[nn.Module, Dropout | None] = {}
    found = {}
    for path, part in list(network.named_modules(remove_duplicate=False)):
        if part not in made:
            made[part] = _replaced(part)
        if path and (dropping := made[part]) is not None:
            network.set_submodule(path, dropping)
            found[path] = dropping
    return found


def _replaced(part: nn.Module) -> Dropout | None:
    """Return what takes the place of a module, None for one that stays, as one that drops nothing does."""
    if type(part) is nn.Dropout and part.p:
        return BridgedDropout(part.p)
    rate = getattr(part, "drop_prob", None)
    if type(part).__name__.endswith("DropPath") and isinstance(rate, float) and rate:
        return BridgedDropPath(rate)
    return None
