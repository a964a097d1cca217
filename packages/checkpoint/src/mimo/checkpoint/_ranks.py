"""The ranks that save or load together: four small collectives of plain values, and failures that all of them hear of.

A failure travels as text. (An exception of ours can't be unpickled from its message alone, which would end the
receiver instead of telling it.) What is pickled here goes between live ranks of one run only, never to or from a file.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch.distributed as dist

from mimo.hooks import CheckpointError, UserError

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Failure:
    """What went wrong on one rank; ``trace`` is its traceback where the error wasn't a user's."""

    rank: int
    where: str
    expected: str
    got: str
    fix: str
    trace: str = ""

    def error(self) -> CheckpointError:
        """Return it as an exception, traceback noted."""
        error = CheckpointError(self.where, expected=self.expected, got=self.got, fix=self.fix)
        if self.trace:
            error.add_note(self.trace)
        return error


@attrs.frozen(kw_only=True)
class Ranks:
    """This process among those of the default group; alone without one. Rank 0 decides and commits."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of the default group, or this process alone."""
        if dist.is_available() and dist.is_initialized():
            return cls(rank=dist.get_rank(), size=dist.get_world_size())
        return cls(rank=0, size=1)

    def attempt(self, work: Callable[[], T], *, where: str) -> T | Failure:
        """Return what ``work`` returns, or its failure, so that no rank leaves the others waiting."""
        try:
            return work()
        except UserError as error:
            return Failure(
                rank=self.rank,
                where=error.where,
                expected=error.expected,
                got=error.got,
                fix=error.fix,
                trace="".join(getattr(error, "__notes__", ())),  # python makes it with the first note
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
            return Failure(
                rank=self.rank,
                where=where,
                expected="no failure",
                got=f"{type(error).__name__}: {error}",
                fix="",
                trace=f"On rank {self.rank}:\n{traceback.format_exc()}",
            )

    def gather(self, value: T) -> list[T]:
        """Return every rank's ``value`` on rank 0, nothing on the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=0)
        return found or []

    def gather_everywhere(self, value: T) -> list[T]:
        """Return every rank's ``value`` on all ranks."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def scatter(self, values: Sequence[T]) -> T:
        """Return this rank's one of the ``values`` that rank 0 gives; the others give none."""
        if self.size == 1:
            return values[0]
        found: list[Any] = [None]
        dist.scatter_object_list(found, list(values) if self.rank == 0 else None, src=0)
        return found[0]  # type: ignore[no-any-return]  # torch's object collectives are untyped

    def share(self, value: T) -> T:
        """Return rank 0's ``value`` on all ranks."""
        if self.size == 1:
            return value
        found: list[Any] = [value]
        dist.broadcast_object_list(found, src=0)
        return found[0]  # type: ignore[no-any-return]  # torch's object collectives are untyped


def take(outcome: T | Failure) -> T:
    """Return an outcome, or raise it if it is a failure.

    Raises:
        CheckpointError: the outcome is a failure.
    """
    if isinstance(outcome, Failure):
        raise outcome.error()
    return outcome


def take_all(outcomes: Sequence[T | Failure]) -> list[T]:
    """Return the outcomes gathered from all ranks, or raise every failure among them as one error.

    Raises:
        CheckpointError: at least one outcome is a failure; names the ranks if there are several.
    """
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    if not failures:
        return [outcome for outcome in outcomes if not isinstance(outcome, Failure)]
    told: dict[tuple[str, str, str, str], list[int]] = {}  # one cause on several ranks is told once
    for failure in failures:
        told.setdefault((failure.where, failure.expected, failure.got, failure.fix), []).append(failure.rank)
    (where, expected, _, fix), *others = told
    gots = [
        got + (f" on rank {', '.join(map(str, found))}" if len(outcomes) > 1 else "")
        for (_, _, got, _), found in told.items()
    ]
    more = [f"{place}: expected {aim}, got {got}" for (place, aim, _, _), got in zip(others, gots[1:], strict=True)]
    raise Failure(
        rank=0,
        where=where,
        expected=expected,
        got="; ".join([gots[0], *more]),
        fix=fix,
        trace="".join(failure.trace for failure in failures),
    ).error()
