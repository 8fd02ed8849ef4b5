"""Training scripts without any Penstock code, run plainly and by ``penstock run``."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from penstock.cluster.secrets import make_secrets
from penstock.errors import ClusterError
from tests.support import SCRIPTS, warm
from tests.support.ports import free_port

torch = pytest.importorskip("torch")


class Ran(NamedTuple):
    code: int
    last: str
    """The last line of its output: the loss and a digest of all data."""
    messages: list[str]
    """The lines that Penstock printed."""


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def stopping(variables: dict[str, str]) -> Iterator[None]:
    """End the node of these tests after them."""
    yield
    stop = [sys.executable, "-m", "penstock", "stop", "--now"]
    subprocess.run(stop, env=variables, check=True, capture_output=True)


def command(script: str, *words: str, options: list[str]) -> list[str]:
    """The arguments of ``penstock`` with which it runs a script."""
    python = [sys.executable, str(SCRIPTS / script), *words]
    if script == "ranks.py":
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        python[1:1] = run
    return ["run", *options, "--", *python]


def ran(code: int, out: str, error: str) -> Ran:
    messages = [
        line for line in error.splitlines() if line.startswith(("penstock: ", "  without "))
    ]
    last = (out.splitlines() or [""])[-1]
    assert code == 3 or last.startswith("loss "), error
    return Ran(code, last, messages)


@pytest.fixture
def run(variables: dict[str, str], stopping: None) -> Run:
    """Runs a script by ``penstock run``, in processes of their own."""

    def run(script: str, *words: str, options: list[str]) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "penstock", *command(script, *words, options=options)],
            env=variables,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        return ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_warm(variables: dict[str, str], tmp_path: Path, stopping: None) -> Run:
    """The same in forks of a process that has imported torch."""

    def run(script: str, *words: str, options: list[str]) -> Ran:
        given = command(script, *words, options=options)
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        done = warm.penstock(given, variables, place)
        return ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_alone(variables: dict[str, str], tmp_path: Path) -> Run:
    """Runs a script without ``penstock run``, and without workers: they change no result."""

    def run(script: str, *words: str) -> Ran:
        done = warm.run(SCRIPTS / script, [*words, "--workers", "0"], variables, tmp_path)
        return ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.mark.usefixtures("torchvision")
def test_a_tutorial_trains_the_same_with_a_cache(run: Run, run_alone: Run, place: Path) -> None:
    words = ("plain.py", "--data", str(place / "photos"))
    alone = run_alone(*words)
    upgraded = run(*words, "--workers", "1", options=["--cache", "1MB"])
    assert upgraded[:2] == alone[:2] == (0, alone.last)
    train, val, total = upgraded.messages
    assert train.startswith("penstock: DataLoader 1 (ImageFolder, 26 samples, shuffled) is upgr")
    assert val.startswith("penstock: DataLoader 2 (ImageFolder, 9 samples, in order) is upgraded")
    assert train.endswith("; cache 1MB.")
    assert val.endswith("; cache 1MB.")
    assert total == "penstock: 2 of 2 DataLoaders upgraded."


@pytest.mark.usefixtures("torchvision")
def test_sharing_jobs_see_the_same_batches_and_only_training_reuses(
    run_warm: Run, place: Path
) -> None:
    words = ("plain.py", "--data", str(place / "photos"), "--workers", "0", "--augment")
    options = ["--share", "search", "--seed", "4", "--reuse", "3", "--split", "3", "--native"]
    with ThreadPoolExecutor(2) as both:
        jobs = [both.submit(run_warm, *words, options=options) for _ in range(2)]
    one, other = [job.result() for job in jobs]
    assert one.last == other.last
    for job in (one, other):
        train, val, total = job.messages
        assert "in the node of this machine (share='search'); reuse 3; split 3;" in train
        assert train.endswith("; shuffled by Penstock.")
        assert val.endswith("is upgraded: in this process (workers=0).")
        assert total == "penstock: 2 of 2 DataLoaders upgraded."


@pytest.mark.usefixtures("torchvision")
def test_a_script_joins_a_cluster_without_an_edit(
    run_warm: Run, place: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    try:
        make_secrets(place / "secret")
    except ClusterError as error:
        pytest.skip(str(error))
    monkeypatch.setitem(variables, "PENSTOCK_CLUSTER_SECRET", str(place / "secret"))
    address = f"127.0.0.1:{free_port()}"
    words = ("plain.py", "--data", str(place / "photos"), "--workers", "0")
    options = ["--cache", "1MB", "--seed", "4", "--cluster", address]
    ran = run_warm(*words, options=options)
    assert ran.code == 0
    train, val, total = ran.messages
    assert "in the node of this machine" in train
    assert "cluster auto; cache 1MB" in train
    assert "cluster" not in val
    assert total == "penstock: 2 of 2 DataLoaders upgraded."


def test_a_script_with_its_own_dataset_and_sampler_trains_the_same(
    run_warm: Run, run_alone: Run
) -> None:
    alone = run_alone("custom.py")
    upgraded = run_warm("custom.py", "--workers", "0", options=["--cache", "1MB"])
    assert upgraded[:2] == alone[:2]
    assert upgraded.messages[1].startswith("  without --cache: the dataset may be random")
    assert upgraded.messages[2] == (
        "penstock: 1 of 1 DataLoaders upgraded, 1 of them without some of the given options; "
        "the reasons are above."
    )


def test_a_script_can_catch_the_exceptions_of_its_dataset(run_warm: Run) -> None:
    ran = run_warm("custom.py", "--broken", "5", "--workers", "0", options=[])
    assert (ran.code, ran.last) == (3, "skipped the rest: a sequence is missing")


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_libraries_train_the_same(library: str, run_warm: Run, run_alone: Run) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    alone = run_alone(f"with_{library}.py")
    upgraded = run_warm(f"with_{library}.py", options=["--kind", "threads", "--no-random"])
    assert upgraded[:2] == alone[:2]
    assert upgraded.messages[-1] == "penstock: 2 of 2 DataLoaders upgraded."
    assert sum("2 threads" in line for line in upgraded.messages) == 2


def test_ranks_get_disjoint_parts_and_only_the_first_prints_messages(run: Run) -> None:
    ran = run("ranks.py", options=["--workers", "1", "--kind", "threads", "--no-random"])
    assert ran.last.split()[-2:] == [digest_of_rank(0), digest_of_rank(1)]
    loader, total = ran.messages
    assert loader.endswith('is upgraded: 1 thread (kind="threads").')
    assert total == "penstock: 1 of 1 DataLoaders upgraded."


def digest_of_rank(rank: int) -> str:
    """The digest that ranks.py prints for the data of a rank."""
    sampler = torch.utils.data.DistributedSampler(range(42), 2, rank, shuffle=True)
    seen = hashlib.sha256()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index in sampler:
            seen.update(torch.tensor([index / 42, 1.0]).numpy().tobytes())
    return seen.hexdigest()[:16]


@pytest.mark.usefixtures("stopping")
def test_no_process_and_no_file_is_left_behind(place: Path, variables: dict[str, str]) -> None:
    stop = [sys.executable, "-m", "penstock", "stop"]
    subprocess.run(stop, env=variables, check=True, capture_output=True)
    mine = str(place / "runtime")

    def left() -> list[list[str]]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("PENSTOCK_RUNTIME_DIR") == mine:
                    found.append(process.cmdline())
            except psutil.Error:
                continue
        return found

    # A node that is just ending by itself has no socket any more, so the command does not wait.
    deadline = time.monotonic() + 100
    while left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left() == []
    assert [path for path in (place / "memory").rglob("*") if path.is_file()] == []
    assert list((place / "temporary").glob("penstock-*")) == []
