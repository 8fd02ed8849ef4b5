"""``penstock stop``."""

from __future__ import annotations

import argparse
import sys

from penstock.errors import WorkerError

EXAMPLE = """\
examples:
  penstock stop        end the node, unless jobs are attached to it
  penstock stop --now  end it all the same: those jobs start another by themselves and lose nothing

It returns when the node is gone. Exits with 1 if jobs are attached and --now is not given. There
is no need for it: a node ends by itself a few seconds after the last job has gone.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Ends the node of this user on this machine."
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--now", action="store_true", help="even if jobs are attached; they go on with another"
    )


def run(arguments: argparse.Namespace) -> int:
    from penstock.node.look import PATIENCE, gone, look, stop
    from penstock.node.place import Place
    from penstock.node.rendering import names_of

    place = Place()
    seen = look(place)
    members = [] if seen is None else names_of(seen)
    if seen is not None and members and not arguments.now:
        listed = "".join(f"  {name}\n" for name in members)
        sys.stderr.write(
            f"penstock: jobs are attached to the node (process {seen['pid']}):\n{listed}"
            "`penstock stop --now` ends it all the same: they start another by themselves and lose "
            "nothing.\n"
        )
        return 1
    if seen is None:
        sys.stdout.write("No node is running.\n")
        return 0
    # Its jobs start another only when this one is gone: one that starts before would find the
    # lock of the old one taken, and give up.
    with place.starting():
        ended = stop(place) or seen
        if not gone(ended["pid"]):
            raise WorkerError(
                f"the node (process {ended['pid']}) was told to end and has not after "
                f"{PATIENCE:g} s. Its log is {place.log}. `kill -9 {ended['pid']}` ends it."
            )
    sys.stdout.write(f"The node (process {ended['pid']}) has ended.\n")
    if members:
        sys.stdout.write("Its jobs start another by themselves, and lose nothing.\n")
    return 0
