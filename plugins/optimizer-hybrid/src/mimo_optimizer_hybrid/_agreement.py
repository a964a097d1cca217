"""What ranks agree on before any builds an optimizer: the share of the host, and that there is memory for all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from mimo.optimizer import Share
from mimo.topology.collectives import all_gather_single
from mimo_optimizer_hybrid._balance import balanced_fraction
from mimo_optimizer_hybrid._config import CpuOffloadConfig
from mimo_optimizer_hybrid._memory import Asked, Pool, check_host_memory, pools
from mimo_optimizer_hybrid._readers import Readers, readers_of
from mimo_optimizer_hybrid._threads import own_cores, share_of_cores
from mimo_optimizer_hybrid.optimizer import count_numbers, device_of, divide


@attrs.frozen(kw_only=True)
class BuildPlan:
    """By what an optimizer is built.

    Args:
        config: its settings, of which ``fraction`` and ``threads`` are those that it is to have.
        names: of its parameters, in the order in which they are stepped.
        kept: of the first of them, those that the host holds only if it holds all.
        readers: who wait for them.
        overlaps: whether the next forward may run while they are stepped, as each has a reader that waits.
    """

    config: CpuOffloadConfig
    names: tuple[str, ...]
    kept: int
    readers: tuple[Readers, ...]
    overlaps: bool


def agree(shares: Sequence[Share], device: torch.device) -> list[BuildPlan]:
    """Decide how this rank's parameters are stepped. Call it on every rank of the world, whether it has shares or not.

    Args:
        shares: what this rank's optimizers are to step.
        device: where the process group works.

    Raises:
        ConfigError: what ranks of a machine hold together is more than its memory; on all ranks.
    """
    shares = _with_threads(shares, device)
    agreed = [_agreed(share, fraction) for share, fraction in zip(shares, _fractions(shares, device), strict=True)]
    needed = 0
    for share, one in zip(shares, agreed, strict=True):
        assert one.config.fraction != "auto"
        parameters = share.part.parameters
        needed += divide(
            [parameters[name] for name in one.names],
            fraction=one.config.fraction,
            bucket_bytes=one.config.bucket_bytes,
            staging_bytes=one.config.staging_bytes,
            kept=one.kept,
            device=device_of(parameters),
        ).bytes.host
    ask_together(needed, pools(), device)
    return agreed


def ask_together(needed: int, own: Iterable[Pool], device: torch.device) -> None:
    """Refuse on all ranks of the world, before any has taken memory, if one of them lacks some.

    Args:
        needed: bytes of host memory that this rank is about to take.
        own: what bounds it. Of the ranks that share a pool, the last to look has seen all that others had taken before.
        device: where the process group works.

    Raises:
        ConfigError: with what is needed and what is free.
    """
    rows = torch.tensor([(pool.key, pool.free, needed) for pool in own], dtype=torch.int64)
    asked: dict[int, Asked] = {}
    everybody = _gather_rows(rows, device)
    for rank, found in enumerate(everybody):
        for key, free, bytes_ in found.tolist():
            before = asked.get(key, Asked(ranks=(), needed=0, free=free))
            asked[key] = Asked(
                ranks=(*before.ranks, *([rank] if bytes_ else [])),
                needed=before.needed + bytes_,
                free=min(before.free, free),
            )
    check_host_memory(list(asked.values()), world=len(everybody))


def _with_threads(shares: Sequence[Share], device: torch.device) -> list[Share]:
    """Return the shares with the number of threads of each, whatever its setting leaves to this."""
    own = own_cores()
    keys = torch.cat(_gather_rows(torch.tensor([[cores.key] for cores in own]), device)).flatten().tolist()
    threads = share_of_cores(own, keys, optimizers=len(shares))
    return [
        attrs.evolve(share, config=attrs.evolve(share.config, threads=share.config.threads or threads))
        for share in shares
    ]


def _fractions(shares: Sequence[Share], device: torch.device) -> list[float]:
    """Return the fraction of each share: one for all ranks of a module, so that its copies stay equal."""
    tried = [share for share in shares if share.config.fraction == "auto"]
    best = math.nan
    if tried:
        numbers = max(count_numbers(share.part.parameters.values()) for share in tried)
        best = balanced_fraction(device_of(tried[0].part.parameters), numbers, threads=tried[0].config.threads)
    found = torch.cat(_gather_rows(torch.tensor([[best]], dtype=torch.float64), device))
    means = [found[list(share.part.grid.ranks)].nanmean().item() for share in shares]
    given = [share.config.fraction for share in shares]
    return [mean if one == "auto" else one for mean, one in zip(means, given, strict=True)]


def _agreed(share: Share, fraction: float) -> BuildPlan:
    parameters = share.part.parameters
    readers = readers_of(share.prepared)
    waited = [name for one in readers for name in one.order if name in parameters]
    # What another stage holds a copy of comes first, so that the halves of both stages can be cut behind it.
    names = sorted(dict.fromkeys([*waited, *parameters]), key=lambda name: name not in share.part.tied)
    return BuildPlan(
        config=attrs.evolve(share.config, fraction=fraction),
        names=tuple(names),
        kept=len(share.part.tied),
        readers=readers,
        overlaps=share.config.overlap and set(waited) == parameters.keys(),
    )


def _gather_rows(rows: Tensor, device: torch.device) -> list[Tensor]:
    """Return the rows [n, k] of every rank of the world, of which each may have another number."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [rows]
    world = dist.get_world_size()
    counts = torch.empty(world, dtype=torch.int64, device=device)
    all_gather_single(counts, torch.tensor([len(rows)], device=device))
    most = int(counts.max())
    padded = torch.zeros(most, rows.shape[1], dtype=rows.dtype, device=device)
    padded[: len(rows)] = rows
    everybody = padded.new_empty(world * most, rows.shape[1])
    all_gather_single(everybody, padded)
    return [found[:count].cpu() for found, count in zip(everybody.split(most), counts.tolist(), strict=True)]
