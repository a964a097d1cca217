"""Which published models can be trained, proved: `python integration_tests/published/table.py` tests all of them.

Every family that `hf-decoder` and `hf-encoder` might read in the installed library is shrunk, tried, and measured
beside the library (`parity.py`), and so are those that our other plugins name (`parity_named.py`), and whole image-text
models, as small folders (`parity_whole.py`). What is found goes into the records that `mimo models` reads, family by
family; ``--resume`` leaves out what an earlier run has found.
The page docs/models.md is written of the record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.extend(  # where the helpers of tests lie, as pytest has it by itself
    str(Path(__file__).parents[2] / folder)
    for folder in (
        *("integration_tests/support", "integration_tests/commands", "integration_tests/house"),
        "plugins/transformers/tests",
    )
)

from parity import VERSION, Outcome, outcome_of
from parity_language import LANGUAGE
from parity_named import named_outcome
from parity_page import page_of
from parity_towers import TOWERS
from parity_types import image_text_types
from parity_whole import whole_outcome
from published_images import FOLDERS

from mimo.model import DECODER, HYBRID, EncoderSpec, LanguageModelSpec
from mimo_encoder_audio import WHISPER
from mimo_encoder_radio import RADIO
from mimo_encoder_vision import CLIP, SIGLIP
from mimo_transformers import HF_DECODER, HF_ENCODER, HF_IMAGES
from mimo_transformers.family import causal_types, is_tower, quiet, tower_types

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
NAMED: Sequence[LanguageModelSpec | EncoderSpec] = (DECODER, HYBRID, SIGLIP, CLIP, WHISPER, RADIO)
"""Plugins that name their families."""
KINDS: Mapping[str, Callable[[str], Outcome]] = {
    **{kind.spec.name: partial(outcome_of, kind) for kind in (LANGUAGE, TOWERS)},
    HF_IMAGES.name: whole_outcome,
    **{spec.name: partial(named_outcome, spec) for spec in NAMED},
}
"""By plugin, how a family of it is measured."""
RECORDS: Mapping[str, Path] = {
    spec.name: spec.hf_record for spec in (HF_DECODER, HF_ENCODER, HF_IMAGES, *NAMED) if spec.hf_record is not None
}
"""By plugin, the file that has what is recorded of its families."""


def families() -> dict[str, list[str]]:
    """Return by plugin every model type that it might read in the installed library; folders of whole models."""
    with quiet():
        towers = list(filter(is_tower, tower_types()))
        found = {"hf-decoder": causal_types(), "hf-encoder": towers, "hf-images": whole_models()}
    return found | {spec.name: [family.model_type for family in spec.hf] for spec in NAMED}


def whole_models() -> list[str]:
    """Return the folders of whole models, and every type of the library that has none."""
    held = {family.model_type for family in FOLDERS.families.values()}
    return sorted({*FOLDERS, *(one for one in image_text_types() if one not in held)})


def plain(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as the record has it: of sizes one digit, as the next one is another on another machine."""
    found = attrs.asdict(outcome)
    found["leak"] = _rounded(found["leak"])
    found["differences"] = {
        layout: {
            name: _rounded(one[name])
            for name in ("loss", "outputs", "gradients", "rounding")
            if name != "rounding" or one[name]
        }
        for layout, one in found["differences"].items()
    }
    return found


def _rounded(size: float | None) -> float | None:
    return None if size is None else float(f"{size:.0e}")


def read(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return a record, of each plugin from its file; one that isn't there is empty."""
    held = {file: json.loads(file.read_text(encoding="utf-8")) if file.exists() else {} for file in files.values()}
    return {plugin: dict(held[file].get(plugin, {})) for plugin, file in files.items()}


def write(files: Mapping[str, Path], record: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a record, each plugin's families in order and in its file."""
    for file in dict.fromkeys(files.values()):
        ordered = {plugin: dict(sorted(of.items())) for plugin, of in record.items() if files[plugin] == file}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        part.replace(file)


def chosen(known: Mapping[str, Iterable[str]], names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the plugins and model types to test.

    Raises:
        SystemExit: a name is no family's.
    """
    pairs = [(plugin, model_type) for plugin, types in known.items() for model_type in types]
    wanted = set(names)
    if unknown := wanted - {model_type for _, model_type in pairs}:
        sys.exit(f"--families: expected model types of the installed library, got {', '.join(sorted(unknown))}")
    return [pair for pair in pairs if not wanted or pair[1] in wanted]


def main() -> None:
    """Test, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default="", help="model types, with commas between; left out, all")
    parser.add_argument(
        "--out", type=Path, help="one file for all; without it the plugins' own, with which docs/models.md is written"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what the record has of this library")
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = dict.fromkeys(KINDS, options.out) if options.out else RECORDS
    known, record = families(), read(files)
    named = [name for name in options.families.split(",") if name]
    if not named:  # families that the library has no more
        record = {plugin: {name: of[name] for name in known[plugin] if name in of} for plugin, of in record.items()}
    for plugin, model_type in chosen(known, named):
        if options.resume and record[plugin].get(model_type, {}).get("version") == VERSION:
            continue
        begun = time.perf_counter()
        outcome = KINDS[plugin](model_type)
        record[plugin][model_type] = plain(outcome)
        write(files, record)
        took = time.perf_counter() - begun
        print(f"{plugin} {model_type}: {outcome.problem or 'as the library'} ({took:.1f} s)", flush=True)
    if files is RECORDS:
        PAGE.write_text(page_of(read(files)), encoding="utf-8")


if __name__ == "__main__":
    main()
