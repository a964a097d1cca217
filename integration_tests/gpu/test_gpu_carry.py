"""What travels to a GPU machine, wheels and digits, and how it is put where Python finds it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import carry as carrying
import numpy as np
import pytest
from _carried import unpack
from _carried_digits import CarriedDigitsConfig, open_carried
from carry import COMES_ALONG, LEFT_OUT, MAX_BYTES, THERE, build, carry, download, members, missing, write_digits
from house import canonical, rooms
from packaging.requirements import Requirement

from mimo_dataset_digits import load_split


def test_everything_that_we_declare_is_there_or_carried_or_left_out() -> None:
    """No package of ours asks for a distribution that nobody has thought of."""
    carried = set(missing(members()))
    declared = set().union(*(room.declared()[0] for room in rooms()))
    others = {name for name in declared if not name.startswith("mimo-")}
    assert others <= carried | THERE | COMES_ALONG | LEFT_OUT
    assert {"attrs", "pillow", "soundfile", "xxhash", "cyclopts"} <= carried
    assert not carried & (LEFT_OUT | THERE)


@pytest.mark.parametrize("name", missing(members()))
def test_what_is_carried_brings_all_that_it_needs(name: str) -> None:
    """What each of them asks for is carried too, or there."""
    there = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}
    lines = map(Requirement, metadata.requires(name) or [])
    needed = {canonical(line.name) for line in lines if line.marker is None or line.marker.evaluate(there)}
    assert needed <= {*missing(members()), *THERE, *COMES_ALONG}


def test_plugins_that_are_carried_need_nothing_that_is_left_out() -> None:
    """Each can be imported where that is missing: one that can't would end every run there."""
    entries = [
        module.partition(":")[0]
        for folder in members()
        for group in tomllib.loads((folder / "pyproject.toml").read_text())["project"].get("entry-points", {}).values()
        for module in group.values()
    ]
    assert len(entries) > 10
    hidden = [{"scikit-learn": "sklearn"}.get(name, name) for name in sorted(LEFT_OUT)]
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({hidden}))\n"
        f"for name in {entries}: importlib.import_module(name)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr


def test_pip_is_asked_for_wheels_of_that_machine() -> None:
    """Of CPython 3.12 for x86-64 Linux, and nothing that they need."""
    asked: list[Sequence[str]] = []
    download(["soxr"], Path("into"), asked.append)
    ((*_, last),) = asked
    words = " ".join(asked[0])
    assert last == "soxr"
    for part in ("--no-deps", "--only-binary=:all:", "--python-version 3.12", "--abi cp312", "manylinux_2_28_x86_64"):
        assert part in words


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest file is named; whatever lay in the folder before is gone."""
    folder = tmp_path / "carried"
    folder.mkdir()
    (folder / "old.whl").write_text("")
    monkeypatch.setattr(carrying, "members", list)

    def fetch(_words: Sequence[str]) -> None:
        assert not (folder / "old.whl").exists()
        (folder / "large.whl").write_bytes(bytes(MAX_BYTES))

    with pytest.raises(ValueError, match=rf"expected at most {MAX_BYTES} bytes, got \d+, of large.whl {MAX_BYTES}"):
        carry(folder, run=fetch)


def test_carried_digits_are_those_of_scikit_learn(tmp_path: Path) -> None:
    """Images, labels, split and order; the file is small."""
    write_digits(tmp_path / "digits.safetensors")
    assert (tmp_path / "digits.safetensors").stat().st_size < 120_000

    class Words:
        """A tokenizer of no use."""

        end = 0

        def encode(self, _text: str) -> list[int]:
            return [1]

    for split in ("train", "evaluation"):
        config = CarriedDigitsConfig(file=str(tmp_path / "digits.safetensors"))
        found = open_carried(config, Words(), split)  # type: ignore[arg-type]  # the digits ask no more of it
        images, labels, numbers = load_split(0.2, split)
        assert np.array_equal(found.images, images)
        assert np.array_equal(found.labels, labels)
        assert np.array_equal(found.numbers, numbers)
        assert (found.images.dtype, found.labels.dtype) == (images.dtype, labels.dtype)


def test_unpacked_wheels_are_found_by_a_fresh_interpreter(tmp_path: Path) -> None:
    """Those of ours before what is installed, entry points included, and the digits as a dataset."""
    (hooks,) = (folder for folder in members() if folder.name == "hooks")
    build(hooks, tmp_path)
    assert unpack(tmp_path, tmp_path / "site") == ["mimo_hooks-0.1.0-py3-none-any.whl"]
    source = (
        "import mimo.hooks, importlib.metadata as m; print(mimo.hooks.__file__);"
        "print(*m.entry_points(group='mimo.datasets', name='carried-digits'))"
    )
    path = {"PYTHONPATH": str(tmp_path / "site")}
    printed = subprocess.run(
        [sys.executable, "-c", source], env=path, capture_output=True, text=True, check=True
    ).stdout
    assert printed.startswith(str(tmp_path / "site" / "mimo" / "hooks"))
    assert "value='_carried_digits'" in printed


def test_wheels_of_others_are_left_out_where_they_are_installed(tmp_path: Path) -> None:
    """What a machine has may be newer, or built for it; what is older there is not taken."""
    for name in ("attrs-1.0", f"pluggy-{metadata.version('pluggy')}.0", "cattrs-9999.1", "no_such_thing-1.0"):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}.py", "")
    unpacked = ["cattrs-9999.1-py3-none-any.whl", "no_such_thing-1.0-py3-none-any.whl"]
    assert unpack(tmp_path, tmp_path / "site") == unpacked


@pytest.mark.parametrize("member", ["../outside.py", "/outside.py", "inside/../../outside.py"])
def test_an_archive_that_leads_outside_is_refused(member: str, tmp_path: Path) -> None:
    """Before anything of it is written."""
    with zipfile.ZipFile(tmp_path / "mimo_evil-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("mimo_evil.py", "")
        archive.writestr(member, "")
    with pytest.raises(ValueError, match="expected paths inside of it, got "):
        unpack(tmp_path, tmp_path / "site")
    assert not (tmp_path / "site" / "mimo_evil.py").exists()
