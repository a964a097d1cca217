"""Parts of a run, for programs that put one together themselves: benchmarks, tests of whole jobs, tools.

How a run is saved and resumed, the data of its steps, its estimates of memory and traffic, settings and plugins one by
one, the rerun machine. As in `mimo.trainer`, each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mimo.trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from mimo.trainer.batch.balance import StepBalance, balance_of, step_seconds
    from mimo.trainer.batch.microbatch import Microbatch
    from mimo.trainer.batch.route_cache import RouteCache
    from mimo.trainer.batch.saved_samples import KeptSamples
    from mimo.trainer.batch.step_data import StepData
    from mimo.trainer.batch.step_loader import StepLoader
    from mimo.trainer.batch.step_samples import StepSamples
    from mimo.trainer.commands.plugin_checks.check import check_plugin
    from mimo.trainer.config.fields import own_keys
    from mimo.trainer.config.names import RERUN_FILE
    from mimo.trainer.config.plain_values import join_path
    from mimo.trainer.config.plugin_kinds import KINDS, find_installed
    from mimo.trainer.config.rerun_settings import InjectSettings, RerunSettings
    from mimo.trainer.config.settings import LoadSettings, ModuleSettings
    from mimo.trainer.config.structure import structure
    from mimo.trainer.config.template import EXAMPLE
    from mimo.trainer.config.toml import read_table
    from mimo.trainer.cost.memory import RankMemory, estimate_memory
    from mimo.trainer.cost.parameter_names import check_patterns_of
    from mimo.trainer.cost.sample_costs import SampleCosts
    from mimo.trainer.cost.step_cost import job_costs
    from mimo.trainer.cost.step_sizes import StepSizes
    from mimo.trainer.decoding.prompt import prepared_item
    from mimo.trainer.items.staging import Copier, Staging, StreamCopier
    from mimo.trainer.job.job import JobModule
    from mimo.trainer.published.readers import Reader, installed_readers
    from mimo.trainer.rerun.driver import RerunDriver
    from mimo.trainer.rerun.machine import RerunStateMachine
    from mimo.trainer.resolving.checkpoint_settings import settings_of
    from mimo.trainer.resolving.job_size import count_actions
    from mimo.trainer.resume.attempt import note_failure
    from mimo.trainer.resume.compatibility import check_source
    from mimo.trainer.resume.load import resume
    from mimo.trainer.resume.resume_point import Source, find_source, share_source, step_folder
    from mimo.trainer.resume.run_state import RunState
    from mimo.trainer.resume.save import Saving, save_step
    from mimo.trainer.run.inference import load_model
    from mimo.trainer.run.profiling import measure_job, samples
    from mimo.trainer.run.train import train_rank
    from mimo.trainer.step.build import RankParts
    from mimo.trainer.step.programs.language_batches import language_batch
    from mimo.trainer.step.programs.program import NumberedData, Program
    from mimo.trainer.step.traffic import expect_traffic
    from mimo.trainer.step.trainer import Decide, StepOutcome
else:  # a test compares the two
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Copier": "items.staging",
            "Decide": "step.trainer",
            "Staging": "items.staging",
            "StreamCopier": "items.staging",
            "RankParts": "step.build",
            "RerunDriver": "rerun.driver",
            "RunState": "resume.run_state",
            "StepLoader": "batch.step_loader",
            "StepOutcome": "step.trainer",
            "StepSizes": "cost.step_sizes",
            "EXAMPLE": "config.template",
            "InjectSettings": "config.rerun_settings",
            "JobModule": "job.job",
            "KeptSamples": "batch.saved_samples",
            "KINDS": "config.plugin_kinds",
            "LoadSettings": "config.settings",
            "Microbatch": "batch.microbatch",
            "ModuleSettings": "config.settings",
            "NumberedData": "step.programs.program",
            "Program": "step.programs.program",
            "RERUN_FILE": "config.names",
            "RankMemory": "cost.memory",
            "Reader": "published.readers",
            "RerunSettings": "config.rerun_settings",
            "RerunStateMachine": "rerun.machine",
            "RouteCache": "batch.route_cache",
            "SampleCosts": "cost.sample_costs",
            "Saving": "resume.save",
            "Source": "resume.resume_point",
            "StepBalance": "batch.balance",
            "StepData": "batch.step_data",
            "StepSamples": "batch.step_samples",
            "balance_of": "batch.balance",
            "check_patterns_of": "cost.parameter_names",
            "check_plugin": "commands.plugin_checks.check",
            "check_source": "resume.compatibility",
            "count_actions": "resolving.job_size",
            "estimate_memory": "cost.memory",
            "expect_traffic": "step.traffic",
            "find_installed": "config.plugin_kinds",
            "find_source": "resume.resume_point",
            "installed_readers": "published.readers",
            "job_costs": "cost.step_cost",
            "join_path": "config.plain_values",
            "language_batch": "step.programs.language_batches",
            "load_model": "run.inference",
            "measure_job": "run.profiling",
            "note_failure": "resume.attempt",
            "own_keys": "config.fields",
            "prepared_item": "decoding.prompt",
            "read_table": "config.toml",
            "resume": "resume.load",
            "samples": "run.profiling",
            "save_step": "resume.save",
            "settings_of": "resolving.checkpoint_settings",
            "share_source": "resume.resume_point",
            "step_folder": "resume.resume_point",
            "step_seconds": "batch.balance",
            "structure": "config.structure",
            "train_rank": "run.train",
        },
    )

__all__ = [
    "EXAMPLE",
    "KINDS",
    "RERUN_FILE",
    "Copier",
    "Decide",
    "InjectSettings",
    "JobModule",
    "KeptSamples",
    "LoadSettings",
    "Microbatch",
    "ModuleSettings",
    "NumberedData",
    "Program",
    "RankMemory",
    "RankParts",
    "Reader",
    "RerunDriver",
    "RerunSettings",
    "RerunStateMachine",
    "RouteCache",
    "RunState",
    "SampleCosts",
    "Saving",
    "Source",
    "Staging",
    "StepBalance",
    "StepData",
    "StepLoader",
    "StepOutcome",
    "StepSamples",
    "StepSizes",
    "StreamCopier",
    "balance_of",
    "check_patterns_of",
    "check_plugin",
    "check_source",
    "count_actions",
    "estimate_memory",
    "expect_traffic",
    "find_installed",
    "find_source",
    "installed_readers",
    "job_costs",
    "join_path",
    "language_batch",
    "load_model",
    "measure_job",
    "note_failure",
    "own_keys",
    "prepared_item",
    "read_table",
    "resume",
    "samples",
    "save_step",
    "settings_of",
    "share_source",
    "step_folder",
    "step_seconds",
    "structure",
    "train_rank",
]
