"""What stages learn beside what a model of the library does, on the same samples with rows of images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from mimo.model import Stage
from mimo.model.runtime import NO_LABEL, LanguageBatch
from mimo_transformers import HfDecoderConfig
from mimo_transformers.family import new_network, quiet
from mimo_transformers.model.stage import HfStage

IMAGE = 90
"""Id of a placeholder."""


@attrs.frozen(kw_only=True, eq=False)
class Sample:
    """A sample with images.

    Args:
        ids: [S], `IMAGE` for each row of an image.
        rows: [R, W] what is put in for these.
        items: rows of each image.
        grid_positions: [S, 3] of all rows.
    """

    ids: Tensor
    rows: Tensor
    items: Sequence[tuple[int, int]]
    grid_positions: Tensor

    @classmethod
    def of(cls, *parts: int | tuple[int, int], width: int) -> "Sample":
        """Return a sample of so many ids of text, and images of so many rows down and across, in this order."""
        ids, items, places, number = list[Tensor](), list[tuple[int, int]](), list[Tensor](), 0
        for part in parts:
            start = sum(map(len, ids))
            if isinstance(part, int):
                ids.append(torch.randint(1, IMAGE, (part,)))
                places.append((number + torch.arange(part)).unsqueeze(1).expand(-1, 3))
                number += part
            else:
                down, across = part
                items.append((start, start + down * across))
                ids.append(torch.full((down * across,), IMAGE))
                grid = torch.cartesian_prod(torch.zeros(1).long(), torch.arange(down), torch.arange(across))
                places.append(number + grid)
                number += max(part)
        tokens = torch.cat(ids)
        rows = torch.randn(int((tokens == IMAGE).sum()), width)
        return cls(ids=tokens, rows=rows, items=items, grid_positions=torch.cat(places))

    @property
    def labels(self) -> Tensor:
        """The next id [S] where that is text."""
        following = torch.cat((self.ids[1:], self.ids.new_tensor([NO_LABEL])))
        return following.masked_fill(following == IMAGE, NO_LABEL)


def stirred(config: HfDecoderConfig) -> Any:
    """Return the library's model with its own attention, moved off ones and zeros."""
    with quiet():
        network = new_network(config.library(), attention="eager").float()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return network


def batch_of(samples: Sequence[Sample], *, grids: bool = False) -> LanguageBatch:
    """Return samples packed; with their places in grids where these are asked for."""
    tokens = torch.cat([sample.ids for sample in samples])
    return LanguageBatch.of(
        tokens,
        torch.cat([sample.labels for sample in samples]),
        torch.cat([torch.arange(len(sample.ids)) for sample in samples]),
        lengths=[len(sample.ids) for sample in samples],
        placeholders={"vision": (tokens == IMAGE).nonzero().squeeze(1)},
        grid_positions=torch.cat([sample.grid_positions for sample in samples]) if grids else None,
        items=[sample.items for sample in samples],
    )


def check_learning(
    config: HfDecoderConfig,
    samples: Sequence[Sample],
    *,
    stages: int,
    logits: Callable[[Any, Sample, Tensor], Tensor],
    grids: bool = False,
) -> None:
    """Compare the loss, and all gradients, those of images' rows too, with the library's.

    Args:
        config: of the stages.
        samples: to learn from.
        stages: how many there are.
        logits: of the library's language model, a sample and its images' rows, the logits [S, V] of a whole model.
        grids: whether the batch has places in grids.
    """
    network = stirred(config)
    theirs = [sample.rows.clone().requires_grad_() for sample in samples]
    wanted = torch.stack(
        [
            torch.nn.functional.cross_entropy(logits(network, sample, rows), sample.labels, reduction="sum")
            for sample, rows in zip(samples, theirs, strict=True)
        ]
    ).sum()
    wanted.backward()

    batch, ours = batch_of(samples, grids=grids), torch.cat([sample.rows for sample in samples]).requires_grad_()
    parts = [HfStage(config, Stage(index, stages)) for index in range(stages)]
    hidden: Tensor | None = None
    for part in parts:
        part.read(network)
        hidden = part(batch, {"vision": ours} if part.stage.is_first else {}, hidden)
    assert hidden is not None
    found = parts[-1].losses(hidden, batch.labels).sum()
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    gradients = {name: one.grad for name, one in network.named_parameters(remove_duplicate=False)}
    assert ours.grad is not None
    compare_gradients(parts, network, gradients)
    of_rows = torch.cat([rows.grad for rows in theirs if rows.grad is not None])
    assert float((ours.grad - of_rows).norm()) <= 1e-5 * float(of_rows.norm())


def compare_gradients(parts: Sequence[HfStage], network: Any, theirs: Mapping[str, Tensor | None]) -> None:
    """Compare the gradients of stages with those of the library's model, by name; every parameter has one."""
    whole = float(torch.stack([one.norm() for one in theirs.values() if one is not None]).norm())
    summed: dict[str, Tensor] = {}
    for part in parts:
        published = part.published(network)
        for path, parameter in part.named_parameters():
            assert parameter.grad is not None, path
            name = published[path].name
            whole_gradient = summed.setdefault(name, torch.zeros_like(network.get_parameter(name)))
            piece = published[path].view(whole_gradient)
            piece += parameter.grad
    for name, gradient in summed.items():
        other = theirs[name]
        other = torch.zeros_like(gradient) if other is None else other
        assert float((gradient - other).norm()) <= 1e-5 * max(float(other.norm()), 1e-3 * whole), name
    assert {name for name, _ in network.named_parameters()} <= set(summed)


def saved_elements(module: Any, forward: Callable[[], Tensor]) -> float:
    """Return how many numbers of fp32 autograd saves in a forward that computes, each storage once, no weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved.setdefault(storage.data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        rows = forward()
    assert rows.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()) / 4
