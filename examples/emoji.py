"""Make 3,655 pictures with names, and conversations about them, out of a font: `python examples/emoji.py FOLDER`.

The pictures are Google's Noto Color Emoji (SIL Open Font License 1.1), the names the Unicode Consortium's
(Unicode License). Debian carries both, in fonts-noto-color-emoji and unicode-data: they are fetched by apt-get, without
being installed, unless ``--root`` names a folder that has them.

FOLDER then has ``pictures/1f600.png``, ``train.jsonl``, ``held-out.jsonl`` with every tenth emoji, ``tokenizer.json``.
In ``train-swapped.jsonl`` and ``held-out-swapped.jsonl`` pictures are exchanged among the samples: what a model learns
of these, it learns without seeing.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGES = ("fonts-noto-color-emoji", "unicode-data")
FONT = "usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
NAMES = "usr/share/unicode/emoji/emoji-test.txt"
QUESTIONS = ("What is this?", "What does the picture show?", "Name it.")
STRIKE = 109
"""The one size in pixels that the font's bitmaps have."""
SIDE = 32
"""Of a picture, in pixels."""
HELD_OUT = 10


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description="Pictures of emoji, and conversations about them.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, help="where the files of the two packages lie; / where they are installed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as fetched:
        root = arguments.root or fetch(Path(fetched))
        font = ImageFont.truetype(str(root / FONT), STRIKE, layout_engine=ImageFont.Layout.RAQM)
        named = list(read_names((root / NAMES).read_text(encoding="utf-8")))
        folder: Path = arguments.folder
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        for emoji, _ in named:
            draw(emoji, font).save(folder / picture_of(emoji))
    train = [pair for index, pair in enumerate(named) if index % HELD_OUT]
    held_out = named[::HELD_OUT]
    for name, pairs in (("train", train), ("held-out", held_out)):
        write(folder / f"{name}.jsonl", pairs)
        write(folder / f"{name}-swapped.jsonl", swapped(pairs))
    make_tokenizer([*QUESTIONS, *(name for _, name in train)]).save(str(folder / "tokenizer.json"))
    print(f"{folder}: {len(train)} to train on, {len(held_out)} held out")


def fetch(folder: Path) -> Path:
    """Return a folder with the files of the two packages, which apt-get fetches."""
    subprocess.run(["/usr/bin/apt-get", "-qq", "download", *PACKAGES], cwd=folder, check=True)
    for archive in folder.glob("*.deb"):
        subprocess.run(["/usr/bin/dpkg", "-x", archive, folder], check=True)
    return folder


def read_names(text: str) -> Iterator[tuple[str, str]]:
    """Yield each emoji and its name: ``1F600 ; fully-qualified # 😀 E1.0 grinning face``."""
    for points, name in re.findall(r"^([0-9A-F ]+?) *; fully-qualified +# \S+ E[\d.]+ (.+)$", text, re.MULTILINE):
        yield "".join(chr(int(point, 16)) for point in points.split()), name


def draw(emoji: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Return a picture of an emoji on white."""
    side = STRIKE * 5 // 4
    picture = Image.new("RGB", (side, side), "white")
    ImageDraw.Draw(picture).text((side // 2, side // 2), emoji, font=font, anchor="mm", embedded_color=True)
    return picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def picture_of(emoji: str) -> str:
    """Return where the picture of an emoji lies in the folder."""
    return f"pictures/{'-'.join(f'{ord(letter):x}' for letter in emoji)}.png"


def swapped(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the names in their places, each with the picture of another sample, at random."""
    emoji = [each for each, _ in pairs]
    random.Random(0).shuffle(emoji)
    return [(other, name) for other, (_, name) in zip(emoji, pairs, strict=True)]


def write(path: Path, pairs: Sequence[tuple[str, str]]) -> None:
    """Write a conversation about each picture."""
    lines = (json.dumps(conversation(*pair, number)) + "\n" for number, pair in enumerate(pairs))
    path.write_text("".join(lines), encoding="utf-8")


def make_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE with the tokens of chatml and one for a picture."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<image>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def conversation(emoji: str, name: str, number: int) -> dict[str, Sequence[object]]:
    """Return a conversation in which a picture is named."""
    question = [{"type": "image", "image": picture_of(emoji)}, {"type": "text", "text": QUESTIONS[number % 3]}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": name}]}


if __name__ == "__main__":
    main()
