"""Sets up a worker process of the node: the directory of the job, output that never fails."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from penstock.engine.pools.runner import Work, WorkerInfo, WorkerInit
from penstock.node.log import log_stream
from penstock.pipeline import Pipeline


def runs_user_code(pipeline: Pipeline) -> bool:
    """Whether the pipeline runs code that is not Penstock's own.

    Such code may crash or hang, and may open files by paths relative to the directory that the job
    was started in.
    """
    collate = None if pipeline.batching is None else pipeline.batching.collate
    ours = not pipeline.source.runs_user_code and collate is None
    return not (ours and all(stop.preserves_input for stop in pipeline.stops))


@dataclass(frozen=True)
class InNode:
    """Initialises a worker process: changes to ``directory``, then runs ``then``."""

    directory: str
    then: WorkerInit | None = None

    def __call__(self, info: WorkerInfo, work: Work) -> None:
        # The output goes to the node's log. If its disk is full, print() in a user's code must not
        # fail for that.
        sys.stdout, sys.stderr = log_stream(1), log_stream(2)
        os.chdir(self.directory)
        if self.then is not None:
            self.then(info, work)
