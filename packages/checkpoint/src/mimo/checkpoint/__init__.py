"""Checkpoints of safetensors and JSON, committed by one rename, verified by checksums, loaded into any layout."""

from mimo.checkpoint._alone import Stream, write_checkpoint, write_safetensors
from mimo.checkpoint._diff import Differences, TensorDifference, ValueDifference, diff
from mimo.checkpoint._folder import latest, mark_needed, name_step
from mimo.checkpoint._load import Loaded, load
from mimo.checkpoint._manifest import Manifest, OwnedEntry, Piece, ShardEntry, TensorEntry
from mimo.checkpoint._manifest_file import FORMAT_VERSION, read_manifest
from mimo.checkpoint._optimizer_state import OptimizerState
from mimo.checkpoint._published import PublishedFolder, PublishedTensor, open_published, read_published_json
from mimo.checkpoint._ranks import WriteError
from mimo.checkpoint._reshard import reshard
from mimo.checkpoint._save import save
from mimo.checkpoint._saver import Saver
from mimo.checkpoint._source import Source
from mimo.checkpoint._verify import Verified, verify

__all__ = [
    "FORMAT_VERSION",
    "Differences",
    "Loaded",
    "Manifest",
    "OptimizerState",
    "OwnedEntry",
    "Piece",
    "PublishedFolder",
    "PublishedTensor",
    "Saver",
    "ShardEntry",
    "Source",
    "Stream",
    "TensorDifference",
    "TensorEntry",
    "ValueDifference",
    "Verified",
    "WriteError",
    "diff",
    "latest",
    "load",
    "mark_needed",
    "name_step",
    "open_published",
    "read_manifest",
    "read_published_json",
    "reshard",
    "save",
    "verify",
    "write_checkpoint",
    "write_safetensors",
]
