"""A folder of a million files: what loaders take before the first batch, and what grows with n."""

from __future__ import annotations

import io
import os
import pickle
import resource
import shutil
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.environments import interpreter, process_environment
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.peers.torchvision_pil import import_torchvision

IN_FOLDER = 1000
"""Files in each folder. File systems limit the links to one file, ext4 to 65,000."""

FOLDERS_IN_CLASS = 5

SMALLER = 10
"""The first run has this many times fewer files, to show what grows with their number."""

BATCH = 64

SIDE = 32
"""Height and width of images in a batch. They are small: the list of files is measured."""


def make_files(root: Path, files: int) -> None:
    """Files in nested class folders, all of one folder the same file: links take no space."""
    content = photograph()
    for first in range(0, files, IN_FOLDER):
        number = first // IN_FOLDER
        folder = root / f"{number // FOLDERS_IN_CLASS:05}" / f"{number % FOLDERS_IN_CLASS}"
        folder.mkdir(parents=True)
        one = f"{first:09}.jpg"
        (folder / one).write_bytes(content)
        here = os.open(folder, os.O_RDONLY)
        try:
            for name in range(first + 1, min(files, first + IN_FOLDER)):
                os.link(one, f"{name:09}.jpg", src_dir_fd=here, dst_dir_fd=here)
        finally:
            os.close(here)


def photograph() -> bytes:
    """A small JPEG."""
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (2 * SIDE, 2 * SIDE), "teal").save(written, "JPEG")
    return written.getvalue()


def resident() -> float:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * resource.getpagesize())


class Steps:
    """Seconds of each step, and the memory that they took."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._before = resident()

    def timed(self, step: str, call: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        self.values[step] = time.perf_counter() - wall
        self.values[f"{step}, CPU"] = time.process_time() - cpu
        return result

    def done(self) -> dict[str, float]:
        """All values, with the memory that this process has and had at most, beyond the imports."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        self.values["memory"] = resident() - self._before
        self.values["peak"] = max(0.0, peak - self._before)
        return self.values


def first_of(loader: Iterable[Any]) -> Any:
    """The first batch, and the iterator that gave it, which ends the workers when it goes."""
    epoch = iter(loader)
    return next(epoch), epoch


def from_folder(root: str, workers: int) -> dict[str, float]:
    import penstock as ps
    import penstock.loader

    steps = Steps()
    source = steps.timed("create", lambda: ps.from_folder(root))
    cropped = source.map(ps.image.decode()).map(ps.image.random_resized_crop(SIDE))
    loader = cropped.batch(BATCH).loader(workers=workers)
    steps.timed("first batch", lambda: first_of(loader))
    state = steps.timed("state_dict", loader.state_dict)
    steps.timed("identity", source.source.identity)
    steps.values["sent"] = float(len(pickle.dumps(source.source)))
    steps.values["state"] = float(len(pickle.dumps(state)))
    values = steps.done()
    loader.close()
    return values


def drop_in(root: str, workers: int) -> dict[str, float]:
    torchvision = import_torchvision()
    from penstock.torch import DataLoader

    steps = Steps()
    folder = steps.timed("create", lambda: _image_folder(torchvision, root))
    loader = steps.timed(
        "loader", lambda: DataLoader(folder, BATCH, shuffle=True, num_workers=workers)
    )
    steps.timed("first batch", lambda: first_of(loader))
    state = steps.timed("state_dict", loader.state_dict)
    source = loader._loader.pipeline.source
    steps.timed("identity", source.identity)
    steps.values["sent"] = float(len(pickle.dumps(source)))
    steps.values["state"] = float(len(pickle.dumps(state)))
    values = steps.done()
    loader.close()
    return values


def image_folder(root: str, workers: int) -> dict[str, float]:
    torchvision = import_torchvision()
    from torch.utils.data import DataLoader

    steps = Steps()
    folder = steps.timed("create", lambda: _image_folder(torchvision, root))
    loader = DataLoader(folder, BATCH, shuffle=True, num_workers=workers)
    steps.timed("first batch", lambda: first_of(loader))
    steps.values["sent"] = float(len(pickle.dumps(folder)))
    return steps.done()


def _image_folder(torchvision: Any, root: str) -> Any:
    transforms = torchvision.transforms
    steps = [transforms.RandomResizedCrop(SIDE), transforms.ToTensor()]
    return torchvision.datasets.ImageFolder(root, transforms.Compose(steps))


def dali(root: str, workers: int) -> dict[str, float]:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=BATCH, num_threads=workers, device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        data, label = fn.readers.file(file_root=root, random_shuffle=True)
        return fn.resize(fn.decoders.image(data, device="cpu"), size=[SIDE, SIDE]), label

    steps = Steps()
    # The reader lists the files when the pipeline is built.
    made = steps.timed("create", lambda: _built(pipeline()))
    steps.timed("first batch", made.run)
    return steps.done()


def _built(pipeline: Any) -> Any:
    pipeline.build()
    return pipeline


@dataclass(frozen=True)
class Entry:
    """A loader to measure. ``needs``: the modules it imports, from the environment ``env``."""

    title: str
    measure: Callable[[str, int], dict[str, float]]
    needs: tuple[str, ...] = ()
    env: str = ""


ENTRIES = (
    Entry("Penstock from_folder", from_folder),
    Entry("Penstock drop-in, ImageFolder", drop_in, ("torch", "torchvision")),
    Entry("torch DataLoader, ImageFolder", image_folder, ("torch", "torchvision"), "torch"),
    Entry("DALI file reader", dali, ("nvidia.dali",), "dali"),
)

COLUMNS = (
    ("create s", "create", 1.0),
    ("its CPU s", "create, CPU", 1.0),
    ("loader s", "loader", 1.0),
    ("first batch s", "first batch", 1.0),
    ("memory MB", "memory", 1e-6),
    ("peak MB", "peak", 1e-6),
    ("to workers MB", "sent", 1e-6),
    ("identity s", "identity", 1.0),
    ("state_dict ms", "state_dict", 1e3),
    ("state KB", "state", 1e-3),
)


def cells(values: dict[str, float]) -> list[str]:
    """The cells of a row; a step that a loader does not have is left empty."""
    return [
        f"{values[name] * factor:,.2f}" if name in values else "" for _, name, factor in COLUMNS
    ]


def run(options: Namespace) -> Result:
    parent = options.scratch or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    wrong: list[str] = []
    data: dict[str, Any] = {}
    for files in sorted({max(1, options.files // SMALLER), options.files}):
        root = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir=parent))
        try:
            progress(f"files: making {files:,} files in {root}")
            make_files(root / "data", files)
            for entry in ENTRIES:
                values = _measure(entry, root, files, options.workers, notes, wrong)
                if values is not None:
                    data[f"{entry.title}, {files}"] = values
                    rows.append((entry.title, f"{files:,}", *cells(values)))
        finally:
            shutil.rmtree(root)
    title = f"files: in class folders, batches of {BATCH} small images, {options.workers} workers"
    heads = ("loader", "files", *(head for head, _, _ in COLUMNS))
    return Result(
        (Table(title, heads, tuple(rows)),), tuple(dict.fromkeys(notes)), tuple(wrong), data
    )


def _measure(
    entry: Entry, root: Path, files: int, workers: int, notes: list[str], wrong: list[str]
) -> dict[str, float] | None:
    chosen = interpreter(entry.env, entry.needs)
    if chosen.why_not:
        notes.append(f"files: {entry.title}: {chosen.why_not}")
        return None
    progress(f"files: {files:,}: {entry.title}")
    place = root / "home"
    place.mkdir(exist_ok=True)
    try:
        values: dict[str, float] = run_alone(
            entry.measure,
            str(root / "data"),
            workers,
            timeout=3600,
            python=chosen.python,
            environment=process_environment(chosen.python, place, {}),
        ).value
    except AloneError as error:
        progress(error.printed)
        wrong.append(f"files: {entry.title} failed with {files:,} files: {error}")
        return None
    return values


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise ArgumentTypeError(f"{text!r} is not a folder")
    return path


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--files", type=count, default=1_000_000, help="number of files to make (1000000)"
    )
    parser.add_argument(
        "--scratch",
        type=_folder,
        metavar="DIR",
        help="folder in which to make the files; by default the memory file system",
    )


BENCHMARK = Benchmark(
    "files",
    "a folder of a million files: time to the first batch, memory, checkpoints",
    run,
    _arguments,
)
