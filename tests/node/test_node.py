"""Jobs that share a node: each gets its batches, whatever the others and the node do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import DeadlySampleError, PipelineError, SampleError, WorkerError
from penstock.node.client import request_status, wait_for_exit
from penstock.node.directory import NodeDirectory
from penstock.node.member import DEPTH
from tests.support import ROOT

N, BATCH = 53, 8
LENGTH = -(-N // BATCH)


def noisy(value: Any, rng: np.random.Generator) -> Any:
    return np.array([value, rng.random()])


def pipeline(batch: int = BATCH) -> ps.Pipeline:
    return ps.from_dataset(np.arange(float(N))).map(noisy).batch(batch)


def rows(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.fixture(scope="module")
def alone() -> list[list[Any]]:
    """Three epochs of a loader without ``share``."""
    with pipeline().loader(seed=5, workers=0) as loader:
        return [rows(loader) for _ in range(3)]


def in_order_of_number(epoch: list[Any], expected: list[Any]) -> list[Any]:
    """The batches of an epoch that may have begun in the middle, with batch 0 first."""
    first = expected.index(epoch[0])
    return epoch[len(epoch) - first :] + epoch[: len(epoch) - first]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_shared_batches_equal_those_of_a_loader_without_share(
    node_directory: NodeDirectory, kind: Any, alone: list[list[Any]]
) -> None:
    received: dict[int, list[list[Any]]] = {}

    def run(number: int) -> None:
        with pipeline().loader(seed=5, kind=kind, share="a") as loader:
            received[number] = [rows(loader) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert received == {0: alone, 1: alone, 2: alone}


def test_every_batch_is_prepared_once_for_all_jobs(
    node_directory: NodeDirectory, alone: list[list[Any]]
) -> None:
    with (
        pipeline().loader(seed=5, share="a") as one,
        pipeline().loader(seed=5, share="a") as other,
    ):
        for mine, theirs, expected in zip(one, other, alone[0], strict=True):
            assert mine.tolist() == theirs.tolist() == expected
        status = request_status(node_directory)
        assert status is not None
        (group,) = status["groups"]
        # The next epoch is begun early, by as many batches as members ask for in advance.
        assert LENGTH <= group["prepared"] <= LENGTH + DEPTH
        assert group["given"] >= 2 * LENGTH
        assert [member["pid"] for member in group["members"]] == [os.getpid()] * 2


def test_the_node_ends_after_the_last_member_has_left(node_directory: NodeDirectory) -> None:
    with pipeline().loader(seed=5, share="a") as loader:
        rows(loader)
        status = request_status(node_directory)
    assert status is not None
    assert wait_for_exit(status["pid"], 100)
    assert request_status(node_directory) is None
    assert not node_directory.socket.exists()
    with pipeline().loader(seed=5, share="a") as loader:
        assert len(rows(loader)) == LENGTH


def test_only_its_user_can_open_the_directory_of_a_node(node_directory: NodeDirectory) -> None:
    with pipeline().loader(seed=5, share="a") as loader:
        next(iter(loader))
        assert node_directory.path.stat().st_mode & 0o777 == 0o700
        assert node_directory.socket.stat().st_mode & 0o777 == 0o600
    node_directory.path.chmod(0o755)
    with (
        pipeline().loader(seed=5, share="a") as loader,
        pytest.raises(ps.PenstockError, match="chmod 700"),
    ):
        next(iter(loader))
    node_directory.path.chmod(0o700)


def test_another_pipeline_is_refused_and_the_error_names_the_difference(
    node_directory: NodeDirectory,
) -> None:
    with pipeline().loader(seed=5, share="a") as loader:
        next(iter(loader))
        for other, differs in [
            (pipeline().loader(seed=6, share="a"), "seed was 5 and is 6"),
            (
                ps.from_dataset(np.arange(float(N)))
                .map(np.sqrt, random=False)
                .batch(8)
                .loader(seed=5, share="a"),
                r"the stops were \['noisy'\] and are \['sqrt'\]",
            ),
        ]:
            with other, pytest.raises(PipelineError, match=f"share='a': .*{differs}"):
                next(iter(other))
        # Under another name both run at the same time.
        with pipeline().loader(seed=6, share="b") as other:
            assert len(rows(other)) == LENGTH


def test_a_write_into_a_batch_is_invisible_to_other_jobs(
    node_directory: NodeDirectory, alone: list[list[Any]]
) -> None:
    with (
        pipeline().loader(seed=5, share="a") as one,
        pipeline().loader(seed=5, share="a") as other,
    ):
        for epoch in range(3):
            for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
                assert mine.tolist() == alone[epoch][number]
                mine[:] = -1.0
                assert theirs.tolist() == alone[epoch][number]


def test_batches_may_be_kept(node_directory: NodeDirectory, alone: list[list[Any]]) -> None:
    with pipeline(1).loader(seed=5, share="a") as loader:
        kept = list(loader)
        later = list(loader)
    assert [batch.tolist()[0] for batch in kept] == [r for batch in alone[0] for r in batch]
    assert [batch.tolist()[0] for batch in later] == [r for batch in alone[1] for r in batch]


def test_a_member_that_joins_late_gets_every_batch_once(
    node_directory: NodeDirectory, alone: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_STAGING", "1")
    with pipeline().loader(seed=5, share="a") as one:
        first = iter(one)
        for _ in range(5):
            next(first)
        with pipeline().loader(seed=5, share="a") as late:
            epochs = [rows(late) for _ in range(2)]
    assert in_order_of_number(epochs[0], alone[0]) == alone[0]
    assert in_order_of_number(epochs[1], alone[1]) == alone[1]


def test_a_checkpoint_of_an_epoch_begun_in_the_middle_resumes_there(
    node_directory: NodeDirectory, alone: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_STAGING", "1")
    monkeypatch.setenv("PENSTOCK_NODE_IDLE", "30")
    with pipeline().loader(seed=5, share="a") as one:
        first = iter(one)
        for _ in range(2):
            next(first)
        with pipeline().loader(seed=5, share="a") as late:
            epoch = iter(late)
            begun = [next(epoch).tolist() for _ in range(2)]
            state = json.loads(json.dumps(late.state_dict()))
    assert state["first_batch"] > 0
    for options in ({"share": "a"}, {"workers": 0}):
        with pipeline().loader(seed=5, **options) as again:
            again.load_state_dict(state)
            rest = rows(again)
            assert in_order_of_number(begun + rest, alone[0]) == alone[0]
            assert in_order_of_number(rows(again), alone[1]) == alone[1]
    with (
        pipeline(4).loader(seed=5, workers=0) as other,
        pytest.raises(ps.PenstockError, match="begun in the middle"),
    ):
        other.load_state_dict(state)


def test_ranks_get_disjoint_parts(node_directory: NodeDirectory) -> None:
    seen: dict[int, list[float]] = {}
    with (
        pipeline().loader(seed=5, share="a", rank=0, world=2) as one,
        pipeline().loader(seed=5, share="a", rank=1, world=2) as other,
    ):
        for rank, loader in enumerate((one, other)):
            seen[rank] = [row[0] for batch in loader for row in batch.tolist()]
    expected = []
    for rank in range(2):
        with pipeline().loader(seed=5, workers=0, rank=rank, world=2) as loader:
            expected.append([row[0] for batch in loader for row in batch.tolist()])
    assert [seen[0], seen[1]] == expected
    assert set(seen[0]) | set(seen[1]) == set(range(N))


def bad(value: Any) -> Any:
    if value == 11:
        raise ValueError("not this one")
    return value


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_bad_sample_is_an_error_for_the_member_and_does_not_end_the_group(
    node_directory: NodeDirectory, kind: Any
) -> None:
    written = ps.from_dataset(np.arange(float(N))).map(bad, random=False).batch(BATCH)
    with written.loader(seed=5, kind=kind, shuffle=False, share="a") as loader:
        epoch = iter(loader)
        assert next(epoch).tolist() == list(range(8))
        with pytest.raises(SampleError, match="not this one"):
            next(epoch)
        loader.set_epoch(1)
        assert next(iter(loader)).tolist() == list(range(8))
    skipping = written.loader(seed=5, shuffle=False, share="b", kind=kind, on_error="skip")
    with skipping as loader:
        assert [row for batch in loader for row in batch.tolist()] == [
            float(i) for i in range(N) if i != 11
        ]
        (sample,) = loader.stats().bad_samples
        assert (sample.index, sample.stage) == (11, "bad")


def test_a_pipeline_that_the_node_cannot_load_is_an_error(node_directory: NodeDirectory) -> None:
    class Unloadable:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return 0.0

        def __reduce__(self) -> Any:
            return int, ("unloadable",)

    written = ps.from_dataset(Unloadable(), version="1", random=False).batch(2)
    with written.loader(share="a") as loader, pytest.raises(ValueError, match="unloadable"):
        next(iter(loader))


class DeadlyToLoad:
    """A dataset that kills every process that unpickles it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return 0.0

    def __reduce__(self) -> Any:
        return os.abort, ()


def test_a_pipeline_that_kills_its_loader_does_not_end_the_node(
    node_directory: NodeDirectory, alone: list[list[Any]]
) -> None:
    with pipeline().loader(seed=5, share="other") as other:
        epoch = iter(other)
        first = [next(epoch).tolist()]
        written = ps.from_dataset(DeadlyToLoad(), version="1", random=False).batch(2)
        with (
            written.loader(share="a") as loader,
            pytest.raises(WorkerError, match=r"cannot be loaded: .* killed by SIGABRT"),
        ):
            next(iter(loader))
        assert first + rows(epoch) == alone[0]
        assert other.stats().pool.restarts == 0


def test_streams_and_stages_with_auto_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"share='a' on a stream"):
        ps.from_dataset(lambda: iter(range(3))).batch(2).loader(share="a")
    with pytest.raises(PipelineError, match="share='a' with \"auto\""):
        pipeline().echo("auto").loader(share="a")
    with pytest.raises(PipelineError, match="share is ''"):
        pipeline().loader(share="")


def test_a_member_of_another_version_is_refused(
    node_directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline().loader(seed=5, share="a") as loader:
        next(iter(loader))
        monkeypatch.setattr("penstock.node.member.VERSION", 999)
        with (
            pipeline().loader(seed=5, share="a") as other,
            pytest.raises(PipelineError, match=r"a node of Penstock .* is running"),
        ):
            next(iter(other))


def test_a_forked_process_of_a_member_changes_nothing(
    node_directory: NodeDirectory, alone: list[list[Any]]
) -> None:
    with pipeline().loader(seed=5, share="a") as loader:
        epoch = iter(loader)
        mine = [next(epoch)]
        child = os.fork()
        if child == 0:
            mine.clear()
            os._exit(0)
        os.waitpid(child, 0)
        assert mine[0].tolist() == alone[0][0]
        assert rows(epoch) == alone[0][1:]
        assert loader.stats().pool.restarts == 0


def test_a_new_node_waits_for_one_that_is_ending(node_directory: NodeDirectory) -> None:
    ending = node_directory.claim()
    assert ending is not None
    timer = threading.Timer(1.0, os.close, (ending,))
    timer.start()
    with pipeline().loader(seed=5, share="a") as loader:
        assert len(rows(loader)) == LENGTH
    timer.join()


def test_a_node_that_cannot_start_is_an_error_with_its_log(
    node_directory: NodeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NODE_WORKERS", "none")
    with (
        pipeline().loader(seed=5, share="a") as loader,
        pytest.raises(WorkerError, match=r"(?s)no node could be started.*PENSTOCK_NODE_WORKERS is"),
    ):
        next(iter(loader))


class Nearby:
    """A dataset that opens files by relative paths."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(Path(f"numbers/{index}").read_text())


@pytest.mark.parametrize("kind", ["auto", "threads"])
def test_relative_paths_are_relative_to_the_directory_of_the_job(
    node_directory: NodeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    for where in range(2):
        (tmp_path / f"{where}" / "numbers").mkdir(parents=True)
        for index in range(4):
            (tmp_path / f"{where}" / "numbers" / f"{index}").write_text(f"{where}{index}")
    loaders = []
    for where in range(2):
        monkeypatch.chdir(tmp_path / f"{where}")
        written = ps.from_dataset(Nearby(), random=False, version="1").batch(4)
        loader = written.loader(shuffle=False, kind=kind, share=f"{where}")
        loaders.append(loader)
        assert next(iter(loader)).tolist() == [10.0 * where + index for index in range(4)]
    with (
        written.loader(shuffle=False, kind=kind, share="0") as other,
        pytest.raises(PipelineError, match=r"directory was '.*/0' and is '.*/1'.*Ray Tune"),
    ):
        next(iter(other))
    for loader in loaders:
        loader.close()


JOB = """
import json, sys
sys.path.insert(0, {root!r})
from tests.node.test_node import pipeline
with pipeline().loader(seed=5, share="a") as loader:
    for epoch in range({epochs}):
        for number, batch in enumerate(loader):
            print(json.dumps([epoch, batch.tolist()]), flush=True)
            if (epoch, number) == ({at}, 3):
                sys.stdin.readline()
"""


class Script:
    """A job in its own process. In epoch ``at`` it waits for a line on its standard input."""

    def __init__(self, epochs: int = 2, at: int = 0) -> None:
        root = str(ROOT)
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB.format(root=root, epochs=epochs, at=at)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.epochs: list[list[Any]] = [[] for _ in range(epochs)]

    def read(self, batches: int) -> None:
        for _ in range(batches):
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            epoch, batch = json.loads(line)
            self.epochs[epoch].append(batch)

    def finish(self) -> list[list[Any]]:
        out, errors = self.process.communicate("\n", timeout=120)
        for line in out.splitlines():
            epoch, batch = json.loads(line)
            self.epochs[epoch].append(batch)
        # Its last batch is alive until the interpreter ends.
        assert (self.process.returncode, "Exception ignored" in errors) == (0, False), errors
        return self.epochs


def all_in_order(epochs: list[list[Any]], alone: list[list[Any]]) -> list[list[Any]]:
    pairs = zip(epochs, alone, strict=False)
    return [in_order_of_number(epoch, expected) for epoch, expected in pairs]


def test_a_killed_member_does_not_disturb_the_others(
    node_directory: NodeDirectory, alone: list[list[Any]]
) -> None:
    with pipeline().loader(seed=5, share="a") as loader:
        victim = Script()
        victim.read(4)
        first = iter(loader)
        mine = [next(first).tolist() for _ in range(3)]
        victim.process.kill()
        victim.process.communicate()
        mine += rows(first)
        assert [mine, rows(loader)] == alone[:2]
        status = request_status(node_directory)
    assert status is not None
    assert [len(group["members"]) for group in status["groups"]] == [1]


def test_after_a_node_is_killed_no_batch_is_lost_or_repeated(
    node_directory: NodeDirectory, alone: list[list[Any]]
) -> None:
    jobs = [Script(), Script()]
    for job in jobs:
        job.read(4)
    with pipeline().loader(seed=5, share="a") as loader:
        first = iter(loader)
        mine = [next(first).tolist() for _ in range(2)]
        status = request_status(node_directory)
        assert status is not None
        os.kill(status["pid"], signal.SIGKILL)
        assert wait_for_exit(status["pid"], 100)
        mine += rows(first)
        assert in_order_of_number(mine, alone[0]) == alone[0]
        assert in_order_of_number(rows(loader), alone[1]) == alone[1]
        assert loader.stats().pool.restarts == 1
        for job in jobs:
            assert all_in_order(job.finish(), alone) == alone[:2]
        again = request_status(node_directory)
    assert again is not None
    assert again["pid"] != status["pid"]


def test_a_paused_member_gets_its_remaining_batches(
    node_directory: NodeDirectory, alone: list[list[Any]]
) -> None:
    job = Script()
    job.read(4)
    job.process.send_signal(signal.SIGSTOP)
    with pipeline().loader(seed=5, share="a") as loader:
        assert in_order_of_number(rows(loader), alone[0]) == alone[0]
        assert in_order_of_number(rows(loader), alone[1]) == alone[1]
        job.process.send_signal(signal.SIGCONT)
        assert all_in_order(job.finish(), alone) == alone[:2]


def killed(value: Any) -> Any:
    if value == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


@pytest.mark.parametrize("kind", ["auto", "threads"])
def test_a_sample_that_kills_its_process_does_not_end_the_node(
    node_directory: NodeDirectory, alone: list[list[Any]], kind: Any
) -> None:
    written = ps.from_dataset(np.arange(float(N))).map(killed, random=False).batch(BATCH)
    with pipeline().loader(seed=5, share="other") as other:
        epoch = iter(other)
        first = [next(epoch).tolist() for _ in range(2)]
        before = request_status(node_directory)
        with (
            written.loader(seed=5, kind=kind, shuffle=False, share="a") as loader,
            pytest.raises(DeadlySampleError, match="SIGKILL"),
        ):
            for _ in loader:
                pass
        assert first + rows(epoch) == alone[0]
        assert other.stats().pool.restarts == 0
        after = request_status(node_directory)
    assert before is not None
    assert after is not None
    assert before["pid"] == after["pid"]
