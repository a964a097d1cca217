"""How the layers of a model of the library lie over tensor ranks: its config's own plan, read as data.

A plan says by a module's path in which style it is cut. What the library does with a style is done here on local
tensors, by `TensorAxis`. Where it has no plan, linears of the usual names get one. Whether a plan is right is tried
(`tensor.py`), and so is found which copied parameters have a part of their gradient on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from mimo.hooks import ConfigError
from mimo.model.runtime import ExpertAxis, LanguageStage, Split, TensorAxis
from mimo_transformers.model.attention import set_heads
from mimo_transformers.model.experts import BridgedExperts
from mimo_transformers.model.modules import BridgedLinear, Way
from mimo_transformers.model.per_sample import PerSample
from mimo_transformers.model.small import general

_ROWS, _COLUMNS = 0, 1
_USUAL: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "query_key_value"), "colwise"),
    **dict.fromkeys(("query", "key", "value", "intermediate.dense", "lin1", "pwconv1", "pointwise_conv1"), "colwise"),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "linear_fc1", "c_fc", "dense_h_to_4h", "w1", "w3"), "colwise"),
    **dict.fromkeys(
        ("o_proj", "out_proj", "down_proj", "fc2", "dense", "dense_4h_to_h", "w2", "projection_layer"), "rowwise"
    ),
    **dict.fromkeys(("lin2", "pwconv2", "pointwise_conv2", "linear_fc2"), "rowwise"),
    "sinks": "colwise",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
}
"""Styles of what usually has such a name inside of a layer."""
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads")
_COUNTS = (*("num_heads", "num_attention_heads", "n_heads", "n_head", "all_head_size", "embed_dim"), *_KEY_COUNTS)
"""Attributes by which attention of the library shapes what is cut."""


_KEYS = ("k_proj", "v_proj")
"""Names of linears that make keys and values."""


@attrs.frozen(kw_only=True)
class Heads:
    """Of attention.

    Args:
        count: query heads; 0 where keys and values have as many.
        key_value: heads of keys and values.
        turned: outputs of a linear of the style ``mla_kv_a_proj`` that all heads read, as positions turn them.
    """

    count: int = 0
    key_value: int = 0
    turned: int = 0

    def are_shared(self, axis: TensorAxis) -> bool:
        """Tell whether each rank computes all keys and values, as there are too few heads of them to be cut."""
        return bool(self.count and self.key_value % axis.size)


@attrs.frozen(kw_only=True)
class TensorPlan:
    """How layers are cut. A path is one inside of a layer, with ``*`` for each number.

    Args:
        styles: of linears and parameters, by path; what is left out is copied.
        cuts_mixers: whether this holds inside of what runs on one sample after the other; it is copied otherwise.
        summed: copied parameters of which each rank has a part of the gradient, by `general` paths in the whole module.
    """

    styles: Mapping[str, str]
    cuts_mixers: bool = True
    summed: frozenset[str] = frozenset()


def plans(library: Any, layers: str | None) -> Iterator[TensorPlan]:
    """Yield the plans to try: that of the library's config, the same with usual names added, usual names alone.

    Args:
        library: config of the library.
        layers: path of the list of layers in its base model; None where paths are those in the model.
    """
    known = getattr(library, "base_model_tp_plan", None) or {}
    prefix = "" if layers is None else f"{layers}.*."
    own = {path.removeprefix(prefix): style for path, style in known.items() if path.startswith(prefix)}
    if own:
        yield TensorPlan(styles=own)
        yield TensorPlan(styles={**{f"**.{name}": style for name, style in _USUAL.items()}, **own})
    yield TensorPlan(styles={f"**.{name}": style for name, style in _USUAL.items()})


def split_layers(stage: LanguageStage, axis: TensorAxis, plan: TensorPlan, *, heads: Heads) -> dict[str, Split]:
    """Hand ``axis`` to all of a stage that uses it, and return how its parameters are split.

    Args:
        stage: at full shapes.
        axis: this rank's.
        plan: of its layers.
        heads: of its attention.

    Raises:
        ConfigError: a style isn't known.
    """
    stage.axis = axis
    splits: dict[str, Split] = {}
    for index, layer in stage.layers.items():
        splits |= split_linears(layer, axis, plan, heads=heads, at=f"layers.{index}")
    if hasattr(stage, "embedding"):
        stage.embedding.axis = axis
        splits["embedding.weight"] = Split(_ROWS)
    if hasattr(stage, "head"):
        splits |= {f"head.{leaf}": Split(_ROWS) for leaf, _ in stage.head.named_parameters()}
    return splits


def split_linears(layer: nn.Module, axis: TensorAxis, plan: TensorPlan, *, heads: Heads, at: str) -> dict[str, Split]:
    """Hand ``axis`` to the linears of a layer or tower, which lies ``at`` a path; return how it is split."""
    splits: dict[str, Split] = {}
    owners: set[str] = set()
    mixers = [part for part in layer.modules() if isinstance(part, PerSample) and not plan.cuts_mixers]
    whole = {part for mixer in mixers for part in mixer.modules()}
    for path, part in layer.named_modules():
        if part in whole and not isinstance(part, BridgedExperts):
            continue
        style = _style(plan, path, at)
        if isinstance(part, BridgedExperts):
            part.tensor = axis
        elif isinstance(part, BridgedLinear) and style:
            owner, _, name = path.rpartition(".")
            found = _linear(part, style, axis, heads, name)
            splits |= {_join(path, leaf): split for leaf, split in found.items()}
            if style == "colwise":
                owners.add(owner)
        elif not isinstance(part, BridgedLinear):
            leaves = [_join(path, leaf) for leaf, _ in part.named_parameters(recurse=False)]
            splits |= {leaf: Split(_ROWS) for leaf in leaves if _style(plan, leaf, at) == "colwise"}
    for path in owners:
        _divide_counts(layer.get_submodule(path), axis, heads)
    found = {f"{at}.{path}": split for path, split in splits.items()}
    for path, _ in layer.named_parameters():
        if path not in splits and general(f"{at}.{path}") in plan.summed:
            found[f"{at}.{path}"] = Split(summed=True)
    return found


def split_experts(stage: LanguageStage, axis: ExpertAxis) -> dict[str, Split]:
    """Hand ``axis`` to the experts of a stage, and return how they are split.

    Raises:
        ConfigError: the width inside an expert can't be cut so.
    """
    stage.expert_axis = axis
    splits: dict[str, Split] = {}
    for path, part in stage.named_modules():
        if not isinstance(part, BridgedExperts):
            continue
        part.axis = axis
        part.down.adds_bias = axis.etp_rank == 0
        splits[f"{path}.down.weight"] = Split(2, experts=True)
        splits[f"{path}.down.bias"] = Split(summed=True, experts=True)
        for name in ("gate", "up", "gate_up"):
            splits |= {f"{path}.{name}.{leaf}": Split(1, experts=True) for leaf in ("weight", "bias")}
        if hasattr(part, "gate_up") and part.gate_up.weight.shape[1] // 2 % axis.etp:
            raise ConfigError(
                "modules.language.etp",
                expected=f"a divisor of the width inside an expert = {part.gate_up.weight.shape[1] // 2}",
                got=repr(axis.etp),
            )
    held = {path for path, _ in stage.named_parameters()}
    return {path: split for path, split in splits.items() if path in held}


def _style(plan: TensorPlan, path: str, at: str) -> str | None:
    """Return the style of what lies at a path inside of a layer or tower, which lies ``at`` another."""
    *_, owner, name = ("", *path.split("."))
    usual = (f"**.{owner}.{name}", f"**.{name}") if "*" in general(_join(at, path)) else ()  # inside of layers alone
    return next((plan.styles[one] for one in (general(path), *usual) if one in plan.styles), None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _linear(part: BridgedLinear, style: str, axis: TensorAxis, heads: Heads, name: str) -> dict[str, Split]:
    """Return how the parameters of a linear lie in a style, and let its rows go in and out accordingly."""
    match style:
        case "colwise" if name in _KEYS and heads.are_shared(axis):
            part.way = Way(sharing=axis, shared_outputs=part.weight.shape[0])
            found: dict[str, Split] = {}
        case "colwise" | "colwise_gather_output":
            part.way = Way(entering=axis, collected_outputs=0 if style == "colwise" else part.weight.shape[0])
            found = {"weight": Split(_ROWS), "bias": Split(_ROWS)}
        case "rowwise" | "rowwise_split_input":
            part.way = Way(leaving=axis, takes_its_inputs=style != "rowwise")
            found = {"weight": Split(_COLUMNS), "bias": Split()}
        case "mla_kv_a_proj":
            part.way = Way(sharing=axis, shared_outputs=heads.turned)
            found = {}
        case "replicated_with_grad_allreduce" | "local_params":
            found = {}
        case _:
            raise ConfigError(
                "modules.language.tp",
                expected="1, since transformers cuts a layer of this model in a way that isn't known here",
                got=f"the style {style!r} of its tensor plan",
                fix="Leave tp out; any number of lanes (dp) works.",
            )
    return {leaf: split for leaf, split in found.items() if leaf == "weight" or part.bias is not None}


def _divide_counts(part: nn.Module, axis: TensorAxis, heads: Heads) -> None:
    """Let attention shape the heads of this rank alone."""
    shared = heads.are_shared(axis)
    if shared:
        group = heads.count // heads.key_value
        set_heads(part, [head // group for head in axis.span(heads.count)])
    for name in _COUNTS:
        count = vars(part).get(name)
        if shared and name in _KEY_COUNTS:
            continue
        if isinstance(count, int) and count % axis.size == 0:
            setattr(part, name, count // axis.size)
