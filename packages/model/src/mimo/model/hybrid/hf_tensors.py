"""Where folders of Nemotron-H and Mamba-2 hold the tensors of a ``hybrid``.

Both have the same table. MTP modules lie in those of Nemotron-H under names of its own,
``mtp.layers.0`` and on, of which `transformers` reads none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from mimo.model.hybrid.config import ATTENTION, EXPERTS, MAMBA, MLP, HybridConfig
from mimo.model.spec import HfTensor


def hybrid_tensors(config: HybridConfig) -> list[HfTensor]:
    """Return the table of both families, without MTP modules."""
    found = [
        HfTensor(ours="embedding.weight", theirs="backbone.embeddings.weight"),
        HfTensor(ours="norm.weight", theirs="backbone.norm_f.weight"),
    ]
    if not config.tied:
        found.append(HfTensor(ours="head.weight", theirs="lm_head.weight"))
    for layer, letter in enumerate(config.pattern):
        found += _layer(config, letter, f"layers.{layer}", f"backbone.layers.{layer}")
    return found


def nemotron_tensors(config: HybridConfig) -> list[HfTensor]:
    """Return the table of Nemotron-H, with MTP modules: the layers of all, one after the other."""
    return [*hybrid_tensors(config), *(attrs.evolve(entry, optional=True) for entry in _further(config))]


def adaptable_linears(config: HybridConfig, *, root: str) -> list[HfTensor]:
    """Return where PEFT can put LoRA.

    It can't beside what a Mamba layer writes its outputs by, whose weight `transformers`' layer reads itself.

    Args:
        config: of the model.
        root: what the modules lie in.
    """
    found = []
    for entry in hybrid_tensors(config):
        if isinstance(entry.theirs, str) and not entry.theirs.endswith(".mixer.out_proj.weight"):
            _, below, path = entry.theirs.partition("backbone.")
            found.append(attrs.evolve(entry, theirs=f"{root}.{path}") if below else entry)
    return found


def _further(config: HybridConfig) -> Iterator[HfTensor]:
    count = len(config.next_pattern)
    for head in range(config.next_tokens):
        ours, first, last = f"next_tokens.{head}", head * count, (head + 1) * count - 1
        for one, other in {"token_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj"}.items():
            yield HfTensor(ours=f"{ours}.{one}.weight", theirs=f"mtp.layers.{first}.{other}.weight")
        for place, letter in enumerate(config.next_pattern):
            yield from _layer(config, letter, f"{ours}.layers.{place}", f"mtp.layers.{first + place}")
        yield HfTensor(ours=f"{ours}.norm.weight", theirs=f"mtp.layers.{last}.final_layernorm.weight")


def _layer(config: HybridConfig, letter: str, ours: str, theirs: str) -> Iterator[HfTensor]:
    yield HfTensor(ours=f"{ours}.norm.weight", theirs=f"{theirs}.norm.weight")
    makers = {MAMBA: _mamba, EXPERTS: _experts, ATTENTION: _attention, MLP: _mlp}
    yield from makers[letter](config, f"{ours}.mixer", f"{theirs}.mixer")


def _attention(config: HybridConfig, ours: str, theirs: str) -> Iterator[HfTensor]:
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    return _linears(names, ours, theirs, bias=config.attention_bias)


def _mlp(config: HybridConfig, ours: str, theirs: str) -> Iterator[HfTensor]:
    return _linears({"up": "up_proj", "down": "down_proj"}, ours, theirs, bias=config.mlp_bias)


def _linears(names: Mapping[str, str], ours: str, theirs: str, *, bias: bool) -> Iterator[HfTensor]:
    for one, other in names.items():
        for leaf in ("weight", "bias") if bias else ("weight",):
            yield HfTensor(ours=f"{ours}.{one}.{leaf}", theirs=f"{theirs}.{other}.{leaf}")


def _experts(config: HybridConfig, ours: str, theirs: str) -> Iterator[HfTensor]:
    yield HfTensor(ours=f"{ours}.router.weight", theirs=f"{theirs}.gate.weight")
    yield HfTensor(ours=f"{ours}.router.bias", theirs=f"{theirs}.gate.e_score_correction_bias")
    for part in ("up", "down"):
        each = tuple(f"{theirs}.experts.{one}.{part}_proj.weight" for one in range(config.experts))
        yield HfTensor(ours=f"{ours}.experts.{part}.weight", theirs=each)
    yield from _mlp(config, f"{ours}.shared", f"{theirs}.shared_experts")


def _mamba(config: HybridConfig, ours: str, theirs: str) -> Iterator[HfTensor]:
    width, shared, heads = config.mamba_width, config.mamba_groups * config.mamba_state, config.mamba_heads
    parts = {"gate": width, "input": width, "write": shared, "read": shared, "step": heads}
    leaves = ("weight", "bias") if config.mamba_bias else ("weight",)
    for leaf in leaves:
        for part, rows in _rows(parts):
            yield HfTensor(ours=f"{ours}.{part}.{leaf}", theirs=f"{theirs}.in_proj.{leaf}", rows=rows)
        yield HfTensor(ours=f"{ours}.output.{leaf}", theirs=f"{theirs}.out_proj.{leaf}")
    for part, (start, stop) in _rows({"input": width, "write": shared, "read": shared}):
        yield HfTensor(
            ours=f"{ours}.{part}_conv.weight",
            theirs=f"{theirs}.conv1d.weight",
            rows=(start, stop),
            shape=(stop - start, 1, config.mamba_taps),
        )
        if config.mamba_conv_bias:
            yield HfTensor(ours=f"{ours}.{part}_conv.bias", theirs=f"{theirs}.conv1d.bias", rows=(start, stop))
    for one, other in {"rate_log": "A_log", "step_bias": "dt_bias", "skip": "D", "norm.weight": "norm.weight"}.items():
        yield HfTensor(ours=f"{ours}.{one}", theirs=f"{theirs}.{other}")


def _rows(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    start = 0
    for name, size in sizes.items():
        yield name, (start, start + size)
        start += size
