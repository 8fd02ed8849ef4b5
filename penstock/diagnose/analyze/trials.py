"""Trials: the options of ``penstock run`` that the user's own loader accepts, and their gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import config


@dataclass(frozen=True, slots=True)
class RunWith:
    """Options of ``penstock run``; also what changes in a pipeline of Penstock's own.

    ``random=False`` declares that the datasets draw no random numbers. The defaults change nothing
    but the loader: ``RunWith()`` is ``penstock run -- COMMAND``.
    """

    native: bool = False
    cache: int | None = None
    workers: int | None = None
    reuse: bool = False
    echo: int | None = None
    share: str | None = None
    random: bool | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command line.

        >>> RunWith(native=True, cache=45_000_000).words
        ('--native', '--cache', '45MB')
        """
        words: list[str] = ["--native"] if self.native else []
        if self.cache is not None:
            words += ["--cache", short_size(self.cache)]
        if self.workers is not None:
            words += ["--workers", f"{self.workers}"]
        if self.reuse:
            words += ["--reuse", "auto"]
        if self.echo is not None:
            words += ["--echo", f"{self.echo}", "--echo-at", "batch"]
        if self.share is not None:
            words += ["--share", self.share]
        if self.random is False:
            words.append("--no-random")
        return tuple(words)


@dataclass(frozen=True, slots=True)
class RemedyTrial:
    """Options that were tried on the user's own loader.

    - ``refusal``: why no loader could be built with them; empty if it could.
    - ``gain``: with ``--try``, the measured speed relative to the script as it is, from turns of a
      few seconds; ``None`` if it was not measured. ``rounds`` are the gains of the turns.
    """

    options: RunWith
    refusal: str = ""
    gain: float | None = None
    rounds: tuple[float, ...] = ()


def trial_from_dict(plain: Mapping[str, Any]) -> RemedyTrial:
    """The trial from the output of ``dataclasses.asdict``."""
    given = {**plain, "options": RunWith(**plain["options"]), "rounds": tuple(plain["rounds"])}
    return RemedyTrial(**given)


def short_size(nbytes: float) -> str:
    """A size as a user would type it.

    >>> short_size(45_000_000), short_size(5_500_000_000)
    ('45MB', '5.5GB')
    """
    return config.show_size(nbytes).replace(" ", "").replace(".0", "")
