"""A module as a checkpoint has it, and the published family that has a place for its settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimo.checkpoint import Manifest
from mimo.hooks import CheckpointError, ConfigError
from mimo.model import HfFamily, LanguageModelSpec, ModuleSpec, hf_families
from mimo.trainer.config.names import IMPORTED
from mimo.trainer.config.plugin_kinds import Find, module_kind
from mimo.trainer.config.structure import structure
from mimo.trainer.published.part import carried
from mimo.trainer.published.readers import check_table
from mimo.trainer.resolving.checkpoint_settings import settings_of
from mimo.trainer.resolving.resolve import resolve


def saved_module(checkpoint: Path, manifest: Manifest, name: str, find: Find) -> tuple[ModuleSpec, Any]:
    """Return the plugin and settings with which a module was saved."""
    tables = manifest.config.get("modules", {})
    if name not in tables or name not in manifest.topology:
        known = ", ".join(sorted(set(tables) & set(manifest.topology))) or "none"
        raise CheckpointError(
            str(checkpoint),
            expected=f"a checkpoint with the module {name!r}",
            got=f"one with {known}",
            fix="Name another one by --module.",
        )
    where, table = f"modules.{name}", tables[name]
    kind = module_kind(name, distil=table.get("distil"), fed_by=table.get("fed_by"))
    spec: ModuleSpec = find(kind, table["plugin"], f"{where}.plugin")
    config: Any = structure(table["config"], spec.config, f"{where}.config")
    if isinstance(spec, LanguageModelSpec) and not spec.vocabulary(config):  # it is the tokenizer's
        config = resolve(settings_of(checkpoint, (), "generate"), purpose="import", find=find).module(name).config
    return spec, config


def family_of(
    spec: ModuleSpec, config: Any, module: str, *, asked: str, known: str
) -> tuple[HfFamily, Mapping[str, Any]]:
    """Return the first family that has a place for all settings, and its ``config.json``."""
    check_table(module, spec)
    every = hf_families(spec, config)
    families = [family for family in every if asked in {"", family.model_type}]
    if asked and not families:
        raise ConfigError(
            "--model-type",
            expected=f"one that {spec.name!r} knows: {', '.join(family.model_type for family in every)}",
            got=repr(asked),
        )
    refusals = []
    for family in sorted(families, key=lambda family: family.model_type != known):
        try:
            return family, family.describe(config)
        except ConfigError as error:
            refusals.append(f"{family.model_type}: {error}")
    raise ConfigError(
        f"modules.{module}.config",
        expected="settings of a published family",
        got=f"none of {len(refusals)} that can say them:{''.join(f'{chr(10)}  {line}' for line in refusals)}\n",
    )


def imported_from(manifest: Manifest, module: str) -> Mapping[str, Any]:
    """Return what is known of the folder that a module was imported from; nothing if it wasn't."""
    known = manifest.common.get(f"{IMPORTED}.{module}")
    return known if isinstance(known, Mapping) else {}


def as_imported(imported: Mapping[str, Any], family: HfFamily) -> Mapping[str, Any]:
    """Return keys of the imported ``config.json`` that no settings say; of a forged checkpoint nothing else.

    They are the family's dropouts that were set aside, and what it carries.
    """
    if imported.get("model_type") != family.model_type:
        return {}
    known = [imported.get(name) for name in ("ignored", "carried")]
    ignored, others = (one if isinstance(one, Mapping) else {} for one in known)
    return {**{key: ignored[key] for key in family.dropout if key in ignored}, **carried(family, others)}
