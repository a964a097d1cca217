"""Where numbers that fill a module of ours lie in tensors that the library writes of the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError
from mimo.model import HfTensor


@attrs.frozen(kw_only=True)
class Location:
    """That one of theirs, or so many rows of it, is one of ours, or one index of it.

    Args:
        ours: path of our parameter, or buffer of whole numbers.
        index: of our dim 0 that it is, None for all.
        cut: which rows of ours it is, from and before which, where it is several and not all; None otherwise.
        theirs: name there.
        order: how many others lie before it along the dim.
        along: that dim.
        alone: whether it is all of theirs.
        dims: order of their dims in which ours has them, None for the same.
    """

    ours: str
    index: int | None
    cut: tuple[int, int] | None = None
    theirs: str
    order: int
    along: int
    alone: bool
    dims: tuple[int, ...] | None

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape there of our parameter of a shape, or of an index of it."""
        each = shape if self.index is None else shape[1:]
        return HfTensor(ours=self.ours, theirs=self.theirs, dims=self.dims).part_shape(each)


@attrs.frozen(kw_only=True)
class Numbers:
    """Which of ours each number is, and which element of it.

    Args:
        paths: ours, parameters and buffers.
        shapes: theirs.
        owner: [N] of each number the index of a path, -1 for none.
        place: [N] the element.
    """

    paths: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    owner: Tensor
    place: Tensor

    @classmethod
    def of(cls, ours: nn.Module, paths: Sequence[str], *, whole: int, count: int) -> Numbers:
        """Return those of a module that has been filled with numbers.

        Args:
            ours: the module.
            paths: of its parameters that have been.
            whole: the first number that a buffer of whole numbers has been filled with.
            count: of all numbers.
        """
        owner, place = torch.full((count,), -1), torch.zeros(count, dtype=torch.long)
        parameters = dict(ours.named_parameters())
        held: dict[str, Tensor] = {path: parameters[path] for path in paths if path in parameters}
        held |= {path: buffer for path, buffer in ours.named_buffers() if _is_filled(buffer, whole)}
        for index, parameter in enumerate(held.values()):
            numbers = parameter.detach().long().flatten()
            owner[numbers] = index
            place[numbers] = torch.arange(len(numbers))
        return cls(paths=list(held), shapes=[tuple(one.shape) for one in held.values()], owner=owner, place=place)

    def knows_not(self, theirs: Mapping[str, Tensor]) -> Callable[[str], bool]:
        """Return a function of a name: whether none of the numbers in that tensor is one of ours."""
        return lambda name: bool((self.owner[theirs[name]] < 0).all())

    def locations(self, theirs: Mapping[str, Tensor]) -> Iterator[Location]:
        """Yield where ours lie in tensors of numbers.

        Raises:
            ConfigError: one of them isn't made of parts of ours.
        """
        for name, numbers in theirs.items():
            found = self._of_tensor(name, numbers)
            if found is None:
                expected = "a family of which a published tensor holds parameters as they are, or transposed"
                raise ConfigError("config.model_type", expected=expected, got=f"another one: {name}")
            yield from found

    def _of_tensor(self, name: str, numbers: Tensor) -> list[Location] | None:
        owners = self.owner[numbers]
        for along in range(numbers.dim() or 1):
            lines = owners.movedim(along, 0).reshape(owners.shape[along], -1) if numbers.dim() else owners.view(1, 1)
            if not bool((lines == lines[:, :1]).all()):
                continue
            _, counts = torch.unique_consecutive(lines[:, 0], return_counts=True)
            parts = numbers.split(counts.tolist(), along) if numbers.dim() else [numbers]
            found = [self._part(name, part, order, along, len(parts) == 1) for order, part in enumerate(parts)]
            if all(found):
                return [place for place in found if place is not None]
        return None

    def _part(self, name: str, numbers: Tensor, order: int, along: int, alone: bool) -> Location | None:  # noqa: FBT001 - one call
        owner = int(self.owner[numbers].flatten()[0])
        if owner < 0:
            return None
        shape, places = self.shapes[owner], self.place[numbers]
        for index in (None, int(places.flatten()[0]) // max(1, len(places.flatten()))):
            each = shape if index is None else shape[1:]
            first = 0 if index is None else index * places.numel()
            wanted = torch.arange(first, first + places.numel())
            for dims in _orders(places.dim()):
                turned = places if dims is None else places.permute(dims)
                if tuple(turned.shape) == each and torch.equal(turned.flatten(), wanted):
                    return Location(
                        ours=self.paths[owner],
                        index=index,
                        theirs=name,
                        order=order,
                        along=along,
                        alone=alone,
                        dims=dims,
                    )
        cut = _rows(places, shape) if alone else None
        if cut is None:
            return None
        return Location(
            ours=self.paths[owner], index=None, cut=cut, theirs=name, order=order, along=along, alone=alone, dims=None
        )


def _rows(places: Tensor, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return which rows of a tensor of a shape its elements ``places`` are; None if they aren't whole rows in order."""
    if not shape or places.shape[1:] != shape[1:]:
        return None
    start = int(places.flatten()[0])
    low, rest = divmod(start, max(1, places[0].numel()))
    in_order = torch.equal(places.flatten(), torch.arange(start, start + places.numel()))
    return (low, low + len(places)) if in_order and not rest else None


def is_whole(tensor: Tensor) -> bool:
    """Tell whether a tensor is of whole numbers, with room for any."""
    return tensor.dtype in (torch.int64, torch.int32)


def _is_filled(buffer: Tensor, first: int) -> bool:
    flat = buffer.flatten()
    if not is_whole(buffer) or not len(flat) or int(flat[0]) < first:
        return False
    return torch.equal(flat.long(), torch.arange(int(flat[0]), int(flat[0]) + len(flat)))


def _orders(dims: int) -> Sequence[tuple[int, ...] | None]:
    """Return the orders of dims to look for: as they are, and the last two exchanged."""
    return (None,) if dims <= 1 else (None, (*range(dims - 2), dims - 1, dims - 2))
