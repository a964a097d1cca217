"""Where a published Hugging Face folder holds what a module of ours has: a table for each family. Free of torch.

A family's table is all that reading and writing its folders needs: `mimo.model.runtime.read_hf` and `write_hf` follow
it for a module in memory, ``mimo checkpoint import-hf`` and ``export-hf`` for whole checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen(kw_only=True)
class HfTensor:
    """Where a published folder holds one parameter of ours.

    What is read goes through these steps, each left out where its field is not given: ``theirs[rows]`` of the dim
    ``along``, seen as ``shape``, ``permute(dims)``, seen as our shape.

    Args:
        ours: the parameter's path in the whole module, ``layers.3.attention.query.weight``; buffers have no place here.
        theirs: its name there. Of a tuple each is one index of our dim 0 (experts), and all else is about each of
            them, unless ``lengths`` are given.
        rows: which rows of theirs are ours, from and before which, where several of ours lie in one of theirs one after
            the other (a fused query-key-value, an input projection); together these take up all of it.
        along: the dim that these rows count. Where it isn't the first, our first dim is theirs.
        shape: the shape that this (these rows) has there, where it isn't ours: the same elements, for example
            ``[channels, 1, taps]`` of a convolution.
        lengths: of a tuple, how many rows of ours each of theirs holds, where they are parts of it one after the other
            and not single indices. Nothing else is given beside it.
        dims: the order of their dims in which ours has them, ``(1, 0)`` for a transposed matrix.
        optional: whether a folder may be without it and all others that are so too; ours begin new then.
    """

    ours: str
    theirs: str | tuple[str, ...]
    rows: tuple[int, int] | None = None
    along: int = 0
    shape: tuple[int, ...] | None = None
    dims: tuple[int, ...] | None = None
    optional: bool = False
    lengths: tuple[int, ...] | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse rows of a later dim where the first doesn't stay what it is, and parts that aren't one for a name."""
        assert not self.along or (self.rows and self.shape is None and (self.dims or (0,))[0] == 0), self
        if self.lengths is not None:
            assert not isinstance(self.theirs, str), self
            assert len(self.lengths) == len(self.theirs), self
            assert (self.rows, self.shape, self.dims) == (None, None, None), self

    @property
    def stacked(self) -> bool:
        """Whether each of its names is one index of our dim 0."""
        return not isinstance(self.theirs, str) and self.lengths is None

    @property
    def names(self) -> tuple[str, ...]:
        """Its names there."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def place(self, shape: tuple[int, ...], index: int) -> tuple[int, tuple[int, ...]]:
        """Return which element of our parameter of ``shape`` a name's first is, and the shape of what is ours there."""
        if self.lengths is not None:
            return sum(self.lengths[:index]) * math.prod(shape[1:]), (self.lengths[index], *shape[1:])
        each = shape[1:] if self.stacked else shape
        return index * math.prod(each), each

    def part_shape(self, each: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that our parameter, or what is in one of several names, of shape ``each`` has there."""
        if self.shape is not None:
            return self.shape
        return each if self.dims is None else tuple(each[self.dims.index(dim)] for dim in range(len(each)))


@attrs.frozen(kw_only=True, eq=False)
class HfExample:
    """A thin whole model that a library of published models has written into a folder, and what it makes of samples.

    Args:
        placeholder: the id of one row of an item.
        words: ids that stand for text and nothing else.
        items: raw items of unlike sizes, two or more.
        logits: of the ids [S] of one sample, an item's placeholder once for each of its rows, and of its raw items in
            order, the logits [S, V] that the library computes.
    """

    placeholder: int
    words: range
    items: Sequence[Any]
    logits: Callable[[Sequence[int], Sequence[Any]], Tensor]


@attrs.frozen(kw_only=True)
class HfWhole:
    """What a family says of the language model that its published folders hold besides.

    Args:
        section: of ``config.json`` that describes it.
        hidden: of our config, the width of the rows that it takes.
        keys: of a whole ``config.json``, what that says of the section: whether the embeddings are tied, for example.
        settings: of our config, the settings that its plugin must have as it stands in the whole, by key.
        names: of our config, the names of its tensors in a folder as it is written, with ``*`` for each number.
        tokenizer: of our config, what settings of a tokenizer of the plugin ``file`` say about items: by key
            (``placeholders``), by modality.
        example: of our config, of a whole ``config.json``, and of an empty folder, into which it writes a
            ``config.json`` and the weights of a thin model of the same family: the same in all but its widths, the
            layers of its language model and its ids.
    """

    section: str
    hidden: Callable[[Any], int]
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    settings: Callable[[Any], Mapping[str, Any]]
    names: Callable[[Any], frozenset[str]]
    tokenizer: Callable[[Any], Mapping[str, Mapping[str, str]]]
    example: Callable[[Any, Mapping[str, Any], Path], HfExample]


def _no_rename() -> tuple[Mapping[str, str], ...]:
    return ({},)


@attrs.frozen(kw_only=True)
class HfFamily:
    """A family of published models that a plugin can read and write.

    Args:
        model_type: of its ``config.json``, or of the section of it that describes this part of a composed model.
        architecture: the class that ``config.json`` names in an exported folder: ``LlamaForCausalLM``.
        settings: of a ``config.json`` (that section), the settings of ours that it decides, to be given to the plugin's
            config class. Raises `ConfigError` with the key of ``config.json`` where ours can't do what it says.
        describe: of our config, the ``config.json`` (without ``architectures``, ``model_type`` and the dtype); the
            inverse of ``settings``. Raises `ConfigError` with our setting where the family has no place for it.
        tensors: of our config, the table; only what of the module the family has, so of an encoder no projector. What
            of a generator reads rows of the language model may be in it: how wide these are, tensors of a folder say.
        renamed: other prefixes that names can have, by those in the table; the fullest of these is taken where
            several fit, and the first is written. ``({}, {"": "language_model."}, {"model.": "model.text_model."})``.
        ignored: glob patterns of names that nobody needs: a text tower, a pooling head, positions that follow from the
            configuration.
        needless: of a name, whether nobody needs it, where patterns can't say it.
        fixed: of our config, by glob pattern of names, the values that a tensor must hold which is no parameter of
            ours but matters (an input's mean, a layer scale of ones), where a folder has one; one value serves for all.
        constants: of our config, tensors of whole numbers that follow from it and are no parameters of ours, by name:
            they are written, and a folder that has them must have these.
        copies: of our config, tensors that a folder may hold a second time under this name, with the name of the first:
            a head that is tied to the embedding.
        beside: of our config, what ``config.json`` says of the tensors that are optional, where they are written.
        files: names of further JSON files of a folder that ``settings`` reads, as far as they are there: it is given
            each under its name, as if it were a key of ``config.json``.
        whole: of an encoder whose folders hold a language model too, which it delivers rows to as it was published.
        adaptable: of our config, a table of linears beside which PEFT can put LoRA, by the names of the modules that
            `transformers` makes of a folder; None where these are those of ``tensors``.
        dropout: keys of ``config.json`` that say how much is dropped at random while a model is trained. ``settings``
            reads a rate (`mimo.model.hf_rate`), refuses any but 0 (`mimo.model.hf_no_dropout`), or passes over what the
            library never reads; a user can have each set aside by name.
        carried: keys of ``config.json`` that are no settings of ours, and that whoever serves the model reads: whole
            numbers, lists of them or null, that an export writes again as they were.
        export_note: what whoever loads an exported folder must know, as a sentence without its dot; empty for nothing.
    """

    model_type: str
    architecture: str
    settings: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    describe: Callable[[Any], Mapping[str, Any]]
    tensors: Callable[[Any], Sequence[HfTensor]]
    renamed: Sequence[Mapping[str, str]] = attrs.field(factory=_no_rename)
    ignored: Sequence[str] = ()
    needless: Callable[[str], bool] = lambda _name: False
    fixed: Callable[[Any], Mapping[str, Sequence[float]]] = lambda _config: {}
    constants: Callable[[Any], Mapping[str, Tensor]] = lambda _config: {}
    copies: Callable[[Any], Mapping[str, str]] = lambda _config: {}
    beside: Callable[[Any], Mapping[str, Any]] = lambda _config: {}
    dropout: Sequence[str] = ()
    carried: Sequence[str] = ()
    export_note: str = ""
    adaptable: Callable[[Any], Sequence[HfTensor]] | None = None
    files: Sequence[str] = ()
    whole: HfWhole | None = None

    def copies_there(self, config: Any, renamed: Mapping[str, str]) -> Mapping[str, str]:
        """Return ``copies`` with the names of a folder, with the prefixes that `match_names` has found."""
        return {
            _with_prefix(name, renamed): _with_prefix(first, renamed) for name, first in self.copies(config).items()
        }

    def constants_there(self, config: Any, renamed: Mapping[str, str]) -> Mapping[str, Tensor]:
        """Return ``constants`` with the names of a folder, likewise."""
        return {_with_prefix(name, renamed): tensor for name, tensor in self.constants(config).items()}


@attrs.frozen(kw_only=True)
class HfTested:
    """What a recorded test of a family beside its library has found.

    Args:
        version: of the library, ``transformers 5.23.0``.
        problem: why it can't be trained; empty where it computed what the library computes.
        refused: by axis along which it can't be split in two, why.
        language: of an encoder that reads whole models, the plugin that was their language model.
    """

    version: str
    problem: str = ""
    refused: Mapping[str, str] = attrs.field(factory=dict)
    language: str = ""


@attrs.frozen(kw_only=True)
class HfFamilies:
    """The families of a plugin that can read any of a kind, made as they are asked for.

    Args:
        of: of a ``model_type``, its family; None where it is of another kind.
        type_of: of our config, the ``model_type`` as which it is written.
        known: lists each ``model_type`` that it might read, in a few seconds, some that it would refuse among them.
    """

    of: Callable[[str], HfFamily | None]
    type_of: Callable[[Any], str]
    known: Callable[[], Sequence[str]] = tuple


@cache
def read_hf_tested(record: Path, plugin: str) -> Mapping[str, HfTested]:
    """Return what is recorded of the families of a plugin, by ``model_type``.

    Args:
        record: a JSON file: by plugin, by family or by folder of one, which says its ``model_type``, what a test found,
            with the fields of `HfTested`.
        plugin: name of it.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for name, one in json.loads(record.read_text(encoding="utf-8")).get(plugin, {}).items():
        found.setdefault(one.get("model_type", name), []).append(one)
    return {model_type: _tested(several) for model_type, several in found.items()}


def _tested(several: Sequence[Mapping[str, Any]]) -> HfTested:
    """Return what is recorded of a family of which several folders were tested: it can be trained if one can."""
    trained = [one for one in several if not one["problem"]] or several
    return HfTested(
        version=trained[0]["version"],
        problem=trained[0]["problem"],
        refused={axis: reason for one in trained for axis, reason in one["refused"].items()},
        language=trained[0].get("language", ""),
    )


def file_shapes(table: Iterable[HfTensor], ours: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a published folder must hold.

    Args:
        table: of the model.
        ours: shapes of our parameters by path.

    Raises:
        ValueError: the table is wrong: it reads a tensor twice, or not all of its rows.
    """
    found: dict[str, list[tuple[int, int, int, tuple[int, ...]]]] = {}
    for entry in table:
        shape = ours[entry.ours]
        if entry.lengths is not None and sum(entry.lengths) != shape[0]:
            msg = f"the table puts {sum(entry.lengths)} rows into {entry.ours}, of shape {shape}"
            raise ValueError(msg)
        for index, name in enumerate(entry.names):
            part = entry.part_shape(entry.place(shape, index)[1])
            low, high = entry.rows or (0, part[entry.along] if part else 1)
            found.setdefault(name, []).append((low, high, entry.along, part))
    shapes = {}
    for name, parts in found.items():
        end = 0
        *_, along, first = parts[0]
        for low, high, other, part in sorted(parts):
            fits = other == along and _without(part, along) == _without(first, along)
            if low != end or not fits or (part and high - low != part[along]):
                msg = f"the table reads rows {low} to {high} of {name}, a part of shape {part}, after row {end}"
                raise ValueError(msg)
            end = high
        shapes[name] = (*first[:along], end, *first[along + 1 :]) if first else ()
    return shapes


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def match_names(
    family: HfFamily, table: Sequence[HfTensor], names: Iterable[str]
) -> tuple[Mapping[str, str], list[HfTensor]]:
    """Return the prefixes of a folder's names, and the table with its names, without optional tensors that it lacks.

    Args:
        family: knows the prefixes that they can have.
        table: as ``family.tensors`` gives it.
        names: in the folder; none to write one.
    """
    held = frozenset(names)
    choices = [
        (renamed, [attrs.evolve(entry, theirs=_renamed(entry.theirs, renamed)) for entry in table])
        for renamed in family.renamed
    ]
    renamed, found = max(choices, key=lambda choice: sum(name in held for entry in choice[1] for name in entry.names))
    return renamed, without_absent(found, lambda entry: not held or any(name in held for name in entry.names))


def without_absent(table: Sequence[HfTensor], is_there: Callable[[HfTensor], bool]) -> list[HfTensor]:
    """Return a table without what is optional if none of that is there; a part of it alone would be damaged."""
    held = any(is_there(entry) for entry in table if entry.optional)
    return [entry for entry in table if held or not entry.optional]


def _renamed(theirs: str | tuple[str, ...], prefixes: Mapping[str, str]) -> str | tuple[str, ...]:
    if isinstance(theirs, str):
        return _with_prefix(theirs, prefixes)
    return tuple(_with_prefix(name, prefixes) for name in theirs)


def _with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    longest = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return name if longest is None else prefixes[longest] + name.removeprefix(longest)
