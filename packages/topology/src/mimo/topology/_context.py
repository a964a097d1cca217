"""Who owns which rows of a sample: a sequence cut over the context ranks of one lane so that causal work is even."""

from __future__ import annotations


def context_spans(length: int, *, size: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Return which rows of a sample of ``length`` rows lie on context rank ``rank`` of ``size``, ascending.

    The sample is cut into ``2 size`` chunks as even as they come, and rank r holds the r-th and the r-th from the
    end: a causal row looks at all before it, so early and late chunks together cost every rank about the same (as in
    Llama 3, arXiv:2407.21783, section 3.3.2). No padding: chunks differ by one row at most, and may be empty.

    Returns:
        Spans ``(start, stop)`` that are not empty; neighbouring ones are joined.
    """
    if size == 1:
        return ((0, length),) if length else ()
    share, more = divmod(length, 2 * size)
    spans = [
        (chunk * share + min(chunk, more), (chunk + 1) * share + min(chunk + 1, more))
        for chunk in (rank, 2 * size - 1 - rank)
    ]
    if spans[0][1] == spans[1][0]:
        spans = [(spans[0][0], spans[1][1])]
    return tuple(span for span in spans if span[0] < span[1])
