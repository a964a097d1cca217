"""The forwards of generation: several sequences read at once as packed rows, by one stage of the language model.

New prompts are read in one forward, then each sequence's new token as one row, if the language model has a decode cache
(`mimo.model.runtime.SupportsDecodeCache`); otherwise all of them again for each token.
Shapes: B sequences, V ids of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo.data import NO_LABEL, Dataset, PlacedItem, SampleLayout, pack
from mimo.hooks import ItemInfo
from mimo.model.runtime import LanguageBatch, SequenceCache, SupportsDecodeCache
from mimo.trainer.decoding.prompt import WithItem, measured_item, prepared_item
from mimo.trainer.decoding.running import Question, Running
from mimo.trainer.decoding.stages import Stages
from mimo.trainer.job.job import Job
from mimo.trainer.job.precision import compute_dtype
from mimo.trainer.job.taught import own_items
from mimo.trainer.step.programs.encoder_program import take_rows
from mimo.trainer.step.programs.generator_program import GeneratorProgram
from mimo.trainer.step.programs.item_program import on_device
from mimo.trainer.step.programs.language_batches import language_batch
from mimo.trainer.step.programs.language_program import LanguageProgram
from mimo.trainer.step.programs.program import Program
from mimo.trainer.step.trainer import Trainer


class SequenceReader:
    """Reads what sequences have so far, and returns the logits of what comes next on the last stage, None on others.

    Args:
        trainer: whose model reads.
        stages: of the language model.
        use_cache: whether to use the decode cache, if the language model has one.

    Attributes:
        running: the sequences that it holds.
    """

    def __init__(self, trainer: Trainer, stages: Stages, *, use_cache: bool = True) -> None:
        self._job: Job = trainer.job
        self._stages = stages
        programs = {program.module.name: program for program in trainer.programs}
        language = programs[trainer.job.language.name]
        assert isinstance(language, LanguageProgram)
        self._language = language
        names = [module.name for module in trainer.job.encoders_of(trainer.job.language)]
        self._encoders = {name: programs[name] for name in names if name in programs}
        self._shown = {
            generator.name: [programs[one.name] for one in trainer.job.encoders_of(generator) if one.name in programs]
            for generator in trainer.job.generators
        }
        self._generators = {
            trainer.job.tokenizer.placeholder(program.module.modality): program
            for program in programs.values()
            if isinstance(program, GeneratorProgram)
        }
        module = language.part.module
        self._cache: SequenceCache | None = None
        if use_cache and isinstance(module, SupportsDecodeCache):
            self._cache = module.new_decode_cache()
        self.running: list[Running] = []

    def begin(self, new: Sequence[Running]) -> Tensor | None:
        """Read new sequences behind those that run, and return their logits [new, V]."""
        rows = self._encoded([running.question for running in new])
        if self._cache is None:
            self._save_rows(new, rows)
        batch = self._full(new)
        if self._cache is not None:
            waiting = len(self.running)
            batch = attrs.evolve(
                batch,
                lengths=(*(0,) * waiting, *batch.lengths),
                label_tokens=(*(0,) * waiting, *batch.label_tokens),
                samples=batch.samples + waiting,
                items=(*((),) * waiting, *batch.items) if batch.items else (),
                decode_cache=self._cache,
            )
        self.running += new
        return self._logits(batch, rows, [len(running.ids) for running in new])

    def step(self) -> Tensor | None:
        """Read the last token of each sequence, and return the logits [B, V] of the next."""
        if self._cache is not None:
            return self._logits(self._last(), {}, None)
        rows = {name: torch.cat([running.rows[name] for running in self.running]) for name in self._encoders}
        return self._logits(self._full(self.running), rows, [len(running.ids) for running in self.running])

    def make(self, running: Running, *, seed: int) -> None:
        """Make the item that a sequence's last token calls for, and have the sequence go on from it.

        It is made from the rows of the whole sequence, read once more, and from those of the generator's own encoders;
        noise depends on the seed, the number of the prompt, and which of the sequence's items it is. An encoder of its
        modality reads it where there is one.

        Args:
            running: a sequence that is none of those that are held.
            seed: of what is drawn.
        """
        program, at = self._generators[running.ids[-1]], len(running.ids) - 1
        modality, items = program.module.modality, running.question.layout.items
        index = 1 + max((item.info.index for item in items), default=-1)
        sample = running.question.layout.sample
        info = ItemInfo(sample=sample, index=index, modality=modality, size=(), role="output")
        ids, item = self._job.place_item(info, at=at)
        asked = _longer(running, ids, item, running.question.dataset)
        rows = self._encoded([asked])
        packed = pack([asked.layout], with_items=self._job.reads_items)
        batch = language_batch(packed, self._job, self._language.device, trains=False)
        with self._language.on_compute("forward"):
            hidden = self._language.part.language(batch, rows, None)
        assert item.made_from is not None
        shown = [
            rows[name] if (name := encoder.module.name) in rows else self._encode(encoder, [asked])
            for encoder in self._shown[program.module.name]
        ]
        fed = torch.cat([*(one.to(hidden) for one in shown), hidden[slice(*item.made_from)]])
        raw = program.make(fed, seed=seed, prompt=running.question.number, index=index)
        reader = next((one.module for one in self._encoders.values() if one.module.modality == modality), None)
        if reader is not None:
            info = attrs.evolve(info, size=measured_item(reader, raw), role="both")
            ids, item = self._job.place_item(info, at=at)
        dataset = WithItem(inner=running.question.dataset, index=index, item=raw)
        running.take_item((modality, raw), _longer(running, ids, item, dataset))

    def keep(self, sequences: Sequence[int]) -> None:
        """Hold these of the sequences alone, in this order."""
        if self._cache is not None:
            self._cache.keep(sequences)
        self.running = [self.running[sequence] for sequence in sequences]

    def _logits(self, batch: LanguageBatch, rows: Mapping[str, Tensor], lengths: Sequence[int] | None) -> Tensor | None:
        """Return the logits of the last row of each sequence; ``lengths`` None: each has one row."""
        received = self._stages.receive(len(batch.tokens))
        with self._language.on_compute("forward"):
            hidden = self._language.part.language(batch, rows if self._stages.is_first else {}, received)
            if not self._stages.is_last:
                self._stages.send(hidden)
                return None
            if lengths is not None:
                hidden = hidden[torch.tensor(lengths, device=hidden.device).cumsum(0) - 1]
            logits = self._language.logits(hidden)
        return logits[:, : self._job.tokenizer.vocabulary]  # rows of the head beyond it are no tokens

    def _full(self, sequences: Sequence[Running]) -> LanguageBatch:
        """Return all rows of sequences."""
        layouts = [_unlabelled(running) for running in sequences]
        packed = pack(layouts, with_items=self._job.reads_items)
        return language_batch(packed, self._job, self._language.device, trains=False)

    def _last(self) -> LanguageBatch:
        """Return the last row of each sequence."""
        running, device = self.running, self._language.device
        places = None
        if any(each.next_place is not None for each in running):
            places = torch.tensor([each.place for each in running], device=device).unsqueeze(1).expand(-1, 3)
        samples = torch.arange(len(running), device=device)
        return LanguageBatch(
            tokens=torch.tensor([each.ids[-1] for each in running], device=device),
            labels=torch.full_like(samples, NO_LABEL),
            positions=torch.tensor([len(each.ids) - 1 for each in running], device=device),
            grid_positions=places,
            lengths=(1,) * len(running),
            placeholders={},
            samples=samples,
            label_tokens=(0,) * len(running),
            labelled=samples[:0],
            decode_cache=self._cache,
        )

    def _encoded(self, questions: Sequence[Question]) -> Mapping[str, Tensor]:
        """Return the rows of all prompts by encoder, of those that this rank holds.

        Raises:
            ConfigError: an item is broken, on all stages.
        """
        rows: dict[str, Tensor] = {}

        def encode() -> Sequence[int]:
            rows.update({name: self._encode(program, questions) for name, program in self._encoders.items()})
            return ()

        if self._job.encoders_of(self._job.language):
            if not self._stages.is_first:
                encode()  # what is held on later stages too: its lanes may share parameters
            self._stages.agree(0, 0, encode)()
        return rows

    def _encode(self, program: Program, questions: Sequence[Question]) -> Tensor:
        """Return an encoder's rows of all prompts; each of its lanes makes all of them."""
        job = self._job
        pairs = [(one, item) for one in questions for item in own_items(job, program.module, one.layout)]
        given = [
            on_device(prepared_item(program.module, question.dataset, item.info), job, program.device)
            for question, item in pairs
        ]
        items = [item for _, item in pairs]
        with program.on_compute("forward"):
            found = program.part.encode(given, [item.info.size for item in items])
        return take_rows(job, program.module, items, found).to(compute_dtype(job.settings.run.precision))

    def _save_rows(self, new: Sequence[Running], rows: Mapping[str, Tensor]) -> None:
        """Give each sequence the rows of its items."""
        for name, encoded in rows.items():
            modality = self._encoders[name].module.modality
            assert modality is not None
            counts = [sum(item.rows for item in each.question.layout.items_of(modality)) for each in new]
            for running, own in zip(new, encoded.split(counts), strict=True):
                running.rows = {**running.rows, name: own}


def _longer(running: Running, ids: NDArray[np.int64], item: PlacedItem, dataset: Dataset) -> Question:
    """Return what a sequence has, with an item in place of its last token."""
    layout = running.question.layout
    tokens = np.concatenate([np.asarray(running.ids[:-1], dtype=np.int64), ids])
    labels = np.full(len(tokens), NO_LABEL, dtype=np.int64)
    layout = attrs.evolve(layout, tokens=tokens, labels=labels, weights=None, items=(*layout.items, item))
    return Question(number=running.question.number, dataset=dataset, layout=layout)


def _unlabelled(running: Running) -> SampleLayout:
    """Return the layout of a sequence so far, of which nothing is to be learned."""
    tokens = np.asarray(running.ids, dtype=np.int64)
    labels = np.full(len(tokens), NO_LABEL, dtype=np.int64)
    return attrs.evolve(running.question.layout, tokens=tokens, labels=labels, weights=None)
