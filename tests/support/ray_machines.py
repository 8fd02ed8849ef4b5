"""A Ray cluster of two machines on this one, in a process of its own: ``python -m`` this module.

Argument: a directory. Each raylet has a directory for its Penstock node there. Prints the address
of the head, and ends the cluster when its input is closed. Ray's processes are children of this
one, and are ended by their process ids.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    place = Path(sys.argv[1])
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for number in range(2):
            cluster.add_node(
                num_cpus=1,
                include_dashboard=False,
                object_store_memory=100 << 20,
                temp_dir=str(place / "ray"),
                env_vars={
                    "PENSTOCK_RUNTIME_DIR": str(place / f"machine-{number}"),
                    # As if the machines shared no file system.
                    "PENSTOCK_CLUSTER_RECIPES": str(place / f"recipes-{number}"),
                },
            )
        sys.stdout.write(f"{cluster.address}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
