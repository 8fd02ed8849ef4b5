"""Python runs this at its start below ``penstock run`` and ``penstock analyze``. Waits for torch.

At its start Python imports the module ``sitecustomize`` from ``sys.path``, and the environment made
by ``penstock.inject.environment`` puts this directory first there. This module must cost nothing in
processes that do not use torch, and must not fail in any: the user's Python may be older than the
one with Penstock, and may not have Penstock. So it imports only modules that every Python has
loaded by then, and the rest when torch's DataLoader is imported.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # importing it from typing would take longer than this whole module
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The environment is read here and not in penstock.config, because Penstock must not be imported yet
# and may not be installed in this Python.
VARIABLE = "PENSTOCK_INJECT"


class AroundImport:
    """An import finder that lets ``around`` run the code of one module.

    ``around`` is called once, with the module and a function that runs its code. The finder then
    removes itself.
    """

    def __init__(self, name: str, around: Callable[[ModuleType, Callable[[], None]], None]) -> None:
        self._name = name
        self._around = around

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    wrapper: Any = _WrappedLoader(spec.loader, self)
                    spec.loader = wrapper
                return spec
        return None

    def run(self, module: ModuleType, execute: Callable[[], None]) -> None:
        # Not when the module is found: libraries look for torch and do not import it.
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._around(module, execute)
        else:
            execute()


class _WrappedLoader:
    """Wraps the module's own loader, and removes itself when the module is loaded."""

    def __init__(self, loader: Any, finder: AroundImport) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._finder.run(module, lambda: self._loader.exec_module(module))


def without_collection(module: ModuleType, execute: Callable[[], None]) -> None:
    """Run the code of torch with garbage collection paused, and let the task prepare itself.

    torch makes more than 100,000 objects that stay, and almost no garbage. Looking through them
    again and again takes longer than importing Penstock, which this pause therefore pays for.
    """
    pauses = gc.isenabled()
    gc.disable()
    try:
        execute()
        prepare()
    finally:
        if pauses:
            # Makes the new objects old without a look at them. Objects that the script has frozen
            # must stay frozen.
            if hasattr(gc, "freeze") and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def then_install(module: ModuleType, execute: Callable[[], None]) -> None:
    """Run the code of torch's DataLoader, and then install the task of the command."""
    execute()
    install(module)


def install(module: ModuleType) -> None:
    """Install the task of the command. If that fails, the script runs unchanged."""
    try:
        import json

        injected = json.loads(os.environ[VARIABLE])
        _install(injected, module)
    except Exception as error:
        _print(
            "nothing was changed in this script, because Penstock could not be installed in it: "
            f"{error!r}"
        )


def prepare() -> None:
    """Let the task, if it is installed, import what its first loop needs, now that torch is there.

    The first loop of the script would wait for that otherwise.
    """
    try:
        import json

        task = sys.modules.get(json.loads(os.environ[VARIABLE])["module"])
        if task is not None and hasattr(task, "prepare"):
            task.prepare()
    except Exception:
        pass  # the first loop meets the same error, and the script runs on with torch's loader


def _install(injected: dict[str, Any], module: ModuleType) -> None:
    import importlib

    why = ""
    try:
        task = importlib.import_module(injected["module"])
    except ImportError as error:
        why = (
            f"nothing was changed in this script, because its Python, {sys.executable}, cannot "
            f"import Penstock: {error}. Install penstock {injected['version']} for that Python "
            "too, or run the script with the Python that has it."
        )
    _report(injected, why)
    if why:
        _print(why)
    else:
        task.install({**injected["settings"], "rank": _rank()}, module)


def _report(injected: dict[str, Any], why: str) -> None:
    import json

    directory = injected["settings"].get("reports")
    if directory is None:
        return
    process = {
        "pid": os.getpid(),
        "argv": getattr(sys, "orig_argv", sys.argv),
        "rank": _rank(),
        "why": why,
    }
    try:
        # A single write, so that lines of several processes do not mix.
        with open(os.path.join(directory, "processes"), "ab", 0) as file:
            file.write(json.dumps(process).encode() + b"\n")
    except OSError:
        pass  # the command has ended and removed its directory, so nobody reads the report


def _rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def _print(text: str) -> None:
    if not _rank():
        sys.stderr.write(f"penstock: {text}\n")


def _ours() -> bool:
    """Whether this is a worker process or the node of Penstock. Nothing is injected into these."""
    words: list[str] = getattr(sys, "orig_argv", [])
    return len(words) > 2 and words[1] == "-c" and "from penstock." in words[2]


def _run_users_sitecustomize(directory: str) -> None:
    """Run the user's own ``sitecustomize``, which this one hides.

    ``directory``, that of this module, is removed from ``sys.path``, which then looks as it does
    without Penstock. Child processes get the directory from their environment.
    """
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != directory]
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours


if __name__ == "sitecustomize":
    if os.environ.get(VARIABLE) and not _ours():
        sys.meta_path[:0] = [
            AroundImport("torch", without_collection),
            AroundImport("torch.utils.data.dataloader", then_install),
        ]
    _run_users_sitecustomize(os.path.dirname(os.path.abspath(__file__)))
