"""The pipelines that the jobs of a soak run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.faults.member import MemberPlan
from benchmarks.faults.work import NumberedSamples
from benchmarks.soak.schedule import JobChoice

EPOCHS = 3

SAVE_EVERY = 7
"""Batches between two checkpoints."""

SAMPLES, BATCH, BAD = 240, 8, 101

TIMEOUT = 6.0
"""Seconds after which a sample is taken to hang."""

STORE = "store"
"""The directory of the disk cache, below the place of a soak."""


@dataclass(frozen=True)
class Course:
    """A pipeline and the options of its loader. ``trait``: the kind of event that it belongs to, if
    it can be left out. ``world``: number of ranks."""

    work: NumberedSamples
    options: Mapping[str, Any] = field(default_factory=dict)
    trait: str = ""
    world: int = 1

    def plan(self, name: str, choice: JobChoice) -> MemberPlan:
        """The plan of a job on this course. Jobs that share are in a group named for the course."""
        options: dict[str, Any] = dict(self.options)
        if self.world > 1:
            options.update(rank=choice.rank, world=self.world)
        if not choice.shared:
            options.update(workers=2)
        return MemberPlan(
            self.work,
            EPOCHS,
            choice.step,
            group=name if choice.shared else None,
            options=options,
            hold=choice.hold,
            save_every=SAVE_EVERY,
        )


def make_courses(place: Path, without: Collection[str] = ()) -> dict[str, Course]:
    """All courses, by name. Writes the files that some of them read."""
    threads = NumberedSamples(SAMPLES, BATCH)
    processes = replace(threads, kind="processes")
    disk = replace(threads, stages="disk", place=str(place / STORE))
    images = replace(threads, stages="images", place=str(place / "images"), edge=32)
    (place / "images").mkdir()
    images.write_files()
    skip = {"on_error": "skip", "timeout": TIMEOUT}
    courses = {
        "threads": Course(threads),
        "processes": Course(replace(processes, cost=0.002)),
        "slow": Course(replace(processes, cost=0.03)),
        "memory": Course(replace(threads, stages="memory")),
        "disk": Course(disk),
        "disk-processes": Course(replace(disk, kind="processes")),
        "refurbish": Course(replace(processes, stages="refurbish")),
        "echo": Course(replace(threads, stages="echo")),
        "images": Course(images),
        "ranks": Course(threads, trait="ranks", world=2),
        "crash": Course(replace(processes, trouble="crash", bad=BAD), skip, trait="crash"),
        "hang": Course(replace(processes, trouble="hang", bad=BAD), skip, trait="hang"),
    }
    return {name: course for name, course in courses.items() if course.trait not in without}
