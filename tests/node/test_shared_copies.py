"""Jobs with ``share=`` and ``device=`` copy each batch to their device once, for all of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.support.members import WarmJob, jobs

pytestmark = pytest.mark.usefixtures("node_directory")

SCRIPT = """
import hashlib, json, logging, os, signal, sys
import numpy as np, torch
import penstock as ps, penstock.torch
from penstock.device import delivery
from penstock.device.fake import FakeDevice
from penstock.device.shared_copy import SharedCopy
from penstock.node import copy_desk

mode, epochs = sys.argv[1], int(sys.argv[2])
copy_desk.PATIENCE = 100.0  # nothing here depends on time
words = []
class Keep(logging.Handler):
    def emit(self, record):
        words.append(record.getMessage())
logging.getLogger("penstock.device").addHandler(Keep())
device = FakeDevice(shared=mode != "unshared")
delivery.make_device = lambda wanted, index: device
torch.cuda.is_available = lambda: True
how, views, finish = {}, SharedCopy.views, SharedCopy.finish
def noted(self, keys, tensors):
    made, used = self.made, self.used
    found = views(self, keys, tensors)
    kind = "made" if self.made > made else "used" if self.used > used else "alone"
    how[f"{keys.epoch}.{keys.number}"] = kind
    return found
SharedCopy.views = noted
if mode == "dying":  # between its first copy for others and the report of it
    def die(self):
        if self.made:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self)
    SharedCopy.finish = die
    def input():
        pass

data = np.random.default_rng(0).integers(0, 256, (64, 6, 5, 3), np.uint8)
pipeline = ps.from_dataset([(one, n) for n, one in enumerate(data)], random=False)
if mode == "normalize":
    pipeline = pipeline.map(ps.image.normalize())
loader = penstock.torch.loader(
    pipeline.batch(8), device="cuda", seed=3, share="d", join="start", workers=1
)
print(json.dumps(os.getpid()), flush=True)
with loader:
    for _ in range(epochs):
        input()
        for images, labels in loader:
            digest = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes())
            images.zero_()  # a job may write to its batches
            print(json.dumps(digest.hexdigest()), flush=True)
            del images, labels
            input()
        print(json.dumps("end"), flush=True)
in_use = device.memory().in_use
device.close()
print(json.dumps([how, device.faults, words, device.copied, in_use]), flush=True)
"""


def expected(epochs: int) -> list[str]:
    """What a loader without a device gives."""
    data = np.random.default_rng(0).integers(0, 256, (64, 6, 5, 3), np.uint8)
    pipeline = ps.from_dataset([(one, n) for n, one in enumerate(data)], random=False)
    digests = []
    with pipeline.batch(8).loader(seed=3, workers=0) as loader:
        for _ in range(epochs):
            for images, labels in loader:
                digests.append(hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest())
    return digests


def step(*running: WarmJob) -> list[Any]:
    """Let each job take its next batch, or end its epoch."""
    for job in running:
        job.go()
    return [job.read() for job in running]


def run_epoch(*running: WarmJob) -> list[list[Any]]:
    """The batches of an epoch, taken side by side."""
    rounds = [step(*running) for _ in range(9)]
    assert rounds.pop() == ["end"] * len(running)
    return [list(column) for column in zip(*rounds, strict=True)]


def read_to_the_end(job: WarmJob) -> None:
    while True:
        job.read()


def test_each_batch_crosses_the_bus_once_for_all_jobs() -> None:
    with jobs(WarmJob(SCRIPT, "plain", 3), WarmJob(SCRIPT, "plain", 3)) as (first, second):
        first.read(), second.read()
        digests = [run_epoch(first, second) for _ in range(3)]
        reports = [first.read(), second.read()]
    for number in range(2):
        assert [digest for epoch in digests for digest in epoch[number]] == expected(3)
    (one, *_), (other, *_) = reports
    # A job that has begun before the other has joined copies for itself.
    pairs = {name: {one[name], other[name]} for name in one if not name.startswith("0")}
    assert pairs == {name: {"made", "used"} for name in pairs}
    assert len(pairs) == 16
    for _, faults, words, _, in_use in reports:
        assert (faults, words, in_use) == ([], [], 0)
    # Each batch once; those of the first epoch perhaps twice.
    batch = 8 * (90 + 8)
    assert 24 * batch <= sum(report[3] for report in reports) <= 32 * batch


def test_jobs_normalize_what_they_share_into_memory_of_their_own() -> None:
    with jobs(WarmJob(SCRIPT, "normalize", 2), WarmJob(SCRIPT, "normalize", 2)) as (one, other):
        one.read(), other.read()
        for _ in range(2):
            mine, theirs = run_epoch(one, other)
            assert mine == theirs
        reports = [one.read(), other.read()]
    assert {kind for how, *_ in reports for kind in how.values()} >= {"made", "used"}
    assert [report[1:3] for report in reports] == [[[], []]] * 2


def test_a_job_that_dies_before_it_reports_its_copy_holds_nobody_up() -> None:
    with jobs(WarmJob(SCRIPT, "plain", 2)) as (job,):
        job.read()
        digests = step(job)
        with jobs(WarmJob(SCRIPT, "dying", 1)) as (dying,):
            dying.read()
            with pytest.raises(AssertionError, match="a job has ended"):
                read_to_the_end(dying)
            digests += [step(job)[0] for _ in range(7)]
            assert step(job) == ["end"]
            digests += run_epoch(job)[0]
            how, faults, *_ = job.read()
    assert digests == expected(2)
    assert faults == []
    assert set(how.values()) == {"alone"}


def test_a_job_that_joins_late_reads_the_copies_of_the_others() -> None:
    with jobs(WarmJob(SCRIPT, "plain", 3)) as (first,):
        first.read()
        run_epoch(first)
        with jobs(WarmJob(SCRIPT, "plain", 2)) as (late,):
            late.read()
            late_first = run_epoch(late)[0]
            first_second, late_second = run_epoch(first, late)
            how = late.read()[0]
        run_epoch(first)
        first.read()
    assert late_first == expected(1)
    assert first_second == late_second == expected(2)[8:]
    # The first job had asked for the first batches of its second epoch before the other was there.
    assert {how[f"1.{number}"] for number in range(4, 8)} <= {"made", "used"}


def test_a_job_on_another_device_copies_for_itself_and_says_so_once() -> None:
    with jobs(WarmJob(SCRIPT, "plain", 1), WarmJob(SCRIPT, "unshared", 1)) as (one, other):
        one.read(), other.read()
        assert run_epoch(one, other) == [expected(1)] * 2
        (how, faults, words, *_), (other_how, other_faults, other_words, *_) = (
            one.read(),
            other.read(),
        )
    assert set(how.values()) == set(other_how.values()) == {"alone"}
    assert (faults, other_faults, words) == ([], [], [])
    [word] = other_words
    assert "cannot share memory with other processes" in word
    assert "shares no copy" in word
