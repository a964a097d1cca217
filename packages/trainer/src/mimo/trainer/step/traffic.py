"""Rows and bytes on every edge by rank: what a step is going to send, and what the ranks have sent in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch
from torch import Tensor

from mimo.hooks import EdgeTraffic
from mimo.schedule import Route, Traffic
from mimo.topology import Edge
from mimo.trainer.batch.step_data import StepData
from mimo.trainer.batch.step_samples import StepSamples
from mimo.trainer.cost.sample_costs import sample_costs
from mimo.trainer.job.job import Job

_KEYS = tuple(field.name for field in attrs.fields(Traffic))


@attrs.frozen(kw_only=True)
class ExpectedTraffic:
    """What one step is going to send on an edge.

    ``least`` is how many rows must cross a boundary: each once to the one tensor group that needs it, or, where tensor
    ranks hold slices, to the one rank; those that all its ranks have already not at all. None between the stages of one
    module, where each rank sends to its like.
    """

    edge: Edge
    traffic: EdgeTraffic
    least: int | None


def expect_traffic(job: Job, step: int) -> Iterator[ExpectedTraffic]:
    """Yield what ``step`` is going to send on each edge, from ids and headers alone.

    Raises:
        DataError: a sample of the step cannot be laid out.
    """
    assert job.train is not None, "this job was resolved without training data"
    samples = StepSamples(job, job.sample_order())
    data = StepData.of_step(job, job.train, lambda: samples.numbers(step), costs=sample_costs(job))
    for edge in job.graph.edges:
        routes = {rank: [batch.route(edge, rank) for batch in data.microbatches] for rank in job.edge_ranks(edge)}
        row_bytes, by_rank = job.row_bytes(edge), [(0,) * len(_KEYS)] * job.world
        for rank, batches in routes.items():
            each = (Traffic.of(route, rank=rank, row_bytes=row_bytes, gradient=edge.gradient) for route in batches)
            by_rank[rank] = attrs.astuple(sum(each, Traffic()))
        least = None
        if not job.is_inside(edge):
            least = sum(sum(rows) for batch in data.microbatches for rows in batch.sent(edge))
            least -= sum(_staying(job, edge, rank, route) for rank, batches in routes.items() for route in batches)
        yield ExpectedTraffic(edge=edge, traffic=_by_key(by_rank), least=least)


class TrafficReport:
    """Puts what each rank has sent into the step's one message, and reads there what all ranks have.

    Args:
        job: the job.
        rank: this rank.
        device: where the message is made up.
    """

    def __init__(self, job: Job, *, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._world = job.world
        self._device = device
        edges = job.graph.edges if job.settings.logging.edges else ()
        self._names = {edge.name: f"edges.{edge.name}" for edge in edges}

    @property
    def extra_sums(self) -> Mapping[str, int]:
        """Names of the sums, and how many values each has; none where settings do not log edges."""
        return dict.fromkeys(self._names.values(), self._world * len(_KEYS))

    def share(self, sent: Mapping[str, Traffic]) -> Mapping[str, Tensor]:
        """Return this rank's part of the sums: what it has sent on its edges."""
        found = {}
        for edge, name in self._names.items():
            if edge in sent:
                values = torch.zeros(self._world, len(_KEYS), dtype=torch.float64, device=self._device)
                values[self._rank] = torch.tensor(attrs.astuple(sent[edge]), dtype=torch.float64)
                found[name] = values.flatten()
        return found

    def read(self, sums: Mapping[str, Tensor]) -> Mapping[str, EdgeTraffic]:
        """Return the sums of all ranks by edge."""
        return {edge: _by_key(sums[name].view(-1, len(_KEYS)).long().tolist()) for edge, name in self._names.items()}


def _by_key(by_rank: Iterable[Iterable[int]]) -> EdgeTraffic:
    columns = zip(*by_rank, strict=True)
    return EdgeTraffic(**{key: tuple(column) for key, column in zip(_KEYS, columns, strict=True)})


def _staying(job: Job, edge: Edge, rank: int, route: Route) -> int:
    """Return how many rows need not cross because this rank has them, each counted on one rank of a tensor group."""
    target = job.module(edge.target.module)
    if rank not in job.graph.stage_ranks(edge.target):
        return 0
    place = target.grid.coordinates(rank)
    own = [span for piece in route.receives if piece.peer == rank for span in piece.spans]
    slices = route.target_join[place.tp] if route.target_join else ()
    brought = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in own for b in slices)
    kept = sum(stop - start for start, stop in own) - brought  # which all ranks of the group have
    return brought + (kept if place.tp == 0 or target.sequence_parallel else 0)
