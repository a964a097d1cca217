"""The datasets that come with this package, what further sources of records are made of, and how pictures are read."""

from mimo.data.sources.bounded_cache import BoundedCache
from mimo.data.sources.images import image_size, load_image, open_image
from mimo.data.sources.members import read_members
from mimo.data.sources.prompts import PromptLines, open_prompts
from mimo.data.sources.record import Record, RecordError, named_messages, parse_object, parse_record, read_record
from mimo.data.sources.record_dataset import RecordDataset, Records, path_inside
from mimo.data.sources.settings_path import settings_under

__all__ = [
    "BoundedCache",
    "PromptLines",
    "Record",
    "RecordDataset",
    "RecordError",
    "Records",
    "image_size",
    "load_image",
    "named_messages",
    "open_image",
    "open_prompts",
    "parse_object",
    "parse_record",
    "path_inside",
    "read_members",
    "read_record",
    "settings_under",
]
