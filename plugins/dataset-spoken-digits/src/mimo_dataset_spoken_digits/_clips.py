"""What is spoken by whom, and the folder that keeps it: made once by espeak-ng, complete or not there at all."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import attrs

from mimo.data import SplitName
from mimo.hooks import ConfigError

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# Changing any of these changes who is held out, so that results before and after cannot be compared.
_ACCENTS = ("en-us", "en-gb-scotland", "en-gb-x-rp", "en-029")
_SPEAKERS = {
    "train": (
        *(
            "m1",
            "m2",
            "m3",
            "m4",
            "m5",
            "m6",
            "f1",
            "f2",
            "f3",
            "f4",
            "Alex",
            "Andrea",
            "Andy",
            "Annie",
            "Denis",
            "Diogo",
        ),
        *("Gene", "Hugo", "Jacky", "Lee", "Marco", "Mario", "Michael", "Mike", "Storm", "adam", "anika", "antonio"),
        *("belinda", "benjamin", "boris", "caleb", "david", "edward", "linda", "max", "paul", "pedro", "quincy", "rob"),
    ),
    "evaluation": ("m7", "m8", "f5"),
}
_STYLES = {  # words a minute, and pitch of 0 to 99
    "train": ((130, 35), (160, 65), (190, 35), (130, 65), (160, 35), (190, 65)),
    "evaluation": ((145, 50), (175, 50)),
}
_TIMES = {"train": 1, "evaluation": 2}  # that each voice speaks each digit, in styles that take turns

_INDEX = "index.json"
_SECONDS = 60  # for one word


@attrs.frozen(kw_only=True)
class Clip:
    """One spoken digit.

    Args:
        digit: 0 to 9.
        voice: as espeak-ng names it, ``en-us+m1``.
        speed: words a minute.
        pitch: 0 to 99.
    """

    digit: int
    voice: str
    speed: int
    pitch: int

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.voice}-{self.speed}-{self.pitch}-{DIGITS[self.digit]}.wav"


def clips_of(split: SplitName) -> tuple[Clip, ...]:
    """Return all clips of a split: speakers, speeds and pitches of one are none of the other's."""
    styles, clips = _STYLES[split], []
    for number, (accent, speaker) in enumerate(product(_ACCENTS, _SPEAKERS[split])):
        for speed, pitch in [styles[(number + more) % len(styles)] for more in range(_TIMES[split])]:
            voice = f"{accent}+{speaker}"
            clips += [Clip(voice=voice, speed=speed, pitch=pitch, digit=digit) for digit in range(len(DIGITS))]
    return tuple(clips)


def spoken_clips(folder: Path, program: str, split: SplitName) -> dict[str, tuple[int, int]]:
    """Return the size (frames, frames a second) of each clip of a split by its file, in ``folder / split``.

    The first who asks has them spoken, others wait for that.

    Raises:
        ConfigError: the program can't be run or doesn't speak, or not in all voices, or the folder can't be
            written or holds something else.
    """
    clips = clips_of(split)
    place = folder / split
    if not place.exists():
        with _locked(folder):
            if not place.exists():
                _speak_all(clips, place, program)
    try:
        sizes = {
            name: (int(frames), int(rate)) for name, (frames, rate) in json.loads((place / _INDEX).read_bytes()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _other(place, str(error)) from error
    if sizes.keys() != {clip.file for clip in clips}:
        raise _other(place, f"{len(sizes)} clips, not the {len(clips)} that belong there")
    return sizes


def _other(place: Path, got: str) -> ConfigError:
    return ConfigError(
        "data.folder",
        expected=f"a folder {str(place)!r} that this dataset has made",
        got=got,
        fix="Name another folder, or remove it to have it made again.",
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise ConfigError("data.folder", expected="a folder that can be written", got=str(error)) from error


def _speak_all(clips: Sequence[Clip], place: Path, program: str) -> None:
    found = shutil.which(program)
    if found is None:
        raise ConfigError(
            "data.program",
            expected="the program espeak-ng",
            got=f"{program!r}, which isn't there",
            fix="Install it (Debian: apt-get install espeak-ng), or give its path.",
        )
    with tempfile.TemporaryDirectory(dir=place.parent) as name:
        making = Path(name) / "clips"
        making.mkdir()
        with ThreadPoolExecutor() as pool:
            sizes = dict(pool.map(lambda clip: (clip.file, _speak(clip, making, found)), clips))
        _check_unlike(clips, making)
        (making / _INDEX).write_text(json.dumps(sizes))
        making.rename(place)


def _check_unlike(clips: Sequence[Clip], folder: Path) -> None:
    """Refuse a voice that sounds like another: a program that lacks one may speak in another without an error."""
    known: dict[bytes, Clip] = {}
    for clip in clips:
        other = known.setdefault(hashlib.sha256((folder / clip.file).read_bytes()).digest(), clip)
        if other is not clip:
            raise ConfigError(
                "data.program",
                expected="voices that sound unlike each other",
                got=f"the same clip for {other.voice!r} and {clip.voice!r}, {other.file} and {clip.file}",
                fix="It may lack one of them and speak in another; espeak-ng 1.51 has all.",
            )


def _speak(clip: Clip, folder: Path, program: str) -> tuple[int, int]:
    path = folder / clip.file
    words = [
        program,
        "-v",
        clip.voice,
        "-s",
        str(clip.speed),
        "-p",
        str(clip.pitch),
        "-w",
        str(path),
        DIGITS[clip.digit],
    ]
    output = ""
    try:
        output = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=True).stderr  # noqa: S603 - the user's program, our words
        with wave.open(str(path), "rb") as file:
            size = (file.getnframes(), file.getframerate())
    except (OSError, EOFError, wave.Error, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or output or str(error) or "a file that is no clip"
        raise _silent(words, output) from error
    if not size[0]:
        raise _silent(words, output or "an empty clip")
    return size


def _silent(words: Sequence[str], output: str) -> ConfigError:
    return ConfigError(
        "data.program",
        expected=f"a clip from {' '.join(words)!r}",
        got=output.strip(),
        fix="Try it; espeak-ng 1.51 works.",
    )
