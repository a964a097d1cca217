"""Settings that a module's plugin or config does not allow, by the text of their errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import attrs
import pytest

from mimo.hooks import ConfigError
from mimo.model import (
    DECODER,
    DecoderConfig,
    EncoderSpec,
    EncoderStages,
    ExpertSupport,
    Stage,
    TensorSupport,
    check_module,
    check_training,
    stage_trains,
)
from mimo.topology import Grid

CONFIG = DecoderConfig(vocabulary=7, hidden=12, layers=2, heads=6, intermediate=6)
PLAIN = EncoderSpec(
    name="plain",
    config=DecoderConfig,
    measure=lambda raw: (1,),
    rows=lambda config, size: 1,
    prepare=lambda config, raw: {},
    build=lambda config, hidden: None,  # type: ignore[arg-type,return-value]  # never built
)
STAGED = attrs.evolve(
    PLAIN,
    parts={"encoder": ("layers",), "projector": ("projector",)},
    stages=EncoderStages(
        layers=lambda config: config.layers,
        message_rows=lambda config, size: 1,
        width=lambda config: config.hidden,
        cut=lambda module, stage: module,
        parts=lambda config, stage: frozenset({"encoder", "projector"} if stage.is_last else {"encoder"}),
    ),
)


def _nothing(_module: Any, _axis: Any) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (DECODER, {"tp": 4}, r"modules\.m\.tp: expected a divisor of heads = 6, got 4\. Set it to 1, 2, 3 or 6\."),
        (DECODER, {"pp": 3}, r"modules\.m\.pp: expected at most its layers = 2, got 3\. Set it to 2 or less"),
        (PLAIN, {"tp": 2}, r"modules\.m\.tp: expected 1, since encoder 'plain' has no tensor plan, got 2"),
        (PLAIN, {"pp": 2}, r"modules\.m\.pp: expected 1, since encoder 'plain' has no pipeline stages, got 2"),
        (STAGED, {"pp": 3}, r"modules\.m\.pp: expected at most its layers = 2, got 3"),
    ],
)
def test_refused_grids(spec: Any, sizes: dict[str, int], message: str) -> None:
    """A grid over which the module can't be split is refused with the setting and what would do."""
    (size,) = sizes.values()
    with pytest.raises(ConfigError, match=message):
        check_module(spec, CONFIG, grid=Grid(name="m", ranks=range(size), **sizes))


WITH_EXPERTS = attrs.evolve(DECODER, experts=ExpertSupport(count=lambda config: config.heads, plan=lambda _m, _a: {}))
WITHOUT = attrs.evolve(
    DECODER, context=None, experts=None, tensor=TensorSupport(divisible=lambda _c: {}, plan=_nothing)
)


@pytest.mark.parametrize(
    ("spec", "sizes", "ranks", "message"),
    [
        (
            WITHOUT,
            {"cp": 2},
            2,
            r"modules\.m\.cp: expected 1, since language model 'decoder' has no context paral.* got 2",
        ),
        (
            PLAIN,
            {"cp": 2},
            2,
            r"modules\.m\.cp: expected 1, since encoder 'plain' has no context .*, got 2\. Leave cp out",
        ),
        (
            WITHOUT,
            {"ep": 2},
            2,
            r"modules\.m\.ep: expected 1, since language model 'decoder' has no experts, got 2\. Leave",
        ),
        (PLAIN, {"ep": 2}, 2, r"modules\.m\.ep: expected 1, since encoder 'plain' has no experts, got 2"),
        (
            PLAIN,
            {"etp": 2},
            2,
            r"modules\.m\.etp: expected 1, since encoder 'plain' has no experts, got 2\. Leave etp out",
        ),
        (
            WITH_EXPERTS,
            {"ep": 4},
            8,
            r"modules\.m\.ep: expected a divisor of experts = 6, got 4\. Set it to 1, 2, 3 or 6\.",
        ),
    ],
)
def test_axes_that_a_module_lacks_are_refused(spec: Any, sizes: dict[str, int], ranks: int, message: str) -> None:
    """Context and expert ranks of a module that has neither, and experts that cannot be spread evenly."""
    grid = Grid(name="m", ranks=range(ranks), dp=ranks // sizes.get("cp", 1), **sizes)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_module(spec, CONFIG, grid=grid)


@pytest.mark.parametrize("spec", [PLAIN, WITHOUT])
def test_rows_that_a_module_does_not_split_are_refused(spec: Any) -> None:
    """Sequence parallelism needs a module that knows of it, on one tensor rank too."""
    text = (
        r"^modules\.m\.sequence_parallel: expected false, since .* does not split its rows .*, got true\. Leave it out"
    )
    with pytest.raises(ConfigError, match=text):
        check_module(spec, CONFIG, grid=Grid(name="m", ranks=(0,)), sequence_parallel=True)


def test_accepted_experts() -> None:
    """Divisors of their number, over any ranks of a stage, and any split of each of them that the ranks allow."""
    for sizes in ({"ep": 3}, {"ep": 6}, {"ep": 2, "etp": 3}, {"etp": 6}):
        check_module(WITH_EXPERTS, CONFIG, grid=Grid(name="m", ranks=range(6), dp=6, **sizes))


def test_accepted_grids() -> None:
    """Divisors of the heads, as many stages as layers, and any number of lanes."""
    for sizes in ({"tp": 3}, {"tp": 6}, {"pp": 2}, {"dp": 5}):
        (size,) = sizes.values()
        check_module(DECODER, CONFIG, grid=Grid(name="m", ranks=range(size), **sizes))


@pytest.mark.parametrize(
    ("spec", "pp", "layers", "chunks", "message"),
    [
        (
            DECODER, 2, 12, 4,
            (
                r"modules\.m\.chunks: expected a number of which pp x chunks = 2 x 4 divides its layers = 12, got 4\. "
                r"Set it to 1, 2, 3 or 6, or give the model 16 layers\."
            ),
        ),
        (DECODER, 3, 8, 2, r"modules\.m\.chunks: .* got 2\. Set it to 1, or give the model 12 layers\."),
        (DECODER, 2, 2, 2, r"modules\.m\.chunks: .* = 2 x 2 div.* its layers = 2, got 2\. Set it to 1, or .* 4 layers"),
        (DECODER, 1, 2, 2, r"modules\.m\.chunks: expected 1, since one pipeline rank .*, got 2\. Leave chunks out, or"),
        (STAGED, 2, 6, 2, r"modules\.m\.chunks: .* divides its layers = 6, got 2\. Set it to 1 or 3, or .* 8 layers"),
        (PLAIN, 2, 4, 2, r"modules\.m\.pp: expected 1, since encoder 'plain' has no pipeline stages, got 2"),
        (PLAIN, 1, 4, 2, r"modules\.m\.chunks: expected 1, "),
    ],
)  # fmt: skip
def test_refused_chunks(spec: Any, pp: int, layers: int, chunks: int, message: str) -> None:
    """Chunks need a pipeline, and stages of equally many layers; the text says which numbers would do."""
    config, grid = attrs.evolve(CONFIG, layers=layers), Grid(name="m", ranks=range(pp), pp=pp)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_module(spec, config, grid=grid, chunks=chunks)


def test_accepted_chunks() -> None:
    """Any number with which stages have equally many layers; with one chunk they need not."""
    grid = Grid(name="m", ranks=range(2), pp=2)
    for layers, chunks in ((4, 2), (12, 3), (12, 6), (5, 1)):
        check_module(DECODER, attrs.evolve(CONFIG, layers=layers), grid=grid, chunks=chunks)


def test_unknown_parts_to_freeze() -> None:
    """What is neither a part that the spec names nor a pattern of its parameters is refused with those."""
    message = (
        r"modules\.m\.frozen: expected parts of language model 'decoder' \('embedding', 'layers', 'head'.*\), or "
        r"patterns of the paths of parameters inside it, got 'lm', which matches none\. The closest are "
    )
    with pytest.raises(ConfigError, match=message):
        check_training(DECODER, CONFIG, name="m", hidden=8, frozen=frozenset({"lm"}))


def test_parts_that_a_config_leaves_out_are_not_frozen() -> None:
    """Nothing would be: it is refused with the parts that there are."""
    frozen = frozenset({"next_tokens", "head"})
    message = (
        r"^modules\.m\.frozen: expected parts that it has with this config \('embedding', 'head', 'layers'\), or "
        r"patterns, got 'next_tokens'\. Leave it out\.$"
    )
    with pytest.raises(ConfigError, match=message):
        check_training(DECODER, CONFIG, name="m", hidden=8, frozen=frozen)
    check_training(DECODER, attrs.evolve(CONFIG, next_tokens=1), name="m", hidden=8, frozen=frozen)


def test_which_stages_train() -> None:
    """A stage trains unless all parts that it holds are frozen."""
    encoder = frozenset({"encoder"})
    assert not stage_trains(STAGED, CONFIG, stage=Stage(0, 2), frozen=encoder)
    assert stage_trains(STAGED, CONFIG, stage=Stage(1, 2), frozen=encoder)
    assert stage_trains(STAGED, CONFIG, stage=Stage(), frozen=encoder)
    assert not stage_trains(PLAIN, CONFIG, stage=Stage(), frozen=True)
    assert stage_trains(PLAIN, CONFIG, stage=Stage(), frozen=frozenset())
    tied = attrs.evolve(CONFIG, tied=True)
    but_embedding = frozenset({"layers", "head"})
    assert stage_trains(DECODER, tied, stage=Stage(1, 2), frozen=but_embedding)
    assert not stage_trains(DECODER, CONFIG, stage=Stage(1, 2), frozen=but_embedding)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocabulary": -1}, r"modules\.language\.config\.vocabulary: expected 0 or more, got -1"),
        ({"hidden": 0}, r"modules\.language\.config\.hidden: expected 1 or more, got 0"),
        ({"layers": 0}, r"modules\.language\.config\.layers: expected 1 or more, got 0"),
        ({"heads": 0}, r"modules\.language\.config\.heads: expected 1 or more, got 0"),
        ({"intermediate": 0}, r"modules\.language\.config\.intermediate: expected 1 or more, got 0"),
        ({"kv_heads": 4}, r"modules\.language\.config\.kv_heads: expected a divisor of heads = 6, got 4"),
        (
            {"hidden": 13},
            r"modules\.language\.config\.hidden: expected a multiple of heads = 6, or head_dim set, got 13",
        ),
        (
            {"head_dim": 3},
            r"modules\.language\.config\.head_dim: expected heads of an even width.*got 3, so a width of 3",
        ),
        (
            {"hidden": 18},
            r"modules\.language\.config\.hidden: expected heads of an even width.*got 18, so a width of 3",
        ),
        ({"rope_theta": 0.0}, r"modules\.language\.config\.rope_theta: expected a finite number above 0, got 0\.0"),
        ({"norm_eps": float("nan")}, r"modules\.language\.config\.norm_eps: expected a finite number above 0, got nan"),
        (
            {"rope_theta": float("inf")},
            r"modules\.language\.config\.rope_theta: expected a finite number above 0, got inf",
        ),
        ({"sliding_window": -1}, r"modules\.language\.config\.sliding_window: expected 0 or more, got -1"),
        (
            {"attention_bias": True, "qkv_bias": True},
            r"modules\.language\.config\.qkv_bias: expected false beside attention_bias, .*got true\. Leave one of the",
        ),
        (
            {"rope_factor": 8.0},
            r"modules\.language\.config\.rope_factor: expected 1\.0, since rope_scaling is 'none', got 8\.0\. Leave it",
        ),
        (
            {"rope_scaling": "linear", "rope_factor": 2.0, "rope_original_tokens": 16},
            r"modules\.language\.config\.rope_original_tokens: expected 8192, since rope_scaling is 'linear', got 16",
        ),
        (
            {"rope_scaling": "llama3", "rope_high_factor": 1.0},
            r"modules\.language\.config\.rope_high_factor: expected more than rope_low_factor = 1\.0, got 1\.0",
        ),
        (
            {"mrope_section": (1, 1)},
            r"modules\.language\.config\.mrope_section: expected a number of turned pairs for each of time, down, a",
        ),
        ({"mrope_section": (1, 1, 1)}, r"mrope_section: expected .*, together the 1 of a head, got \[1, 1, 1\]"),
        ({"deepstack": 9}, r"config\.deepstack: expected at most layers = \d, got 9"),
        ({"mrope_interleaved": True}, r"mrope_interleaved: expected False, since mrope_section is empty, got True"),
        (
            {"head_dim": 12, "mrope_section": (1, 2, 3), "mrope_interleaved": True},
            r"mrope_section: expected at most 2 pairs down and 2 across, every third of the 6 .*, got \[1, 2, 3\]",
        ),
    ],
)
def test_refused_settings(values: dict[str, Any], message: str) -> None:
    """Each setting out of range is named by its full path."""
    with pytest.raises(ConfigError, match=message):
        attrs.evolve(CONFIG, **values)


def test_vocabulary_must_be_known_to_build() -> None:
    """0 means the tokenizer's number, which replaces it before the check."""
    with pytest.raises(ConfigError, match=r"modules\.language\.config\.vocabulary: expected a number of ids"):
        DECODER.build(DecoderConfig(), Stage())


def test_specs_are_free_of_torch() -> None:
    """Planning a layout reads specs and configs without importing torch."""
    code = "import sys, mimo.model, mimo.model.decoder.plugin; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own interpreter and text
