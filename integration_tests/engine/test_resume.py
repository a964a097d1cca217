"""A run that stops and resumes in the same or another layout is the run that never stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from cases import Modules, features_of
from resuming import check_going_on, run_and_save, run_steps
from tables import RATE, Table, table
from test_oracle import SP, on

from mimo.testing import Pool

LAYOUTS: dict[str, Modules] = {
    "alone": {"vision": on(0, 0), "language": on(0, 0)},
    "disjoint": {"vision": on(0, 1), "language": on(2, 3, tp=2)},
    "overlapping, tied stages": {"vision": on(0, 2, tp=3), "language": on(2, 5, pp=2, tp=2, **SP)},
    "disjoint, stages of three lanes": {"vision": on(0, 0), "language": on(1, 6, pp=2)},
    "colocated stages": {"vision": on(0, 3), "language": on(0, 3, pp=2)},
    "colocated lanes": {"vision": on(0, 3), "language": on(0, 3)},
    "two lanes": {"vision": on(0, 1), "language": on(0, 1)},
    "context ranks": {"vision": on(0, 1, cp=2), "language": on(0, 3, cp=2, tp=2, **SP)},
    "vision stages": {"vision": on(0, 1, pp=2), "language": on(2, 3, tp=2)},
    "stages in both": {"vision": on(0, 3, pp=2), "language": on(0, 3, pp=2)},
    "chunks in a loop": {"vision": on(0, 0), "language": on(1, 2, pp=2, chunks=2)},
    "chunks in a v": {"vision": on(0, 1), "language": on(0, 3, pp=2, tp=2, chunks=2)},
    "frozen encoder, disjoint": {"vision": on(0, 1, frozen=["encoder"]), "language": on(2, 3, tp=2)},
    "frozen encoder, colocated": {"vision": on(0, 1, tp=2, frozen=["encoder"]), "language": on(0, 1, pp=2)},
    "two encoders": {"vision": on(0, 1, tp=2), "glyph": on(1, 2), "language": on(2, 3, pp=2)},
    "two encoders, disjoint": {"vision": on(0, 0), "glyph": on(1, 2, tp=2), "language": on(3, 4)},
    "experts over lanes": {"vision": on(0, 0), "language": on(0, 3, tp=2, ep=2, etp=2, **SP)},
    "experts over context ranks": {"vision": on(0, 2), "language": on(0, 3, pp=2, cp=2, ep=2)},
    "experts on four": {"vision": on(0, 0), "language": on(0, 3, ep=4)},
    "experts on two": {"vision": on(0, 1), "language": on(0, 3, tp=2, ep=2)},
    "few rows of logits": {"vision": on(0, 0), "language": on(0, 1, tp=2, loss_rows=3)},
    "few rows of logits, lanes": {"vision": on(0, 1), "language": on(0, 1, loss_rows=5)},
}
PLUGINS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"plugin": "adamw"},
    "optimizer": {"plugin": "distributed", "shard": "optimizer"},
    "gradients": {"plugin": "distributed", "shard": "gradients"},
    "gradients over two": {"plugin": "distributed", "shard": "gradients", "shard_lanes": 2},
    "full": {"plugin": "distributed", "shard": "full"},
    "hybrid": {"plugin": "cpu-offload", "fraction": 0.5, "bucket_bytes": 2048, "staging_bytes": 0},
}
EXPERTS: dict[str, Any] = {
    "experts": 4,
    "experts_per_token": 1,
    "router_normalize": False,
    "expert_bias_rate": 0.01,
    "dense_layers": 1,
    "balance_loss": 0.05,
}
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
CLEAR_SEED = 62
"""With which no row's choice of experts is left to rounding, see `oracle.GAP`."""


@attrs.frozen
class Pair:
    """A layout with an optimizer that saves, and one that resumes.

    Args:
        before, after: of `LAYOUTS`.
        saves, steps: of `PLUGINS`.
        weights: of tokens, see `synthetic.SyntheticConfig`.
        compiled: whether layers are, in both.
        always: whether it is run among the ordinary tests.
    """

    before: str
    after: str
    saves: str = "adamw"
    steps: str = "adamw"
    weights: str = "none"
    compiled: bool = False
    always: bool = False

    def __str__(self) -> str:
        """Name it in reports."""
        plugins = "" if self.saves == self.steps == "adamw" else f", {self.saves} to {self.steps}"
        return f"{self.before} to {self.after}{plugins}{', compiled' if self.compiled else ''}"

    @property
    def layers(self) -> int:
        """Layers of the language model: enough for the stages of both."""
        chunked = any("chunks" in LAYOUTS[name]["language"] for name in (self.before, self.after))
        return 4 if chunked else 3

    def settings(self, directory: Path) -> tuple[Table, Table]:
        """Return both runs."""
        first, second = (
            settings_of(LAYOUTS[layout], directory, layers=self.layers) for layout in (self.before, self.after)
        )
        for found, layout, plugin in ((first, self.before, self.saves), (second, self.after, self.steps)):
            found["optimizer"] |= PLUGINS[plugin]
            found["data"]["weights"] = self.weights
            if layout == "chunks in a v":
                found["schedule"] = {"plugin": "1f1b-v"}
            if self.compiled:
                found["run"] |= COMPILED
        return first, second


PAIRS = (
    Pair("overlapping, tied stages", "overlapping, tied stages", weights="mixed"),
    Pair("stages in both", "stages in both", "full", "full", always=True),
    Pair("experts over lanes", "experts over context ranks", always=True),
    Pair("chunks in a v", "disjoint", "adamw", "optimizer"),
    Pair("frozen encoder, disjoint", "frozen encoder, colocated", "optimizer", "hybrid"),
    Pair("two encoders", "two encoders, disjoint", "hybrid", "adamw", weights="mixed", always=True),
    Pair("disjoint", "disjoint"),
    Pair("colocated stages", "colocated stages"),
    Pair("disjoint, stages of three lanes", "disjoint, stages of three lanes"),
    Pair("experts over lanes", "experts over lanes"),
    Pair("colocated lanes", "colocated lanes", "optimizer", "optimizer"),
    Pair("colocated lanes", "colocated lanes", "hybrid", "hybrid"),
    Pair("chunks in a v", "chunks in a v"),
    Pair("disjoint", "alone"),
    Pair("alone", "overlapping, tied stages"),
    Pair("overlapping, tied stages", "colocated stages"),
    Pair("colocated stages", "disjoint"),
    Pair("alone", "context ranks"),
    Pair("context ranks", "two lanes"),
    Pair("disjoint", "vision stages"),
    Pair("vision stages", "disjoint, stages of three lanes"),
    Pair("chunks in a loop", "chunks in a v"),
    Pair("alone", "chunks in a loop", "adamw", "gradients"),
    Pair("frozen encoder, colocated", "frozen encoder, disjoint"),
    Pair("two encoders, disjoint", "two encoders"),
    Pair("experts on four", "experts on two", "optimizer", "full"),
    Pair("experts on two", "experts on four", "gradients", "optimizer"),
    Pair("experts over context ranks", "experts over lanes"),
    Pair("experts on two", "experts on two", "adamw", "optimizer"),
    Pair("colocated lanes", "two lanes", "optimizer", "full"),
    Pair("colocated lanes", "colocated lanes", "gradients over two", "gradients"),
    Pair("colocated lanes", "stages in both", "adamw", "gradients over two"),
    Pair("two lanes", "colocated lanes", "full", "hybrid"),
    Pair("stages in both", "two lanes", "gradients", "optimizer"),
    Pair("disjoint", "colocated lanes", "full", "adamw"),
    Pair("few rows of logits", "few rows of logits", weights="mixed", always=True),
    Pair("few rows of logits, lanes", "few rows of logits, lanes", "full", "full"),
    Pair("few rows of logits", "few rows of logits, lanes"),
    Pair("few rows of logits, lanes", "disjoint", "optimizer", "adamw"),
    Pair("alone", "alone", compiled=True),
    Pair("experts on two", "experts on two", "full", "full", compiled=True),
    Pair("disjoint", "two lanes", compiled=True),
)


def settings_of(layout: Mapping[str, Mapping[str, Any]], directory: Path, *, layers: int = 3) -> Table:
    """Return a run of six steps with a falling learning rate in ``directory``."""
    modules = {name: dict(keys) for name, keys in layout.items()}
    # The vocabulary is large enough for gloo to sum in chunks, in another order for messages of other lengths.
    experts = EXPERTS if "ep" in modules["language"] else {}
    language = {"tied": True, "vocabulary": 1500, "layers": layers, **experts}
    found = table(modules, microbatches=2, language=language, seed=CLEAR_SEED)
    found["run"] |= {"steps": 6, "directory": str(directory)}
    found["optimizer"] |= {"lr_schedule": "cosine", "lr_min": RATE / 100, "lr_warmup_steps": 2}
    return found


@pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=str(pair), marks=() if pair.always else pytest.mark.soak) for pair in PAIRS]
)
def test_six_steps_equal_three_saved_and_three_more(pair: Pair, tmp_path: Path, pool: Pool) -> None:
    """The same layout resumes to the bit, another one within the first law: losses, weights and moments."""
    first, second = pair.settings(tmp_path)
    check_going_on(pool, first, second, exactly=(pair.before, pair.saves) == (pair.after, pair.steps))


@pytest.mark.soak
def test_a_run_resumes_with_compiled_layers(tmp_path: Path, pool: Pool) -> None:
    """Whether layers are compiled is no part of what a checkpoint holds."""
    first, second = Pair("alone", "alone").settings(tmp_path)
    second["run"] |= COMPILED
    check_going_on(pool, first, second, exactly=False)


def changes(pair: Pair) -> Iterator[str]:
    """Yield what changes between the two, for each module each axis that grows or shrinks."""
    before, after = LAYOUTS[pair.before], LAYOUTS[pair.after]
    for name, keys in before.items():
        for axis in ("pp", "dp", "cp", "tp", "ep", "etp", "chunks"):
            old, new = (one.get(axis, 1) for one in (keys, after[name]))
            if old != new:
                yield f"{axis} {'grows' if new > old else 'shrinks'}"
    moved = [name for name in before if before[name] != after[name]]
    if len(moved) == 1:
        yield "one module alone"
    relations = {"disjoint", "colocated", "overlapping"}
    where = [min(relations & features_of(layout)) for layout in (before, after)]
    yield " to ".join(where)
    yield f"{len(before)} modules"
    yield " to ".join(PLUGINS[plugin].get("shard", PLUGINS[plugin]["plugin"]) for plugin in (pair.saves, pair.steps))


def test_the_table_shows_every_change() -> None:
    """Each axis up and down, modules that move together and apart, and optimizers that take over from each other."""
    shown = {change for pair in PAIRS for change in changes(pair)}
    axes = {f"{axis} {way}" for axis in ("pp", "dp", "cp", "tp", "ep", "etp", "chunks") for way in ("grows", "shrinks")}
    moves = {"disjoint to colocated", "colocated to disjoint", "overlapping to colocated", "one module alone"}
    plugins = {
        "adamw to optimizer",
        "adamw to gradients",
        "optimizer to full",
        "full to cpu-offload",
        "cpu-offload to adamw",
    }
    assert axes | moves | plugins | {"2 modules", "3 modules"} <= shown
    ordinary = {change for pair in PAIRS if pair.always for change in changes(pair)}
    assert {f"{axis} {way}" for axis in ("pp", "tp") for way in ("grows", "shrinks")} | {"cp grows"} <= ordinary
    assert len({(pair.before, pair.after) for pair in PAIRS if pair.before != pair.after}) >= 20


def test_learning_rate_continues_across_a_resume(tmp_path: Path, pool: Pool) -> None:
    """From 2e-4 to 2e-6 by a cosine over 10 steps: 1.59e-4, then after a resume at step 3 1.32e-4 and 1.01e-4."""
    found = settings_of(LAYOUTS["two lanes"], tmp_path)
    found["run"]["steps"] = 10
    found["optimizer"] = {"lr": 2e-4, "lr_min": 2e-6, "lr_schedule": "cosine", "lr_decay_steps": 10}
    before = pool.run(2, run_and_save, found)
    after = pool.run(2, run_steps, found, 4, 5, str(tmp_path))
    rates = [f"{rate:.2e}" for _, _, rate in [*before[0][0], *after[0][0]]]
    assert rates[2:] == ["1.59e-04", "1.32e-04", "1.01e-04"]
