"""What a module's plugin and config must allow before a grid or a freeze is accepted; free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mimo.hooks import ConfigError, PluginError
from mimo.model.build.frozen import Frozen, is_under, named_by_parts, parts_of
from mimo.model.spec import LanguageModelSpec, Lora, ModuleSpec, Stage, noun_of
from mimo.topology import Grid, Recompute


def check_module(
    spec: ModuleSpec,
    config: Any,
    *,
    grid: Grid,
    sequence_parallel: bool = False,
    chunks: int = 1,
    recompute: Recompute = "none",
    loss_rows: int = 0,
) -> None:
    """Refuse a grid that the module cannot be split over.

    Args:
        spec: the module's plugin.
        config: an instance of ``spec.config``.
        grid: the module's grid; its name is the module's.
        sequence_parallel: whether rows are split over the tensor ranks between layers.
        chunks: stages on each rank.
        recompute: what backward computes again.
        loss_rows: of how many rows the loss holds logits at a time, 0 for all.

    Raises:
        ConfigError: with the path of the setting, ``modules.<name>.tp`` and so on.
    """
    where = f"modules.{grid.name}"
    noun = noun_of(spec)
    if grid.cp > 1 and spec.context is None:
        raise ConfigError(
            f"{where}.cp",
            expected=f"1, since {noun} {spec.name!r} has no context parallelism",
            got=repr(grid.cp),
            fix="Leave cp out; any number of lanes (dp) works.",
        )
    if grid.cp > 1 and spec.context is not None:
        with _within(where, "cp"):
            spec.context.check(config)
    _check_tensor(spec, config, grid=grid, where=where, noun=noun)
    if sequence_parallel and (spec.tensor is None or not spec.tensor.splits_rows):
        raise ConfigError(
            f"{where}.sequence_parallel",
            expected=f"false, since {noun} {spec.name!r} does not split its rows over tensor ranks",
            got="true",
            fix="Leave it out.",
        )
    _check_experts(spec, config, grid=grid, where=where, noun=noun)
    _check_stages(spec, config, grid=grid, chunks=chunks, where=where, noun=noun)
    _check_recompute(spec, recompute, where=where, noun=noun)
    if loss_rows and not (isinstance(spec, LanguageModelSpec) and spec.chunks_loss):
        raise ConfigError(
            f"{where}.loss_rows",
            expected=f"0, since {noun} {spec.name!r} makes no loss of a few rows at a time",
            got=repr(loss_rows),
            fix="Leave it out.",
        )


def _check_recompute(spec: ModuleSpec, recompute: Recompute, *, where: str, noun: str) -> None:
    if recompute == "none" or recompute in spec.recompute:
        return
    known = [repr(name) for name in spec.recompute]
    lacks = f"since {noun} {spec.name!r} has no {'such ' if known else ''}recomputation"
    raise ConfigError(
        f"{where}.recompute",
        expected=f"{_either(['none', *spec.recompute])}, {lacks}",
        got=repr(recompute),
        fix=f"Leave it out, or set it to {_either(known)}." if known else "Leave it out.",
    )


@contextmanager
def _within(where: str, key: str) -> Iterator[None]:
    """Put the module's path before that of an error of this key."""
    try:
        yield
    except ConfigError as error:
        path = f"{where}.{key}" if error.where == key else error.where
        raise ConfigError(path, expected=error.expected, got=error.got, fix=error.fix) from error


def _check_tensor(spec: ModuleSpec, config: Any, *, grid: Grid, where: str, noun: str) -> None:
    if grid.tp == 1:
        return
    if spec.tensor is None:
        raise ConfigError(
            f"{where}.tp",
            expected=f"1, since {noun} {spec.name!r} has no tensor plan",
            got=repr(grid.tp),
            fix="Leave tp out; any number of lanes (dp) works.",
        )
    with _within(where, "tp"):
        counts = spec.tensor.divisible(config)
    for key, count in counts.items():
        if count % grid.tp:
            raise ConfigError(
                f"{where}.tp",
                expected=f"a divisor of {key} = {count}",
                got=repr(grid.tp),
                fix=f"Set it to {_either(size for size in range(1, count + 1) if count % size == 0)}.",
            )


def _check_experts(spec: ModuleSpec, config: Any, *, grid: Grid, where: str, noun: str) -> None:
    support = spec.experts if isinstance(spec, LanguageModelSpec) else None
    count = 0 if support is None else support.count(config)
    for axis, size in (("ep", grid.ep), ("etp", grid.etp)):
        if size > 1 and not count:
            raise ConfigError(
                f"{where}.{axis}",
                expected=f"1, since {noun} {spec.name!r} has no experts",
                got=repr(size),
                fix=f"Leave {axis} out, or give the model experts.",
            )
    if count % grid.ep:
        raise ConfigError(
            f"{where}.ep",
            expected=f"a divisor of experts = {count}",
            got=repr(grid.ep),
            fix=f"Set it to {_either(size for size in range(1, count + 1) if count % size == 0)}.",
        )


def _check_stages(spec: ModuleSpec, config: Any, *, grid: Grid, chunks: int, where: str, noun: str) -> None:
    if grid.pp == 1:
        if chunks > 1:
            raise ConfigError(
                f"{where}.chunks",
                expected="1, since one pipeline rank (pp = 1) waits for no other and chunks shorten nothing",
                got=repr(chunks),
                fix="Leave chunks out, or set pp to 2 or more.",
            )
        return
    cut = spec if isinstance(spec, LanguageModelSpec) else spec.stages
    if cut is None:
        raise ConfigError(
            f"{where}.pp",
            expected=f"1, since {noun} {spec.name!r} has no pipeline stages",
            got=repr(grid.pp),
            fix="Leave pp out; any number of lanes (dp) works.",
        )
    layers = cut.layers(config)
    if layers < grid.pp:
        raise ConfigError(
            f"{where}.pp",
            expected=f"at most its layers = {layers}",
            got=repr(grid.pp),
            fix=f"Set it to {layers} or less, or give the model more layers.",
        )
    stages = grid.pp * chunks
    if chunks > 1 and layers % stages:
        fitting = [count for count in range(2, layers // grid.pp + 1) if layers % (grid.pp * count) == 0]
        raise ConfigError(
            f"{where}.chunks",
            expected=f"a number of which pp x chunks = {grid.pp} x {chunks} divides its layers = {layers}",
            got=repr(chunks),
            fix=f"Set it to {_either([1, *fitting])}, or give the model {-(-layers // stages) * stages} layers.",
        )


def _either(values: Iterable[object]) -> str:
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def check_parameters(spec: ModuleSpec, paths: Iterable[str], *, name: str) -> None:
    """Refuse a module some of whose parameters lie in none of the parts that its spec names: no setting reaches them.

    Raises:
        PluginError: naming them.
    """
    prefixes = tuple(prefix for part in spec.parts.values() for prefix in part)
    outside = [path for path in paths if not is_under(path, prefixes)]
    if spec.parts and outside:
        raise PluginError(
            f"modules.{name}.plugin",
            expected=f"every parameter of {spec.name!r} under a prefix of one of its parts",
            got=f"{outside} under none",
            fix="Add their prefixes to the spec's parts, or name no parts at all.",
        )


def check_training(
    spec: ModuleSpec,
    config: Any,
    *,
    name: str,
    hidden: int,
    frozen: Frozen,
    lora: Lora | None = None,
) -> None:
    """Refuse what is to be frozen or adapted and is nothing that the module has.

    Parts are known by their names. Only where there is more, the module is built, with torch and without storage.

    Args:
        spec: the module's plugin.
        config: an instance of ``spec.config``.
        name: the module's.
        hidden: width of the rows that an encoder delivers, or a generator reads.
        frozen: what is not trained.
        lora: what is adapted.

    Raises:
        ConfigError: by the path of the setting, with the closest names.
    """
    if not isinstance(frozen, bool):
        _check_parts(spec, config, name=name, frozen=frozen)
    if not named_by_parts(spec, frozen=frozen, lora=lora):
        from mimo.model.build.trainable import check_names

        check_names(spec, config, name=name, hidden=hidden, frozen=frozen, lora=lora)


def _check_parts(spec: ModuleSpec, config: Any, *, name: str, frozen: frozenset[str]) -> None:
    """Refuse parts that the plugin knows and a module with this config has not."""
    held = parts_of(spec, config, Stage())
    for entry in sorted(frozen & (spec.parts.keys() - held)):
        raise ConfigError(
            f"modules.{name}.frozen",
            expected=f"parts that it has with this config ({', '.join(map(repr, sorted(held)))}), or patterns",
            got=repr(entry),
            fix="Leave it out.",
        )


def stage_trains(
    spec: ModuleSpec,
    config: Any,
    *,
    stage: Stage,
    frozen: Frozen,
    lora: Lora | None = None,
    hidden: int = 0,
) -> bool:
    """Tell whether a stage of the module has anything to train; for the arguments see `check_training`."""
    if not named_by_parts(spec, frozen=frozen, lora=lora):
        from mimo.model.build.trainable import stage_without_storage, trainable_paths

        built = stage_without_storage(spec, config, stage, hidden, lora)
        return bool(trainable_paths(spec, built, frozen=frozen, lora=lora))
    if isinstance(frozen, bool):
        return not frozen
    held = parts_of(spec, config, stage)
    return not held or bool(held - frozen)
