"""The two pluggy markers: `hookspec` for packages that own a kind, `hookimpl` for everybody's plugins."""

from __future__ import annotations

import pluggy

PROJECT = "mimo"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
