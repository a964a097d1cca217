"""What host and device each hold of an optimizer, from sizes, before anything is allocated. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import attrs

from mimo_optimizer_hybrid._buckets import Piece, bucket_numbers, cut_buckets, cut_pieces, first_of_host
from mimo_optimizer_hybrid._memory import HeldBytes

NUMBER_BYTES = 4
"""Of fp32."""
MOMENTS_BYTES = 2 * NUMBER_BYTES
"""Of each number, wherever they are; the host holds its fp32 master too."""


def travelling_bytes(numbers: int, *, pins: bool) -> int:
    """Return the host memory of a buffer of fp32 numbers that travel to or from the device."""
    taken = NUMBER_BYTES * numbers
    return 1 << (taken - 1).bit_length() if pins and taken else taken


@attrs.frozen(kw_only=True)
class Division:
    """Which parameters the host holds, and in which pieces their gradients travel.

    Args:
        begin: the first of them; the host holds all from there on.
        buckets: of these, counted from ``begin``.
        pieces: of the buckets.
        most: elements of a bucket and of a staging buffer.
        staging: number of staging buffers.
        sizes: numbers of all parameters.
        pins: whether what travels lies in pinned memory, which torch takes in powers of two.
    """

    begin: int
    buckets: tuple[range, ...]
    pieces: tuple[Piece, ...]
    most: int
    staging: int
    sizes: tuple[int, ...]
    pins: bool = False

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        *,
        fraction: float,
        bucket_bytes: int,
        staging_bytes: int,
        shares: Sequence[float] | None = None,
        kept: int = 0,
        pins: bool = False,
    ) -> Self:
        """Divide parameters.

        Args:
            sizes: numbers of each parameter, in the order in which a forward needs them.
            fraction: of all numbers that the host is to hold.
            bucket_bytes: of parameters that are stepped together.
            staging_bytes: host memory for gradients on their way, at least two buckets.
            shares: numbers by which parameters are divided, where ranks with other ``sizes`` must divide the same way.
            kept: of the first parameters, those that the host holds only if it holds all.
            pins: whether the device is an accelerator.
        """
        most = bucket_numbers(sum(sizes), bucket_bytes)
        begin = first_of_host(sizes if shares is None else shares, fraction, kept=kept)
        buckets = tuple(cut_buckets(sizes[begin:], most))
        pieces = tuple(cut_pieces(sizes[begin:], buckets, most))
        staging = min(max(staging_bytes // (most * NUMBER_BYTES), 2), len(pieces))
        return cls(
            begin=begin, buckets=buckets, pieces=pieces, most=most, staging=staging, sizes=tuple(sizes), pins=pins
        )

    @property
    def fraction(self) -> float:
        """Share of all numbers that the host holds."""
        return sum(self.sizes[self.begin :]) / max(sum(self.sizes), 1)

    @property
    def bytes(self) -> HeldBytes:
        """State and staging; each parameter counts its own steps, in one number."""
        device, host = self.sizes[: self.begin], self.sizes[self.begin :]
        masters = sum(travelling_bytes(sum(host[at] for at in bucket), pins=self.pins) for bucket in self.buckets)
        staging = travelling_bytes(self.staging * self.most, pins=self.pins)
        return HeldBytes(
            host=masters + staging + MOMENTS_BYTES * sum(host) + NUMBER_BYTES * len(host),
            device=MOMENTS_BYTES * sum(device) + NUMBER_BYTES * len(device),
        )
