"""The truth: a plain one-process PyTorch loop over the whole batch, without a plan, a boundary or our optimizers."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import torch
from jobs import CPU, make_job
from plain_rules import PlainRules
from safetensors import safe_open
from safetensors.torch import save_file
from tables import STEPS, Table
from torch import Tensor, nn

from mimo.data import Dataset, SampleLayout, SampleOrder, pack, weights_of
from mimo.model import LanguageModelSpec
from mimo.model.runtime import (
    Choices,
    LanguageBatch,
    Part,
    Router,
    TensorAxis,
    build_part,
    item_keys,
    sample_rows,
    step_key,
)
from mimo.topology.meshes import Meshes
from mimo.trainer import Job
from mimo.trainer.runtime import JobModule, Microbatch, StepData, language_batch


@attrs.frozen(kw_only=True)
class Truth:
    """What a few steps come to; gradients of the first of them, weights after the last, by full name.

    ``terms`` are the means that teachers and generators add to the losses, each by its weight; ``gap`` is the least by
    which any row's choice of experts was clear.
    """

    losses: list[float]
    terms: dict[str, list[float]]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    gap: float


@attrs.frozen(kw_only=True)
class Term:
    """What a teacher or generator adds to the loss of a step: a mean over its own count, by its ``weight``."""

    name: str
    mean: Tensor
    weight: float


def write_truth(truth: Truth, path: Path) -> None:
    """Write it as one file."""
    trees = {"gradients": truth.gradients, "weights": truth.weights}
    tensors = {f"{kind}.{name}": value.contiguous() for kind, tree in trees.items() for name, value in tree.items()}
    metadata = {name: getattr(truth, name) for name in ("losses", "terms", "norms", "gap")}
    save_file(tensors, path, metadata={"results": json.dumps(metadata)})


def read_truth(path: Path) -> Truth:
    """Read what `write_truth` has written."""
    trees: dict[str, dict[str, Tensor]] = {"gradients": {}, "weights": {}}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118  # the file is no mapping
            kind, _, name = key.partition(".")
            trees[kind][name] = file.get_tensor(key)
        metadata = json.loads(file.metadata()["results"])
    return Truth(gradients=trees["gradients"], weights=trees["weights"], **metadata)


def run_plain(
    _rank: int,
    settings: Table,
    *,
    nudged: bool = False,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Truth:
    """Train by a plain loop, with settings that `tables.alone` has returned.

    Args:
        settings: of one rank and one microbatch.
        nudged: whether each weight begins as the next number above or below: how much that changes shows what rounding
            may do.
        device: where it computes; the result lies on the CPU.
        dtype: of weights, which begin with the same values in any, and of all that is computed.
    """
    job = make_job(settings)
    parts = _build(job, device=device, dtype=dtype)
    weights = {
        f"{name}.{path}": value for name, part in parts.items() for path, value in part.module.named_parameters()
    }
    if nudged:
        nudge(weights.values())
    trained = {name: value for name, value in weights.items() if value.requires_grad}
    rules = PlainRules(settings, trained)
    optimizer = rules.make_adamw()
    assert job.train is not None
    order, seed = job.sample_order(), job.settings.run.seed
    losses, norms, gradients = [], [], {}
    terms: dict[str, list[float]] = {}
    broken = {(sample, 0) for sample in settings["data"].get("damaged", ()) if job.train.infos(sample)}
    gaps = _watch_gaps(parts["language"].module)
    for step, samples in zip(range(1, STEPS + 1), samples_by_hand(job, order), strict=False):
        (batch,) = StepData.of_step(job, job.train, partial(tuple, samples), costs=None).microbatches
        rows = rows_of_all(job, batch, parts, broken, step_key(seed, step), device=device, dtype=dtype)
        packed = language_batch(batch.packed(job.language, 0), job, device)
        numbers = torch.tensor([*samples, 0])[packed.samples.cpu()]
        keys = sample_rows(step_key(seed, step), numbers, packed.positions.cpu()).to(device)
        language = parts["language"].language
        counted = weights_by_hand(job, job.train, samples, packed)
        counted[[(samples[number], 0) in broken for number in packed.samples.tolist()]] = 0
        total = float(counted.sum())
        with parts["language"].drawing(rows=keys):
            hidden = language(packed, {name: rows[name] for name in packed.placeholders if name in rows}, None)
            found = language.losses(hidden, packed.labels)
            made, targets = made_by_hand(job, parts, batch, hidden, broken, step)
            means = [*made, *(of_labels := taught_by_hand(job, parts, batch, hidden, counted, rows))]
            taught = sum((term.weight * term.mean for term in means), hidden.new_zeros(()))
        for term in means:
            terms.setdefault(term.name, []).append(float(term.mean.detach()))
        optimizer.zero_grad()
        loss = (found * counted.to(found)).sum() / (total or 1)
        losses.append(float(loss.detach()))
        of_labels_weigh = job.language.loss_weight or packed.aux_losses.losses or any(one.weight for one in of_labels)
        if not targets and not (total and of_labels_weigh):  # nothing is learned from this step
            norms.append(0.0)
            continue
        whole = job.language.loss_weight * loss + sum(packed.aux_losses.losses.values()) / (total or 1) + taught
        if whole.requires_grad:  # not where only an encoder trains and has nothing to read
            whole.backward()
        norms.append(_norm(trained.values()))
        if step == 1:
            gradients = {name: _copy(value.grad) for name, value in trained.items() if value.grad is not None}
        rules.clip()
        rules.set_rates(optimizer, step)
        optimizer.step()
        assert isinstance(job.language.spec, LanguageModelSpec)
        if job.language.spec.experts is not None:
            job.language.spec.experts.after_step(parts["language"].module, packed.aux_losses.counts)
    return Truth(
        losses=losses,
        terms=terms,
        norms=norms,
        gradients=gradients,
        weights={name: _copy(value) for name, value in weights.items()},
        gap=min(gaps, default=math.inf),
    )


def samples_by_hand(job: Job, order: SampleOrder) -> Iterator[list[int]]:
    """Yield the samples of each step: as many as settings say, or as long as their tokens don't exceed a limit."""
    run, data = job.settings.run, job.train
    assert data is not None
    if not run.batch_tokens:
        for step in count(1):
            yield list(order.samples(step))
    found: list[int] = []
    tokens = 0
    for position in count():
        (sample,) = order.read(position, 1).tolist()
        layout = job.lay_out(data, sample)
        if layout.truncated and job.settings.data.longer == "drop":
            continue
        if tokens + len(layout.tokens) > run.batch_tokens:
            yield found
            found, tokens = [], 0
        found.append(sample)
        tokens += len(layout.tokens)


def rows_of_all(
    job: Job,
    batch: Microbatch,
    parts: Mapping[str, Part],
    broken: Collection[tuple[int, int]],
    key: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the rows of each encoder of a language model that has something to encode; see `rows_of`."""
    rows = {
        module.name: rows_of(batch, module, parts[module.name], broken, key, device=device, dtype=dtype)
        for module in job.encoders
        if module.feeds_language or module.is_of_teacher
    }
    return {name: made for name, made in rows.items() if made is not None}


def rows_of(
    batch: Microbatch,
    module: JobModule,
    part: Part,
    broken: Collection[tuple[int, int]],
    key: Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return an encoder's rows of all items, zeros for those of broken ones; None where it has nothing to encode.

    What it draws at random follows from the ``key`` of the step.
    """
    items = batch.items(module, 0)
    whole = [number for number, item in enumerate(items) if (item.info.sample, item.info.index) not in broken]
    prepared = [
        {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in item.items()}
        for item in (batch.prepare_one(module, 0, number) for number in whole)
    ]
    if not prepared:
        return None
    infos = [items[number].info for number in whole]
    keys = item_keys(key, [one.sample for one in infos], [one.index for one in infos])
    with part.drawing(items=None if module.is_of_teacher else keys):
        found = part.encode(prepared, [one.size for one in infos])
    counts = torch.tensor([item.rows for item in items])
    kept = torch.tensor([(item.info.sample, item.info.index) not in broken for item in items]).repeat_interleave(counts)
    return found.new_zeros(len(kept), found.shape[1]).index_copy(0, kept.nonzero().squeeze(1).to(device), found)


def weights_by_hand(job: Job, data: Dataset, samples: Sequence[int], packed: LanguageBatch) -> Tensor:
    """Return for each row [T] of samples the weight that a dataset gives the text after it, 0 where none follows."""
    placeholders = {job.tokenizer.placeholder(module.modality): module.modality for module in job.item_modules}
    read = {module.modality for module in job.encoders}
    weights = torch.zeros(len(packed.labels), dtype=torch.float64)
    for number, sample in enumerate(samples):
        ids = data.tokens(sample)
        given = weights_of(data, sample) or [1.0] * len(ids)
        roles = {
            modality: iter([str(info.role) for info in data.infos(sample) if info.modality == modality])
            for modality in placeholders.values()
        }
        said = []  # whether the model is to say it: it says what is to be made, by its placeholder
        for one in ids:
            modality = placeholders.get(one)
            role = "output" if modality is None else next(roles[modality])
            said.append(role != "input" if role else modality not in read)
        text = [weight for is_said, weight in zip(said, given, strict=True) if is_said]
        rows = (packed.samples.cpu() == number).nonzero().squeeze(1)
        if len(rows) and said[0]:
            text = text[1:]  # nothing stands before it
        rows = rows[packed.labels.cpu()[rows] >= 0]
        weights[rows] = torch.tensor(text[: len(rows)], dtype=torch.float64)
    return weights


def taught_by_hand(
    job: Job,
    parts: Mapping[str, Part],
    batch: Microbatch,
    hidden: Tensor,
    weights: Tensor,
    rows: Mapping[str, Tensor],
) -> list[Term]:
    """Return what the samples that teachers read add to the loss, whole rows of both models compared.

    Args:
        job: the whole.
        parts: its modules.
        batch: the samples.
        hidden: what the language model made of them.
        weights: of their labels, likewise [T].
        rows: of encoders.
    """
    found = list[Term]()
    total = float(weights.sum()) or 1.0
    for module in job.teachers:
        assert module.distil is not None
        known = {encoder.modality: encoder.name for encoder in job.encoders_of(module)}
        is_taught = [
            {item.info.modality for item in layout.items if item.runs} <= known.keys() for layout in batch.layouts
        ]
        lengths = torch.tensor([len(layout.tokens) for layout in batch.layouts])
        kept = torch.tensor(is_taught).repeat_interleave(lengths).to(hidden.device)
        taught = [layout for layout, own in zip(batch.layouts, is_taught, strict=True) if own]
        packed = language_batch(pack(taught), job, hidden.device, module=module)
        teacher = parts[module.name].language
        with torch.no_grad():
            read = teacher(packed, {name: rows[name] for name in known.values() if name in rows}, None)
        own = weights.to(read)[kept]
        if module.distil.hidden == "mse":
            each = (hidden[kept] - read).square().sum(1) / hidden.shape[1]
            mean = (own * each).sum() / total
            found.append(Term(name=f"{module.name}.hidden", mean=mean, weight=module.distil.hidden_weight))
        elif module.distil.hidden == "cosine":
            lengths = hidden[kept].norm(dim=1) * read.norm(dim=1)
            mean = (own * (1 - (hidden[kept] * read).sum(1) / lengths)).sum() / total
            found.append(Term(name=f"{module.name}.hidden", mean=mean, weight=module.distil.hidden_weight))
        if module.distil.top_k:
            with torch.no_grad():
                wanted = teacher.logits(read) / module.distil.temperature
                ids = wanted.topk(module.distil.top_k, dim=1).indices
            ours = parts["language"].language.logits(hidden)[kept] / module.distil.temperature
            logs, wanted_logs = (_buckets(logits, ids) for logits in (ours, wanted))
            each = (wanted_logs.exp() * (wanted_logs - logs)).sum(1) * module.distil.temperature**2
            mean = (own * each).sum() / total
            found.append(Term(name=f"{module.name}.divergence", mean=mean, weight=module.loss_weight))
    return found


def made_by_hand(
    job: Job,
    parts: Mapping[str, Part],
    batch: Microbatch,
    hidden: Tensor,
    broken: Collection[tuple[int, int]],
    step: int,
) -> tuple[list[Term], int]:
    """Return what generators add to the loss, each item made alone, and how many targets they learn from.

    Args:
        job: the whole.
        parts: its modules.
        batch: the samples.
        hidden: what the language model made of them.
        broken: items that can't be decoded.
        step: which.
    """
    terms, every = list[Term](), 0
    key = step_key(job.settings.run.seed, step)
    for module in job.generators:
        losses, first, prepared = [hidden.new_zeros(0)], 0, iter(range(len(batch.items(module, 0))))
        part = parts[module.name]
        for layout in batch.layouts:
            tokens = torch.tensor(layout.tokens)
            for item in layout.made(module.modality):
                number, (start, stop) = next(prepared), item.asked or (0, 0)
                assert (tokens[start:stop] == job.tokenizer.placeholder(module.modality)).all()
                span = (start, stop) if module.spec.reads(module.config) == "own" else (0, start)  # type: ignore[union-attr]
                if any((layout.sample, one.info.index) in broken for one in layout.items):
                    continue
                given = [{name: x.to(hidden) for name, x in batch.prepare_one(module, 0, number).items()}]
                rows = torch.cat(
                    [
                        *(
                            row
                            for lens in job.encoders_of(module)
                            for row in shown_by_hand(batch, layout, start, lens, parts[lens.name], key)
                        ),
                        hidden[first + span[0] : first + span[1]],
                    ]
                )
                keys = item_keys(key, [layout.sample], [item.info.index])
                with part.drawing(items=keys):
                    losses.append(part.target_losses(given, rows, [(0, len(rows))], keys, sizes=[item.info.size]))
            first += len(tokens)
        found = torch.cat(losses)
        every += len(found) if module.loss_weight else 0  # what is only reported is nothing to learn from
        mean = found.sum() / max(len(found), 1)
        terms.append(Term(name=f"{module.name}.loss", mean=mean, weight=module.loss_weight))
    return terms, every


def shown_by_hand(
    batch: Microbatch, layout: SampleLayout, stop: int, module: JobModule, part: Part, key: Tensor
) -> Iterator[Tensor]:
    """Yield the rows that a generator's own encoder makes of each item of a sample before a position, read alone."""
    numbers = {(item.info.sample, item.info.index): number for number, item in enumerate(batch.items(module, 0))}
    for item in layout.items:
        if item.info.modality != module.modality or not item.runs or item.runs[-1][1] > stop:
            continue
        weight = next(part.module.parameters())
        prepared = batch.prepare_one(module, 0, numbers[item.info.sample, item.info.index])
        given = {name: x.to(weight) if x.is_floating_point() else x for name, x in prepared.items()}
        with part.drawing(items=item_keys(key, [item.info.sample], [item.info.index])):
            yield part.encode([given], [item.info.size])


def _buckets(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of ids, and of all others as one."""
    logs = logits.log_softmax(1)
    others = logs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
    return torch.cat([logs.gather(1, ids), others], dim=1)


def _build(job: Job, *, device: torch.device, dtype: torch.dtype) -> dict[str, Part]:
    """Return the modules of a job of one rank by name, each whole."""
    meshes = Meshes(job.model_graph, rank=0, device_type=device.type)
    return {
        module.name: build_part(
            module.spec,
            module.config,
            grid=module.grid,
            seed=job.settings.run.seed,
            axis=TensorAxis.of(meshes.tensor_mesh(module.grid)),
            mesh=meshes.tensor_mesh(module.grid),
            device=device,
            dtype=dtype,
            hidden=job.row_width(module),
            frozen=module.frozen,
            lora=module.lora,
            expert_mesh=meshes.expert_mesh(module.grid) if job.model_graph.by_name[module.name].experts else None,
        )
        for module in job.modules
    }


@torch.no_grad()
def nudge(weights: Iterable[Tensor]) -> None:
    """Move each number to the next one, up or down; without gradients."""
    generator = torch.Generator().manual_seed(0)
    for value in weights:
        way = torch.where(torch.rand(value.shape, generator=generator) < 0.5, math.inf, -math.inf)
        value.copy_(torch.nextafter(value, way.to(value)))


def _copy(value: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return value.detach().clone().cpu()


def _norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the norm of all gradients together."""
    gradients = [_copy(value.grad).double() for value in parameters if value.grad is not None]
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


def _watch_gaps(module: nn.Module) -> list[float]:
    """Return a list that takes, at each forward of each router, by how much the closest choice of a row was clear."""
    gaps: list[float] = []

    def watch(router: Router, _inputs: Any, choices: Choices) -> None:
        ranked = choices.scores.detach() + (0.0 if router.bias is None else router.bias)
        best = ranked.topk(router.chosen + 1, dim=1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))

    for part in module.modules():
        if isinstance(part, Router) and part.chosen < len(part.weight):
            part.register_forward_hook(watch)
    return gaps
