"""Low-rank adaptation beside linears: made after a module was built and planned, so that nothing of it changes.

Shapes: T rows, I inputs, O outputs, r the rank; of experts all have E before them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import attrs
from torch import Tensor, nn
from torch.nn import functional

from mimo.hooks import ConfigError
from mimo.model.build.create_on import create_on
from mimo.model.layers import GroupedLinear, Linear, LowRank
from mimo.model.parallel import Split
from mimo.model.spec import Lora, lora_names


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linears of a module by path: ours, those of experts, and PyTorch's own of whatever class.

    One whose weight is made of other parameters, as by `torch.nn.utils.parametrizations`, has none to stand beside.
    """
    for path, part in module.named_modules():
        own = part._parameters  # noqa: SLF001 - `read_merged` makes the attribute another
        if isinstance(part, Linear | GroupedLinear | nn.Linear) and "weight" in own:
            yield path, part


def _learning(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linears of a module as it was built that are to learn: not those of layers whose rows nobody reads."""
    return ((path, part) for path, part in linears(module) if part.get_parameter("weight").requires_grad)


def low_ranks(module: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Yield what stands beside linears, by the linear's path."""
    for path, part in linears(module):
        if isinstance(beside := part._modules.get("lora"), LowRank):  # noqa: SLF001 - of PyTorch's there is no attribute
            yield path, beside


def attach_lora(module: nn.Module, lora: Lora | None, splits: Mapping[str, Split]) -> dict[str, Split]:
    """Put low-rank adaptation beside the targets that a stage holds; return how all of its parameters lie.

    What is added to a product lies as the product does: where outputs are cut, each rank adds to its own from the whole
    of what goes through the middle, whose gradient is a sum over ranks; where inputs are cut, each brings its share of
    the middle, and ``up`` makes of it a share of every output.

    Args:
        module: a stage at full shapes, already planned.
        lora: what is asked for, None for nothing.
        splits: how its parameters lie, by path; those left out are whole on every rank.
    """
    found = dict(splits)
    if lora is None:
        return found
    for path, part in list(_learning(module)):
        if not lora.takes(path):
            continue
        weight = part.get_parameter("weight")
        *experts, outputs, inputs = weight.shape
        with create_on(weight.device):
            part.lora = LowRank(lora.rank, inputs, outputs, experts=experts, scale=lora.scale, dropout=lora.dropout)
        down, up = lora_names(path)
        found[down], found[up] = _splits(splits.get(f"{path}.weight", Split()))
    return found


def _splits(weight: Split) -> tuple[Split, Split]:
    """Return how ``down`` and ``up`` lie beside a weight [O, I], of experts [E, O, I], which has the same dims."""
    if weight.dim is None:
        return weight, weight
    cut, whole = weight, attrs.evolve(weight, dim=None, summed=True)
    cuts_outputs = weight.dim == (1 if weight.experts else 0)
    return (whole, cut) if cuts_outputs else (cut, whole)


def read_merged(module: nn.Module) -> None:
    """Let each linear with adaptation add it in its forward, and whoever else reads its weight find the sum.

    Some modules read the weights of their linears themselves, always or only where no gradient is asked for, as
    `torch.nn.MultiheadAttention` and `torch.nn.TransformerEncoderLayer` do.
    """
    for path, _ in list(low_ranks(module)):
        part = module.get_submodule(path)
        part.__class__ = _merged_class(cast("Any", type(part)))


@functools.cache
def _merged_class(original: type[Any]) -> type[nn.Module]:
    members: dict[str, object] = {"weight": property(_merged)}
    if original.forward is nn.Linear.forward:
        members["forward"] = _forward
    return type(original.__name__, (original,), members)


def _merged(self: nn.Module) -> Tensor:
    beside = self.get_submodule("lora")
    assert isinstance(beside, LowRank)
    weight = self._parameters["weight"]
    assert weight is not None
    return weight + beside.product()


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    beside = self.get_submodule("lora")
    weight = self._parameters["weight"]
    assert weight is not None
    product = functional.linear(x, weight, self.bias)
    added: Tensor = beside(x)
    return product + added


def check_targets(module: nn.Module, lora: Lora, *, name: str) -> None:
    """Refuse patterns that no linear of a whole module follows, and linears that cannot be adapted.

    Raises:
        ConfigError: by the path of the setting.
    """
    known = dict(_learning(module))
    where = f"modules.{name}.lora.targets"
    for pattern in lora.targets:
        if not any(Lora(rank=1, targets=(pattern,)).takes(path) for path in known):
            raise ConfigError(
                where,
                expected=f"patterns of the paths of linears inside {name}",
                got=f"{pattern!r}, which matches none",
                fix=f"Known here: {', '.join(_kinds(known))}." if known else f"{name} has no linears.",
            )
    for path, part in known.items():
        if not lora.takes(path):
            continue
        others = [one for one, held in module.named_parameters(remove_duplicate=False) if held is part.weight]
        if len(others) > 1:
            raise ConfigError(
                where,
                expected="linears with weights of their own",
                got=f"{path}, whose weight is also {next(one for one in others if one != f'{path}.weight')}",
                fix="Write patterns that leave it out.",
            )


def _kinds(paths: Iterable[str]) -> list[str]:
    """Return paths with a ``*`` for each number, once each."""
    return list(dict.fromkeys(".".join("*" if word.isdigit() else word for word in path.split(".")) for path in paths))
