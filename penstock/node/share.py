"""``share=``: what can be shared, and the member that a loader becomes by it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.build import Assembly
from penstock.engine.feed import Feed
from penstock.engine.plan import echo_of
from penstock.errors import PipelineError
from penstock.node.directory import looks_around
from penstock.node.member import Attached, Membership
from penstock.node.protocol import common
from penstock.node.recut import Recut
from penstock.options import Options
from penstock.order import Plan
from penstock.pipeline import Pipeline


def check_shared(pipeline: Pipeline, options: Options) -> None:
    """Refuse what cannot be the same for every job."""
    share = options.share
    if not pipeline.source.indexed:
        raise PipelineError(
            f"share={share!r} on a stream: its samples have no index that jobs could agree on. "
            "Share works on sources with random access."
        )
    echo = echo_of(pipeline)
    if any(stop.measured for stop in pipeline.stops) or (echo is not None and echo.measured):
        raise PipelineError(
            f'share={share!r} with "auto": every job would measure, and choose, for itself. Run '
            "one job without share to see what it chooses, and give that number."
        )


def attached(assembly: Assembly, about: Mapping[str, Any], plan: Plan) -> Feed:
    """The member that takes the place of an engine, for the batches of this plan."""
    recipe, options = assembly.recipe, assembly.recipe.options
    unknown = [name for name, known in about["stops"] if known is None]
    if about["data"] is None:
        unknown.insert(0, "the data")
    if unknown:
        raise PipelineError(
            f"share={options.share!r}: {', '.join(unknown)} cannot be told from another of the "
            'same name, so jobs cannot be sure that they mean the same. Give version="..." to it.'
        )
    generations = assembly.keepers.generations
    kept = None if generations is None else generations.kept
    alone = replace(options, share=None, lag="detach", join="live", workers="auto", rank=0, world=1)
    description = {**about, "on_error": options.on_error, "kept": kept}
    if looks_around(recipe.pipeline):
        # A path that is not absolute means another file in another directory.
        description["directory"] = os.getcwd()
    deal = plan.as_deal
    whole = deal is not None and not getattr(deal.order, "blocks", False)
    membership = Membership(
        str(options.share),
        replace(recipe, options=alone, kept=kept),
        description,
        f"{options.rank}/{options.world}",
        assembly.work.rows,
        # Where bad samples are left out, a batch's rows are not where they would be.
        cuts=whole and assembly.work.collate is None and options.on_error != "skip",
        lag=options.lag,
        keeps=assembly.work.road.holds > 0,
    )
    member = Attached(
        membership, assembly.meter, prefetch=options.prefetch, timeout=options.timeout
    )
    member.join()
    size, unit = membership.size, member.unit or membership.size
    if deal is not None and unit != size:
        if common(size, unit, membership.cuts) == unit:
            return Recut(member, deal, size, unit)
        warnings.warn(
            f"share={options.share!r}: batches of {size} cannot be made of the group's, which have "
            f"{unit} samples, so this job has its own prepared. Give a size that divides {unit}, "
            "or a multiple of it.",
            RuntimeWarning,
            stacklevel=5,
        )
    # Among other members an epoch may be begun where they are.
    plan.begin_by(member.begin if options.join == "live" else member.begin_at_start)
    return member
