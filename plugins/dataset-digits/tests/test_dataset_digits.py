"""The digits dataset: content, split and refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import attrs
import numpy as np
import pluggy
import pytest
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it ships no types

from mimo.data import DATASETS, TOKENIZERS, MadeItem, SplitName, Tokenizer, lay_out
from mimo.hooks import ConfigError, ItemInfo, discover
from mimo_dataset_digits import WORDS, DigitsConfig
from mimo_dataset_digits._plugin import DigitsDataset, TaskName, open_digits

DATA = load_digits()


def tokenizer(*modalities: str, words: tuple[str, ...] = WORDS) -> Tokenizer:
    """Return a word tokenizer, by default one that serves."""
    word = discover(TOKENIZERS).find("word", "here")
    return word.build(word.config(words=words), modalities or ("image",))


def opened(split: SplitName, held_out: float = 0.2, task: TaskName = "read") -> DigitsDataset:
    """Open one split."""
    return open_digits(DigitsConfig(held_out=held_out, task=task), tokenizer(), split)


def number(dataset: DigitsDataset, sample: int) -> int:
    """Return where a sample stands in scikit-learn's order."""
    return int(dataset.where(sample).removeprefix("digits:"))


@pytest.mark.parametrize(("held_out", "count"), [(0.2, 359), (0.5, 898), (1e-9, 1), (1 - 1e-9, 1796)])
def test_digits_split_covers_all_once(held_out: float, count: int) -> None:
    """Every image is in exactly one split, and neither is empty."""
    train, evaluation = opened("train", held_out), opened("evaluation", held_out)
    numbers = [number(dataset, sample) for dataset in (train, evaluation) for sample in range(len(dataset))]
    assert sorted(numbers) == list(range(1797))
    assert len(evaluation) == count


def test_digits_split_is_fixed_for_good() -> None:
    """The same images are held out on every machine, and they are no run of neighbours."""
    evaluation = opened("evaluation")
    assert [number(evaluation, sample) for sample in range(8)] == [4, 5, 12, 13, 28, 31, 37, 38]
    assert set(evaluation.labels.tolist()) == set(range(10))


def test_digits_samples_match_scikit_learn() -> None:
    """Each sample's caption, size and pixels are those of the image that it names."""
    words = tokenizer()
    for split in ("train", "evaluation"):
        dataset = opened(split)
        for sample in range(0, len(dataset), 37):
            at = number(dataset, sample)
            spoken = WORDS[3 + DATA.target[at]]
            assert words.decode(dataset.tokens(sample)) == f"<image> the digit is {spoken}"
            (info,) = dataset.infos(sample)
            assert info == ItemInfo(sample=sample, index=0, modality="image", size=(8, 8), role="input")
            image = dataset.raw(sample, 0)
            assert (image.mode, image.size) == ("L", (8, 8))
            assert np.allclose(np.asarray(image), DATA.images[at] * 255 / 16, atol=0.5)


def test_digits_pixels_use_the_whole_range() -> None:
    """Paper is 0 and full ink 255."""
    images = opened("train").images
    assert images.dtype == np.uint8
    assert (int(images.min()), int(images.max())) == (0, 255)


def test_digits_tokens() -> None:
    """A caption is placeholder, four words and the end; laid out, every word and the end is a label."""
    dataset, words = opened("train"), tokenizer()
    sample = dataset.labels.tolist().index(7)
    assert dataset.tokens(sample) == (1, 2, 3, 4, 12, 0)
    layout = lay_out(dataset, sample, tokenizer=words, rows={"image": lambda size: 4}, max_tokens=64)
    assert layout.labels.tolist() == [-100, -100, -100, 2, 3, 4, 12, 0, -100]


def test_digits_are_drawn() -> None:
    """The image stands behind the word that it is drawn for, and is an output; images and split are the same."""
    for split in ("train", "evaluation"):
        read, drawn = opened(split), opened(split, task="draw")
        assert len(read) == len(drawn)
        for sample in range(0, len(drawn), 37):
            assert tokenizer().decode(drawn.tokens(sample)) == f"draw {WORDS[3 + drawn.labels[sample]]} <image>"
            assert drawn.infos(sample) == [attrs.evolve(info, role="output") for info in read.infos(sample)]
            assert drawn.raw(sample, 0).tobytes() == read.raw(sample, 0).tobytes()
            assert drawn.where(sample) == read.where(sample)


def test_digits_that_are_drawn_are_laid_out() -> None:
    """Each is made from its caption, and the model learns to call for it."""
    dataset, words = opened("train", task="draw"), tokenizer()
    sample = dataset.labels.tolist().index(7)
    assert dataset.tokens(sample) == (15, 12, 1, 0)
    layout = lay_out(dataset, sample, tokenizer=words, rows={}, made={"image": MadeItem()}, max_tokens=64)
    assert layout.labels.tolist() == [12, 1, 0, -100]
    assert [(item.asked, item.made_from) for item in layout.made("image")] == [((2, 3), (0, 2))]


def test_digits_are_read_and_drawn() -> None:
    """As many samples again: first all images are read, then each is drawn in the same order."""
    both = opened("evaluation", task="both")
    read, drawn = (opened("evaluation", task=task) for task in ("read", "draw"))
    assert len(both) == 2 * 359
    for sample in range(len(both)):
        same, other = (read, sample) if sample < 359 else (drawn, sample - 359)
        assert both.tokens(sample) == same.tokens(other)
        assert both.infos(sample) == [attrs.evolve(info, sample=sample) for info in same.infos(other)]
        assert both.where(sample) == same.where(other)
        assert both.raw(sample, 0).tobytes() == same.raw(other, 0).tobytes()
    with pytest.raises(IndexError):
        both.tokens(len(both))


@pytest.mark.parametrize(
    ("task", "needed"),
    [("read", WORDS[:-1]), ("draw", (*WORDS[3:13], "draw")), ("both", WORDS)],
)
def test_digits_need_the_words_of_their_task(task: TaskName, needed: tuple[str, ...]) -> None:
    """No others; the last one missing, all of them are named."""
    assert len(open_digits(DigitsConfig(task=task), tokenizer(words=needed), "train")) >= 1438
    with pytest.raises(ConfigError, match=re.escape(f"tokenizer.words must hold {', '.join(needed)};")):
        open_digits(DigitsConfig(task=task), tokenizer(words=needed[:-1]), "train")


def test_digits_byte_tokenizer_serves() -> None:
    """Any tokenizer that encodes the captions will do."""
    byte = discover(TOKENIZERS).find("byte", "here")
    dataset = open_digits(DigitsConfig(), byte.build(byte.config(), ["image"]), "train")
    assert bytes(dataset.tokens(0)[1:-1]).startswith(b" the digit is ")


@pytest.mark.parametrize("held_out", [0, 1, -0.1, float("nan")])
def test_digits_refuses_share(held_out: float) -> None:
    """A share that leaves a split empty is refused by its setting."""
    expected = f"data.held_out: expected a share greater than 0 and less than 1, got {held_out}."
    with pytest.raises(ConfigError, match=re.escape(expected)):
        DigitsConfig(held_out=held_out)


def test_digits_refuses_tokenizer() -> None:
    """A tokenizer without the words is refused when opened, with the words that it needs."""
    lacking = tokenizer(words=WORDS[:-2])
    expected = (
        "tokenizer: expected one that encodes the caption '<image> the digit is nine', got the word 'nine' is not "
        "among the tokenizer's 12 words. With the word tokenizer: tokenizer.words must hold the, digit, is, zero, one,"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        open_digits(DigitsConfig(), lacking, "train")
    with pytest.raises(ConfigError, match=re.escape("the word '<image>' is not among")):
        open_digits(DigitsConfig(), tokenizer("audio"), "train")


def test_digits_is_a_plugin() -> None:
    """The entry point loads a module whose hook is specified; importing it leaves scikit-learn and torch out."""
    manager = pluggy.PluginManager("mimo")
    manager.add_hookspecs(DATASETS.hookspecs)
    manager.register(entry_points(group="mimo.datasets")["digits"].load())
    manager.check_pending()
    assert [spec.name for (spec,) in manager.hook.mimo_register_datasets()] == ["digits"]
    check = "import sys, mimo_dataset_digits; print(sorted({'torch', 'sklearn', 'PIL'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)  # noqa: S603 - own text
    assert done.stdout == "[]\n"


def test_digits_readme_example_runs() -> None:
    """The README's example runs as it stands and prints what it says."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    promised = "".join(f"{line}\n" for line in re.findall(r"^print.*  # (.*)$", example, flags=re.MULTILINE))
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)  # noqa: S603 - own text
    assert (done.stderr, done.stdout) == ("", promised)
