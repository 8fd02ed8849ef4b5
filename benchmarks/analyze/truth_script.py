"""A training script with a known bottleneck, for the ground truth of ``truth``.

``python -m benchmarks.analyze.truth_script JSON`` trains as the JSON of a ``Script`` says, and
prints what it has measured itself as JSON: it knows nothing of an analysis.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

BOTTLENECKS = (
    "compute",
    "decode",
    "python",
    "sleep",
    "open",
    "bytes",
    "lock",
    "cache",
    "mixed",
)
KINDS = ("torch", "ours", "lightning")

SAMPLES, BATCH = 512, 16
SLEEP, OPEN, LOCK = 0.030, 0.020, 0.004
LOOPS = 60_000
"""Rounds of a loop in Python: some 3 ms."""

SAMPLE_BYTES, BYTES_PER_SECOND = 100_000, 20_000_000
KEPT = 0.4
"""Share of the samples that the small cache holds."""


@dataclass(frozen=True)
class Script:
    """``step``: seconds of a training step. With ``constant`` one batch in memory is used all the
    time, and no loader. ``seconds``: when to stop, after ``warm_up`` steps; 0: never."""

    bottleneck: str
    step: float
    kind: str = "torch"
    workers: int = 2
    cache: int = 0
    constant: bool = False
    seconds: float = 0.0
    warm_up: int = 6

    def words(self) -> list[str]:
        return ["-m", "benchmarks.analyze.truth_script", json.dumps(asdict(self))]


class Samples:
    """A dataset whose samples take their time in one known way."""

    def __init__(self, script: Script, place: Path) -> None:
        self.bottleneck = script.bottleneck
        self.place = place

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        kind = self.bottleneck
        if kind == "decode":
            decode(self.place / f"{index % 16}.jpg")
        elif kind == "python":
            spin(LOOPS)
        elif kind == "sleep":
            time.sleep(SLEEP)
        elif kind == "open":
            slow_open(self.place)
        elif kind == "bytes" or (kind == "cache" and index >= KEPT * SAMPLES):
            fetch(self.place)
        elif kind == "lock":
            with open(self.place / "lock", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                time.sleep(LOCK)
        elif kind == "mixed":
            time.sleep(SLEEP / 4)
            spin(LOOPS)
        return np.full(64, index, np.float32)


def decode(path: Path) -> None:
    import cv2

    cv2.setNumThreads(0)
    for _ in range(3):
        cv2.imread(str(path))


def spin(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number & 3
    return total


def slow_open(place: Path) -> None:
    """Open a file whose ``open`` takes as long as on a slow network mount: a pipe."""
    with open(place / f"pipe-{os.getpid() % 2}", "rb") as file:
        file.read()


def fetch(place: Path) -> None:
    """Get a sample from a server that sends all clients together a limited number of bytes."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place / "server"))
        while client.recv(1 << 16):
            pass


def serve_bytes(place: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(place / "server"))
    server.listen(64)
    sample, turn = bytes(SAMPLE_BYTES), threading.Lock()
    free = [time.perf_counter()]

    def answer(client: socket.socket) -> None:
        with turn:
            free[0] = max(free[0], time.perf_counter()) + SAMPLE_BYTES / BYTES_PER_SECOND
            until = free[0]
        time.sleep(max(0.0, until - time.perf_counter()))
        with client, contextlib.suppress(OSError):
            client.sendall(sample)

    while True:
        client, _ = server.accept()
        threading.Thread(target=answer, args=(client,), daemon=True).start()


def serve_opens(path: Path) -> None:
    """Let each ``open`` of the pipe wait: it ends when this process opens the other end."""
    while True:
        time.sleep(OPEN)
        with contextlib.suppress(OSError), open(path, "wb") as file:
            file.write(b"sample")


@contextlib.contextmanager
def surroundings(script: Script) -> Iterator[Path]:
    """The files and servers that the dataset needs."""
    with tempfile.TemporaryDirectory(prefix="penstock-truth-") as name:
        place = Path(name)
        servers = []
        context = get_context("fork")
        if script.bottleneck == "decode":
            import cv2
            import numpy as np

            rng = np.random.default_rng(0)
            for number in range(16):
                small = rng.integers(0, 256, (24, 32, 3), np.uint8)
                cv2.imwrite(str(place / f"{number}.jpg"), cv2.resize(small, (400, 300)))
        elif script.bottleneck in ("bytes", "cache"):
            servers = [context.Process(target=serve_bytes, args=(place,), daemon=True)]
        elif script.bottleneck == "open":
            for number in range(2):
                os.mkfifo(place / f"pipe-{number}")
            servers = [
                context.Process(target=serve_opens, args=(place / f"pipe-{number}",), daemon=True)
                for number in range(2)
            ]
        for server in servers:
            server.start()
        until = time.monotonic() + 10
        while servers and script.bottleneck != "open" and time.monotonic() < until:
            if (place / "server").exists():
                break
            time.sleep(0.01)
        try:
            yield place
        finally:
            for server in servers:
                server.kill()
                server.join()


class Meter:
    """The script's own clock: waits for batches, and steps, after the warm-up."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.steps = 0
        self.wait = self.step = 0.0
        self.asked = self.began = time.perf_counter()

    def got(self) -> None:
        """A batch has arrived."""
        self.began = time.perf_counter()

    def done(self) -> bool:
        """A step is done; whether the script shall end."""
        now = time.perf_counter()
        if self.steps >= self.script.warm_up:
            self.wait += self.began - self.asked
            self.step += now - self.began
        self.steps += 1
        self.asked = now
        spent = self.wait + self.step
        return 0 < self.script.seconds <= spent and self.steps >= self.script.warm_up + 4

    def show(self) -> None:
        counted = max(1, self.steps - self.script.warm_up)
        speed = counted * BATCH / (self.wait + self.step)
        found = {"speed": speed, "wait": self.wait / counted, "step": self.step / counted}
        print(json.dumps(found), flush=True)


def train_step(script: Script, batch: Any) -> None:
    """A step sleeps, as if on an accelerator; where computing is the bottleneck it computes."""
    if script.bottleneck != "compute":
        time.sleep(script.step)
        return
    import numpy as np

    matrix = np.ones((96, 96), np.float32)
    until = time.thread_time() + script.step
    while time.thread_time() < until:
        matrix @ matrix


def main(text: str) -> None:
    import torch

    torch.set_num_threads(1)
    # An analysis without a result ends the script so; its servers must not stay behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    script = Script(**json.loads(text))
    with surroundings(script) as place:
        meter = Meter(script)
        dataset = Samples(script, place)
        if script.kind == "lightning":
            _with_lightning(script, dataset, meter)
        else:
            _plainly(script, dataset, meter)
        meter.show()


class Constant:
    """An epoch of one batch in memory. No list, which Lightning takes for several loaders."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.batch, len(self))


def _loader(script: Script, dataset: Samples) -> Any:
    if script.constant:
        import torch

        return Constant(torch.zeros(BATCH, 64))
    if script.kind == "ours":
        import penstock as ps

        pipeline = ps.from_dataset(dataset)
        if script.cache:
            pipeline = pipeline.cache(script.cache)
        return pipeline.batch(BATCH, drop_last=True).loader(
            workers=script.workers, kind="processes", seed=0
        )
    from torch.utils.data import DataLoader

    # By its duck type: an import of torch's Dataset would slow down every worker.
    return DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=script.workers,
        persistent_workers=script.workers > 0,
    )


def _plainly(script: Script, dataset: Samples, meter: Meter) -> None:
    loader = _loader(script, dataset)
    try:
        while True:
            for batch in loader:
                meter.got()
                train_step(script, batch)
                if meter.done():
                    return
    finally:
        close = getattr(loader, "close", None)
        if close is not None:
            close()


def _with_lightning(script: Script, dataset: Samples, meter: Meter) -> None:
    import logging

    import lightning
    import torch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            train_step(script, batch)
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class Watch(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            meter.got()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if meter.done():
                trainer.should_stop = True
                trainer.limit_train_batches = 0

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    trainer.fit(Model(), _loader(script, dataset))


if __name__ == "__main__":
    main(sys.argv[1])
