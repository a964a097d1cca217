"""How pictures lie one after the other, each as the rows that it is made from and then its patches.

Shapes: N pictures, L patches of each, R rows of the language model, c rows that all pictures are made from, T rows of
the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from mimo.model.runtime import Segments, to_device


@attrs.frozen(kw_only=True, eq=False)
class Packing:
    """Where the rows of some pictures lie. A picture that is made from no row has a learned one in their place.

    Args:
        counts: rows of the language model that each picture is made from.
        lengths: rows of each picture in the sequence.
        read: [c] which of R those are, in order.
        joined: [T] which row of the learned one, c and N·L patches, one after the other, each of the sequence is.
        owners: [T] which picture it is of.
        patches: [N·L] which of the sequence are patches.
        segments: in which attention runs: each row sees all of its picture.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    read: Tensor
    joined: Tensor
    owners: Tensor
    patches: Tensor
    segments: Segments

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], *, patches: int, device: torch.device) -> Packing:
        """Return how pictures lie that are made from these spans of R, of so many patches each."""
        counts = tuple(stop - start for start, stop in spans)
        lengths = tuple(max(count, 1) + patches for count in counts)
        joined, last = [torch.arange(0)], 1 + sum(counts)
        first = 1
        for number, count in enumerate(counts):
            joined += [
                torch.arange(first, first + count) if count else torch.zeros(1, dtype=torch.int64),
                torch.arange(last + number * patches, last + (number + 1) * patches),
            ]
            first += count
        joined_rows = torch.cat(joined)
        read = torch.cat([torch.arange(0), *(torch.arange(start, stop) for start, stop in spans)])
        owners = torch.arange(len(spans)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        return cls(
            counts=counts,
            lengths=lengths,
            read=to_device(read, device),
            joined=to_device(joined_rows, device),
            owners=to_device(owners, device),
            patches=to_device((joined_rows >= last).nonzero().flatten(), device),
            segments=Segments.of(lengths, causal=False, device=device),
        )
