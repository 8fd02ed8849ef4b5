"""Verdicts and gains of analyses, compared with scripts whose bottleneck is known.

The truth comes from how a script was made, and from two of its own measurements: how long its loop
waits for batches, and how long its steps take with one batch in memory and no loader.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.analyze.truth_script import Script
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Result, Table
from penstock.diagnose.analyze.judge import result_of
from penstock.diagnose.analyze.remedies import Remedy, remedies
from penstock.diagnose.analyze.report import AnalysisReport, report_from_dict
from penstock.diagnose.analyze.result import Result as AnalysisResult
from penstock.errors import PenstockError

EXPECTED = {
    "decode": {"prep"},
    "python": {"prep"},
    "sleep": {"latency"},
    "open": {"latency"},
    # A server that sends slowly: workers wait for bytes, and that is storage, too.
    "bytes": {"latency", "fetch"},
    "lock": {"latency"},
    "cache": {"latency", "fetch"},
    "mixed": {"latency", "prep"},
    "compute": {"prep"},
}
"""The bottlenecks of a script that waits for batches, by how it was made."""

SMALL, UNSURE = 0.05, 0.03
"""A wait of this share of the time is a bottleneck; so close to it, both verdicts are right."""

CONTENDED = 0.10
"""Steps that are longer by this share of the time, beside a loader, are contention."""

STEPS = {
    "compute": (0.05, 0.5),
    "decode": (0.005, 0.5),
    "python": (0.005, 0.1, 2.0),
    "sleep": (0.005, 0.1, 2.0),
    "open": (0.005, 0.5),
    "bytes": (0.005, 0.5),
    "lock": (0.005, 0.5),
    "cache": (0.005, 0.5),
    "mixed": (0.005, 0.5),
}
"""Seconds of a step, by bottleneck."""

LIMITS = {0: (0.05, 0.15), 1: (0.10, 0.30), 2: (0.10, 0.30)}
"""Goals for the error of the predicted gain, median and worst, by the number of busy cores."""


@dataclass(frozen=True)
class Cell:
    """A script, and the number of cores that other programs keep busy."""

    script: Script
    busy: int

    @property
    def title(self) -> str:
        step = f"{self.script.step * 1e3:g} ms"
        return f"{self.script.bottleneck}, step {step}, {self.busy} busy, {self.script.kind}"


@dataclass
class Outcome:
    """What one cell has shown: ``predicted`` and ``measured`` are gains of the top remedy.

    ``others``: cores that other programs kept busy during the run as it is, as the analysis saw
    it. The machine may be busier than the cell asks for.
    """

    cell: Cell
    accepted: set[str]
    verdict: str | None
    said: str
    remedy: str = ""
    predicted: float = 0.0
    measured: float = 0.0
    others: float = 0.0

    @property
    def busy(self) -> int:
        """Busy cores of others, in whole cores up to 2."""
        return min(2, round(self.others))

    @property
    def wrong(self) -> bool:
        return self.verdict is not None and self.verdict not in self.accepted

    @property
    def error(self) -> float | None:
        return self.predicted / self.measured - 1 if self.measured else None

    def row(self) -> tuple[str, ...]:
        state = "refused" if self.verdict is None else "WRONG" if self.wrong else "right"
        gains = ("", "", "")
        if self.error is not None:
            gains = (f"{self.predicted:.2f}", f"{self.measured:.2f}", f"{self.error:+.0%}")
        truth = " or ".join(sorted(self.accepted))
        others = f"{self.others:.1f}"
        return (self.cell.title, others, truth, self.verdict or "-", state, self.remedy, *gains)


def grid() -> list[Cell]:
    """All cells: each bottleneck and step, on three machines, with three kinds of scripts."""
    return [
        Cell(Script(bottleneck, step, kind), busy)
        for bottleneck, steps in STEPS.items()
        for step, busy, kind in product(steps, (0, 1, 2), ("torch", "ours", "lightning"))
    ]


def chosen(only: Sequence[str], part: int = 0) -> list[Cell]:
    """The cells whose title contains all of these words; each word may have alternatives (a|b).

    ``part`` 1, 2 or 3: a third of the grid. In each third every bottleneck and step meets every
    machine and every kind of script once. The first step of each bottleneck comes first, so that a
    selection that is stopped early has all of them.
    """
    cells = [
        cell
        for at, cell in enumerate(grid())
        if not part or (at // 9 + at // 3 + at + part) % 3 == 0
    ]
    found = [
        cell
        for cell in cells
        if all(any(one in cell.title for one in word.split("|")) for word in only)
    ]
    return sorted(found, key=lambda cell: STEPS[cell.script.bottleneck].index(cell.script.step))


def accepted(bottleneck: str, plain: dict[str, float], constant: dict[str, float]) -> set[str]:
    """The right verdicts, from the script's own measurements with and without its loader.

    >>> sorted(accepted("sleep", {"wait": 0.9, "step": 0.1}, {"wait": 0.0, "step": 0.1}))
    ['latency']
    >>> sorted(accepted("python", {"wait": 0.0, "step": 0.2}, {"wait": 0.0, "step": 0.1}))
    ['contention']
    """
    whole = plain["wait"] + plain["step"]
    waits = plain["wait"] / whole
    slower = max(0.0, plain["step"] - constant["step"]) / whole
    found: set[str] = set()
    if waits > SMALL - UNSURE:
        found |= EXPECTED[bottleneck]
    if slower > CONTENDED - UNSURE:
        found.add("contention")
    if waits < SMALL + UNSURE and slower < CONTENDED + UNSURE:
        found.add("compute")
    return found


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Other programs that keep this many cores busy."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run_truth(options: Namespace) -> Result:
    cells = chosen(options.only, options.part)
    if not cells:
        raise PenstockError(f"no script matches --only {' '.join(options.only)}")
    begun = time.monotonic()
    missing, outcomes = 0, []
    with _results(options.results) as place:
        for number, cell in enumerate(cells):
            records = Records.load(place, cell)
            trial = Trial(cell, records, options.analysis, options.seconds, options.rounds)
            spent = time.monotonic() - begun
            if not trial.complete and options.stop_after and spent > options.stop_after:
                missing += 1
                continue
            if not trial.complete:
                progress(f"analyze: {number + 1} of {len(cells)}: {cell.title}")
                try:
                    with busy_cores(cell.busy):
                        trial.measure()
                except PenstockError as error:  # the others are worth measuring
                    progress(f"  {error}")
                    missing += 1
                    continue
                records.save(place)
                progress(f"  {' | '.join(trial.outcome().row()[1:])}")
            outcomes.append(trial.outcome())
    if not outcomes:
        raise PenstockError("no script was measured: see above, or give a longer --stop-after")
    return result_of_outcomes(outcomes, missing)


@contextmanager
def _results(place: Path | None) -> Iterator[Path]:
    """The directory of the records: the given one, or a temporary one."""
    if place is None:
        with tempfile.TemporaryDirectory(prefix="penstock-truth-") as name:
            yield Path(name)
    else:
        place.mkdir(parents=True, exist_ok=True)
        yield place


@dataclass
class Records:
    """What was measured for one cell: saved as JSON, so that a grid may be measured in parts.

    - ``constant``, ``plain``: the script's own clock with one batch in memory, and with its loader.
    - ``report``: the report of the analysis, ``None`` if there was none.
    - ``gains``: by the options of a remedy, pairs of speeds without and with it.
    """

    cell: str
    constant: list[dict[str, float]] = field(default_factory=list)
    plain: list[dict[str, float]] = field(default_factory=list)
    analysed: bool = False
    report: dict[str, Any] | None = None
    gains: dict[str, list[list[float]]] = field(default_factory=dict)

    @classmethod
    def load(cls, place: Path, cell: Cell) -> Records:
        path = place / cls(cell.title).name
        return cls(**json.loads(path.read_text())) if path.exists() else cls(cell.title)

    @property
    def name(self) -> str:
        return f"{self.cell.replace(', ', '-').replace(' ', '-')}.json"

    def save(self, place: Path) -> None:
        part = place / f"{self.name}.part"
        part.write_text(json.dumps(asdict(self), indent=1))
        part.rename(place / self.name)


@dataclass
class Trial:
    """Measures one cell, as far as its records do not contain it yet, and judges it.

    The verdict and the predicted gain are computed from the recorded report each time, so a changed
    analyser judges old measurements anew. Only rounds of its remedy that are missing are run.
    """

    cell: Cell
    records: Records
    analysis: float
    seconds: float
    rounds: int

    @property
    def complete(self) -> bool:
        if not self.records.analysed:
            return False
        remedy = self._remedy()
        return remedy is None or len(self._pairs(remedy)) >= self.rounds

    def _pairs(self, remedy: Remedy) -> list[list[float]]:
        """The speeds without and with this remedy, of the rounds so far."""
        return self.records.gains.setdefault(_key(remedy), [])

    def measure(self) -> None:
        script, records = replace(self.cell.script, seconds=self.seconds), self.records
        if not records.analysed:
            records.constant = [_run(replace(script, constant=True).words())]
            records.plain = [_run(script.words())]
            with tempfile.TemporaryDirectory(prefix="penstock-truth-") as place:
                records.report = _analyse(self.cell.script, self.analysis, Path(place))
            records.analysed = True
        remedy = self._remedy()
        if remedy is None:
            return
        command, pairs = _command(script, remedy), self._pairs(remedy)
        assert command is not None
        while len(pairs) < self.rounds:
            before, after = _run(script.words()), _run(command)
            records.plain.append(before)
            pairs.append([before["speed"], after["speed"]])

    def outcome(self) -> Outcome:
        """The verdict and the gain, beside the truth."""
        truth = accepted(
            self.cell.script.bottleneck, _middle(self.records.plain), _middle(self.records.constant)
        )
        report, result = self._judged()
        if report is None or result is None:
            return Outcome(self.cell, truth, None, "no report")
        said = result.verdict.refusal or result.verdict.reason
        outcome = Outcome(self.cell, truth, result.bound, said, others=_others(report))
        remedy = self._remedy()
        pairs = [] if remedy is None else self._pairs(remedy)
        if remedy is not None and pairs:
            outcome.remedy, outcome.predicted = remedy.title, remedy.gain
            outcome.measured = median(after / before for before, after in pairs)
        return outcome

    def _judged(self) -> tuple[AnalysisReport | None, AnalysisResult | None]:
        if self.records.report is None:
            return None, None
        report = report_from_dict(self.records.report)
        return report, result_of(report)

    def _remedy(self) -> Remedy | None:
        """The first remedy that can be applied to this script, and has a number."""
        report, result = self._judged()
        if report is None or result is None or not result.trust.numbers:
            return None
        found = remedies(report, result=result)
        applied = (one for one in found if _command(self.cell.script, one) is not None)
        return next((one for one in applied if one.certain), None)


def _others(report: AnalysisReport) -> float:
    uses = [use for use in report.machine_use if use.phase == "as it is"]
    return uses[0].others if uses else 0.0


def _middle(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure of several runs."""
    return {name: median(run[name] for run in runs) for name in runs[0]}


def _key(remedy: Remedy) -> str:
    assert remedy.options is not None
    return " ".join(remedy.options.words)


def _command(script: Script, remedy: Remedy) -> list[str] | None:
    """The arguments of Python with which the remedy is applied; ``None`` if it cannot be here."""
    options = remedy.options
    if options is None or not remedy.tried or options.echo or options.share or options.reuse:
        return None
    if script.kind == "ours":
        workers = script.workers if options.workers is None else options.workers
        return replace(script, workers=workers, cache=options.cache or 0).words()
    return ["-m", "penstock", "run", *options.words, "--", sys.executable, *script.words()]


def _run(words: Sequence[str]) -> dict[str, float]:
    """Run Python with these arguments; what the script printed at its end."""
    output, errors = _output(["-W", "ignore", *words], 300)
    try:
        found: dict[str, float] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        raise PenstockError(f"a script of the grid has failed:\n{errors[-2000:]}") from None
    return found


def _output(words: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run Python with these arguments; its output and its errors. Nothing of it stays behind."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise PenstockError(f"a script of the grid has not ended in {seconds:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _analyse(script: Script, seconds: float, place: Path) -> dict[str, Any] | None:
    """The report of an analysis as plain data; ``None`` if there was none."""
    output = place / "report"
    words = ["-m", "penstock", "analyze", "--seconds", f"{seconds:g}", "--output", str(output)]
    command = [*words, "--", sys.executable, "-W", "ignore", *script.words()]
    _output(command, 60 + 5 * seconds)
    path = output.with_suffix(".json")
    return AnalysisReport.load(path).to_dict() if path.exists() else None


HEADS = (
    "script",
    "cores busy with others",
    "truth",
    "verdict",
    "",
    "top remedy",
    "predicted gain",
    "measured gain",
    "error",
)


def result_of_outcomes(outcomes: Sequence[Outcome], missing: int = 0) -> Result:
    """The tables, and how they compare with the goals. ``missing``: scripts not measured yet."""
    wrong = sum(outcome.wrong for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.verdict is None]
    idle = sum(outcome.busy == 0 for outcome in refused)
    notes = [
        f"analyze: {wrong} of {len(outcomes)} verdicts are wrong, goal 0",
        f"analyze: {len(refused) / len(outcomes):.0%} refused, goal at most 15%; {idle} of them on "
        "an idle machine, goal 0",
    ]
    if missing:
        notes.append(
            f"analyze: {missing} scripts are not measured yet; run the command again with the same "
            "--results"
        )
    for busy, (middle, worst) in LIMITS.items():
        errors = sorted(
            abs(outcome.error)
            for outcome in outcomes
            if outcome.busy == busy and outcome.error is not None
        )
        if errors:
            notes.append(
                f"analyze: {busy} busy cores, {len(errors)} gains: median error "
                f"{median(errors):.0%} (goal {middle:.0%}), worst {errors[-1]:.0%} "
                f"(goal {worst:.0%})"
            )
    table = Table(
        f"analyze: {len(outcomes)} scripts with a known bottleneck",
        HEADS,
        tuple(outcome.row() for outcome in outcomes),
    )
    data: dict[str, Any] = {
        outcome.cell.title: {
            "accepted": sorted(outcome.accepted),
            "verdict": outcome.verdict,
            "said": outcome.said,
            "remedy": outcome.remedy,
            "predicted": outcome.predicted,
            "measured": outcome.measured,
            "others": outcome.others,
        }
        for outcome in outcomes
    }
    return Result((table, confusion(outcomes)), tuple(notes), data=data)


def confusion(outcomes: Sequence[Outcome]) -> Table:
    """Verdicts by the bottleneck that scripts were made with."""
    verdicts = sorted({outcome.verdict or "refused" for outcome in outcomes})
    made = dict.fromkeys(outcome.cell.script.bottleneck for outcome in outcomes)
    rows = [
        (
            bottleneck,
            *(
                f"{count}" if count else ""
                for verdict in verdicts
                for count in [
                    sum(
                        (outcome.verdict or "refused") == verdict
                        for outcome in outcomes
                        if outcome.cell.script.bottleneck == bottleneck
                    )
                ]
            ),
            f"{sum(one.wrong for one in outcomes if one.cell.script.bottleneck == bottleneck)}",
        )
        for bottleneck in made
    ]
    return Table("analyze: verdicts", ("made with", *verdicts, "wrong"), tuple(rows))
