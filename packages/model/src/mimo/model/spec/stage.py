"""One stage of a module. Free of torch."""

from __future__ import annotations

import attrs


@attrs.frozen
class Stage:
    """One of a module's ``count`` stages, ``pp * chunks``, in the order in which data passes them.

    Layers are spread evenly, earlier stages one more. Of an encoder that is divided at its ``seam`` there is one stage
    more, behind all layers: its projector.
    """

    index: int = 0
    count: int = 1
    seam: bool = False

    @property
    def is_first(self) -> bool:
        """Whether nothing of this module runs before it."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether nothing of this module runs after it."""
        return self.index == self.count - 1

    @property
    def is_projector(self) -> bool:
        """Whether it is what lies behind the seam."""
        return self.seam and self.is_last

    @property
    def ends_tower(self) -> bool:
        """Whether the last layer is here, and with it what follows the layers and comes before the projector."""
        return self.index == self.count - 1 - self.seam

    @property
    def pipeline(self) -> Stage:
        """The stage without regard to the seam: that of the pipeline rank, which holds the projector at its end."""
        return Stage(self.index - self.is_projector, self.count - self.seam)

    def layers(self, total: int) -> range:
        """Return the global indices of the layers, of ``total``, that this stage runs."""
        if self.is_projector:
            return range(total, total)
        if self.seam:
            return self.pipeline.layers(total)
        share, more = divmod(total, self.count)
        start = self.index * share + min(self.index, more)
        return range(start, start + share + (self.index < more))
