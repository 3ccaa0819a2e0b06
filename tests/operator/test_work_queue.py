"""The work queue: each key once, never twice at once, failures after growing waits."""

from __future__ import annotations

import asyncio

from kitestring_operator.work_queue import LONGEST_WAIT_SECONDS, WorkQueue


async def test_a_key_is_given_once_however_often_it_was_said() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in ("a", "b", "a", "a"):
        queue.add(key)
    assert len(queue) == 2
    assert [await queue.get(), await queue.get()] == ["a", "b"]


async def test_a_key_that_is_said_while_it_is_worked_on_comes_again_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    assert len(queue) == 0, "never twice at once"
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_who_waits_is_woken() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    assert await asyncio.wait_for(waiting, 5) == "a"


async def test_the_earliest_of_several_times_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 30.0)
    queue.add_after("a", 0.01)
    queue.add_after("a", 30.0)
    assert await asyncio.wait_for(queue.get(), 5) == "a"


async def test_failures_wait_longer_and_longer_and_success_forgets_them() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waits = [queue.retry("a") for _ in range(12)]
    assert waits[:3] == [0.5, 1.0, 2.0] and waits[-1] == LONGEST_WAIT_SECONDS
    queue.succeeded("a")
    assert queue.retry("a") == 0.5
    queue.forget("a")


async def test_the_length_is_told() -> None:
    lengths: list[int] = []
    queue: WorkQueue[str] = WorkQueue(lengths.append)
    queue.add("a")
    queue.add("b")
    await queue.get()
    assert lengths == [1, 2, 1]
