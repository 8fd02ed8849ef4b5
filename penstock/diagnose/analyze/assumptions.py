"""What predictions for a change assume, and why an option may change nothing, in lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.config import show_size
from penstock.device.forecast import ERROR, LEAST_SPEED
from penstock.diagnose.analyze.model import Change, lru_hits, possible_on_device, row_bytes
from penstock.diagnose.analyze.report import AnalysisReport
from penstock.diagnose.analyze.what_if import Forecast, PredictionRow, Values


def assumptions(
    forecast: Forecast, options: Sequence[Values], rows: Sequence[PredictionRow]
) -> list[str]:
    """All lines on what the predictions of these rows assume."""
    report = forecast.report
    return [
        *busy_lines(forecast, rows),
        *machine_lines(report, options, rows),
        *device_lines(forecast, options, rows),
        *batch_lines(report, options),
        *page_cache_lines(forecast, options, rows),
        *epoch_lines(forecast, options, rows),
        *latency_lines(report, options),
        *ineffective_options(report, options),
    ]


def busy_lines(forecast: Forecast, rows: Sequence[PredictionRow]) -> list[str]:
    """What is assumed of other programs, if they kept cores busy."""
    others, cores = forecast.others, forecast.report.setup.cores
    if not others:
        return []
    lines = [
        f"Assumed: other programs keep {others:.1f} of {cores} cores busy, as during the analysis."
    ]
    if not all(row.certain for row in rows):
        lines.append(
            "?: the speed depends on the cores that they leave. Analyse on a machine with less "
            "load."
        )
    return lines


def batch_lines(report: AnalysisReport, options: Sequence[Values]) -> list[str]:
    """How the time of a step with another batch size is known."""
    if "batch" not in {option.name for option in options}:
        return []
    step, fixed = report.setup.batch * report.costs.compute, report.costs.fixed
    if fixed:
        return [
            f"A step takes {fixed * 1e3:,.1f} ms, and "
            f"{(step - fixed) * 1e6 / report.setup.batch:,.0f} us for each sample: from the two "
            "reports."
        ]
    return [
        f"Assumed: the time of a step is proportional to the batch ({step * 1e3:,.1f} ms with "
        f"{report.setup.batch} samples). Analyse the script with another batch size as well, and "
        "give that report with --other, to know the part of a step that is always the same."
    ]


def page_cache_lines(
    forecast: Forecast, options: Sequence[Values], rows: Sequence[PredictionRow]
) -> list[str]:
    """What the page cache that thrashes most must miss, and what it misses in addition."""
    report = forecast.report
    data = report.setup.sample_bytes * report.setup.samples
    if "page_cache" not in {option.name for option in options} or not rows or not data:
        return []

    def misses(change: Change) -> tuple[float, float]:
        """Shares of the reads: those that any cache of this size misses, and the thrashing."""
        share = min(1.0, change.page_cache / data)
        return 1 - share, share - lru_hits(share)

    change = max((row.change for row in rows), key=lambda change: misses(change)[1])
    must, thrashing = misses(change)
    if thrashing < 0.005:
        return ["The page cache does not thrash: it holds all files, or hardly any."]
    keeping = forecast(replace(change, page_cache=0, cache=round((1 - must) * forecast.data)))
    return [
        f"With a page cache of {show_size(change.page_cache)}, {must + thrashing:.0%} of the reads "
        f"miss it: {must:.0%} would miss any cache for {1 - must:.0%} of the data, and "
        f"{thrashing:.0%} are thrashing (files are evicted before the next epoch reads them).",
        f"A cache of this size that evicts nothing (Penstock's): {keeping.speed:,.0f} samples/s.",
        "Assumed: the page cache evicts the file that was read longest ago, and nothing else needs "
        "its memory.",
    ]


def epoch_lines(
    forecast: Forecast, options: Sequence[Values], rows: Sequence[PredictionRow]
) -> list[str]:
    """The cost of the first epoch, of the last row."""
    if "epochs" not in {option.name for option in options} or not rows:
        return []
    change = rows[-1].change
    first = forecast(replace(change, epochs=1)).epoch
    later = forecast(replace(change, epochs=None)).epoch
    if first <= later:
        return ["The first epoch costs no more than later ones: no cache has to be filled."]
    return [
        f"The first epoch takes {first:,.1f} s, because all caches are empty, and each later one "
        f"{later:,.1f} s; the rows show the mean of all epochs."
    ]


def latency_lines(report: AnalysisReport, options: Sequence[Values]) -> list[str]:
    """Who waits for the latency of storage."""
    given = {option.name: option.values for option in options}
    if "latency" not in given:
        return []
    if max(given.get("requests", (0,))):
        return ["Objects are fetched ahead, in the order of the batches; no worker waits for one."]
    return [
        "Each worker waits for its own sample. --requests 64 predicts that 64 objects are fetched "
        "at once, ahead of the workers, as Penstock does for s3://, gs:// and az://."
    ]


def machine_lines(
    report: AnalysisReport, options: Sequence[Values], rows: Sequence[PredictionRow]
) -> list[str]:
    """Lines on what the predictions for several machines assume."""
    names = {option.name for option in options}
    lines: list[str] = []
    if not names & {"machines", "remote_cores"}:
        return lines
    fewer = [row for row in rows if row.prediction.sharing < row.change.machines]
    if fewer:
        row = fewer[-1]
        sharing = row.prediction.sharing
        lines.append(
            f"With {row.change.machines} machines the network is too slow for all of them to share "
            f"their caches; the prediction is for groups of {sharing}."
            if sharing > 1
            else f"With {row.change.machines} machines the network is too slow to share caches at "
            "all; the prediction is for machines that each keep their own."
        )
    if "network" not in names:
        lines.append("Without --network, the network is assumed to be fast enough.")
    if report.setup.of_torch and "penstock" not in names:
        lines.append(
            "Sharing caches and remote cores need Penstock's loader; --penstock adds its speed."
        )
    return lines


def device_lines(
    forecast: Forecast, options: Sequence[Values], rows: Sequence[PredictionRow]
) -> list[str]:
    """Lines on what a prediction with ``--device-prep`` assumes, and how far to trust it."""
    if "device_prep" not in {option.name for option in options} or not rows:
        return []
    possible = possible_on_device(forecast.report)
    if not possible:
        return []
    whole = possible_on_device(forecast.report, decodes=True)
    lines = [
        f"The device can do {possible:.0%} of the preparation (all below decode), and works only "
        "while training waits. Nobody has measured its speed here.",
        f'For JPEGs decode="device" leaves {whole:.0%} to it, with other pixels than the CPU has; '
        "that is not in these predictions.",
    ]
    last = rows[-1]
    speed = last.change.device_prep
    slower, faster = (
        forecast(replace(last.change, device_prep=other)).speed
        for other in (max(LEAST_SPEED, speed / 2), 2 * speed)
    )
    lines.append(
        f"With half or twice {speed:g}x: {slower:,.0f} to {faster:,.0f} samples/s. The formula is "
        f"within {ERROR:.0%} of a simulation of the policy."
    )
    return lines


def ineffective_options(report: AnalysisReport, options: Sequence[Values]) -> list[str]:
    """A line for each option that cannot change the prediction of this report, with the reason."""
    names = {option.name for option in options if max(option.values) > 0}
    lines = []
    if "reuse" in names and report.costs.reuse_hit is None:
        lines.append(
            "--reuse changes nothing here: this pipeline has no place for refurbish, or its costs "
            "were not measured."
        )
    if "penstock" in names and report.costs.penstock is None:
        lines.append(
            "--penstock changes nothing here: the script uses Penstock's loader already, or it "
            "could not be measured."
        )
    if "offload" in names and not report.operations:
        lines.append("--offload changes nothing here: operations were not timed one by one.")
    if "device_prep" in names and not possible_on_device(report):
        lines.append(
            "--device-prep changes nothing here: operations were not timed one by one, or nothing "
            "stands below a decode."
        )
    if "remote_cores" in names and not row_bytes(report):
        lines.append(
            "--remote-cores changes nothing here: the size of prepared samples was not measured."
        )
    of_bytes = [name for name in ("cache", "page_cache", "storage") if name in names]
    if of_bytes and not report.setup.sample_bytes:
        given = " and ".join(f"--{name.replace('_', '-')}" for name in of_bytes)
        lines.append(
            f"{given} {'changes' if len(of_bytes) == 1 else 'change'} nothing here: the number of "
            "bytes read per sample is unknown."
        )
    return lines
