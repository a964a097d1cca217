"""Published folders by tables: streams are what a module in memory has, and which module a folder is for."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from mimo.checkpoint import Stream, write_safetensors
from mimo.hooks import CheckpointError, ConfigError, PluginError
from mimo.model import DECODER, DecoderConfig, GeneratorSpec, HfFamily, HfTensor, ModuleSpec, Stage, file_shapes
from mimo.model.runtime import write_hf
from mimo.trainer.commands.hf import _line
from mimo.trainer.exporting.saved_module import as_imported
from mimo.trainer.importing.import_hf import prepare
from mimo.trainer.importing.import_report import left_names
from mimo.trainer.published.covered import left_whole
from mimo.trainer.published.find import find_parts
from mimo.trainer.published.part import HfPart
from mimo.trainer.published.readers import Reader, check_table, installed_readers, readers_of, split_word
from mimo.trainer.published.streams import our_streams, their_streams

SHAPES = {"query": (4, 6), "key": (2, 6), "kernel": (5, 3), "up": (2, 3, 4), "patch": (6, 12), "one": (1, 2), "s": ()}
SHAPES |= {"high": (2, 2, 3), "low": (2, 4, 3), "left": (2, 3, 2), "right": (2, 5, 2), "parts": (5, 1, 2)}
TABLE = (
    HfTensor(ours="key", theirs="qk", rows=(4, 6)),
    HfTensor(ours="query", theirs="qk", rows=(0, 4)),
    HfTensor(ours="kernel", theirs="conv", shape=(5, 1, 3)),
    HfTensor(ours="up", theirs=("e.0", "e.1"), dims=(1, 0)),
    HfTensor(ours="patch", theirs="patch", shape=(6, 3, 2, 2), dims=(0, 2, 3, 1)),
    HfTensor(ours="one", theirs=("single.0",)),
    HfTensor(ours="s", theirs="scale"),
    HfTensor(ours="low", theirs="both", rows=(2, 6), along=1),
    HfTensor(ours="high", theirs="both", rows=(0, 2), along=1),
    HfTensor(ours="left", theirs="turned", rows=(0, 3), along=2, dims=(0, 2, 1)),
    HfTensor(ours="right", theirs="turned", rows=(3, 8), along=2, dims=(0, 2, 1)),
    HfTensor(ours="parts", theirs=("p", "q"), lengths=(3, 2)),
)
FAMILY = HfFamily(
    model_type="toy", architecture="Toy", settings=dict, describe=dict, tensors=lambda _config: TABLE, renamed=({},)
)


@attrs.frozen
class Held:
    """Tensors in memory, read three elements at a time into the same place, as files are."""

    tensors: Mapping[str, Tensor]

    def elements(self, name: str, begin: int, end: int) -> Iterator[Tensor]:
        buffer = torch.empty(3, dtype=self.tensors[name].dtype)
        for low in range(begin, end, 3):
            found = buffer[: min(3, end - low)]
            found.copy_(self.tensors[name].reshape(-1)[low : low + len(found)])
            yield found


def whole(stream: Stream) -> Tensor:
    """Return all of a stream."""
    chunks = [chunk.clone() for chunk in stream.chunks()]
    assert all(chunk.dim() == 1 and chunk.is_contiguous() and chunk.dtype == stream.dtype for chunk in chunks)
    return torch.cat(chunks).view(stream.shape)


def published(tmp_path: Path) -> HfPart:
    """Return a small decoder that is written as a folder of its first family."""
    config = DecoderConfig(vocabulary=6, hidden=4, heads=2, layers=1, intermediate=4)
    return written(tmp_path / "f", "language", DECODER, config, DECODER.build(config, Stage()))


def written(folder: Path, name: str, spec: ModuleSpec, config: Any, module: nn.Module) -> HfPart:
    """Return a module that is written as a folder of its first family."""
    family = spec.hf[0]
    streams = {
        name: Stream(dtype=one.dtype, shape=tuple(one.shape), chunks=functools.partial(one.reshape(-1).split, 2))
        for name, one in write_hf(module, family, config).items()
    }
    write_safetensors(folder, streams, texts={})
    reader = Reader(module=name, spec=spec, family=family)
    return HfPart(folder=folder, section="", reader=reader, config=config, given={})


@attrs.frozen(kw_only=True)
class BrushConfig:
    """Settings of the generator ``brush``."""

    width: int = 3


class Brush(nn.Module):
    """A generator that is never run."""

    def __init__(self, config: BrushConfig, hidden: int) -> None:
        super().__init__()
        self.read = nn.Linear(hidden, config.width)
        self.write = nn.Linear(config.width, 1)


BRUSH = GeneratorSpec(
    name="brush",
    config=BrushConfig,
    measure=lambda _raw: (1,),
    targets=lambda _config, _size: 1,
    prepare=lambda _config, _raw: {},
    build=Brush,
    hf=[
        HfFamily(
            model_type="brush",
            architecture="BrushModel",
            settings=lambda published: {"width": published["size"]},
            describe=lambda config: {"size": config.width},
            tensors=lambda _config: [
                HfTensor(ours=f"{part}.{leaf}", theirs=f"{part}_proj.{leaf}")
                for part in ("read", "write")
                for leaf in ("weight", "bias")
            ],
        )
    ],
)


@pytest.mark.parametrize("hidden", [5, 1024])
def test_tensors_of_a_generator_say_how_wide_the_rows_are_that_it_reads(hidden: int, tmp_path: Path) -> None:
    """Where neither settings of a run nor a language model beside it do; with these another width is refused."""
    config = BrushConfig()
    brush = written(tmp_path / "brush", "drawer", BRUSH, config, Brush(config, hidden))
    (read,) = prepare([brush], {})
    assert read.streams["read.weight"].shape == (3, hidden)
    assert (prepare([brush], {}, {"drawer": hidden})[0].fresh, read.fresh) == ((), ())
    language = published(tmp_path)
    text = f"read_proj.weight: shape [3, {hidden}] there, [3, 4] here"
    for parts, widths in (([brush], {"drawer": 4}), ([brush, language], None)):
        with pytest.raises(CheckpointError) as caught:
            prepare(parts, {}, widths)
        assert text in str(caught.value)
    narrow = written(tmp_path / "narrow", "drawer", BRUSH, config, Brush(config, 4))
    assert len(prepare([narrow, language], {})) == 2


def test_shapes_that_no_width_explains_are_named(tmp_path: Path) -> None:
    """As those of any module, with the width that the others have."""
    config = BrushConfig()
    brush = written(tmp_path / "brush", "drawer", BRUSH, config, Brush(BrushConfig(width=2), 5))
    with pytest.raises(CheckpointError) as caught:
        prepare([brush], {})
    assert "read_proj.weight: shape [2, 5] there, [3, 5] here\n  read_proj.bias: shape [2] there, [3]" in str(
        caught.value
    )


def test_a_generator_in_a_section_is_a_modules_that_language_feeds() -> None:
    """The settings that are printed say so; others of a folder's modules have no such key."""
    described = {"model_type": "x", "width": 64, "parts": 2, "maker": {"model_type": "brush", "size": 7}}
    parts = find_parts(Path("f"), described, [reader("language", "x"), *readers_of([("drawer", BRUSH)])])
    assert [part.table for part in parts] == [
        {"plugin": "decoder", "config": {"hidden": 32}},
        {"plugin": "brush", "fed_by": "language", "config": {"width": 7}},
    ]


def test_a_plugin_without_a_table_is_refused_by_its_path() -> None:
    """With what is missing and what to do, whatever its kind."""
    check_table("drawer", BRUSH)
    with pytest.raises(ConfigError) as caught:
        check_table("drawer", attrs.evolve(BRUSH, hf=()))
    assert str(caught.value) == (
        "modules.drawer.plugin: expected one with a table of published weights, `hf` of its spec, got generator "
        "'brush', which has none. Name another module, or give the plugin a table; `mimo models` lists what can be "
        "read and written."
    )


def test_streams_follow_the_table_both_ways() -> None:
    """Fused, reshaped, stacked, turned, cut and single numbers, as `write_hf` has them; types are converted."""
    module = nn.Module()
    ours = {name: torch.arange(math.prod(shape)).float().view(shape) + len(name) for name, shape in SHAPES.items()}
    for name, tensor in ours.items():
        setattr(module, name, nn.Parameter(tensor))
    expected = write_hf(module, FAMILY, None)
    shapes = file_shapes(TABLE, SHAPES)
    prefixed = Held({f"language.{name}": tensor for name, tensor in ours.items()})
    theirs = their_streams(TABLE, SHAPES, prefixed, shapes, before="language.", dtype=torch.bfloat16)
    assert {name: stream.shape for name, stream in theirs.items()} == shapes
    assert all(torch.equal(whole(theirs[name]), tensor.bfloat16()) for name, tensor in expected.items())
    back = our_streams(TABLE, SHAPES, Held(expected), shapes, dtype=torch.float64)
    assert all(torch.equal(whole(back[name]), tensor.double()) for name, tensor in ours.items())


def test_numbers_that_a_type_cannot_hold_are_refused() -> None:
    """Rather than become infinite; what was infinite stays so."""
    table, shapes = (HfTensor(ours="a", theirs="b"),), {"a": (4,)}

    def stream(values: list[float], dtype: torch.dtype) -> Stream:
        held = Held({"language.a": torch.tensor(values)})
        return their_streams(table, shapes, held, {"b": (4,)}, before="language.", dtype=dtype)["b"]

    large = [1.0, 2.0, 3.0, -70_000.0]
    with pytest.raises(CheckpointError, match=r"language\.a: expected numbers that float16 can .* 65504, got 70000\."):
        whole(stream(large, torch.float16))
    assert whole(stream(large, torch.bfloat16)).isfinite().all()
    assert whole(stream([1.0, 2.0, 3.0, math.inf], torch.float16))[3] == math.inf


def test_a_part_is_left_whole_or_torn() -> None:
    """By the first key of its names."""
    assert left_whole(["projector.a", "projector.b", "layers.0.lora"], ["layers.0.weight"]) == (
        ("projector",),
        ("layers.0.lora",),
    )


def test_a_word_names_a_module_and_its_folder(tmp_path: Path) -> None:
    """A folder whose own name has an equals sign is one."""
    (tmp_path / "a=b").mkdir()
    assert split_word("vision=x/y=z") == ("vision", Path("x/y=z"))
    assert split_word(str(tmp_path / "a=b")) == ("", tmp_path / "a=b")
    assert split_word("x") == ("", Path("x"))


def reader(module: str, model_type: str, plugin: str = "decoder") -> Reader:
    """Return a reader of a family whose settings are those of the decoder."""

    def settings(given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"hidden": given["width"] // given["parts"]}

    family = attrs.evolve(FAMILY, model_type=model_type, settings=settings)
    return Reader(module=module, spec=attrs.evolve(DECODER, name=plugin, hf=(family,)), family=family)


def test_sections_of_a_folder_are_found_by_their_family() -> None:
    """The whole of a `config.json`, and what in it has a family of its own."""
    described = {"model_type": "x", "width": 64, "parts": 2, "inner": {"model_type": "y", "width": 32, "parts": 1}}
    parts = find_parts(Path("f"), described, [reader("language", "x"), reader("vision", "y"), reader("radio", "z")])
    assert [(part.name, part.section, part.config.hidden) for part in parts] == [
        ("language", "", 32),
        ("vision", "inner", 32),
    ]
    assert parts[0].table == {"plugin": "decoder", "config": {"hidden": 32}}


@pytest.mark.parametrize(
    ("described", "text"),
    [
        ({}, "f/config.json model_type: expected a family that can be read here: x (decoder), x (other), got none."),
        ({"model_type": "y", "i": {"model_type": "z"}}, "x (other), got 'y', 'z' in i. `mimo plugins` lists"),
        (
            {"model_type": "x", "width": 8, "parts": 1},
            "f/config.json: expected one thing that can be modules.language, got decoder of all of it, other of all ",
        ),
    ],
)
def test_folders_for_nothing_or_for_several_are_refused(described: dict[str, Any], text: str) -> None:
    """The message lists what can be read, and which setting decides."""
    with pytest.raises(ConfigError) as caught:
        find_parts(Path("f"), described, [reader("language", "x"), reader("language", "x", plugin="other")])
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "got"), [({}, "KeyError: 'width'"), ({"width": "8"}, "TypeError"), ({"parts": 0}, "ZeroDivisionError")]
)
def test_settings_that_make_no_sense_are_refused(keys: dict[str, Any], got: str) -> None:
    """By the file, whatever a plugin makes of them."""
    described = {"model_type": "x", **({"width": 8, "parts": 2, **keys} if keys else {})}
    with pytest.raises(ConfigError) as caught:
        find_parts(Path("f"), described, [reader("language", "x")])
    assert f"f/config.json: expected the settings of a x model, got others ({got}" in str(caught.value)


def test_readers_are_those_of_the_named_module() -> None:
    """Language models for the language model, others beside it, under the name of their plugin if they have none."""
    assert {one.module for one in installed_readers("language")} == {"language"}
    assert all(one.spec is DECODER or one.spec.name != "decoder" for one in installed_readers("language"))
    assert "language" not in {one.module for one in installed_readers("vision")}
    assert [one.family for one in readers_of([("language", DECODER)])] == list(DECODER.hf)


def test_a_table_that_leaves_out_a_part_of_a_part_is_refused(tmp_path: Path) -> None:
    """As what it forgets would begin with random numbers."""
    part = published(tmp_path)
    family = part.reader.family

    def forgetful(config: Any) -> list[HfTensor]:
        return [entry for entry in family.tensors(config) if not entry.ours.endswith("key.weight")]

    less = attrs.evolve(family, tensors=forgetful, ignored=("*.k_proj.weight",))
    with pytest.raises(PluginError) as caught:
        prepare([attrs.evolve(part, reader=attrs.evolve(part.reader, family=less))], {})
    message = "a table of llama that fills each part of 'decoder' wholly, or not at all, got nothing for layers.0."
    assert message in str(caught.value)


def test_a_family_that_is_never_written_is_read(tmp_path: Path) -> None:
    """And compared with settings of a run by ours."""
    part = published(tmp_path)

    def never(_config: Any) -> Mapping[str, Any]:
        raise ConfigError("config", expected="another", got="this")

    reader = attrs.evolve(part.reader, family=attrs.evolve(part.reader.family, describe=never))
    part = attrs.evolve(part, reader=reader)
    assert prepare([part], {})[0].part.config == part.config
    message = (
        r"^modules.language.config.rope_theta: expected 10000.0, as \S+/config.json says, got 5.0. `mimo checkpoint"
    )
    with pytest.raises(ConfigError, match=message):
        prepare([part], {"language": attrs.evolve(part.config, rope_theta=5.0)})


def test_settings_that_the_family_of_a_folder_cannot_say_count_as_differing(tmp_path: Path) -> None:
    """Not as if the folder were to be written."""
    part = published(tmp_path)
    with pytest.raises(ConfigError) as caught:
        prepare([part], {"language": attrs.evolve(part.config, query_key_norm=True)})
    message = "query_key_norm: expected False, as models of the family 'llama' have no other, got True"
    # Of norms of queries the folder has no tensors either.
    assert f"got others:\n  modules.language.config.{message}.\n  " in str(caught.value)
    assert "`mimo checkpoint import-hf" in str(caught.value)


def test_one_setting_that_differs_is_named_in_a_line_by_our_name(tmp_path: Path) -> None:
    """What a module's settings leave to follow from others is no difference."""
    part = published(tmp_path)
    same = attrs.evolve(part.config, head_dim=part.config.head_width, kv_heads=part.config.key_value_heads)
    assert prepare([part], {"language": same})
    with pytest.raises(ConfigError) as caught:
        prepare([part], {"language": attrs.evolve(part.config, norm_eps=1e-3)})
    assert str(caught.value) == (
        f"modules.language.config.norm_eps: expected 1e-05, as {part.folder}/config.json says, got 0.001. "
        f"`mimo checkpoint import-hf {part.folder}` prints the settings that go with it."
    )


def test_names_that_are_not_read_are_put_together_by_their_beginnings() -> None:
    """As short as they can be; one beside others of its kind that are read is named in full."""
    read = ["model.layers.0.up", "model.layers.1.up", "head"]
    left = ["model.layers.2.up", "model.layers.0.bias", "model.layers.1.bias", "tower.a.b", "tower.c", "scale"]
    assert left_names([*read, *left], read) == {
        "model.layers.2.up": 1,
        "model.layers.*.bias": 2,
        "tower.*": 2,
        "scale": 1,
    }


@pytest.mark.parametrize(
    ("imported", "message"),
    [
        ({"ignored": {"attention_dropout": 0.5, "auto_map": {"AutoModel": "evil.Model"}}}, {"attention_dropout": 0.5}),
        ({"ignored": {"attention_dropout": 0.5}, "model_type": "other"}, {}),
        ({"ignored": [1], "carried": 7}, {}),
        (
            {"carried": {"eos_token_id": [2, 7], "bos_token_id": None, "vocab_size": 9}},
            {"eos_token_id": [2, 7], "bos_token_id": None},
        ),
        ({"carried": {"eos_token_id": {"a": 1}, "bos_token_id": [[1]], "pad_token_id": True}}, {}),
        ({}, {}),
    ],
)
def test_an_export_writes_no_key_of_a_forged_checkpoint(imported: dict[str, Any], message: dict[str, Any]) -> None:
    """Only keys that drop at random, and numbers that are carried: others may name code that is run."""
    (family,) = (family for family in DECODER.hf if family.model_type == "llama")
    assert as_imported({"model_type": "llama", **imported}, family) == message


def test_names_of_others_are_printed_on_one_line_without_what_a_terminal_obeys() -> None:
    """A line of a comment ends where ours ends it."""
    assert _line("# left behind: a\x1b[31m\nb") == "# left behind: a\\x1b[31m\\nb"
