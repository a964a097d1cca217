"""CPU time in which a rank lays out samples whose ids `mimo data index --tokens` has kept, over that of encoding them.

Each rank lays out all samples of a step, so this is what a step's global batch costs a rank. Texts of 600 words, and
conversations of three answers, drawn from 5,000 words; a BPE of 8,000 ids learned from them. Either way takes turns.
``nox -s bench -- kept_ids [--rounds N]`` prints a line each, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mimo.trainer import Job, read_settings, resolve
from mimo.trainer.commands.main import run

SAMPLES = 256
WORDS, LETTERS = 5000, "etaoinshrdlu"
TURNS, ASKED, ANSWERED = 3, 60, 140
"""Of a conversation, and words in each of its questions and answers."""
AIM = 0.1


class Drawn:
    """Draws text."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._words = ["".join(self._random.choices(LETTERS, k=self._random.randrange(2, 9))) for _ in range(WORDS)]

    def text(self, words: int) -> str:
        """Return so many words."""
        return " ".join(self._random.choices(self._words, k=words))

    def conversation(self) -> list[dict[str, str]]:
        """Return questions with their answers."""
        turns = [("user", ASKED), ("assistant", ANSWERED)] * TURNS
        return [{"role": role, "content": self.text(words)} for role, words in turns]


def write(folder: Path) -> None:
    """Write texts, conversations and a tokenizer."""
    drawn = Drawn()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=marks, initial_alphabet=letters)
    tokenizer.train_from_iterator((drawn.text(200) for _ in range(300)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    makes: Mapping[str, Callable[[], dict[str, Any]]] = {
        "texts": lambda: {"text": drawn.text(TURNS * (ASKED + ANSWERED))},
        "conversations": lambda: {"messages": drawn.conversation()},
    }
    for name, make in makes.items():
        lines = (json.dumps(make()) for _ in range(SAMPLES))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        (folder / f"{name}.toml").write_text(
            f"""
            [run]
            name = "kept"
            steps = 1
            global_batch = 8
            [data]
            plugin = "jsonl"
            path = "{folder}/{name}.jsonl"
            max_tokens = 8192
            chat = {{ template = "chatml" }}
            [tokenizer]
            plugin = "file"
            path = "{folder}/tokenizer.json"
            end = "<|end|>"
            [modules.language]
            plugin = "decoder"
            ranks = "0"
            config = {{ hidden = 16, layers = 1, heads = 2, intermediate = 16 }}
            """
        )


def index(settings: Path, *words: str) -> None:
    """Write the index of a file of samples."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = run(["data", "index", str(settings), "--jobs", "1", *words])
    assert code == 0, code


def seconds(job: Job) -> float:
    """Return CPU seconds a sample."""
    assert job.train is not None
    start = time.process_time()
    for sample in range(SAMPLES):
        job.lay_out(job.train, sample)
    return (time.process_time() - start) / SAMPLES


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the median counts")
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {"texts": [], "conversations": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        for what, ratios in found.items():
            settings = folder / f"{what}.toml"
            for _ in range(rounds):
                index(settings)
                encoded = seconds(resolve(read_settings(settings)))
                index(settings, "--tokens")
                kept = seconds(resolve(read_settings(settings)))
                ratios.append(kept / encoded)
                print(f"{what}: {kept * 1e3:.3f} ms / {encoded * 1e3:.3f} ms a sample = {ratios[-1]:.3f}")
    print(
        json.dumps(
            {
                "bench": "kept_ids",
                "ratios": {what: statistics.median(ratios) for what, ratios in found.items()},
                "aims": {what: ["<=", AIM] for what in found},
                "runs": rounds,
                "spread": {what: [min(ratios), max(ratios)] for what, ratios in found.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
