"""Loads the pipeline of a job, or of another machine's job, into the node."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.engine.build import Recipe
from penstock.engine.pools.choose import Choice
from penstock.node.trial import load_on_trial
from penstock.node.worker_setup import InNode, runs_user_code
from penstock.serialize import unpack


def load_recipe(
    fd: int,
    path: Sequence[str],
    directory: str,
    *,
    user_code: bool,
    closing: Callable[[], bool],
) -> tuple[Recipe, mmap.mmap]:
    """The recipe in a shared file, which is closed, and its packed form. Raises TrialError.

    ``user_code``: it is loaded in a process of its own first. If it crashes there, the node lives.
    """
    try:
        if user_code:
            load_on_trial(fd, list(path), directory, closing)
        # The modules of the job's pipeline must be importable in this process too.
        sys.path.extend(entry for entry in path if entry not in sys.path)
        packed = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    recipe: Recipe = unpack(packed)
    if runs_user_code(recipe.pipeline):
        # It may crash, hang, or change the working directory, which all threads share.
        recipe = replace(recipe, options=replace(recipe.options, kind="processes"))
    return recipe, packed


def choose_workers(recipe: Recipe, workers: int, directory: str) -> tuple[Recipe, Choice]:
    """The kind of workers for a recipe, and the recipe with what these need to start."""
    choice = recipe.choice(workers)
    if choice.own_processes:
        recipe = replace(recipe, init=InNode(directory, recipe.init))
    return recipe, choice
