"""The half of an optimizer that the host holds: masters and moments, and the thread that steps them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Self

import attrs
import torch
from torch import Tensor

from mimo.hooks import RunError
from mimo.optimizer.runtime import fused_adamw
from mimo.topology.meshes import local
from mimo_optimizer_hybrid._buckets import Piece, Span
from mimo_optimizer_hybrid._lane import Lane, bytes_of, host_buffer
from mimo_optimizer_hybrid._staging import Staging
from mimo_optimizer_hybrid._tensors import Settings, shaped_like, sight
from mimo_optimizer_hybrid._threads import host_thread


@attrs.define(kw_only=True, eq=False)
class HostParameter:
    """One parameter that the host steps; its tensors are flat views of its bucket's buffers.

    Args:
        parameter: on the device.
        bucket: that it is in; None if it has no numbers.
        master: [n] its values.
        average: [n] of gradients.
        square: [n] average of their squares.
        step: how often it has been stepped.
        known: what `sight` saw of the parameter when the master had its values; None where they are to be read anew.
    """

    parameter: Tensor
    bucket: int | None
    master: Tensor
    average: Tensor
    square: Tensor
    step: Tensor
    known: tuple[int, int, int] | None = None

    def state(self) -> dict[str, Tensor]:
        """Return its state as `LocalAdamW` has it, in the shape of the parameter."""
        return {
            "step": self.step,
            "exp_avg": shaped_like(self.parameter, self.average),
            "exp_avg_sq": shaped_like(self.parameter, self.square),
        }


@attrs.frozen(kw_only=True)
class _Order:
    """One parameter's share of a step: with what it is stepped, and where its new values go."""

    settings: Settings
    value: Tensor


@attrs.frozen(kw_only=True)
class _Slice:
    """A span of a parameter as it is stepped: views of its bucket's buffers, and of a staging buffer."""

    span: Span
    held: HostParameter
    gradient: Tensor
    master: Tensor
    average: Tensor
    square: Tensor

    @classmethod
    def of(cls, span: Span, held: HostParameter, gradient: Tensor) -> Self:
        """Return the views of a span."""
        master, average, square = (one[span.start : span.stop] for one in (held.master, held.average, held.square))
        return cls(span=span, held=held, gradient=gradient, master=master, average=average, square=square)


class HostHalf:
    """Steps parameters in host memory, on one thread, bucket by bucket, and sends their new values to the device.

    Args:
        parameters: in the order in which they are stepped.
        pieces: of them, in which they are stepped.
        most: elements of a staging buffer.
        staging: number of staging buffers.
        device: of the parameters.
        threads: on which its thread computes.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        pieces: Sequence[Piece],
        most: int,
        staging: int,
        device: torch.device,
        threads: int,
    ) -> None:
        self._device = device
        self._members: dict[int, list[int]] = {}
        self._last: dict[int, int] = {}
        for number, piece in enumerate(pieces):
            members = self._members.setdefault(piece.bucket, [])
            members += [span.parameter for span in piece.spans if span.start == 0]
            self._last[piece.bucket] = number
        self._buffers: list[Tensor] = []
        self._held = self._hold(parameters)
        self._staging = Staging(pieces, most=most, buffers=staging, device=device)
        self._pieces = [
            tuple(_Slice.of(one, self._held[one.parameter], self._staging.view(number, one)) for one in piece.spans)
            for number, piece in enumerate(pieces)
        ]
        self._up = Lane.of(device)
        self._sent: dict[int, torch.Event | None] = dict.fromkeys(self._members)
        self._done = {bucket: threading.Event() for bucket in self._members}
        self._job: Future[None] | None = None
        self._error: BaseException | None = None
        # Its thread is joined as the interpreter exits: a step that runs then comes to its end.
        self._thread = host_thread(threads)

    @torch.no_grad()
    def _hold(self, parameters: Sequence[Tensor]) -> list[HostParameter]:
        """Take memory for parameters, bucket by bucket; one without numbers needs none."""
        held: dict[int, HostParameter] = {}
        empty = [index for index, parameter in enumerate(parameters) if not local(parameter).numel()]
        for bucket, members in [*self._members.items(), (None, empty)]:
            sizes = [local(parameters[index]).numel() for index in members]
            buffers = [host_buffer(sum(sizes), self._device, travels=travels) for travels in (True, False, False)]
            self._buffers += buffers
            views = zip(*(buffer.split(sizes) for buffer in buffers), strict=True)
            for index, (master, average, square) in zip(members, views, strict=True):
                held[index] = HostParameter(
                    parameter=parameters[index],
                    bucket=bucket,
                    master=master,
                    average=average,
                    square=square,
                    step=torch.zeros((), device="cpu"),
                )
        return [held[index] for index in range(len(parameters))]

    @property
    def held(self) -> Sequence[HostParameter]:
        """What it steps, in order."""
        return self._held

    @property
    def is_idle(self) -> bool:
        """Whether the thread has nothing to do."""
        return self._job is None or self._job.done()

    @property
    def bytes(self) -> int:
        """Host memory that is held, as it was allocated."""
        buffers = [*self._buffers, *(held.step for held in self._held)]
        return self._staging.bytes + sum(map(bytes_of, buffers))

    def buckets_of(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return the buckets in which these parameters lie."""
        found = {self._held[index].bucket for index in indices}
        return tuple(sorted(bucket for bucket in found if bucket is not None))

    def stage(self, indices: Iterable[int]) -> None:
        """Copy the gradients of these parameters down, as far as there are buffers; they are final.

        Raises:
            RunError: the thread has failed.
        """
        self.wait_all()
        self._staging.stage({index: self._held[index].parameter.grad for index in indices})

    def distrust(self) -> None:
        """Read all masters anew before they are stepped again."""
        for held in self._held:
            held.known = None

    def start(self, settings: Mapping[int, Settings]) -> None:
        """Step these parameters, those that have a gradient, on the thread.

        Raises:
            RunError: the thread has failed.
        """
        self.wait_all()
        orders: dict[int, _Order] = {}
        late: dict[int, tuple[bool, Tensor | None]] = {}
        for index, own in settings.items():
            held = self._held[index]
            if held.parameter.grad is None:
                continue
            value = local(held.parameter)
            if held.known != sight(held.parameter):
                held.master.copy_(value.reshape(-1))
            orders[index] = _Order(settings=own, value=value)
            late[index] = self._staging.take(index, held.parameter.grad)
        if not orders:
            return
        for done in self._done.values():
            done.clear()
        self._staging.follow()
        self._up.follow()
        self._job = self._thread.submit(self._work, orders, late)

    def wait(self, buckets: Iterable[int]) -> None:
        """Wait until parameters of these buckets have their new values, for what the device is given from here on.

        Raises:
            RunError: the thread has failed.
        """
        for bucket in buckets:
            if self._job is not None:
                self._done[bucket].wait()
            self._check()
            event = self._sent[bucket]
            if event is not None:
                event.wait(torch.accelerator.current_stream(self._device))

    def wait_all(self) -> None:
        """Wait until all have been stepped and have their new values.

        Raises:
            RunError: the thread has failed.
        """
        if self._job is not None:
            self._job.result()
            self._job = None
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise RunError(
                "optimizer.plugin",
                expected="the thread that steps what the host holds to finish",
                got=repr(self._error),
                fix="Some weights have been stepped and others not: go on from the last checkpoint.",
            ) from self._error

    def _work(self, orders: Mapping[int, _Order], late: Mapping[int, tuple[bool, Tensor | None]]) -> None:
        """Do a step; whatever comes of it, nobody waits for it any longer."""
        try:
            with torch.no_grad():
                self._step(orders, late)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the next call raises it
            self._error = error
        finally:
            for done in self._done.values():
                done.set()

    def _step(self, orders: Mapping[int, _Order], late: Mapping[int, tuple[bool, Tensor | None]]) -> None:
        torch._foreach_add_([self._held[index].step for index in orders], 1)  # as torch.optim does
        ahead, event = self._staging.ahead, None
        for number in range(ahead):
            self._staging.bring(number, late)
        for number, piece in enumerate(self._pieces):
            self._staging.wait(number)
            self._step_piece([one for one in piece if one.span.parameter in orders], orders)
            if number + ahead < len(self._pieces):
                self._staging.bring(number + ahead, late)
            bucket = piece[0].held.bucket
            if bucket is not None and self._last[bucket] == number:
                event = self._finish(bucket, orders)
        if event is not None:
            event.synchronize()

    def _step_piece(self, piece: Sequence[_Slice], orders: Mapping[int, _Order]) -> None:
        """Step what has a gradient, that of like settings together, and send new values up."""
        for settings in dict.fromkeys(orders[one.span.parameter].settings for one in piece):
            same = [one for one in piece if orders[one.span.parameter].settings == settings]
            fused_adamw(
                [one.master for one in same],
                [one.gradient for one in same],
                [one.average for one in same],
                [one.square for one in same],
                [one.held.step for one in same],
                settings.group,
            )
        targets, sources = [], []
        for one in piece:
            value = orders[one.span.parameter].value
            if value.is_contiguous():
                targets.append(value.view(-1)[one.span.start : one.span.stop])
                sources.append(one.master)
            elif one.span.stop == value.numel():
                targets.append(value)
                sources.append(one.held.master.view(value.shape))
        self._up.copy(targets, sources)

    def _finish(self, bucket: int, orders: Mapping[int, _Order]) -> torch.Event | None:
        """Wake the threads that wait for a bucket."""
        event = self._sent[bucket] = self._up.mark()
        for index in self._members[bucket]:
            if index in orders:
                self._held[index].known = sight(self._held[index].parameter)
        self._done[bucket].set()
        return event
