"""Items as an encoder gets them are those of which the layout was made."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import attrs
import pytest
import torch
from PIL import Image, ImageFile
from torch import Tensor

from mimo.data import DATASETS, TOKENIZERS, LayoutRules
from mimo.hooks import ConfigError, DataError, RunError
from mimo.model import EncoderSpec
from mimo.trainer.batch.microbatch import Microbatch
from mimo.trainer.config.plugin_kinds import find_installed


@attrs.frozen(kw_only=True)
class NoConfig:
    pass


def _prepare(_config: NoConfig, raw: Image.Image) -> Mapping[str, Tensor]:
    return {"area": torch.tensor(raw.height * raw.width)}


def _build(_config: NoConfig, _hidden: int) -> Any:
    raise AssertionError


EYE = EncoderSpec(
    name="eye",
    config=NoConfig,
    measure=lambda raw: (raw.height, raw.width),
    rows=lambda _config, size: size[0],
    prepare=_prepare,
    build=_build,
)
MODULE: Any = SimpleNamespace(
    name="vision",
    modality="image",
    feeds=("language",),
    feeds_language=True,
    distil=None,
    is_of_teacher=False,
    is_generator=False,
    spec=EYE,
    config=NoConfig(),
    grid=SimpleNamespace(dp=1),
)


def one_picture(tmp_path: Path) -> Microbatch:
    """Return a microbatch of a text and a picture, of which nothing is read yet."""
    Image.new("L", (3, 4)).save(tmp_path / "a.png")
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n{"images": ["a.png"], "text": "<image>"}\n')
    jsonl, byte = find_installed(DATASETS, "jsonl", ""), find_installed(TOKENIZERS, "byte", "")
    tokenizer = byte.build(byte.config(), ["image"])
    dataset = jsonl.open(jsonl.config(path=str(tmp_path / "train.jsonl")), tokenizer, "train")
    assert dataset is not None

    rules = LayoutRules(tokenizer=tokenizer, rows={"image": lambda size: size[0]})
    job: Any = SimpleNamespace(lay_out_all=partial(rules.lay_out_all, max_tokens=64))
    return Microbatch(job, dataset, [0, 1])


def test_an_item_that_is_of_another_size_now_is_refused(tmp_path: Path) -> None:
    """A file that was replaced after its rows were counted is named with its line; it would have other rows."""
    microbatch = one_picture(tmp_path)
    (item,) = microbatch.prepare(MODULE, 0)
    assert item["area"] == 12
    Image.new("L", (3, 5)).save(tmp_path / "a.png")
    wanted = (
        r"train\.jsonl:2: expected image 0 of size \(4, 3\), as it was when its rows were counted, "
        r"got one of size \(5, 3\)\. Leave files as they are while a run reads them, "
        r"and where sizes come from an index, write it anew with `mimo data index FILE`"
    )
    with pytest.raises(DataError, match=wanted):
        microbatch.prepare(MODULE, 0)


def test_what_is_wrong_with_settings_is_no_fault_of_the_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that a dataset raises by the path of a setting ends the run as such, whatever may be broken."""
    microbatch = one_picture(tmp_path)
    error = ConfigError("data.cache", expected="room", got="none")
    monkeypatch.setattr(microbatch._dataset, "raw", Mock(side_effect=error))
    with pytest.raises(ConfigError, match=r"data\.cache: expected room, got none"):
        microbatch.prepare(MODULE, 0)


def test_a_file_system_that_fails_is_no_fault_of_the_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read is repeated a few times; if it still fails, that ends the run, and is no broken item."""
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    microbatch, failures = one_picture(tmp_path), [errno.EIO] * 3
    load = ImageFile.ImageFile.load

    def fail(image: ImageFile.ImageFile) -> Any:
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    (item,) = microbatch.prepare(MODULE, 0)
    assert item["area"] == 12
    assert not failures
    failures += [errno.EIO] * 4
    with pytest.raises(
        RunError, match=r"train\.jsonl:2: expected a file system that can be read, got image 0: .*Input"
    ):
        microbatch.prepare(MODULE, 0)
