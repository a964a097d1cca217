"""What one rank sees of its own computations in one run of a step, so that two runs can be told apart.

Each number is one pass over small data and stays where it was computed: nothing is waited for until somebody asks.
R rows, H columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from mimo.optimizer import Sums
from mimo.topology import StageId
from mimo.trainer._rerun_settings import InjectSettings, Spoiled

Kind: TypeAlias = Literal["forward", "loss", "backward", "tied", "gradients"]
"""The rows of a pass; its loss; the gradients that it sends back; gradients of parameters, before they are summed over
stages, and over lanes."""


@attrs.frozen(kw_only=True)
class Deed:
    """Something that a rank did in a step; ``microbatches`` are those of a pass, and none for gradients."""

    kind: Kind
    module: str
    stage: int
    microbatches: tuple[int, ...] = ()


class Injector:
    """Spoils numbers where settings say so.

    Args:
        settings: what, where and when.
        rank: this rank.
        device: the identity of what it computes on.
    """

    def __init__(self, settings: InjectSettings, *, rank: int, device: str) -> None:
        self._settings = settings
        self._left = settings.times or None
        self._is_here = settings.step > 0 and settings.rank == rank and settings.device in ("", device)
        self._spoils = False

    def begin(self) -> None:
        """Take note that a run of some step begins."""
        if self._spoils and self._left is not None:
            self._left -= 1
        self._spoils = False

    def spoil(self, what: Spoiled, value: Tensor) -> Tensor:
        """Return what is to be taken for ``value``."""
        return value * (self._settings.factor or float("nan")) if what == self._settings.what else value

    def meets(self, step: int, module: str, microbatches: Sequence[int]) -> bool:
        """Tell whether a pass is to be spoiled."""
        wanted = self._settings
        found = (
            self._is_here
            and self._left != 0
            and (step, module) == (wanted.step, wanted.module)
            and wanted.microbatch in microbatches
        )
        self._spoils = self._spoils or found
        return found


class Witness:
    """Sees what this rank computes while it trains.

    Args:
        microbatches: of a step; those that a module makes ahead count on from there.
        injector: spoils what is seen.
    """

    def __init__(self, *, microbatches: int, injector: Injector) -> None:
        self._microbatches = microbatches
        self._injector = injector
        self._now: dict[Deed, list[Tensor]] = {}
        self._ahead: dict[Deed, list[Tensor]] = {}
        self._steps: tuple[int | None, int | None] = (None, None)

    def begin(self, step: int | None, ahead: int | None) -> None:
        """Begin to see a run of ``step``, in which some of step ``ahead`` is made; forget all but what was made for it.

        Args:
            step: None where only something of the other is made.
            ahead: None for none.
        """
        self._injector.begin()
        self._now = self._ahead if step is not None and self._steps[1] == step else {}
        self._ahead = {}
        self._steps = (step, ahead)

    def see_pass(
        self, stage: StageId, microbatches: tuple[int, ...], inputs: Mapping[str, Tensor], rows: Tensor
    ) -> Tensor:
        """See the rows [R, H] of a forward, and in its backward the gradients of its inputs; return the rows."""
        is_ahead = microbatches[0] >= self._microbatches
        step = self._steps[is_ahead]
        if step is None:
            return rows
        served = tuple(one - self._microbatches * is_ahead for one in microbatches)
        if self._injector.meets(step, stage.module, served):
            rows = self._injector.spoil("forward", rows)
            if rows.requires_grad:
                rows.register_hook(partial(self._injector.spoil, "gradient"))
        deed = Deed(kind="forward", module=stage.module, stage=stage.stage, microbatches=served)
        self._note(deed, rows, ahead=is_ahead)
        back = attrs.evolve(deed, kind="backward")
        for value in inputs.values():
            if value.requires_grad:
                value.register_hook(partial(self._note, back))
        return rows

    def see_loss(self, stage: StageId, microbatches: tuple[int, ...], loss: Tensor) -> None:
        """See the loss of a pass."""
        if self._steps[0] is not None:
            deed = Deed(kind="loss", module=stage.module, stage=stage.stage, microbatches=microbatches)
            self._note(deed, loss)

    def see_gradients(self, module: str, sums: Sums, stages: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """See this rank's own gradients of parameters, as `mimo.optimizer.ModuleParameters.observe` says."""
        if self._steps[0] is not None and gradients:
            deed = Deed(kind="gradients" if sums == "lanes" else "tied", module=module, stage=min(stages))
            norms = torch._foreach_norm(list(gradients))  # noqa: SLF001 - what torch.nn.utils calls too
            self._note(deed, torch.stack([norm.float() for norm in norms]))

    @torch.no_grad()
    def _note(self, deed: Deed, value: Tensor, *, ahead: bool = False) -> None:
        notes = self._ahead if ahead else self._now
        notes.setdefault(deed, []).append(torch.linalg.vector_norm(value.detach(), dtype=torch.float32))

    def stacked(self) -> tuple[tuple[Deed, ...], Tensor]:
        """Return what was seen of the last run: deeds, and the norm [N] of each; the host waits for nothing."""
        norms = [
            notes[0] if len(notes) == 1 else torch.linalg.vector_norm(torch.stack(notes))
            for notes in self._now.values()
        ]
        return tuple(self._now), torch.stack(norms) if norms else torch.zeros(0)

    def values(self) -> dict[Deed, float]:
        """Return the same as numbers, for which the device is waited for."""
        deeds, norms = self.stacked()
        return dict(zip(deeds, norms.tolist(), strict=True))


class Bounds:
    """The largest that each deed's norm has been of late, on the device.

    Args:
        steps: after as many, what was larger before counts half.
    """

    def __init__(self, steps: int) -> None:
        self._decay = 0.5 ** (1 / steps)
        self._deeds: tuple[Deed, ...] = ()
        self._largest = torch.zeros(0)

    def add(self, witness: Witness) -> None:
        """Take in the step that was accepted."""
        deeds, norms = witness.stacked()
        if deeds == self._deeds:
            self._largest = torch.maximum(self._largest * self._decay, norms)
        else:
            self._deeds, self._largest = deeds, norms

    def values(self) -> dict[Deed, float]:
        """Return them by deed, for which the device is waited for."""
        return dict(zip(self._deeds, self._largest.tolist(), strict=True))
