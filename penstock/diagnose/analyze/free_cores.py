"""The cores that other programs leave to the job, as far as the phases have shown. Pure."""

from __future__ import annotations

from dataclasses import replace

from penstock.diagnose.analyze.report import AnalysisReport, MachineUse

IGNORED = 0.05
"""Load by others below this share of the cores is not counted: counters are not more exact."""


def free_cores(report: AnalysisReport, cores: int) -> float:
    """Cores that a job on a machine with ``cores`` cores may count on.

    Other programs go on as they did during the phases, also on a machine with more cores. The job
    has at least the cores that it kept busy itself. All cores are free if the use of the machine is
    not known.
    """
    uses, present = report.machine_use, report.setup.cores
    seconds = sum(use.seconds for use in uses)
    if not seconds:
        return cores
    taken = sum((use.others + use.stolen) * use.seconds for use in uses) / seconds
    if taken < IGNORED * present:
        return cores
    own = max(use.own for use in uses)
    part = min(1.0, cores / present)  # fewer cores are divided as all of them were
    return min(float(cores), max(cores - taken * part, own * part))


def without_others(report: AnalysisReport) -> AnalysisReport:
    """The report as if no other program ran: what the job may get at most."""
    return replace(report, machine_use=())


def beside_most(report: AnalysisReport) -> AnalysisReport:
    """The report as if others had always kept as many cores busy as in the busiest phase."""
    busiest = max(report.machine_use, key=_taken, default=None)
    if busiest is None:
        return report
    own = max(use.own for use in report.machine_use)
    return replace(report, machine_use=(replace(busiest, own=own),))


def _taken(use: MachineUse) -> float:
    return use.others + use.stolen


def cpu_share(report: AnalysisReport) -> float:
    """Share of the time of preparation, without pauses, in which a worker is on a core.

    The rest is queueing for one: time that is measured, but needs no core.
    """
    rate = report.rate("prep")
    use = next((use for use in report.machine_use if use.phase == "prep"), None)
    busy = report.costs.prep * (1 - report.costs.pause)
    if use is None or not rate or busy <= 0:
        return 1.0
    return min(1.0, use.own / rate / busy)
