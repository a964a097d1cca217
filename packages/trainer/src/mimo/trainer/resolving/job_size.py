"""How large a job may be in all, checked before a plan is made: microbatches, actions, tokens of a step, vocabulary.

Single settings are bounded where they are declared. These follow from several together.
"""

from __future__ import annotations

from mimo.data import Tokenizer
from mimo.hooks import ConfigError
from mimo.model import MAX_VOCABULARY
from mimo.topology import ModuleGraph
from mimo.trainer.config.settings import MAX_STEP_TOKENS, Settings

MAX_MICROBATCHES = 1 << 14
MAX_ACTIONS = 1 << 19
"""Of all actors together in a step; ten thousand ranks in 16 stages of 4 chunks and 1,024 microbatches need as many."""


def check_microbatches(
    settings: Settings, graph: ModuleGraph, *, train: int, evaluation: int, evaluation_batch: int
) -> None:
    """Refuse a step whose plan would take minutes to make and check.

    Args:
        settings: the whole file.
        graph: modules and their stages.
        train: microbatches of a step at most.
        evaluation: of a batch of evaluation.
        evaluation_batch: samples of that.

    Raises:
        ConfigError: naming ``run.global_batch``, ``run.batch_tokens`` or ``run.evaluation_batch``.
    """
    run = settings.run
    by_tokens = run.batch_tokens > 0
    _check_plan("run.batch_tokens" if by_tokens else "run.global_batch", graph, train, by_tokens=by_tokens)
    _check_plan("run.evaluation_batch", graph, evaluation, by_tokens=False)
    for key, batch in (("global_batch", run.global_batch), ("evaluation_batch", evaluation_batch)):
        if batch * settings.data.max_tokens > MAX_STEP_TOKENS:
            raise ConfigError(
                f"run.{key}",
                expected=f"at most {MAX_STEP_TOKENS} tokens, {MAX_STEP_TOKENS // settings.data.max_tokens} samples of "
                f"data.max_tokens = {settings.data.max_tokens}",
                got=repr(batch),
                fix="Lower data.max_tokens, or take fewer samples at once.",
            )


def check_tokenizer_size(tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with an id so high that a table with a row for each id is none that a model has.

    Raises:
        ConfigError: naming the tokenizer.
    """
    if tokenizer.vocabulary > MAX_VOCABULARY:
        raise ConfigError(
            "tokenizer",
            expected=f"ids below {MAX_VOCABULARY}",
            got=f"a highest id of {tokenizer.vocabulary - 1}",
            fix="Number its tokens without gaps.",
        )


def _check_plan(where: str, graph: ModuleGraph, microbatches: int, *, by_tokens: bool) -> None:
    size = "run.micro_tokens" if by_tokens else "run.micro_batch"
    if microbatches > MAX_MICROBATCHES:
        raise ConfigError(
            where,
            expected=f"at most {MAX_MICROBATCHES} microbatches",
            got=f"{microbatches}",
            fix=f"Set {size} higher, or take more language lanes.",
        )
    actions = count_actions(graph, microbatches)
    if actions > MAX_ACTIONS:
        raise ConfigError(
            where,
            expected=f"a plan of at most {MAX_ACTIONS} actions",
            got=f"about {actions}, for {microbatches} microbatches through {len(graph.stages)} stages",
            fix=f"Set {size} higher, or chunks or pp lower.",
        )


def count_actions(graph: ModuleGraph, microbatches: int) -> int:
    """Return about how many actions a plan has: computations, and messages of each microbatch, of every actor."""
    each = {}
    for stage in graph.stages:
        passes = -(-microbatches // graph.by_name[stage.module].batch_factor)
        edges = (*graph.inputs(stage), *graph.outputs(stage))
        messages = microbatches * sum(1 + edge.gradient for edge in edges)
        each[stage] = passes * (1 + graph.runs_backward(stage)) + messages
    return sum(each[stage] for actor in graph.actors for stage in actor.stages)
