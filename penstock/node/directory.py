"""The directory that a job was started in: code of the user's may read files relative to it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.engine.pools.runner import Work, WorkerInfo, WorkerInit
from penstock.pipeline import Pipeline


def looks_around(pipeline: Pipeline) -> bool:
    """Whether something on the road is not Penstock's own, and so may look for files by itself."""
    collate = None if pipeline.batching is None else pipeline.batching.collate
    ours = not pipeline.source.runs_user_code and collate is None
    return not (ours and all(stop.preserves_input for stop in pipeline.stops))


@dataclass(frozen=True)
class InDirectory:
    """Has a worker process go to a directory before it does anything."""

    directory: str
    then: WorkerInit | None = None

    def __call__(self, info: WorkerInfo, work: Work) -> None:
        os.chdir(self.directory)
        if self.then is not None:
            self.then(info, work)
