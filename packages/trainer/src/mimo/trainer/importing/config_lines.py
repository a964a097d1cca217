"""Line numbers of keys in a published ``config.json``, for messages."""

from __future__ import annotations

import re

_MARKS = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,]|\n')
_OPENING = frozenset("{[")
_CLOSING = frozenset("]}")


def line_of(text: str, path: tuple[str, ...]) -> int:
    """Return the line, counted from 1, of the key that ``path`` leads to; 0 where it is not there.

    Args:
        text: JSON that can be read.
        path: keys from the outermost object on.
    """
    line, last, open_keys = 1, "", [""]  # the key at which each open object or list stands, the last one the newest
    for mark in _MARKS.findall(text):
        if mark == "\n":
            line += 1
        elif mark in _OPENING:
            open_keys.append("")
        elif mark in _CLOSING:
            open_keys.pop()
        elif mark == ":":
            open_keys[-1] = last
            if tuple(open_keys[1:]) == path:
                return line
        elif mark != ",":
            last = mark[1:-1]
    return 0
