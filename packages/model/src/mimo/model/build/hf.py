"""Read and write a whole module by the table of a Hugging Face family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mimo.hooks import CheckpointError
from mimo.model.spec import HfFamily, HfTensor, file_shapes, match_names


@torch.no_grad()
def read_hf(module: nn.Module, family: HfFamily, config: Any, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Fill a plain, whole module with published weights; return the paths of its parameters that the table leaves out.

    Nothing is changed if anything doesn't fit.

    Args:
        module: as the plugin's ``build`` makes it, on any device, of any floating dtype.
        family: of the weights.
        config: the module's.
        tensors: by the names that the files of a published folder have. Those of a `transformers` model's
            ``state_dict()`` may differ, for mixtures of experts at least; ``save_pretrained`` writes the right ones.

    Raises:
        CheckpointError: telling all that is missing, has another shape, or is read by no entry and not ignored.
    """
    held = dict(module.named_parameters())
    renamed, table = match_names(family, family.tensors(config), tensors)
    copies, constants = family.copies_there(config, renamed), family.constants_there(config, renamed)
    shapes = file_shapes(table, _shapes(held, table))
    problems = [f"{name} is missing" for name in shapes if name not in tensors]
    problems += [
        f"{name} has the shape {list(tensor.shape)}, not {list(shapes[name])}"
        for name, tensor in tensors.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    for name in sorted(set(tensors) - set(shapes)):
        if (first := copies.get(name)) is not None:
            is_copy = first in tensors and torch.equal(tensors[name], tensors[first])
            problem = "" if is_copy else f"not a copy of {first}, though it is tied"
        else:
            problem = left_over(family, config, name, partial(tensors.__getitem__, name), constants)
        problems += [f"{name} is {problem}"] if problem else []
    if problems:
        raise CheckpointError(
            f"weights of {family.model_type}", expected="those of this module", got="; ".join(problems)
        )
    for entry in table:
        target = held[entry.ours]
        target.copy_(take(entry, [tensors[name] for name in entry.names], tuple(target.shape)))
    named = {entry.ours for entry in table}
    return tuple(path for path in held if path not in named)


@torch.no_grad()
def write_hf(module: nn.Module, family: HfFamily, config: Any) -> dict[str, Tensor]:
    """Return a plain, whole module's weights as the family's published folders hold them; the inverse of `read_hf`."""
    held = dict(module.named_parameters())
    renamed, table = match_names(family, family.tensors(config), ())
    parts: dict[str, list[tuple[HfTensor, Tensor]]] = {name: [] for name in file_shapes(table, _shapes(held, table))}
    for entry in table:
        for name, part in zip(entry.names, give(entry, held[entry.ours].detach()), strict=True):
            parts[name].append((entry, part))
    written = {name: _joined(found) for name, found in parts.items()}
    return written | {name: tensor.clone() for name, tensor in family.constants_there(config, renamed).items()}


def left_over(
    family: HfFamily, config: Any, name: str, fetch: Callable[[], Tensor], constants: Mapping[str, Tensor]
) -> str:
    """Return what is wrong with leaving out a tensor that no entry of the table reads, nothing if it may be.

    Args:
        family: of the folder.
        config: the module's.
        name: there.
        fetch: returns the tensor; called where its values matter.
        constants: the family's, with the names of the folder.
    """
    if (numbers := constants.get(name)) is not None:
        fits = torch.equal(fetch().flatten().to(numbers), numbers.flatten())
        return "" if fits else "not of the numbers that follow from the settings"
    for pattern, values in family.fixed(config).items():
        if fnmatchcase(name, pattern):
            found = fetch()
            wanted = torch.tensor(values, device=found.device).to(found.dtype)
            fits = found.numel() == len(wanted) or len(wanted) == 1
            return "" if fits and bool((found.flatten() == wanted).all()) else f"not {list(values)}"
    needless = family.needless(name) or any(fnmatchcase(name, pattern) for pattern in family.ignored)
    return "" if needless else "read by nothing"


def take(entry: HfTensor, theirs: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return our parameter, of ``shape``, of the tensors that an entry names."""
    if not entry.stacked:
        return _take(entry, theirs[0], shape) if entry.lengths is None else torch.cat(list(theirs))
    return torch.stack([_take(entry, tensor, shape[1:]) for tensor in theirs])


def give(entry: HfTensor, ours: Tensor) -> list[Tensor]:
    """Return what each of the tensors that an entry names holds of our parameter; the inverse of `take`."""
    if entry.lengths is not None:
        return list(ours.split(entry.lengths))
    return [_give(entry, part) for part in (ours.unbind() if entry.stacked else [ours])]


def _take(entry: HfTensor, theirs: Tensor, shape: tuple[int, ...]) -> Tensor:
    found = theirs if entry.rows is None else theirs.narrow(entry.along, entry.rows[0], entry.rows[1] - entry.rows[0])
    found = found if entry.shape is None else found.reshape(entry.shape)
    return (found if entry.dims is None else found.permute(entry.dims)).reshape(shape)


def _give(entry: HfTensor, ours: Tensor) -> Tensor:
    shape = entry.part_shape(tuple(ours.shape))
    if entry.dims is None:
        return ours.reshape(shape)
    back = sorted(range(len(entry.dims)), key=entry.dims.__getitem__)
    return ours.reshape([shape[dim] for dim in entry.dims]).permute(back)


def _shapes(held: Mapping[str, Tensor], table: Sequence[HfTensor]) -> dict[str, tuple[int, ...]]:
    for entry in table:
        assert entry.ours in held, f"the table names {entry.ours}, which the module lacks"
    return {path: tuple(tensor.shape) for path, tensor in held.items()}


def _joined(parts: Sequence[tuple[HfTensor, Tensor]]) -> Tensor:
    """Return a tensor of theirs, of which these are entries and what they hold of it."""
    if len(parts) == 1:
        return parts[0][1].clone(memory_format=torch.contiguous_format)
    ordered = sorted(parts, key=lambda pair: pair[0].rows or (0, 0))
    return torch.cat([part for _, part in ordered], ordered[0][0].along)
