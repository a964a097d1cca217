"""The simulator: from a plan and costs, when each rank does what, and for what it waits.

The lists run as in the checker, with a clock for each actor. The plan fixes which action waits for which, so each time
is a sum of costs or a maximum of other times, in whatever order the actors advance: the work is linear in actions, and
integers and fractions stay exact.
"""

from __future__ import annotations

from collections import deque

from mimo.hooks import PlanError
from mimo.schedule.checker import ActivationMemory, stage_facts
from mimo.schedule.plan import Action, Costs, Plan, Transfer, place_text
from mimo.schedule.simulator.clock import PEERS, TRANSFER, Clock, Meeting, Message, SendQueue
from mimo.schedule.simulator.cost_lookup import CostLookup
from mimo.schedule.simulator.simulation import Simulation
from mimo.topology import ModuleGraph


def simulate(plan: Plan, graph: ModuleGraph, costs: Costs, name: str = "simulated") -> Simulation:
    """Return when each rank does what in a step of ``plan``, and for what it waits.

    Each rank does its list in order. A computation begins once its messages are there, and, if it has
    collectives inside, once all their ranks are there; so does a reduction. Receives are posted in no time. A message
    leaves when its send is reached, all receivers have posted, and the sender's earlier messages in this direction of
    the edge have arrived; meanwhile the sender continues. Without overlap the sender waits until it has arrived, and
    each receiver is busy with it as long before the computation that needs it, unless it already waited for it at that
    time.

    Args:
        plan: one that `check` accepts.
        graph: the module graph that it is for.
        costs: of that graph.
        name: of the timeline.

    Raises:
        PlanError: some rank can't finish.
    """
    run = _SimulatorRun(plan, graph, costs)
    run.run()
    return Simulation.of(name, graph.ranks, run.clocks, run.transfers)


class _SimulatorRun:
    """The lists while they run."""

    def __init__(self, plan: Plan, graph: ModuleGraph, costs: Costs) -> None:
        facts = stage_facts(graph, costs)
        has_bytes = any(fact.has_bytes for fact in facts.values())
        lists = {actor.ranks: actor.actions for actor in plan.actors}
        self.clocks = [
            Clock.of(
                actor.ranks,
                lists[actor.ranks],
                ActivationMemory(facts, lists[actor.ranks], plan.microbatches) if has_bytes else None,
            )
            for actor in graph.actors
        ]
        self.transfers: list[Transfer] = []
        self._costs = CostLookup(graph, costs)
        self._overlaps = costs.overlaps
        self._messages: dict[tuple[str, bool, int], Message] = {}
        self._queues: dict[tuple[str, bool, int], SendQueue] = {}
        self._meetings: dict[tuple[object, ...], tuple[Meeting, list[int]]] = {}
        self._awake = deque(range(len(self.clocks)))

    def run(self) -> None:
        """Advance every actor as far as possible, until all lists are done."""
        while self._awake:
            self._move(self._awake.popleft())
        stuck = next((clock for clock in self.clocks if clock.position < len(clock.actions)), None)
        if stuck is not None:
            raise PlanError(
                place_text(stuck.ranks, stuck.position, stuck.actions[stuck.position]),
                expected="a plan whose every rank finishes",
                got="a halt here",
                fix="check(plan, graph) says who waits for whom.",
            )
        end = max((clock.now for clock in self.clocks), default=0)
        for clock in self.clocks:
            clock.end(end)

    def _move(self, number: int) -> None:
        clock = self.clocks[number]
        actions, length = clock.actions, len(clock.actions)
        while clock.position < length:
            action = actions[clock.position]
            if action.kind == "receive":
                self._post(clock, action)
            elif action.kind == "send":
                if not self._send(number, clock, action):
                    return
            elif not self._work(number, clock, action):
                return
            clock.position += 1

    def _message(self, edge: str, action: Action, *, gradient: bool) -> Message:
        """Return the message of a send or receive; it may carry several microbatches."""
        message = self._messages.get((edge, gradient, action.microbatches[0]))
        if message is None:
            direction = self._costs.direction(edge, gradient=gradient, microbatches=len(action.microbatches))
            message = Message(direction, direction.receivers, direction.senders)
            for microbatch in action.microbatches:
                self._messages[edge, gradient, microbatch] = message
        return message

    def _post(self, clock: Clock, action: Action) -> None:
        edge = action.edge or ""
        message = self._message(edge, action, gradient=not self._costs.is_target(edge, action))
        message.unposted -= 1
        message.posted = max(message.posted, clock.now)
        if not message.unposted:
            self._wake(message)
            for queue in message.queues:
                self._drain(queue)

    def _send(self, number: int, clock: Clock, action: Action) -> bool:
        """Send; return whether the actor can continue."""
        edge = action.edge or ""
        gradient = self._costs.is_target(edge, action)
        message = self._message(edge, action, gradient=gradient)
        if not message.direction.seconds:
            self._arrive(message, clock, action, (clock.now, clock.now))
        elif self._overlaps:
            queue = self._queues.get((edge, gradient, number))
            if queue is None:
                queue = self._queues[edge, gradient, number] = SendQueue(clock)
            queue.waiting.append((message, action, clock.now))
            if len(queue.waiting) == 1:
                self._drain(queue)
        elif message.unposted:
            message.sleepers += (number,)
            return False
        else:
            sent = clock.now
            clock.wait(message.posted, message.direction.target)
            start = clock.now
            clock.wait(start + message.direction.seconds, TRANSFER)
            self._arrive(message, clock, action, (sent, start))
        return True

    def _drain(self, queue: SendQueue) -> None:
        """Send waiting messages, up to the first that a receiver has not posted."""
        while queue.waiting:
            message, action, sent = queue.waiting[0]
            if message.unposted:
                message.queues += (queue,)
                return
            queue.waiting.popleft()
            start = max(sent, message.posted, queue.free)
            queue.free = start + message.direction.seconds
            self._arrive(message, queue.clock, action, (sent, start))

    def _arrive(self, message: Message, clock: Clock, action: Action, times: tuple[float, float]) -> None:
        """Record a send that was reached and left at these times."""
        sent, start = times
        finish = start + message.direction.seconds
        if finish >= message.finish:
            message.sent, message.start, message.finish = sent, start, finish
        if message.direction.seconds:
            self.transfers.append(
                Transfer(
                    action=action, sources=clock.ranks, targets=message.direction.targets, start=start, finish=finish
                )
            )
        clock.free(action, finish)
        message.unsent -= 1
        if not message.unsent:
            self._wake(message)

    def _wake(self, message: Message) -> None:
        self._awake.extend(message.sleepers)
        message.sleepers = ()

    def _work(self, number: int, clock: Clock, action: Action) -> bool:
        """Do a computation or reduction if everything is there; return whether it was."""
        members = self._costs.members(number, action)
        if len(members) == 1:
            if not self._take(number, clock, action):
                return False
        else:
            key = (action.kind, action.module, action.edge or action.stage, action.microbatches[:1], members)
            meeting, sleepers = self._meetings.setdefault(key, (Meeting(absent=len(members)), []))
            if number not in meeting.present:
                if not self._take(number, clock, action):
                    return False
                meeting.present.add(number)
                meeting.start = max(meeting.start, clock.now)
                meeting.absent -= 1
            if meeting.absent:
                sleepers.append(number)
                return False
            self._awake.extend(sleepers)
            sleepers.clear()
            clock.wait(meeting.start, PEERS)
        clock.work_on(action, self._costs.seconds(action))
        return True

    def _take(self, number: int, clock: Clock, action: Action) -> bool:
        """Wait for the messages that a computation needs; return whether all are sent by now."""
        taken: dict[Message, None] = {}
        for edge, gradient in self._costs.feeds(action):
            for microbatch in action.microbatches:
                message = self._messages.get((edge, gradient, microbatch))
                if message is None:
                    return False
                if message.unsent:
                    message.sleepers += (number,)
                    return False
                taken[message] = None
        if taken and self._overlaps:
            latest = max(taken, key=_finish)
            if latest.finish > clock.now:
                clock.wait(latest.sent, latest.direction.source)
                clock.wait(latest.finish, TRANSFER)
            return True
        for message in sorted(taken, key=_finish):
            clock.wait(message.sent, message.direction.source)
            clock.wait(message.start, TRANSFER)
            clock.wait(clock.now + message.direction.seconds, TRANSFER)
        return True


def _finish(message: Message) -> float:
    return message.finish
