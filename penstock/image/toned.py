"""The toned stop: an augmentation and normalize, which look every level up once for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.image.augment import AutoAugment, RandAugment, TrivialAugment, normalized
from penstock.image.normalizing import Normalize
from penstock.image.pixels import check_image
from penstock.keyed import Key, Keyed
from penstock.operation import Operation
from penstock.stops.field import Field, On
from penstock.stops.stop import Joined, Site, Step, Stop, each

Augment = RandAugment | AutoAugment | TrivialAugment


@dataclass(frozen=True)
class Toned(Joined):
    """The last table of the one goes into the table of the other: the same bits, a pass less."""

    augment: Augment
    normalize: Normalize
    ordinal: int
    on: On = None

    @property
    def operations(self) -> list[Operation]:
        return [self.augment, self.normalize]

    @property
    def note(self) -> str:
        """What is gained, for people."""
        return "in one step: every level is looked up once for both"

    def step(self, site: Site) -> Step:
        keyed = Keyed(site.seed, f"map/{self.ordinal}")
        place = Field(self.name, self.on, self.augment.field).replace
        augment, normalize, rows = self.augment, self.normalize, site.rows
        fill: Any = augment.fill
        smooth = augment.interpolation == "bilinear"
        name = augment.name

        def call(value: Any, key: Key) -> Any:
            out = None if rows is None else rows.next(self.on, augment.field)
            params = augment.draw(keyed.at(key), value.shape)
            image = check_image(name, value)
            return normalized(image, params, fill, smooth, normalize, out)

        return each(self.name, lambda sample, key: place(sample, call, key))


def tone(stops: tuple[Stop, ...]) -> tuple[Stop, ...]:
    """Replace each augmentation right above normalize."""
    out: list[Stop] = []
    for stop in stops:
        above: Any = out[-1] if out else None
        augment, normalize = (getattr(one, "function", None) for one in (above, stop))
        alike = getattr(above, "on", None) == getattr(stop, "on", None)
        if isinstance(augment, Augment) and isinstance(normalize, Normalize) and alike:
            out[-1] = Toned(augment, normalize, above.ordinal, above.on)
        else:
            out.append(stop)
    return tuple(out)
