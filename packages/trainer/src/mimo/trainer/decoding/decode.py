"""Generation from a prompt, token by token, on one process or over tensor ranks.

The prompt is computed once; each token after it computes one row if the language model has a decode cache
(`mimo.model.runtime.SupportsDecodeCache`), and otherwise the full text again. Every rank chooses each token itself, of
the same logits.
Shapes: V ids of the tokenizer, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from mimo.data import NO_LABEL, SampleLayout, pack
from mimo.hooks import ConfigError
from mimo.model.runtime import LanguageBatch, SupportsDecodeCache
from mimo.trainer.decoding.detokenise import StreamedText
from mimo.trainer.decoding.prompt import Prompt, lay_out_prompt, prepared_item, prompt_of
from mimo.trainer.decoding.sampling import Sampling
from mimo.trainer.job.precision import compute_dtype
from mimo.trainer.step.encoder_program import on_device, take_rows
from mimo.trainer.step.language_program import LanguageProgram, language_batch
from mimo.trainer.step.program import Program
from mimo.trainer.step.trainer import Trainer

_GREEDY = Sampling()


@torch.no_grad()
def generate(
    trainer: Trainer,
    prompt: Prompt | str,
    *,
    max_tokens: int,
    sampling: Sampling = _GREEDY,
    on_text: Callable[[str], None] = lambda _piece: None,
    use_cache: bool = True,
) -> str:
    """Return the text that the model generates after ``prompt``, up to ``max_tokens`` tokens; collective.

    The prompt has at most ``data.max_tokens`` tokens. The generated text may go beyond that where positions are
    computed, not learned; the model was not trained on such positions.

    Args:
        trainer: on whose every rank each module is whole, or split by ``tp`` alone.
        prompt: text and items before it.
        max_tokens: largest number of tokens to generate.
        sampling: how each is chosen.
        on_text: called with each piece of text as soon as it is known; together they are what is returned.
        use_cache: whether to use the decode cache, if the language model has one; the text is the same without it.

    Raises:
        ConfigError: the trainer is laid out otherwise, the prompt does not fit, or an item is broken.
        RunError: the logits are not finite.
    """
    job = trainer.job
    if isinstance(prompt, str):
        prompt = prompt_of(job, prompt)
    layout = lay_out_prompt(job, prompt)
    language = _program(trainer, job.language.name)
    assert isinstance(language, LanguageProgram)
    trainer.optimizer.gather()
    rows = {module.name: _encode(trainer, module.name, prompt, layout) for module in job.encoders}
    reading = _Reading(language, layout, rows)
    if use_cache and isinstance(language.part.module, SupportsDecodeCache):
        reading.cache = language.part.module.new_decode_cache()
    text, written, pieces = StreamedText(job.tokenizer), list[int](), list[str]()
    while len(written) < max_tokens:
        trainer.heartbeat()
        logits = reading.read(written)[: job.tokenizer.vocabulary]  # rows of the head beyond it are no tokens
        token = sampling.choose(logits.cpu().numpy(), len(layout.tokens) + len(written))
        if token == job.tokenizer.end:
            break
        written.append(token)
        pieces.append(text.add(token))
        if pieces[-1]:
            on_text(pieces[-1])
    pieces.append(text.end())
    if pieces[-1]:
        on_text(pieces[-1])
    return "".join(pieces)


@attrs.define
class _Reading:
    """The sample that the language model continues.

    Args:
        program: the language model on this rank.
        layout: of the prompt.
        rows: of its items, from the encoders, by module.
        cache: decode cache of the language model; None where it computes the full text for each token.
    """

    program: LanguageProgram
    layout: SampleLayout
    rows: Mapping[str, Tensor]
    cache: object = None

    def read(self, written: Sequence[int]) -> Tensor:
        """Return the logits [V] of what comes after the prompt and these tokens, the last of which is new."""
        if self.cache is None or not written:
            batch, rows = self._full(written), self.rows
        else:
            batch, rows = self._last(written), {}
        with self.program.on_compute("forward"):
            hidden = self.program.part.language(batch, rows, None)
            return self.program.logits(hidden[-1:])[0]

    def _full(self, written: Sequence[int]) -> LanguageBatch:
        tokens = np.concatenate([self.layout.tokens, np.asarray(written, dtype=np.int64)])
        layout = attrs.evolve(self.layout, tokens=tokens, labels=np.full(len(tokens), NO_LABEL, dtype=np.int64))
        job = self.program.job
        batch = language_batch(pack([layout], with_items=job.reads_items), job, self.program.device, trains=False)
        return attrs.evolve(batch, decode_cache=self.cache)

    def _last(self, written: Sequence[int]) -> LanguageBatch:
        def one(value: int) -> Tensor:
            return torch.tensor([value], device=self.program.device)

        places = self.layout.grid_positions
        number = None if places is None else one(int(places.max()) + len(written))
        return LanguageBatch(
            tokens=one(written[-1]),
            labels=one(NO_LABEL),
            positions=one(len(self.layout.tokens) + len(written) - 1),
            grid_positions=None if number is None else number.expand(1, 3),
            lengths=(1,),
            placeholders={},
            samples=one(0),
            label_tokens=(0,),
            labelled=one(0)[:0],
            decode_cache=self.cache,
        )


def _program(trainer: Trainer, name: str) -> Program:
    """Return this rank's share of a module.

    Raises:
        ConfigError: it is split by more than ``tp``, or lies elsewhere.
    """
    module = trainer.job.module(name)
    found = [program for program in trainer.programs if program.module.name == name]
    if len(found) == 1 and found[0].part.stage.count == module.grid.cp == 1 and not module.sequence_parallel:
        return found[0]
    raise ConfigError(
        f"modules.{name}",
        expected="a module that is whole on each rank that generates, or split by tp alone",
        got=f"ranks {list(module.grid.ranks)} with pp = {module.grid.pp}, cp = {module.grid.cp}, "
        f"chunks = {module.chunks}, sequence_parallel = {str(module.sequence_parallel).lower()}",
        fix="Load the checkpoint in another layout.",
    )


def _encode(trainer: Trainer, name: str, prompt: Prompt, layout: SampleLayout) -> Tensor:
    """Return an encoder's rows of the prompt; each of its lanes makes all of them."""
    job, program = trainer.job, _program(trainer, name)
    items = [item for item in layout.items if item.info.modality == program.module.modality]
    given = [on_device(prepared_item(program.module, prompt, item.info), job, trainer.device) for item in items]
    with program.on_compute("forward"):
        found = program.part.encode(given, [item.info.size for item in items])
    return take_rows(job, program.module, items, found).to(compute_dtype(job.settings.run.precision))
