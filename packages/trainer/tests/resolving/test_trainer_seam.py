"""``prefetch`` of an encoder whose projector trains: which settings divide it at its seam, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
from torch import nn

from mimo.hooks import ConfigError, Kind
from mimo.model import ENCODERS, EncoderSeam, EncoderSpec
from mimo.topology import StageId
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.toml import make_settings
from mimo.trainer.job.job import Job
from mimo.trainer.resolving.resolve import Purpose, resolve

S = TypeVar("S")
BEHIND = "modules.vision.prefetch: expected "


@attrs.frozen(kw_only=True)
class EyeConfig:
    width: int = 8


class Eye(nn.Module):
    """An encoder of two linears and a norm, of which either side of the seam may be missing."""

    def __init__(self, config: EyeConfig, hidden: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.projector = nn.Linear(config.width, hidden)


def _cut(module: nn.Module, side: str) -> nn.Module:
    for name in ("trunk", "norm") if side == "projector" else ("projector",):
        delattr(module, name)
    return module


SEAM = EncoderSeam(rows=lambda _config, _size: 6, width=lambda config: config.width, cut=_cut)
EYE = EncoderSpec(
    name="eye",
    config=EyeConfig,
    measure=lambda _raw: (1, 1),
    rows=lambda _config, _size: 3,
    prepare=lambda _config, _raw: {},
    build=Eye,
    parts={"trunk": ("trunk", "norm"), "projector": ("projector",)},
    seam=SEAM,
)
SPECS = {"eye": EYE, "seamless": attrs.evolve(EYE, name="seamless", seam=None)}


def find(kind: Kind[S], name: str, where: str) -> S:
    """Find the encoders above, and otherwise what is installed."""
    found: Any = SPECS.get(name) if kind.group == ENCODERS.group else None
    return found or find_installed(kind, name, where)


@pytest.fixture
def table(tmp_path: Path) -> dict[str, Any]:
    """Settings of a small model with an encoder beside it that is to work ahead."""
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"text": "hello"}\n' * 8)
    return {
        "run": {"name": "r", "steps": 10, "global_batch": 8, "micro_batch": 2},
        "data": {"plugin": "jsonl", "path": str(lines)},
        "tokenizer": {"plugin": "byte"},
        "modules": {
            "vision": {"plugin": "eye", "ranks": "0-1", "frozen": ["trunk"], "prefetch": True},
            "language": {"plugin": "decoder", "ranks": "2-3", "tp": 2, "config": {"hidden": 32, "heads": 4}},
        },
    }


def resolved(table: dict[str, Any], *overrides: str, purpose: Purpose = "train") -> Job:
    """Return the job of a table with overrides."""
    return resolve(make_settings(table, overrides), purpose=purpose, find=find)


def test_a_frozen_tower_is_ahead_of_a_projector_that_trains(table: dict[str, Any]) -> None:
    """Plans see two modules where settings, checkpoints and metrics see one; its last stage is the projector."""
    job = resolved(table)
    assert [module.name for module in job.modules] == ["vision", "language"]
    assert [module.name for module in job.model_graph.modules] == ["vision", "language"]
    assert [module.name for module in job.graph.modules] == ["vision", "vision.projector", "language"]
    assert job.module("vision.projector") is job.module("vision")
    assert job.module("vision").trains == (False, True)
    assert job.stages_of("vision") == (StageId("vision", 0), StageId("vision.projector", 0))
    assert [job.built(stage) for stage in job.stages_of("vision")] == [StageId("vision", 0), StageId("vision", 1)]
    assert [job.stage(StageId("vision", at)).is_projector for at in (0, 1)] == [False, True]
    widths = {edge.name: job.width(edge) for edge in job.graph.edges}
    assert widths == {"vision->vision.projector": 8, "vision.projector->language": 32}
    inside, outside = job.graph.edges
    assert (job.is_inside(inside), job.is_inside(outside)) == (True, False)
    assert job.message_rows(inside, (1, 1)) == 6


@pytest.mark.parametrize("frozen", ["true", '["trunk", "projector"]', '["trunk*", "norm*", "projector*"]'])
def test_an_encoder_of_which_nothing_trains_is_ahead_as_a_whole(table: dict[str, Any], frozen: str) -> None:
    """However that is said; its plan knows no projector."""
    job = resolved(table, f"modules.vision.frozen={frozen}")
    assert job.graph is job.model_graph
    assert job.graph.by_name["vision"].prefetch


def test_an_encoder_in_its_own_step_is_not_divided(table: dict[str, Any]) -> None:
    """Without prefetch plans are what they were; so they are where nothing is trained on."""
    assert resolved(table, "modules.vision.prefetch=false").graph.by_name.keys() == {"vision", "language"}
    assert resolved(table, purpose="generate").graph.by_name.keys() == {"vision", "language"}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["modules.vision.plugin=seamless"],
            BEHIND + r"a module of which nothing is trained, since encoder 'seamless' has no seam between a tower that "
            r"works ahead and a projector that trains, got one that trains. Freeze all of it \(frozen = true\), leave "
            r"prefetch out, or give the plugin a seam: see docs/write-an-encoder.md.",
        ),
        (
            ["modules.vision.frozen=false"],
            BEHIND + r"a tower of which nothing is trained, as it is encoded before the step that would change it; "
            r"what may train is behind it: 'projector', got 'trunk', which trains. Freeze that too, by "
            r"modules.vision.frozen, or leave prefetch out.",
        ),
        (["modules.vision.frozen=[]"], r"behind it: 'projector', got 'trunk', which trains. Freeze that too"),
        (['modules.vision.frozen=["projector"]'], r"behind it: 'projector', got 'trunk', which trains. Freeze"),
        (['modules.vision.frozen=["trunk.*"]'], r"behind it: 'projector', got 'trunk', which trains. Freeze"),
        (
            ['modules.vision.lora={rank = 2, targets = ["trunk"]}'],
            r"behind it: 'projector', got what LoRA adds to 'trunk', which trains. Freeze",
        ),
        (
            ['modules.vision.frozen=["trunk.bias"]', 'modules.vision.lora={rank = 2, targets = ["trunk"]}'],
            r"got 'trunk' and what LoRA adds to 'trunk', which train. Freeze",
        ),
    ],
)
def test_a_tower_that_trains_is_refused_by_what_trains(table: dict[str, Any], overrides: list[str], text: str) -> None:
    """With what to do about it."""
    with pytest.raises(ConfigError, match=text):
        resolved(table, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ['modules.vision.frozen=["trunk*", "norm*"]'],
        ['modules.vision.frozen=["trunk", "projector.bias"]'],
        ['modules.vision.frozen=["trunk"]', 'modules.vision.lora={rank = 2, targets = ["projector"]}'],
        ["modules.vision.frozen=true", 'modules.vision.lora={rank = 2, targets = ["projector"]}'],
    ],
)
def test_any_way_to_train_behind_the_seam_alone_will_do(table: dict[str, Any], overrides: list[str]) -> None:
    """By patterns, a part of the projector, or LoRA on it."""
    job = resolved(table, *overrides)
    assert job.module("vision").divided
    assert job.module("vision").trains == (False, True)
