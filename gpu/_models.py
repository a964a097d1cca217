"""The model families of which `day.py` compares each with one plain process: settings of small models by name.

They are those of the oracle in ``integration_tests``, each on one rank and in one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tables import EVEN_EPS, Table, table
from test_oracle import CLEAR_SEEDS, FAMILIES, HEADS, on
from test_oracle_audio import CONFIGS as WHISPER
from test_oracle_mamba import CONFIG as HYBRID
from test_oracle_mamba import SEED
from test_oracle_next_tokens import FURTHER
from test_oracle_radio import CONFIGS as RADIO
from test_oracle_vision import FAMILIES as VISION

HERE = on(0, 0)


def _decoders() -> dict[str, Table]:
    pictures = {"vision": HERE, "language": HERE}
    plain = {"plain": {}, **FAMILIES, **HEADS, "further tokens": FURTHER}
    found = {name: table(pictures, language=keys) for name, keys in plain.items()}
    for scores, (keys, seed) in CLEAR_SEEDS.items():
        found[f"experts by {scores}"] = table(pictures, language=keys, seed=seed)
    return found


def _hybrids() -> dict[str, Table]:
    configs = {"hybrid": HYBRID, "hybrid, further tokens": {**HYBRID, **FURTHER}}
    configs["hybrid without experts"] = {**HYBRID, "pattern": "M*-M"}
    return {
        name: table(
            {"vision": HERE, "language": {**HERE, "plugin": "hybrid", "config": config}}, seed=SEED, eps=EVEN_EPS
        )
        for name, config in configs.items()
    }


def _encoders() -> dict[str, Table]:
    vision = {f"vision, {name}": {"vision": {**HERE, **keys}} for name, keys in VISION.items()}
    radio = {f"radio, {name}": {"vision": {**HERE, "plugin": "radio", "config": keys}} for name, keys in RADIO.items()}
    audio = {
        f"whisper, {name}": {"audio": {**HERE, "plugin": "whisper", "config": keys}} for name, keys in WHISPER.items()
    }
    return {
        name: table({**modules, "language": HERE}, eps=EVEN_EPS)
        for name, modules in {**vision, **radio, **audio}.items()
    }


GROUPS = MappingProxyType({"decoders": _decoders, "hybrids": _hybrids, "encoders": _encoders})
TINY = frozenset({"Qwen 3", "experts by sigmoid", "hybrid", "vision, siglip, native", "whisper, silence heard"})
"""What shows that the comparison works."""


def models(group: str, *, tiny: bool) -> Mapping[str, Table]:
    """Return the settings of a group by name, those of `TINY` alone if so asked."""
    return {name: settings for name, settings in GROUPS[group]().items() if not tiny or name in TINY}
