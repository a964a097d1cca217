"""What one rank needs to run a step again after a restart, as bytes that nothing is executed to read.

Eight bytes: the length N of the text, little-endian. N bytes: JSON text. Then the arrays one after the other, each from
a multiple of eight bytes on, numbers little-endian and in rows. The text's ``arrays`` tell ``dtype``, ``shape`` and
``begin`` of each, counted from the end of the text; everything else in it names arrays by their place in that list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast, get_args

import attrs
import torch
from torch import Tensor

from mimo.hooks import CheckpointError, ItemInfo, ItemRole, RunError
from mimo.trainer.batch.saved_samples import KeptSamples
from mimo.trainer.step.probe import Computation, Kind

_HEAD, _ALIGNED = 8, 8
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        str(dtype).removeprefix("torch."): dtype
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        )
    }
)

_NO_RECORD = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What reading anything else raises; RecursionError is a RuntimeError."""


@attrs.frozen(kw_only=True)
class RankRecord:
    """One rank's part of a step.

    Args:
        samples: what it read of them.
        norms: what it saw of its computations.
        generators: states of torch's generators before the step, by device type.
        buffers: of its modules before the step, by name.
    """

    samples: KeptSamples
    norms: Mapping[Computation, float]
    generators: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def to_bytes(self) -> Tensor:
        """Return it as bytes [B].

        Raises:
            RunError: an encoder prepares items with numbers of a kind that has no place there.
        """
        arrays = _Arrays()
        kept = self.samples
        text = {
            "numbers": list(kept.numbers),
            "broken": [[place, list(indices)] for place, indices in kept.broken.items()],
            "samples": [
                {
                    "number": number,
                    "where": kept.where(number),
                    "tokens": arrays.add(torch.tensor(kept.tokens(number), dtype=torch.int64)),
                    "weights": None
                    if (weights := kept.weights(number)) is None
                    else arrays.add(torch.tensor(weights, dtype=torch.float64)),
                    "ends": kept.ends(number),
                    "items": [[info.index, info.modality, list(info.size), info.role] for info in kept.infos(number)],
                }
                for number in dict.fromkeys(kept.numbers)
                if number in kept.kept_tokens
            ],
            "prepared": [
                [*key, {name: arrays.add(value) for name, value in item.items()}] for key, item in kept.items.items()
            ],
            "deeds": [
                [computation.kind, computation.module, computation.stage, list(computation.microbatches)]
                for computation in self.norms
            ],
            "norms": arrays.add(torch.tensor(list(self.norms.values()), dtype=torch.float64)),
            "generators": {name: arrays.add(state) for name, state in self.generators.items()},
            "buffers": {name: arrays.add(buffer) for name, buffer in self.buffers.items()},
        }
        head = json.dumps({**text, "arrays": arrays.entries}, allow_nan=False).encode()
        size = torch.tensor([len(head)]).view(torch.uint8)
        return torch.cat([size, torch.frombuffer(bytearray(head), dtype=torch.uint8), *arrays.pieces])

    @classmethod
    def from_bytes(cls, data: Tensor, where: str) -> RankRecord:
        """Return what `to_bytes` wrote; nothing is allocated that ``data`` does not hold.

        Args:
            data: bytes [B].
            where: names them in errors.

        Raises:
            CheckpointError: they are something else.
        """
        try:
            return _read(data)
        except _NO_RECORD as error:
            raise CheckpointError(
                where,
                expected="the record of a step",
                got=f"{data.numel()} bytes that are none ({error})",
                fix="Load another checkpoint, or leave the step out by rerun.skip_steps.",
            ) from error


class _Arrays:
    """Arrays that are being written."""

    def __init__(self) -> None:
        self.entries: list[Mapping[str, Any]] = []
        self.pieces: list[Tensor] = []
        self._size = 0

    def add(self, value: Tensor) -> int:
        """Return the place of an array in the list."""
        held = value.detach().cpu().contiguous()
        name = str(held.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise RunError(
                "rerun", expected=f"numbers of a kind of {', '.join(_DTYPES)} in what an encoder prepares", got=name
            )
        data = held.reshape(-1).view(torch.uint8) if held.numel() else held.new_empty(0, dtype=torch.uint8)
        self.entries.append({"dtype": name, "shape": list(held.shape), "begin": self._size})
        filled = -len(data) % _ALIGNED
        self.pieces += [data, data.new_zeros(filled)]
        self._size += len(data) + filled
        return len(self.entries) - 1


def _read(data: Tensor) -> RankRecord:
    length = int(data[:_HEAD].clone().view(torch.int64)[0])
    if not 0 <= length <= data.numel() - _HEAD:
        raise ValueError("its text is longer than all")
    text = json.loads(bytes(data[_HEAD : _HEAD + length].tolist()))
    body = data[_HEAD + length :]
    arrays = [_array(entry, body) for entry in text["arrays"]]
    broken = {int(place): _integers(indices) for place, indices in text.get("broken", ())}  # likewise
    kept = KeptSamples(numbers=_integers(text["numbers"]), broken=broken)
    for sample in text["samples"]:
        number = int(sample["number"])
        kept.kept_tokens[number] = tuple(arrays[sample["tokens"]].tolist())
        weights = sample.get("weights")  # a record of an earlier version has none
        kept.kept_weights[number] = None if weights is None else tuple(arrays[weights].tolist())
        ends = sample.get("ends")  # likewise
        kept.kept_ends[number] = None if ends is None else _integers(ends)
        kept.kept_places[number] = str(sample["where"])
        kept.kept_infos[number] = tuple(
            ItemInfo(sample=number, index=int(index), modality=str(modality), size=_integers(size), role=_role(*role))
            for index, modality, size, *role in sample["items"]
        )
    for module, number, index, item in text["prepared"]:
        kept.items[str(module), int(number), int(index)] = {name: arrays[at] for name, at in item.items()}
    computations = [_computation(*computation) for computation in text["deeds"]]
    norms = arrays[text["norms"]].tolist()
    return RankRecord(
        samples=kept,
        norms=dict(zip(computations, norms, strict=True)),
        generators={name: arrays[at] for name, at in text["generators"].items()},
        buffers={name: arrays[at] for name, at in text["buffers"].items()},
    )


def _role(role: Any = "") -> ItemRole:
    """Return an item's role; a record of an earlier version has none."""
    if role not in get_args(ItemRole):
        raise ValueError(f"{role!r} is no role")
    return cast("ItemRole", role)


def _array(entry: Mapping[str, Any], body: Tensor) -> Tensor:
    dtype, shape, begin = _DTYPES[entry["dtype"]], _integers(entry["shape"]), int(entry["begin"])
    size = math.prod(shape) * dtype.itemsize
    if not 0 <= begin <= begin + size <= body.numel():
        raise ValueError("an array reaches beyond its end")
    return body[begin : begin + size].clone().view(dtype).view(shape)


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    found = tuple(map(int, values))
    if any(value < 0 for value in found):
        raise ValueError("a number is negative")
    return found


def _computation(kind: str, module: str, stage: int, microbatches: Sequence[int]) -> Computation:
    (known,) = (one for one in get_args(Kind) if one == kind)
    return Computation(kind=known, module=str(module), stage=int(stage), microbatches=_integers(microbatches))
