"""docs/models.md, written of the record of `table.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mimo_transformers.images import KINDS, PARITY

Record = Mapping[str, Mapping[str, Mapping[str, Any]]]

_TITLES = {"hf-decoder": "Language models", "hf-encoder": "Vision towers"}
_NOTES = {
    "hf-encoder": """Images of one size go through `radio` in one call: it loops over images only where they are handed
to it as patches of unlike sizes. Its published folders are not read by `hf-encoder`, as they hold whole numbers
(`summary_idxs`) beside their weights; the encoder [`radio`](../plugins/encoder-radio/README.md) reads and writes them.
`nemotron_h_omni`, the one whole model with such a tower, can't be compared (see below). No code that lies in a folder
is run, as some older RADIO folders need.
"""
}
"""What a table doesn't say of single families."""
_OPENING = """# Published models

Which families of `transformers` train here: `python integration_tests/published/table.py` finds it out and writes this
page. `mimo models` lists them, `mimo models MODEL_TYPE` tries one now.

Each family is shrunk from the library's own config by one rule and compared with the library's own class: loss, outputs
and every gradient of packed samples, where the library has each sample alone. Numbers are relative differences in fp32,
on one process, and of gradients in layouts of two too; of gradients it is that of the parameter that differs most.
Gradients may differ by 1e-5, through scans and linear attention, whose sums cancel, by 1e-4. Those with a star differ
further: the library's own change by a fifth of that or more where each weight begins as the next number in fp32.
Weights that the library has written went in and out again to the bit: as many tensors as the last column says. A dash
is an axis that the family refuses.

Whole models of images and text are shrunk by the same rule, and measured as
[published folders](#whole-models-of-images-and-text) with a tokenizer and a processor.

A published `config.json` may say more than the library's own config does (convolutions of LFM2), so every model is
tried again before it is built.
"""

_HEADS = "loss | outputs | gradients"
_OPENING_NAMED = """## Families that other plugins name

By the plugins that come first where a family is theirs, beside {versions}. They write a folder that the
library loads, and its gradients are read as a folder is. Encoders have a linear projector behind them; `whisper` hears
the silence behind a clip, as the library does (`silence = "keep"`). `qwen2_vl` and `qwen2_5_vl` are folders of before
`transformers` 5, which have no section of text. Grids of images are compared in whole models, below.
"""
_WHOLE = "hf-images"
_IN_LAYOUTS = {"outputs": "logits in layouts", "gradients": "gradients in layouts"}
_OPENING_WHOLE = """## Whole models of images and text

By `hf-images` with a language model behind it: {trained} families in {folders} folders of {versions}. The library's
own config of the whole model becomes small by the rule, with parts that fit together; of a folder only what is no size
is chosen: which tower a variant has, and what its processor says. The library writes the folder,
`mimo checkpoint import-hf` reads it, and one step is trained on conversations with no image, one, and two of unlike
sizes, in four microbatches. Loss, logits of all rows and every gradient are compared with the library's model on each
sample alone, in one process and in three layouts that are drawn by the folder's name, of which the largest difference
is shown. So many tokens as the last column but one says are generated after an image, by the
likeliest each, and are the library's; their logits count among the others. What is exported has the tensors and files
of the folder to the bit, and the library loads it with nothing missing.
"""
_OPENING_IMAGES = """How images are prepared, and against what that is tested: `library` is an image processor or a
model of the library, `method` a method of its processor of texts that is called by itself.
"""


_OPENING_OBSTACLES = """Every other type of which the library has a class for text after images, with the first thing
that stands in the way of its own config: it has no such parts (`config`), its `language model` is refused, its `parts`
are put together in another way, its `images` are prepared as by no kind here, or a small `folder` of it is refused.
`mimo models DIR` tries a folder of any of them.
"""


def page_of(record: Record) -> str:
    """Return the page of a record."""
    named = {plugin: families for plugin, families in record.items() if plugin not in {*_TITLES, _WHOLE}}
    sections = [_named(named), *(_section(plugin, record[plugin]) for plugin in _TITLES), _whole(record[_WHOLE])]
    return "\n".join([_OPENING, *(line for lines in sections for line in lines)])


def _named(record: Record) -> Iterator[str]:
    layouts = _layouts(one for families in record.values() for one in families.values())
    yield _OPENING_NAMED.format(versions=_versions(one for families in record.values() for one in families.values()))
    yield f"| `model_type` | plugin | {_HEADS} | {' | '.join(layouts[1:])} | tensors |"
    yield "|" + "---|" * (len(layouts) + 5)
    for plugin, families in record.items():
        yield from (f"| `{name}` | `{plugin}` | {_sizes(one, layouts)} |" for name, one in families.items())
    yield ""


def _section(plugin: str, families: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    trained = {name: one for name, one in families.items() if not one["problem"]}
    versions, layouts = _versions(families.values()), _layouts(trained.values())
    yield f"## {_TITLES[plugin]}"
    yield ""
    yield f"By `{plugin}`: {len(trained)} of {len(families)} families of {versions}."
    yield ""
    yield f"| `model_type` | {_HEADS} | {' | '.join(layouts[1:])} | tensors |"
    yield "|" + "---|" * (len(layouts) + 4)
    yield from (f"| `{name}` | {_sizes(one, layouts)} |" for name, one in trained.items())
    yield ""
    if plugin in _NOTES:
        yield _NOTES[plugin]
    yield "Refused, with the library's own config:"
    yield ""
    yield from _refused(families)


def _versions(every: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({one["version"] for one in every}))


def _layouts(every: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(layout for one in every for layout in one["differences"]))


def _sizes(one: Mapping[str, Any], layouts: Sequence[str]) -> str:
    """Return the cells of a family behind its name."""
    alone, *others = (one["differences"].get(layout) for layout in layouts)
    assert alone is not None
    sizes = [f"{alone[key]:.0e}" for key in ("loss", "outputs", "gradients")]
    cells = [f"{other['gradients']:.0e}{'*' if 'rounding' in other else ''}" if other else "-" for other in others]
    return " | ".join([*sizes, *cells, str(one["tensors"] or one["weights"])])


def _whole(folders: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    trained = {name: one for name, one in folders.items() if not one["problem"]}
    types = {one["model_type"] for one in trained.values()}
    yield _OPENING_WHOLE.format(trained=len(types), folders=len(trained), versions=_versions(folders.values()))
    heads = ("folder", "`model_type`", "images", "language model", "loss", "logits", "gradients", *_IN_LAYOUTS.values())
    yield f"| {' | '.join([*heads, 'tokens', 'tensors'])} |"
    yield "|" + "---|" * (len(heads) + 2)
    for name, one in trained.items():
        alone, *others = one["differences"].values()
        cells = [name, f"`{one['model_type']}`", one["images"], f"`{one['language']}`"]
        cells += [f"{alone[key]:.0e}" for key in ("loss", "outputs", "gradients")]
        cells += [f"{max(other[key] for other in others):.0e}" for key in _IN_LAYOUTS]
        yield f"| {' | '.join([*cells, str(one['tokens']), str(one['tensors'] or one['weights'])])} |"
    yield ""
    yield "Layouts, of which each model has three, a grid for the encoder and one for the language model:"
    yield ""
    drawn = dict.fromkeys(layout for one in trained.values() for layout in list(one["differences"])[1:])
    yield from (f"- {layout}" for layout in sorted(drawn))
    yield ""
    yield _OPENING_IMAGES
    yield "| images | | pixels | text | rows |"
    yield "|---|---|---|---|---|"
    for kind, made in KINDS.items():
        shown = [PARITY[kind][what] for what in ("pixels", "text", "rows")]
        yield f"| {kind} | {_about(made)} | {' | '.join(shown)} |"
    yield ""
    yield _OPENING_OBSTACLES
    yield from _refused(dict(sorted(folders.items(), key=lambda named: named[1]["problem"].partition(":")[0])))


def _about(made: type) -> str:
    first, *_ = (made.__doc__ or "").splitlines()
    return first.removeprefix("Settings of ").rstrip(".")


def _refused(families: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "| `model_type` | why |"
    yield "|---|---|"
    for name, one in families.items():
        if one["problem"]:
            yield f"| `{name}` | {one['problem'].replace('|', chr(92) + '|')} |"
    yield ""
