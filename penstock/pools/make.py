"""The pool that was chosen, made."""

from __future__ import annotations

from penstock.pools.choose import Choice
from penstock.pools.inline import InlinePool
from penstock.pools.launch import Start
from penstock.pools.pool import Pool
from penstock.pools.processes import ProcessPool
from penstock.pools.runner import Work
from penstock.pools.threads import ThreadPool
from penstock.pools.worker import Init


def make_pool(choice: Choice, work: Work, seed: int, init: Init | None, start: Start) -> Pool:
    """A pool of the chosen kind and size.

    Random choices on the road are keyed; ``seed`` is for what a worker does for itself.
    """
    if choice.kind == "none":
        return InlinePool(work, seed)
    if choice.kind == "threads":
        return ThreadPool(work, choice.workers, seed)
    return ProcessPool(work, choice.workers, seed, init, start)
