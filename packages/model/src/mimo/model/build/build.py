"""Build one rank's share of a module: on the meta device, split by its tensor plan, then drawn from seed and name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mimo.hooks import PluginError
from mimo.model.build.checks import check_module, check_parameters
from mimo.model.build.compiled import compile_layers
from mimo.model.build.create_on import create_on
from mimo.model.build.frozen import Frozen, is_frozen
from mimo.model.build.initial import draws_itself, initialise, seeded
from mimo.model.build.lora import attach_lora, read_merged
from mimo.model.build.part import Part, distribute
from mimo.model.build.recompute import recompute as repeat
from mimo.model.build.trainable import build_stage, trainable_paths
from mimo.model.build.unsupported_layers import check_layers
from mimo.model.draws import DrawKeys, Dropout, attach_draws
from mimo.model.layers import DefersWeightGrads, WeightGradQueue
from mimo.model.parallel import ContextAxis, ExpertAxis, Split, TensorAxis
from mimo.model.spec import LanguageModelSpec, Lora, ModuleSpec, Stage
from mimo.topology import Grid, Recompute
from mimo.topology.meshes import local

_WHOLE = Stage()


def build_part(
    spec: ModuleSpec,
    config: Any,
    *,
    grid: Grid,
    stage: Stage = _WHOLE,
    seed: int,
    axis: TensorAxis,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    hidden: int | None = None,
    frozen: Frozen = frozenset(),
    lora: Lora | None = None,
    context: ContextAxis | None = None,
    experts: ExpertAxis | None = None,
    expert_mesh: DeviceMesh | None = None,
    first: Part | None = None,
    recompute: Recompute = "none",
    splits_backward: bool = False,
    loss_rows: int = 0,
    compile_backend: str = "",
) -> Part:
    """Build one stage of a module as this rank holds it. Nothing is sent: ranks may build at different times.

    Args:
        spec: the module's plugin.
        config: an instance of ``spec.config``.
        grid: the module's grid; its name is the module's.
        stage: one of ``grid.pp`` times as many stages as a rank holds, and of one more where it has a seam; the whole
            module for one.
        seed: of the run; initial values depend on it and on parameter names alone.
        axis: this rank's tensor axis.
        mesh: the one-dimensional tensor mesh of the same ranks.
        device: where parameters go.
        dtype: that parameters have and layers compute in.
        hidden: for an encoder, width of the rows that it must deliver; for a generator, of those that it reads.
        frozen: what is not trained; patterns that match nothing here may be about other stages. Layers of such paths
            drop nothing at random, unless ``lora`` adapts the module.
        lora: which linears are adapted instead, by parameters beside them that are trained whatever is frozen.
        context: this rank's context axis, None for one rank.
        experts: this rank's expert axis, None where no rank shares experts or rows with it.
        expert_mesh: the mesh ``(ep, etp)`` of the same ranks; needed where the module has experts.
        first: stage 0 of the module if this rank holds it too: what both hold (tied embeddings) is one parameter.
        recompute: what its backward computes again from saved inputs.
        splits_backward: within `Part.defer_weight_grads`, layers that can defer their weight gradients do so; elsewhere
            it costs nothing.
        loss_rows: of how many rows the loss of a language model holds logits at a time, 0 for all.
        compile_backend: with what ``torch.compile`` compiles its layers, those of `compilation_of`; empty: not at all.

    Raises:
        ConfigError: the module cannot have this grid.
        PluginError: a plan names a parameter that the module does not have, a parameter lies in none of the spec's
            parts, or a layer draws random numbers or saves state that would differ by layout.
    """
    context, experts = context or ContextAxis.single(), experts or ExpertAxis.single()
    assert stage.pipeline.count % grid.pp == 0, (stage, grid)
    check_module(
        spec,
        config,
        grid=grid,
        sequence_parallel=axis.sequence_parallel,
        chunks=stage.pipeline.count // grid.pp,
        recompute=recompute,
        loss_rows=loss_rows,
    )
    assert context.size == grid.cp, (context.size, grid.cp)
    assert axis.size == grid.tp == mesh.size(), (axis.size, grid.tp, mesh.size())
    assert (experts.ep, experts.etp) == (grid.ep, grid.etp), (experts, grid)
    module, given = _make(spec, config, stage=stage, hidden=hidden, seed=seed, name=grid.name)
    check_parameters(spec, [path for path, _ in module.named_parameters()], name=grid.name)
    persistent = frozenset(module.state_dict())  # asked before anything is wrapped that would change names
    check_layers(module, name=grid.name)
    splits = _plan(spec, module, axis, experts, name=grid.name)
    if spec.context is not None:
        spec.context.attach(module, context)
    splits = attach_lora(module, lora, splits)
    target = torch.empty(0, device=device, dtype=dtype)
    trained = trainable_paths(spec, module, frozen=frozen, lora=lora)
    fixed = {path for path, parameter in module.named_parameters() if not parameter.requires_grad}
    tied = frozenset(f"{grid.name}.{path}" for path in _tied(spec, config, module, stage))
    parameters = {} if first is None else {name: first.parameters[name] for name in tied}

    def finish(path: str, full: Tensor) -> nn.Parameter:
        if (name := f"{grid.name}.{path}") not in parameters:
            split = splits[path]
            held_on = expert_mesh if split.experts else mesh
            assert held_on is not None, "experts lie on a mesh of their own"
            parameters[name] = distribute(
                full,
                split,
                axis=experts if split.experts else axis,
                mesh=held_on,
                like=target if full.is_floating_point() else target.to(full.dtype),
                requires_grad=path in trained,
            )
        return cast("nn.Parameter", local(parameters[name]))

    initialise(module, name=grid.name, seed=seed, given=given, finish=finish)
    for part in module.modules():
        for leaf, buffer in part.named_buffers(recurse=False):
            setattr(part, leaf, buffer.to(device))
    keys = DrawKeys(module=grid.name, axis=axis)
    attach_draws(
        module,
        keys,
        device=device,
        draws=lambda path: lora is not None or not is_frozen(spec, path, frozen),
        first=partial(_first_feature, module, splits, parameters, axis, experts, grid.name),
    )
    read_merged(module)
    names = {f"{grid.name}.{path}": path for path, _ in module.named_parameters()}
    if loss_rows and stage.is_last:
        setattr(module, "loss_rows", loss_rows)  # noqa: B010 - what the spec promises, and no type says
    queue = _attach_queue(module) if splits_backward else None
    if compile_backend:
        compile_layers(spec, module, backend=compile_backend, name=grid.name, keys=keys, queue=queue)
    if recompute != "none":
        repeat(spec.recompute[recompute](module), name=grid.name, keys=keys)
    return Part(
        name=grid.name,
        module=module,
        stage=stage,
        staged=not isinstance(spec, LanguageModelSpec)
        and (spec.stages is not None or (stage.seam and (stage.is_projector or stage.ends_tower))),
        parameters={name: parameters[name] for name in names},
        splits={name: splits[path] for name, path in names.items()},
        tied=tied,
        whole=frozenset(f"{grid.name}.{path}" for path in fixed) if _is_changed(spec) else frozenset(),
        persistent=persistent,
        weight_grad_queue=queue or WeightGradQueue(),
        draw_keys=keys,
    )


def _make(
    spec: ModuleSpec, config: Any, *, stage: Stage, hidden: int | None, seed: int, name: str
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the stage's module, and where layers cannot draw their own initial values, those of the whole module."""
    with seeded(seed, name):  # what is drawn on another device all the same
        module = _on_meta(spec, config, stage, hidden)
    if module is not None and draws_itself(module):
        return module, {}
    with seeded(seed, name):
        whole = build_stage(spec, config, Stage(), hidden)
    given = {path: parameter.detach() for path, parameter in whole.named_parameters(remove_duplicate=False)}
    if stage.count == 1:
        return whole, given
    with seeded(seed, name):
        return build_stage(spec, config, stage, hidden), given


def _on_meta(spec: ModuleSpec, config: Any, stage: Stage, hidden: int | None) -> nn.Module | None:
    """Return the stage's module without storage, None if it cannot be built so."""
    try:
        with create_on("meta"):
            return build_stage(spec, config, stage, hidden)
    except (RuntimeError, TypeError):
        return None  # Some read numbers back while being built. An error with another cause comes again with storage.


def _plan(spec: ModuleSpec, module: nn.Module, axis: TensorAxis, experts: ExpertAxis, *, name: str) -> dict[str, Split]:
    paths = [path for path, _ in module.named_parameters(remove_duplicate=False)]
    planned = {} if spec.tensor is None else dict(spec.tensor.plan(module, axis))
    if isinstance(spec, LanguageModelSpec) and spec.experts is not None:
        mixed = spec.experts.plan(module, experts)
        wrong = sorted(path for path, split in mixed.items() if path in planned or not split.experts)
        if wrong:
            raise PluginError(
                f"modules.{name}.plugin",
                expected=f"an expert plan of {spec.name!r} that marks each split as one of experts, and a tensor plan "
                "that leaves those parameters out",
                got=f"{wrong}",
                fix="Return Split(..., experts=True) from one of the two only.",
            )
        planned |= mixed
    unknown = sorted(set(planned) - set(paths))
    if unknown:
        raise PluginError(
            f"modules.{name}.plugin",
            expected=f"a plan of {spec.name!r} for parameters that it has",
            got=f"{unknown}",
            fix="Return only names of the module that the plan is given, a stage of it included.",
        )
    return {path: planned.get(path, Split()) for path in paths}


def _is_changed(spec: ModuleSpec) -> bool:
    """Tell whether other code than layers may change parameters: what follows the load of experts."""
    return isinstance(spec, LanguageModelSpec) and spec.experts is not None


def _first_feature(
    module: nn.Module,
    splits: Mapping[str, Split],
    parameters: Mapping[str, nn.Parameter],
    axis: TensorAxis,
    experts: ExpertAxis,
    name: str,
    path: str,
) -> int:
    """Return which of all features of its rows is the first that a part has here, which drops some of them."""
    part = module.get_submodule(path)
    beside = [*path.split(".")[:-1], part.reader, "weight"] if isinstance(part, Dropout) else [path, "down"]
    reader = ".".join(beside)
    split = splits.get(reader)
    if split is None:  # between layers, where every rank has all
        return 0
    *others, inputs = parameters[f"{name}.{reader}"].shape
    return (experts if split.experts else axis).span(inputs).start if split.dim == len(others) else 0


def _attach_queue(module: nn.Module) -> WeightGradQueue:
    queue = WeightGradQueue()
    for part in module.modules():
        if isinstance(part, DefersWeightGrads):
            part.weight_grad_queue = queue
    return queue


def _tied(spec: ModuleSpec, config: Any, module: nn.Module, stage: Stage) -> set[str]:
    if (
        not isinstance(spec, LanguageModelSpec)
        or stage.count == 1
        or not (stage.is_first or stage.is_last)
        or not spec.tied(config)
    ):
        return set()
    with create_on("meta"):
        other = spec.build(config, Stage(stage.count - 1 if stage.is_first else 0, stage.count))
    return {path for path, _ in module.named_parameters()} & {path for path, _ in other.named_parameters()}
