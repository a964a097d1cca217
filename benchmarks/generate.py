"""Time of a generated token: with the decode cache, without it, and by `transformers` with its cache.

A decoder of the same configuration and weights writes the same likeliest tokens in all three, from a prompt of random
bytes: ours as `mimo generate` does, text decoded piece by piece, theirs by `generate` of `LlamaForCausalLM`. All take
turns in one run, one thread. What is written is compared before anything is timed. The prompt is part of the time.
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
from mimo.trainer import Trainer, generate, prompt_of, read_settings, resolve

VOCABULARY = 8192
KNOWN = 257  # ids of the byte tokenizer, its end among them
SIZES = {"hidden 256, 4 layers": (256, 4)}
PROMPT = 128
TOKENS = 128


@attrs.frozen(kw_only=True)
class Ways:
    """Three ways to write the same; each returns what it wrote."""

    remembering: Callable[[], str]
    rereading: Callable[[], str]
    theirs: Callable[[], str]


def make(hidden: int, layers: int) -> Ways:
    """Return the three ways of one size."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"attn_implementation": "sdpa"}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        initializer_range=0.1,  # so that what is written is not one token again and again
        **more,
    )
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[KNOWN - 1] = 0  # so that nothing ends early
    trainer = ours(model)
    text = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT))
    prompt, ids = prompt_of(trainer.job, text), torch.tensor([list(text.encode())])
    others = list(range(KNOWN, VOCABULARY))

    def theirs() -> str:
        given: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": others}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **given)
        return trainer.job.tokenizer.decode(found[0, PROMPT:].tolist())

    return Ways(
        remembering=lambda: generate(trainer, prompt, max_tokens=TOKENS),
        rereading=lambda: generate(trainer, prompt, max_tokens=TOKENS, use_cache=False),
        theirs=theirs,
    )


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


def turns(ways: Ways, rounds: int, clock: Callable[[], float]) -> Iterator[tuple[float, float, float]]:
    """Yield how long each took, turn by turn."""
    for turn in range(rounds + 1):
        taken = []
        for way in (ways.remembering, ways.rereading, ways.theirs):
            begun = clock()
            way()
            taken.append(clock() - begun)
        if turn:  # the first one makes buffers
            yield taken[0], taken[1], taken[2]


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
    parts = []
    for name, (hidden, layers) in SIZES.items():
        ways = make(hidden, layers)
        written = {ways.remembering(), ways.rereading(), ways.theirs()}
        assert len(written) == 1, written
        found = list(turns(ways, options.rounds, clock))
        for way, taken in zip(("remembering", "rereading", "transformers"), zip(*found, strict=True), strict=True):
            print(f"{name}, {way}: {TOKENS / min(taken):.0f} tokens a second at most", flush=True)
        faster, slower = f"{name}: without memory / with it", f"{name}: with memory / transformers"
        parts.append(
            Found(
                ratios={
                    faster: [reread / kept for kept, reread, _ in found],
                    slower: [kept / theirs for kept, _, theirs in found],
                },
                aims={faster: (">=", 3.0), slower: ("<=", 1.0)},
            )
        )
    dist.destroy_process_group()
    report("generate", parts, rounds=options.rounds)


if __name__ == "__main__":
    main()
