"""Worker programs of these tests are forks of one process."""

from __future__ import annotations

from tests.support.warm_programs import real_programs, warm_programs  # noqa: F401
