"""Reads of a file system that fails are tried again, and whatever says something of the file is not."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from PIL import Image, ImageFile

from mimo.data import is_read_failure, load_image, retried


class Failing:
    """A read that fails some times before it comes to something."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> str:
        """Fail once more, or return."""
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "read"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_read_that_fails_is_tried_again(number: int) -> None:
    """As often as there are pauses."""
    read = Failing(OSError(number, "no"), OSError(number, "no"))
    assert (retried(read, pauses=(0, 0)), read.calls) == ("read", 3)
    read = Failing(*[OSError(number, "no")] * 4)
    with pytest.raises(OSError, match="no"):
        retried(read, pauses=(0, 0))
    assert read.calls == 3


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "gone"), ValueError("torn"), OSError("truncated")])
def test_what_says_something_of_the_file_is_raised_at_once(error: Exception) -> None:
    """A missing file is not there the next time either."""
    read = Failing(error)
    with pytest.raises(type(error)):
        retried(read, pauses=(0, 0))
    assert read.calls == 1
    assert not is_read_failure(error)


def test_a_picture_that_the_file_system_fails_to_give_is_not_taken_for_a_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels that are cut off are the picture's own fault, as ever."""
    path, whole = tmp_path / "a.png", io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, format="PNG")
    path.write_bytes(whole.getvalue()[:-900])
    with pytest.raises(ValueError, match=r"truncated|broken"):
        load_image(path)

    def fail(_image: ImageFile.ImageFile) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    path.write_bytes(whole.getvalue())
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(OSError, match="Stale"):
        load_image(path)
