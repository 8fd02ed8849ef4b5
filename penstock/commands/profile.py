"""The command ``penstock profile``."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PipelineError

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

EXAMPLE = """\
examples:
  penstock profile train.py                      the only pipeline in train.py
  penstock profile train.py:train                the pipeline in its variable `train`
  penstock profile train.py --data photos/val    on other data
  penstock profile train.py --json costs.json    also write JSON; `-` prints only JSON

The file does not run as __main__, so code below `if __name__ == "__main__":` does not run.
"""

RUN_NAME = "penstock_profile"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs samples through a pipeline and shows what each stage and operation costs, and what "
        "fusing operations into one step saves."
    )
    parser.epilog = EXAMPLE
    parser.add_argument("file", metavar="FILE.py[:NAME]", help="a Python file with a pipeline")
    parser.add_argument("--data", metavar="PATH", help="read this folder instead of its own data")
    parser.add_argument(
        "--samples", type=int, default=256, metavar="N", help="samples at most (256)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="time to spend, roughly (10)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of all randomness (0)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the profile to this file as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    from penstock.diagnose.profile.measure import measure
    from penstock.progress_bar import counting

    pipeline = find(arguments.file)
    with counting("profiling") as on_progress:
        profile = measure(
            pipeline,
            arguments.data,
            samples=arguments.samples,
            seconds=arguments.seconds,
            seed=arguments.seed,
            on_progress=on_progress,
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
                f"--json {arguments.json} cannot be written: {error}. Give another path."
            ) from error
    return 0


def find(target: str) -> Pipeline:
    """The pipeline that ``FILE.py`` or ``FILE.py:NAME`` names."""
    path, name = target, ""
    if not Path(target).is_file() and ":" in target:
        path, _, name = target.rpartition(":")
    if not Path(path).is_file():
        raise PipelineError(f"there is no file {path!r}. Give a Python file with a pipeline.")
    variables = _run(path)
    if name:
        if name not in variables:
            raise PipelineError(f"{path} has no variable {name!r}. {_list_pipelines(variables)}")
        pipeline = _pipeline_of(variables[name])
        if pipeline is None:
            raise PipelineError(
                f"{name} in {path} is a {type(variables[name]).__name__}, not a pipeline. "
                f"{_list_pipelines(variables)}"
            )
        return pipeline
    pipelines = _pipelines(variables)
    if not pipelines:
        raise PipelineError(
            f"{path} has no pipeline among its variables. Make one at the top level of the file, "
            'not in a function or below `if __name__ == "__main__":`, for example\n'
            '    train = ps.from_folder("photos").map(ps.image.decode()).batch(64)'
        )
    if len({id(pipeline) for pipeline in pipelines.values()}) > 1:
        listed = ", ".join(f"{path}:{name}" for name in pipelines)
        raise PipelineError(f"{path} has several pipelines. Choose one: {listed}.")
    return next(iter(pipelines.values()))


def _run(path: str) -> dict[str, Any]:
    """Run a file under a name other than ``__main__``; return its variables."""
    before_path, before_argv = sys.path[:], sys.argv[:]
    # The file may import its neighbours, and must not see the arguments of this command.
    sys.path.insert(0, str(Path(path).absolute().parent))
    sys.argv[:] = [path]
    try:
        return runpy.run_path(path, run_name=RUN_NAME)
    except SystemExit as ended:
        raise PipelineError(
            f"{path} exited (exit code {ended.code}) when it was run to find its pipeline. Put the "
            'code that runs it as a program below `if __name__ == "__main__":`.'
        ) from ended
    except SyntaxError as error:
        raise PipelineError(f"{path} is not valid Python: {error}") from error
    finally:
        sys.path[:], sys.argv[:] = before_path, before_argv


def _pipelines(variables: dict[str, Any]) -> dict[str, Pipeline]:
    out = {}
    for name, value in variables.items():
        pipeline = None if name.startswith("__") else _pipeline_of(value)
        if pipeline is not None:
            out[name] = pipeline
    return out


def _pipeline_of(value: Any) -> Pipeline | None:
    """The pipeline that a value is, or that a loader iterates; ``None`` for other values."""
    from penstock.pipeline import Pipeline

    if isinstance(value, Pipeline):
        return value
    if isinstance(value, type) or not type(value).__module__.startswith("penstock."):
        return None
    loader = getattr(value, "_loader", value)  # the DataLoader for torch wraps one
    pipeline = getattr(loader, "pipeline", None)
    return pipeline if isinstance(pipeline, Pipeline) else None


def _list_pipelines(variables: dict[str, Any]) -> str:
    names = list(_pipelines(variables))
    return f"Its pipelines: {', '.join(names)}." if names else "It has no pipelines."
