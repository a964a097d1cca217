"""What an encoder delivers must be what it said, or nobody's placeholders would fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from mimo.data import PlacedItem
from mimo.hooks import ItemInfo, PluginError, RunError
from mimo.model import DECODER, AuxLossNames
from mimo.model.runtime import AuxLosses
from mimo.trainer.step.programs.encoder_program import take_rows
from mimo.trainer.step.programs.item_program import on_device
from mimo.trainer.step.programs.language_program import LanguageProgram
from mimo.trainer.step.programs.program import StepSums

JOB: Any = SimpleNamespace(row_width=lambda _module: 4)
EYE: Any = SimpleNamespace(name="eye", modality="image", spec=SimpleNamespace(name="tiles"))


def items(*samples: int) -> list[PlacedItem]:
    """Return an item of six rows of each sample."""
    return [
        PlacedItem(info=ItemInfo(sample=sample, index=0, modality="image", size=(2, 3)), runs=((0, 6),))
        for sample in samples
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_any_type_travel_as_one(dtype: torch.dtype) -> None:
    """That of the run's precision, on every edge."""
    program: Any = SimpleNamespace(_dtype=dtype, _edges=(SimpleNamespace(name="a"), SimpleNamespace(name="b")))
    rows = torch.ones(12, 4, dtype=torch.float64)
    for found in LanguageProgram._outputs(program, take_rows(JOB, EYE, items(3, 8), rows)).values():
        assert found.dtype == dtype
        assert torch.equal(found, torch.ones(12, 4, dtype=dtype))


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        ("fp32", (torch.float32, torch.float64, torch.int64)),
        ("bf16", (torch.bfloat16, torch.bfloat16, torch.int64)),
        ("fp16", (torch.float16, torch.float16, torch.int64)),
    ],
)
def test_items_enter_in_what_layers_compute_in(precision: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Floating numbers do; fp32 leaves an author's own types as they are."""
    item = {"pixels": torch.ones(2), "times": torch.ones(2, dtype=torch.float64), "ids": torch.ones(2).long()}
    job: Any = SimpleNamespace(settings=SimpleNamespace(run=SimpleNamespace(precision=precision)))
    assert tuple(tensor.dtype for tensor in on_device(item, job, torch.device("cpu")).values()) == dtypes


@pytest.mark.parametrize(("optimizer", "loss"), [(None, 3.0), (SimpleNamespace(loss_scale=8.0), 24.0)])
def test_the_loss_is_scaled_where_the_optimizer_says_so(optimizer: object, loss: float) -> None:
    """Without one that trains, it is the loss."""
    program: Any = SimpleNamespace(_optimizer=optimizer)
    assert LanguageProgram._scaled(program, torch.tensor(3.0)).item() == loss


@pytest.mark.parametrize(("shape", "samples"), [((11, 4), (3, 8)), ((13, 4), (3, 8)), ((12, 5), (3, 8)), ((1, 4), ())])
def test_rows_that_do_not_match_the_placeholders_are_refused(shape: tuple[int, int], samples: tuple[int, ...]) -> None:
    """Too few, too many, too wide, or any where there is no item: modality, samples and both counts are named."""
    with pytest.raises(RunError) as raised:
        take_rows(JOB, EYE, items(*samples), torch.zeros(shape))
    text = str(raised.value)
    assert text.startswith(f"modules.eye: expected {6 * len(samples)} rows of width 4 for {len(samples)} items of mod")
    assert "modality 'image', one for each of their placeholders, as rows() of encoder 'tiles' said" in text
    assert all(f"6 for item 0 of sample {sample} of size (2, 3)" in text for sample in samples)
    assert f"got a tensor of shape {shape} from its forward(). Make them agree." in text


def test_a_long_list_of_items_is_shortened() -> None:
    """A few are enough to find the mistake."""
    with pytest.raises(RunError, match=r"of sample 1 of .* of sample 4 of size \(2, 3\), \.\.\.\)"):
        take_rows(JOB, EYE, items(1, 2, 3, 4, 5), torch.zeros(29, 4))


@pytest.mark.parametrize(("name", "values"), [("layers.0.load", 3), ("layers.9.load", 4), ("balance", 2)])
def test_an_auxiliary_loss_that_was_not_announced_is_refused(name: str, values: int) -> None:
    """Other ranks would not know of it, or take its values for another's."""
    spec = attrs.evolve(
        DECODER, aux_losses=lambda _config: AuxLossNames(losses=("balance",), counts={"layers.0.load": 4})
    )
    program: Any = SimpleNamespace(module=SimpleNamespace(name="language", spec=spec, config=None))
    sums = StepSums()
    fine = AuxLosses(losses={"balance": torch.ones(())}, counts={"layers.0.load": torch.ones(4)})
    LanguageProgram._enter(program, sums, fine)
    LanguageProgram._enter(program, sums, fine)
    assert sums.extra["layers.0.load"].tolist() == [2.0] * 4
    text = rf"modules\.language\.plugin: .* named by aux_losses of 'decoder': .* got '{name}' of {values} values"
    with pytest.raises(PluginError, match=text):
        LanguageProgram._enter(program, sums, AuxLosses(counts={name: torch.ones(values)}))
