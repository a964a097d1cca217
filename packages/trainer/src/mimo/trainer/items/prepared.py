"""Items as their modules are given them: decoded and prepared, of the size that their rows were counted by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, TypeAlias

from torch import Tensor

from mimo.data import Dataset, is_read_failure, retried
from mimo.hooks import DataError, ItemInfo, RunError, UserError
from mimo.model import EncoderSpec, GeneratorSpec, noun_of
from mimo.trainer.items.finite_items import finite_item
from mimo.trainer.job.job import JobModule
from mimo.trainer.job.measured_dataset import index_command

Item: TypeAlias = Mapping[str, Tensor]
"""What the plugin of an encoder or generator prepares of an item: tensors by name."""
Prepare: TypeAlias = Callable[[], Item]
"""Returns what its module is given of an item."""


class ItemAhead(Protocol):
    """An item that is prepared before it is needed."""

    def take(self) -> Item:
        """Return what its module is given of it."""

    def wait(self) -> BaseException | None:
        """Return why it can't be prepared, None if it is."""


def prepare_item(dataset: Dataset, module: JobModule, info: ItemInfo) -> Item:
    """Decode an item of a dataset, and return what its module is given of it.

    Raises:
        DataError: it can't be decoded, or has another size than it had; its file and line are named.
        RunError: the file system can't be read.
    """
    assert isinstance(module.spec, EncoderSpec | GeneratorSpec)
    try:
        size, prepared = retried(partial(_read_item, dataset, module, info))
        if prepared is not None:
            return finite_item(prepared)
    except UserError:
        raise  # the dataset's own, with its place
    except (ValueError, TypeError, OSError) as error:
        if is_read_failure(error):  # no fault of the item
            raise RunError(
                dataset.where(info.sample),
                expected="a file system that can be read",
                got=f"{info.modality} {info.index}: {error}",
            ) from error
        raise DataError(
            dataset.where(info.sample),
            expected=f"an item that the {module.spec.name} {noun_of(module.spec)} can read",
            got=f"{info.modality} {info.index} of size {info.size}: {error}",
        ) from error
    raise DataError(
        dataset.where(info.sample),
        expected=f"{info.modality} {info.index} of size {info.size}, as it was when its rows were counted",
        got=f"one of size {size}",
        fix="Leave files as they are while a run reads them, and where sizes come from an index, write it anew with "
        f"{index_command(dataset)}; if nobody changed it, let infos() of the dataset return what measure() of the "
        "encoder does.",
    )


def blank_item(module: JobModule, info: ItemInfo) -> Item:
    """Return what stands in the place of an item that can't be decoded, until zeros take that of its rows."""
    assert isinstance(module.spec, EncoderSpec | GeneratorSpec)
    assert module.spec.blank is not None
    return finite_item(module.spec.prepare(module.config, module.spec.blank(info.size)))


def _read_item(dataset: Dataset, module: JobModule, info: ItemInfo) -> tuple[tuple[int, ...], Item | None]:
    """Return the size of an item, and what its module is given of it if that is what it was."""
    assert isinstance(module.spec, EncoderSpec | GeneratorSpec)
    raw = dataset.raw(info.sample, info.index)
    size = tuple(module.spec.measure(raw))
    return size, module.spec.prepare(module.config, raw) if size == tuple(info.size) else None
