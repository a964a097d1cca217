"""Parts of layers that mix rows by other means than attention: found, run on one sample after the other, or refused."""

from pathlib import Path

import attrs
import pytest
import torch
from small_models import small
from torch import Tensor, nn

from mimo.hooks import ConfigError, PluginError
from mimo.model import Stage, check_module
from mimo.model.runtime import ExpertAxis, LanguageBatch
from mimo.model.testing import LanguageLayout, assert_language_layouts, assert_language_model_conforms
from mimo.topology import Grid
from mimo_transformers import HF_DECODER, HfDecoderConfig
from mimo_transformers.family import quiet
from mimo_transformers.model.attention import PackedRows, hold_rows
from mimo_transformers.model.experts import BridgedExperts
from mimo_transformers.model.mixing import Mixing, mixing
from mimo_transformers.model.modules import BridgedLinear
from mimo_transformers.model.per_sample import PerSample, SavedStates, run_per_sample
from mimo_transformers.model.small import batch_of, described, draw_ids, stirred, trying
from mimo_transformers.model.stage import HfStage
from mimo_transformers.trial import packed, tensor

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
LISTED = README.partition("gives them:\n\n")[2].partition(" (transformers")[0].replace("\n", " ").split(", ")
LANES = ((7, 3, 5), (4, 6))


def conv_lfm2() -> HfDecoderConfig:
    """Return LFM2 with short convolutions in some layers, as it is published."""
    return small("lfm2", layer_types=["conv", "full_attention", "conv", "conv"])


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llama", set()),
        ("mixtral", set()),
        ("jamba", {"JambaMambaMixer"}),
        ("falcon_h1", {"FalconH1Mixer"}),
        ("qwen3_next", {"Qwen3NextGatedDeltaNet"}),
    ],
)
def test_what_mixes_rows_is_found_by_what_it_computes(model_type: str, names: set[str]) -> None:
    """No more than that runs on one sample after the other: neither attention, nor experts, nor whole layers."""
    found = mixing(described(small(model_type)))
    assert {part.__name__ for part in found.parts} == names
    assert set(found.parts.values()) == ({"cache_params"} if names else set())
    assert {name for _, name in found.weights} == ({"dt_proj"} if model_type == "jamba" else set())


def changes_elsewhere(config: HfDecoderConfig) -> float:
    """Return by how much rows of a model change after another sample was changed."""
    with trying():
        stage = HfStage(config, Stage())
        stage.read(stirred(config))
        samples = draw_ids(config)
        changed = [torch.where(samples[0] > 1, samples[0] - 1, 2), *samples[1:]]
        before, after = (stage(batch_of(ids), {}, None)[len(samples[0]) :] for ids in (samples, changed))
        return float((before - after).abs().max() / before.abs().max())


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mamba", "falcon_h1", "olmo_hybrid", "nemotron", "rwkv"])
def test_a_sample_changes_no_bit_of_another(model_type: str) -> None:
    """Whatever a layer does with rows."""
    assert changes_elsewhere(small(model_type)) == 0.0


@pytest.mark.parametrize("model_type", ["mixtral", "jamba", "qwen3_next", "granitemoehybrid"])
def test_a_sample_changes_another_by_rounding_alone_through_the_counts_of_experts(model_type: str) -> None:
    """How many rows an expert has decides on the order of its sums."""
    assert changes_elsewhere(small(model_type)) < 1e-6


@pytest.mark.soak
@pytest.mark.parametrize("model_type", LISTED)
def test_no_family_that_is_listed_mixes_samples(model_type: str) -> None:
    """To the bit, but for mixtures of experts."""
    with quiet():
        config = small(model_type)
        assert changes_elsewhere(config) <= (1e-6 if config.experts else 0.0)


@pytest.mark.newest
def test_layouts_compute_what_the_whole_does() -> None:
    """Stages, tensor ranks and an empty lane, of layers with a scan beside attention."""
    layouts = [
        LanguageLayout(pp=2, lanes=(*LANES[:1], ())),
        LanguageLayout(tp=2, lanes=LANES[:1]),
    ]
    assert_language_layouts(HF_DECODER, layouts, config=small("falcon_h1"))


@pytest.mark.newest
@pytest.mark.soak
@pytest.mark.parametrize("model_type", ["jamba", "qwen3_next", "nemotron_h", "mamba2", "granitemoehybrid", "minimax"])
def test_layouts_of_more_families_compute_what_the_whole_does(model_type: str) -> None:
    """Stages, lanes, tensor and expert ranks."""
    config = small(model_type)
    layouts = [LanguageLayout(tp=2, pp=2, lanes=LANES), LanguageLayout(lanes=(*LANES, ()))]
    if config.experts:
        layouts.append(LanguageLayout(pp=2, ep=2, lanes=(LANES[0], ())))
    assert_language_layouts(HF_DECODER, layouts, config=config)


@pytest.mark.parametrize("model_type", ["mamba", pytest.param("falcon_h1", marks=pytest.mark.soak)])
def test_it_keeps_the_promises_of_a_language_model(model_type: str) -> None:
    """Caches and empty microbatches, initial values, and rows of one number type, whatever it sums up in."""
    checks = ["empty", "initial values", "decode cache", "number types"]
    assert_language_model_conforms(HF_DECODER, config=small(model_type), checks=checks)


CONTINUED = (
    *("bamba", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm3", "mamba2", "nemotron_h"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)


@pytest.mark.soak
@pytest.mark.parametrize("model_type", [*CONTINUED, "olmo_hybrid", "rwkv"])
def test_samples_are_continued_in_any_pieces(model_type: str) -> None:
    """Alone, beside others, and where one has ended; MiniMax can't be tried on decays that don't fit each other."""
    assert_language_model_conforms(HF_DECODER, config=small(model_type), checks=["decode cache"])


@pytest.mark.parametrize(
    ("model_type", "rows"),
    [
        ("minimax", 1),
        ("rwkv", 8),
        *(pytest.param(one, 1, marks=pytest.mark.soak) for one in CONTINUED),
        pytest.param("olmo_hybrid", 1, marks=[pytest.mark.soak, pytest.mark.newest]),  # older ones save otherwise
    ],
)
def test_a_further_row_runs_alone_through_what_mixes_rows(model_type: str, rows: int) -> None:
    """But where such a part can't be given its states: that runs on all rows again."""
    with trying():
        stage, given = HfStage(small(model_type), Stage()).eval(), list[int]()
        stage.read(stirred(small(model_type)))
    mixers = [part for part in stage.modules() if isinstance(part, PerSample)]
    for linear in (one for part in mixers for one in part.modules() if isinstance(one, BridgedLinear)):
        linear.register_forward_pre_hook(lambda _linear, inputs: given.append(inputs[0].shape[1]))
    ids, cache = torch.arange(2, 10), stage.new_decode_cache()
    with torch.no_grad():
        for span in (slice(0, 7), slice(7, 8)):
            given.clear()
            new, positions = ids[span], torch.arange(8)[span]
            batch = LanguageBatch.of(new, new, positions, lengths=(len(new),))
            found = stage(attrs.evolve(batch, decode_cache=cache), {}, None)
        assert set(given) == {rows}
        whole = stage(batch_of([ids]), {}, None)
    assert float((found - whole[-1:]).norm()) <= 1e-5 * float(whole[-1:].norm())


def test_a_part_whose_states_do_not_continue_it_runs_on_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by what it returns: here a scan begins anew at each row."""
    monkeypatch.setattr(SavedStates, "get_recurrent_state", lambda _states, _layer, state_idx=0: None)
    found = mixing.__wrapped__(described(small("mamba")))
    assert {part.__name__: takes for part, takes in found.parts.items()} == {"MambaMixer": ""}


def test_short_convolutions_run_on_each_sample() -> None:
    """Also where the library's own default has none."""
    config = conv_lfm2()
    HF_DECODER.build(config, Stage())
    found = mixing(described(config)).parts
    assert {part.__name__: takes for part, takes in found.items()} == {"Lfm2ShortConv": "past_key_values"}
    assert_language_model_conforms(HF_DECODER, config=config, checks=["decode cache"])
    assert changes_elsewhere(config) == 0.0


def test_what_runs_on_from_sample_to_sample_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial finds it by itself, whatever was found before."""
    monkeypatch.setattr("mimo_transformers.model.stage.mixing", lambda _description: Mixing())
    monkeypatch.setenv("MIMO_TRIALS", "0")
    problem = packed._problem.__wrapped__(described(small("mamba")))
    assert "logits on packed rows of a small one differ by" in problem


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("bloom", "logits on packed rows of a small one differ by"),
        ("zamba2", "logits in 2 pipeline stages of a small one differ by"),
    ],
)
def test_a_family_that_still_mixes_samples_is_refused(model_type: str, text: str) -> None:
    """As one whose attention has masks of its own, or whose layers read the embedded rows once more."""
    with pytest.raises(ConfigError, match=rf"modules\.language\.config\.model_type: .*{text}"):
        HF_DECODER.build(small(model_type), Stage())


def test_context_ranks_are_refused_by_their_key() -> None:
    """A scan needs all rows of a sample; attention doesn't."""
    grid = Grid(name="words", ranks=range(2), cp=2)
    expected = r"modules\.words\.cp: expected 1, since .* got more for 'mamba' with MambaMixer"
    with pytest.raises(ConfigError, match=expected):
        check_module(HF_DECODER, small("mamba"), grid=grid)
    check_module(HF_DECODER, small("llama"), grid=grid)


class _Sums(nn.Module):
    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums over earlier rows, and what isn't of rows."""
        return x.cumsum(1), x.sum()


def test_what_runs_on_one_sample_takes_rows_alone() -> None:
    """Rows of padding are apart; what isn't of rows isn't taken, and is None where it is returned."""
    part = _Sums()
    run_per_sample(part)
    batch = batch_of([torch.arange(1, 4), torch.arange(1, 3)])
    rows = PackedRows.of(batch)
    with hold_rows(part, rows):
        sums, other = part(torch.ones(1, 5, 2))
        assert sums[0, :, 0].tolist() == [1, 2, 3, 1, 2]
        assert other is None
        with pytest.raises(PluginError, match=r"tensors of rows .* got one of the shape \(7,\) for 5 rows, from _Sums"):
            part(torch.ones(1, 5, 2), torch.ones(7))


def test_experts_in_what_runs_on_one_sample_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with unequally many samples would send their rows unequally often."""
    stage = HfStage(small("mixtral"), Stage())
    for part in list(stage.layers.modules()):
        if any(isinstance(child, BridgedExperts) for child in part.children()):
            run_per_sample(part)
    monkeypatch.setattr(tensor, "HfStage", lambda _config, _stage: stage)
    monkeypatch.setattr(tensor, "_has_known_experts", tensor._has_known_experts.__wrapped__)
    with pytest.raises(ConfigError, match=r"language\.ep: expected 1, since the experts .* got 2 and 'mixtral'"):
        tensor.expert_splits(stage, ExpertAxis(ep=2))
