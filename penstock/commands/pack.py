"""The command ``penstock pack``."""

from __future__ import annotations

import argparse
import sys

from penstock.errors import PipelineError

EXAMPLE = """\
examples:
  penstock pack train.py --to packed                  the only pipeline in train.py
  penstock pack train.py:train --until decode --to d  its variable `train`, up to decode
  penstock pack train.py --until source --to raw      the files as they are
  penstock pack train.py --to s3://bucket/packed      into a bucket; needs penstock[cloud]
  penstock pack --check packed                        compare shards with their checksums

Run it again after an interruption: finished shards are kept. The file does not run as __main__, so
code below `if __name__ == "__main__":` does not run.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the samples of a pipeline as tar shards, which from_tar, WebDataset and DALI read. "
        "All packed stages must be deterministic: put random ones below from_tar."
    )
    parser.epilog = EXAMPLE
    parser.add_argument(
        "file", nargs="?", metavar="FILE.py[:NAME]", help="a Python file with a pipeline"
    )
    parser.add_argument("--to", metavar="DIR", help="the folder for the shards, or its URL")
    parser.add_argument("--until", metavar="STAGE", help="pack the stages up to this one only")
    parser.add_argument(
        "--per-shard", type=int, metavar="N", help="samples in a shard (as many as make 256 MB)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="number of workers (chosen)")
    parser.add_argument("--check", metavar="DIR", help="verify a packed folder, or URL, instead")
    parser.add_argument(
        "--option",
        action="append",
        metavar="NAME=VALUE",
        help="a setting of the bucket, such as endpoint=https://...; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    from penstock.commands.profile import find
    from penstock.pack.pack import check, pack, until
    from penstock.progress_bar import counting

    if arguments.check is not None:
        with counting("checking") as on_progress:
            result = check(arguments.check, on_progress, _settings(arguments.option))
        sys.stdout.write(f"{result}\n")
        return 1 if result.wrong else 0
    if arguments.file is None or arguments.to is None:
        raise PipelineError(
            "give a Python file with a pipeline, and a folder with --to; or --check DIR. "
            "`penstock pack --help` has examples."
        )
    pipeline = find(arguments.file)
    if arguments.until is not None:
        pipeline = until(pipeline, arguments.until)
    with counting("packing") as on_progress:
        report = pack(
            pipeline,
            arguments.to,
            per_shard="auto" if arguments.per_shard is None else arguments.per_shard,
            workers="auto" if arguments.workers is None else arguments.workers,
            on_progress=on_progress,
            storage=_settings(arguments.option),
        )
    sys.stdout.write(f"{report}\n")
    return 0


def _settings(given: list[str] | None) -> dict[str, str] | None:
    if given is None:
        return None
    for one in given:
        if "=" not in one:
            raise PipelineError(f"--option {one}: give NAME=VALUE, such as region=eu-west-1.")
    return dict(one.split("=", 1) for one in given)
