"""What each rank of a running job has: its own parameters, positions as they are, no more than its stage needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from jobs import CPU, make_job
from tables import table

from mimo.model import LanguageModelSpec
from mimo.model.runtime import LanguageBatch
from mimo.testing import Pool
from mimo.topology import context_spans
from mimo.trainer import Trainer
from mimo.trainer.runtime import JobModule

MODULES: Mapping[str, Mapping[str, Any]] = {
    "vision": {"ranks": [0]},
    "language": {"ranks": [2, 3, 4], "pp": 3},  # rank 1 is in a gap
}


@attrs.frozen(kw_only=True)
class Seen:
    """What one rank had in one step.

    ``calls`` of its language model's stage: positions, whether hidden states came, whose rows came.
    """

    parameters: set[str]
    calls: list[tuple[list[int], bool, set[str]]]
    loss: float
    lengths: list[tuple[int, ...]]


def look(rank: int, modules: Mapping[str, Mapping[str, Any]], blind: int | None = None) -> Seen:
    """Run a step in two microbatches; rank ``blind`` is shown neither tokens nor placeholders nor labels."""
    trainer = Trainer(make_job(table(modules, microbatches=2)), rank=rank, device=CPU)
    calls: list[tuple[list[int], bool, set[str]]] = []

    def note(_module: Any, given: tuple[LanguageBatch, Mapping[str, Any], Any]) -> Any:
        batch, rows, hidden = given
        calls.append((batch.positions.tolist(), hidden is not None, set(rows)))
        if rank == blind:
            nothing = torch.zeros_like(batch.tokens)
            batch = attrs.evolve(batch, tokens=nothing, labels=nothing, placeholders={})
        return batch, rows, hidden

    for part in trainer.model.parts_of("language"):
        part.module.register_forward_pre_hook(note)
    data = trainer._cut(1)
    loss = float(trainer.accumulate(1).loss)
    return Seen(
        parameters=set(trainer.model.parameters_by_name),
        calls=calls,
        loss=loss,
        lengths=[tuple(len(layout.tokens) for layout in batch.layouts) for batch in data.microbatches],
    )


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[Seen]:
    """Return what each rank of a pipeline of three stages saw."""
    return pool.run(5, look, MODULES)


def test_a_rank_holds_the_parameters_of_its_own_stages_alone(ranks: list[Seen]) -> None:
    """None of other modules, none of other stages, none at all in a gap; together they hold the model once."""
    assert all(name.startswith("vision.") for name in ranks[0].parameters)
    assert ranks[0].parameters
    assert ranks[1].parameters == set()
    kept = [{".".join(name.split(".")[1:3]) for name in seen.parameters} for seen in ranks[2:]]
    assert kept == [
        {"embedding.weight", "layers.0"},
        {"layers.1"},
        {"layers.2", "norm.weight", "head.weight"},
    ]


def test_position_ids_reach_every_stage_unchanged(ranks: list[Seen]) -> None:
    """Each token's number in its own sample, packed samples end to end; there is one position for a token."""
    for seen in ranks[2:]:
        expected = [[at for length in batch for at in range(length)] for batch in seen.lengths]
        assert [positions for positions, _, _ in seen.calls] == expected


def test_position_ids_are_those_of_the_whole_sample_on_context_ranks(pool: Pool) -> None:
    """A rank that holds two spans of each sample knows where in the sample they lie."""
    modules = {"vision": {"ranks": [0]}, "language": {"ranks": [1, 2], "cp": 2}}
    for context_rank, seen in enumerate(pool.run(3, look, modules)[1:]):
        expected = [
            [at for length in batch for span in context_spans(length, size=2, rank=context_rank) for at in range(*span)]
            for batch in seen.lengths
        ]
        assert [positions for positions, _, _ in seen.calls] == expected


def test_later_stages_are_given_hidden_states_and_no_rows(ranks: list[Seen]) -> None:
    """Rows of encoders enter at stage 0, which is given no hidden states; the others are given these alone."""
    assert {(hidden, frozenset(rows)) for _, hidden, rows in ranks[2].calls} == {(False, frozenset({"vision"}))}
    for seen in ranks[3:]:
        assert {(hidden, frozenset(rows)) for _, hidden, rows in seen.calls} == {(True, frozenset())}


def test_a_middle_stage_reads_hidden_states_only(ranks: list[Seen], pool: Pool) -> None:
    """Without tokens, labels and placeholders it computes the same: the loss is that of the step that had them."""
    blind = pool.run(5, look, MODULES, 3)
    assert blind[4].loss == ranks[4].loss > 0


def prepared(rank: int, modules: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """Return for how many items this rank makes what a module reads or learns from, in a step."""
    settings = table(modules, microbatches=2, roles={"image": ("input", "output", "both")})
    settings["data"]["workers"] = 0
    job, counts = make_job(settings), Counter[str]()

    def counting(module: JobModule) -> JobModule:
        spec = module.spec
        if isinstance(spec, LanguageModelSpec):
            return module

        def prepare(*given: Any) -> Mapping[str, torch.Tensor]:
            counts[module.name] += 1
            return spec.prepare(*given)

        return attrs.evolve(module, spec=attrs.evolve(spec, prepare=prepare))

    trainer = Trainer(attrs.evolve(job, modules=tuple(map(counting, job.modules))), rank=rank, device=CPU)
    trainer.train(1)
    return counts


def test_items_are_prepared_on_the_ranks_of_their_modules_alone(pool: Pool) -> None:
    """Those that a generator makes too: nobody else decodes what it learns from, and no lane what another has."""
    modules: Mapping[str, Mapping[str, Any]] = {
        "vision": {"ranks": [0]},
        "teacher": {"ranks": [4], "distil": {"top_k": 3}},
        "language": {"ranks": [1]},
        "drawer": {"ranks": [2, 3], "fed_by": "language"},
    }
    (alone,) = pool.run(1, prepared, {name: {**keys, "ranks": [0]} for name, keys in modules.items()})
    vision, language, first, second, teacher = pool.run(5, prepared, modules)
    assert (vision, language, teacher) == ({"vision": alone["vision"]}, {}, {})
    assert first.keys() == second.keys() == {"drawer"}
    assert first["drawer"] + second["drawer"] == alone["drawer"]
