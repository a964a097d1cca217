"""What a plugin of a module hands in. Free of torch, so that a layout can be planned without it.

An encoder's required functions alone work for any number of lanes; `TensorSupport` and `EncoderStages` add tensor
and pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from mimo.model.spec.hf import HfFamilies, HfFamily
from mimo.model.spec.stage import Stage

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from mimo.model.parallel import ContextAxis, ExpertAxis, Split, TensorAxis
    from mimo.model.spec.flops import OpCost
    from mimo.topology import Recompute

Side: TypeAlias = Literal["tower", "projector"]
"""What lies before an encoder's seam, and what behind it."""
Reads: TypeAlias = Literal["before", "own"]
"""Which rows of the language model a generator makes an item from: all of the sample before the item's placeholder, or
those of the placeholder itself."""
Methods: TypeAlias = "Callable[[nn.Module], Iterable[Callable[..., Any]]]"
"""Of a module, some bound methods of its submodules."""


@runtime_checkable
class StaysEager(Protocol):
    """A submodule of a layer whose forward no compiler sees: the layer's graph ends before it, another begins behind.

    Attributes:
        stays_eager: why, to stand behind "as": ``its shapes depend on what it reads``.
    """

    stays_eager: str


@attrs.frozen(kw_only=True)
class TensorSupport:
    """How a module is split over tensor ranks.

    Args:
        divisible: of a config, the counts that ``tp`` must divide, by the config key that sets them
            (``{"heads": 8}``); checked before launch. Raises a `ConfigError` of ``tp`` where it can't be split at all;
            the module's path is put before that.
        plan: given the module (full shapes, on the meta device) and this rank's `TensorAxis`, hands the axis to the
            submodules that use it and returns how each parameter is split, by name; a parameter left out is
            replicated with equal gradients.
        splits_rows: whether ``sequence_parallel`` works: between layers, between stages, and out of an encoder's last
            stage each tensor rank holds its equal slice of the rows, padded at the end; a generator's, of what
            `ContextSupport` says.
    """

    divisible: Callable[[Any], Mapping[str, int]]
    plan: Callable[[nn.Module, TensorAxis], Mapping[str, Split]]
    splits_rows: bool = False


@attrs.frozen(kw_only=True)
class ContextSupport:
    """How a module works where each context rank holds a share of its rows.

    A language model's ranks hold `mimo.topology.context_spans` of each sample; an encoder's hold equal slices of its
    packed rows, padded at the end, on every stage and out of the last. Those of a generator are given equal slices of
    the language model's rows, and return equal slices of what its stages send and of its losses, all padded at the end.

    Args:
        attach: given the module and this rank's `ContextAxis`, hands the axis to the submodules that use it.
        check: of a config, raises a `ConfigError` of ``cp`` where it can't work so; the module's path is put before
            that.
    """

    attach: Callable[[nn.Module, ContextAxis], None]
    check: Callable[[Any], None] = lambda _config: None


@attrs.frozen(kw_only=True)
class ExpertSupport:
    """How a mixture of experts lies on the expert view of a grid.

    Args:
        count: number of experts of a config, 0 for none; ``ep`` must divide it.
        plan: given the module (full shapes, on the meta device) and this rank's `ExpertAxis`, hands the axis to the
            submodules that use it and returns how each expert parameter is split, by name. The tensor plan leaves
            those parameters out.
        after_step: called on every rank after each step that was not skipped, with the module and the step's counts of
            its `AuxLosses`, summed over all ranks; moves what follows the load of the experts, equally
            on all ranks.
    """

    count: Callable[[Any], int]
    plan: Callable[[nn.Module, ExpertAxis], Mapping[str, Split]]
    after_step: Callable[[nn.Module, Mapping[str, Tensor]], None] = lambda _module, _counts: None


@attrs.frozen(kw_only=True)
class EncoderStages:
    """How an encoder is cut into pipeline stages.

    Args:
        layers: number of layers that stages may share out.
        message_rows: rows that one item of this size sends from stage to stage (before any pooling).
        width: columns of those rows.
        cut: keeps of a whole module what one stage runs; the result's forward is
            ``forward(items, sizes, hidden) -> Tensor``: ``items`` are prepared items on the first stage and empty
            on others, ``sizes`` their header sizes on every stage, ``hidden`` the rows from the stage before
            (None on the first).
        parts: names of the spec's parts that a stage holds.
    """

    layers: Callable[[Any], int]
    message_rows: Callable[[Any, tuple[int, ...]], int]
    width: Callable[[Any], int]
    cut: Callable[[nn.Module, Stage], nn.Module]
    parts: Callable[[Any, Stage], frozenset[str]]


@attrs.frozen(kw_only=True)
class GeneratorStages:
    """How a generator is cut into pipeline stages.

    Args:
        layers: number of layers that stages may share out.
        message_rows: rows that one item of this size, made from so many rows of the language model, sends from stage to
            stage.
        width: columns of those rows.
        cut: keeps of a whole module what one stage runs. The result's forward is
            ``forward(items, rows, spans, keys, sizes, hidden) -> Tensor``: the first four as of `GeneratorSpec.build`,
            but ``items`` are there on the first and the last stage, and empty between, and ``rows`` on the first, and
            None on later ones. ``sizes`` are header sizes of the items on every stage, ``hidden`` the rows from the
            stage before (None on the first). The last stage returns losses. What is drawn need not travel: keys are
            the same on every stage.
        parts: names of the spec's parts that a stage holds.
    """

    layers: Callable[[Any], int]
    message_rows: Callable[[Any, tuple[int, ...], int], int]
    width: Callable[[Any], int]
    cut: Callable[[nn.Module, Stage], nn.Module]
    parts: Callable[[Any, Stage], frozenset[str]]


@attrs.frozen(kw_only=True)
class EncoderSeam:
    """Where an encoder's tower ends and its projector begins, so that a frozen tower may work a step ahead of it.

    Args:
        rows: rows that one item of this size sends over the seam.
        width: columns of those rows.
        cut: keeps of a whole module, or of its last pipeline stage where it has several, what lies on one side. The
            result's forward is that of `EncoderStages.cut`: the tower's takes what the uncut module takes and returns
            the rows at the seam, the projector's has no items, and those rows as ``hidden``.
        parts: names of the spec's parts that lie behind it; all others lie before it.
    """

    rows: Callable[[Any, tuple[int, ...]], int]
    width: Callable[[Any], int]
    cut: Callable[[nn.Module, Side], nn.Module]
    parts: frozenset[str] = frozenset({"projector"})


@attrs.frozen(kw_only=True)
class EncoderSpec:
    """An encoder plugin. Write `rows`, `prepare` and `build`; the rest is optional.

    Args:
        name: what users write as ``modules.<name>.plugin``.
        config: attrs class of its settings.
        measure: size of a raw item from its header alone, in the modality's unit.
        rows: rows that an item of this size becomes.
        prepare: decodes a raw item into tensors, on the encoder's ranks only.
        build: makes the whole plain module; its ``forward(items) -> Tensor [T, hidden]`` returns the rows of the
            prepared items in order, an empty list included.
        grid: of the rows that an item of this size becomes, how many frames they are, and in each how many rows down
            and across, in that order; their product is `rows`. A language model may turn by them
            (``mrope_section`` of ``decoder``). Without it, or where it returns None, rows lie one after the other as
            those of text do.
        pattern: of an item of this size, what stands in its place: counts of rows, which add up to `rows`, and texts
            that the tokenizer reads, such as the token that ends each line of an image. Without it its rows follow one
            another.
        modality: what it reads, and the default name of its placeholder, ``<image>``.
        parts: names by which a user may freeze it, each with the parameter-name prefixes that it covers.
        tensor: support for ``tp``; without it only ``tp = 1`` is accepted.
        stages: support for ``pp``; without it only ``pp = 1`` is accepted.
        seam: support for ``prefetch`` where the projector trains; without it only where nothing does.
        context: support for ``cp``; without it only ``cp = 1`` is accepted.
        recompute: support for recomputation, by what a user may ask for, ``full`` and ``selective``: of the module of a
            stage, the bound methods of submodules that backward computes again, ``layer.forward`` of every layer for
            ``full``. Without it only ``none`` is accepted.
        compiles: whether ``run.compile`` may compile what ``recompute["full"]`` names, the layers of a stage; without
            ``full`` nothing is. A submodule of a layer that `StaysEager` describes is left out.
        flops: of a config, the width of the rows that it delivers, a stage, what is recomputed and the sizes of items,
            what a forward of that stage takes, by part, in the order in which data passes them; without it costs are
            guessed from the parameters.
        hf: families of published Hugging Face folders that can be read and written.
        hf_any: such families beside these, made as they are asked for; another plugin that has one of them in ``hf``
            comes before.
        hf_record: a file that says, under the plugin's name, what tests of families beside their library have found,
            as `read_hf_tested` reads it.
        examples: of a config, raw items of unlike sizes that ``mimo plugins --check`` looks at it with; without it
            those are pictures.
        blank: of a size, a raw item of that size, whatever it holds: what `prepare` is given in the place of one that
            can't be decoded. Without it ``data.max_broken`` is refused, and such an item ends the run.
    """

    name: str
    config: type
    measure: Callable[[Any], tuple[int, ...]]
    rows: Callable[[Any, tuple[int, ...]], int]
    prepare: Callable[[Any, Any], Mapping[str, Tensor]]
    build: Callable[[Any, int], nn.Module]
    grid: Callable[[Any, tuple[int, ...]], tuple[int, int, int] | None] | None = None
    pattern: Callable[[Any, tuple[int, ...]], Sequence[str | int]] | None = None
    modality: str = "image"
    parts: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    tensor: TensorSupport | None = None
    stages: EncoderStages | None = None
    seam: EncoderSeam | None = None
    context: ContextSupport | None = None
    recompute: Mapping[str, Methods] = attrs.field(factory=dict)
    compiles: bool = True
    flops: Callable[[Any, int, Stage, Recompute, Sequence[tuple[int, ...]]], Mapping[str, OpCost]] | None = None
    hf: Sequence[HfFamily] = ()
    hf_any: HfFamilies | None = None
    hf_record: Path | None = None
    examples: Callable[[Any], Sequence[Any]] | None = None
    blank: Callable[[tuple[int, ...]], Any] | None = None


@attrs.frozen(kw_only=True)
class AuxLossNames:
    """The names of all that a language model's stages add to `AuxLosses`, since every rank must know them beforehand.

    Args:
        losses: of auxiliary losses.
        counts: of counts, with the number of values that each has.
    """

    losses: tuple[str, ...] = ()
    counts: Mapping[str, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class LanguageModelSpec:
    """A language-model plugin.

    Args:
        name: what users write as ``modules.language.plugin``.
        config: attrs class of its settings; ``vocabulary`` of 0 there means the tokenizer's.
        hidden: width of the rows that stages exchange, and encoders deliver; where ``deepstack`` says more, see
            `row_width` and `message_width`.
        layers: number of layers that stages may share out.
        vocabulary: number of token ids that it can read and write.
        build: makes the module of one stage; see `mimo.model.runtime.LanguageModule` for its forward.
        tied: whether the last stage holds parameters of stage 0 too, which owns them: an output embedding that is the
            input's, or an input embedding that is read again at the end.
        parts: names by which a user may freeze it, each with the parameter-name prefixes that it covers.
        stage_parts: names of the parts that a stage holds.
        tensor: support for ``tp``; without it only ``tp = 1`` is accepted.
        context: support for ``cp``; without it only ``cp = 1`` is accepted.
        experts: support for ``ep`` and ``etp``; without it only 1 is accepted.
        aux_losses: of a config, all that the forward of any stage adds to its `AuxLosses`.
        next_tokens: of a config, how many `LanguageBatch.mtp_labels` it is trained on. What only they need is the part
            ``next_tokens``, which checkpoints may lack that are evaluated or write.
        deepstack: of a config, how many first layers add rows of encoders: these deliver, behind each row, one for each
            such layer, and a stage hands on those that later layers add (`mimo.model.runtime.DeepRows`).
        reads_items: of a config, whether it reads `LanguageBatch.items`.
        recompute: support for recomputation, see `EncoderSpec`.
        compiles: whether its layers may be compiled, likewise.
        chunks_loss: whether its last stage has a ``loss_rows``, of how many rows the loss holds logits at a time, as a
            `mimo.model.runtime.LanguageStage` does.
        distils: whether it may teach another and be taught: its last stage then does what
            `mimo.model.runtime.SupportsDistillation` says, as a `mimo.model.runtime.LanguageStage` does.
        flops: of a config, a stage, what is recomputed, the lengths of samples and how many of their rows have labels,
            what a forward of that stage takes, by part, in the order in which data passes them; without it costs are
            guessed from the parameters.
        hf: families of published Hugging Face folders that can be read and written.
        hf_any: such families beside these, made as they are asked for; another plugin that has one of them in ``hf``
            comes before.
        hf_record: a file that says, under the plugin's name, what tests of families beside their library have found,
            as `read_hf_tested` reads it.
    """

    name: str
    config: type
    hidden: Callable[[Any], int]
    layers: Callable[[Any], int]
    vocabulary: Callable[[Any], int]
    build: Callable[[Any, Stage], nn.Module]
    tied: Callable[[Any], bool]
    parts: Mapping[str, Sequence[str]]
    stage_parts: Callable[[Any, Stage], frozenset[str]]
    tensor: TensorSupport | None = None
    context: ContextSupport | None = None
    experts: ExpertSupport | None = None
    aux_losses: Callable[[Any], AuxLossNames] = lambda _config: AuxLossNames()
    next_tokens: Callable[[Any], int] = lambda _config: 0
    deepstack: Callable[[Any], int] = lambda _config: 0
    reads_items: Callable[[Any], bool] = lambda _config: False
    recompute: Mapping[str, Methods] = attrs.field(factory=dict)
    compiles: bool = True
    chunks_loss: bool = False
    distils: bool = False
    flops: Callable[[Any, Stage, Recompute, Sequence[int], int], Mapping[str, OpCost]] | None = None
    hf: Sequence[HfFamily] = ()
    hf_any: HfFamilies | None = None
    hf_record: Path | None = None

    def row_width(self, config: Any) -> int:
        """Return the width of the rows that encoders must deliver."""
        return self.hidden(config) * (1 + self.deepstack(config))

    def message_width(self, config: Any, stage: Stage) -> int:
        """Return the width of the rows that a stage hands on, or returns as the last."""
        later = self.deepstack(config) - stage.layers(self.layers(config)).stop
        return self.hidden(config) * (1 + max(later, 0))


@attrs.frozen(kw_only=True)
class GeneratorSpec:
    """A generator plugin: it makes items from rows of the language model, and is trained by items of samples.

    Write `measure`, `targets`, `prepare` and `build`; the rest is optional.

    Args:
        name: what users write as ``modules.<name>.plugin``.
        config: attrs class of its settings.
        measure: size of a raw item from its header alone, in the modality's unit.
        targets: how many losses an item of this size has; the sum of all is divided by their number in a step.
        prepare: decodes a raw item into the tensors that it is trained by, on the generator's ranks only.
        build: makes the whole plain module for rows of this width. Its ``forward(items, rows, spans, keys) -> Tensor``
            returns the losses of the targets of all items in order, fp32, an empty list included: ``items`` are
            prepared, ``rows`` [R, hidden] of the language model's last stage, ``spans`` begin and end of each item's in
            them, which may overlap or be empty, and ``keys`` [N] on the CPU what it draws by for each
            (`mimo.model.runtime.normal` and ``uniform``), so that no layout changes the noise. The module's
            ``training`` says whether it is trained or evaluated, also where nothing asks for a gradient.
        modality: what it makes, and the default name of its placeholder, ``<image>``.
        reads: of a config, from which rows of the language model it makes an item.
        rows: of a config, how many rows the placeholder of an item that is to be made is in the language model, 1 or
            more: its embedding that many times. The first is predicted as any other token, and so calls for the item.
        generate: given the module, a config, and ``rows``, ``spans`` and ``keys`` as in forward, returns the items that
            it makes, each as `prepare` takes one; without it ``mimo generate`` is refused.
        save: given such an item and a path without suffix, writes it to a file, and returns its path; without it
            ``mimo generate`` is refused.
        parts: names by which a user may freeze it, each with the parameter-name prefixes that it covers.
        tensor: support for ``tp``; without it only ``tp = 1`` is accepted.
        stages: support for ``pp``; without it only ``pp = 1`` is accepted.
        context: support for ``cp``; without it only ``cp = 1`` is accepted.
        recompute: support for recomputation, see `EncoderSpec`.
        compiles: whether its layers may be compiled, likewise.
        flops: of a config, the width of the language model's rows, a stage, what is recomputed, the sizes of items and
            from how many rows each is made, what a forward of that stage takes, by part, in the order in which data
            passes them; without it costs are guessed from the parameters.
        examples: of a config, raw items of unlike sizes that ``mimo plugins --check`` looks at it with; without it
            those are pictures.
        blank: of a size, a raw item of that size, see `EncoderSpec`.
        hf: families of published Hugging Face folders that can be read and written, with what reads the language
            model's rows or without it.
        hf_any: such families beside these, see `EncoderSpec`.
        hf_record: what tests of families beside their library have found, see `EncoderSpec`.
    """

    name: str
    config: type
    measure: Callable[[Any], tuple[int, ...]]
    targets: Callable[[Any, tuple[int, ...]], int]
    prepare: Callable[[Any, Any], Mapping[str, Tensor]]
    build: Callable[[Any, int], nn.Module]
    modality: str = "image"
    reads: Callable[[Any], Reads] = lambda _config: "before"
    rows: Callable[[Any], int] = lambda _config: 1
    generate: Callable[[nn.Module, Any, Tensor, Sequence[tuple[int, int]], Tensor], Sequence[Any]] | None = None
    save: Callable[[Any, Path], Path] | None = None
    parts: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    tensor: TensorSupport | None = None
    stages: GeneratorStages | None = None
    context: ContextSupport | None = None
    recompute: Mapping[str, Methods] = attrs.field(factory=dict)
    compiles: bool = True
    flops: (
        Callable[[Any, int, Stage, Recompute, Sequence[tuple[int, ...]], Sequence[int]], Mapping[str, OpCost]] | None
    ) = None
    examples: Callable[[Any], Sequence[Any]] | None = None
    blank: Callable[[tuple[int, ...]], Any] | None = None
    hf: Sequence[HfFamily] = ()
    hf_any: HfFamilies | None = None
    hf_record: Path | None = None
    # No generator is made ahead of its step.
    seam: ClassVar[None] = None


ModuleSpec: TypeAlias = EncoderSpec | LanguageModelSpec | GeneratorSpec
"""The plugin of a module, of whatever kind."""


def noun_of(spec: ModuleSpec) -> str:
    """Return what messages call a plugin's kind."""
    if isinstance(spec, LanguageModelSpec):
        return "language model"
    return "generator" if isinstance(spec, GeneratorSpec) else "encoder"


def hf_families(spec: ModuleSpec, config: Any) -> tuple[HfFamily, ...]:
    """Return the families as which a module with this config might be written."""
    own = tuple(spec.hf)
    if spec.hf_any is None:
        return own
    more = spec.hf_any.of(spec.hf_any.type_of(config))
    return own if more is None else (*own, more)
