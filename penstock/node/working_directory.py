"""The directory that a job was started in. User code may open files by paths relative to it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.engine.pools.runner import Work, WorkerInfo, WorkerInit
from penstock.pipeline import Pipeline


def may_open_relative_paths(pipeline: Pipeline) -> bool:
    """Whether the pipeline runs code that is not Penstock's own."""
    collate = None if pipeline.batching is None else pipeline.batching.collate
    ours = not pipeline.source.runs_user_code and collate is None
    return not (ours and all(stop.preserves_input for stop in pipeline.stops))


@dataclass(frozen=True)
class InDirectory:
    """Initialises a worker process: changes to ``directory``, then runs ``then``."""

    directory: str
    then: WorkerInit | None = None

    def __call__(self, info: WorkerInfo, work: Work) -> None:
        os.chdir(self.directory)
        if self.then is not None:
            self.then(info, work)
