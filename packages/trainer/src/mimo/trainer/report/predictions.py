"""What the model predicts for held-out samples, as lifecycle plugins read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import attrs

from mimo.hooks import Prediction
from mimo.trainer.job.job import Job
from mimo.trainer.step.programs.predictions import Prediction as ScoredSample


@attrs.frozen(eq=False)
class Predictions(Sequence[Prediction]):
    """The predictions of an evaluation: each is decoded, and its item read, when it is taken out."""

    job: Job
    written: Sequence[ScoredSample]

    def __len__(self) -> int:
        """Return for how many samples there is one."""
        return len(self.written)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prediction]: ...
    def __getitem__(self, index: int | slice) -> Prediction | Sequence[Prediction]:
        """Return one of them, or some."""
        if isinstance(index, slice):
            return Predictions(self.job, self.written[index])
        dataset, tokenizer, written = self.job.evaluation, self.job.tokenizer, self.written[index]
        assert dataset is not None
        end = written.ids.index(tokenizer.end) if tokenizer.end in written.ids else len(written.ids)
        return Prediction(
            sample=written.sample,
            text=tokenizer.decode(written.ids[:end]),
            is_exact=written.right,
            item=dataset.raw(written.sample, 0) if dataset.infos(written.sample) else None,
        )
