"""The spoken digits: who speaks, what stands beside, how clips are kept, and refusals; most of it without espeak-ng."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pluggy
import pytest

from mimo.data import DATASETS, TOKENIZERS, SplitName, Tokenizer, lay_out
from mimo.hooks import ConfigError, discover
from mimo_dataset_digits import load_split
from mimo_dataset_spoken_digits import WORDS, SpokenDigitsConfig
from mimo_dataset_spoken_digits._clips import DIGITS, clips_of
from mimo_dataset_spoken_digits._plugin import SpokenDigitsDataset, open_spoken_digits

# Answers calls of espeak-ng with clips made beforehand; their length follows from speed, pitch and word.
_SPEAKER = """#!/bin/sh
test "$1 $3 $5 $7 $#" = "-v -s -p -w 9" || exit 1
echo "$2 $9" >> {folder}/asked
cp "{folder}/$4-$6-$9" "$8"
printf %s "$2 $9" >> "$8"
"""


def _frames(speed: int, pitch: int, digit: int) -> int:
    return 10 * speed + pitch + 1000 * len(DIGITS[digit])


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """A folder with the evaluation split, the program that made it, and the calls that it got."""
    folder = tmp_path_factory.mktemp("spoken")
    for clip in clips_of("evaluation"):
        with wave.open(str(folder / f"{clip.speed}-{clip.pitch}-{DIGITS[clip.digit]}"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(22050)
            file.writeframes(bytes(2 * _frames(clip.speed, clip.pitch, clip.digit)))
    program = folder / "speaker"
    program.write_text(_SPEAKER.format(folder=folder))
    program.chmod(0o755)
    config = SpokenDigitsConfig(folder=str(folder / "clips"), program=str(program))
    with ThreadPoolExecutor(3) as pool:  # all ask at once, as ranks do
        list(pool.map(lambda _: open_spoken_digits(config, tokenizer(), "evaluation"), range(3)))
    return folder / "clips", str(program), folder / "asked"


def tokenizer(words: tuple[str, ...] = WORDS) -> Tokenizer:
    """Return a word tokenizer, by default one that serves."""
    word = discover(TOKENIZERS).find("word", "here")
    return word.build(word.config(words=words), ("image", "audio"))


def opened(spoken: tuple[Path, str, Path], pictures: int = 0) -> SpokenDigitsDataset:
    """Open the evaluation split."""
    config = SpokenDigitsConfig(folder=str(spoken[0]), program=spoken[1], pictures=pictures)
    return open_spoken_digits(config, tokenizer(), "evaluation")


def test_spoken_voices_are_held_out() -> None:
    """No speaker, speed or pitch of one split is in the other; each digit is spoken equally often."""
    train, evaluation = clips_of("train"), clips_of("evaluation")
    assert (len(train), len(evaluation)) == (1600, 240)
    reported = [
        [(clip.voice.partition("+")[2], clip.speed, clip.pitch) for clip in clips] for clips in (train, evaluation)
    ]
    for heard, tested in zip(zip(*reported[0], strict=True), zip(*reported[1], strict=True), strict=True):
        assert not set(heard) & set(tested)
    for clips in (train, evaluation):
        assert len({clip.file for clip in clips}) == len(clips)
        assert set(np.bincount([clip.digit for clip in clips])) == {len(clips) // 10}


def test_spoken_clips_are_made_once(spoken: tuple[Path, str, Path]) -> None:
    """Each clip is asked for once, whoever opens the dataset and how often, and its size is that of its file."""
    dataset = opened(spoken)
    asked = spoken[2].read_text().splitlines()
    wanted = [f"{clip.voice} {DIGITS[clip.digit]}" for clip in dataset.clips]
    assert sorted(asked) == sorted(wanted)
    for sample in range(0, len(dataset), 41):
        clip = dataset.clips[sample]
        frames = _frames(clip.speed, clip.pitch, clip.digit)
        (info,) = dataset.infos(sample)
        assert (info.sample, info.index, info.modality, info.size) == (sample, 0, "audio", (frames, 22050))
        path = dataset.raw(sample, 0)
        with wave.open(str(path)) as file:
            assert file.getnframes() == frames
        assert dataset.where(sample) == str(path)
        assert tokenizer().decode(dataset.tokens(sample)) == f"<audio> the digit is {DIGITS[clip.digit]}"


def test_spoken_and_shown(spoken: tuple[Path, str, Path]) -> None:
    """With pictures each sample shows a held-out one besides, and its caption names both, in any combination."""
    images, labels, _ = load_split(0.2, "evaluation")
    dataset = opened(spoken, pictures=4)
    assert len(dataset) == 4 * 240
    reported = set()
    for sample in range(len(dataset)):
        picture, clip = dataset.infos(sample)
        assert (picture.index, picture.modality, picture.size) == (0, "image", (8, 8))
        assert (clip.index, clip.modality) == (1, "audio")
        at = int(dataset.pairs[sample, 1])
        assert np.array_equal(np.asarray(dataset.raw(sample, 0)), images[at])
        says = dataset.raw(sample, 1).stem.rpartition("-")[2]
        text = f"<image> <audio> it shows {DIGITS[labels[at]]} and says {says}"
        assert tokenizer().decode(dataset.tokens(sample)) == text
        assert dataset.where(sample).endswith(f"{says}.wav with picture {at}")
        reported.add(text)
    assert len(reported) > 95
    layout = lay_out(
        dataset, 0, tokenizer=tokenizer(), rows={"image": lambda _: 4, "audio": lambda _: 3}, max_tokens=64
    )
    assert [(item.info.modality, item.start) for item in layout.items] == [("image", 0), ("audio", 4)]


def test_spoken_refuses_a_missing_program(tmp_path: Path) -> None:
    """With the way to get it, and without leaving anything that looks made."""
    config = SpokenDigitsConfig(folder=str(tmp_path / "clips"), program="no-such-speaker")
    wanted = r"data\.program: expected the program espeak-ng, got 'no-such-speaker', which isn't there\. Install it"
    for _ in range(2):
        with pytest.raises(ConfigError, match=wanted):
            open_spoken_digits(config, tokenizer(), "train")


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ("echo no such voice >&2; exit 1", "no such voice"),
        ("echo 'disk full' >&2", "disk full"),  # espeak-ng ends with 0 where it can't write
        ('printf noise > "$8"', "a file that is no clip"),
    ],
)
def test_spoken_refuses_a_program_that_does_not_speak(body: str, reported: str, tmp_path: Path) -> None:
    """The message has the call and the answer; nothing is kept."""
    program = tmp_path / "mute"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    config = SpokenDigitsConfig(folder=str(tmp_path / "clips"), program=str(program))
    with pytest.raises(
        ConfigError, match=rf"data\.program: expected a clip from '.*mute -v en-us\+m7 .*, got .*{reported}"
    ):
        open_spoken_digits(config, tokenizer(), "evaluation")
    assert [path.name for path in (tmp_path / "clips").iterdir()] == [".lock"]


def test_spoken_refuses_a_voice_that_another_stands_in_for(spoken: tuple[Path, str, Path], tmp_path: Path) -> None:
    """The message names both, and nothing is kept."""
    program = tmp_path / "speaker"
    text = _SPEAKER.format(folder=spoken[2].parent).replace("echo", ": ")
    program.write_text(text.replace('%s "$2 $9"', '%s "$(echo "$2 $9" | sed s/gb-x-rp+f5/us+m8/)"'))
    program.chmod(0o755)
    config = SpokenDigitsConfig(folder=str(tmp_path / "clips"), program=str(program))
    wanted = (
        r"data\.program: expected voices that sound unlike each other, got the same clip for 'en-us\+m8' and "
        r"'en-gb-x-rp\+f5', en-us\+m8-145-50-zero\.wav and en-gb-x-rp\+f5-145-50-zero\.wav\. It may lack one"
    )
    with pytest.raises(ConfigError, match=wanted):
        open_spoken_digits(config, tokenizer(), "evaluation")
    assert [path.name for path in (tmp_path / "clips").iterdir()] == [".lock"]


@pytest.mark.parametrize("index", ["", "{}", "[]", '{"a.wav": 3}', None])
def test_spoken_refuses_another_folder(index: str | None, tmp_path: Path) -> None:
    """A folder of that name that this dataset did not make is refused, not filled."""
    place = tmp_path / "evaluation"
    place.mkdir()
    if index is not None:
        (place / "index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"data\.folder: expected a folder '.*evaluation' that this dataset has made"):
        open_spoken_digits(SpokenDigitsConfig(folder=str(tmp_path)), tokenizer(), "evaluation")


def test_spoken_refuses_a_folder_that_cannot_be(tmp_path: Path) -> None:
    """A file in its place."""
    (tmp_path / "clips").write_text("")
    config = SpokenDigitsConfig(folder=str(tmp_path / "clips"), program=sys.executable)
    with pytest.raises(ConfigError, match=r"data\.folder: expected a folder that can be written, got .*exists"):
        open_spoken_digits(config, tokenizer(), "train")


def test_spoken_refuses_settings(spoken: tuple[Path, str, Path]) -> None:
    """Fewer pictures than none, and a tokenizer without the words, with those that it needs."""
    with pytest.raises(ConfigError, match=r"data\.pictures: expected a whole number from 0 to 1024, got -1"):
        SpokenDigitsConfig(folder="x", pictures=-1)
    config = SpokenDigitsConfig(folder=str(spoken[0]), pictures=1)
    with pytest.raises(
        ConfigError, match=r"tokenizer: expected one that encodes the caption .*'shows' .*must hold the, d"
    ):
        open_spoken_digits(config, tokenizer(("it", "and")), "evaluation")


def test_spoken_is_a_plugin() -> None:
    """The entry point loads a module whose hook is specified; importing it leaves pictures out."""
    manager = pluggy.PluginManager("mimo")
    manager.add_hookspecs(DATASETS.hookspecs)
    manager.register(entry_points(group="mimo.datasets")["spoken-digits"].load())
    manager.check_pending()
    assert [spec.name for (spec,) in manager.hook.mimo_register_datasets()] == ["spoken-digits"]
    check = "import sys, mimo_dataset_spoken_digits; print(sorted({'torch', 'sklearn', 'PIL'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)  # noqa: S603 - own text
    assert done.stdout == "[]\n"


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng isn't installed")
@pytest.mark.parametrize("split", ["evaluation", pytest.param("train", marks=pytest.mark.soak)])
def test_spoken_by_espeak(split: SplitName, tmp_path: Path) -> None:
    """The program itself speaks each digit, in each voice otherwise, for half a second at least."""
    dataset = open_spoken_digits(SpokenDigitsConfig(folder=str(tmp_path)), tokenizer(), split)
    assert len({dataset.raw(sample, 0).read_bytes() for sample in range(len(dataset))}) == len(dataset)
    assert min(frames / rate for frames, rate in dataset.sizes.values()) > 0.4
    assert len(json.loads((tmp_path / split / "index.json").read_text())) == len(dataset)


def test_spoken_readme_program(
    spoken: tuple[Path, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts the held-out clips, here those that another speaker has made."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "spoken-digits").symlink_to(spoken[0])
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})  # noqa: S102 - the README is ours
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print.*  # (.*)$", program, re.MULTILINE)
