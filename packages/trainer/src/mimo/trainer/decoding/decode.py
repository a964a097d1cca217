"""Generation from prompts, token by token: some sequences run at once, and one that ends makes room for the next.

The ranks of the last stage choose each token, of the same logits. Over several stages the sequences run in as many
groups: while one stage reads a token of each sequence of one group, the others read those of other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs
import torch

from mimo.data import Tokenizer
from mimo.hooks import ConfigError
from mimo.trainer.decoding.choosing import choose
from mimo.trainer.decoding.detokenise import StreamedText
from mimo.trainer.decoding.prompt import Prompt, lay_out_prompt, prompt_of
from mimo.trainer.decoding.reader import SequenceReader
from mimo.trainer.decoding.running import Answer, Ended, Question, Running
from mimo.trainer.decoding.sampling import Sampling
from mimo.trainer.decoding.stages import Stages
from mimo.trainer.step.trainer import Trainer

_GREEDY = Sampling()


def _no_text(_running: Running, _piece: str) -> None:
    """Show nothing."""


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
        trainer: whose every rank holds the language model, split by ``pp``, ``tp`` and ``ep`` alone; the ranks of its
            first stage hold each encoder, whole or split by ``tp``.
        prompt: text and items before it.
        max_tokens: largest number of tokens to generate.
        sampling: how each is chosen.
        on_text: called with each piece of text as soon as it is known; together they are what is returned.
        use_cache: whether to use the decode cache, if the language model has one; the text is the same without it.

    Raises:
        ConfigError: the trainer is laid out otherwise, the prompt does not fit, or an item is broken.
        RunError: the logits are not finite.
    """
    (answer,) = answer_questions(
        trainer,
        _questions(trainer, [prompt]),
        max_tokens=max_tokens,
        sampling=sampling,
        use_cache=use_cache,
        on_text=lambda _running, piece: on_text(piece),
    )
    return answer.text


def generate_many(
    trainer: Trainer,
    prompts: Sequence[Prompt | str],
    *,
    max_tokens: int,
    batch: int = 8,
    sampling: Sampling = _GREEDY,
    use_cache: bool = True,
) -> list[Answer]:
    """Return what the model generates after each prompt, in their order; collective.

    The likeliest tokens are those that `generate` returns for each prompt by itself, but for roundings; draws depend on
    the seed and the number of the prompt.

    Args:
        trainer: see `generate`.
        prompts: of each, text and items before it.
        max_tokens: largest number of tokens to generate after each.
        batch: how many prompts are continued at once; what is kept of their tokens is held in memory.
        sampling: how each token is chosen.
        use_cache: see `generate`.

    Raises:
        ConfigError: as `generate`, or ``batch`` is no number from 1 on.
        RunError: the logits are not finite.
    """
    questions = list(_questions(trainer, prompts))  # all are looked at before the first is read
    answers = answer_questions(
        trainer, iter(questions), max_tokens=max_tokens, batch=batch, sampling=sampling, use_cache=use_cache
    )
    return sorted(answers, key=lambda answer: answer.number)


@torch.no_grad()
def answer_questions(
    trainer: Trainer,
    questions: Iterator[Question],
    *,
    max_tokens: int,
    batch: int = 1,
    sampling: Sampling = _GREEDY,
    use_cache: bool = True,
    on_text: Callable[[Running, str], None] = _no_text,
) -> Iterator[Answer]:
    """Yield what the model generates after each prompt, as soon as it ends; collective.

    Args:
        trainer: see `generate`.
        questions: the prompts; one is taken when there is room for it.
        max_tokens: see `generate`.
        batch: how many are continued at once.
        sampling: see `generate`.
        use_cache: see `generate`.
        on_text: called with each piece of text as soon as it is known, and the sequence that it belongs to.
    """
    if batch < 1:
        raise ConfigError("--batch", expected="1 or more", got=repr(batch))
    stages = Stages(trainer)
    trainer.optimizer.gather()
    room = _Room(questions, rows=trainer.job.settings.data.max_tokens)
    job = trainer.job
    calls = frozenset(job.tokenizer.placeholder(module.modality) for module in job.generators)
    advance = _Advance(tokenizer=job.tokenizer, calls=calls, max_tokens=max_tokens, on_text=on_text)
    count = min(stages.count, batch)
    groups = [
        _Group(
            stages=stages,
            reader=SequenceReader(trainer, stages, use_cache=use_cache),
            sampling=sampling,
            size=(batch + index) // count,
        )
        for index in range(count)
    ]
    while room.waits or any(group.reader.running for group in groups):
        for group in groups:
            ended, waiting = advance(group.asked, group.tokens())
            group.leave([*ended, *waiting])
            yield from [running.answer(how) for running, how in ended.items()]
            for running in waiting:
                group.reader.make(running, seed=sampling.seed)
            new = [Running(one, StreamedText(advance.tokenizer)) for one in room.take(group.room - len(waiting))]
            group.ask([*waiting, *new])
            trainer.heartbeat()
    stages.flush()


def _no_tokens() -> Sequence[int]:
    return ()


@attrs.define(kw_only=True, eq=False)
class _Group:
    """Sequences that are read together.

    Args:
        stages: of the language model.
        reader: reads them.
        sampling: how each token is chosen.
        size: how many there is room for.
        asked: those whose next tokens were asked for.
        tokens: waits for these tokens.
    """

    stages: Stages
    reader: SequenceReader
    sampling: Sampling
    size: int
    asked: Sequence[Running] = ()
    tokens: Callable[[], Sequence[int]] = _no_tokens

    @property
    def room(self) -> int:
        """For how many more there is room."""
        return self.size - len(self.reader.running)

    def ask(self, new: Sequence[Running]) -> None:
        """Read new sequences, or else the last token of all, and ask for their next tokens."""
        self.asked, self.tokens = new or tuple(self.reader.running), _no_tokens
        if not self.asked:
            return
        logits = self.reader.begin(new) if new else self.reader.step()

        def choose_all() -> Sequence[int]:
            assert logits is not None
            numbers = [running.question.number for running in self.asked]
            return choose(self.sampling, logits, [running.ids for running in self.asked], numbers)

        self.tokens = self.stages.agree(self.stages.count - 1, len(self.asked), choose_all)

    def leave(self, gone: Sequence[Running]) -> None:
        """Let sequences go."""
        if gone:
            self.reader.keep(_kept([running not in gone for running in self.reader.running]))


@attrs.frozen(kw_only=True)
class _Advance:
    """Gives sequences their next tokens; ``calls`` are those that call for an item."""

    tokenizer: Tokenizer
    calls: frozenset[int]
    max_tokens: int
    on_text: Callable[[Running, str], None]

    def __call__(
        self, sequences: Sequence[Running], tokens: Sequence[int]
    ) -> tuple[dict[Running, Ended], list[Running]]:
        """Give each sequence its next token, and return those that end by it, and how, and those that need an item."""
        ended, waiting = dict[Running, Ended](), list[Running]()
        for running, token in zip(sequences, tokens, strict=True):
            ends = token == self.tokenizer.end
            if not ends:
                self._show(running, running.add(token))
            if ends or running.written == self.max_tokens:
                self._show(running, running.end())
                ended[running] = "end" if ends else "max_tokens"
            elif token in self.calls:
                waiting.append(running)
        return ended, waiting

    def _show(self, running: Running, piece: str) -> None:
        if piece:
            self.on_text(running, piece)


class _Room:
    """Questions that wait, taken as far as one forward may read them.

    Args:
        questions: all.
        rows: of one forward at most, but for a first prompt that is longer.
    """

    def __init__(self, questions: Iterator[Question], *, rows: int) -> None:
        self._questions = questions
        self._rows = rows
        self._next = next(questions, None)

    @property
    def waits(self) -> bool:
        """Whether any is left."""
        return self._next is not None

    def take(self, count: int) -> list[Question]:
        """Return the next ones, at most ``count``."""
        taken: list[Question] = []
        rows = 0
        while self._next is not None and len(taken) < count:
            rows += len(self._next.layout.tokens)
            if taken and rows > self._rows:
                break
            taken.append(self._next)
            self._next = next(self._questions, None)
        return taken


def _kept(stays: Sequence[bool]) -> list[int]:
    """Return which sequences stay: where one goes, the last one takes its place, so that few are moved."""
    kept = list(range(len(stays)))
    for place in reversed(range(len(stays))):
        if not stays[place]:
            last = kept.pop()
            if place < len(kept):
                kept[place] = last
    return kept


def _questions(trainer: Trainer, prompts: Iterable[Prompt | str]) -> Iterator[Question]:
    for number, prompt in enumerate(prompts):
        whole = prompt_of(trainer.job, prompt) if isinstance(prompt, str) else prompt
        yield Question(number=number, dataset=whole, layout=lay_out_prompt(trainer.job, whole))
