"""Every setting of a run, one class for each section of the file; what a plugin sets is beside them as plain data.

A 0 that is said to follow stays 0 here: `mimo.trainer.resolving.resolve` works out what follows from what.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import attrs

from mimo.data import MAX_BATCH_SAMPLES, NEWEST_ORDER
from mimo.hooks import ConfigError, above_zero, at_least, at_most, from_zero
from mimo.model import MAX_LAYERS, Lora
from mimo.optimizer import Precision
from mimo.topology import MAX_RANKS, Ranks
from mimo.trainer.config.fields import (
    not_empty,
    one_folder,
    own_keys,
    rest,
    setting,
)
from mimo.trainer.config.rerun_settings import RerunSettings

Balance: TypeAlias = Literal["cost", "count"]
"""How the samples of a step are placed on microbatches and lanes, and their items on lanes."""
MAX_STEPS = 10**12
MAX_BATCH = 1 << 18
"""Of samples of a step."""
MAX_PLACED = 1 << 16
"""Of samples of a step that are placed by cost."""
MAX_TOKENS = 1 << 24
"""Of a sample."""
MAX_STEP_TOKENS = 1 << 32
"""Of a step."""
LOGITS_BYTES = 1 << 30
"""Of logits in fp32 that a loss holds at a time on a rank, unless ``loss_rows`` says how many."""
MAX_MODULES = 64
MAX_TOP_K = 1 << 12
"""Of ids of a row that a teacher sends."""
MAX_WORKERS = 256
MAX_AHEAD = 1 << 10
MAX_TIMEOUT = 10**9
"""Seconds, some thirty years: what no clock of a system overflows by."""
LANGUAGE = "language"
"""Name of the module that every model has."""


def _instead(instance: RunSettings, attribute: attrs.Attribute[int], value: int) -> None:
    """Have a step's samples be limited by a number of them or by tokens, and its microbatches likewise."""
    if not value and not instance.global_batch:
        raise ConfigError("global_batch", expected="1 or more", got="0", fix="Set it, or run.batch_tokens.")
    if value and instance.global_batch:
        raise ConfigError(
            attribute.name,
            expected="0 beside global_batch, as a step takes so many samples or so many tokens",
            got=repr(value),
            fix="Leave one of them out.",
        )


def _beside_batch_tokens(instance: RunSettings, attribute: attrs.Attribute[int], value: int) -> None:
    if value and not instance.batch_tokens:
        raise ConfigError(
            attribute.name, expected="0 where batch_tokens is", got=repr(value), fix="Set micro_batch instead."
        )
    if instance.batch_tokens and not 0 < value <= instance.batch_tokens:
        raise ConfigError(
            attribute.name,
            expected=f"from 1 to batch_tokens = {instance.batch_tokens}, tokens that a language lane takes at once",
            got=repr(value),
        )


def _beside_compile(instance: RunSettings, attribute: attrs.Attribute[str], value: str) -> None:
    if value != attribute.default and not instance.compile:
        raise ConfigError(
            attribute.name,
            expected=f"{attribute.default!r} where compile is false",
            got=repr(value),
            fix="Set run.compile to true, or leave it out.",
        )


@attrs.frozen(kw_only=True)
class RunSettings:
    """What is run, how long, on what, and where its files go."""

    name: str = setting("names the run in messages and its directory", validator=[one_folder])
    seed: int = setting(
        "initial weights and the order of samples follow from it alone", default=0, validator=[at_least(0)]
    )
    steps: int = setting("updates of the weights", validator=[at_least(1), at_most(MAX_STEPS)])
    global_batch: int = setting(
        "samples a step, over all lanes; 0: as batch_tokens says",
        default=0,
        validator=[at_least(0), at_most(MAX_BATCH)],
    )
    micro_batch: int = setting(
        "samples of a microbatch for each language lane; with batch_tokens, of an evaluation",
        default=1,
        validator=[at_least(1), at_most(MAX_BATCH)],
    )
    batch_tokens: int = setting(
        "tokens a step at most, over all lanes, instead of global_batch",
        default=0,
        validator=[at_least(0), at_most(MAX_STEP_TOKENS), _instead],
    )
    micro_tokens: int = setting(
        "tokens of a microbatch for each language lane at most, with batch_tokens",
        default=0,
        validator=[at_least(0), _beside_batch_tokens],
    )
    precision: Precision = setting(  # noqa: RUF009 -- declares a field, as all do
        "what layers compute in: fp32, bf16 or fp16; weights stay fp32", default="fp32"
    )
    tf32: bool = setting("on GPUs, products in fp32 may read TF32, 10 bits of each fraction", default=False)
    deterministic: bool = setting(
        "the same settings give the same weights to the bit; an operation that cannot ends the run", default=False
    )
    compile: bool = setting(
        "torch.compile compiles the layers of modules, one by one, for training and evaluation", default=False
    )
    compile_backend: Literal["inductor", "aot_eager"] = setting(
        "with what: inductor makes kernels, aot_eager none, to find where an error comes from",
        default="inductor",
        validator=[_beside_compile],
    )
    loss_scale: float = setting(
        "what fp16 multiplies the loss by at first; 0: 65536", default=0.0, validator=[at_least(0)]
    )
    loss_scale_steps: int = setting(
        "steps without an overflow after which that doubles; 0: 2000", default=0, validator=[at_least(0)]
    )
    peak_tflops: float = setting(
        "10^12 operations a second that a rank can do at most, for mfu; 0: as known of the GPU, or unknown",
        default=0.0,
        validator=[from_zero()],
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto, cpu or cuda; auto: GPUs, where there are any", default="auto"
    )
    directory: str = setting("run directory; empty: runs/<name>", default="")
    world: int = setting(
        "processes; 0: highest rank + 1, gaps idle", default=0, validator=[at_least(0), at_most(MAX_RANKS)]
    )
    timeout: float = setting(
        "seconds without progress on any rank after which the run ends",
        default=600.0,
        validator=[at_least(1), at_most(MAX_TIMEOUT)],
    )
    evaluation_batch: int = setting(
        "samples of one evaluation batch; 0: global_batch, or one microbatch",
        default=0,
        validator=[at_least(0), at_most(MAX_BATCH)],
    )
    evaluation_interval: int = setting(
        "steps between evaluations; 0: only at the end", default=0, validator=[at_least(0)]
    )


@attrs.frozen(kw_only=True)
class DataSettings:
    """The dataset."""

    plugin: str = setting("dataset plugin; its own keys stand in this table too", validator=[not_empty])
    max_tokens: int = setting(
        "most tokens of a sample; longer ones are cut, never inside an item's rows, or as longer says",
        default=1024,
        validator=[at_least(1), at_most(MAX_TOKENS)],
    )
    longer: Literal["cut", "drop", "refuse"] = setting(
        "longer samples are cut, or dropped, with run.batch_tokens, or end the run", default="cut"
    )
    order: int = setting(
        "version of the order of samples, 1 or 2; 0: the newest, and of a resumed run its own",
        default=0,
        validator=[at_least(0), at_most(NEWEST_ORDER)],
    )
    workers: int = setting(
        "threads of each rank that read and decode beside the step; 0: the step does it itself",
        default=2,
        validator=[at_least(0), at_most(MAX_WORKERS)],
    )
    ahead: int = setting(
        "steps that these are ahead of the one that runs", default=2, validator=[at_least(0), at_most(MAX_AHEAD)]
    )
    ahead_bytes: int = setting(
        "bytes of decoded items that wait on a rank at most, but for one that is larger",
        default=1 << 30,
        validator=[at_least(0)],
    )
    hand_on: int = setting(
        "pixels or frames of a microbatch from which ranks that encode the same items decode each once; 0: any",
        default=1 << 18,
        validator=[at_least(0)],
    )
    max_broken: float = setting(
        "share of the samples whose items may be broken, which then count for nothing; 0: the first ends the run",
        default=0.0,
        validator=[at_least(0), at_most(1)],
    )
    balance: Literal["auto", "cost", "count"] = setting(
        "by what samples and items are spread over lanes: cost or count; auto: cost, or as in a run that is resumed",
        default="auto",
    )
    broken: Literal["refuse", "skip"] = setting(
        "samples that `mimo data index` found broken: refuse to run, or skip them: each keeps its place, at weight 0",
        default="refuse",
    )
    config: Mapping[str, Any] = rest("the plugin's keys")


@attrs.frozen(kw_only=True)
class TokenizerSettings:
    """The tokenizer."""

    plugin: str = setting("tokenizer plugin; its own keys stand in this table too", default="byte")
    config: Mapping[str, Any] = rest("the plugin's keys")


def _sends_something(instance: Distil, attribute: attrs.Attribute[int], value: int) -> None:
    """Have a teacher send ids, hidden rows or both."""
    if not value and not instance.compares_hidden:
        raise ConfigError(
            attribute.name,
            expected='1 or more, or 0 beside hidden = "mse" or "cosine"',
            got="0, so that it would say nothing",
        )


def _of_ids(instance: Distil, attribute: attrs.Attribute[float], value: float) -> None:
    if value != attribute.default and not instance.top_k:
        raise ConfigError(
            attribute.name,
            expected=f"{attribute.default} beside top_k = 0, as no logits are compared",
            got=repr(value),
            fix="Leave it out.",
        )


def _of_hidden(instance: Distil, attribute: attrs.Attribute[float], value: float) -> None:
    if value != attribute.default and not instance.compares_hidden:
        raise ConfigError(
            attribute.name,
            expected=f'{attribute.default} beside hidden = "none", as no hidden rows are compared',
            got=repr(value),
            fix='Leave it out, or set hidden to "mse" or "cosine".',
        )


@attrs.frozen(kw_only=True)
class Distil:
    """How a frozen language model teaches the one named language."""

    top_k: int = setting(
        "likeliest ids of each row that it sends, all others count as one; 0: none, beside hidden",
        default=32,
        validator=[at_least(0), at_most(MAX_TOP_K), _sends_something],
    )
    temperature: float = setting(
        "by which both models' logits are divided", default=1.0, validator=[above_zero(), _of_ids]
    )
    hidden: Literal["none", "mse", "cosine"] = setting(
        "how hidden rows of both models are compared, by squared differences or angles: none, mse or cosine",
        default="none",
    )
    hidden_weight: float = setting(
        "of the loss by hidden rows; 0: only reported", default=1.0, validator=[from_zero(), _of_hidden]
    )

    @property
    def compares_hidden(self) -> bool:
        """Whether it sends hidden rows."""
        return self.hidden != "none"


@attrs.frozen(kw_only=True)
class ModuleSettings:
    """One module: an encoder with its projector, the language model, a teacher of it, or a generator."""

    plugin: str = setting(
        "encoder plugin; for the module named language and teachers a language model, with fed_by a generator",
        validator=[not_empty],
    )
    ranks: Ranks = setting('its ranks: "0-3", "0,2,5-7" or a list')  # noqa: RUF009 -- declares a field, as all do
    pp: int = setting("pipeline ranks", default=1)
    dp: int = setting("data lanes; 0: what the ranks leave", default=0, validator=[at_least(0)])
    cp: int = setting("context ranks, over which the rows of each sample are split", default=1)
    tp: int = setting("tensor ranks", default=1)
    ep: int = setting("ranks over which experts are spread, of the same dp x cp x tp", default=1)
    etp: int = setting("tensor ranks of each expert, likewise", default=1)
    chunks: int = setting("pipeline stages on each rank", default=1, validator=[at_least(1), at_most(MAX_LAYERS)])
    sequence_parallel: bool = setting("split rows over the tensor ranks between layers", default=False)
    batch_factor: int = setting("microbatches that one pass of an encoder serves", default=1, validator=[at_least(1)])
    prefetch: bool = setting(
        "work on the next step during this one; for what is frozen, but for an encoder's projector", default=False
    )
    recompute: Literal["none", "selective", "full"] = setting(
        "activations that backward recomputes to save memory: none, selective or full", default="none"
    )
    loss_rows: int = setting(
        "rows of which the loss holds logits at a time, made again in backward if there are more; 0: as 1 GiB holds",
        default=0,
        validator=[at_least(0)],
    )
    round_rows: int = setting(
        "rows of which a microbatch of the language model has a multiple on each rank, padded at the end",
        default=1,
        validator=[at_least(1)],
    )
    frozen: bool | tuple[str, ...] = setting(
        "what is not trained: true for all, or a list of parts and patterns of parameter names", default=()
    )
    lora: Lora | None = setting(  # noqa: RUF009 -- declares a field, as all do
        "linears that LoRA adapts", default=None
    )
    ignore: tuple[str, ...] = setting(
        'keys of a published config.json that import-hf sets aside: ["attention_dropout"]', default=()
    )
    distil: Distil | None = setting(  # noqa: RUF009 -- declares a field, as all do
        "makes the module a teacher: a frozen language model that the one named language learns from", default=None
    )
    loss_weight: float = setting(
        "of the loss by labels, for the module named language, or of a teacher's or generator's; 0: only reported",
        default=1.0,
        validator=[from_zero()],
    )
    feeds: str | tuple[str, ...] = setting(
        "what takes an encoder's rows: language, a teacher, a generator, or a list of generators and language",
        default=LANGUAGE,
    )
    fed_by: str = setting("makes the module a generator, of items from the rows of language", default="")
    modality: str = setting("what an encoder reads or a generator makes; empty: the plugin's", default="")
    config: Mapping[str, Any] = setting("settings of the plugin", default=attrs.Factory(dict))
    optimizer: Mapping[str, Any] = setting(
        "keys of [optimizer] that differ for this module", default=attrs.Factory(dict)
    )

    @property
    def takers(self) -> tuple[str, ...]:
        """The modules that take its rows, if it is no generator."""
        return (self.feeds,) if isinstance(self.feeds, str) else self.feeds


@attrs.frozen(kw_only=True)
class OptimizerSettings:
    """The optimizer, its learning rate, and clipping."""

    plugin: str = setting("optimizer plugin; its own keys stand in this table too", default="adamw")
    lr: float = setting("learning rate", default=1e-3, validator=[at_least(0)])
    lr_schedule: Literal["constant", "linear", "cosine"] = setting("constant, linear or cosine", default="constant")
    lr_warmup_steps: int = setting("steps over which it climbs to lr", default=0, validator=[at_least(0)])
    lr_stable_steps: int = setting("steps at lr before it falls", default=0, validator=[at_least(0)])
    lr_decay_steps: int = setting("step at which it reaches lr_min; 0: run.steps", default=0, validator=[at_least(0)])
    lr_min: float = setting("where linear and cosine end", default=0.0, validator=[at_least(0)])
    clip: float = setting("largest norm of the gradients of a clip group; 0: off", default=0.0, validator=[from_zero()])
    clip_by: Literal["global", "module"] = setting("one clip group over all, or one for each module", default="global")
    clip_group: str = setting("name of the clip group; of modules and patterns, empty: by clip_by", default="")
    clip_groups: Mapping[str, float] = setting(
        "largest norms of clip groups that have their own, by name", default=attrs.Factory(dict)
    )
    patterns: Mapping[str, Mapping[str, Any]] = setting(
        "by pattern of names, keys that differ for the parameters that match", default=attrs.Factory(dict)
    )
    config: Mapping[str, Any] = rest("the plugin's keys")

    def clip_of(self, group: str) -> float:
        """Return the largest norm of a clip group; 0 if it has none."""
        return self.clip_groups.get(group, self.clip)


@attrs.frozen(kw_only=True)
class ScheduleSettings:
    """The order in which microbatches pass the modules."""

    plugin: str = setting("schedule plugin; its own keys stand in this table too", default="1f1b")
    profile: str = setting("what `mimo profile` measured, to weigh orders by; empty: a formula", default="")
    config: Mapping[str, Any] = rest("the plugin's keys")


def _beside_keep(instance: CheckpointSettings, attribute: attrs.Attribute[int], value: int) -> None:
    if value and not instance.keep:
        raise ConfigError(attribute.name, expected="0 where keep is 0, which keeps all", got=repr(value))


def _beside_asynchronous(instance: CheckpointSettings, attribute: attrs.Attribute[str], value: str) -> None:
    if value == "skip" and not instance.asynchronous:
        raise ConfigError(
            attribute.name,
            expected='"wait" where asynchronous is false, since nothing is written beside training',
            got=repr(value),
        )


@attrs.frozen(kw_only=True)
class CheckpointSettings:
    """When checkpoints are saved, and what is loaded before the first step."""

    interval: int = setting("steps between checkpoints; 0: only at the end", default=0, validator=[at_least(0)])
    keep: int = setting("number of newest checkpoints to keep; 0: all", default=0, validator=[at_least(0)])
    keep_every: int = setting(
        "also keep checkpoints of steps that are multiples of it; 0: none",
        default=0,
        validator=[at_least(0), _beside_keep],
    )
    asynchronous: bool = setting("write during training, from a copy in host memory", default=True)
    when_busy: Literal["wait", "skip"] = setting(
        "wait or skip, when the one before is still being written", default="wait", validator=[_beside_asynchronous]
    )
    optimizer: bool = setting(
        "save optimizer states too; false: weights alone, and a resumed run starts with new states", default=True
    )
    frozen: bool = setting("save frozen weights too; false: refer to the checkpoint that they came from", default=True)
    assume_constant_structure: bool = setting(
        "plan a save again only when the saved tensors have changed", default=True
    )
    load: str = setting(
        "none; latest, to resume the run in the directory; or a checkpoint's folder",
        default="none",
        validator=[not_empty],
    )


@attrs.frozen(kw_only=True)
class LoadSettings:
    """What is loaded from the checkpoint that a run starts from; missing or unused names are refused unless listed."""

    finetune: str = setting("a checkpoint or run whose weights alone a new run starts from; empty: none", default="")
    optimizer: bool = setting("optimizer states; false: they start new", default=True)
    rng: bool = setting("seed and plugins' generators; false: run.seed, and new generators", default=True)
    schedule: bool = setting("position in the learning-rate schedules; false: they start again", default=True)
    data: bool = setting("position in the data; false: the data start again", default=True)
    may_lack: tuple[str, ...] = setting(
        "patterns of names that the checkpoint may lack; they keep their initial values", default=()
    )
    may_leave: tuple[str, ...] = setting("patterns of names in the checkpoint that may stay unused", default=())
    rename: Mapping[str, str] = setting(
        "prefixes of names here, and those that the checkpoint has instead", default=attrs.Factory(dict)
    )


def _steps(_instance: LoggingSettings, attribute: attrs.Attribute[int | str], value: int | str) -> None:
    if value != "":
        try:
            steps_of(value)
        except ValueError:
            raise ConfigError(
                attribute.name,
                expected='one step, or the first and the last, as "100-102", counted from 1',
                got=repr(value),
                fix="Leave it out to profile nothing.",
            ) from None


def steps_of(named: int | str) -> range:
    """Return the steps that ``logging.profile`` names: ``100-102``, or one.

    Raises:
        ValueError: it names none.
    """
    text = str(named)
    if not re.fullmatch(r"[0-9]{1,12}(-[0-9]{1,12})?", text):
        raise ValueError(text)
    first, _, last = text.partition("-")
    steps = range(int(first), int(last or first) + 1)
    if not steps or not steps[0]:
        raise ValueError(text)
    return steps


@attrs.frozen(kw_only=True)
class LoggingSettings:
    """What is written beside metrics.jsonl."""

    console: bool = setting("progress on the terminal", default=True)
    tensorboard: bool = setting("event files in <run directory>/tensorboard", default=False)
    interval: int = setting("steps between lines on the terminal", default=10, validator=[at_least(1)])
    edges: bool = setting("rows and bytes sent on each edge by each rank, in metrics.jsonl", default=False)
    zero_gradients: bool = setting("count of gradient elements that are exactly zero, in metrics.jsonl", default=False)
    memory: bool = setting(
        "bytes held by kind and module beside those estimated, in metrics.jsonl: steps 2, 4, 8, 16 … and the last",
        default=False,
    )
    profile: int | str = setting(
        'steps, as 100 or "100-102", of which each rank writes what torch\'s profiler sees to <run directory>/profiles',
        default="",
        validator=[_steps],
    )
    trace: bool = setting(
        "timelines of ranks beside the simulated ones, in <run directory>/traces: steps 2, 4, 8, 16 … and the last",
        default=False,
    )


@attrs.frozen(kw_only=True)
class Settings:
    """The whole file."""

    run: RunSettings
    data: DataSettings
    tokenizer: TokenizerSettings = attrs.field(factory=TokenizerSettings)
    modules: Mapping[str, ModuleSettings]
    optimizer: OptimizerSettings = attrs.field(factory=OptimizerSettings)
    schedule: ScheduleSettings = attrs.field(factory=ScheduleSettings)
    checkpoint: CheckpointSettings = attrs.field(factory=CheckpointSettings)
    load: LoadSettings = attrs.field(factory=LoadSettings)
    rerun: RerunSettings = attrs.field(factory=RerunSettings)
    logging: LoggingSettings = attrs.field(factory=LoggingSettings)

    @property
    def directory(self) -> str:
        """The run directory."""
        return self.run.directory or f"runs/{self.run.name}"

    @property
    def most_samples(self) -> int:
        """How many samples a step may have."""
        return self.run.global_batch or min(self.run.batch_tokens, MAX_BATCH_SAMPLES)

    def evaluation_batch(self, lanes: int) -> int:
        """Return the samples of one evaluation batch with so many language lanes."""
        return self.run.evaluation_batch or self.run.global_batch or self.run.micro_batch * lanes


GLOBAL_ONLY = frozenset({"clip", "clip_by", "clip_groups"})
"""Keys of [optimizer] that no module can have for itself."""

SHARED_OPTIMIZER_KEYS = own_keys(OptimizerSettings)
"""Keys of [optimizer] that are not the plugin's."""
