"""All of ours that commands may import, for the process that they are forked from: see `commands.start`."""

import pkgutil
from importlib import import_module
from importlib.metadata import entry_points

import mimo

_FOUND = entry_points()
for _group in _FOUND.groups:
    for _entry in _FOUND.select(group=_group) if _group.startswith("mimo.") else ():
        _entry.load()
for _module in pkgutil.walk_packages(mimo.__path__, "mimo."):
    if not _module.name.endswith("__main__"):
        import_module(_module.name)
