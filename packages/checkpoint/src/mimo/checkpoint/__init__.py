"""Checkpoints of safetensors and JSON, committed by one rename, verified by checksums, loaded into any layout."""

from mimo.checkpoint._diff import Differences, TensorDifference, ValueDifference, diff
from mimo.checkpoint._folder import latest, name_step
from mimo.checkpoint._load import Loaded, load
from mimo.checkpoint._manifest import Manifest, OwnedEntry, Piece, ShardEntry, TensorEntry
from mimo.checkpoint._manifest_file import FORMAT_VERSION, read_manifest
from mimo.checkpoint._ranks import WriteError
from mimo.checkpoint._reshard import reshard
from mimo.checkpoint._save import save
from mimo.checkpoint._saver import Saver
from mimo.checkpoint._verify import Verified, verify

__all__ = [
    "FORMAT_VERSION",
    "Differences",
    "Loaded",
    "Manifest",
    "OwnedEntry",
    "Piece",
    "Saver",
    "ShardEntry",
    "TensorDifference",
    "TensorEntry",
    "ValueDifference",
    "Verified",
    "WriteError",
    "diff",
    "latest",
    "load",
    "name_step",
    "read_manifest",
    "reshard",
    "save",
    "verify",
]
