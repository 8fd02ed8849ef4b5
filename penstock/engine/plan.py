"""Makes the plan of a loader from its order, its stops and its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import PipelineError
from penstock.options import Options
from penstock.order import Budgeted, Deal, Echoed, EchoedBatches, MidEpoch, Plan, Streams
from penstock.pipeline import Pipeline, batching_of
from penstock.source.stream import StreamSource
from penstock.stops.echo import Echo, echo_in
from penstock.stops.stop import Stop

Sampling = Callable[[int, int, bool], Plan]
"""Makes the plan of a user's own sampler from (samples, batch size, drop_last)."""


def plan_of(
    pipeline: Pipeline,
    options: Options,
    stops: Sequence[Stop],
    *,
    workers: int = 0,
    factors: Callable[[int], float] | None = None,
    sampling: Sampling | None = None,
) -> Plan:
    """The plan of a loader: which samples are in which batch.

    - ``stops``: the stops of the pipeline as they run, with their stores.
    - ``workers``: number of workers, each of which reads a stream of its own.
    - ``factors``: the echo factor of an epoch, for ``echo("auto")``.
    - ``sampling``: a user's sampler, used in place of the order; with several ranks the order is
      dealt to them.
    """
    for place, stop in enumerate(pipeline.stops):
        stop.check_below(pipeline.stops[place + 1 :])
    _check(pipeline, options, sampling)
    batch, source = batching_of(pipeline), pipeline.source
    if isinstance(source, StreamSource):
        options.check_stream()
        return Streams(workers, batch.size, drop_last=batch.drop_last, length=source.length)
    plan: Plan
    if sampling is not None and options.world == 1:
        plan = sampling(len(source), batch.size, batch.drop_last)
    else:
        order = source.ordered(options.chosen_order)
        for stop in stops:
            order = stop.order(order)
        echo = echo_in(pipeline.stops)
        if batch.budget is not None:
            plan = Budgeted(
                order,
                len(source),
                options.seed,
                batch.budget,
                options.rank,
                options.world,
                options.tail,
                shuffle=options.shuffle or options.order is not None,
            )
            if pipeline.echoed is None:
                return MidEpoch(plan)
            return EchoedBatches(plan, pipeline.echoed.dealt(options.seed, factors))
        deal = Deal(
            order=order,
            n=len(source),
            seed=options.seed,
            batch_size=batch.size,
            # With echo, batches are cut from the delivered samples, copies included.
            drop_last=batch.drop_last and echo is None,
            rank=options.rank,
            world=options.world,
            tail=options.tail,
        )
        if echo is None:
            plan = deal if pipeline.echoed is not None else MidEpoch(deal)
        else:
            dealt = echo.dealt(options.seed, factors)
            plan = Echoed(deal, dealt, batch.size, batch.drop_last)
    if pipeline.echoed is not None:
        plan = EchoedBatches(plan, pipeline.echoed.dealt(options.seed, factors))
    return plan


def echo_of(pipeline: Pipeline) -> Echo | None:
    """The echo of a pipeline, above or below ``batch``; ``None`` if it has none."""
    return pipeline.echoed or echo_in(pipeline.stops)


def _check(pipeline: Pipeline, options: Options, sampling: Sampling | None) -> None:
    """Raise PipelineError if the loader's options do not fit the pipeline."""
    echo = echo_of(pipeline)
    if echo is not None and echo.measured and options.world > 1:
        raise PipelineError(
            f'echo("auto") with world={options.world}: each rank would measure a factor of its '
            "own, and the ranks would have different numbers of batches. Run with one rank, read "
            "the factor it chooses (loader.stats().echo.factor), and give that number to echo()."
        )
    if batching_of(pipeline).budget is not None:
        if echo_in(pipeline.stops) is not None:
            raise PipelineError(
                "echo() stands above batch(by=...): copies of a sample have its length and would "
                "meet in one batch. Put echo() below batch() to repeat whole batches."
            )
        if sampling is not None:
            raise PipelineError(
                "batch(by=...) with a sampler: both would decide which samples are in a batch. "
                "Leave one of them out."
            )
    if sampling is not None and echo_in(pipeline.stops) is not None:
        raise PipelineError(
            "echo() stands above batch(), and the loader has a sampler: both would decide how "
            "often a sample is used. Leave the sampler out, or put echo() below batch() to repeat "
            "whole batches.",
            code="echo-with-sampler",
        )
