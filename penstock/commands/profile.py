"""``penstock profile``."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PipelineError

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

EXAMPLE = """\
examples:
  penstock profile train.py                      the only pipeline in train.py
  penstock profile train.py:train                the one in its variable `train`
  penstock profile train.py --data photos/val    on other data
  penstock profile train.py --json costs.json    also as JSON; `-` prints JSON alone

The file is run under another name than __main__: what stands below `if __name__ == "__main__":`
is not run.
"""

RUN_NAME = "penstock_profile"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs samples through a pipeline and shows what each stop and operation costs, and what "
        "is saved by running some of them in one step."
    )
    parser.epilog = EXAMPLE
    parser.add_argument(
        "file", metavar="FILE.py[:NAME]", help="a Python file that makes a pipeline"
    )
    parser.add_argument("--data", metavar="PATH", help="a folder to read in place of its own data")
    parser.add_argument("--samples", type=int, default=256, metavar="N", help="at most (256)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="about (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="for all randomness (0)")
    parser.add_argument("--json", metavar="FILE", help="write everything there as JSON")


def run(arguments: argparse.Namespace) -> int:
    from penstock.diagnose.profile.measure import measure

    pipeline = find(arguments.file)
    with _shown(arguments.samples) as told:
        profile = measure(
            pipeline,
            arguments.data,
            samples=arguments.samples,
            seconds=arguments.seconds,
            seed=arguments.seed,
            told=told,
        )
    if arguments.json == "-":
        sys.stdout.write(profile.to_json() + "\n")
        return 0
    sys.stdout.write(f"{profile}\n")
    if arguments.json is not None:
        try:
            Path(arguments.json).write_text(profile.to_json() + "\n")
        except OSError as error:
            raise PipelineError(
                f"--json {arguments.json} cannot be written: {error}. Give another file."
            ) from error
    return 0


def find(what: str) -> Pipeline:
    """The pipeline that ``FILE.py`` or ``FILE.py:NAME`` means."""
    path, name = what, ""
    if not Path(what).is_file() and ":" in what:
        path, _, name = what.rpartition(":")
    if not Path(path).is_file():
        raise PipelineError(f"there is no file {path!r}. Give the Python file that makes it.")
    found = _run(path)
    if name:
        if name not in found:
            raise PipelineError(f"{path} has no variable {name!r}. {_has(found)}")
        pipeline = _pipeline_of(found[name])
        if pipeline is None:
            raise PipelineError(
                f"{name} in {path} is a {type(found[name]).__name__}, and no pipeline. "
                f"{_has(found)}"
            )
        return pipeline
    pipelines = _pipelines(found)
    if not pipelines:
        raise PipelineError(
            f"{path} has no pipeline among its variables. Write one where it is made when the file "
            'is read, not in a function or below `if __name__ == "__main__":`, as in\n'
            '    train = ps.from_folder("photos").map(ps.image.decode()).batch(64)'
        )
    if len({id(pipeline) for pipeline in pipelines.values()}) > 1:
        listed = ", ".join(f"{path}:{name}" for name in pipelines)
        raise PipelineError(f"{path} has several pipelines. Say which: {listed}.")
    return next(iter(pipelines.values()))


def _run(path: str) -> dict[str, Any]:
    """The variables of a file, run as a script that is not the main one."""
    before_path, before_argv = sys.path[:], sys.argv[:]
    # It may import what lies beside it, and must not take our arguments for its own.
    sys.path.insert(0, str(Path(path).absolute().parent))
    sys.argv[:] = [path]
    try:
        return runpy.run_path(path, run_name=RUN_NAME)
    except SystemExit as ended:
        raise PipelineError(
            f"{path} ended itself (exit code {ended.code}) before a pipeline could be taken from "
            'it. Put what it does as a program below `if __name__ == "__main__":`.'
        ) from ended
    except SyntaxError as error:
        raise PipelineError(f"{path} is not Python: {error}") from error
    finally:
        sys.path[:], sys.argv[:] = before_path, before_argv


def _pipelines(found: dict[str, Any]) -> dict[str, Pipeline]:
    out = {}
    for name, value in found.items():
        pipeline = None if name.startswith("__") else _pipeline_of(value)
        if pipeline is not None:
            out[name] = pipeline
    return out


def _pipeline_of(value: Any) -> Pipeline | None:
    """A pipeline, or that of a loader."""
    from penstock.pipeline import Pipeline

    if isinstance(value, Pipeline):
        return value
    if isinstance(value, type) or not type(value).__module__.startswith("penstock."):
        return None
    loader = getattr(value, "_loader", value)  # the DataLoader for torch keeps one
    pipeline = getattr(loader, "pipeline", None)
    return pipeline if isinstance(pipeline, Pipeline) else None


def _has(found: dict[str, Any]) -> str:
    names = list(_pipelines(found))
    return f"It has: {', '.join(names)}." if names else "It has no pipeline at all."


@contextmanager
def _shown(samples: int) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the other stream, where somebody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("profiling", total=samples)
        yield lambda done, total: bar.update(task, completed=done, total=total)
