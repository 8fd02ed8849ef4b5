"""Which plan a loader follows: its order, and what refurbish and echo make of it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import PipelineError
from penstock.options import Options
from penstock.order import Balanced, Deal, Echoed, EchoedBatches, Generations, Shuffled
from penstock.order.plan import Plan
from penstock.pipeline import Pipeline
from penstock.stops.echo import Echo
from penstock.stops.placement import check_road

Sampling = Callable[[int, int, bool], Plan]
"""Makes the plan of a user's own sampler from (samples, batch size, drop_last)."""


def plan_of(
    pipeline: Pipeline,
    options: Options,
    renewal: Generations | None,
    factors: Callable[[int], float] | None,
    sampling: Sampling | None = None,
) -> Plan:
    """The batches that a loader of this pipeline deals."""
    check_road(pipeline.stops)
    _check(pipeline, options, sampling)
    batch, samples = pipeline.batching, len(pipeline.source)  # type: ignore[arg-type]
    if batch is None:
        raise PipelineError("a loader needs batches: end the pipeline with batch(size).")
    plan: Plan
    if sampling is not None:
        plan = sampling(samples, batch.size, batch.drop_last)
    else:
        order = options.chosen_order
        if renewal is not None and isinstance(order, Shuffled):
            order = Balanced(renewal)
        echo = echo_on(pipeline)
        deal = Deal(
            order=order,
            n=samples,
            seed=options.seed,
            batch_size=batch.size,
            # With echo it is delivered samples that make a batch, and the last is cut below.
            drop_last=batch.drop_last and echo is None,
            rank=options.rank,
            world=options.world,
            tail=options.tail,
        )
        plan = deal
        if echo is not None:
            plan = Echoed(deal, echo.dealt(options.seed, factors), batch.size, batch.drop_last)
    if pipeline.echoed is not None:
        plan = EchoedBatches(plan, pipeline.echoed.dealt(options.seed, factors))
    return plan


def echo_on(pipeline: Pipeline) -> Echo | None:
    """The echo above batch(), if there is one."""
    return next((stop for stop in pipeline.stops if isinstance(stop, Echo)), None)


def echo_of(pipeline: Pipeline) -> Echo | None:
    """The echo of a pipeline, above batch() or below it."""
    return pipeline.echoed or echo_on(pipeline)


def follows_pace(pipeline: Pipeline) -> bool:
    """Whether there is an echo whose factor is to be chosen."""
    echo = echo_of(pipeline)
    return echo is not None and echo.factor == "auto"


def _check(pipeline: Pipeline, options: Options, sampling: Sampling | None) -> None:
    """What makes no sense together with what the loader was told."""
    if follows_pace(pipeline) and options.world > 1:
        raise PipelineError(
            f'echo("auto") with {options.world} ranks: each would measure a factor of its own, and '
            "then have another number of batches than the others. Run it with one rank to see "
            "what it chooses (stats().echo.factor), and give that number."
        )
    if sampling is not None and echo_on(pipeline) is not None:
        raise PipelineError(
            "echo() above batch() with a sampler: the sampler decides how often a sample comes, "
            "and so would echo. Leave the sampler out, or echo whole batches: put echo() below "
            "batch().",
            code="echo-with-sampler",
        )
