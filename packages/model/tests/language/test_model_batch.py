"""A microbatch goes to a device whole, in few copies."""

from __future__ import annotations

from unittest.mock import patch

import attrs
import pytest
import torch
from torch import Tensor

from mimo.model.runtime import LanguageBatch, MtpLabels

LENGTHS = (4, 3)


def batch_with_all(*, weighted: bool) -> LanguageBatch:
    """Return a batch in which nothing is left out but, where it isn't weighted, weights."""
    tokens = torch.arange(7)
    batch = LanguageBatch.of(
        tokens,
        tokens + 1,
        torch.cat([torch.arange(length) for length in LENGTHS]),
        lengths=LENGTHS,
        placeholders={"vision": torch.tensor([1, 2]), "audio": torch.tensor([5])},
        grid_positions=torch.arange(21).view(7, 3),
        next_tokens=2,
        weights=torch.rand(7) if weighted else None,
    )
    return attrs.evolve(batch, labelled=torch.arange(7))


def tensors_of(one: LanguageBatch | MtpLabels) -> dict[str, Tensor]:
    """Return all tensors of a batch by path."""
    found: dict[str, Tensor] = {}
    for field in attrs.fields(type(one)):
        value = getattr(one, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
        elif field.name == "placeholders":
            found |= {f"placeholders.{name}": rows for name, rows in value.items()}
        elif field.name == "mtp_labels":
            for number, labels in enumerate(value):
                found |= {f"mtp_labels.{number}.{name}": own for name, own in tensors_of(labels).items()}
    return found


@pytest.mark.parametrize("weighted", [True, False])
def test_a_batch_goes_to_a_device_in_a_copy_for_each_dtype(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    """All of its tensors, with their numbers and shapes; what is no tensor stays."""
    batch = batch_with_all(weighted=weighted)
    copied: list[torch.dtype] = []

    def pin_memory(x: Tensor) -> Tensor:
        copied.append(x.dtype)
        return x

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    with patch.object(Tensor, "to", lambda x, *_args, **_how: x):
        found = batch.to("cuda")
    assert copied == [torch.int64, *[torch.float32] * weighted]
    before, after = tensors_of(batch), tensors_of(found)
    assert list(before) == list(after)
    assert ("weights" in after, "mtp_labels.1.weights" in after) == (weighted, weighted)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
        assert tensor.data_ptr() != after[name].data_ptr(), name
    assert (found.lengths, found.label_tokens, found.used) == (batch.lengths, batch.label_tokens, batch.used)
    assert found.aux_losses is batch.aux_losses
    assert [labels.counts for labels in found.mtp_labels] == [labels.counts for labels in batch.mtp_labels]


def test_a_batch_that_is_there_is_not_copied() -> None:
    """Its tensors are the same ones."""
    batch = batch_with_all(weighted=True)
    before, after = tensors_of(batch), tensors_of(batch.to("cpu"))
    assert all(after[name] is tensor for name, tensor in before.items())


def test_a_batch_may_go_where_there_is_no_memory() -> None:
    """To the meta device, on which shapes are worked out."""
    assert {one.device.type for one in tensors_of(batch_with_all(weighted=True).to("meta")).values()} == {"meta"}
