"""Folders that `datasets` saved, and repositories as the hub has them: which files hold a split."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from parquet_tables import CHAT, TOKENIZER, opened, opened_folder, write, write_stream

from mimo.data import Dataset, weights_of
from mimo.hooks import ConfigError
from mimo_dataset_parquet import HuggingFaceConfig, open_hugging_face_split

ASSETS = Path(__file__).parent / "assets"
"""Both were written by `datasets` 5.2.0, with two files to train on: by ``save_to_disk``, and by ``to_parquet``."""


def answers(dataset: Dataset) -> list[str]:
    """Return what the assistant says in each sample."""
    texts = [TOKENIZER.decode(dataset.tokens(sample)) for sample in range(len(dataset))]
    return [text.partition("assistant\n")[2].partition("<|im_end|>")[0] for text in texts]


def evaluated(path: Path, split: str) -> Dataset:
    """Open the held-out samples of a folder."""
    config = HuggingFaceConfig(path=str(path), chat=CHAT, evaluation_split=split)
    dataset = open_hugging_face_split(config, TOKENIZER, "evaluation")
    assert dataset is not None
    return dataset


@pytest.mark.parametrize("name", ["saved", "repository"])
def test_parquet_reads_what_datasets_wrote(name: str) -> None:
    """Every split with its rows in order, pictures with their pixels, weights where there are some."""
    train, test = opened_folder(ASSETS / name), evaluated(ASSETS / name, "test")
    assert answers(train) == [f"shade {shade}" for shade in range(5)]
    assert answers(test) == ["shade 40", "shade 41"]
    for dataset, first in ((train, 0), (test, 40)):
        for sample in range(len(dataset)):
            (info,) = dataset.infos(sample)
            assert (info.modality, info.size) == ("image", (3, 4))
            assert dataset.raw(sample, 0).getpixel((1, 1)) == first + sample
            weights = weights_of(dataset, sample)
            assert weights is not None
            assert max(weights) == (1.0 if sample % 2 else 0.5)
    assert train.where(4).endswith(("data-00001-of-00002.arrow:row 1", "train-00001-of-00002.parquet:row 1"))


def test_parquet_imports_nothing_of_hugging_face() -> None:
    """Reading what `datasets` wrote takes pyarrow alone, and no torch."""
    program = f"""if True:
        import sys
        from parquet_tables import opened_folder
        dataset = opened_folder({str(ASSETS / "saved")!r})
        dataset.infos(0)
        print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"datasets", "huggingface_hub", "torch"}}))
    """
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    assert done.stdout.strip() == "[]"


def test_parquet_reads_one_saved_split() -> None:
    """A folder of one split is to train on, whether or not it says which it is."""
    assert answers(opened_folder(ASSETS / "saved" / "test")) == ["shade 40", "shade 41"]


@pytest.mark.parametrize(
    ("name", "splits"),
    [("saved", "'train', 'test'"), ("repository", "'test', 'train'"), ("saved/test", "'train'")],
)
def test_parquet_names_the_splits_that_there_are(name: str, splits: str) -> None:
    """A split that isn't there is refused by its setting."""
    path = ASSETS / name
    said = rf"expected one of the splits {splits} of '.*{name}', got 'tst'"
    with pytest.raises(ConfigError, match=r"data\.split: " + said):
        opened_folder(path, split="tst")
    with pytest.raises(ConfigError, match=r"data\.evaluation_split: " + said):
        evaluated(path, "tst")


def test_parquet_reads_repositories_in_their_usual_forms(tmp_path: Path) -> None:
    """Files named by split in the folder or in `data`, and folders named by split."""
    for place in ("train.parquet", "data/train-00000.parquet", "train/0000.parquet", "data/train/0.parquet"):
        folder = tmp_path / place.replace("/", "-")
        write(folder / place, {"text": ["a", "b"]})
        write(folder / place.replace("train", "test"), {"text": ["c"]})
        assert (len(opened_folder(folder)), len(evaluated(folder, "test"))) == (2, 1)


def test_parquet_has_no_held_out_samples_unless_set() -> None:
    """Without a split for it there is no evaluation."""
    assert open_hugging_face_split(HuggingFaceConfig(path=str(ASSETS / "saved")), TOKENIZER, "evaluation") is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"_data_files": [{"filename": "../a.arrow"}]}, r"expected names of what lies in '.*in', got '\.\./a\.arrow'"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, r"expected names of what lies in .*, got '/etc/passwd'"),
        ({"_data_files": [{"filename": "b.arrow"}]}, r"expected 'b\.arrow' in '.*in', got no such file"),
        ({"_data_files": [{"filename": 5}]}, r"expected names of what lies in .*, got 5"),
        ({"_data_files": [7]}, r"expected names of what lies in .*, got None"),
        ({"_data_files": []}, r"expected files of data in .*state\.json, got none"),
        ({"_data_files": 7}, r"expected files of data in .*state\.json, got none"),
        ({}, r"expected a JSON object with '_data_files' in .*state\.json, got something else"),
        ([], r"expected a JSON object with '_split' in .*state\.json, got something else"),
        (
            {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "i.arrow"}]},
            r"expected rows in their own order, got .*state\.json with indices\. Save it",
        ),
    ],
)
def test_parquet_refuses_states_that_lie(tmp_path: Path, state: Any, said: str) -> None:
    """What a saved folder says of its files stays inside it, and is all there."""
    write_stream(tmp_path / "a.arrow", pa.table({"text": ["a"]}))
    write_stream(tmp_path / "in" / "a.arrow", pa.table({"text": ["a"]}))
    (tmp_path / "in" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"data\.path: " + said):
        opened_folder(tmp_path / "in")


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_parquet_refuses_damaged_settings_of_folders(tmp_path: Path, name: str) -> None:
    """Files that are no JSON, or not of the form."""
    (tmp_path / name).write_text("{")
    with pytest.raises(ConfigError, match=rf"data\.path: expected JSON in .*{name}, got something else \(Expecting"):
        opened_folder(tmp_path)
    (tmp_path / name).write_text("[1]")
    with pytest.raises(ConfigError, match=rf"data\.path: expected a JSON object .*{name}, got something else"):
        opened_folder(tmp_path)


def test_parquet_refuses_folders_without_their_settings(tmp_path: Path) -> None:
    """A split that is named and empty, and names of splits that are none."""
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match=r"data\.path: expected a file '.*train/state\.json', got none"):
        opened_folder(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": 7}')
    with pytest.raises(ConfigError, match=r"data\.split: expected one of the splits none of .*, got 'train'"):
        opened_folder(tmp_path)


def test_parquet_refuses_splits_that_climb_out(tmp_path: Path) -> None:
    """The name of a split is that of a folder inside."""
    shutil.copytree(ASSETS / "saved", tmp_path / "saved")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["../other"]}')
    with pytest.raises(ConfigError, match=r"data\.path: expected names of what lies in .*saved', got '\.\./other'"):
        opened_folder(tmp_path / "saved", split="../other")


def test_parquet_refuses_paths_without_tables(tmp_path: Path) -> None:
    """Nothing there, a folder without files, and files without rows."""
    with pytest.raises(ConfigError, match=r"data\.path: expected an existing parquet file, or a folder .*got '.*none'"):
        opened(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"data\.path: expected an existing parquet file, or a folder"):
        opened(tmp_path)
    with pytest.raises(
        ConfigError, match=r"data\.path: expected a folder made by save_to_disk, or a cloned repository"
    ):
        opened_folder(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"data\.split: expected one of the splits none of .*, got 'train'"):
        opened_folder(tmp_path)
    empty = write(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})
    with pytest.raises(
        ConfigError, match=r"data\.path: expected a table with at least one row, got .*, which has none"
    ):
        opened(empty)
    write(tmp_path / "b.parquet", {"txt": ["a"]})
    with pytest.raises(
        ConfigError, match=r"data\.columns: expected one column 'text' in each file, got .*b\.parquet with"
    ):
        opened(tmp_path)
