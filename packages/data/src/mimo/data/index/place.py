"""Where data comes from, and where what is known of it is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs

from mimo.data.index.digest import digest_of_text


@attrs.frozen(kw_only=True)
class Origin:
    """Where the samples of a dataset come from, for an index of them.

    Args:
        name: path or address of the data, for messages.
        index: of the files of its index the path without their last suffixes, ``.lines`` or ``.sizes``.
        digest: returns a text that changes when the data does; it may read for a few milliseconds a file.
        template: likewise for what besides data and tokenizer decides which tokens a sample becomes, as the template
            of conversations does; empty: nothing.
    """

    name: str
    index: Path
    digest: Callable[[], str]
    template: Callable[[], str] = str


def index_place(data: str, folder: str) -> Path:
    """Return the `Origin.index` of data: beside it, or in a folder of indexes under a name that no other data has.

    Args:
        data: path of a file or a folder, or an address.
        folder: as set; empty: beside the data.
    """
    if not folder:
        path = Path(data)
        return path if path.name not in ("", "..") else path.resolve()
    path = Path(data).absolute()  # two projects may have one folder of indexes
    return Path(folder) / f"{path.name}-{digest_of_text(str(path))[:12]}"
