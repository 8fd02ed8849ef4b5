"""``penstock doctor --device``: checks all that Penstock does with a device, on the device itself.

Penstock is developed without a GPU, so these checks are what a user with a GPU runs first. A check
is one function in ``CHECKS``: it gets a ``Trial``, returns what it found, and raises
``CheckFailed`` or ``CheckSkipped``. Any other exception is a failure too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from penstock import native
from penstock.device.contract import Device
from penstock.device.cuda import CudaDevice
from penstock.device.delivery import Delivery, fill_normalized
from penstock.device.division import divide
from penstock.device.fake import FakeDevice
from penstock.device.image_work import image_work
from penstock.device.opening import open_device
from penstock.engine.ahead import DEPTH
from penstock.engine.slots import map_shared, shared_file
from penstock.errors import PenstockError
from penstock.keyed import Keys
from penstock.loader import Custom, Deliver, Loader
from penstock.operation import ArraySpec, Operation
from penstock.options import Options
from penstock.pipeline import Pipeline, from_files
from penstock.torch.pinning import Pinning

NO_DEVICE = 3
"""The exit code if the device is not there."""

CheckOutcome = Literal["ok", "failed", "skipped"]

SMALL, LARGE = 1 << 20, 64 << 20
"""Bytes of copies whose bits are checked, and of copies that are timed on a GPU."""

REPEATS = 5
"""Copies that are timed; the median counts."""

PATIENCE = 120.0
"""Seconds for the process that maps the tensor of this one; importing torch takes some."""


class CheckFailed(Exception):
    """The device does not do what Penstock relies on."""


class CheckSkipped(Exception):
    """The check does not apply to this device."""


@dataclass(frozen=True)
class CheckResult:
    """A line of the report: the check, how it ended, and what it found."""

    name: str
    outcome: CheckOutcome
    found: str
    seconds: float


@dataclass(frozen=True)
class Trial:
    """What checks work with. ``nbytes``: the size of copies that are timed."""

    device: Device
    kind: str
    nbytes: int

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device on the host, after all work of the copy stream."""
        event = self.device.record()
        self.device.arrive([tensor], event)
        return tensor.cpu()


Check = Callable[[Trial], str]


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailed(what)


@contextmanager
def registered(trial: Trial, nbytes: int) -> Iterator[torch.Tensor]:
    """Bytes of shared memory, as batches have it, registered with the device."""
    fd = shared_file(nbytes)
    try:
        memory = map_shared(fd, nbytes)
    finally:
        os.close(fd)
    end = trial.device.register(memory.address(), nbytes)
    try:
        yield torch.frombuffer(memory, dtype=torch.uint8)
    finally:
        end()


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8))


# The checks.


def registration(trial: Trial) -> str:
    """Memory of batches can be registered, and again after that has ended."""
    for size in (4096, SMALL):
        with registered(trial, size) as memory:
            if trial.kind == "cuda":  # never run
                expect(memory.is_pinned(), "is_pinned() is false for registered memory")
                expect(memory[100:200].is_pinned(), "is_pinned() is false for a part of it")
        with registered(trial, size):
            pass
    return "shared memory, twice each"


def copies(trial: Trial) -> str:
    """Copies have the bits of their sources, from registered and from other memory."""
    values = [
        noise(SMALL),
        torch.tensor([1.5, float("nan"), float("-inf"), -0.0]),
        torch.arange(12).reshape(3, 4).T,
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.ones(4, dtype=torch.bfloat16),
    ]
    for value in values:
        copied = trial.fetch(trial.device.copy(value))
        expect(_same(copied, value), f"a copy of {value.dtype} {tuple(value.shape)} differs")
    with registered(trial, SMALL) as memory:
        memory.copy_(noise(SMALL, 1))
        copied = trial.fetch(trial.device.copy(memory))
        expect(_same(copied, memory), "a copy from registered memory differs")
    return f"{len(values)} kinds of tensors, registered memory"


def events(trial: Trial) -> str:
    """An event means that a copy has read its source: memory of batches is written again then."""
    device, wrong = trial.device, 0
    with registered(trial, trial.nbytes) as memory:
        copied = []
        for number in range(8):
            memory.fill_(number)
            copied.append(device.copy(memory))
            event = device.record()
            event.wait()
            expect(event.done(), "an event was waited for, and is not done")
        memory.fill_(255)
        for number, tensor in enumerate(copied):
            found = trial.fetch(tensor)
            wrong += not bool((found == number).all())
    expect(wrong == 0, f"{wrong} of 8 copies have bytes that were written after their event")
    return "8 copies of memory that is written again"


def streams(trial: Trial) -> str:
    """The loop's stream waits for copies; work on one stream runs after an event of another."""
    device = trial.device
    with registered(trial, trial.nbytes) as memory:
        memory.fill_(1)
        for number in range(4):
            copied = device.copy(memory)
            event = device.record()
            device.arrive([copied], event)
            # No thread waits here: the sum is right only if the stream of this thread waits.
            total = int(copied.sum(dtype=torch.int64))
            expect(total == trial.nbytes, f"sum {number} after arrive() is {total}")
            event.wait()
        target = device.allocate((trial.nbytes,), torch.uint8, "copy")
        device.copy_to(target, memory)
        device.wait("prep", device.record("copy"))
        device.run(partial(_add_one, target), "prep", reads=[target], writes=[target])
        done = device.record("prep")
        device.wait("copy", done)
        done.wait()
        total = int(trial.fetch(target).sum(dtype=torch.int64))
        expect(total == 2 * trial.nbytes, f"work on another stream gave the sum {total}")
    return "the loop's stream, and copy -> prep -> copy"


def pinning(trial: Trial) -> str:
    """``pin_memory=True`` without ``device=``."""
    if trial.kind != "cuda":
        raise CheckSkipped("only a GPU pins memory")
    # From here on never run.
    batch = Pinning().convert({"x": torch.ones(8), "text": "a"})
    expect(batch["x"].is_pinned(), "a pinned copy is not pinned")
    with registered(trial, SMALL) as memory:
        kept = Pinning().convert(memory)
        expect(kept is memory, "a tensor over registered memory was copied to pin it")
    return "a copy is pinned, registered memory is not copied"


PEER = """
import sys
from penstock.device.opening import open_device
device = open_device(sys.argv[1])
tensor = device.from_export(bytes.fromhex(sys.stdin.readline()))
sys.stdout.write(f"{int(tensor.long().sum())} {tuple(tensor.shape)}\\n")
sys.stdout.flush()
sys.stdin.readline()
"""


def sharing(trial: Trial) -> str:
    """Another process maps a tensor of this one, and may be killed."""
    source = noise(3 * SMALL).reshape(3, SMALL)
    tensor = trial.device.copy(source)
    trial.fetch(tensor)
    try:
        handle = trial.device.export(tensor)
    except OSError as error:
        raise CheckSkipped(str(error)) from error
    expected = f"{int(source.long().sum())} {(3, SMALL)}\n"
    with subprocess.Popen(
        [sys.executable, "-c", PEER, trial.device.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        watch = _kill_later(peer, PATIENCE)
        try:
            peer.stdin.write(handle.hex() + "\n")
            peer.stdin.flush()
            found = peer.stdout.readline()
        finally:
            watch()
            peer.kill()
    expect(found == expected, f"the other process found {found!r} in place of {expected!r}")
    expect(_same(trial.fetch(tensor), source), "the tensor changed when the other process died")
    return "mapped by another process, unchanged after that was killed"


def normalize_bits(trial: Trial) -> str:
    """``normalize`` on the device has the bits of the CPU, for every level."""
    from penstock import image

    rng = np.random.default_rng(0)
    levels = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    for number in range(20):
        mean, std = tuple(rng.normal(0.5, 0.3, 3)), tuple(rng.uniform(0.05, 1.0, 3))
        operation = image.normalize(mean, std, layout="hwc" if number % 2 else "chw")
        rest = divide(_files([]).map(operation).batch(1)).rest
        delivery = Delivery(trial.device, rest)
        given = torch.from_numpy(levels)
        delivered = delivery.convert(given)
        delivery.settle()
        found = delivery.hand_out(delivered).cpu()
        expected = torch.from_numpy(operation.apply(levels[0], None))[None]
        expect(_same(found, expected), f"other bits than on the CPU for mean={mean}, std={std}")
    return "256 levels, 20 means and deviations, both layouts"


def operations(trial: Trial) -> str:
    """Operations on the device, decoding included, have the bits of the compiled kernel."""
    from penstock import image

    if not native.kernel_available():
        raise CheckSkipped(f"there is no compiled kernel: {native.why_no_kernel()}")
    crop = image.random_resized_crop(32)
    lists: dict[str, list[Operation]] = {
        "random_resized_crop, random_flip": [crop, image.random_flip()],
        "resize, center_crop, normalize": [
            image.resize(40),
            image.center_crop(32),
            image.normalize(),
        ],
        "random_crop": [image.random_crop(32)],
        "rand_augment": [crop, image.rand_augment(2, 9)],
        "auto_augment": [crop, image.auto_augment()],
        "trivial_augment": [crop, image.trivial_augment()],
        "color_jitter": [crop, image.color_jitter(0.4, 0.4, 0.4)],
        "erase": [crop, image.erase(p=1.0)],
    }
    slowest, left = 0.0, []
    with tempfile.TemporaryDirectory() as place:
        files = _photographs(Path(place), 8)
        for name, listed in lists.items():
            pipeline = _files(files)
            for operation in listed:
                pipeline = pipeline.map(operation)
            started = time.perf_counter()
            found = _on_device(trial, pipeline, files)
            slowest = max(slowest, time.perf_counter() - started)
            if isinstance(found, str):
                left.append(f"{name} ({found})")
                continue
            with pipeline.batch(len(files)).loader(workers=0, shuffle=False) as loader:
                expected = torch.from_numpy(next(iter(loader)).copy())
            expect(_same(found, expected), f"{name} has other bits than on the CPU")
    text = f"{len(lists) - len(left)} lists of operations on 8 JPEGs, at most {slowest:.2f} s each"
    return text + (f"; not on a device: {', '.join(left)}" if left else "")


def _on_device(trial: Trial, pipeline: Pipeline, files: Sequence[str]) -> torch.Tensor | str:
    """The rows that the device makes of files, or why it does not."""
    work = image_work(pipeline.road(0))
    if isinstance(work, str):
        return work
    contents = [Path(file).read_bytes() for file in files]
    keys = Keys(0, list(range(len(files))))
    packed = work.pack(keys, contents, lambda nbytes: np.empty(nbytes, np.uint8))
    expect(packed is not None, "the files could not be packed for the device")
    assert packed is not None
    spec = pipeline.fields
    assert isinstance(spec, ArraySpec)
    shape = len(files), *(size for size in spec.shape if size is not None)
    dtype = torch.from_numpy(np.empty(0, spec.dtype)).dtype
    source = torch.from_numpy(packed.buffer)
    buffer = trial.device.copy(source)
    rows = trial.device.allocate(shape, dtype)
    trial.device.run(
        partial(work.run, buffer, packed.about, rows), "copy", reads=[buffer], writes=[rows]
    )
    return trial.fetch(rows).clone()


def delivered_batches(trial: Trial) -> str:
    """A loader delivers the batches of the CPU, and never holds more memory than stated."""
    from penstock import image

    with tempfile.TemporaryDirectory() as place:
        files = _photographs(Path(place), 24)
        train = (
            _files(files)
            .map(image.random_resized_crop(32))
            .map(image.random_flip())
            .map(image.normalize())
            .batch(4)
        )
        expected = _epochs(Loader(train, Options(workers=0), Custom(convert=torch.from_numpy)))
        custom = Custom(convert=torch.from_numpy, deliver=_deliver_to(trial.device))
        options = Options(workers=2, kind="threads")
        before, most = _in_use(trial), 0

        def look() -> None:
            nonlocal most
            most = max(most, _in_use(trial) - before)

        found = _epochs(Loader(train, options, custom), look)
    expect(found == expected, "a loader with device= delivers other bits than one without")
    if trial.kind == "plain":
        return f"{len(found)} batches"
    pixels = 4 * 3 * 32 * 32
    # Batches ahead, the one that the loop holds, the one that it is given, and one as uint8.
    bound = (DEPTH + 2) * 4 * pixels + pixels + SMALLEST
    expect(most <= bound, f"batches take {most} bytes, and the limit is {bound}")
    return f"{len(found)} batches, in at most {most} bytes; the limit is {bound}"


def speed(trial: Trial) -> str:
    """How fast copies are from registered and from other memory, and normalize."""
    rates = []
    ordinary = torch.zeros(trial.nbytes, dtype=torch.uint8)
    with registered(trial, trial.nbytes) as memory:
        memory.fill_(0)
        for source in (memory, ordinary):
            rates.append(trial.nbytes / _timed(partial(_copy, trial, source)))
    images = trial.nbytes // (224 * 224 * 3) or 1
    host = torch.zeros(images, 224, 224, 3, dtype=torch.uint8), torch.ones(2, 3)
    pixels, line = (trial.device.copy(tensor) for tensor in host)
    out = trial.device.allocate((images, 3, 224, 224), torch.float32)

    def normalize() -> None:
        trial.device.run(
            lambda: fill_normalized(out, pixels, line), "copy", reads=[pixels, line], writes=[out]
        )
        trial.device.record().wait()

    seconds = _timed(normalize)
    return (
        f"{rates[0] / 1e9:.1f} GB/s registered, {rates[1] / 1e9:.1f} GB/s from other memory; "
        f"normalize of {images} images of 224 x 224: {1e3 * seconds:.2f} ms"
    )


def synchronisation(trial: Trial) -> str:
    """The fake device found no wrong synchronisation in the checks above."""
    if not isinstance(trial.device, FakeDevice):
        raise CheckSkipped("only the fake device reports it")
    expect(trial.device.faults == [], "; ".join(trial.device.faults))
    expect(trial.device.registered == {}, "memory is still registered")
    return "no fault in all checks above"


CHECKS: dict[str, Check] = {
    "registration": registration,
    "copies": copies,
    "events": events,
    "streams": streams,
    "pinning": pinning,
    "sharing between processes": sharing,
    "normalize": normalize_bits,
    "operations": operations,
    "delivery and memory": delivered_batches,
    "speed": speed,
    "synchronisation": synchronisation,
}


# Running them.


def run_checks(name: str, checks: dict[str, Check] | None = None) -> list[CheckResult]:
    """Run all checks on a device. Raises PipelineError if there is none of this name."""
    device = open_device(name)
    kind = "cuda" if isinstance(device, CudaDevice) else "fake" if name == "fake" else "plain"
    trial = Trial(device, kind, LARGE if kind == "cuda" else SMALL)
    results = []
    try:
        for check_name, check in (CHECKS if checks is None else checks).items():
            started = time.perf_counter()
            outcome: CheckOutcome = "ok"
            try:
                found = check(trial)
            except CheckSkipped as error:
                outcome, found = "skipped", str(error)
            except CheckFailed as error:
                outcome, found = "failed", str(error)
            except Exception as error:  # a line that has never run may raise anything
                outcome, found = "failed", f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - started
            results.append(CheckResult(check_name, outcome, found, seconds))
    finally:
        if isinstance(device, FakeDevice):
            device.close()
    return results


def title(name: str) -> str:
    """The device and torch, for the head of the report."""
    about = f"torch {torch.__version__}"
    if name.startswith("cuda"):  # never run
        about += f", CUDA {torch.version.cuda}, {torch.cuda.get_device_name(torch.device(name))}"
    return f"Self-test of the device {name} ({about})"


def lines(name: str, results: Sequence[CheckResult]) -> list[str]:
    """The report as a table."""
    width = max(len(result.name) for result in results)
    table = [
        f"{result.outcome:<8} {result.name:<{width}}  {result.seconds:6.2f} s  {result.found}"
        for result in results
    ]
    failed = sum(result.outcome == "failed" for result in results)
    verdict = (
        f"{failed} of {len(results)} checks failed. Do not use device= here, and please report "
        "this table."
        if failed
        else "No check failed."
    )
    return [title(name), "", *table, "", verdict]


def as_json(name: str, results: Sequence[CheckResult]) -> str:
    """The report for programs."""
    return json.dumps(
        {"device": name, "torch": torch.__version__, "checks": [asdict(r) for r in results]},
        indent=2,
    )


# What the checks use.

SMALLEST = 512
"""Bytes of the smallest tensor on a GPU: the slopes and offsets of normalize."""


def _add_one(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return bool(torch.equal(*as_bytes))


def _in_use(trial: Trial) -> int:
    """Bytes of tensors on the device."""
    if trial.kind == "cuda":  # never run
        return int(torch.cuda.memory_allocated(torch.device(trial.device.name)))
    return trial.device.memory().in_use


def _copy(trial: Trial, source: torch.Tensor) -> None:
    copied = trial.device.copy(source)
    trial.device.record().wait()
    del copied


def _timed(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


def _kill_later(process: subprocess.Popen[str], seconds: float) -> Callable[[], None]:
    """Kill a process if the returned function is not called in time."""
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer.cancel


def _files(paths: Sequence[str]) -> Pipeline:
    from penstock import image

    return from_files(list(paths) or ["none.jpg"]).map(image.decode())


def _photographs(folder: Path, count: int) -> list[str]:
    """Small JPEG files of noise."""
    from penstock.native import load_cv2

    rng = np.random.default_rng(0)
    paths = []
    for number in range(count):
        pixels = rng.integers(0, 256, (60, 80, 3), np.uint8)
        path = folder / f"{number}.jpg"
        path.write_bytes(load_cv2().imencode(".jpg", pixels)[1].tobytes())
        paths.append(str(path))
    return paths


def _deliver_to(device: Device) -> Deliver:
    return Deliver(
        lambda rest, desk: Delivery(device, rest, desk),
        lambda: None,
        device.register,
        divide,
        name=device.name,
        copies=True,
    )


def _epochs(loader: Any, look: Callable[[], None] = lambda: None) -> list[bytes]:
    """The bits of all batches of two epochs."""
    found = []
    with loader:
        for _ in range(2):
            for batch in loader:
                look()
                found.append(batch.cpu().numpy().tobytes())
                del batch
    return found


def problem(error: PenstockError) -> str:
    """What to print if there is no device."""
    return (
        f"{error}\nNothing was checked. On a machine without a GPU, `penstock doctor --device "
        "fake` runs the same checks on a fake device."
    )
