"""Tokens that count more or less than others, beside a plain loop over a model of `transformers`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import published
import pytest
import torch
from commands import here
from jobs import make_job
from resuming import resume_and_save
from synthetic import WORDS
from tables import CLIP, RATE, STEPS, Table, table, world_of
from test_oracle import SP, on
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from mimo.data import weights_of
from mimo.testing import Pool
from mimo.testing.comparison import tensors_of


def plain(there: Path, settings: Table) -> tuple[list[float], dict[str, Tensor]]:
    """Train the model of a folder sample by sample, with torch's own AdamW; return its losses and what it becomes."""
    model = LlamaForCausalLM.from_pretrained(there)
    keys = settings["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, weight_decay=keys["weight_decay"], betas=(0.9, 0.95), eps=keys["eps"]
    )
    job = make_job(settings)
    data, order = job.train, job.sample_order()
    assert data is not None
    losses = []
    for step in range(1, STEPS + 1):
        loss, total = torch.zeros(()), 0.0
        for sample in order.samples(step):
            ids = torch.tensor(data.tokens(sample))
            weights = torch.tensor(weights_of(data, sample) or [1.0] * len(ids))[1:]
            logits = model(ids[None]).logits[0, :-1]
            loss = loss + (weights * functional.cross_entropy(logits, ids[1:], reduction="none")).sum()
            total += float(weights.sum())
        optimizer.zero_grad()
        (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()) / total)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def test_a_weighted_loss_is_that_of_a_plain_loop(tmp_path: Path, pool: Pool) -> None:
    """Losses of three steps, and every weight after them, where context and tensor ranks share the work."""
    there = published.llama(tmp_path / "there", vocab_size=len(WORDS) + 1)
    ours, run, back = (str(tmp_path / name) for name in ("ours", "run", "back"))
    model = tomllib.loads(here("checkpoint", "import-hf", str(there)).printed)["modules"]["language"]
    here("checkpoint", "import-hf", str(there), "--out", ours)
    settings = table({"language": on(0, 3, cp=2, tp=2, **SP)}, microbatches=2, weights="mixed")
    losses, weights = plain(there, settings)
    settings["modules"]["language"] |= {"plugin": model["plugin"], "config": model["config"]}
    settings["run"]["directory"], settings["load"] = run, {"finetune": ours}
    found = pool.run(world_of(settings), resume_and_save, settings, 1, STEPS)
    assert found[0].losses == pytest.approx(losses, rel=1e-5)
    here("checkpoint", "export-hf", run, back)
    exported = tensors_of(Path(back))
    assert weights.keys() == exported.keys()
    for name, value in weights.items():
        bound = 1e-5 * max(float(value.norm()), 3 * RATE * value.numel() ** 0.5)
        assert float((exported[name] - value).norm()) <= bound, name
