"""Loading of states into the tensors that optimizers work on, where torch would put others in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mimo.hooks import RunError


@torch.no_grad()
def load_in_place(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Take back what the ``state_dict`` of a like optimizer gave, into the memory that is there.

    Raises:
        RunError: it is of other parameters, or lacks a state, or has one of another shape; nothing has changed then.
    """
    where = f"{type(optimizer).__name__}.load_state_dict"
    groups, own_groups = state_dict["param_groups"], optimizer.param_groups
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in own_groups for parameter in group["params"]]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in own_groups]:
        raise RunError(
            where,
            expected=f"the state of {len(parameters)} parameters in {len(own_groups)} groups",
            got=f"that of {len(numbers)} in {len(groups)}",
            fix="Load what was saved with the same parameters.",
        )
    copies = []
    for number, parameter in zip(numbers, parameters, strict=True):
        saved = state_dict["state"].get(number, {})
        for key, value in optimizer.state[parameter].items():
            if key not in saved or saved[key].shape != value.shape:
                raise RunError(
                    where,
                    expected=f"{key} of shape {tuple(value.shape)} for parameter {number}",
                    got=f"one of shape {tuple(saved[key].shape)}" if key in saved else "none",
                    fix="Load what was saved with the same parameters, after a step.",
                )
            copies.append((value, saved[key]))
    for value, loaded in copies:
        value.copy_(loaded)
    for own, group in zip(own_groups, groups, strict=True):
        own.update({key: value for key, value in group.items() if key != "params" and key in own})
