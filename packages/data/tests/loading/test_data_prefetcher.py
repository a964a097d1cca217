"""Tasks are done ahead in order, within a bound of bytes, and no thread is left when they are done."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo.data import Prefetcher

NAME = "of-this-test"
PATIENCE = 60.0


def threads() -> list[threading.Thread]:
    """Return the threads of prefetchers made here that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def make(*, workers: int, max_bytes: int = 1 << 30) -> Prefetcher:
    """Return a prefetcher whose threads this test knows."""
    return Prefetcher(workers=workers, max_bytes=max_bytes, name=NAME)


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when something that threads bring about is so; fail if that never comes."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def give(value: int) -> int:
    """Return a number, as a task whose result has as many bytes."""
    return value


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    workers=st.integers(0, 4),
    max_bytes=st.integers(0, 120),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_all_results_come_whatever_the_bound_and_the_order_in_which_they_are_taken(
    sizes: list[int], workers: int, max_bytes: int, order: object
) -> None:
    """Each task is done once; whoever takes first what comes last is not kept waiting by what nobody takes."""
    done: list[int] = []
    prefetcher = make(workers=workers, max_bytes=max_bytes)

    def run(number: int) -> int:
        done.append(number)
        return sizes[number]

    tickets = [prefetcher.submit(partial(run, n), order=(n,), size=give) for n in range(len(sizes))]
    wanted = list(range(len(sizes)))
    order.shuffle(wanted)  # type: ignore[attr-defined]  # of a Random
    assert [tickets[number].take() for number in wanted] == [sizes[number] for number in wanted]
    assert sorted(done) == list(range(len(sizes)))
    assert prefetcher.held_bytes == 0
    prefetcher.close()
    wait_until(lambda: not threads())


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40), max_bytes=st.integers(0, 120))
@settings(max_examples=100, deadline=None)
def test_one_thread_holds_no_more_than_the_bound_and_what_was_larger_than_all_before(
    sizes: list[int], max_bytes: int
) -> None:
    """The bound is met exactly where results are no larger than those before; one that is larger passes once."""
    prefetcher = make(workers=1, max_bytes=max_bytes)
    tickets = [prefetcher.submit(partial(give, size), order=(n,), size=give) for n, size in enumerate(sizes)]
    for ticket in tickets:
        wait_until(lambda: not threads())
        held = prefetcher.held_bytes
        assert held <= max(max_bytes, *sizes) or _grew(sizes, held, max_bytes)
        ticket.take()
    assert prefetcher.held_bytes == 0


def _grew(sizes: list[int], held: int, bound: int) -> bool:
    """Return whether what is held exceeds the bound by no more than one result exceeded the largest before it."""
    jumps = [size - max(sizes[:n], default=0) for n, size in enumerate(sizes)]
    return held - bound <= max(jumps)


def test_results_of_one_size_never_exceed_the_bound() -> None:
    """After the first, whose size nobody knows before, threads begin what there is room for."""
    prefetcher = make(workers=1, max_bytes=35)
    tickets = [prefetcher.submit(partial(give, 10), order=(n,), size=give) for n in range(9)]
    held = []
    for ticket in tickets:
        wait_until(lambda: not threads())
        held.append(prefetcher.held_bytes)
        ticket.take()
    assert held == [30] * 7 + [20, 10]


def test_a_result_that_is_larger_than_the_bound_is_made_ahead_too() -> None:
    """It is held alone."""
    prefetcher = make(workers=2, max_bytes=5)
    first = prefetcher.submit(partial(give, 100), order=(0,), size=give)
    wait_until(lambda: first.is_done and not threads())
    second = prefetcher.submit(partial(give, 100), order=(1,), size=give)
    assert not second.is_done
    assert (first.take(), prefetcher.held_bytes) == (100, 0)
    wait_until(lambda: second.is_done and not threads())
    assert second.take() == 100


def test_tasks_begin_in_their_order() -> None:
    """By one thread they are done in it, whatever the order in which they were handed in."""
    prefetcher, gate, done = make(workers=1), threading.Event(), list[int]()
    first = prefetcher.submit(gate.wait, order=(0,), size=lambda _: 0)  # kept, else it might be dropped unbegun
    wanted = [3, 1, 2, 5, 4]
    tickets = [prefetcher.submit(partial(done.append, n), order=(n,), size=lambda _: 0) for n in wanted]
    gate.set()
    assert first.take()
    wait_until(lambda: all(ticket.is_done for ticket in tickets))
    assert done == sorted(wanted)


def test_an_error_is_raised_where_its_result_is_taken_and_nowhere_else() -> None:
    """What was raised is the same object, and tasks after it are done."""
    prefetcher, error = make(workers=1), ValueError("broken")

    def fail() -> int:
        raise error

    bad = prefetcher.submit(fail, order=(0,), size=give)
    good = prefetcher.submit(partial(give, 7), order=(1,), size=give)
    assert good.take() == 7
    with pytest.raises(ValueError, match="broken") as caught:
        bad.take()
    assert caught.value is error


def test_a_task_may_hand_in_others() -> None:
    """As the reading of a step hands in its items."""
    prefetcher = make(workers=1)
    outer = prefetcher.submit(
        lambda: prefetcher.submit(partial(give, 3), order=(0, 1), size=give), order=(0,), size=lambda _: 0
    )
    assert outer.take().take() == 3


def test_closing_while_the_bound_is_reached_leaves_no_thread_and_no_result_out_of_reach() -> None:
    """What was made can be taken, and what was not is done by whoever takes it."""
    prefetcher = make(workers=2, max_bytes=20)
    tickets = [prefetcher.submit(partial(give, 10), order=(n,), size=give) for n in range(10)]
    wait_until(lambda: not threads())
    prefetcher.close()
    assert [ticket.take() for ticket in tickets] == [10] * 10
    assert not threads()
    assert prefetcher.submit(partial(give, 4), order=(0,), size=give).take() == 4
    assert not threads()


def test_closing_waits_for_a_task_that_runs() -> None:
    """None of its threads runs on after it."""
    prefetcher, gate, begun = make(workers=1), threading.Event(), threading.Event()

    def run() -> bool:
        begun.set()
        return gate.wait()

    ticket = prefetcher.submit(run, order=(0,), size=lambda _: 0)
    begun.wait()
    threading.Thread(target=gate.set).start()
    prefetcher.close()
    wait_until(lambda: not threads())
    assert ticket.take()


def test_a_prefetcher_that_is_dropped_begins_nothing_more() -> None:
    """Its threads end with what they are doing."""
    gate, begun, done = threading.Event(), threading.Event(), list[int]()

    def run() -> bool:
        begun.set()
        return gate.wait()

    prefetcher = make(workers=1)
    first = prefetcher.submit(run, order=(0,), size=lambda _: 0)
    begun.wait()
    second = prefetcher.submit(partial(done.append, 1), order=(1,), size=lambda _: 0)
    del prefetcher
    gc.collect()
    gate.set()
    wait_until(lambda: not threads())
    assert first.is_done
    assert not second.is_done
    assert not done


def test_without_workers_all_is_done_where_it_is_taken() -> None:
    """No thread is started."""
    prefetcher = make(workers=0)
    ticket = prefetcher.submit(threading.get_ident, order=(0,), size=lambda _: 0)
    assert not threads()
    assert ticket.take() == threading.get_ident()


def test_each_thread_is_prepared_before_its_first_task() -> None:
    """What is asked for as it begins happens in that thread."""
    known: set[int] = set()
    prefetcher = Prefetcher(workers=1, max_bytes=1, on_thread=lambda: known.add(threading.get_ident()), name=NAME)
    ticket = prefetcher.submit(lambda: threading.get_ident() in known, order=(0,), size=lambda _: 0)
    wait_until(lambda: ticket.is_done)
    assert ticket.take()


def test_results_that_nobody_can_take_any_more_make_room() -> None:
    """A ticket that is dropped counts no bytes, whether its task waits, runs or is done."""
    prefetcher, gate, begun = make(workers=1, max_bytes=10), threading.Event(), threading.Event()

    def run() -> int:
        begun.set()
        gate.wait()
        return 7

    tickets = [prefetcher.submit(partial(give, 10), order=(0,), size=give)]
    wait_until(lambda: tickets[0].is_done)
    assert prefetcher.held_bytes == 10
    tickets.clear()
    gc.collect()
    assert prefetcher.held_bytes == 0
    tickets.append(prefetcher.submit(run, order=(1,), size=give))
    begun.wait()
    prefetcher.submit(partial(pytest.fail, "nobody wants it"), order=(2,), size=lambda _: 0)
    tickets.clear()
    gc.collect()
    gate.set()
    last = prefetcher.submit(partial(give, 3), order=(3,), size=give)
    wait_until(lambda: last.is_done)
    assert prefetcher.held_bytes == 3
    assert last.take() == 3
    prefetcher.close()
