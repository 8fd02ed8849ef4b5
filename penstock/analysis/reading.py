"""Reading by several threads at once, without end, to see how fast it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

WAITING = 2
"""Readings for each thread that wait to be done, so that no thread ever waits for one."""


def by_threads(read: Callable[[T], int], what: Iterator[T], threads: int) -> Iterator[int]:
    """What ``read`` says of each of these, in their order, done by so many threads."""
    threads = max(1, threads)
    if threads == 1:  # without one, it is as fast as a worker that does nothing else
        yield from map(read, what)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="penstock-read") as pool:
        underway: deque[Future[int]] = deque()
        try:
            underway.extend(pool.submit(read, one) for one in islice(what, WAITING * threads))
            while underway:
                yield underway.popleft().result()
                underway.extend(pool.submit(read, one) for one in islice(what, 1))
        finally:
            for one in underway:
                one.cancel()
