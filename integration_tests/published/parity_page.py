"""docs/models.md, written of the record of `table.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Mapping[str, Mapping[str, Any]]]

_TITLES = {"hf-decoder": "Language models", "hf-encoder": "Vision towers"}
_OPENING = """# Published models

Which families of `transformers` train here: `python integration_tests/published/table.py` finds it out and writes this
page. `mimo models` lists them with the families that other plugins name, `mimo models MODEL_TYPE` tries one now.

Each family is shrunk from the library's own config by one rule and compared with the library's own class: loss, outputs
and every gradient of packed samples, where the library has each sample alone. Numbers are relative differences in fp32,
on one process, and of gradients in layouts of two too; of gradients it is that of the parameter that differs most.
Weights that the library has written went in and out again to the bit: as many tensors as the last column says. A dash
is an axis that the family refuses.

A published `config.json` may say more than the library's own config does (convolutions of LFM2), so every model is
tried again before it is built.
"""


def page_of(record: Record) -> str:
    """Return the page of a record."""
    return "\n".join([_OPENING, *(line for plugin in record for line in _section(plugin, record[plugin]))])


def _section(plugin: str, families: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    trained = {name: one for name, one in families.items() if not one["problem"]}
    versions = ", ".join(sorted({one["version"] for one in families.values()}))
    layouts = list(dict.fromkeys(layout for one in trained.values() for layout in one["differences"]))
    yield f"## {_TITLES[plugin]}"
    yield ""
    yield f"By `{plugin}`: {len(trained)} of {len(families)} families of {versions}."
    yield ""
    yield f"| `model_type` | loss | outputs | gradients | {' | '.join(layouts[1:])} | tensors |"
    yield "|" + "---|" * (len(layouts) + 4)
    for name, one in trained.items():
        alone, *others = (one["differences"].get(layout) for layout in layouts)
        sizes = [f"{alone[key]:.0e}" for key in ("loss", "outputs", "gradients")]
        cells = [f"{other['gradients']:.0e}" if other else "-" for other in others]
        yield f"| {' | '.join([f'`{name}`', *sizes, *cells, str(one['tensors'] or one['weights'])])} |"
    yield ""
    yield "Refused, with the library's own config:"
    yield ""
    yield "| `model_type` | why |"
    yield "|---|---|"
    for name, one in families.items():
        if one["problem"]:
            yield f"| `{name}` | {one['problem'].replace('|', chr(92) + '|')} |"
    yield ""
