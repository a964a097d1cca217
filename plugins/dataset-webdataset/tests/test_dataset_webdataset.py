"""Samples of shards: the same as those of jsonl, what members are, what is never read, and refusals by key."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mimo.data import (
    DATASETS,
    TOKENIZERS,
    ChatSettings,
    RecordDataset,
    Tokenizer,
    ends_of,
    lay_out,
    weights_of,
)
from mimo.hooks import ConfigError, DataError, RunError, UserError, discover
from mimo.testing import failing_files
from mimo_dataset_webdataset import WebdatasetConfig, write_shards
from mimo_dataset_webdataset._plugin import open_webdataset
from mimo_dataset_webdataset._tar import BLOCK

Samples = list[tuple[str, dict[str, bytes | Path]]]


def tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes, with placeholders of three modalities."""
    byte = discover(TOKENIZERS).find("byte", "here")
    built: Tokenizer = byte.build(byte.config(), ["image", "audio", "sonar"])
    return built


def opened(folder: Path, samples: Samples, members: Mapping[str, str] | None = None, **settings: Any) -> RecordDataset:
    """Write samples as shards of two each, and open them."""
    write_shards(samples, folder / "shards", max_samples=2)
    config = WebdatasetConfig(path=str(folder / "shards"), members=members or {}, **settings)
    dataset = open_webdataset(config, tokenizer(), "train")
    assert dataset is not None
    return dataset


def picture(width: int, height: int = 3) -> bytes:
    """Return a grey image as PNG."""
    file = io.BytesIO()
    Image.new("L", (width, height), width).save(file, "PNG")
    return file.getvalue()


def text_of(dataset: RecordDataset, sample: int) -> str:
    """Return what a sample's tokens say."""
    return tokenizer().decode(dataset.tokens(sample))


def record(value: Any) -> bytes:
    """Return JSON."""
    return json.dumps(value).encode()


RECORDS: list[tuple[dict[str, Any], dict[str, bytes]]] = [
    (
        {"images": ["left.png", "right.png"], "text": "<image> ä <image>"},
        {"left.png": picture(4), "right.png": picture(5)},
    ),
    ({"text": "none", "weight": 0.5}, {}),
    ({"images": ["b.png", "a.png"], "text": "<image><image>"}, {"a.png": picture(6), "b.png": picture(7)}),
    ({"audio": ["wav"], "items": {"sonar": ["bin"]}, "text": "<audio><sonar>"}, {"wav": b"RIFF", "bin": b"ping"}),
    (
        {
            "messages": [{"role": "user", "content": "<image> what?"}, {"role": "assistant", "content": "a dot"}],
            "images": ["png"],
        },
        {"png": picture(8)},
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "path": "b.png"}, {"type": "text", "text": "and"}]},
                {"role": "assistant", "content": "yes"},
            ]
        },
        {"a.png": picture(8), "b.png": picture(9)},
    ),
]  # fmt: skip


def _in_folder(number: int, name: re.Match[str]) -> str:
    return f'"{number}/{name[0][1:]}'


def test_dataset_webdataset_samples_equal_those_of_jsonl(tmp_path: Path) -> None:
    """Tokens, weights, turns' ends, sizes, pixels and bytes are those of the same records in a jsonl file."""
    samples: Samples = []
    lines = []
    for number, (value, members) in enumerate(RECORDS):
        samples.append((f"sub/{number}", {"json": record(value), **members}))
        (tmp_path / str(number)).mkdir()
        for name, content in members.items():
            (tmp_path / str(number) / name).write_bytes(content)
        names = "|".join(re.escape(record(name).decode()) for name in members) or "(?!)"
        lines.append(re.sub(names, partial(_in_folder, number), json.dumps(value)))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    chat = ChatSettings(template="chatml")
    dataset = opened(tmp_path, samples, chat=chat)
    jsonl = discover(DATASETS).find("jsonl", "here")
    same = jsonl.open(jsonl.config(path=str(tmp_path / "train.jsonl"), chat=chat), tokenizer(), "train")
    assert same is not None
    assert len(dataset) == len(same) == len(RECORDS)
    for sample in range(len(same)):
        assert dataset.tokens(sample) == same.tokens(sample)
        assert weights_of(dataset, sample) == weights_of(same, sample)
        assert ends_of(dataset, sample) == ends_of(same, sample)
        assert dataset.infos(sample) == same.infos(sample)
        for index, info in enumerate(same.infos(sample)):
            here: Any = dataset.raw(sample, index)
            there: Any = same.raw(sample, index)
            if info.modality == "image":
                assert (here.mode, here.size, here.tobytes()) == (there.mode, there.size, there.tobytes())
            else:
                assert here == there.read_bytes()
    assert dataset.where(3) == "train-000001.tar:sub/3"


def test_dataset_webdataset_captions_have_their_items_before_them(tmp_path: Path) -> None:
    """All known members are items in order of extensions, placeholders are added where there are none, and lay out."""
    samples: Samples = [
        ("a", {"txt": b" a caption\n", "png": picture(4)}),
        ("b", {"txt": b"see <image>, hear", "png": picture(4), "wav": b"RIFF"}),
        ("c", {"txt": b"two", "b.png": picture(5), "a.png": picture(6), "cls": b"3"}),
        ("d", {"txt": b"alone"}),
    ]
    dataset = opened(tmp_path, samples)
    assert [text_of(dataset, sample) for sample in range(4)] == [
        "<image> a caption",
        "<audio> see <image>, hear",
        "<image> <image> two",
        "alone",
    ]
    assert [info.size for info in dataset.infos(2)] == [(3, 6), (3, 5)]
    layout = lay_out(dataset, 2, tokenizer=tokenizer(), rows={"image": lambda size: size[1]}, max_tokens=64)
    assert [item.info.size for item in layout.items] == [(3, 6), (3, 5)]


def test_dataset_webdataset_records_have_all_members_that_they_do_not_name(tmp_path: Path) -> None:
    """Of a modality without a list all members are items; an empty list has none; a .txt gives a record its text."""
    samples: Samples = [
        ("a", {"json": record({"text": "<image><image>"}), "b.png": picture(5), "a.png": picture(6)}),
        ("b", {"json": record({"text": "-", "images": []}), "png": picture(5)}),
        ("c", {"json": record({"weight": 2}), "txt": b"a", "png": picture(5)}),
        ("d", {"json": record({"messages": [{"role": "user", "content": "<image>"}]}), "png": picture(7)}),
        ("e", {"json": record({"text": "<image>", "images": ["e.PNG"]}), "png": picture(9)}),
    ]
    dataset = opened(tmp_path, samples, chat=ChatSettings(template="chatml"))
    assert [[info.size for info in dataset.infos(sample)] for sample in range(5)] == [
        [(3, 6), (3, 5)],
        [],
        [(3, 5)],
        [(3, 7)],
        [(3, 9)],
    ]
    assert weights_of(dataset, 2) == [2.0] * len(dataset.tokens(2))


def test_dataset_webdataset_records_say_the_roles_of_members(tmp_path: Path) -> None:
    """Of those that they name and of those that they don't, beside a text and beside messages."""
    roles = {"roles": {"image": ["input", "output"]}}
    turns = {"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "<image>"}]}
    members = {"a.png": picture(5), "b.png": picture(6)}
    samples: Samples = [
        ("a", {"json": record({"text": "<image><image>", "images": ["b.png", "a.png"], **roles}), **members}),
        ("b", {"json": record({"text": "<image><image>", **roles}), **members}),
        ("c", {"json": record({**turns, **roles}), **members}),
        ("d", {"json": record({**turns, "roles": {"image": ["output"]}}), **members}),
    ]
    dataset = opened(tmp_path, samples, chat=ChatSettings(template="chatml"))
    assert [[(info.size, info.role) for info in dataset.infos(sample)] for sample in range(3)] == [
        [((3, 6), "input"), ((3, 5), "output")],
        [((3, 5), "input"), ((3, 6), "output")],
        [((3, 5), "input"), ((3, 6), "output")],
    ]
    with pytest.raises(
        DataError, match=r"d\.roles\.image: expected as many roles as .* of modality 'image', 2, got \["
    ):
        dataset.infos(3)


def test_dataset_webdataset_reads_conversations_in_the_form_of_llava(tmp_path: Path) -> None:
    """With the sample's picture, they are what the same ones with messages are."""
    turns = [{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": "A dot."}]
    roles = [{"role": "user", "content": "<image> What?"}, {"role": "assistant", "content": "A dot."}]
    records: list[Any] = [{"id": "7", "image": "png", "conversations": turns}, {"conversations": turns}]
    records.append({"messages": roles})
    samples: Samples = [
        (str(number), {"json": json.dumps(record).encode(), "png": picture(8, 8)})
        for number, record in enumerate(records)
    ]
    dataset = opened(tmp_path, samples, chat=ChatSettings(template="chatml"))
    assert dataset.tokens(0) == dataset.tokens(1) == dataset.tokens(2)
    assert [len(dataset.infos(sample)) for sample in range(3)] == [1, 1, 1]


def test_dataset_webdataset_members_are_what_settings_say(tmp_path: Path) -> None:
    """An extension may be another modality's, the text, or nothing; it is looked up whole before its last part."""
    samples: Samples = [
        (
            "a",
            {
                "en.txt": b"one",
                "de.txt": b"eins",
                "bin": b"ping",
                "seg.png": b"no",
                "json": b"notes",
                "png": picture(4),
            },
        )
    ]
    members = {"de.txt": "ignore", "bin": "sonar", "seg.png": "ignore", "json": "ignore"}
    dataset = opened(tmp_path, samples, members)
    assert text_of(dataset, 0) == "<sonar> <image> one"
    assert [(info.modality, info.size) for info in dataset.infos(0)] == [("image", (3, 4)), ("sonar", ())]
    assert dataset.raw(0, 1) == b"ping"


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"png": b"x"}, r"train-000000\.tar:k: expected a member \.json or \.txt, got \.png\. data\.members names"),
        ({"a.txt": b"a", "b.txt": b"b"}, r"expected one member of kind 'text', got \.a\.txt, \.b\.txt\. Leave one"),
        ({"txt": b"a", "json": record({"text": "b"})}, r"expected one member with what is written, got \.json"),
        ({"json": b"{"}, r"tar:k: expected one JSON object, got text that is not JSON"),
        ({"json": b"[]"}, r"tar:k: expected one JSON object in \.json, got a list \[\]"),
        ({"json": record({"url": "x"})}, r"tar:k: .* in \.json, got 'url'\. Remove it\."),
        ({"json": record({"text": "a", "weight": -1})}, r"a number from 0 .* in 'weight' in \.json"),
        ({"txt": b"\xff"}, r"tar:k: expected UTF-8 text in \.txt, got something else"),
        ({"txt": b" \n"}, r"tar:k: expected text in 'text', got none"),
    ],
)  # fmt: skip
def test_dataset_webdataset_refuses_samples(tmp_path: Path, members: dict[str, bytes | Path], says: str) -> None:
    """A sample that is none is refused by shard and key."""
    with pytest.raises(DataError, match=says):
        opened(tmp_path, [("k", members)]).tokens(0)


@pytest.mark.parametrize("reference", ["b.png", "../a.png", "/etc/passwd", "other.png", "k.b.png", ""])
def test_dataset_webdataset_items_are_members_of_the_sample(tmp_path: Path, reference: str) -> None:
    """What a record names is a member of the same sample: no file, and no member of another one."""
    samples: Samples = [
        ("k", {"json": record({"text": "<image>", "images": [reference]}), "a.png": picture(4)}),
        ("other", {"png": picture(4), "txt": b"a"}),
    ]
    with pytest.raises(DataError, match=r"tar:k: expected .*(no such member|paths in 'images')"):
        opened(tmp_path, samples).infos(0)


def test_dataset_webdataset_broken_items_are_refused_by_shard_and_key(tmp_path: Path) -> None:
    """A member that is no picture is found when its size is wanted, and damaged pixels when they are."""
    whole = picture(40, 40)
    dataset = opened(tmp_path, [("a", {"txt": b"a", "png": b"none"}), ("b", {"txt": b"b", "png": whole[:-30]})])
    with pytest.raises(
        DataError, match=r"train-000000\.tar:a: expected an item that can be read, got 'png': it is no image"
    ):
        dataset.infos(0)
    assert dataset.infos(1)[0].size == (40, 40)
    with pytest.raises(DataError, match=r"train-000000\.tar:b: expected an item that can be read"):
        dataset.raw(1, 0)


def test_dataset_webdataset_tries_again_where_the_file_system_fails(tmp_path: Path) -> None:
    """A member is read at the third attempt; without success at the fourth the run ends, by no fault of the sample."""
    dataset = opened(tmp_path, [("k0", {"txt": b"a"}), ("k1", {"txt": b"b"})])
    with failing_files(tmp_path, 2) as waits:
        assert text_of(dataset, 0) == "a"
    assert waits == [0.1, 0.5]
    expected = r"train-000000\.tar:k1: expected a file system that can be read, got \[Errno 5\] Input/output error"
    with failing_files(tmp_path, 99) as waits, pytest.raises(RunError, match=expected):
        dataset.tokens(1)
    assert waits == [0.1, 0.5, 2.0]


def test_dataset_webdataset_never_reads_what_may_run(tmp_path: Path) -> None:
    """Members that decoders run are left out, can't be given a meaning, and can't be named by a record."""
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name, content in {
            "k.json": record({"text": "<sonar>", "items": {"sonar": ["x.pkl"]}}),
            "k.x.pkl": b"cos\nsystem\n(S'touch ran'\ntR.",
            "l.txt": b"plain",
            "l.pickle": b"x",
            "l.npy": b"x",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    dataset = open_webdataset(WebdatasetConfig(path=str(tmp_path / "a.tar")), tokenizer(), "train")
    assert dataset is not None
    with pytest.raises(
        DataError, match=r"a\.tar:k: .*'x\.pkl': members \.x\.pkl are never read, as decoding one may run"
    ):
        dataset.raw(0, 0)
    assert (text_of(dataset, 1), dataset.infos(1)) == ("plain", [])
    for extension in ("pkl", "pth", "x.npy", "pt", "pickle"):
        with pytest.raises(ConfigError, match=r"data\.members: expected extensions .* without running"):
            WebdatasetConfig(path="a", members={extension: "sonar"})


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({".png": "image"}, r"data\.members: expected extensions in small letters, such as \"seg\.png\", got '\.png'"),
        ({"PNG": "image"}, r"expected extensions in small letters"),
        ({"png": "<image>"}, r"data\.members\.png: expected \"text\", \"json\", \"ignore\", or a modality"),
    ],
)
def test_dataset_webdataset_refuses_members_settings(members: Mapping[str, str], says: str) -> None:
    """Extensions and kinds that can't be are refused by text."""
    with pytest.raises(ConfigError, match=says):
        WebdatasetConfig(path="a", members=members)


def test_dataset_webdataset_has_splits(tmp_path: Path) -> None:
    """Evaluation samples come from their own shards, and there are none without."""
    write_shards([("a", {"txt": b"held out"})], tmp_path / "held")
    config = WebdatasetConfig(path="missing", evaluation_path=str(tmp_path / "held"))
    dataset = open_webdataset(config, tokenizer(), "evaluation")
    assert dataset is not None
    assert text_of(dataset, 0) == "held out"
    assert open_webdataset(WebdatasetConfig(path="missing"), tokenizer(), "evaluation") is None


def test_dataset_webdataset_knows_the_samples_of_each_shard(tmp_path: Path) -> None:
    """The number of samples of each shard is there for an order that reads one after the other."""
    dataset = opened(tmp_path, [(str(number), {"txt": b"a"}) for number in range(5)])
    assert list(dataset._records.shards) == [2, 2, 1]
    assert [dataset.where(sample) for sample in (1, 2, 4)] == [
        "train-000000.tar:1",
        "train-000001.tar:2",
        "train-000002.tar:4",
    ]


def test_dataset_webdataset_is_found_by_its_name() -> None:
    """The installed distribution offers the dataset, with its index and how it is built."""
    spec = discover(DATASETS).find("webdataset", "here")
    assert spec.index is not None
    assert spec.build is write_shards


def test_dataset_webdataset_readme_example_runs(tmp_path: Path) -> None:
    """The README's example runs as it stands and prints what it says."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    promised = "".join(f"{line}\n" for line in re.findall(r"^print.*  # (.*)$", example, flags=re.MULTILINE))
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False, cwd=tmp_path)  # noqa: S603 - own text
    assert (done.stderr, done.stdout) == ("", promised)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_dataset_webdataset_damage_anywhere_gives_other_samples_or_errors_with_their_place(data: st.DataObject) -> None:
    """Bytes and headers changed, parts cut out, doubled or of zeros: nothing else ends a run, and nothing hangs."""
    with TemporaryDirectory() as name:
        samples = ((str(key), {"json": record(value), **items}) for key, (value, items) in enumerate(RECORDS[:4]))
        (shard,) = write_shards(samples, Path(name))
        content = bytearray(shard.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
            part = content[first:last]
            how = data.draw(st.sampled_from(["change", "cut", "double", "zeros", "header"]))
            if how == "change":
                content[first : first + 8] = data.draw(st.binary(min_size=8, max_size=8))
            elif how == "header":  # of a member, with a sum that is right
                at = first // BLOCK * BLOCK
                content[at + 100 : at + 157] = data.draw(st.binary(min_size=57, max_size=57))
                content[at + 148 : at + 156] = b" " * 8
                content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + BLOCK])
            else:
                instead = {"cut": b"", "double": bytes(part + part), "zeros": bytes(len(part))}[how]
                content = content[:first] + instead + content[last:]
        shard.write_bytes(content)
        try:
            dataset = open_webdataset(WebdatasetConfig(path=name), tokenizer(), "train")
            said = _errors_of(dataset)
        except UserError as error:
            said = [str(error)]
    assert all(shard.name in text or name in text for text in said)


def _errors_of(dataset: RecordDataset | None) -> list[str]:
    """Read all of a dataset and return what it says of samples; a picture's own errors are named by the trainer."""
    assert dataset is not None
    found = []
    for sample in range(len(dataset)):
        try:
            dataset.tokens(sample)
            for index in range(len(dataset.infos(sample))):
                with contextlib.suppress(ValueError, OSError):
                    dataset.raw(sample, index)
        except UserError as error:
            found.append(str(error))
    return found
