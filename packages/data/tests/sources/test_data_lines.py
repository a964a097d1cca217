"""Offsets of lines in a file beside a jsonl: what is read by them, and when they are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mimo.data import TOKENIZERS, read_arrays, write_arrays
from mimo.data.samples import Tokenizer
from mimo.data.sources.jsonl import JsonlConfig, index_jsonl, open_jsonl
from mimo.hooks import ConfigError, DataError, discover

BYTES = discover(TOKENIZERS).find("byte", where="tokenizer.plugin")
TOKENIZER: Tokenizer = BYTES.build(BYTES.config(), [])
LINES = b'{"text": "a"}\n{"text": "bc"}\n{"text": "d"}'


def texts(config: JsonlConfig) -> list[tuple[str, str]]:
    """Return place and text of each sample to train on."""
    dataset = open_jsonl(config, TOKENIZER, "train")
    assert dataset is not None
    return [(dataset.where(sample), TOKENIZER.decode(list(dataset.tokens(sample)))) for sample in range(len(dataset))]


@pytest.mark.parametrize("raw", [LINES, LINES + b"\n", b"\n" + LINES.replace(b"\n", b"\n \n"), b"\n\n{}" + LINES])
@pytest.mark.parametrize("folder", ["", "kept/here"])
def test_data_lines_are_those_of_the_file(raw: bytes, folder: str, tmp_path: Path) -> None:
    """By offsets, samples and their places are as without; only blank lines make more arrays than one needed."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(raw if b"{}" not in raw else raw.replace(b"{}", b""))
    config = JsonlConfig(path=str(path), index=folder and str(tmp_path / folder))
    expected = texts(config)
    offsets = index_jsonl(config, "train")
    assert offsets is not None
    assert offsets.parent == (tmp_path / folder if folder else tmp_path)
    assert set(read_arrays(offsets).arrays) == ({"starts"} if raw.startswith(b"{") else {"starts", "stops", "numbers"})
    assert texts(config) == expected
    assert index_jsonl(config, "evaluation") is None


def test_data_lines_are_taken_from_the_offsets(tmp_path: Path) -> None:
    """The file is not searched again: what stands in the offsets counts, and never leads out of the file."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES)
    config = JsonlConfig(path=str(path))
    offsets = index_jsonl(config, "train")
    assert offsets is not None
    about = read_arrays(offsets).about
    write_arrays(offsets, {"starts": np.array([14], dtype=np.int64), "stops": np.array([29], dtype=np.int64)}, about)
    assert [text for _, text in texts(config)] == ["bc"]
    for starts in ([-3], [1 << 40], [29, 14]):
        write_arrays(offsets, {"starts": np.array(starts, dtype=np.int64)}, about)
        with pytest.raises(DataError, match=r"train\.jsonl:1: expected a line inside the file, got bytes .* of 42"):
            texts(config)


@pytest.mark.parametrize("change", ["appended", "cut", "letters"])
def test_data_lines_of_other_data_are_refused(change: str, tmp_path: Path) -> None:
    """With what to do; without the file of offsets the data are read as they are."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES)
    config = JsonlConfig(path=str(path))
    offsets = index_jsonl(config, "train")
    assert offsets is not None
    raw = {"appended": LINES + b'\n{"text": "e"}', "cut": LINES[:-14], "letters": LINES.replace(b"bc", b"bd")}[change]
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"data\.path: .* the data have changed.* Run `mimo data index`"):
        texts(config)
    offsets.unlink()
    assert texts(config)
    index_jsonl(config, "train")
    assert texts(config)


@pytest.mark.parametrize(
    ("arrays", "about"),
    [({}, {"format": "mimo lines 1"}), ({"starts": np.zeros(2, dtype=np.int32)}, {"format": "mimo lines 1"}),
     ({"starts": np.zeros(2, dtype=np.int64)}, {}),
     ({"starts": np.zeros(2, dtype=np.int64), "stops": np.zeros(1, dtype=np.int64)}, {"format": "mimo lines 1"})],
)  # fmt: skip
def test_data_lines_of_another_file_are_refused(
    arrays: dict[str, np.ndarray], about: dict[str, str], tmp_path: Path
) -> None:
    """As where arrays lack, or are not as long as each other."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES)
    write_arrays(tmp_path / "train.jsonl.lines", arrays, about)
    with pytest.raises(ConfigError, match="it holds no offsets of lines"):
        texts(JsonlConfig(path=str(path)))


def test_data_lines_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    """A file that was not copied whole."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES)
    offsets = index_jsonl(JsonlConfig(path=str(path)), "train")
    assert offsets is not None
    offsets.write_bytes(offsets.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"data\.path: expected beside it, offsets of its own lines"):
        texts(JsonlConfig(path=str(path)))


def test_data_lines_that_can_not_be_written_are_refused(tmp_path: Path) -> None:
    """With the setting that helps."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(LINES)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.index: .* Set data\.index to a folder of yours"):
        index_jsonl(JsonlConfig(path=str(path), index=str(tmp_path / "file" / "folder")), "train")
