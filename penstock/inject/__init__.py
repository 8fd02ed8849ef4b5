"""Code injected into scripts that do not know Penstock, and the command that starts them.

Every Python process below a command runs ``site/sitecustomize.py`` at its start. That module waits
until ``torch.utils.data.dataloader`` is imported, and then calls ``install(settings, module)`` of
the task's module (``TASKS``) with it. The rest of ``torch.utils.data`` is not imported yet, so a
task only puts its functions in place. These import what they need when they are called.

>>> with reports() as directory:
...     variables = environment("run", {"reports": str(directory)})
...     code = launch(["true"], variables)
...     reached = processes(directory)
>>> code, reached
(0, [])
"""

from __future__ import annotations

from penstock.inject.launch import (
    TASKS,
    Process,
    environment,
    launch,
    processes,
    reports,
    unseen,
    words,
)

__all__ = [
    "TASKS",
    "Process",
    "environment",
    "launch",
    "processes",
    "reports",
    "unseen",
    "words",
]
