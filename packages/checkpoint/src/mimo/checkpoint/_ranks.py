"""The ranks that save or load together: small collectives of plain values, and failures that all of them hear of.

Values travel as JSON (`mimo.checkpoint._wire`), and so does a failure: as its texts, never as an exception.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from mimo.checkpoint import _wire
from mimo.checkpoint._wire import Wire
from mimo.hooks import CheckpointError, UserError

T = TypeVar("T")

MAKE_ROOM = "Older checkpoints are whole. Make room, or look at the disk."
"""What to do about files of a checkpoint that can't be written."""

_PATIENCE = timedelta(days=1)
"""How long a rank of a group of our own waits for one that writes slower; a dead one is noticed at once."""


class WriteError(CheckpointError):
    """The files of a checkpoint could not be written, because a disk is full for example; older ones are whole."""


_KINDS: tuple[type[CheckpointError], ...] = (CheckpointError, WriteError)


@attrs.frozen(kw_only=True)
class Failure:
    """What went wrong on one rank; ``trace`` is its traceback where the error wasn't a user's."""

    rank: int
    where: str
    expected: str
    got: str
    fix: str
    trace: str = ""
    kind: type[CheckpointError] = CheckpointError

    def error(self) -> CheckpointError:
        """Return it as an exception, traceback noted."""
        error = self.kind(self.where, expected=self.expected, got=self.got, fix=self.fix)
        if self.trace:
            error.add_note(self.trace)
        return error


@attrs.frozen(kw_only=True)
class Ranks:
    """This process among those of the default group; alone without one. Rank 0 decides and commits.

    Args:
        rank: this process.
        size: number of processes.
        group: what their collectives go over, None for the default group.
        is_own: whether the group was made for them, and is theirs to give back.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    is_own: bool = False

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """Return the ranks of the default group, or this process alone; ``group`` is of the same ranks, see `save`."""
        if dist.is_available() and dist.is_initialized():
            return cls(rank=dist.get_rank(), size=dist.get_world_size(), group=group)
        return cls(rank=0, size=1)

    @classmethod
    def own(cls) -> Ranks:
        """Return the ranks of the default group with a gloo group of their own; collective over the default group.

        Two threads need two, since a group's collectives are in one order on all ranks. And values that are no tensors
        never go over NCCL.
        """
        ranks = cls.current()
        if ranks.size == 1:
            return ranks
        return attrs.evolve(ranks, group=dist.new_group(backend="gloo", timeout=_PATIENCE), is_own=True)

    def close(self) -> None:
        """Give back a group of our own."""
        if self.is_own:
            dist.destroy_process_group(self.group)

    def attempt(self, work: Callable[[], T], *, where: str, writes: bool = False, fix: str = MAKE_ROOM) -> T | Failure:
        """Return what ``work`` returns, or its failure, so that no rank leaves the others waiting.

        Args:
            work: what may fail.
            where: its place, for errors without one.
            writes: whether an `OSError` means that files can't be written.
            fix: what to do then.
        """
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
                kind=WriteError if isinstance(error, WriteError) else CheckpointError,
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
            is_disk = writes and isinstance(error, OSError)
            return Failure(
                rank=self.rank,
                where=where,
                expected="no failure",
                got=f"{type(error).__name__}: {error}",
                fix=fix if is_disk else "",
                trace=f"On rank {self.rank}:\n{traceback.format_exc()}",
                kind=WriteError if is_disk else CheckpointError,
            )

    def all_true(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each of the flags whether it is set on every rank: one all-reduce of a few bytes."""
        if self.size == 1:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.uint8, device=_wire.device_of(self.group))
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return [bool(flag) for flag in found.tolist()]

    def gather(self, outcome: T | Failure, wire: Wire[T]) -> list[T | Failure]:
        """Return every rank's ``outcome`` on rank 0, nothing on the others."""
        if self.size == 1:
            return [outcome]
        packed = _wire.gather(_pack(outcome, wire), self.group)
        return [] if packed is None else [_unpack(one, wire.unpack, rank) for rank, one in enumerate(packed)]

    def gather_everywhere(self, outcome: T | Failure, wire: Wire[T]) -> list[T | Failure]:
        """Return every rank's ``outcome`` on all ranks."""
        if self.size == 1:
            return [outcome]
        packed = _wire.all_gather(_pack(outcome, wire), self.group)
        return [_unpack(one, wire.unpack, rank) for rank, one in enumerate(packed)]

    def scatter(self, outcomes: Sequence[T | Failure], wire: Wire[T]) -> T | Failure:
        """Return this rank's one of the ``outcomes`` that rank 0 gives; the others give none."""
        if self.size == 1:
            return outcomes[0]
        return _unpack(_wire.scatter([_pack(one, wire) for one in outcomes], self.group), wire.unpack, 0)

    def share(self, outcome: T | Failure | None, wire: Wire[T]) -> T | Failure:
        """Return rank 0's ``outcome`` on all ranks; the others give none."""
        if self.size > 1:
            packed = None if outcome is None else _pack(outcome, wire)
            return _unpack(_wire.share(packed, self.group), wire.unpack, 0)
        assert outcome is not None
        return outcome


def _pack(outcome: T | Failure, wire: Wire[T]) -> list[Any]:
    """Return an outcome as plain data: whether it is a failure, and what of it travels."""
    if not isinstance(outcome, Failure):
        return [False, wire.pack(outcome)]
    fields = attrs.asdict(outcome)
    return [True, {**fields, "kind": _KINDS.index(outcome.kind)}]


def _unpack(packed: Any, unpack: Callable[[Any], T], rank: int) -> T | Failure:
    """Return the outcome that ``rank`` has sent; what can't be one is a failure of that rank."""
    try:
        failed, fields = packed
        if not failed:
            return unpack(fields)
        texts = {name: str(fields[name]) for name in ("where", "expected", "got", "fix", "trace")}
        return Failure(rank=int(fields["rank"]), kind=_KINDS[fields["kind"]], **texts)
    except (LookupError, TypeError, ValueError) as error:
        return Failure(
            rank=rank,
            where="checkpoint",
            expected="from every rank what the same release of mimo-checkpoint says",
            got=f"something else ({type(error).__name__}: {error})",
            fix="Give all machines the same packages.",
        )


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
    causes: dict[tuple[str, str, str, str], list[int]] = {}  # one cause on several ranks is reported once
    for failure in failures:
        causes.setdefault((failure.where, failure.expected, failure.got, failure.fix), []).append(failure.rank)
    (where, expected, _, fix), *others = causes
    gots = [
        got + (f" on rank {', '.join(map(str, found))}" if len(outcomes) > 1 else "")
        for (_, _, got, _), found in causes.items()
    ]
    more = [f"{place}: expected {aim}, got {got}" for (place, aim, _, _), got in zip(others, gots[1:], strict=True)]
    raise Failure(
        rank=0,
        where=where,
        expected=expected,
        got="; ".join([gots[0], *more]),
        fix=fix,
        trace="".join(failure.trace for failure in failures),
        kind=WriteError if all(failure.kind is WriteError for failure in failures) else CheckpointError,
    ).error()
