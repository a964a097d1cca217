"""How a parameter of ours lies in a parameter of the library, which may hold several of them in one."""

from __future__ import annotations

import attrs
from torch import Tensor


@attrs.frozen(kw_only=True)
class Published:
    """A parameter of the library's model, or what is ours of it.

    Args:
        name: of the library's parameter.
        half: which half of its outputs, dim 1 of those of experts, is ours; None for all.
        transposed: whether inputs lie before outputs there, in the last two dims.
    """

    name: str
    half: int | None = None
    transposed: bool = False

    def view(self, published: Tensor) -> Tensor:
        """Return what is ours of the library's tensor: to read, and to write into."""
        found = published.mT if self.transposed else published
        return found if self.half is None else found.chunk(2, dim=1)[self.half]
