"""Datasets that leave sizes to encoders."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import numpy as np
import pytest
from PIL import Image

from mimo.hooks import DataError, ItemInfo
from mimo.model import EncoderSpec
from mimo.trainer.job.measured_dataset import measured


@attrs.frozen
class Files:
    """One sample of a picture with a size and two sonar files without."""

    reads: list[int]

    def __len__(self) -> int:
        return 1

    def tokens(self, _sample: int) -> Sequence[int]:
        return [1, 2]

    def infos(self, sample: int) -> Sequence[ItemInfo]:
        kinds: list[tuple[str, tuple[int, ...]]] = [("image", (3, 4)), ("sonar", ()), ("sonar", ())]
        return [
            ItemInfo(sample=sample, index=index, modality=modality, size=size)
            for index, (modality, size) in enumerate(kinds)
        ]

    def raw(self, _sample: int, index: int) -> Any:
        self.reads.append(index)
        return Path(f"{index}.bin")

    def where(self, sample: int) -> str:
        return f"files:{sample}"


def sonar(measure: Callable[[Any], tuple[int, ...]]) -> EncoderSpec:
    """Return an encoder that measures, and does nothing else."""
    return cast("EncoderSpec", SimpleNamespace(name="sonar", modality="sonar", measure=measure))


def test_the_encoder_measures_what_the_dataset_does_not() -> None:
    """Sizes that the dataset knows stay; others are measured from the raw item, once for a sample."""
    inner = Files([])
    found = measured(inner, {"sonar": sonar(lambda raw: (int(raw.stem), 7))})
    assert found is not None
    for _ in range(2):
        assert [info.size for info in found.infos(0)] == [(3, 4), (1, 7), (2, 7)]
    assert inner.reads == [1, 2]
    assert (len(found), found.tokens(0), found.where(0), found.raw(0, 2)) == (1, [1, 2], "files:0", Path("2.bin"))
    assert measured(None, {}) is None


def test_what_nobody_reads_keeps_no_size() -> None:
    """The layout of the sample refuses a modality that no encoder reads."""
    found = measured(Files([]), {})
    assert found is not None
    assert [info.size for info in found.infos(0)] == [(3, 4), (), ()]


def test_an_item_that_cannot_be_measured_is_named_with_its_place() -> None:
    """The encoder's error gets the sample's place, and is raised again at the next read."""

    def measure(raw: Any) -> tuple[int, ...]:
        msg = f"{raw}: there is no such file"
        raise ValueError(msg)

    found = measured(Files([]), {"sonar": sonar(measure)})
    assert found is not None
    text = "files:0: expected an item that the sonar encoder can read, got sonar 1: 1.bin: there is no such file."
    for _ in range(2):
        with pytest.raises(DataError, match=re.escape(text)):
            found.infos(0)


def test_paths_of_pictures_come_to_an_encoder_of_pictures_decoded(tmp_path: Path) -> None:
    """Measured by their header alone, decoded when they are asked for, whatever the modality is called."""
    Image.effect_noise((50, 30), 90).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.png").write_text("no picture")

    @attrs.frozen
    class Pictures(Files):
        def infos(self, sample: int) -> Sequence[ItemInfo]:
            return [ItemInfo(sample=sample, index=index, modality="radio", size=()) for index in range(2 + sample)]

        def raw(self, _sample: int, index: int) -> Any:
            return tmp_path / f"{'abc'[index]}.png"

    def measure(raw: Any) -> tuple[int, ...]:
        return raw.height, raw.width

    encoder = cast("EncoderSpec", SimpleNamespace(name="radio", modality="image", measure=measure))
    found = measured(Pictures([]), {"radio": encoder})
    assert found is not None
    assert [info.size for info in found.infos(0)] == [(30, 50), (30, 50)]
    assert np.asarray(found.raw(0, 0)).shape == (30, 50)
    text = "files:0: expected an item that the radio encoder can read, got radio 1: "
    with pytest.raises(DataError, match=re.escape(text)):
        found.raw(0, 1)
    text = "files:1: expected an item that the radio encoder can read, got radio 2: it is no image of the formats "
    with pytest.raises(DataError, match=re.escape(text)):
        found.infos(1)
