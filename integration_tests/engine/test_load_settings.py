"""What `[load]` changes of a run that resumes, compared with runs that never stopped."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import Resumption, begin, resume_and_save, resume_run, same_bits, train_from
from tables import RATE, Table, table
from test_oracle import on
from torch import Tensor

from mimo.checkpoint import reshard
from mimo.hooks import StateTree
from mimo.testing import Pool, RanksError
from mimo.trainer.runtime import save_step

SAVED = 3
ONE = on(0, 0)
BOTH = {"vision": ONE, "language": ONE}


def run_of(modules: Mapping[str, Mapping[str, Any]], directory: Path, **sections: Mapping[str, Any]) -> Table:
    """Return a run of nine steps with a constant rate in ``directory``, keys of its sections over those."""
    found = copy.deepcopy(table(modules, microbatches=2, language={"vocabulary": 40}))
    found["run"] |= {"steps": 9, "directory": str(directory)}
    for section, keys in sections.items():
        found[section] = {**found.get(section, {}), **keys}
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> tuple[Path, Resumption]:
    """A run of two modules on one rank that has saved its third step, and what it held and found."""
    directory = tmp_path_factory.mktemp("saved")
    (found,) = pool.run(1, resume_and_save, run_of(BOTH, directory), 1, SAVED)
    return directory, found


def load(where: Path, **keys: Any) -> dict[str, Any]:
    """Return the sections that load a run with such keys."""
    return {"checkpoint": {"load": str(where)}, "load": keys}


def weights_of(state: Mapping[str, Tensor], *modules: str) -> dict[str, Tensor]:
    """Return the weights of modules."""
    return {name: value for name, value in state.items() if name.partition(".")[0] in modules}


def moments_of(state: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    """Return the optimizer states of a module."""
    return {name: value for name, value in state.items() if name.startswith(f"optimizer.{module}.")}


def holds(state: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> bool:
    """Return whether a state holds all values of another, to the bit."""
    return part.keys() <= state.keys() and same_bits({name: state[name] for name in part}, part)


def all_zero(state: Mapping[str, Tensor]) -> bool:
    """Return whether there are values, and all of them are zero."""
    return bool(state) and not any(value.any() for value in state.values())


def test_everything_is_taken_and_summarised(saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool) -> None:
    """Weights, moments, and the state of plugins: their numbers are the next ones."""
    directory, before = saved
    (found,) = pool.run(1, resume_run, run_of(BOTH, tmp_path, **load(directory)), 4, 4)
    assert same_bits(found.began, before.ended)
    assert found.summary == f"step 3 loaded from {directory / 'checkpoints' / 'step_00000003'}"
    state, generators = (torch.Generator().manual_seed(sum(name.encode())) for name in ("state", "generators"))
    for _ in range(2):
        expected = tuple(float(torch.rand((), generator=one)) for one in (state, generators))
    assert before.drawn != expected
    assert found.drawn == expected


def test_without_optimizer_states_the_weights_are_those_of_a_new_optimizer(
    saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """As if they had been put by hand into a run that has not trained."""
    directory, before = saved
    settings = run_of(BOTH, tmp_path, **load(directory, optimizer=False))
    (found,) = pool.run(1, resume_run, settings, 4, 6)
    weights = weights_of(before.ended, "vision", "language")
    assert same_bits(weights_of(found.began, "vision", "language"), weights)
    assert all_zero(moments_of(found.began, "vision") | moments_of(found.began, "language"))
    assert [found.losses] == pool.run(1, train_from, run_of(BOTH, tmp_path), weights, (4, 5, 6))
    assert "; new: optimizer states; left: all optimizer states (" in found.summary


def test_without_rng_the_seed_is_the_settings_and_generators_are_fresh(
    saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """Samples come in the order of a run with that seed; a plugin's other state is taken anyway."""
    directory, before = saved
    settings = run_of(BOTH, tmp_path, **load(directory, rng=False, optimizer=False))
    settings["run"]["seed"] = 77
    (found,) = pool.run(1, resume_run, settings, 4, 5)
    plain = run_of(BOTH, tmp_path)
    plain["run"]["seed"] = 77
    assert [found.losses] == pool.run(1, train_from, plain, weights_of(before.ended, "vision", "language"), (4, 5))
    generator = torch.Generator().manual_seed(sum(b"generators"))
    assert found.drawn[1] == float(torch.rand((), generator=generator))
    assert found.drawn[0] != before.drawn[0]
    assert "; new: optimizer states, order of samples, generators; left:" in found.summary


def test_without_its_schedule_the_learning_rate_begins_anew(
    saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """Two steps of warm-up from the fourth step on, then a line to zero at step 9, by hand; then the run resumes."""
    directory, _ = saved
    rates = {"lr_schedule": "linear", "lr_warmup_steps": 2}
    settings = run_of(BOTH, tmp_path, optimizer=rates, **load(directory, schedule=False))
    (found,) = pool.run(1, resume_and_save, settings, 4, 6)
    assert found.rates == pytest.approx([0.5 * RATE, RATE, 0.75 * RATE])
    assert "; new: learning-rate schedules; optimizer of vision.lr_schedule linear (was constant);" in found.summary
    (further,) = pool.run(1, resume_run, run_of(BOTH, tmp_path, optimizer=rates, **load(tmp_path)), 7, 8)
    assert further.rates == pytest.approx([0.5 * RATE, 0.25 * RATE])
    assert further.summary.endswith("step_00000006")


def test_without_the_place_in_the_data_they_begin_anew(
    saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """Samples are those of the first steps; the batch may be another one."""
    directory, before = saved
    settings = run_of(BOTH, tmp_path, **load(directory, data=False, optimizer=False))
    plain = run_of(BOTH, tmp_path)
    for one in (settings, plain):
        one["run"]["global_batch"] = 48
    (found,) = pool.run(1, resume_run, settings, 4, 5)
    assert [found.losses] == pool.run(1, train_from, plain, weights_of(before.ended, "vision", "language"), (1, 2))


def test_finetuning_takes_weights_alone(saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool) -> None:
    """Into a run that begins: the first step's samples by the settings' seed, no moments, plugins as they are made."""
    directory, before = saved
    settings = run_of(BOTH, tmp_path, load={"finetune": str(directory)})
    settings["run"]["seed"] = 77
    (found,) = pool.run(1, resume_run, settings, 1, 2)
    plain = {key: value for key, value in settings.items() if key != "load"}
    assert [found.losses] == pool.run(1, train_from, plain, weights_of(before.ended, "vision", "language"), (1, 2))
    assert all_zero(moments_of(found.began, "language"))
    assert found.summary == f"weights of step 3 loaded from {directory / 'checkpoints' / 'step_00000003'}"


def test_finetuning_begins_modules_that_are_new_with_their_initial_weights(
    saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """They are those of a run with this seed; a module that only the checkpoint has is left; the summary names both."""
    directory, before = saved
    modules = {"glyph": ONE, "language": ONE}
    settings = run_of(modules, tmp_path, load={"finetune": str(directory)})
    (found,) = pool.run(1, resume_run, settings, 1, 1)
    (fresh,) = pool.run(1, resume_run, run_of(modules, tmp_path), 1, 0)
    assert same_bits(weights_of(found.began, "glyph"), weights_of(fresh.began, "glyph"))
    assert same_bits(weights_of(found.began, "language"), weights_of(before.ended, "language"))
    assert "; new: weights of glyph (" in found.summary
    assert "; left: vision (" in found.summary


def test_a_run_resumes_with_another_module(saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool) -> None:
    """Settings may say so: it begins with its initial weights, and all else resumes."""
    directory, before = saved
    modules = {**BOTH, "glyph": ONE}
    sections = load(directory, may_lack=["glyph.*"])
    (found,) = pool.run(1, resume_run, run_of(modules, tmp_path, **sections), 4, 4)
    (fresh,) = pool.run(1, resume_run, run_of(modules, tmp_path), 1, 0)
    assert same_bits(weights_of(found.began, "glyph"), weights_of(fresh.began, "glyph"))
    assert all_zero(moments_of(found.began, "glyph"))
    assert holds(found.began, before.ended)
    with pytest.raises(RanksError, match=r"modules\.glyph: expected a module of '.*', which has language, vision, got"):
        pool.run(1, resume_run, run_of(modules, tmp_path, **load(directory)), 4, 4)


def test_a_run_resumes_without_a_module(saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool) -> None:
    """Settings may say so: the other modules resume, and the summary names what is left."""
    directory, before = saved
    data: dict[str, Any] = {"modalities": []}
    settings = run_of({"language": ONE}, tmp_path, data=data, **load(directory, may_leave=["vision.*"]))
    (found,) = pool.run(1, resume_run, settings, 4, 4)
    assert holds(before.ended, found.began)
    assert moments_of(found.began, "language")
    assert "; left: vision (" in found.summary
    assert "; data.modalities [] (was ['image'])" in found.summary
    with pytest.raises(RanksError, match=r'modules\.vision: expected a module, .* got none\. Add "vision\.\*" to load'):
        pool.run(1, resume_run, run_of({"language": ONE}, tmp_path, data=data, **load(directory)), 4, 4)


def test_a_renamed_module_resumes_as_if_nothing_was(saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool) -> None:
    """Weights and moments are found under the old name, and the losses are those of the run that never stopped."""
    directory, before = saved
    settings = run_of(BOTH, tmp_path, **load(directory, rename={"eye": "vision"}))
    settings["modules"]["eye"] = settings["modules"].pop("vision")
    (found,) = pool.run(1, resume_run, settings, 4, 6)
    (straight,) = pool.run(1, resume_run, run_of(BOTH, tmp_path), 1, 6)
    assert found.losses == straight.losses[3:]
    assert found.began.keys() == {name.replace("vision.", "eye.", 1) for name in before.ended}


def test_an_encoder_is_frozen_and_unfrozen_between_runs(
    saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """Frozen, its states are left; trained again, they begin new; the language model's resume. The summary says so."""
    directory, before = saved
    frozen = {**BOTH, "vision": {**ONE, "frozen": True}}
    (still,) = pool.run(1, resume_and_save, run_of(frozen, tmp_path, **load(directory)), 4, 5)
    assert same_bits(weights_of(still.ended, "vision"), weights_of(before.ended, "vision"))
    assert "; left: optimizer states of what is not trained in vision (" in still.summary
    (again,) = pool.run(1, resume_run, run_of(BOTH, tmp_path, **load(tmp_path)), 6, 7)
    assert all_zero(moments_of(again.began, "vision"))
    assert same_bits(moments_of(again.began, "language"), moments_of(still.ended, "language"))
    assert not same_bits(weights_of(again.ended, "vision"), weights_of(again.began, "vision"))
    assert "; new: optimizer states of what was not trained in vision (" in again.summary


def test_an_optimizer_that_has_no_use_for_the_states_is_refused(
    saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """By the setting, for all modules at once; without them it begins."""
    directory, before = saved
    muon = {"plugin": "muon"}
    text = (
        r"(?s)settings: expected ones that go with .*, got 2 that don't:"
        r".*modules\.language\.optimizer\.plugin: expected one that goes on with the states that the checkpoint has "
        r"for language: exp_avg, exp_avg_sq, step, got one that needs momentum_buffer of \d+ parameters\. Set "
        r"the plugin with which it was saved, or load\.optimizer = false to begin all optimizer states new\."
    )
    with pytest.raises(RanksError, match=text):
        pool.run(1, resume_run, run_of(BOTH, tmp_path, optimizer=muon, **load(directory)), 4, 4)
    (found,) = pool.run(1, resume_run, run_of(BOTH, tmp_path, optimizer=muon, **load(directory, optimizer=False)), 4, 4)
    assert same_bits(weights_of(found.began, "vision", "language"), weights_of(before.ended, "vision", "language"))


def test_a_checkpoint_without_its_optimizer_states_is_refused(
    saved: tuple[Path, Resumption], tmp_path: Path, pool: Pool
) -> None:
    """It was trained, so they were left out; a module that was frozen has none."""
    directory, _ = saved
    step = reshard(directory / "checkpoints" / "step_00000003", tmp_path, drop=["optimizer.vision.*"])
    text = r"modules\.vision: expected optimizer states in the checkpoint, as vision was trained, got none\."
    with pytest.raises(RanksError, match=text):
        pool.run(1, resume_run, run_of(BOTH, tmp_path, **load(step)), 4, 4)
    (found,) = pool.run(1, resume_run, run_of(BOTH, tmp_path, **load(step, optimizer=False)), 4, 3)
    assert all_zero(moments_of(found.began, "language"))


class Lone:
    """A part of which each rank has a number of its own."""

    name = "lone"

    def __init__(self, rank: int) -> None:
        self.own = {f"rank_{rank}": torch.ones(1)}
        self.loaded = False

    def state(self) -> StateTree:
        """Return the number of this rank."""
        return self.own

    def load(self, tree: StateTree) -> None:
        """Note that this was called."""
        del tree
        self.loaded = True


def save_lone(rank: int, settings: Table) -> None:
    """Save a run with such a part."""
    trainer, _, state = begin(rank, settings)
    save_step(trainer, state, [Lone(rank)], SAVED)


def load_lone(rank: int, settings: Table, directory: str) -> bool:
    """Return whether a rank loads the part."""
    part = Lone(rank)
    begin(rank, settings, directory, [part])
    return part.loaded


def test_a_part_is_loaded_on_all_ranks_or_on_none(tmp_path: Path, pool: Pool) -> None:
    """Also where a rank has nothing in the checkpoint, as what it does then may be collective."""
    pool.run(1, save_lone, run_of(BOTH, tmp_path))
    wide = run_of({"vision": on(0, 0), "language": on(1, 1)}, tmp_path, load={"may_lack": ["lone.rank_1"]})
    assert pool.run(2, load_lone, wide, str(tmp_path)) == [True, True]
