"""Optimizers of modules and of patterns of parameters: what is merged over what, and what is refused before launch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest
import tomli_w

from mimo.hooks import ConfigError, Kind
from mimo.optimizer import OPTIMIZERS, LearningRate, LocalAdamWConfig
from mimo.trainer import Job, read_settings, resolve
from mimo.trainer.commands.main import run
from mimo.trainer.runtime import find_installed

S = TypeVar("S")
SETTINGS = """
[run]
name = "text"
steps = 10
global_batch = 2
directory = "{directory}/run"
[data]
plugin = "jsonl"
path = "{directory}/train.jsonl"
[modules.vision]
plugin = "vit"
ranks = "0"
config = {{ width = 16, layers = 1, heads = 2, intermediate = 16 }}
[modules.language]
plugin = "decoder"
ranks = "0"
config = {{ hidden = 16, layers = 1, heads = 2, intermediate = 16 }}
"""
NORMS = '"*.norm*"'
COSINE = ("optimizer.lr_schedule=cosine", "optimizer.lr_min=1e-4")


@attrs.frozen(kw_only=True)
class StillConfig:
    """Settings of an optimizer that is no other's."""

    spread: int = 1
    slowness: float = 0.5


def find(kind: Kind[S], name: str, where: str) -> S:
    """Find ``still``, whose key ``spread`` says how parameters lie, and otherwise what is installed."""
    if kind.group == OPTIMIZERS.group and name == "still":
        adamw: Any = find_installed(OPTIMIZERS, "adamw", "")
        still: Any = attrs.evolve(adamw, name=name, config=StillConfig, lays=frozenset({"spread"}))
        return still  # type: ignore[no-any-return]
    return find_installed(kind, name, where)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file of a small model on one rank."""
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n' * 4)
    path = tmp_path / "small.toml"
    path.write_text(SETTINGS.format(directory=tmp_path))
    return path


def resolved(file: Path, *overrides: str) -> Job:
    """Return the job of a file with overrides."""
    return resolve(read_settings(tomllib.loads(file.read_text()), overrides), find=find)


def test_a_pattern_is_merged_over_its_module(file: Path) -> None:
    """Key by key; a module's own patterns come first."""
    job = resolved(
        file,
        "optimizer.clip=1",
        "optimizer.clip_by=module",
        "optimizer.weight_decay=0.25",
        "modules.vision.optimizer={lr = 0.125, eps = 1e-6}",
        f'optimizer.patterns.{NORMS}={{weight_decay = 0, clip_group = "norms"}}',
        'optimizer.patterns."language.head.*"={plugin = "still", lr = 0.5}',
        'modules.vision.optimizer.patterns."norm.b*".lr=0.25',
    )
    vision, language = (job.module(name).optimizer.rules for name in ("vision", "language"))
    names = ("vision.patch", "vision.norm.bias", "vision.norm.weight")
    found = [(rule.learning_rate.lr, rule.config.weight_decay, rule.config.eps) for rule in map(vision.of, names)]
    assert found == [(0.125, 0.25, 1e-6), (0.25, 0.25, 1e-6), (0.125, 0.0, 1e-6)]
    assert [vision.of(name).clip_group for name in names] == ["vision", "vision", "norms"]
    head = language.of("language.head.weight")
    assert (head.spec.name, head.config, head.learning_rate.lr) == ("still", StillConfig(), 0.5)
    assert (language.clip_groups, vision.clip_groups) == (("language", "norms"), ("vision", "norms"))
    wheres = [pattern.where for pattern in vision.patterns]
    assert wheres == ['modules.vision.optimizer.patterns."norm.b*"', f"optimizer.patterns.{NORMS}"]


def test_another_plugin_takes_over_what_is_written_and_no_defaults(file: Path) -> None:
    """A key that both have, wherever it was written; what it has not is left out, and its own defaults hold."""
    job = resolved(
        file,
        "optimizer={plugin = 'muon', betas = [0.5, 0.75], momentum = 0.5}",
        "modules.vision.optimizer={plugin = 'adamw', weight_decay = 0.25}",
        'modules.vision.optimizer.patterns."norm*"={plugin = "cpu-offload", eps = 1e-6}',
        'optimizer.patterns."*.bias".plugin="adamw"',
    )
    vision, language = (job.module(name).optimizer.rules for name in ("vision", "language"))
    assert vision.base.config == LocalAdamWConfig(betas=(0.5, 0.75), weight_decay=0.25)
    norm = vision.of("vision.norm.weight").config
    assert (norm.betas, norm.weight_decay, norm.eps) == ((0.5, 0.75), 0.25, 1e-6)
    assert language.of("language.layers.0.bias").config == LocalAdamWConfig(betas=(0.5, 0.75))
    muon: Any = language.base.config
    assert (muon.betas, muon.momentum, muon.weight_decay) == ((0.5, 0.75), 0.5, 0.1)


def test_a_constant_learning_rate_leaves_inherited_keys_of_falling_ones(file: Path) -> None:
    """So that one module, or a pattern, may stay constant where all others fall; and a pattern in it may fall again."""
    job = resolved(
        file,
        *COSINE,
        "optimizer.lr_decay_steps=8",
        'modules.vision.optimizer={lr = 1e-5, lr_schedule = "constant"}',
        'modules.vision.optimizer.patterns."norm*"={lr = 0.5, lr_schedule = "linear"}',
    )
    rules = job.module("vision").optimizer.rules
    assert rules.base.learning_rate == LearningRate(lr=1e-5)
    falling = LearningRate(lr=0.5, lr_schedule="linear", lr_decay_steps=8, lr_min=1e-4)
    assert rules.of("vision.norm.weight").learning_rate == falling


def test_a_pattern_may_leave_the_clip_group_of_its_module(file: Path) -> None:
    """An empty name is that of `clip_by`."""
    overrides = ("optimizer.clip=1", "modules.vision.optimizer.clip_group=eyes")
    leaving = 'modules.vision.optimizer.patterns."norm*".clip_group=""'
    for by, group in (("global", ""), ("module", "vision")):
        rules = resolved(file, *overrides, leaving, f"optimizer.clip_by={by}").module("vision").optimizer.rules
        assert (rules.of("vision.norm.weight").clip_group, rules.of("vision.patch").clip_group) == (group, "eyes")


def test_how_frozen_parameters_lie_may_be_set(file: Path) -> None:
    """By the keys of a plugin that say so; keys of the global table need not concern the module."""
    job = resolved(
        file,
        "modules.vision.frozen=true",
        "modules.vision.optimizer={plugin = 'still', spread = 2}",
        "optimizer.lr=0.5",
    )
    assert job.module("vision").optimizer.config == StillConfig(spread=2)


@pytest.mark.parametrize(
    "overrides",
    [
        (
            *(f'optimizer.patterns."{glob}".lr=0.5' for glob in ("vision.p*", "*.bias", "language.hea?.*")),
            'modules.language.optimizer.patterns."embedding*".lr=0.1',
        ),
        (
            "optimizer.plugin=muon",
            'optimizer.patterns."*.bias"={plugin = "adamw", clip_group = "ends"}',
            "optimizer.clip_groups.ends=0.5",
        ),
        (*COSINE, 'modules.vision.optimizer={plugin = "muon", lr_schedule = "constant"}'),
    ],
)
def test_optimizers_read_back_as_the_same_job(file: Path, overrides: tuple[str, ...]) -> None:
    """The order of patterns counts, and stays; defaults of a plugin are not taken for what was written for all."""
    job = resolved(file, *overrides)
    again = resolve(read_settings(tomllib.loads(tomli_w.dumps(job.plain))), find=find)
    assert [module.optimizer.rules for module in again.modules] == [module.optimizer.rules for module in job.modules]
    assert again.plain == job.plain


@pytest.mark.parametrize(
    ("overrides", "where", "text"),
    [
        (
            ["modules.vision.optimizer.clip_by=module"],
            "modules.vision.optimizer.clip_by",
            "a key that a module can have",
        ),
        (["optimizer.clip_by=modul"], "optimizer.clip_by", "one of 'global', 'module', got 'modul'. Did you mean"),
        (["optimizer.clip_by=module"], "optimizer.clip_by", "global, as nothing is clipped: optimizer.clip is 0, got"),
        (
            ["optimizer.clip=1", "optimizer.clip_group=x"],
            "optimizer.clip_group",
            "nothing, as the parameters of a clip group are chosen by modules and patterns, got 'x'. Set ",
        ),
        (
            ["modules.vision.optimizer.clip_group=x"],
            "modules.vision.optimizer.clip_group",
            "nothing, as nothing is clipped: optimizer.clip is 0, got 'x'. Set optimizer.clip or optimizer.clip_groups",
        ),
        (
            [f"optimizer.patterns.{NORMS}.clip_group=x"],
            f"optimizer.patterns.{NORMS}.clip_group",
            "nothing, as nothing is clipped: optimizer.clip is 0, got 'x'.",
        ),
        (
            ["optimizer.clip=1", f"optimizer.patterns.{NORMS}.clip_group=vision"],
            f"optimizer.patterns.{NORMS}.clip_group",
            "a name that no module has, got 'vision'. Call the group otherwise; optimizer.clip_by = 'module' makes one",
        ),
        (["optimizer.weight_decay=inf"], "optimizer.weight_decay", "a finite number of 0 or more, got inf."),
        (
            ['optimizer.patterns."visoin.*".lr=1'],
            'optimizer.patterns."visoin.*"',
            "a pattern of full names, which begin with vision or language, got one that matches none. Did you mean '",
        ),
        (["optimizer.patterns=3"], "optimizer.patterns", "a table, got 3."),
        ([f"optimizer.patterns.{NORMS}=3"], f"optimizer.patterns.{NORMS}", "a table, got 3."),
        (
            [f"optimizer.patterns.{NORMS}={{}}"],
            f"optimizer.patterns.{NORMS}",
            "keys that differ for what it matches, got none. Set one: lr = 1e-4.",
        ),
        ([f"optimizer.patterns.{NORMS}.lr=x"], f"optimizer.patterns.{NORMS}.lr", "a number, got 'x'."),
        (
            ['modules.vision.optimizer.patterns."norm*".weight_decai=0'],
            'modules.vision.optimizer.patterns."norm*".weight_decai',
            "a known key, got an unknown one. Did you mean 'weight_decay'?",
        ),
        (
            [f"optimizer.patterns.{NORMS}.betas=[1, 2]"],
            f"optimizer.patterns.{NORMS}.betas",
            "two numbers from 0 to below 1, got (1.0, 2.0).",
        ),
        (
            [f'optimizer.patterns.{NORMS}={{lr_schedule = "cosine", lr_min = 1}}'],
            f"optimizer.patterns.{NORMS}.lr_min",
            "at most lr = 0.001, got 1.0. Set it lower, or lr higher.",
        ),
        (
            [f"optimizer.patterns.{NORMS}.clip=1"],
            f"optimizer.patterns.{NORMS}.clip",
            (
                "a key that a pattern can have for itself, got clip, which is one for the whole model. Set "
                "optimizer.clip, or that of its clip group: optimizer.clip_groups.<clip group>."
            ),
        ),
        (
            [f"optimizer.patterns.{NORMS}.patterns={{}}"],
            f"optimizer.patterns.{NORMS}.patterns",
            "a key that a pattern can have, got patterns inside a pattern. Write them in optimizer.patterns or ",
        ),
        (
            [f"optimizer.patterns.{NORMS}.plugin=adam"],
            f"optimizer.patterns.{NORMS}.plugin",
            "an installed optimizer (adamw",
        ),
        (
            [f'optimizer.patterns.{NORMS}={{plugin = "still", betas = [0.5, 0.5]}}'],
            f"optimizer.patterns.{NORMS}.betas",
            "a key of optimizer 'still', got a key of 'adamw'",
        ),
        (
            ["modules.vision.optimizer.plugin=still", "modules.vision.optimizer.weight_decay=0.5"],
            "modules.vision.optimizer.weight_decay",
            "a key of optimizer 'still', got a key of 'adamw'",
        ),
        (
            ["modules.vision.optimizer.plugin=still", 'modules.vision.optimizer.patterns."norm*".spread=2'],
            'modules.vision.optimizer.patterns."norm*".spread',
            (
                "a key that a pattern can have, got spread, which all parameters of a module have in common. Set "
                "modules.vision.optimizer.spread."
            ),
        ),
        (
            [f'optimizer.patterns.{NORMS}={{plugin = "still", spread = 2}}'],
            f"optimizer.patterns.{NORMS}.spread",
            (
                "a key that a pattern can have, got spread, which all parameters of a module have in common. Set "
                "modules.vision.optimizer.plugin to one that has it, such as 'still', and "
                "modules.vision.optimizer.spread."
            ),
        ),
        (
            ["optimizer.clip=1", "optimizer.clip_groups.ends=0.5"],
            "optimizer.clip_groups.ends",
            "the name of a clip group that anything trained is in, got 'ends'. Set clip_group in the table of a module",
        ),
        (
            ["optimizer.clip=1", "optimizer.clip_groups.ens=1", "modules.vision.optimizer.clip_group=ends"],
            "optimizer.clip_groups.ens",
            "the name of a clip group that anything trained is in, got 'ens'. Did you mean 'ends'?",
        ),
        (
            ["optimizer.clip_groups.vision=1"],
            "optimizer.clip_groups.vision",
            "the name of a clip group that anything trained is in, got 'vision'. Set optimizer.clip_by = 'module' to ",
        ),
        (
            ["optimizer.clip_groups.vision=1", "optimizer.clip_by=module", "modules.vision.frozen=true"],
            "optimizer.clip_groups.vision",
            "the name of a clip group that anything trained is in, got 'vision'. Nothing of it is trained.",
        ),
        (
            ["optimizer.clip_groups.ends=inf", "modules.vision.optimizer.clip_group=ends"],
            "optimizer.clip_groups.ends",
            "a finite number of 0 or more, got inf. 0 clips nothing.",
        ),
        (
            ["optimizer.clip_groups.ends=0", "modules.vision.optimizer.clip_group=ends"],
            "modules.vision.optimizer.clip_group",
            "nothing, as nothing is clipped: optimizer.clip is 0, got 'ends'. Set optimizer.clip or optimizer.clip_gro",
        ),
        (
            ["modules.vision.optimizer.clip_groups.ends=1"],
            "modules.vision.optimizer.clip_groups",
            "a key that a module can have for itself, got clip_groups, which is one for the whole model. Set optimizer",
        ),
        (
            ["modules.vision.optimizer.lr_min=1e-5"],
            "modules.vision.optimizer.lr_min",
            "0, as lr_schedule 'constant' never falls, got 1e-05. Leave it out, or set lr_schedule to linear or cosine",
        ),
        (
            [*COSINE, f"optimizer.patterns.{NORMS}={{lr_schedule = 'constant', lr_decay_steps = 5}}"],
            f"optimizer.patterns.{NORMS}.lr_decay_steps",
            "0, as lr_schedule 'constant' never falls, got 5. Leave it out, or set lr_schedule to linear or cosine.",
        ),
        (
            [*COSINE, "modules.vision.optimizer.lr=1e-5"],
            "modules.vision.optimizer.lr_min",
            "at most lr = 1e-05, got 0.0001, inherited from optimizer. Set it lower, or lr higher.",
        ),
        (
            [*COSINE, "modules.vision.optimizer.lr_min=1e-3", f"optimizer.patterns.{NORMS}.lr=1e-5"],
            f"optimizer.patterns.{NORMS}.lr_min",
            "at most lr = 1e-05, got 0.001, inherited from modules.vision.optimizer. Set it lower, or lr higher.",
        ),
        (
            [*COSINE, "optimizer.lr_decay_steps=5", "modules.vision.optimizer.lr_warmup_steps=6"],
            "modules.vision.optimizer.lr_decay_steps",
            "more than lr_warmup_steps = 6, got 5, inherited from optimizer. It is the step at which lr_min is reached",
        ),
        (
            ["optimizer.lr_warmup_steps=10", "modules.vision.optimizer.lr_schedule=linear"],
            "modules.vision.optimizer.lr_warmup_steps",
            "fewer than run.steps = 10, as lr_min is reached at run.steps, got 10, inherited from optimizer. Set it lo",
        ),
        (
            [*COSINE, "optimizer.lr_warmup_steps=4", "modules.vision.optimizer.lr_stable_steps=6"],
            "modules.vision.optimizer.lr_stable_steps",
            "fewer than run.steps - lr_warmup_steps = 6, as lr_min is reached at run.steps, got 6. Set it lower, or se",
        ),
        (
            ["modules.vision.frozen=true", "modules.vision.optimizer.lr=1"],
            "modules.vision.optimizer.lr",
            "no key but plugin, as nothing of the module is trained, got lr. Remove it, or take something out of ",
        ),
        (
            ["modules.vision.frozen=['encoder', 'projector']", 'modules.vision.optimizer.patterns."norm*".lr=1'],
            "modules.vision.optimizer.patterns",
            "no key but plugin, as nothing of the module is trained, got patterns. Remove it, or take something out of",
        ),
        (
            ["modules.vision.frozen=true", "modules.vision.optimizer={plugin = 'still', slowness = 1}"],
            "modules.vision.optimizer.slowness",
            "no key but plugin or spread, as nothing of the module is trained, got slowness. Remove it, or take someth",
        ),
        (
            ["optimizer.plugin=distributed", "optimizer.shard=full", "optimizer.shard_lanes=1"],
            "optimizer.shard_lanes",
            (
                "2 or more data lanes, or 0 for all of a module's, as shard is 'full', got 1, by which each lane "
                "holds a whole copy. Set shard = 'optimizer' for copies, or shard_lanes = 0."
            ),
        ),
        (
            ["optimizer.plugin=distributed", "optimizer.shard_lanes=1", "modules.vision.optimizer.shard=gradients"],
            "modules.vision.optimizer.shard_lanes",
            (
                "2 or more data lanes, or 0 for all of a module's, as shard is 'gradients', got 1, by which each "
                "lane holds a whole copy, inherited from optimizer. Set shard = "
            ),
        ),
    ],
)
def test_wrong_optimizer_settings_are_refused_by_path(file: Path, overrides: list[str], where: str, text: str) -> None:
    """A key of another plugin by that plugin's name, a pattern that can match nothing with the modules there are."""
    with pytest.raises(ConfigError) as caught:
        resolved(file, *overrides)
    assert str(caught.value).startswith(f"{where}: expected {text}")


@pytest.mark.parametrize("command", ["train", "check"])
def test_patterns_that_match_no_parameter_are_refused_before_launch(
    file: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names are known without building anything for real, those of stages on other ranks too."""
    assert run([command, str(file), 'modules.vision.optimizer.patterns."*.atention.*".lr=1']) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        'mimo: modules.vision.optimizer.patterns."*.atention.*": expected a pattern that matches trained parameters of '
        "vision, by their path inside it, got one that matches none. The closest are layers.0.attention.query.weight, "
        "layers.0.attention.query.bias, layers.0.attention.key.weight.\n"
    )
    assert run([command, str(file), "modules.vision.frozen=true", 'optimizer.patterns."vision.*".lr=1']) == 2
    assert "got one that matches frozen parameters alone." in capsys.readouterr().err
    assert not (file.parent / "run").exists()


def test_check_shows_what_follows_which_pattern(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With how many parameters and numbers; without patterns there is no such table."""
    overrides = (
        "optimizer.clip=1",
        "optimizer.clip_groups.norms=0.25",
        f'optimizer.patterns.{NORMS}={{lr = 0.5, clip_group = "norms"}}',
        'modules.language.optimizer.patterns."[!l]*".lr=0.25',
    )
    assert run(["check", str(file), *overrides]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = next(index for index, line in enumerate(lines) if "elements" in line)
    assert lines[start + 1 : start + 6] == [
        ["vision", 'optimizer.patterns."*.norm*"', "adamw", "0.5", "norms", "0.25", "2", "32"],
        ["vision", "no", "pattern", "adamw", "0.001", "-", "1", "21", "14,528"],
        ["language", 'modules.language.optimizer.patterns."[!l]*"', "adamw", "0.25", "-", "1", "3", "8,272"],
        ["language", "no", "pattern", "adamw", "0.001", "-", "1", "9", "1,824"],
        [],
    ]
    assert run(["check", str(file)]) == 0
    assert "no pattern" not in capsys.readouterr().out
