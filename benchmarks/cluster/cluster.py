"""A job on several hosts whose caches are one (``cluster=``), compared with a cache on each host.

Hosts are network namespaces on this machine. Disks, links and steps are slower than real ones by
one factor, because all hosts share the cores of this machine: ratios stay as they are. Samples are
not decoded, so that preparing them takes no part in the result.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.cluster.host_faults import HOST_FAULTS, fault_result, run_faults
from benchmarks.cluster.job import RankPlan
from benchmarks.cluster.run import HostsRun, RankFailedError
from benchmarks.cluster.search import search
from benchmarks.cluster.work import PREFETCH, CutPhotos, jpeg_files
from benchmarks.faults.verdict import BatchRecord
from benchmarks.harness.arguments import count, positive
from benchmarks.harness.benchmark import Benchmark
from benchmarks.harness.hosts import Host, NoHostsError, hosts
from benchmarks.harness.measure import Spread, progress, turns
from benchmarks.harness.race_table import join_results
from benchmarks.harness.report import Result, Table

HARD_DISK, SSD = 50e6, 530e6
"""Bytes per second of random reads: a fast hard disk and the SSD of the CoorDL paper."""

DISKS = {"hard disk": HARD_DISK, "SSD": SSD}

LINK = 40e9
"""Bits per second of a host's link in the paper."""

INGEST = 1.6e9
"""Bytes of samples per second that the accelerators of one host use up: chosen as three times the
rate of the SSD, so that storage is the bottleneck without a cache."""

FACTOR = 100.0
"""All hosts together then need a few dozen MB/s, which two cores can send and receive."""

SHARES = (0.25, 0.5, 0.65, 1.0)

UNMET = 0.005
"""Share of the samples that a host without a cluster may not have met when it is measured."""


@dataclass(frozen=True)
class Setting:
    """One row: hosts, disk, the share of the samples that each host may cache, and whether the
    caches are one."""

    hosts: int
    disk: str
    share: float
    cluster: bool

    @property
    def title(self) -> str:
        return f"{self.hosts} hosts, {self.disk}, {100 * self.share:.0f} % each"

    @property
    def holds_all(self) -> bool:
        """Whether the caches of all hosts together hold all samples."""
        return self.cluster and self.hosts * self.share >= 1.0

    def warm_up(self) -> int:
        """Epochs before the measurement: until the caches have what they will have."""
        if self.cluster:
            return 2
        # A host meets 1/hosts of the samples in an epoch, each time others.
        return max(2, math.ceil(math.log(UNMET) / math.log(1 - 1 / self.hosts)))


@dataclass(frozen=True)
class Outcome:
    """One run of a setting.

    ``rate``: samples per second of all hosts. ``epoch``: seconds of an epoch. ``reads``: samples
    read from storage in one epoch by all hosts, the mean of the measured ones. ``network_first``:
    bytes of samples that crossed the network in the first epoch, without its last batches, while
    which the second is being prepared; ``network``: in one of the measured epochs. ``total``:
    reads of the whole run; ``twice``: samples that were read more than once in it. ``hedged``:
    of the reads in one epoch, those for which another host was late. ``different``: lost, repeated
    or different samples and batches.
    """

    rate: float
    epoch: float
    reads: float
    network_first: int
    network: float
    total: int
    twice: int
    hedged: float
    different: int


def measure(setting: Setting, machines: Sequence[Host], options: Namespace) -> Outcome:
    """Run a job with this setting. Storage is not throttled while the caches fill."""
    work = CutPhotos(
        str(options.data), options.items, options.size, options.batch, share=setting.share
    )
    world, warm_up = setting.hosts, setting.warm_up()
    batches = work.batches(world)
    first, warm = batches - PREFETCH - 2, warm_up * batches
    last = warm + options.epochs * batches
    if first <= 1:
        raise SystemExit(
            f"{options.items} samples in batches of {options.batch} on {world} hosts are {batches} "
            f"batches per epoch and rank. Give at least {PREFETCH + 4}."
        )
    plan = RankPlan(
        work,
        world,
        warm_up + options.epochs,
        step=options.batch * options.size / (INGEST / options.factor),
        cluster=setting.cluster,
        step_from=warm,
        gates=(1, first, warm, last),
    )
    with HostsRun(machines[:world], plan) as run:
        for host in run.hosts:
            host.limit(f"{1e9 * options.link / options.factor:.0f}bit")
        run.start()
        run.wait_at(1)
        if setting.cluster:
            # Finding each other takes a second, which is little of a real first epoch.
            run.wait_for_view()
        run.open(1)
        run.wait_at(first)
        beginning = run.counters()
        run.open(first)
        run.wait_at(warm)
        before = run.counters()
        run.throttle(DISKS[setting.disk] / options.factor)
        run.open(warm)
        run.wait_at(last)
        after = run.counters()
        run.open(last)
        run.wait_for_end()
        verdict = run.judge()
        rates = [steady_rate(run.log(rank)[warm:]) for rank in run.ranks]
    rate = sum(rates)
    return Outcome(
        rate=rate,
        epoch=world * -(-work.items // world) / rate,
        reads=float((after.reads - before.reads).sum()) / options.epochs,
        network_first=beginning.network,
        network=(after.network - before.network) / options.epochs,
        total=int(after.reads.sum()),
        twice=int((after.reads > 1).sum()),
        hedged=(after.hedged - before.hedged) / options.epochs,
        different=verdict.lost + verdict.repeated + verdict.different,
    )


def steady_rate(log: Sequence[BatchRecord]) -> float:
    """Samples per second, without the batches that were prepared before the measurement."""
    measured = log[PREFETCH:]
    seconds = measured[-1].at - measured[0].at
    return sum(len(batch.indices) for batch in measured[1:]) / seconds


def run(options: Namespace) -> Result:
    found = len(jpeg_files(str(options.data)))
    if found < options.items:
        raise SystemExit(f"{options.data} has {found} JPEG files; --items is {options.items}")
    parts: list[Result] = []
    try:
        if not options.only_faults and not options.only_search:
            parts.append(partitioned(options))
        if options.search or options.only_search:
            parts.append(search(options))
        if options.faults or options.only_faults:
            parts.append(fault_result(run_faults(options), options))
    except NoHostsError as error:
        raise SystemExit(f"cluster needs several hosts on this machine: {error}") from None
    return join_results(parts)


def partitioned(options: Namespace) -> Result:
    """The table of the partitioned cache. Settings take turns."""
    pairs = [
        Setting(number, disk, share, True)
        for number in options.hosts
        for disk in options.disks
        for share in options.shares
    ]
    settings = [one for pair in pairs for one in (replace(pair, cluster=False), pair)]
    outcomes: dict[Setting, list[Outcome]] = {setting: [] for setting in settings}
    failed: list[str] = []
    for number, order in turns(len(settings), options.rounds):
        for setting in (settings[place] for place in order):
            kind = "one cache" if setting.cluster else "local caches"
            progress(f"cluster: round {number + 1} of {options.rounds}: {setting.title}, {kind}")
            try:
                with hosts(setting.hosts) as machines:
                    outcome = measure(setting, machines, options)
            except RankFailedError as error:
                failed.append(f"cluster: {setting.title}, {kind}: {error}")
                progress(f"  {error}")
                continue
            outcomes[setting].append(outcome)
            progress(f"  {outcome}")
    return make_result(pairs, outcomes, failed, options)


def make_result(
    pairs: Sequence[Setting],
    outcomes: dict[Setting, list[Outcome]],
    failed: Sequence[str],
    options: Namespace,
) -> Result:
    """One row for each setting. A batch that differs makes the result invalid."""
    rows: list[tuple[str, ...]] = []
    wrong = list(failed)
    data: dict[str, Any] = {}
    for pair in pairs:
        local, one = outcomes[replace(pair, cluster=False)], outcomes[pair]
        data[pair.title] = {
            "local": [asdict(outcome) for outcome in local],
            "cluster": [asdict(outcome) for outcome in one],
        }
        different = sum(outcome.different for outcome in (*local, *one))
        if different:
            wrong.append(
                f"cluster: {pair.title}: {different} samples or batches are lost, repeated or "
                "differ from those of the loader alone"
            )
        if not local or not one:
            rows.append((f"{pair.title}\nfailed", *[""] * 9))
            continue
        ratios = [ours.rate / theirs.rate for ours, theirs in zip(one, local, strict=False)]
        spread = Spread.of(ratios)
        rows.append(
            (
                pair.title,
                _median(local, lambda run: run.epoch, "{:.2f}"),
                _median(one, lambda run: run.epoch, "{:.2f}"),
                _median(local, lambda run: run.rate, "{:,.0f}"),
                _median(one, lambda run: run.rate, "{:,.0f}"),
                f"{spread.median:.2f}"
                + (f"\n{spread.low:.2f} to {spread.high:.2f}" if len(ratios) > 1 else ""),
                _median(local, lambda run: run.reads, "{:.0f}"),
                _median(one, lambda run: run.reads, "{:.0f}"),
                _median(one, lambda run: run.network_first / 1e6, "{:.1f}")
                + " / "
                + _median(one, lambda run: run.network / 1e6, "{:.1f}"),
                _median(one, lambda run: run.hedged, "{:.0f}"),
            )
        )
    rates = ", ".join(
        f"{disk} {DISKS[disk] / options.factor / 1e6:.3g} MB/s" for disk in options.disks
    )
    title = (
        f"cluster: {options.items} samples of {options.size:,} bytes, batches of {options.batch}; "
        f"{rates}, links {1e3 * options.link / options.factor:.0f} Mb/s, accelerators "
        f"{INGEST / options.factor / 1e6:.0f} MB/s a host: real ones / {options.factor:.0f}"
    )
    heads = (
        "hosts, storage, cache",
        "epoch s, local",
        "epoch s, cluster=",
        "samples/s, local",
        "samples/s, cluster=",
        "ratio",
        "reads per epoch, local",
        "reads per epoch, cluster=",
        "network MB, first / later epochs",
        "hedged per epoch",
    )
    notes = [
        f"cluster: {pair.title}: {outcome.total} reads in the whole run, "
        f"{outcome.twice} of {options.items} samples more than once"
        for pair in pairs
        if pair.holds_all
        for outcome in outcomes[pair]
    ]
    return Result(
        (Table(title, heads, tuple(rows)),), tuple(notes), tuple(wrong), {"cluster": data}
    )


def _median(outcomes: Sequence[Outcome], value: Callable[[Outcome], float], form: str) -> str:
    return form.format(Spread.of([value(outcome) for outcome in outcomes]).median)


def _disks(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in DISKS:
            raise ArgumentTypeError(f"there is no disk {name!r}; there are: {', '.join(DISKS)}")
    return names


def _several(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 250:
        raise ArgumentTypeError(f"{text!r} is not a number of hosts from 2 to 250")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1")
    return value


def _fault_names(text: str) -> tuple[str, ...]:
    known = [fault.name for fault in HOST_FAULTS]
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise ArgumentTypeError(f"there is no fault {name!r}; there are: {', '.join(known)}")
    return names


def _arguments(parser: ArgumentParser) -> None:
    known = tuple(fault.name for fault in HOST_FAULTS)
    parser.set_defaults(batch=8)
    parser.add_argument(
        "--hosts", type=_several, nargs="+", default=[2, 4], help="numbers of hosts (2 4)"
    )
    parser.add_argument(
        "--disks",
        type=_disks,
        default=tuple(DISKS),
        metavar="LIST",
        help=f"storage of each host, of: {', '.join(DISKS)}",
    )
    parser.add_argument(
        "--shares",
        type=_share,
        nargs="+",
        default=list(SHARES),
        help="shares of the data that each host may cache (0.25 0.5 0.65 1)",
    )
    parser.add_argument("--items", type=count, default=256, help="number of samples (256)")
    parser.add_argument(
        "--size", type=count, default=96 << 10, help="bytes of a sample (98304): files are cut"
    )
    parser.add_argument("--epochs", type=count, default=3, help="measured epochs (3)")
    parser.add_argument(
        "--link", type=positive, default=LINK / 1e9, help="Gb/s of a host's link, unscaled (40)"
    )
    parser.add_argument(
        "--factor",
        type=positive,
        default=FACTOR,
        help="how much slower than real ones disks, links and accelerators are (100)",
    )
    parser.add_argument(
        "--search", action="store_true", help="measure a search on two hosts (share=), too"
    )
    parser.add_argument("--only-search", action="store_true", help="measure only that")
    parser.add_argument("--faults", action="store_true", help="run the faults of hosts, too")
    parser.add_argument(
        "--only-faults",
        type=_fault_names,
        nargs="?",
        const=known,
        metavar="LIST",
        help=f"run only faults: all, or some of: {', '.join(known)}",
    )


BENCHMARK = Benchmark(
    "cluster",
    "hosts that divide one cache, compared with a cache on each, and faults of hosts",
    run,
    _arguments,
    needs_data=True,
)
