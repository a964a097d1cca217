"""Scores of generated answers: the last answer of each sample is asked for, and compared with what it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from eye import make_job, on, table

from mimo.data import AnswerMetricSpec
from mimo.hooks import ConfigError, ItemInfo, PluginError
from mimo.trainer import Trainer, generate, prompt_of
from mimo.trainer.decoding import answer_settings
from mimo.trainer.decoding.answer_settings import AnswerSettings
from mimo.trainer.decoding.scoring import last_answer, score_answers

TOKENS = 5


def make_trainer(rank: int = 0, pp: int = 1) -> Trainer:
    """Return a trainer whose model writes words."""
    settings = table({"language": on(0, pp - 1, pp=pp)})
    settings["tokenizer"] = {"plugin": "word", "words": [f"w{number}" for number in range(20)]}
    return Trainer(make_job(settings), rank=rank, device=torch.device("cpu"))


@attrs.frozen
class Talks:
    """Samples of turns that are read and learned by turns; the end follows the last, which is learned too."""

    tokenizer: Any
    samples: Sequence[Sequence[str]]

    def __len__(self) -> int:
        return len(self.samples)

    def _turns(self, sample: int) -> list[list[int]]:
        turns = [list(self.tokenizer.encode(turn)) for turn in self.samples[sample]]
        return [*turns[:-1], [*turns[-1], self.tokenizer.end]]

    def tokens(self, sample: int) -> list[int]:
        """Return the ids."""
        return [token for turn in self._turns(sample) for token in turn]

    def weights(self, sample: int) -> list[float]:
        """Return 1 for each second turn."""
        return [float(place % 2) for place, turn in enumerate(self._turns(sample)) for _ in turn]

    def infos(self, _sample: int) -> list[ItemInfo]:
        """Return none."""
        return []

    def raw(self, _sample: int, _index: int) -> Any:
        """There is none."""
        raise AssertionError

    def where(self, sample: int) -> str:
        """Return its number."""
        return f"talk {sample}"


@pytest.mark.parametrize("pp", [1, 2])
def test_answers_are_asked_for_as_by_a_prompt(pp: int, run_ranks: Callable[..., list[Any]]) -> None:
    """The first turns are the prompt; those without an answer are left out, and without any it is refused."""

    def score(rank: int) -> tuple[list[dict[str, float]], str]:
        trainer = make_trainer(rank, pp)
        job = trainer.job
        said = generate(trainer, prompt_of(job, "w1 w2 w3 w4"), max_tokens=TOKENS)
        samples = [
            ["w1", "w2", "w3 w4", said],
            ["w1 w2 w3 w4", said],
            ["w2"],
            ["w1 w2 w3 w4", " ".join(said.split()[1:3])],
            ["w1 w2 w3 w4", "w1 w1 w1 w1 w1 w1 w1"],
        ]
        talks = Talks(job.tokenizer, samples)
        (_, ids) = last_answer(job.lay_out(talks, 0)) or (None, [])
        assert ids == [*job.tokenizer.encode(said), job.tokenizer.end]
        assert last_answer(job.lay_out(talks, 2)) is None
        settings = AnswerSettings(metrics=("exact", "contains", "exact"), max_tokens=TOKENS, batch=3)
        scores = [score_answers(trainer, talks, attrs.evolve(settings, batch=batch)) for batch in (1, 3)]
        with pytest.raises(ConfigError) as refused:
            score_answers(trainer, Talks(job.tokenizer, samples[2:3]), settings)
        return scores, str(refused.value)

    (scores, refused), *others = run_ranks(pp, score)
    assert others == [(scores, refused)] * (pp - 1)
    assert scores == [{"exact": 0.5, "contains": 0.75}] * 2
    assert refused == (
        "--answers: expected held-out samples with answers, as conversations have them, got none in 1 samples. "
        "Evaluate without it, or give data.evaluation_path a file of conversations."
    )


def test_a_metric_that_is_not_installed_is_refused() -> None:
    """With those that are named nearly so."""
    with pytest.raises(ConfigError, match=r"--answers: expected an installed metric .*'exakt'\. Did you mean"):
        AnswerSettings(metrics=("exakt",)).specs()
    with pytest.raises(ConfigError, match="--max-tokens: expected 1 or more, got 0"):
        AnswerSettings(max_tokens=0)


def test_a_score_that_is_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, run_ranks: Callable[..., list[Any]]
) -> None:
    """By the name of the metric, which anybody may have written."""
    spec = AnswerMetricSpec(name="odd", score=lambda _answer, _reference: float("nan"))
    monkeypatch.setattr(answer_settings, "find_installed", lambda *_given: spec)

    def score(_rank: int) -> str:
        trainer = make_trainer()
        talks = Talks(trainer.job.tokenizer, [["w1", "w2"]])
        settings = AnswerSettings(metrics=("odd",), max_tokens=1)
        with pytest.raises(PluginError) as refused:
            score_answers(trainer, talks, settings)
        return str(refused.value)

    (refused,) = run_ranks(1, score)
    assert refused.startswith("metric of answers 'odd': expected a finite number of two texts, got nan of ")
