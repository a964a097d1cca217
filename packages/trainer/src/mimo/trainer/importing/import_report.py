"""Report of `mimo checkpoint import-hf`: the tensors read from published folders, and those that are not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from mimo.checkpoint import open_published
from mimo.hooks import ConfigError
from mimo.trainer.importing.compare import shorten
from mimo.trainer.importing.import_hf import FolderRead
from mimo.trainer.published.find import unread_sections


def show(read: FolderRead) -> str:
    """Return a line about what is read from a folder."""
    section = f" ({read.part.section})" if read.part.section else ""
    family, spec = read.part.reader.family, read.part.reader.spec
    return (
        f"{read.part.name}: {family.model_type} from {read.part.folder}{section} for {spec.name}, "
        f"{len(read.streams)} tensors, {' and '.join(read.dtypes)} there and float32 here"
        + (f"; not in it: {', '.join(read.fresh)}" if read.fresh else "")
        + "".join(f"; set aside: {key} = {value}" for key, value in read.part.ignored.items())
    )


def show_left(reads: Iterable[FolderRead]) -> Iterator[str]:
    """Yield a line for each folder with models or tensors that are not read."""
    for folder, own in _by_folder(reads):
        sections = unread_sections(own[0].part.described, [read.part for read in own])
        left = [
            *(f"{section} ({kind or 'of no model_type'})" for section, kind in sections.items()),
            *_left_tensors(folder, own),
        ]
        if left:
            yield f"left behind in {folder}: {', '.join(shorten(left))}"


def check_nothing_left(reads: Iterable[FolderRead]) -> None:
    """Refuse a folder of several models of which tensors are not read, as nobody says that some are to be left.

    Raises:
        ConfigError: naming them.
    """
    for folder, own in _by_folder(reads):
        if len(own) > 1 and (left := _left_tensors(folder, own)):
            parts = " ".join(f"--part {read.part.name}" for read in own)
            raise ConfigError(
                str(folder),
                expected="tensors that are all read here, as no part is named",
                got=f"{', '.join(shorten(left))} too, which would be left behind",
                fix=f"Name the parts that are wanted without them: {parts}.",
            )


def _by_folder(reads: Iterable[FolderRead]) -> Iterable[tuple[Path, list[FolderRead]]]:
    found: dict[Path, list[FolderRead]] = {}
    for read in reads:
        found.setdefault(read.part.folder, []).append(read)
    return found.items()


def _left_tensors(folder: Path, own: Iterable[FolderRead]) -> list[str]:
    read_names = frozenset[str]().union(*(read.names for read in own))
    tensors = left_names(open_published(folder).tensors, read_names)
    return [f"{name} ({count} tensor{'' if count == 1 else 's'})" for name, count in tensors.items()]


def left_names(names: Iterable[str], read: Collection[str]) -> dict[str, int]:
    """Return the names that are not read, as prefixes that nothing read has, with how many have each.

    Numbers of layers are put together as ``*`` where nothing of that name is read.
    """
    used = {parts[:end] for parts in map(_without_numbers, read) for end in range(len(parts) + 1)}
    found: dict[str, int] = {}
    for name in names:
        if name in read:
            continue
        parts = _without_numbers(name)
        end = next((end for end in range(1, len(parts) + 1) if parts[:end] not in used), None)
        shown = name if end is None else ".".join((*parts[:end], *(["*"] if end < len(parts) else [])))
        found[shown] = found.get(shown, 0) + 1
    return found


def _without_numbers(name: str) -> tuple[str, ...]:
    return tuple("*" if part.isdigit() else part for part in name.split("."))
