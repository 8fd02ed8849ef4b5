"""Several hosts on one machine, for tests: see ``benchmarks.harness.hosts``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.harness import hosts as namespaces
from benchmarks.harness.hosts import Host, NoHostsError

__all__ = ["Host", "hosts"]


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """This many hosts. Skips the test where they are not permitted."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(namespaces.hosts(count))
        except NoHostsError as error:
            pytest.skip(str(error))
        yield made
