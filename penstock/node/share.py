"""``share=``: check that a pipeline can be shared, and attach its loader to the node."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from penstock import config
from penstock.cluster.find import find_cluster, parse_own_address
from penstock.cluster.placement import pack_ranks
from penstock.engine.build import Assembly
from penstock.engine.feed import Feed
from penstock.engine.plan import echo_of
from penstock.engine.slots import Register
from penstock.errors import PipelineError
from penstock.fingerprint import fingerprint
from penstock.node.copy_desk import NodeCopyDesk
from penstock.node.member import Membership, NodeFeed, depth_in_cluster
from penstock.node.protocol import EnterCluster, requested_size
from penstock.node.recut import RecutFeed
from penstock.node.worker_setup import runs_user_code
from penstock.options import CLUSTER_SHARE, Options
from penstock.order import Cursor, Deal, Plan
from penstock.pipeline import Pipeline


class SharedFeed(Feed, Protocol):
    """A feed of batches that other jobs of this machine get too."""

    def copy_desk(self) -> NodeCopyDesk:
        """Where jobs with these batches agree on who copies them to a device."""


def check_shared(pipeline: Pipeline, options: Options) -> None:
    """Raise PipelineError if jobs that share this pipeline could not get equal batches."""
    given = f"share={options.share!r}"
    if options.cluster is not None and options.share == CLUSTER_SHARE:
        given = f"cluster={options.cluster!r}"
    if not pipeline.source.indexed:
        raise PipelineError(
            f"{given} on a stream: its samples have no index that jobs could agree on. Give it to "
            "pipelines over sources with random access."
        )
    echo = echo_of(pipeline)
    if any(stop.measured for stop in pipeline.stops) or (echo is not None and echo.measured):
        raise PipelineError(
            f'{given} with "auto": each job would measure by itself and choose another number. Run '
            f"one job without {given.partition('=')[0]}= to see its choice, and give that number."
        )


def attach(
    assembly: Assembly,
    identity: Mapping[str, Any],
    plan: Plan,
    register: Register | None = None,
) -> SharedFeed:
    """Join the group and return a feed of this plan's batches, which the node prepares.

    ``identity``: the description of data, pipeline and order that checkpoints have too.
    ``register``: registers the memory of batches with the device that all of them are copied to.
    """
    recipe, options = assembly.recipe, assembly.recipe.options
    unknown = [name for name, fingerprint in identity["stops"] if fingerprint is None]
    if not any(identity["data"].values()):
        unknown.insert(0, "the data")
    if unknown:
        raise PipelineError(
            f"share={options.share!r}: {', '.join(unknown)} cannot be fingerprinted, so the node "
            'cannot check that all jobs prepare the same. Give it version="...".'
        )
    generations = assembly.keepers.generations
    kept = None if generations is None else generations.kept
    alone = replace(options.without_share(), workers="auto", rank=0, world=1)
    description = {**identity, "on_error": options.on_error, "kept": kept}
    if runs_user_code(recipe.pipeline):
        # A relative path names another file in another directory.
        description["directory"] = os.getcwd()
    clustered = options.cluster is not None
    deal = plan.as_deal
    ranks = plan.ranks(0) if clustered else None
    name = str(options.share)
    if name == CLUSTER_SHARE and clustered:
        name = f"{CLUSTER_SHARE}-{fingerprint(description)[:12]}"
    divisible = deal is not None and not getattr(deal.order, "blocks", False)
    membership = Membership(
        name,
        replace(recipe, options=alone, kept=kept, deal=deal if _is_ours(deal) else None),
        description,
        f"{options.rank}/{options.world}",
        assembly.work.rows,
        # If bad samples are skipped, the rows of a batch move up.
        cuts=divisible and assembly.work.collate is None and options.on_error != "skip",
        lag=options.lag,
        keeps=assembly.work.road.holds > 0,
        enter=_enter(str(options.cluster)) if clustered else None,
        dealt=None if ranks is None else pack_ranks(ranks),
    )
    prefetch = options.prefetch
    if prefetch is None and clustered:
        prefetch = depth_in_cluster(plan.length(Cursor()))
    feed = NodeFeed(
        membership,
        assembly.meter,
        prefetch=prefetch,
        timeout=options.timeout,
        register=register,
    )
    feed.join()
    size, unit = membership.size, feed.unit or membership.size
    if deal is not None and unit != size:
        if requested_size(size, unit, membership.cuts) == unit:
            return RecutFeed(feed, deal, size, unit)
        warnings.warn(
            f"share={options.share!r}: batches of {size} samples cannot be made from the group's "
            f"batches of {unit}, so the node prepares separate batches for this job. Give a batch "
            f"size that divides {unit}, or a multiple of it.",
            RuntimeWarning,
            stacklevel=5,
        )
    # With join="live" the node chooses the first batch of an epoch: the one where others are.
    plan.begin_by(feed.begin if options.join == "live" else feed.begin_at_start)
    return feed


def _is_ours(deal: Deal | None) -> bool:
    """Whether the order is Penstock's own: a node runs no code of users in its own process."""
    if deal is None or getattr(deal.order, "runs_user_code", False):
        return False
    return type(deal.order).__module__.partition(".")[0] == "penstock"


def _enter(cluster: str) -> EnterCluster:
    config.cluster_patience()  # a wrong value is an error here, and not in the node
    address = config.cluster_address()
    if address:
        address = parse_own_address(address, "PENSTOCK_CLUSTER_ADDRESS")
    place = find_cluster(cluster)
    if place.by_ray:
        from penstock.node.placed import enter_by_ray

        return enter_by_ray()
    seeds = list(place.seeds)
    # The node may have been started by a job with other variables.
    secret = str(config.cluster_secret().absolute())
    # It lends no cores: what another machine prepares is read from storage there once more.
    return EnterCluster(seeds, address, secret, 0, 0, stay=False, found=place.launched)
