"""Which parts a model of the library has, found by running it without its layers: no family is named anywhere.

Shapes: T rows, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from mimo.hooks import ConfigError, UserError
from mimo.model.runtime import ContextAxis
from mimo_transformers.family import base_path_of
from mimo_transformers.model.attention import PackedRows
from mimo_transformers.model.layers import about_to_run, stand_in

_ROWS = 4
_MOST_RETURNED = 3


@attrs.frozen(kw_only=True)
class Parts:
    """Where the parts of a model lie, each a path inside of its base model (the model without head).

    Args:
        layers: the list of layers.
        before: modules with parameters that run before the first layer, but for the input embedding.
        after: modules with parameters that run behind the last layer.
        buffered: modules with buffers alone, such as rotary positions, that layers read the results of.
        returns: how long the tuples are that layers return, 0 for none.
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    buffered: tuple[str, ...]
    returns: int


def find_parts(network: Any) -> Parts:
    """Return the parts of a model with a head, and leave it without its layers.

    Args:
        network: of the library, on any device; used up.

    Raises:
        ConfigError: it is not made of an embedding, layers, and what comes before and after them.
    """
    base_path = base_path_of(network)
    base, config = network.get_submodule(base_path), network.config
    layers_path = _layers_path(base, config.num_hidden_layers)
    layers = base.get_submodule(layers_path)
    embedding = network.get_input_embeddings()
    beside = {
        path: part
        for path, part in base.named_modules()
        if part is not embedding and not f"{path}.".startswith(f"{layers_path}.") and _own(part)
    }
    if "" in beside:
        raise _refusal(config, f"parameters of its own in {type(base).__name__}")
    head, prefix = network.get_output_embeddings(), f"{base_path}."
    outside = [
        path
        for path, part in network.named_modules()
        if _own(part) and part is not head and not f"{path}.".startswith(prefix)
    ]
    if outside:
        raise _refusal(config, f"{', '.join(outside)} behind the model and before its output")
    for layer in layers:
        stand_in(layer, resumes=False, finishes=False, returns=0)
    problem = ""
    for returns in range(_MOST_RETURNED + 1):
        for layer in layers:
            layer.returns = returns
        calls, result = _run(network, beside, layers)
        if isinstance(result, Tensor) and tuple(result.shape) == (1, _ROWS, config.hidden_size):
            break
        problem = problem or str(result)
    else:
        raise _refusal(config, f"a forward that fails without layers: {problem}")
    order = [path for path, _ in calls]
    first, last = order.index(""), len(order) - 1 - order[::-1].index("")
    with_parameters = [path for path, part in beside.items() if any(True for _ in part.parameters(recurse=False))]
    before, amid, after = (frozenset(order[:first]), frozenset(order[first:last]), frozenset(order[last:]))
    astray = [path for path in with_parameters if path in amid or (path in before) == (path in after)]
    if astray:
        raise _refusal(config, f"{', '.join(astray)} used neither before its layers alone nor behind them")
    return Parts(
        layers=layers_path,
        before=tuple(path for path in with_parameters if path in before),
        after=tuple(path for path in with_parameters if path in after),
        buffered=tuple(path for path in beside if path not in with_parameters),
        returns=returns,
    )


def _own(part: nn.Module) -> bool:
    return any(True for _ in part.parameters(recurse=False)) or any(True for _ in part.buffers(recurse=False))


def _layers_path(base: nn.Module, count: int) -> str:
    """Return the path of the outermost list of as many modules as there are layers."""
    for path, part in sorted(base.named_modules(), key=lambda pair: pair[0].count(".")):
        if isinstance(part, nn.ModuleList) and len(part) == count and path:
            return str(path)
    raise _refusal(base.config, f"no list of {count} layers")


def _run(network: Any, beside: dict[str, nn.Module], layers: Any) -> tuple[list[tuple[str, nn.Module]], Any]:
    """Return in which order modules were called, layers with an empty path, and what came out or went wrong."""
    calls: list[tuple[str, nn.Module]] = []
    hooks = [
        part.register_forward_pre_hook(lambda part, _given, path=path: calls.append((path, part)))
        for path, part in [*beside.items(), *(("", layer) for layer in layers)]
    ]
    device = next((one.device for one in network.parameters()), torch.device("cpu"))
    positions = torch.arange(_ROWS, device=device)
    rows = PackedRows(lengths=(_ROWS,), positions=positions, context=ContextAxis.single(), cache=None, resumed=None)
    try:
        with torch.no_grad():
            x = torch.zeros(1, _ROWS, network.config.hidden_size, device=device)
            found = run_base(network.get_submodule(base_path_of(network)), layers, x, rows)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model of the library does without its layers
        return calls, f"{type(error).__name__}: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    return (calls, found) if any(not path for path, _ in calls) else (calls, "no layer was called")


def run_base(base: Any, layers: Iterable[nn.Module], x: Tensor, rows: PackedRows) -> Any:
    """Return the last hidden rows [1, T, H] of a base model for embedded rows ``x`` [1, T, H].

    Args:
        base: of the library.
        layers: its, each a `BridgedLayer`.
        x: embedded.
        rows: that they are.
    """
    positions = rows.positions if rows.places is None else rows.places.T  # [T] or [3, T]
    with about_to_run(layers, rows):
        found = base(inputs_embeds=x, position_ids=positions.unsqueeze(-2), use_cache=False)
    return found.last_hidden_state


def _refusal(config: Any, got: str) -> ConfigError:
    return ConfigError(
        "modules.language.config.model_type",
        expected="a model of an input embedding, layers one after the other, and what comes before and behind them",
        got=f"{config.model_type!r} with {got}",
        fix="plugins/transformers/README.md lists those that can.",
    )
