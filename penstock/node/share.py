"""``share=``: what can be shared, and the member that a loader becomes by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.assembly import Assembly
from penstock.errors import PipelineError
from penstock.node.member import Attached, Membership
from penstock.options import Options
from penstock.pipeline import Pipeline
from penstock.plans import follows_pace
from penstock.source.stream import StreamSource
from penstock.stops.refurbish import Refurbish


def check_shared(pipeline: Pipeline, options: Options) -> None:
    """Refuse what cannot be the same for every job."""
    share = options.share
    if isinstance(pipeline.source, StreamSource):
        raise PipelineError(
            f"share={share!r} on a stream: its samples have no index that jobs could agree on. "
            "Share works on sources with random access."
        )
    measured = [stop for stop in pipeline.stops if isinstance(stop, Refurbish)]
    if follows_pace(pipeline) or any(stop.reuse == "auto" for stop in measured):
        raise PipelineError(
            f'share={share!r} with "auto": every job would measure, and choose, for itself. Run '
            "one job without share to see what it chooses, and give that number."
        )


def attached(assembly: Assembly, about: Mapping[str, Any]) -> Attached:
    """The member that takes the place of an engine."""
    recipe, options = assembly.recipe, assembly.recipe.options
    unknown = [name for name, known in about["stops"] if known is None]
    if about["data"] is None:
        unknown.insert(0, "the data")
    if unknown:
        raise PipelineError(
            f"share={options.share!r}: {', '.join(unknown)} cannot be told from another of the "
            'same name, so jobs cannot be sure that they mean the same. Give version="..." to it.'
        )
    renewal = assembly.holds.renewal
    kept = None if renewal is None else renewal.kept
    alone = replace(options, share=None, lag="detach", workers="auto", rank=0, world=1)
    description = {**about, "on_error": options.on_error, "kept": kept}
    size = assembly.work.rows
    membership = Membership(
        str(options.share),
        replace(recipe, options=alone, kept=kept),
        description,
        f"{options.rank}/{options.world} x {size}",
        options.lag,
    )
    return Attached(membership, assembly.meter, prefetch=options.prefetch, timeout=options.timeout)
