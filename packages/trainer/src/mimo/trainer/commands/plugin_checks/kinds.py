"""What can be checked of any plugin in one process: its settings, and for each kind what a run relies on.

Each promise is a function that raises where a plugin breaks it; its docstring is the promise.
"""

from __future__ import annotations

import copy
import json
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import attrs

from mimo.data import DatasetSpec, LimitedTokenizer, SplitName, Tokenizer, TokenizerSpec, ends_of, weights_of
from mimo.hooks import ConfigError, EvaluationInfo, IndexInfo, PlanError, RunInfo, StepInfo, discover, lifecycle
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.settings import MAX_TOKENS
from mimo.trainer.config.structure import structure
from mimo.trainer.config.toml import make_settings
from mimo.trainer.resolving.dataset import DatasetChoice

if TYPE_CHECKING:
    from mimo.model.testing import Verdict
    from mimo.schedule import ScheduleSpec

MODALITIES = ("image", "audio")
SAMPLES = 8
"""So many samples of a dataset are looked at, from its first to its last."""
_TEXT = "to be or not to be"
_SETTINGS: Mapping[str, Any] = {
    "run": {"name": "check", "steps": 1, "global_batch": 1},
    "data": {"plugin": "mock", "samples": 4, "text": 4, "images": 0},
    "modules": {
        "language": {
            "plugin": "decoder",
            "ranks": "0",
            "config": {"hidden": 8, "layers": 1, "heads": 1, "intermediate": 8},
        }
    },
}
"""Of the run in which lifecycle plugins are called."""
_SENSELESS: Mapping[type, tuple[Any, ...]] = {float: (math.nan, -math.inf), int: (-(10**30),)}


class SkippedError(Exception):
    """A promise can't be looked at; its text says why."""


def look(check: str, promise: Callable[..., None], *given: Any) -> Verdict:
    """Return whether a promise is kept."""
    from mimo.model.testing import Verdict

    verdict = Verdict(check=check, promise=(promise.__doc__ or check).rstrip("."))
    try:
        promise(*given)
    except SkippedError as skipped:
        return attrs.evolve(verdict, skipped=str(skipped))
    except AssertionError as broken:
        return attrs.evolve(verdict, broken=str(broken) or "it isn't so")
    except Exception as error:  # noqa: BLE001 -- whatever a third-party plugin raises
        return attrs.evolve(verdict, broken=f"{type(error).__name__}: {error}")
    return verdict


def check_settings(table: Mapping[str, Any], config: type) -> Iterator[Verdict]:
    """Yield verdicts on the settings of any plugin that has some."""
    yield look("defaults", _keeps_defaults, table, config)
    yield look("limits", _keeps_limits, table, config)


def _keeps_defaults(table: Mapping[str, Any], config: type) -> None:
    """Settings are an attrs class with a default for each that need not be given."""
    assert attrs.has(config), f"{config.__name__} is no attrs class"
    structure(table, config, "config")


def _keeps_limits(table: Mapping[str, Any], config: type) -> None:
    """What is no number (nan), or below all that make sense, is refused by a ConfigError."""
    for key, kind in typing.get_type_hints(config).items():
        for value in _SENSELESS.get(kind, ()):
            try:
                structure({**table, key: value}, config, "config")
            except ConfigError:
                continue
            raise AssertionError(f"{key} = {value} is taken")


def check_tokenizer(spec: TokenizerSpec, config: Any) -> Iterator[Verdict]:
    """Yield verdicts on a tokenizer."""
    tokenizer = spec.build(config, MODALITIES)
    yield look("ids", _has_ids, tokenizer)
    yield look("empty", _takes_empty_text, tokenizer)
    yield look("round trip", _returns_text, tokenizer)


def _has_ids(tokenizer: Tokenizer) -> None:
    """The end and each placeholder are ids of their own below the vocabulary's size."""
    ids = [tokenizer.end, *map(tokenizer.placeholder, MODALITIES)]
    assert len(set(ids)) == len(ids), f"the end and the placeholders are {ids}"
    assert all(0 <= number < tokenizer.vocabulary for number in ids), f"{ids} of {tokenizer.vocabulary}"


def _takes_empty_text(tokenizer: Tokenizer) -> None:
    """Empty text has no ids, and no ids are empty text."""
    assert list(tokenizer.encode("")) == [], f"encode('') is {tokenizer.encode('')}"
    assert not tokenizer.decode([]), f"decode([]) is {tokenizer.decode([])!r}"


def _returns_text(tokenizer: Tokenizer) -> None:
    """A text comes back from its ids, without the end."""
    try:
        ids = list(tokenizer.encode(_TEXT))
    except ValueError as error:
        raise SkippedError(f"it doesn't know {_TEXT!r}: {error}") from error
    assert all(0 <= number < tokenizer.vocabulary for number in ids), f"{ids} of {tokenizer.vocabulary}"
    assert tokenizer.decode([*ids, tokenizer.end]).strip() == _TEXT, f"got {tokenizer.decode(ids)!r}"


def check_dataset(spec: DatasetSpec, config: Any) -> Iterator[Verdict]:
    """Yield verdicts on a dataset, opened with a tokenizer of bytes."""
    from mimo.data import TOKENIZERS

    byte = discover(TOKENIZERS).find("byte", "--check")
    tokenizer = byte.build(byte.config(), MODALITIES)
    try:
        _open(spec, config, tokenizer, "train")
    except ConfigError:
        raise  # its settings are wrong, which is no fault of the plugin
    except Exception:  # noqa: BLE001, S110 -- each of the promises says so
        pass
    yield look("samples", _has_samples, spec, config, tokenizer)
    yield look("items", _has_items, spec, config, tokenizer)
    yield look("again", _answers_alike, spec, config, tokenizer)
    yield look("evaluation", _opens_evaluation, spec, config, tokenizer)


def _open(spec: DatasetSpec, config: Any, tokenizer: Tokenizer, split: SplitName) -> Any:
    """Return a split, as a run opens it."""
    limited = LimitedTokenizer(inner=tokenizer, max_tokens=MAX_TOKENS, modalities=MODALITIES)
    return DatasetChoice.of(spec, config, "data", find_installed).open(limited, split)


def _opened(spec: DatasetSpec, config: Any, tokenizer: Tokenizer) -> tuple[Any, list[int]]:
    """Return the split to train with, and some of its samples."""
    dataset = _open(spec, config, tokenizer, "train")
    assert dataset is not None, "open(config, tokenizer, 'train') is None"
    assert len(dataset) > 0, "it is empty"
    return dataset, sorted({at * (len(dataset) - 1) // (SAMPLES - 1) for at in range(SAMPLES)})


def _has_samples(spec: DatasetSpec, config: Any, tokenizer: Tokenizer) -> None:
    """Each sample has ids of the tokenizer, its end, one placeholder for each item, and weights of its ids or none."""
    dataset, samples = _opened(spec, config, tokenizer)
    placeholders = {tokenizer.placeholder(modality): modality for modality in MODALITIES}
    for sample in samples:
        ids, infos = list(dataset.tokens(sample)), list(dataset.infos(sample))
        where = dataset.where(sample)
        assert isinstance(where, str), f"where({sample}) is {where!r}"
        assert ids, f"{where}: no tokens"
        assert all(0 <= number < tokenizer.vocabulary for number in ids), f"{where}: ids that are none, {ids}"
        if ends_of(dataset, sample) is None:  # a conversation ends as its template says
            assert ids[-1] == tokenizer.end, f"{where}: the last id is {ids[-1]}, the end is {tokenizer.end}"
        shown = [placeholders[number] for number in ids if number in placeholders]
        modalities = [info.modality for info in infos]
        for modality in {*shown, *modalities}:
            counts = shown.count(modality), modalities.count(modality)
            assert counts[0] == counts[1], f"{where}: {counts[0]} placeholders and {counts[1]} items of {modality!r}"
        assert all(info.sample == sample for info in infos), f"{where}: items of another sample"
        weights = _weights(dataset, sample)
        assert weights is None or len(weights) == len(ids), f"{where}: {len(weights or ())} weights of {len(ids)} ids"
        assert all(0 <= weight < math.inf for weight in weights or ()), f"{where}: weights that are none, {weights}"


def _weights(dataset: Any, sample: int) -> list[float] | None:
    """Return the weights of a sample's ids, if it has some."""
    weights = weights_of(dataset, sample)
    return None if weights is None else list(weights)


def _has_items(spec: DatasetSpec, config: Any, tokenizer: Tokenizer) -> None:
    """Each item can be read, and an image has the size that was said of it."""
    from PIL import Image

    dataset, samples = _opened(spec, config, tokenizer)
    items = [info for sample in samples for info in dataset.infos(sample)]
    for info in items:
        raw = dataset.raw(info.sample, info.index)
        if isinstance(raw, Image.Image) and info.size:
            size = raw.height, raw.width
            assert tuple(info.size) == size, f"{dataset.where(info.sample)}: {info.size} was said, it is {size}"
    if not items:
        raise SkippedError("samples have no items")


def _answers_alike(spec: DatasetSpec, config: Any, tokenizer: Tokenizer) -> None:
    """Opened once more, as on another rank, it answers the same."""
    (first, samples), (second, _) = (_opened(spec, config, tokenizer) for _ in range(2))
    assert len(first) == len(second), f"{len(first)} samples, then {len(second)}"
    for sample in samples:
        answers = [
            (list(one.tokens(sample)), _weights(one, sample), list(one.infos(sample))) for one in (first, second, first)
        ]
        assert answers[0] == answers[1] == answers[2], f"{first.where(sample)}: {answers[0]}, then {answers[1:]}"


def _opens_evaluation(spec: DatasetSpec, config: Any, tokenizer: Tokenizer) -> None:
    """It has samples that are held out."""
    held_out = _open(spec, config, tokenizer, "evaluation")
    if held_out is None:
        raise SkippedError("there are none")
    assert len(held_out) > 0, "the split is there and empty: open it as None"
    if ends_of(held_out, 0) is None:
        assert list(held_out.tokens(0))[-1] == tokenizer.end, "the last id isn't the end"


def check_schedule(spec: ScheduleSpec, config: Any) -> Iterator[Verdict]:
    """Yield verdicts on a schedule: of graphs that it takes, plans that can't deadlock."""
    from mimo.topology import Grid, Module, ModuleGraph

    for stages, chunks in ((1, 1), (2, 1), (4, 1), (2, 2)):
        grid = Grid(name="language", ranks=range(2, 2 + stages), pp=stages)
        language = Module(grid=grid, trains=(True,) * stages * chunks, chunks=chunks, placement=spec.placement(config))
        for lanes in (0, 2):
            encoder = [Module(grid=Grid(name="vision", ranks=range(lanes), dp=lanes), trains=(True,))] if lanes else []
            arrows = (("vision", "language"),) if encoder else ()
            graph = ModuleGraph(modules=(*encoder, language), arrows=arrows)
            name = f"{stages} ranks of {chunks} stages" + (" behind an encoder" if encoder else "")
            yield look(name, _plans, spec, config, graph)


def _plans(spec: ScheduleSpec, config: Any, graph: Any) -> None:
    """Its plan of a step, and that of an evaluation, end on every rank, whatever is on its way."""
    from mimo.schedule import Costs, check
    from mimo.schedule.testing import emulate

    frozen = attrs.evolve(
        graph, modules=tuple(attrs.evolve(one, trains=(False,) * len(one.trains)) for one in graph.modules)
    )
    for each in (graph, frozen):
        try:
            plan = spec.generate(each, 8, config, Costs.even(each))
        except (ConfigError, PlanError) as refused:
            raise SkippedError(f"refused: {refused}") from refused
        check(plan, each)
        emulate(plan, each, seed=1)


def check_lifecycle(name: str) -> Iterator[Verdict]:
    """Yield verdicts on each lifecycle plugin of a name, from a made-up run of one step."""
    for point in entry_points(group="mimo.lifecycle", name=name):
        yield look("calls", _takes_calls, point)
        yield look("state", _keeps_state, point)


def _takes_calls(point: Any) -> None:
    """Its hooks run through a run of one step, with an evaluation."""
    with TemporaryDirectory() as folder:
        _run(lifecycle(entry_points=[point]), Path(folder))


def _keeps_state(point: Any) -> None:
    """What it adds to a checkpoint is plain data or tensors, and comes back."""
    with TemporaryDirectory() as folder:
        run = _run(first := lifecycle(entry_points=[point]), Path(folder))
        parts = first.state(run)
        if not parts:
            raise SkippedError("it adds nothing")
        saved = {part.name: copy.deepcopy(part.state()) for part in parts}
        for part in lifecycle(entry_points=[point]).state(run):
            part.load(copy.deepcopy(saved[part.name]))
            again = part.state()
            assert _text_of(again) == _text_of(saved[part.name]), (
                f"{part.name}: {saved[part.name]} was saved, {again} is there"
            )


def _text_of(tree: Any) -> str:
    """Return a state as text that is equal for equal states."""
    return json.dumps(
        tree, default=lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else attrs.asdict(leaf), sort_keys=True
    )


def _run(caller: Any, folder: Path) -> RunInfo:
    """Call the hooks of a run of one step on rank 0, as the trainer does."""
    from mimo.trainer.resolving.resolve import resolve

    config = resolve(make_settings(_SETTINGS, (f"run.directory={folder}",))).plain
    run = RunInfo(name="check", directory=folder, rank=0, world=1, first_step=1, steps=1, config=config)
    step = StepInfo(
        step=1,
        loss=1.0,
        grad_norm=1.0,
        lr=1e-3,
        label_tokens=8,
        rows={"language": 8},
        norms={"language": 1.0},
        seconds=0.1,
        module_seconds={"language": 0.05},
        tokens_per_second=80.0,
        truncated=0,
        skipped=False,
    )
    with redirect_stdout(StringIO()):
        caller.run_begin(run)
        caller.step_begin(run, 1)
        caller.step_end(run, step)
        caller.evaluated(run, EvaluationInfo(step=1, loss=1.0, exact_match=0.5, samples=2))
        pairs = {"tokens of a sample": [(3, 1), (8, 2)]}
        path = run.directory / "train.jsonl.sizes"
        failures = caller.indexed(IndexInfo(name="data", path=path, samples=3, broken=0, distributions=pairs))
        failures += caller.run_end(run)
    assert not failures, str(failures[0])
    return run
