"""Which keys make up which batch: pure functions of (seed, epoch, n, world)."""

from penstock.order.balanced import Balanced
from penstock.order.budget import Budget, Budgeted
from penstock.order.cursor import Cursor
from penstock.order.deal import Deal, Occurrences, replica_numbers
from penstock.order.echo import Echoed, EchoedBatches, EchoSequence
from penstock.order.generations import Generations
from penstock.order.mid_epoch import MidEpoch
from penstock.order.mixed import Mixed, MixPart
from penstock.order.order import Order, Sequential, Shuffled, Weighted, check
from penstock.order.plan import BatchKeys, PartProgress, Plan
from penstock.order.reservoir import Reservoir
from penstock.order.sampled import Sampled
from penstock.order.streams import Streams

__all__ = [
    "Balanced",
    "BatchKeys",
    "Budget",
    "Budgeted",
    "Cursor",
    "Deal",
    "EchoSequence",
    "Echoed",
    "EchoedBatches",
    "Generations",
    "MidEpoch",
    "MixPart",
    "Mixed",
    "Occurrences",
    "Order",
    "PartProgress",
    "Plan",
    "Reservoir",
    "Sampled",
    "Sequential",
    "Shuffled",
    "Streams",
    "Weighted",
    "check",
    "replica_numbers",
]
