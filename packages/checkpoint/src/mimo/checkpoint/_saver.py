"""Saving step after step: the plan is reused while the structure is the same, and files are written beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from mimo.checkpoint._folder import Keep
from mimo.checkpoint._plan import Order, Structure, plan_together, structure
from mimo.checkpoint._ranks import Failure, Ranks, take
from mimo.checkpoint._save import Contents, make_record, name_place, write_together
from mimo.checkpoint._staging import Staging, direct
from mimo.checkpoint._tree import Flat, collect
from mimo.checkpoint._writer import SHARD_BYTES
from mimo.hooks import CheckpointError, StateTree

_LOOK_SECONDS = 1.0


class Saver:
    """Saves the steps of one run; collective over the default process group where said, else of this process alone.

    Asynchronous, `save` returns when this rank's part is copied to host memory, and a thread writes it. (A thread:
    what it does, hashing and writing, runs outside Python's lock, so a process of its own slows a training loop no less
    and needs shared memory, a second import of torch, and a way to notice that it died.)

    The ranks' plan is reused as long as names, dtypes, shapes, placements, meshes and owners are the same on all of
    them, which every save finds out anew; numbers and values are always those of the step that is saved.

    Collective, and on every rank at the same point between collectives: it makes groups of its own.

    Args:
        folder: holds all steps; made if missing, shared by all ranks.
        asynchronous: write while training continues. Costs host memory for what this rank writes.
        when_busy: what `save` does while an earlier step is still being written: wait for it, or skip.
        assume_constant_structure: keep the plan while the structure is the same; else plan every save anew.
        keep: after a save this many steps are left of those up to it, the lowest are deleted; None: all stay. Steps
            above it, of a run that went back, are left.
        keep_every: steps that are multiples of this are never deleted.
        shard_bytes: a rank begins a new file before one would hold more bytes of data.
        on_progress: called repeatedly while a caller waits for this rank's writing and that makes progress: about
            each second or each few MiB. Never because of what is written while nobody waits for it.
        group: of the same ranks as the default group, for what they say to each other while a caller waits; None: one
            of gloo is made. What is written in the background always has one of its own.

    Raises:
        CheckpointError: ``keep`` or ``keep_every`` makes no sense.
    """

    def __init__(
        self,
        folder: Path,
        *,
        asynchronous: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
        assume_constant_structure: bool = True,
        keep: int | None = None,
        keep_every: int | None = None,
        shard_bytes: int = SHARD_BYTES,
        on_progress: Callable[[], None] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._folder = Path(folder)
        self._asynchronous = asynchronous
        self._when_busy = when_busy
        self._assume_constant_structure = assume_constant_structure
        self._keep = Keep(newest=keep, every=keep_every)
        self._shard_bytes = shard_bytes
        self._on_progress = on_progress
        self._front = Ranks.own() if group is None else Ranks.current(group)
        self._back = Ranks.own() if asynchronous else self._front  # a thread's collectives meet nobody else's
        self._plan: tuple[Structure, Order] | None = None  # every rank has one, or none has
        self._proven: Order | None = None  # the one by which a step was committed
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._failures: list[CheckpointError] = []
        self._lost: BaseException | None = None
        self._advances = 0  # of the thread

    def save(
        self,
        step: int,
        tree: StateTree,
        *,
        config: Mapping[str, Any],
        topology: Mapping[str, Any],
        now: bool = False,
    ) -> Path | None:
        """Save ``tree`` as the checkpoint of ``step``; collective. For the arguments see `mimo.checkpoint.save`.

        Args:
            step: steps trained so far, 0 or more.
            tree: this rank's part of the state; asynchronous, it may change as soon as this returns.
            config: the resolved config.
            topology: the grids.
            now: wait for what is being written, then write this step before returning.

        Returns:
            The folder of the step, which asynchronous will be there later; None: skipped, on every rank.

        Raises:
            WriteError: on every rank, if files could not be written, and this was not done in the background.
            CheckpointError: on every rank, if a leaf can't be saved or ranks disagree; what concerns values, in the
                background, is returned by `take_failure`.
            RuntimeError: the other ranks were lost while an earlier step was written.
        """
        self._raise_lost()
        where = name_place(self._folder, step)
        if now or self._when_busy == "wait":
            self.wait()
        found = self._front.attempt(lambda: self._look_at(tree), where=where)
        same = not isinstance(found, Failure) and self._plan is not None and self._plan[0] == found[1]
        all_same, all_idle = self._front.all_true([same and self._assume_constant_structure, not self._is_writing()])
        if not all_idle:
            return None
        self.wait()  # ended, and if its peers were lost this is the place to say so
        if not all_same:
            self._plan = None  # it must not come back if this fails
            flat = found if isinstance(found, Failure) else found[0]
            order = plan_together(self._front, flat, shard_bytes=self._shard_bytes, where=where)
            self._plan = (take(found)[1], order)
        assert self._plan is not None
        entries, order = take(found)[0], self._plan[1]
        beside = self._asynchronous and not now

        def make() -> Contents:
            record = make_record(entries, step, config, topology)
            if not beside:
                return Contents(record=record, data=direct(entries.tensors))
            self._staging.copy(order.layouts, entries.tensors)
            return Contents(record=record, data=self._staging.data)

        # What fails here on one rank, all hear of when they write.
        contents = self._front.attempt(make, where=where)
        if not beside:
            return take(self._write(contents, order, where, self._on_progress))
        self._thread = threading.Thread(
            target=self._write_beside, args=(contents, order, where), name=f"mimo-checkpoint {step}", daemon=True
        )
        self._thread.start()
        return Path(where)

    def take_failure(self) -> CheckpointError | None:
        """Return why a step could not be written in the background, each once, the oldest first; None: no failure.

        A `WriteError` leaves older checkpoints whole and the next save possible. Ranks learn of a failure at nearly the
        same time, not at the same step.

        Raises:
            RuntimeError: the other ranks were lost while a step was written.
        """
        if self._failures:
            return self._failures.pop(0)
        self._raise_lost()
        return None

    def wait(self) -> None:
        """Return when nothing is being written any more; whether that went well is what `take_failure` says.

        Raises:
            RuntimeError: the other ranks were lost while a step was written.
        """
        while self._thread is not None:
            seen = self._advances
            self._thread.join(_LOOK_SECONDS)
            if not self._thread.is_alive():
                self._thread = None
            elif self._on_progress is not None and self._advances != seen:
                self._on_progress()
        self._raise_lost()

    def close(self) -> None:
        """Wait, and give back what this needed beside the default process group; collective."""
        self.wait()
        self._front.close()
        if self._back is not self._front:
            self._back.close()

    def _look_at(self, tree: StateTree) -> tuple[Flat, Structure]:
        flat = collect(tree)
        return flat, structure(flat)

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _advance(self) -> None:
        self._advances += 1

    def _write(
        self, contents: Contents | Failure, order: Order, where: str, on_progress: Callable[[], None] | None
    ) -> Path | Failure:
        new_order = order is not self._proven
        outcome = write_together(
            self._back,
            self._folder,
            contents,
            order,
            self._keep,
            where=where,
            new_order=new_order,
            on_progress=on_progress,
        )
        if not isinstance(outcome, Failure):
            self._proven = order
        return outcome

    def _write_beside(self, contents: Contents | Failure, order: Order, where: str) -> None:
        try:
            outcome = self._write(contents, order, where, self._advance)
        except BaseException as error:  # noqa: BLE001  # no failure that ranks have agreed on: they were lost
            self._lost = error
            return
        if isinstance(outcome, Failure):
            self._failures.append(outcome.error())
