"""The state of any optimizer of torch as entries of a checkpoint, by the names of the parameters that it belongs to.

torch makes an optimizer's state at its first step. So a fresh optimizer has none to be filled: it is made as a
checkpoint has it, before `load` is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mimo.checkpoint._manifest import Manifest
from mimo.checkpoint._manifest_file import read_manifest
from mimo.checkpoint._ranks import Ranks, take_all
from mimo.checkpoint._tensors import DTYPES
from mimo.checkpoint._wire import PLAIN
from mimo.hooks import CheckpointError, Common, StateTree


class OptimizerState:
    """What a checkpoint holds of an optimizer: a `mimo.hooks.Stateful`.

    Its entries are ``<name>.state.<parameter>.<key>``, and ``<name>.groups`` with the settings of its groups, such as
    learning rates. They depend on no layout, as state that is a DTensor like its parameter is stored whole.

    Args:
        name: top-level key in the checkpoint.
        optimizer: any whose state is tensors and JSON values for each parameter.
        parameters: names of all its parameters, ``model.named_parameters()``; others may be among them.

    Raises:
        CheckpointError: one of the optimizer's parameters has no name.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        names = {parameter: path for path, parameter in dict(parameters).items()}
        held = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        nameless = [parameter for parameter, _ in held if parameter not in names]
        if nameless:
            raise CheckpointError(
                name,
                expected="a name for each parameter of the optimizer",
                got=f"none for {len(nameless)} of {len(held)}, the first of shape {list(nameless[0].shape)}",
                fix="Give model.named_parameters() of all that it steps.",
            )
        self._held: dict[str, tuple[Tensor, dict[str, Any]]] = {
            names[parameter]: (parameter, group) for parameter, group in held
        }

    @property
    def name(self) -> str:
        """Top-level key in the checkpoint."""
        return self._name

    def state(self) -> StateTree:
        """Return the entries of this rank; tensors are the optimizer's own, to be saved or filled."""
        states = {name: self._optimizer.state.get(parameter, {}) for name, (parameter, _) in self._held.items()}
        return {
            "state": {
                name: {key: value if isinstance(value, Tensor) else Common(value) for key, value in state.items()}
                for name, state in states.items()
                if state
            },
            "groups": Common([_settings(group) for group in self._optimizer.param_groups]),
        }

    def make(self, step_folder: Path, *, group: dist.ProcessGroup | None = None) -> None:
        """Make the state that a checkpoint has and the optimizer has not yet; collective over the default group.

        It is zeros until `mimo.checkpoint.load` fills it: like the parameter where it has its shape, cut over ranks
        as that one.

        Args:
            step_folder: a committed checkpoint, which holds the optimizer under the same name.
            group: see `mimo.checkpoint.save`.

        Raises:
            CheckpointError: on every rank, where the checkpoint can't be read, or state of a shape of its own belongs
                to a parameter that is cut over ranks; nothing was made then.
        """
        ranks, where = Ranks.current(group), str(step_folder)
        missing: dict[tuple[str, str], Any] = {}
        outcome = ranks.attempt(lambda: missing.update(self._missing(read_manifest(Path(step_folder)))), where=where)
        take_all(ranks.gather_everywhere(outcome, PLAIN))
        for (name, key), value in missing.items():
            self._optimizer.state[self._held[name][0]][key] = value

    def load(self, tree: Mapping[str, Any]) -> None:
        """Take back what `state` gave, filled from a checkpoint: tensors are there already, settings are set.

        Raises:
            CheckpointError: the optimizer has other groups.
        """
        for name, state in tree["state"].items():
            own = self._optimizer.state[self._held[name][0]]
            own.update({key: leaf.value for key, leaf in state.items() if isinstance(leaf, Common)})
        groups, saved = self._optimizer.param_groups, tree["groups"].value
        if len(groups) != len(saved):
            raise CheckpointError(
                f"{self._name}.groups",
                expected=f"settings of {len(groups)} groups of parameters",
                got=f"those of {len(saved)}",
                fix="Make the optimizer with the groups that it was saved with.",
            )
        for group, settings in zip(groups, saved, strict=True):
            for key, value in settings.items():
                own = group.get(key)
                if isinstance(own, Tensor):
                    own.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(own, tuple) else value

    def _missing(self, manifest: Manifest) -> Iterator[tuple[tuple[str, str], Any]]:
        """Yield what the optimizer lacks, by parameter and key."""
        beginning = f"{self._name}.state."
        for entry in sorted(manifest.names):
            name, _, key = entry.removeprefix(beginning).rpartition(".")
            if not entry.startswith(beginning) or name not in self._held:
                continue
            parameter, group = self._held[name]
            if key in self._optimizer.state.get(parameter, {}):
                continue
            if entry in manifest.tensors:
                saved = manifest.tensors[entry]
                yield (name, key), _zeros(entry, saved.shape, DTYPES[saved.dtype], parameter, group)
            else:
                yield (name, key), manifest.common.get(entry)


def _zeros(entry: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """Return zeros where torch's optimizers have such state: beside the parameter, steps on the host."""
    if shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if shape and isinstance(parameter, DTensor):
        raise CheckpointError(
            entry,
            expected=f"state of the parameter's shape, {list(parameter.shape)}, or a single number",
            got=f"shape {list(shape)}, which can't be cut over ranks as the parameter is",
            fix="Let the optimizer make its state by a step with gradients of zero, and load it then.",
        )
    on_host = entry.endswith(".step") and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds of a group: all but its parameters, as JSON."""
    return {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
