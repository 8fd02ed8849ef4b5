"""Which keys make up which batch: pure functions of (seed, epoch, n, world)."""

from penstock.order.cursor import Cursor
from penstock.order.deal import BatchKeys, Deal
from penstock.order.echo import Echo
from penstock.order.echoed import Echoed, EchoedBatches
from penstock.order.level import Levelled
from penstock.order.order import Order, Sequential, Shuffled, Weighted, check
from penstock.order.renew import Renewal
from penstock.order.replicas import Occurrences, replicas
from penstock.order.sampled import Sampled
from penstock.order.turned import Turned

__all__ = [
    "BatchKeys",
    "Cursor",
    "Deal",
    "Echo",
    "Echoed",
    "EchoedBatches",
    "Levelled",
    "Occurrences",
    "Order",
    "Renewal",
    "Sampled",
    "Sequential",
    "Shuffled",
    "Turned",
    "Weighted",
    "check",
    "replicas",
]
