"""Code put into a script that has never heard of Penstock, and the command that starts it.

Every Python process below a command runs ``site/sitecustomize.py`` as it starts. That waits until
``torch.utils.data.dataloader`` is imported, and then calls ``install(settings, module)`` of the
task's module (``TASKS``) with it. The rest of ``torch.utils.data`` is not there yet: a task puts
its functions in place, and these import what they need when they are called.

>>> with reports() as place:
...     made = environment("run", {"reports": str(place)})
...     code = launch(["true"], made)
...     seen = processes(place)
>>> code, seen
(0, [])
"""

from __future__ import annotations

from penstock.inject.environment import TASKS, environment
from penstock.inject.launch import launch, words
from penstock.inject.processes import Process, processes, reports, unseen

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
