"""What integration tests share: one pool of ranks a process, and the results that all of them compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mimo.testing import Pool

if TYPE_CHECKING:
    from oracle import Oracle  # what is imported here all tests wait for, those of the house too


COVERED = [Path(__file__).parent / name for name in ("engine", "graphs", "oracle")]
"""Folders whose cases share one cover."""


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Make no tests of a function all of whose cases are left out: there are ten thousand for the soak."""
    marks = getattr(obj, "pytestmark", ())
    soaks = isinstance(marks, list) and any(mark.name == "soak" for mark in marks)
    return [] if soaks and collector.config.option.markexpr == "not soak" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose which of the cases that train are run every time, before those of the soak are left out."""
    if trained := [item for item in items if item.path.parent in COVERED]:
        from covered import mark_uncovered

        mark_uncovered(trained)


@pytest.fixture(scope="session")
def truths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of this run for all processes that test, with the results that they compare with."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if hasattr(request.config, "workerinput") else own) / "truths"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def pool(truths: Path) -> Iterator[Pool]:
    """One process that forks the ranks of all tests of this one, whose functions can all be pickled."""
    from jobs import prepare, resolve_ahead

    with Pool(prepare, truths, ahead=resolve_ahead) as shared:
        yield shared


@pytest.fixture(scope="session")
def oracle(pool: Pool, truths: Path) -> Oracle:
    """The plain results to compare with."""
    from oracle import Oracle

    return Oracle(pool, truths)
