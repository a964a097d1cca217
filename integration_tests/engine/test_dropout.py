"""The oracle over what is dropped at random: in every kind of layout the same features, rows and paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cases import Modules
from jobs import make_job
from oracle import GAP, Outcome, differences, run_layout
from resuming import check_going_on
from tables import Table, alone, scheduled, table, world_of
from test_oracle_audio import CONFIGS as WHISPER
from test_oracle_distributed import Way, distributed
from test_oracle_radio import CONFIGS as RADIO
from torch import nn
from truth import Truth, run_plain

from mimo.model.draws import numbers
from mimo.model.runtime import LowRank, local
from mimo.testing import Pool, RanksError
from mimo.trainer import Trainer

SP: Mapping[str, Any] = {"sequence_parallel": True}
LORA: Mapping[str, Any] = {"rank": 2, "targets": ["*"], "dropout": 0.1}
RATES: Mapping[str, Any] = {"hidden_dropout": 0.1, "embedding_dropout": 0.1}
EXPERTS: Mapping[str, Any] = {"experts": 4, "dense_layers": 1, "shared_intermediate": 11, "balance_loss": 0.05}


def on(first: int, last: int, **sizes: Any) -> dict[str, Any]:
    """Return a grid on ranks ``first`` to ``last``."""
    return {"ranks": list(range(first, last + 1)), **sizes}


LAYOUTS: dict[str, Modules] = {
    "disjoint": {"vision": on(0, 0), "language": on(1, 1)},
    "colocated lanes, recomputed": {"vision": on(0, 1, recompute="full"), "language": on(0, 1, recompute="full")},
    "tp2, passes for two": {"vision": on(0, 1, tp=2, batch_factor=2), "language": on(0, 1, tp=2, loss_rows=7)},
    "tp2 sp, recomputed": {
        "vision": on(0, 1, tp=2, recompute="selective", **SP),
        "language": on(0, 1, tp=2, recompute="selective", round_rows=5, **SP),
    },
    "cp2": {"vision": on(0, 1, cp=2), "language": on(0, 1, cp=2)},
}


def dropping(modules: Modules, *, lora: bool = False, **more: Any) -> Table:
    """Return settings of modules that drop, and with ``lora`` learn by what is added to their linears."""
    settings = table(modules, microbatches=2, language={**RATES, **more})
    settings["modules"]["vision"]["config"]["drop_path"] = 0.2
    if lora:
        for keys in settings["modules"].values():
            keys["lora"] = dict(LORA)
    return settings


@contextmanager
def drawn() -> Iterator[None]:
    """Draw ``up`` too: where it is zero, ``down`` has no gradient."""

    def draw(beside: LowRank) -> None:
        nn.init.normal_(beside.down, std=0.2)
        nn.init.normal_(beside.up, std=0.2)

    with mock.patch.object(LowRank, "reset_parameters", draw):
        yield


def _run(rank: int, settings: Table) -> Outcome:
    with drawn():
        return run_layout(rank, settings)


def _run_plain(rank: int, settings: Table) -> Truth:
    with drawn():
        return run_plain(rank, settings)


def _truth(pool: Pool, settings: Table) -> Truth:
    (truth,) = pool.recall(1, _run_plain, alone(settings))
    assert isinstance(truth, Truth)
    return truth


def check(pool: Pool, settings: Table) -> str:
    """Return the differences of a layout from one process, a line each."""
    truth = _truth(pool, settings)
    assert truth.gap >= GAP, truth.gap
    return "\n".join(differences(truth, pool.run(world_of(settings), _run, settings)))


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_never_changes_what_is_dropped(layout: str, lora: bool, pool: Pool) -> None:
    """Loss, gradients and weights equal one process."""
    assert check(pool, dropping(LAYOUTS[layout], lora=lora)) == ""


@pytest.mark.parametrize("pictures", ["first", "none"])
def test_ranks_without_items_and_rows_drop_nothing(pictures: str, pool: Pool) -> None:
    """And wait for nobody."""
    settings = dropping({"vision": on(0, 2, tp=1, recompute="full"), "language": on(0, 1, cp=2)}, lora=True)
    settings["data"]["pictures"] = pictures
    assert check(pool, settings) == ""


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_schedules_drop_the_same(schedule: str, pool: Pool) -> None:
    """Layers count over all stages, and split backwards take their weight gradients from what was dropped."""
    layout = {"vision": on(0, 1, pp=2), "language": on(0, 1, pp=2)}
    assert check(pool, scheduled(dropping(layout, lora=schedule == "zb-h1"), schedule)) == ""


@pytest.mark.soak
def test_spread_parameters_drop_the_same(pool: Pool) -> None:
    """They are gathered for each layer, and once more where backward computes it again."""
    layout = {name: {**keys, "dp": 2} for name, keys in LAYOUTS["colocated lanes, recomputed"].items()}
    assert check(pool, distributed(dropping(layout), Way("full", overlaps=True))) == ""


@pytest.mark.parametrize("language", [on(0, 1, ep=2, recompute="full"), on(0, 1, tp=2, etp=2)], ids=["ep2", "etp2"])
def test_experts_drop_the_same(language: Mapping[str, Any], pool: Pool) -> None:
    """Keys go with the rows to the ranks that hold their experts."""
    assert check(pool, dropping({"vision": on(0, 0), "language": language}, lora=True, **EXPERTS)) == ""


def test_rows_made_a_step_ahead_are_dropped_by_the_step_that_they_are_for(pool: Pool) -> None:
    """The frozen tower of an encoder that learns by what is added to its projector."""
    settings = dropping({"vision": on(0, 0, prefetch=True), "language": on(0, 1, pp=2)})
    settings["modules"]["vision"]["lora"] = {**LORA, "targets": ["projector.*"]}
    assert check(pool, settings) == ""


SIZES: Mapping[str, int] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LANGUAGE: Mapping[str, Any] = {**SIZES, "intermediate_size": 37, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
IMAGES: Mapping[str, int] = {"image_size": 8, "patch_size": 2, "num_channels": 1, "mlp_ratio": 1}
TOWER: Mapping[str, Any] = {**SIZES, **IMAGES, "hidden_dropout_prob": 0.1, "drop_path_rate": 0.2}
LIBRARY: dict[str, Modules] = {
    "disjoint, pp2": {"vision": on(0, 0), "language": on(0, 1, pp=2)},
    "tp2, passes for two": {"vision": on(0, 1, tp=2, batch_factor=2), "language": on(0, 1, tp=2)},
    "lanes, recomputed": {"vision": on(0, 1, recompute="full"), "language": on(0, 1, recompute="full")},
    "cp2": {"vision": on(0, 0), "language": on(0, 1, cp=2)},
}


def of_library(settings: Table) -> Table:
    """Return settings with a language model and a tower of transformers that drop in the place of ours."""
    for name, plugin, model_type, values in (
        ("language", "hf-decoder", "phi", LANGUAGE),
        ("vision", "hf-encoder", "dinov2", TOWER),
    ):
        settings["modules"][name] |= {"plugin": plugin, "config": {"model_type": model_type, "values": dict(values)}}
    return settings


@pytest.mark.parametrize(
    ("layout", "lora"),
    [
        pytest.param(layout, lora, marks=[pytest.mark.soak] if lora == place % 2 else [])
        for place, layout in enumerate(LIBRARY)
        for lora in (False, True)
    ],
)
def test_models_of_the_library_drop_the_same(layout: str, lora: bool, pool: Pool) -> None:
    """What their published configs name: features of rows, those of embedded ones, and paths of images."""
    assert check(pool, of_library(dropping(LIBRARY[layout], lora=lora))) == ""


ENCODERS: dict[str, Modules] = {
    "disjoint, stages": {"vision": on(0, 1, pp=2), "audio": on(2, 3, pp=2), "language": on(4, 4)},
    "tp2 and tp2 sp, recomputed": {
        "vision": on(0, 1, tp=2, recompute="selective"),
        "audio": on(0, 1, tp=2, recompute="selective", **SP),
        "language": on(0, 1),
    },
    "lanes, recomputed, passes for two": {
        "vision": on(0, 1, recompute="full"),
        "audio": on(1, 2, recompute="full", batch_factor=2),
        "language": on(0, 1),
    },
    "cp2 tp2 sp": {"vision": on(0, 1, cp=2), "audio": on(0, 3, cp=2, tp=2, **SP), "language": on(2, 3, tp=2, **SP)},
}
HEARD: Mapping[str, Any] = {"dropout": 0.1, "activation_dropout": 0.2}


def of_published(layout: str, *, silence: str = "clips alone", without: str = "") -> Table:
    """Return settings of the encoders ``radio`` and ``whisper``, which drop what their configs say but for one key."""
    heard = {**WHISPER[silence]} | {key: rate for key, rate in HEARD.items() if key != without}
    seen = {**RADIO["tiles"]} | ({} if without == "drop_path" else {"drop_path": 0.2})
    modules = {name: dict(keys) for name, keys in ENCODERS[layout].items()}
    modules["vision"] |= {"plugin": "radio", "config": seen}
    modules["audio"] |= {"plugin": "whisper", "config": heard}
    return table(modules, microbatches=2)


@pytest.mark.parametrize(("layout", "silence"), list(zip(ENCODERS, WHISPER, strict=True)))
def test_encoders_of_published_folders_drop_the_same(layout: str, silence: str, pool: Pool) -> None:
    """Features of rows, those of embedded ones, those between products that ranks share, and paths of tiles."""
    assert check(pool, of_published(layout, silence=silence)) == ""


@pytest.mark.soak
def test_what_published_encoders_drop_counts(pool: Pool) -> None:
    """Each of their rates changes the loss."""
    layout = next(iter(ENCODERS))
    losses = [_truth(pool, of_published(layout)).losses[0]]
    losses += [_truth(pool, of_published(layout, without=key)).losses[0] for key in (*HEARD, "drop_path")]
    assert all(abs(one - other) > 1e-5 * one for place, one in enumerate(losses) for other in losses[:place]), losses


@pytest.mark.soak
def test_what_is_dropped_counts(pool: Pool) -> None:
    """Each of the rates changes the loss, and gradients with it."""
    whole = dropping(LAYOUTS["disjoint"], lora=True)
    losses = [_truth(pool, whole).losses]
    for module, table_of, key in (
        ("language", "config", "hidden_dropout"),
        ("language", "config", "embedding_dropout"),
        ("language", "lora", "dropout"),
        ("vision", "config", "drop_path"),
        ("vision", "lora", "dropout"),
    ):
        settings = dropping(LAYOUTS["disjoint"], lora=True)
        settings["modules"][module][table_of][key] = 0.0
        losses.append(_truth(pool, settings).losses)
    for place, one in enumerate(losses):
        assert all(abs(one[0] - other[0]) > 1e-5 * one[0] for other in losses[:place]), losses


def _without_draws(rank: int, settings: Table) -> float:
    with mock.patch.object(numbers, "_mix", side_effect=AssertionError("a number is drawn")):
        return Trainer(make_job(settings), rank=rank, device="cpu").train(1).loss


def test_nothing_is_drawn_where_nothing_drops(pool: Pool) -> None:
    """At rates of 0 neither keys nor masks are computed, and the loss is that of a model without rates."""
    plain = table(LAYOUTS["disjoint"], microbatches=2)
    none = dropping(LAYOUTS["disjoint"], hidden_dropout=0.0, embedding_dropout=0.0)
    none["modules"]["vision"]["config"]["drop_path"] = 0.0
    first, second = (pool.run(2, _without_draws, settings)[0] for settings in (plain, none))
    assert first == second
    with pytest.raises(RanksError, match="a number is drawn"):
        pool.run(2, _without_draws, dropping(LAYOUTS["disjoint"]))


def _repeat(rank: int, settings: Table) -> list[float]:
    """Return the sums of squares of all gradients of two steps, each run twice."""
    trainer = Trainer(make_job(settings), rank=rank, device="cpu")
    found = []
    for step in (1, 2):
        share = trainer.accumulate(step)
        for again in (False, True):
            share = trainer.repeat() if again else share
            parts = [module.part for module in trainer.optimizer.modules.values()]
            held = [one.grad for part in parts for one in part.parameters.values() if one.grad is not None]
            found.append(sum(float(local(one).double().square().sum()) for one in held))
        trainer.update(step, share)
    return found


def test_a_step_run_again_drops_the_same(pool: Pool) -> None:
    """To the bit; the next one drops others."""
    for first, again, second, once_more in pool.run(2, _repeat, dropping(LAYOUTS["colocated lanes, recomputed"])):
        assert first == again != second == once_more


def test_a_run_that_resumes_drops_what_one_that_never_stopped_does(pool: Pool, tmp_path: Path) -> None:
    """In another layout too."""
    first, second = dropping(LAYOUTS["disjoint"]), dropping(LAYOUTS["tp2, passes for two"])
    for settings in (first, second):
        settings["run"] |= {"steps": 5, "directory": str(tmp_path)}
    check_going_on(pool, first, first, exactly=True)
    first["run"]["directory"] = str(tmp_path / "other")
    check_going_on(pool, first, second, exactly=False)


def _compiled(rank: int, settings: Table) -> list[float]:
    trainer = Trainer(make_job(settings), rank=rank, device="cpu")
    return [trainer.train(step).loss for step in (1, 2)]


@pytest.mark.soak  # every time: in `test_model_compiled.py`, without an encoder and a trainer
def test_compiled_layers_drop_the_same(pool: Pool) -> None:
    """Those of the encoder too, and what is computed again in backward."""
    plain = dropping({"vision": on(0, 0), "language": on(0, 0, recompute="selective")}, lora=True)
    compiled = {**plain, "run": {**plain["run"], "compile": True, "compile_backend": "aot_eager"}}
    (one,), (other,) = (pool.run(1, _compiled, settings) for settings in (plain, compiled))
    assert one == pytest.approx(other, rel=1e-6)
