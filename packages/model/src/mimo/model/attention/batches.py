"""Which chunks share a kernel call of attention: those whose padding costs less than another call. Free of torch.

What is chosen follows from the lengths and the kind of device alone, so that a run computes the same sums each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import attrs

from mimo.model.attention.chunks import Chunk

_PIECES = 4  # of a masked call at most: over two ranks one computes a quarter more than is looked at, four a sixteenth
_PIECE = 128  # queries of each at least, for the kernel to be quick


@attrs.frozen(kw_only=True)
class CallCost:
    """What a kernel call costs, forward and backward, in pairs of a query and a key that no mask covers.

    Args:
        call: of each call, whatever its size.
        row: of each query and each key, which are copied into the order of the calls and back.
        masked: of a pair under a mask that is given as a tensor.
    """

    call: float
    row: float
    masked: float

    def of(self, chunks: int, queries: int, keys: int, *, window: int = 0, masked: bool = False) -> float:
        """Return what chunks of as many queries cost that look at as many keys, ``window`` of them at most."""
        seen, pieces = keys, 1
        if 0 < window < keys:
            pieces, masked = pieces_of(queries, window), True
            seen = min(keys, window + queries // pieces)
        pairs = queries * seen * (self.masked if masked else 1.0)
        return self.call * pieces + chunks * (pairs + self.row * (queries + keys))


CALL_COSTS = {
    "cpu": CallCost(call=1_024, row=8, masked=1.05),
    "cuda": CallCost(call=32_768, row=80, masked=1.5),
}
"""By kind of device. The CPU's is measured by ``benchmarks/attention.py`` at 8 heads of width 64; CUDA's is estimated
for fp32 from the rates of the hardware: there a call takes the host as long as a hundred times as many pairs."""


def pieces_of(queries: int, window: int) -> int:
    """Return in how many pieces queries run that see as many rows back.

    To a kernel a masked pair costs as much as any other. Pieces leave out most of those: they are `_PIECES`, or as many
    to a window.
    """
    return max(1, queries // max(_PIECE, min(queries, window) // _PIECES))


def batch(
    chunks: Sequence[Chunk], keys: Sequence[int], *, causal: bool, cost: CallCost, window: int = 0
) -> list[list[int]]:
    """Return which of ``chunks`` share a kernel call, ascending in each, for the calls to cost least.

    A causal call has the rows from its earliest chunk's first to its longest one's last; in any other, queries and keys
    are as many as the largest chunk has. Chunks are sorted by length and cut where the sum of costs is least, which
    dynamic programming finds: a call is never made longer by chunks that cost less apart.

    Args:
        chunks: in any order.
        keys: how many rows each looks at, see `keys_of_chunks`.
        causal: whether a row sees only itself, earlier rows of its segment, and its item.
        cost: of the calls.
        window: how many rows back a row sees at most, itself among them; 0 for all.
    """

    def shape(index: int) -> tuple[int, int, int]:
        chunk = chunks[index]
        return (keys[index], chunk.start, chunk.stop) if causal else (keys[index], 0, chunk.rows)

    order = sorted(range(len(chunks)), key=lambda index: [-size for size in shape(index)])
    groups = [(found, list(group)) for found, group in groupby(order, key=shape)]
    least, cuts = [0.0, *[float("inf")] * len(groups)], [0] * (len(groups) + 1)
    for first, ((longest, *rows), _) in enumerate(groups):
        start, stop = rows
        count, masked = 0, False
        for last, ((own, own_start, own_stop), group) in enumerate(groups[first:], first):
            own_masked = causal and own_stop - own_start != own
            masked = masked or own_masked or (not causal and own != longest)
            start, stop, count = min(start, own_start), max(stop, own_stop), count + len(group)
            call, joined = (
                cost.of(many, stop - start, longest, window=window, masked=masked) for many in (0, len(group))
            )
            if joined - call > cost.of(len(group), own_stop - own_start, own, window=window, masked=own_masked):
                break  # then a call that begins here costs less, whatever follows
            together = cost.of(count, stop - start, longest, window=window, masked=masked)
            if least[first] + together < least[last + 1]:
                least[last + 1], cuts[last + 1] = least[first] + together, first
    calls, end = [], len(groups)
    while end:
        calls.append(sorted(index for _, group in groups[cuts[end] : end] for index in group))
        end = cuts[end]
    return calls[::-1]
