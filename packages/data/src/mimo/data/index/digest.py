"""Digests by which an index shows that data is still what it was made of."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16
"""Bytes that are read at each place of a file."""
_PLACES = 64
"""Of a file, the first and the last block among them."""


def digest_of_file(path: Path) -> str:
    """Return a digest of a file's size and of 64 blocks of it, spread evenly; of all of it up to 4 MiB.

    So it costs milliseconds however large the file is, and files that were written anew, appended to or cut differ. A
    few letters that are changed in place in a larger file may be missed; where what is then read doesn't fit its sizes,
    that is found when it is used, and where ids are kept it isn't read.

    Raises:
        OSError: it can't be read.
    """
    found = hashlib.sha256()
    size = path.stat().st_size
    found.update(size.to_bytes(8, "little"))
    last = max(size - _BLOCK, 0)
    with path.open("rb", buffering=0) as file:
        if size <= _PLACES * _BLOCK:
            found.update(file.read(_PLACES * _BLOCK))
        else:
            for place in range(_PLACES):
                file.seek(last * place // (_PLACES - 1))
                found.update(file.read(_BLOCK))
    return found.hexdigest()


def digest_of_text(value: Any) -> str:
    """Return a digest of plain data, equal for equal data whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
