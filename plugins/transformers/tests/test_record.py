"""Records of trials: what another process finds of them, and what it makes of a file that isn't right."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from published_images import FOLDERS
from small_models import small

from mimo.hooks import ConfigError, JsonNode
from mimo_transformers import HfImagesConfig
from mimo_transformers.trial import packed, record, tensor
from mimo_transformers.trial.record import Form, recall, records_folder
from mimo_transformers.weights import IMAGES
from mimo_transformers.whole import trial

TEXT = Form[str](write=lambda found: found or None, read=JsonNode.text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records, as nobody has asked of it before."""
    monkeypatch.setenv("MIMO_TRIALS", str(tmp_path / "trials"))
    return tmp_path / "trials"


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Forgets what this process has found, as another process would know nothing."""
    caches = (packed._problem, tensor._plan_of, trial._tried, trial._plan)

    def act() -> None:
        for one in caches:
            one.cache_clear()

    act()
    yield act
    act()


def refuse(*_given: Any) -> NoReturn:
    """Fail where something is tried that is recorded."""
    pytest.fail("it was tried again")


def images() -> HfImagesConfig:
    """Return the settings of a small model of images whose rows go to several layers."""
    found = FOLDERS["qwen3_vl"]
    family = IMAGES.of(found.config["model_type"])
    assert family is not None
    given = dict(family.settings({**found.config, "preprocessor_config.json": found.preprocessor}))
    return HfImagesConfig(**{**given, "null": tuple(given["null"])})


def test_another_process_finds_what_a_trial_of_images_has_found(
    folder: Path, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it: what is idle, constants, rows side by side, and the plan of tensor ranks."""
    found, plan = trial.tried_of(images()), trial.plan_of(images())
    assert found.parts > 1
    assert plan.styles
    assert len(list(folder.iterdir())) == 2
    forget()
    monkeypatch.setattr(trial, "_try", refuse)
    monkeypatch.setattr(trial, "_find_plan", refuse)
    assert trial.tried_of(images()) == found
    assert trial.plan_of(images()) == plan


def test_another_process_finds_what_a_trial_of_a_language_model_has_found(
    folder: Path, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it computes on packed rows what the library does, and its plan of tensor ranks."""
    config = small("qwen3")
    packed.prove(config)
    plan = tensor.plan_of(config, shared=False)
    assert plan.summed
    assert len(list(folder.iterdir())) == 2
    forget()
    monkeypatch.setattr(packed, "_try", refuse)
    monkeypatch.setattr(tensor, "_find_plan", refuse)
    packed.prove(config)
    assert tensor.plan_of(config, shared=False) == plan


def test_a_refusal_is_tried_each_time(folder: Path, forget: Callable[[], None]) -> None:
    """No record of what failed, which may have been for want of memory."""
    config = small("phimoe")
    for _ in range(2):
        with pytest.raises(ConfigError, match="a family that computes on packed rows"):
            packed.prove(config)
        forget()
    assert not folder.exists()


def change(**values: Any) -> Callable[[Path], Any]:
    """Return what writes other values into a record."""
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def _to_link(file: Path) -> None:
    file.rename(file.with_suffix(".other"))
    file.symlink_to(file.with_suffix(".other"))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: file.write_bytes(b""),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "no text": lambda file: file.write_bytes(b"\xff" * 99),
    "too large": lambda file: file.write_bytes(file.read_bytes() + b" " * (1 << 20)),
    "nested": lambda file: file.write_text('{"found": ' + "[" * 99_999 + "]" * 99_999 + "}"),
    "another finding": change(found="other"),
    "no text in it": change(found=7, digest=record._digest(7)),
    "of another trial": change(trial="other"),
    "of other versions": change(versions={}),
    "with more in it": change(more=1),
    "others may write it": lambda file: file.chmod(0o620),
    "a link": _to_link,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_record_that_is_not_right_is_made_anew(folder: Path, damage: Callable[[Path], Any]) -> None:
    """One that is damaged, foreign or not this user's alone counts as none, and the next process finds a whole one."""
    assert recall("one", "this", lambda: "found", TEXT) == "found"
    (file,) = folder.iterdir()
    assert recall("one", "this", refuse, TEXT) == "found"
    damage(file)
    assert recall("one", "this", lambda: "anew", TEXT) == "anew"
    assert recall("one", "this", refuse, TEXT) == "anew"
    assert not file.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("version", ["transformers", "torch", "mimo", "machine"])
def test_another_version_tries_anew(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Of the library, of torch, of the text of our packages, or of the kind of machine."""
    assert recall("one", "this", lambda: "found", TEXT) == "found"
    versions = {**record._versions(), version: "another"}
    monkeypatch.setattr(record, "_versions", lambda: versions)
    assert recall("one", "this", lambda: "anew", TEXT) == "anew"
    assert len(list(folder.iterdir())) == 2


def test_many_ranks_at_once_leave_one_whole_record(folder: Path) -> None:
    """Whoever writes last, there is never half of one, and nothing else stays behind."""
    begin = threading.Barrier(8)
    found: list[str] = []

    def act() -> None:
        begin.wait()
        found.extend(recall("one", "this", lambda: "found" * 9_999, TEXT) for _ in range(20))

    threads = [threading.Thread(target=act) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {"found" * 9_999}
    assert len(found) == 160
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("value", ["", "0"])
def test_records_can_be_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Then each process tries by itself, also where there is a record."""
    assert recall("one", "this", lambda: "found", TEXT) == "found"
    monkeypatch.setenv("MIMO_TRIALS", value)
    assert records_folder() is None
    assert recall("one", "this", lambda: "anew", TEXT) == "anew"
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("cache", "found"),
    [
        ("/some/cache", "/some/cache/mimo/trials"),
        ("", "/home/me/.cache/mimo/trials"),
        ("a", "/home/me/.cache/mimo/trials"),
    ],
)
def test_records_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, cache: str, found: str) -> None:
    """In XDG_CACHE_HOME, if it is a whole path, else in .cache at home."""
    monkeypatch.delenv("MIMO_TRIALS")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert records_folder() == Path(found)


def test_a_folder_that_depends_on_where_one_stands_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank might have another one."""
    monkeypatch.setenv("MIMO_TRIALS", "trials")
    with pytest.raises(ConfigError) as refused:
        records_folder()
    assert str(refused.value) == (
        "MIMO_TRIALS: expected a folder's whole path, or 0 to keep no records, got 'trials'. "
        "Set MIMO_TRIALS=/some/folder."
    )


def test_where_nothing_can_be_written_each_process_tries(folder: Path) -> None:
    """A file where the folder should be, as a full disk, is no reason to stop."""
    folder.write_text("")
    for _ in range(2):
        assert recall("one", "this", lambda: "found", TEXT) == "found"
    assert folder.read_text() == ""
