"""``penstock stop``: end the node."""

from __future__ import annotations

import argparse
import sys

from penstock.errors import WorkerError

EXAMPLE = """\
examples:
  penstock stop        end the node, unless jobs are attached to it
  penstock stop --now  end it even then: the jobs start another node by themselves and lose nothing

The command returns when the node has ended. It exits with 1 if jobs are attached and --now is not
given. It is rarely needed: a node ends by itself a few seconds after the last job has left.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Ends your node on this machine."
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--now",
        action="store_true",
        help="end the node even if jobs are attached; they start another",
    )


def run(arguments: argparse.Namespace) -> int:
    from penstock.node.client import ANSWER_TIMEOUT, request_end, request_status, wait_for_exit
    from penstock.node.directory import NodeDirectory
    from penstock.node.status import names_of

    directory = NodeDirectory()
    status = request_status(directory)
    if status is None:
        sys.stdout.write("No node is running.\n")
        return 0
    members = names_of(status)
    if members and not arguments.now:
        listed = "".join(f"  {name}\n" for name in members)
        sys.stderr.write(
            f"penstock: jobs are attached to the node (process {status['pid']}):\n{listed}"
            "`penstock stop --now` ends it nevertheless: the jobs start another node by themselves "
            "and lose nothing.\n"
        )
        return 1
    # While we hold this lock, jobs wait with starting another node: a node that starts before the
    # old one has released its lock would give up.
    with directory.starting():
        ended = request_end(directory) or status
        if not wait_for_exit(ended["pid"]):
            raise WorkerError(
                f"the node (process {ended['pid']}) was asked to end, and is still running after "
                f"{ANSWER_TIMEOUT:g} s. Its log is {directory.log}. End it with `kill -9 "
                f"{ended['pid']}`."
            )
    sys.stdout.write(f"The node (process {ended['pid']}) has ended.\n")
    if members:
        sys.stdout.write("Its jobs start another node by themselves and lose nothing.\n")
    return 0
