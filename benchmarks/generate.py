"""Time of generated tokens: ours with the decode cache beside `transformers` with its own, one prompt and several.

A decoder of the same configuration and weights writes the same likeliest tokens in all ways, from prompts of random
bytes: ours as `mimo generate` does, text decoded piece by piece, theirs by `generate` of `LlamaForCausalLM`, several
prompts as one batch. All take turns in one run, one thread. What is written is compared before anything is timed. The
prompt is part of the time. Without the cache ours reads all again for each token, of which there are fewer then.
``nox -s bench -- generate [--rounds N] [--cpu]`` prints a table, and as its last line one JSON object. With ``--cpu``
CPU seconds count, on a machine where others compute too.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from _found import Found, report
from safetensors.torch import load_file
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from mimo.model import DECODER, DecoderConfig, Stage
from mimo.model.runtime import local, read_hf
from mimo.trainer import Trainer, generate, generate_many, prompt_of, read_settings, resolve

VOCABULARY = 8192
KNOWN = 257  # ids of the byte tokenizer, its end among them
HIDDEN = 384
LAYERS = 8
PROMPT = 128
TOKENS = 512
FEW = 64
"""Tokens that are written where all is read again for each."""
BATCH = 8

Way = Callable[[], list[str]]


@attrs.frozen(kw_only=True)
class Ways:
    """Ways to write the same; each returns what it wrote."""

    ours: Way
    theirs: Way


def make() -> dict[str, Ways]:
    """Return the ways of each comparison."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        eos_token_id=KNOWN - 1,
        initializer_range=0.1,  # so that what is written is not one token again and again
        **more,
    )
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[KNOWN - 1] = 0  # so that nothing ends early
    trainer = ours(model)
    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT)) for _ in range(BATCH)]
    prompts = [prompt_of(trainer.job, text) for text in texts]
    others = list(range(KNOWN, VOCABULARY))

    def theirs(count: int, tokens: int) -> list[str]:
        ids = torch.tensor([list(text.encode()) for text in texts[:count]])
        given: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": others}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **given)
        return [trainer.job.tokenizer.decode(row[PROMPT:].tolist()) for row in found]

    def several() -> list[str]:
        return [answer.text for answer in generate_many(trainer, prompts, max_tokens=TOKENS, batch=BATCH)]

    return {
        "one prompt": Ways(
            ours=lambda: [generate(trainer, prompts[0], max_tokens=TOKENS)], theirs=lambda: theirs(1, TOKENS)
        ),
        f"{BATCH} prompts": Ways(ours=several, theirs=lambda: theirs(BATCH, TOKENS)),
        f"{FEW} tokens, with the cache / without": Ways(
            ours=lambda: [generate(trainer, prompts[0], max_tokens=FEW)],
            theirs=lambda: [generate(trainer, prompts[0], max_tokens=FEW, use_cache=False)],
        ),
    }


def ours(model: Any) -> Trainer:
    """Return our decoder with a model's settings and weights, as `mimo generate` has it."""
    family = next(family for family in DECODER.hf if family.model_type == "llama")
    settings = family.settings(model.config.to_dict())
    plain = DECODER.build(DecoderConfig(**settings), Stage())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = {
            name: tensor for path in Path(folder).glob("*.safetensors") for name, tensor in load_file(path).items()
        }
    read_hf(plain, family, DecoderConfig(**settings), files)
    table = {
        "run": {"name": "generate", "steps": 1, "global_batch": 1, "directory": "none"},
        "data": {"plugin": "jsonl", "path": "none.jsonl"},
        "tokenizer": {"plugin": "byte"},
        "modules": {"language": {"plugin": "decoder", "ranks": "0", "config": settings}},
    }
    trainer = Trainer(resolve(read_settings(table), purpose="generate"), rank=0, device=torch.device("cpu"))
    (part,) = trainer.model.parts_of("language")
    with torch.no_grad():
        for name, value in plain.state_dict().items():
            local(part.parameters[f"language.{name}"]).copy_(value)
    return trainer


def turns(ways: Ways, rounds: int, clock: Callable[[], float]) -> Iterator[float]:
    """Yield how long ours took beside theirs, turn by turn."""
    for turn in range(rounds + 1):
        taken = []
        for way in (ways.ours, ways.theirs):
            begun = clock()
            way()
            taken.append(clock() - begun)
        print(f"  {taken[0]:.2f} s, {taken[1]:.2f} s", flush=True)
        if turn:  # the first one makes buffers
            yield taken[0] / taken[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the median counts")
    parser.add_argument("--cpu", action="store_true", help="count CPU seconds")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    ratios: dict[str, list[float]] = {}
    for name, ways in make().items():
        written, expected = ways.ours(), ways.theirs()
        assert written == expected, (written, expected)
        print(name, flush=True)
        ratios[name if "/" in name else f"{name}: ours / transformers"] = [*turns(ways, options.rounds, clock)]
    dist.destroy_process_group()
    aims = {name: ("<=", 1 / 3 if "without" in name else 0.9) for name in ratios}
    report("generate", [Found(ratios=ratios, aims=aims)], rounds=options.rounds)


if __name__ == "__main__":
    main()
