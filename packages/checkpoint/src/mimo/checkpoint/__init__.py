"""Checkpoints of safetensors and JSON, committed by one rename, verified by checksums, loaded into any layout."""

from mimo.checkpoint._folder import latest, name_step
from mimo.checkpoint._load import load
from mimo.checkpoint._manifest import Manifest, OwnedEntry, Piece, ShardEntry, TensorEntry
from mimo.checkpoint._manifest_file import FORMAT_VERSION, read_manifest
from mimo.checkpoint._save import save
from mimo.checkpoint._verify import Verified, verify

__all__ = [
    "FORMAT_VERSION",
    "Manifest",
    "OwnedEntry",
    "Piece",
    "ShardEntry",
    "TensorEntry",
    "Verified",
    "latest",
    "load",
    "name_step",
    "read_manifest",
    "save",
    "verify",
]
