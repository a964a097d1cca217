"""One rank of a job, assembled: its stages of the model, their optimizer and programs, and the ends of their edges."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.hooks import StateTree
from mimo.launch import group_timeout
from mimo.model import LanguageModelSpec
from mimo.model.runtime import ContextAxis, ExpertAxis, MimoModel, Part, TensorAxis, build_part
from mimo.optimizer import ModuleParameters
from mimo.optimizer.runtime import LaidOut, MimoOptimizer, build_together
from mimo.schedule.runtime import Boundary, Progress, open_channels
from mimo.topology import ROW_AXES, Edge, Grid, StageId
from mimo.topology.meshes import Meshes
from mimo.trainer.cost.parameter_names import check_patterns_of
from mimo.trainer.job.compilation import compilations, compile_backend
from mimo.trainer.job.job import Job
from mimo.trainer.job.precision import compute_dtype, make_scaling
from mimo.trainer.step.probe import StepProbe
from mimo.trainer.step.programs.encoder_program import EncoderProgram
from mimo.trainer.step.programs.generator_program import GeneratorProgram
from mimo.trainer.step.programs.language_program import LanguageProgram, TeacherProgram
from mimo.trainer.step.programs.loss_terms import targets_name
from mimo.trainer.step.programs.program import COUNTS, Program


class RankParts:
    """The parts of one rank. Make it on every rank of the world, since groups and channels are made by all.

    Args:
        job: the same on every rank.
        rank: this process.
        device: where this rank computes.
        extra_sums: what ranks sum beside losses and counts in the step's one message: names and lengths, in its order.
        probe: records what the stages compute while they train; None for none.
        progress: takes note of whom this rank waits for.

    Attributes:
        model: this rank's stages.
        optimizer: steps them together with all other ranks.
        programs: what each of its stages does in a plan.
        boundaries: by name, the edges that touch its stages.
    """

    def __init__(
        self,
        job: Job,
        *,
        rank: int,
        device: torch.device,
        extra_sums: Mapping[str, int],
        probe: StepProbe | None = None,
        progress: Progress | None = None,
    ) -> None:
        if job.train is not None:
            check_patterns_of(job)
        compilations(job)
        self.job = job
        self.rank = rank
        self._device = device
        self._probe = probe
        self._progress = progress
        timeout = group_timeout(job.settings.run.timeout)
        self._meshes = Meshes(job.model_graph, rank=rank, device_type=device.type, timeout=timeout)
        self._role = job.graph.role(rank)
        self.model = self._model()
        self.optimizer = self._optimizer(extra_sums)
        self.programs: dict[StageId, Program] = {stage: self.program(stage) for stage in self._role.stages}
        channels = open_channels(job.graph, device=device, timeout=timeout)
        self.boundaries = {
            edge.name: self._boundary(edge, channels[edge.name])
            for edge in job.graph.edges
            if self.programs.keys() & {edge.source, edge.target}
        }

    def _model(self) -> MimoModel:
        actions = (action for plan in self.job.plans for action in plan.actions_of(self.rank))
        split = {action.stage_id for action in actions if action.kind == "input-gradient"}
        parts: dict[StageId, Part] = {}
        for stage in self._role.stages:
            first = parts.get(StageId(stage.module, 0))
            parts[stage] = self._part(stage, first=first, splits_backward=stage in split)
        return MimoModel(parts.values())

    def _part(self, stage: StageId, *, first: Part | None, splits_backward: bool) -> Part:
        stage = self.job.built(stage)
        module = self.job.module(stage.module)
        axis = TensorAxis.of(self._meshes.tensor_mesh(module.grid), sequence_parallel=module.sequence_parallel)
        mixed = self.job.model_graph.by_name[module.name].experts
        return build_part(
            module.spec,
            module.config,
            grid=module.grid,
            stage=self.job.stage(stage),
            seed=self.job.settings.run.seed,
            axis=axis,
            mesh=self._meshes.tensor_mesh(module.grid),
            device=self._device,
            hidden=self.job.row_width(module),
            frozen=module.frozen,
            lora=module.lora,
            context=ContextAxis.of(self._meshes.axes_group(module.grid, ("cp",))),
            experts=self._expert_axis(module.grid) if mixed else None,
            expert_mesh=self._meshes.expert_mesh(module.grid) if mixed else None,
            first=first,
            recompute=module.recompute,
            splits_backward=splits_backward,
            loss_rows=module.loss_rows,
            compile_backend=compile_backend(self.job.settings.run),
        )

    def _expert_axis(self, grid: Grid) -> ExpertAxis:
        return ExpertAxis.of(
            grid,
            self.rank,
            group=self._meshes.axes_group(grid, ("ep", "etp")),
            rows=self._meshes.axes_group(grid, ROW_AXES),
        )

    def _optimizer(self, extra_sums: Mapping[str, int]) -> MimoOptimizer:
        job = self.job
        laid_out = [
            LaidOut.of(
                {part.stage.index: self._parameters(part) for part in self.model.parts_of(module.name)},
                module.optimizer.rules,
                self._meshes,
            )
            for module in job.modules
            if self.rank in module.grid
        ]
        specs = {spec.name: spec for module in job.modules for spec in module.optimizer.rules.specs}
        return MimoOptimizer(
            build_together(laid_out, specs.values(), self._meshes),
            names=[module.name for module in job.modules],
            learning_rate=job.language.optimizer.learning_rate,
            clip=job.settings.optimizer.clip,
            clips=job.settings.optimizer.clip_groups,
            clip_groups={module.name: module.optimizer.rules.clip_groups for module in job.modules},
            counts=COUNTS,
            extra_sums=extra_sums,
            learns_from_labels=job.learns_from_labels,
            targets=[targets_name(module) for module in job.generators if module.loss_weight],
            counts_zeros=job.settings.logging.zero_gradients,
            scaling=make_scaling(job.settings.run),
            meshes=self._meshes,
            device=self._device,
        )

    def _parameters(self, part: Part) -> ModuleParameters:
        """Return what a stage trains, and what it does not."""
        trains = self.job.train is not None and self.job.model_graph.by_name[part.name].trains[part.stage.index]
        trained = {name: value for name, value in part.parameters.items() if trains and value.requires_grad}
        found = ModuleParameters(
            grid=self.job.module(part.name).grid,
            rank=self.rank,
            parameters=trained,
            frozen={name: value for name, value in part.parameters.items() if name not in trained},
            modules=(part.module,),
            precision=self.job.settings.run.precision,
            summed=part.summed & trained.keys(),
            tied=part.tied & trained.keys(),
            experts=part.experts,
            whole=part.whole,
        )
        if self._probe is None:
            return found
        return attrs.evolve(found, observe=partial(self._probe.record_gradients, part.name))

    def program(self, stage: StageId) -> Program:
        """Return what one of this rank's stages does; the model and the optimizer stand by then."""
        module = self.job.module(stage.module)
        kind: type[Program] = GeneratorProgram if module.is_generator else EncoderProgram
        if isinstance(module.spec, LanguageModelSpec):
            kind = LanguageProgram if module.distil is None else TeacherProgram
        return kind(
            self.job,
            module,
            self.model.parts[self.job.built(stage)],
            stage,
            place=module.grid.coordinates(self.rank),
            outputs=self.job.graph.outputs(stage),
            optimizer=self.optimizer,
            context=self._meshes.axes_group(module.grid, ("cp",)),
            tensor=self._meshes.axes_group(module.grid, ("tp",)),
            device=self._device,
            probe=self._probe,
        )

    def _boundary(self, edge: Edge, channels: Any) -> Boundary:
        return Boundary(
            rank=self.rank,
            width=self.job.width(edge),
            dtype=torch.uint8 if self.job.teaches(edge) else compute_dtype(self.job.settings.run.precision),
            device=self._device,
            channels=channels,
            source_group=self._tensor_group(edge.source),
            target_group=self._tensor_group(edge.target),
            edge=edge.name,
            progress=self._progress,
        )

    def _tensor_group(self, stage: StageId) -> dist.ProcessGroup | None:
        if stage not in self._role.stages:
            return None
        return self._meshes.axes_group(self.job.module(stage.module).grid, ("tp",))

    def model_state(self) -> dict[str, StateTree]:
        """Return the parameters and persistent buffers by module and path; parameters are views, filled in place."""
        buffers = self.buffers()
        return {
            module: {
                **{name.removeprefix(f"{module}."): value.detach() for name, value in weights.items()},
                **buffers[module],
            }
            for module, weights in self.optimizer.weights().items()
        }

    def buffers(self) -> dict[str, dict[str, Tensor]]:
        """Return the persistent buffers by module and path."""
        return {
            module: {
                name.removeprefix(f"{module}."): buffer
                for part in self.model.parts_of(module)
                for name, buffer in part.buffers.items()
            }
            for module in self.optimizer.modules
        }

    def constants(self) -> frozenset[str]:
        """Return the names of the parameters here that nothing changes."""
        parts = [module.part for module in self.optimizer.modules.values()]
        return frozenset(name for part in parts for name in part.frozen.keys() - part.whole)
