"""Stages of the language model in generation: several groups are under way, and all ranks end for the same reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eye import make_job, on, table
from torch import Tensor

from mimo.hooks import ConfigError, RunError
from mimo.model.runtime import local
from mimo.trainer import Trainer, generate, generate_many
from mimo.trainer.decoding.stages import Stages


def make_trainer(rank: int) -> Trainer:
    """Return one of two stages."""
    settings = table({"language": on(0, 1, pp=2)})
    return Trainer(make_job(settings), rank=rank, device=torch.device("cpu"))


def test_stages_work_on_different_groups_at_once(
    monkeypatch: pytest.MonkeyPatch, run_ranks: Callable[..., list[Any]]
) -> None:
    """The first one has sent rows of all prompts before it waits for the tokens of any."""
    send, agree = Stages.send, Stages.agree

    def generates(rank: int) -> list[str]:
        events: list[str] = []

        def note_send(stages: Stages, hidden: Tensor) -> None:
            events.append(f"{len(hidden)} rows")
            send(stages, hidden)

        def note_agree(stages: Stages, stage: int, count: int, find: Any) -> Any:
            take = agree(stages, stage, count, find)

            def note_take() -> Any:
                events.append("tokens")
                return take()

            return note_take

        monkeypatch.setattr(Stages, "send", note_send)
        monkeypatch.setattr(Stages, "agree", note_agree)
        answers = generate_many(make_trainer(rank), ["abcd", "efgh", "ij"], max_tokens=3, batch=3)
        assert [answer.number for answer in answers] == [0, 1, 2]
        return events

    first, last = run_ranks(2, generates)
    assert first == ["4 rows", "6 rows", *["tokens", "1 rows", "tokens", "2 rows"] * 2, "tokens", "tokens"]
    assert last == ["tokens"] * 6


def test_an_error_of_one_stage_ends_all(run_ranks: Callable[..., list[Any]]) -> None:
    """With its message on each: an item that the first can't read, logits that the last finds to be no numbers."""

    def unreadable() -> list[int]:
        raise ConfigError("--image", expected="an image", got="none", fix="Give one.")

    def fails(rank: int) -> tuple[str, str]:
        trainer = make_trainer(rank)
        stages = Stages(trainer)
        assert stages.agree(1, 2, lambda: [7, 8])() == [7, 8]
        with pytest.raises(ConfigError) as refused:
            stages.agree(0, 0, unreadable)()
        if rank:
            (part,) = trainer.model.parts_of("language")
            local(part.parameters["language.norm.weight"]).detach().fill_(torch.nan)
        with pytest.raises(RunError) as stopped:
            generate(trainer, "ab", max_tokens=2)
        return str(refused.value), str(stopped.value)

    expected = (
        "--image: expected an image, got none. Give one.",
        (
            "modules.language: expected finite logits, got nan among those of the token at position 2. "
            "The weights, or what the prompt makes of them, are no numbers: try an earlier checkpoint."
        ),
    )
    assert run_ranks(2, fails) == [expected] * 2
