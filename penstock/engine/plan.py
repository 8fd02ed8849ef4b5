"""Which plan a loader follows: its order, and what its stops and its source make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import PipelineError
from penstock.options import Options
from penstock.order import Deal, Echoed, EchoedBatches, MidEpoch, Plan, Streams
from penstock.pipeline import Pipeline
from penstock.source.stream import StreamSource
from penstock.stops.echo import Echo, echo_in
from penstock.stops.placement import check_complete
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
    """The batches that a loader of this pipeline deals.

    ``stops`` are the pipeline's stops as they run, opened. ``factors``: the echo factor of each
    epoch, where it is measured. ``sampling``: a user's sampler in place of the order.
    """
    check_complete(pipeline.stops)
    _check(pipeline, options, sampling)
    batch, source = pipeline.batching, pipeline.source
    if batch is None:
        raise PipelineError("a loader needs batches: end the pipeline with batch(size).")
    if isinstance(source, StreamSource):
        options.check_stream()
        return Streams(workers, batch.size, drop_last=batch.drop_last, length=source.length)
    plan: Plan
    if sampling is not None:
        plan = sampling(len(source), batch.size, batch.drop_last)
    else:
        order = options.chosen_order
        for stop in stops:
            order = stop.order(order)
        echo = echo_in(pipeline.stops)
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
    """The echo of a pipeline, above batch() or below it."""
    return pipeline.echoed or echo_in(pipeline.stops)


def _check(pipeline: Pipeline, options: Options, sampling: Sampling | None) -> None:
    """Refuse a pipeline that the loader's options do not fit."""
    echo = echo_of(pipeline)
    if echo is not None and echo.measured and options.world > 1:
        raise PipelineError(
            f'echo("auto") with {options.world} ranks: each would measure a factor of its own, and '
            "then have another number of batches than the others. Run it with one rank to see "
            "what it chooses (stats().echo.factor), and give that number."
        )
    if sampling is not None and echo_in(pipeline.stops) is not None:
        raise PipelineError(
            "echo() above batch() with a sampler: the sampler decides how often a sample comes, "
            "and so would echo. Leave the sampler out, or echo whole batches: put echo() below "
            "batch().",
            code="echo-with-sampler",
        )
