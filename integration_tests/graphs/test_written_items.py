"""Items that a model makes where its text calls for them: the same however sequences are read, and read back in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from jobs import CPU, find
from tables import Table, alone, table

from mimo.hooks import ConfigError
from mimo.testing import Pool
from mimo.trainer import Answer, Sampling, Trainer, generate_many, read_settings, resolve

PROMPTS = ("w1 w2 w3", "w4", "w5 w6 w7 w8 w9", "w10 w11", "w12")
SAMPLING = Sampling(temperature=1.0, seed=3)
"""A model that nobody has trained says anything, a placeholder now and then."""
SEES: Mapping[str, Any] = {"vision": "language"}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "before": {},
    "own": {"config": {"reads": "own", "rows": 3}},
}
Plain = list[tuple[str, int, str, tuple[tuple[str, tuple[int, int], list[int]], ...]]]


def _settings(reads: str, encoders: Mapping[str, Any] | None = None, **language: Any) -> Table:
    """Return settings of a language model that draws, and perhaps sees, as its generator may.

    Args:
        reads: one of `ROWS`.
        encoders: what each feeds.
        language: keys of its table.
    """
    modules: dict[str, dict[str, Any]] = {"language": {"ranks": [0], **language}}
    modules |= {name: {"ranks": [0], "feeds": feeds} for name, feeds in (encoders or {}).items()}
    modules["drawer"] = {"ranks": [0], "fed_by": "language", **ROWS[reads]}
    settings = alone(table(modules, seed=4))
    settings["run"] |= {"global_batch": 1, "micro_batch": 1}
    return settings


def _plain(answer: Answer) -> Any:
    items = tuple((modality, raw.size, list(raw.tobytes())) for modality, raw in answer.items)
    return answer.text, answer.tokens, answer.ended, items


def _write(rank: int, settings: Table, tp: int, batch: int, use_cache: bool) -> Plain:
    """Return what is written after each prompt."""
    for keys in settings["modules"].values():
        keys["ranks"] = list(range(tp))
    settings["modules"]["language"]["tp"] = tp
    job = resolve(read_settings(settings), purpose="generate", find=find)
    trainer = Trainer(job, rank=rank, device=CPU)
    for lens in (program.part.module for program in trainer.programs if "drawer" in program.module.feeds):
        for weight in lens.get_submodule("projector").parameters():
            weight.data.mul_(100)  # so that what it sees shows in a picture's few levels
    answers = generate_many(trainer, PROMPTS, max_tokens=20, batch=batch, sampling=SAMPLING, use_cache=use_cache)
    return [_plain(answer) for answer in answers]


@pytest.mark.each("reads")
@pytest.mark.parametrize(
    ("reads", "encoders"),
    [
        ("before", {}),
        ("own", {}),
        ("own", SEES),
        ("before", {**SEES, "lens": "drawer"}),
        ("own", {"vision": ["language", "drawer"]}),
    ],
)
def test_items_are_made_the_same_however_sequences_are_read(
    reads: str, encoders: Mapping[str, Any], pool: Pool
) -> None:
    """Alone or several at once, with a cache or without, on one rank or split; some prompt calls for two or more."""
    settings = _settings(reads, encoders)
    (truth,) = pool.run(1, _write, settings, 1, 1, True)
    counts = [len(items) for *_, items in truth]
    assert max(counts) > 1
    assert [text.count("<image>") for text, *_ in truth] == counts
    ways = [(1, 3, True), (1, 2, False), (2, 4, True)]
    for tp, batch, use_cache in ways:
        for found in pool.run(tp, _write, settings, tp, batch, use_cache):
            assert [one[:3] for one in found] == [one[:3] for one in truth]
            for (*_, own), (*_, expected) in zip(found, truth, strict=True):
                for (_, size, pixels), (_, wanted, true) in zip(own, expected, strict=True):
                    assert size == wanted == (3, 2)
                    assert max(abs(a - b) for a, b in zip(pixels, true, strict=True)) <= 1  # which rounding may be


def test_pictures_are_read_back_where_the_model_sees(pool: Pool) -> None:
    """What follows a picture depends on it only then; the text before it does not."""
    (blind,), (sees,) = (pool.run(1, _write, _settings("before", one), 1, 1, True) for one in ({}, SEES))
    texts = [(one[0].split(), other[0].split()) for one, other in zip(blind, sees, strict=True)]
    assert all(
        one[: one.index("<image>") + 1] == other[: one.index("<image>") + 1] for one, other in texts if "<image>" in one
    )
    assert any(one != other for one, other in texts)


def test_generators_see_by_a_lens_what_was_made_before(pool: Pool) -> None:
    """The first picture has nothing before it and is the same without a lens; a later one may be another."""
    (without,), (shown,) = (
        pool.run(1, _write, _settings("before", one), 1, 1, True) for one in (SEES, {**SEES, "lens": "drawer"})
    )
    pairs = [(one[3], other[3]) for one, other in zip(without, shown, strict=True) if one[3]]
    assert all(one[0] == other[0] for one, other in pairs)
    later = [(one[1], other[1]) for one, other in pairs if len(one) > 1 and len(other) > 1]
    assert any(one != other for one, other in later)


def _refused(rank: int, settings: Table) -> str:
    """Return why nothing is generated."""
    try:
        job = resolve(read_settings(settings), purpose="generate", find=find)
        generate_many(Trainer(job, rank=rank, device=CPU), ["w1"], max_tokens=2)
    except ConfigError as error:
        return str(error)
    return ""


def test_layouts_in_which_nothing_is_made_are_refused(pool: Pool) -> None:
    """A generator reads rows where they are."""
    settings = _settings("before")
    settings["modules"]["language"] |= {"ranks": [0, 1], "pp": 2}
    (message, _) = pool.run(2, _refused, settings)
    assert message.startswith(
        "modules.language: expected pp = 1, as modules.drawer makes items of its rows, got ranks [0, 1]"
    )
    settings = _settings("before")
    settings["modules"]["language"] |= {"ranks": [0, 1], "tp": 2}
    (message, _) = pool.run(2, _refused, settings)
    assert message.startswith(
        "modules.drawer: expected a module on rank 0-1 of the language model, whole or split by tp alone, got ranks [0]"
    )
