"""CPU time of the training process for its worker processes: giving out tasks, taking them back."""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.alone import AloneError, run_alone
from benchmarks.harness.arguments import count
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from benchmarks.loop import Images

MOST, MOST_SHARE = 5e-6, 0.01
"""CPU seconds that an image may cost, and the share of a core that all of them may."""


@dataclass(frozen=True)
class Case:
    """``nap``: seconds that a sample takes. ``step``: seconds of a training step, also asleep."""

    batch: int
    nap: float
    dtype: str = "uint8"
    step: float = 0.0

    @property
    def title(self) -> str:
        step = f", steps of {1e3 * self.step:g} ms" if self.step else ""
        return f"{1e3 * self.nap:g} ms a sample, batches of {self.batch} {self.dtype}{step}"


CASES = (
    Case(32, 4e-3),
    Case(32, 4e-3, "float32"),
    Case(256, 4e-3),
    Case(32, 20e-3),
    Case(32, 1e-3),
    Case(32, 4e-3, step=0.02),
    Case(256, 4e-3, step=0.15),
)


def measure(number: int, workers: int, side: int, warm_up: float, seconds: float) -> Any:
    """Samples, seconds, and CPU seconds of the loop's thread and of the whole process."""
    import penstock as ps

    case = CASES[number]
    train = ps.from_dataset(Images(case.dtype, side, case.nap), random=False).batch(case.batch)
    with train.loader(workers=workers, kind="processes") as loader:
        epoch = iter(loader)
        _take(epoch, case.step, warm_up)
        thread, process = time.thread_time(), time.process_time()
        samples, elapsed = _take(epoch, case.step, seconds)
        return samples, elapsed, time.thread_time() - thread, time.process_time() - process


def _take(epoch: Any, step: float, seconds: float) -> tuple[int, float]:
    samples, started = 0, time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        samples += len(next(epoch)[1])
        time.sleep(step)
    return samples, elapsed


def row_of(case: Case, workers: int, runs: list[Any]) -> tuple[str, ...]:
    """The row of a case: medians of its runs."""

    def middle(figure: Any) -> float:
        return float(statistics.median(figure(*run) for run in runs))

    ideal = workers / case.nap
    if case.step:
        ideal = min(ideal, case.batch / case.step)
    for_workers = middle(lambda samples, _, loop, all_: (all_ - loop) / samples)
    share = middle(lambda _, elapsed, loop, all_: (all_ - loop) / elapsed)
    return (
        case.title,
        f"{middle(lambda samples, elapsed, *_: samples / elapsed / ideal):.2f}",
        f"{1e6 * for_workers:.1f}",
        f"{100 * share:.2f}",
        f"{1e6 * middle(lambda samples, _, loop, __: loop / samples):.1f}",
        "yes" if for_workers <= MOST and share <= MOST_SHARE else "NO",
    )


def run(options: Namespace) -> Result:
    rows: list[tuple[str, ...]] = []
    wrong: list[str] = []
    data: dict[str, object] = {}
    for number, case in enumerate(CASES):
        progress(f"handing: {case.title}")
        arguments = (options.workers, options.side, options.warm_up, options.seconds)
        try:
            runs = [
                run_alone(measure, number, *arguments, timeout=600).value
                for _ in range(options.rounds)
            ]
        except AloneError as error:
            progress(error.printed)
            wrong.append(f"handing: {case.title} failed: {error}")
            rows.append((case.title, "failed", "", "", "", ""))
            continue
        data[case.title] = runs
        rows.append(row_of(case, options.workers, runs))
    title = (
        f"handing: CPU time of the training process for {options.workers} worker processes that "
        f"sleep in place of preparing images of {options.side}x{options.side}"
    )
    heads = (
        "samples",
        "share of ideal",
        "us an image",
        "% of a core",
        "us an image, loop's thread",
        f"at most {1e6 * MOST:.0f} us and {100 * MOST_SHARE:.0f} %",
    )
    return Result((Table(title, heads, tuple(rows)),), (), tuple(wrong), data)


def _arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(workers=12, rounds=1, seconds=5.0, warm_up=4.0)
    parser.add_argument("--side", type=count, default=224, help="height and width of images (224)")


BENCHMARK = Benchmark(
    "handing", "CPU time of the training process for its worker processes", run, _arguments
)
