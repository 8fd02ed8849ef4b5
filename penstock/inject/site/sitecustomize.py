"""What Python runs at its start below ``penstock run`` and ``penstock analyze``: waits for torch.

Python imports a module of this name from ``sys.path`` as it starts, and ``environment`` puts this
directory first there. It may cost nothing in processes that have nothing to do with torch, and
must not fail in any: the user's Python may be another than Penstock's, older, and without it. So it
imports what every Python has loaded by then, and the rest when torch's DataLoader is imported.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # the module of that name takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The environment is read here, and not by penstock.config as everywhere else, because Penstock must
# not be imported yet, and may not even be installed in this Python.
VARIABLE = "PENSTOCK_INJECT"
AWAITED = "torch.utils.data.dataloader"


class AfterImport:
    """Finds the module that is waited for as Python would, and says when it is there."""

    def __init__(self, told: Callable[[ModuleType], None]) -> None:
        self._told = told

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != AWAITED:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    told: Any = _Telling(spec.loader, self._told)
                    spec.loader = told
                return spec
        return None


class _Telling:
    """The module's own loader, which it gets back as soon as it is loaded."""

    def __init__(self, loader: Any, told: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._told(module)


def install(module: ModuleType) -> None:
    """Have the task of this command installed in torch; a script that cannot be helped runs on."""
    try:
        import json

        told = json.loads(os.environ[VARIABLE])
        _install(told, module)
    except Exception as error:
        _say(f"nothing was changed in this script, because this failed: {error!r}")


def _install(told: dict[str, Any], module: ModuleType) -> None:
    import importlib

    why = ""
    try:
        task = importlib.import_module(told["module"])
    except ImportError as error:
        why = (
            f"nothing was changed in this script, which runs on {sys.executable}: {error} "
            f"there. Install penstock {told['version']} for that Python too, or run the script "
            "with the one that has it."
        )
    _report(told, why)
    if why:
        _say(why)
    else:
        task.install({**told["settings"], "rank": _rank()}, module)


def _report(told: dict[str, Any], why: str) -> None:
    import json

    place = told["settings"].get("reports")
    if place is None:
        return
    process = {
        "pid": os.getpid(),
        "argv": getattr(sys, "orig_argv", sys.argv),
        "rank": _rank(),
        "why": why,
    }
    try:
        # In one write, which other processes cannot come between.
        with open(os.path.join(place, "processes"), "ab", 0) as file:
            file.write(json.dumps(process).encode() + b"\n")
    except OSError:
        pass  # the command that made the place has ended, and nobody wants to know any more


def _rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def _say(text: str) -> None:
    if not _rank():
        sys.stderr.write(f"penstock: {text}\n")


def _ours() -> bool:
    """This is a worker or the node of Penstock itself, which nothing needs to be put into."""
    words: list[str] = getattr(sys, "orig_argv", [])
    return len(words) > 2 and words[1] == "-c" and "from penstock." in words[2]


def _hand_on(here: str) -> None:
    """Run the module of this name that this one stands in front of, as Python would have.

    This directory leaves the path: what is below must look as it does without. Processes started
    from here have it from their environment.
    """
    sys.path[:] = [one for one in sys.path if os.path.abspath(one or ".") != here]
    mine = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = mine


if __name__ == "sitecustomize":
    if os.environ.get(VARIABLE) and not _ours():
        sys.meta_path.insert(0, AfterImport(install))
    _hand_on(os.path.dirname(os.path.abspath(__file__)))
