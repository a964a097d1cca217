"""The emulator: ranks run their lists in one process, with data, on in-order channels and with real groups.

It shares no code with the checker and has no actors: each rank runs by itself, one action at a time, a send goes to
the ranks of its route, the n-th send from one rank to another on a channel fills the n-th receive posted there,
whatever their microbatches, and a collective has exactly the ranks of its group. So it can refute the checker.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping

import attrs

from mimo.hooks import PlanError
from mimo.schedule.plan import Action, Plan, action_text, place_text, ranks_text, stage_text
from mimo.schedule.testing.network import Buffer, Network, Peers, Token
from mimo.schedule.testing.passes import EmulatedPasses
from mimo.topology import Edge, ModuleGraph, StageId


@attrs.frozen(kw_only=True)
class EmulationResult:
    """The result of a finished emulation.

    Args:
        actions: how many actions all ranks did.
        receive_buffers: for each rank the most receives posted and not used yet, including those that nobody fills.
        in_flight: for each rank the most microbatches in flight, summed over its modules: from the forward to the
            backward (the weight gradient, where split), or to the last send where the stage runs no backward.
    """

    actions: int
    receive_buffers: Mapping[int, int]
    in_flight: Mapping[int, int]


def emulate(plan: Plan, graph: ModuleGraph, *, seed: int = 0, peers: Peers | None = None) -> EmulationResult:
    """Run ``plan`` on emulated ranks, moving a random one at a time, and verify what each computes.

    Sends are unbuffered: a send waits until every rank that it has rows for has posted the next receive on the channel
    between the two. A receive waits until it is filled, but for a send of the same message right behind it, which is
    in one batch with it. Computations wait for their tensor and context group, except weight gradients, which have no
    collectives inside; recomputation is part of the backward, or of its first part. Reductions wait for all ranks of
    the stage, those of a tied parameter for the other copy's rank.

    Args:
        plan: the plan.
        graph: the module graph that it is for.
        seed: chooses which rank moves next.
        peers: which ranks exchange rows on an edge for a microbatch; by default all pairs on a boundary, and ranks of
            equal place on a module's own edges. Other pairs exchange nothing.

    Raises:
        PlanError: a computation gets rows of another microbatch, or has other microbatches than its pass; something is
            missing; or no rank can move any more. The text names the rank, or who waits for whom.
    """
    emulation = _Emulation.of(plan, graph, peers or _default_peers(graph))
    emulation.run(random.Random(seed))
    ranks = emulation.ranks.values()
    return EmulationResult(
        actions=sum(rank.position for rank in ranks),
        receive_buffers={rank.number: rank.peak_buffers for rank in ranks},
        in_flight={rank.number: rank.peak_in_flight for rank in ranks},
    )


def _default_peers(graph: ModuleGraph) -> Peers:
    def peers(edge: Edge, microbatch: int) -> Collection[tuple[int, int]]:
        del microbatch
        sources, targets = graph.stage_ranks(edge.source), graph.stage_ranks(edge.target)
        return tuple(itertools.product(sources, targets) if edge.is_boundary else zip(sources, targets, strict=True))

    return peers


@attrs.define(kw_only=True, eq=False)
class _Rank:
    """One rank: its list, its position, what it has computed and what it holds."""

    number: int
    actions: tuple[Action, ...]
    position: int = 0
    made: set[Token] = attrs.field(factory=set)
    reduced: list[tuple[StageId, str | None]] = attrs.field(factory=list)
    buffers: dict[tuple[str, StageId, int], Buffer] = attrs.field(factory=dict)
    unsent: dict[tuple[StageId, int], int] = attrs.field(factory=dict)
    present: set[tuple[StageId, int]] = attrs.field(factory=set)
    peak_buffers: int = 0
    peak_in_flight: int = 0

    @property
    def action(self) -> Action:
        """The current action."""
        return self.actions[self.position]

    @property
    def is_done(self) -> bool:
        """Whether its list is at its end."""
        return self.position == len(self.actions)

    @property
    def is_in_batch(self) -> bool:
        """Whether the current action sends what the one before receives: another rank's part of the same message."""
        before = self.actions[self.position - 1] if self.position else None
        return (
            before is not None
            and (before.kind, self.action.kind) == ("receive", "send")
            and (before.edge, before.microbatches) == (self.action.edge, self.action.microbatches)
            and before.stage_id != self.action.stage_id
        )

    def hold_made_before(self, graph: ModuleGraph, microbatches: int) -> None:
        """Take the rows of this step's microbatches that the previous step made."""
        for stage in graph.role(self.number).stages:
            targets = [graph.by_name[edge.target.module] for edge in graph.outputs(stage)]
            sends = sum(not target.prefetch for target in targets)
            if graph.by_name[stage.module].prefetch and sends:
                for microbatch in range(microbatches):
                    self.made.add(Token("rows", stage, self.number, microbatch))
                    self.present.add((stage, microbatch))
                    self.unsent[stage, microbatch] = sends
        self.peak_in_flight = len(self.present)

    def error(self, *, expected: str, got: str) -> PlanError:
        """Return an error at the current action."""
        return PlanError(place_text((self.number,), self.position, self.action), expected=expected, got=got)


@attrs.define(kw_only=True, eq=False)
class _Emulation:
    """All ranks, the network, and which ranks are present at which collective."""

    graph: ModuleGraph
    microbatches: int
    network: Network
    ranks: Mapping[int, _Rank]
    passes: EmulatedPasses
    meetings: dict[tuple[object, ...], dict[int, Action]] = attrs.field(factory=dict)

    @classmethod
    def of(cls, plan: Plan, graph: ModuleGraph, peers: Peers) -> _Emulation:
        """Return the emulation before its first action; refuse actions of stages or edges that a rank does not have."""
        edges = {edge.name: edge for edge in graph.edges}
        ends = {(edge.name, stage) for edge in graph.edges for stage in (edge.source, edge.target)}
        ranks = {rank: _Rank(number=rank, actions=plan.actions_of(rank)) for rank in graph.ranks}
        for rank in ranks.values():
            held = graph.role(rank.number).stages
            rank.hold_made_before(graph, plan.microbatches)
            for index, action in enumerate(rank.actions):
                stage, is_message = action.stage_id, action.kind in ("send", "receive")
                if stage not in held or (is_message and (action.edge, stage) not in ends):
                    raise PlanError(
                        place_text((rank.number,), index, action),
                        expected="a stage and edge of this rank",
                        got=f"a rank that holds {', '.join(map(stage_text, held))}",
                    )
        return cls(
            graph=graph,
            microbatches=plan.microbatches,
            network=Network(edges=edges, peers=peers),
            ranks=ranks,
            passes=EmulatedPasses.of(graph, plan.microbatches),
        )

    def run(self, choice: random.Random) -> None:
        """Move ranks until none can, then verify that everything is done."""
        awake = list(self.ranks)
        while awake:
            chosen = choice.randrange(len(awake))
            awake[chosen], awake[-1] = awake[-1], awake[chosen]
            rank = self.ranks[awake.pop()]
            if not rank.is_done and not self._absent(rank):
                awake += sorted(({rank.number} | self._advance(rank)) - set(awake))
        stuck = [rank for rank in self.ranks.values() if not rank.is_done]
        if stuck:
            waits = (
                f"rank {rank.number} at action {rank.position} ({action_text(rank.action)}) "
                f"waits for {ranks_text(sorted(self._absent(rank)))}"
                for rank in stuck
            )
            where = f"plan, {ranks_text(rank.number for rank in stuck)}"
            raise PlanError(where, expected="that every rank finishes", got="; ".join(waits))
        for rank in self.ranks.values():
            self._check_finished(rank)

    def _absent(self, rank: _Rank) -> set[int]:
        """Return the ranks that the present action of ``rank`` waits for; having come to a meeting counts at once."""
        action = rank.action
        unfilled = {sender for buffer in rank.buffers.values() for sender in buffer.awaited}
        if unfilled and not rank.is_in_batch:
            return unfilled
        if action.kind == "receive":
            return set()
        if action.kind == "send":
            return set(self.network.unposted(action, rank.number))
        key, group = self._meeting(rank)
        present = self.meetings.setdefault(key, {})
        present[rank.number] = action
        return set(group) - set(present)

    def _advance(self, rank: _Rank) -> set[int]:
        """Do the present action of ``rank``, which waits for nothing, and return the ranks that this may have freed."""
        action = rank.action
        if action.kind == "receive":
            buffer = self.network.post(action, rank.number)
            rank.buffers.update(((action.edge or "", action.stage_id, m), buffer) for m in action.microbatches)
            rank.peak_buffers = max(rank.peak_buffers, len(rank.buffers))
            rank.position += 1
            return set(buffer.awaited)
        if action.kind == "send":
            what = "gradient" if self.network.is_gradient(action) else "rows"
            tokens = [Token(what, action.stage_id, rank.number, m) for m in action.microbatches]
            self._require(rank, tokens)
            receivers = self.network.send(action, rank.number, tokens)
            self._release_sent(rank)
            rank.position += 1
            return set(receivers)
        key, group = self._meeting(rank)
        for member in group:
            came = self.meetings[key][member]
            if attrs.evolve(came, stage=action.stage if action.edge else came.stage) != action:  # ties are between two
                raise rank.error(expected="one collective of all", got=f"{action_text(came)} at rank {member}")
        del self.meetings[key]
        for member in group:
            self._compute(self.ranks[member])
            self.ranks[member].position += 1
        return set(group)

    def _inputs(self, rank: _Rank) -> Iterator[tuple[Buffer | None, tuple[str, StageId, int]]]:
        """Yield the buffers that the present computation uses, with the keys that name them; none where not posted."""
        action, stage = rank.action, rank.action.stage_id
        edges: tuple[Edge, ...] = ()
        if action.kind == "forward":
            edges = self.graph.inputs(stage)
        elif action.kind in ("backward", "input-gradient"):
            edges = tuple(edge for edge in self.graph.outputs(stage) if edge.gradient)
        for edge in edges:
            for microbatch in action.microbatches:
                key = (edge.name, stage, microbatch)
                yield rank.buffers.get(key), key

    def _meeting(self, rank: _Rank) -> tuple[tuple[object, ...], tuple[int, ...]]:
        """Return a name for the group that the present computation or reduction meets in, and its ranks."""
        action, module = rank.action, self.graph.by_name[rank.action.module]
        grid = module.grid
        if action.kind == "weight-gradient" and not module.gathers:  # a product of what its rank holds already
            return (action.module, action.stage, rank.number), (rank.number,)
        if action.kind != "reduce":
            ranks = module.stage_ranks(action.stage)
            first = ranks.index(rank.number) // module.meeting_size * module.meeting_size
            group = ranks[first : first + module.meeting_size]
        elif action.edge is None:
            group = grid.group_of(rank.number, ("dp", "cp", "tp"))
        else:
            column = grid.group_of(rank.number, ("pp",))
            group = (column[0], column[-1])
        return (action.module, action.kind == "reduce", action.edge, group), group

    def _compute(self, rank: _Rank) -> None:
        action, stage, number = rank.action, rank.action.stage_id, rank.number
        for buffer, key in list(self._inputs(rank)):
            other = self.network.edges[key[0]].source if action.kind == "forward" else self.network.edges[key[0]].target
            what = "rows" if action.kind == "forward" else "gradient"
            senders = self.network.partners(*key[:2], number, key[2])
            expected = {Token(what, other, sender, key[2]) for sender in senders}
            found = buffer.tokens[key[2]] if buffer is not None else set()
            if buffer is None or found != expected:
                texts = ["; ".join(sorted(map(str, tokens))) or "nothing" for tokens in (expected, found)]
                raise rank.error(expected=texts[0], got=texts[1] if buffer is not None else "nothing posted")
            del rank.buffers[key]
        made = {"forward": ("rows",), "backward": ("gradient", "weights"), "input-gradient": ("gradient",)}
        needed = {"backward": "rows", "input-gradient": "rows", "weight-gradient": "gradient"}
        for microbatch in action.microbatches:
            if action.kind in needed:
                self._require(rank, [Token(needed[action.kind], stage, number, microbatch)])
            for what in made.get(action.kind, ("weights",)):
                token = Token(what, stage, number, microbatch)
                if token in rank.made:
                    raise rank.error(expected="each microbatch once", got=f"{token} again")
                rank.made.add(token)
        self._take_pass(rank)
        if action.kind == "reduce":
            self._require(rank, [Token("weights", stage, number, m) for m in range(self.microbatches)])
            rank.reduced.append((stage, action.edge))
        elif action.kind == "forward":
            rank.present |= {(stage, microbatch) for microbatch in action.microbatches}
            rank.peak_in_flight = max(rank.peak_in_flight, len(rank.present))
            rank.unsent |= {(stage, microbatch): len(self.graph.outputs(stage)) for microbatch in action.microbatches}
            self._release_sent(rank)
        elif action.kind != "input-gradient":
            rank.present -= {(stage, microbatch) for microbatch in action.microbatches}

    def _take_pass(self, rank: _Rank) -> None:
        if misfit := self.passes.misfit(rank.action, rank.number):
            raise rank.error(expected=misfit[0], got=misfit[1])

    def _release_sent(self, rank: _Rank) -> None:
        """Let go of what the present action made or sent, if nobody needs it for a backward and all is sent."""
        action = rank.action
        if not self.graph.runs_backward(action.stage_id):
            for microbatch in action.microbatches:
                key = (action.stage_id, microbatch)
                rank.unsent[key] -= action.kind == "send"
                if not rank.unsent[key]:
                    rank.present.discard(key)

    def _require(self, rank: _Rank, tokens: Collection[Token]) -> None:
        for token in tokens:
            if token not in rank.made:
                raise rank.error(expected=f"{token} before it", got="none made so far")

    def _check_finished(self, rank: _Rank) -> None:
        """Refuse a list that left out a computation or a reduction, or used up less than was received."""
        reductions: list[tuple[StageId, str | None]] = []
        for stage in self.graph.role(rank.number).stages:
            module = self.graph.by_name[stage.module]
            whats = ("rows", "gradient", "weights") if self.graph.runs_backward(stage) else ("rows",)
            first = module.first(self.microbatches)
            served = range(first, first + self.microbatches)
            tokens = {Token(what, stage, rank.number, m) for what in whats for m in served}
            if tokens - rank.made:
                missing = min(map(str, tokens - rank.made))
                raise PlanError(f"plan, rank {rank.number}", expected=f"{missing}, at the end", got="none")
            if stage.stage in module.tied_stages:
                reductions.append((stage, f"{stage.module}.tied"))
            if module.trains[stage.stage]:
                reductions.append((stage, None))
        if sorted(reductions, key=str) != sorted(rank.reduced, key=str):
            raise PlanError(f"plan, rank {rank.number}", expected=f"reductions {reductions}", got=f"{rank.reduced}")
        if rank.buffers:
            left = ", ".join(f"{edge} microbatch {microbatch}" for edge, _, microbatch in rank.buffers)
            raise PlanError(f"plan, rank {rank.number}", expected="every receive used", got=f"left over: {left}")
