"""Recipes: on which ways a machine gets a pipeline, and which files it refuses to run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.cluster.recipes import (
    RecipeContent,
    RecipeDirectory,
    RecipeName,
    Recipes,
    digest_of,
)
from penstock.errors import ClusterError

CONTENT = RecipeContent(("/code", "/more"), "/home/job", user_code=True, frame=b"pickled")


class Memory:
    """A courier within this process."""

    name = "memory"

    def __init__(self) -> None:
        self.carried: dict[str, bytes] = {}

    def publish(self, digest: str, content: bytes) -> None:
        self.carried[digest] = content

    def fetch(self, digest: str, *, timeout: float) -> bytes | None:
        return self.carried.get(digest)

    def withdraw(self, digest: str) -> None:
        self.carried.pop(digest, None)


class Broken(Memory):
    """A courier that may not carry code."""

    def publish(self, digest: str, content: bytes) -> None:
        raise ClusterError("set RAY_AUTH_MODE=token")

    def fetch(self, digest: str, *, timeout: float) -> bytes | None:
        raise ClusterError("set RAY_AUTH_MODE=token")


def test_a_recipe_in_a_shared_directory_is_found_by_another_machine(tmp_path: Path) -> None:
    trainer, helper = Recipes(tmp_path / "shared"), Recipes(tmp_path / "shared")
    name = trainer.publish("identity", CONTENT)
    assert helper.find(name) == CONTENT
    assert RecipeName.parse(str(name)) == name


def test_a_withdrawn_recipe_is_gone_after_its_last_user(tmp_path: Path) -> None:
    trainer, helper = Recipes(tmp_path / "shared"), Recipes(tmp_path / "shared")
    name = trainer.publish("identity", CONTENT)
    assert trainer.publish("identity", CONTENT) == name
    trainer.withdraw(name.digest)
    assert helper.find(name) == CONTENT
    trainer.withdraw(name.digest)
    with pytest.raises(ClusterError, match="PENSTOCK_CLUSTER_RECIPES"):
        helper.find(name)
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_file_that_another_machine_removed_is_written_again(tmp_path: Path) -> None:
    one, two = Recipes(tmp_path / "shared"), Recipes(tmp_path / "shared")
    name = one.publish("identity", CONTENT)
    two.publish("identity", CONTENT)
    two.withdraw(name.digest)
    assert one.renew(name.digest)
    assert two.find(name) == CONTENT
    assert not one.renew(name.digest)
    assert not two.renew(name.digest), "it has published nothing"


def test_the_recipe_of_an_own_job_is_found_by_its_identity(tmp_path: Path) -> None:
    helper = Recipes(tmp_path / "nothing")
    helper.add_own("identity", CONTENT)
    assert helper.find(RecipeName("identity", "f00")) == CONTENT
    helper.remove_own("identity")
    with pytest.raises(ClusterError, match="does not have the pipeline"):
        helper.find(RecipeName("identity", "f00"))


def test_a_courier_brings_what_no_directory_has(tmp_path: Path) -> None:
    courier = Memory()
    trainer = Recipes(tmp_path / "here")
    name = trainer.publish("identity", CONTENT)
    trainer.add_courier(courier)
    assert trainer.ways == 1
    helper = Recipes(tmp_path / "elsewhere", [Broken(), courier])
    assert helper.find(name) == CONTENT
    courier.carried[name.digest] += b"changed"
    with pytest.raises(ClusterError, match=r"RAY_AUTH_MODE.*memory does not have it"):
        helper.find(name)
    trainer.withdraw(name.digest)
    assert courier.carried == {}


def test_publishing_fails_only_if_no_way_works(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the place of the directory")
    with pytest.raises(ClusterError, match=r"cannot be written.*RAY_AUTH_MODE"):
        Recipes(tmp_path / "file", [Broken()]).publish("identity", CONTENT)
    courier = Memory()
    name = Recipes(tmp_path / "file", [Broken(), courier]).publish("identity", CONTENT)
    assert list(courier.carried) == [name.digest]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    directory = RecipeDirectory(tmp_path / "recipes")
    digest = directory.write(CONTENT.pack())
    assert (directory.path / f"{digest}.recipe").stat().st_mode & 0o777 == 0o600
    os.chmod(directory.path / f"{digest}.recipe", mode)
    with pytest.raises(ClusterError, match="other users can change it"):
        directory.read(digest)


def test_a_directory_that_others_can_open_is_refused(tmp_path: Path) -> None:
    directory = RecipeDirectory(tmp_path / "recipes")
    digest = directory.write(CONTENT.pack())
    os.chmod(directory.path, 0o755)
    with pytest.raises(ClusterError, match="other users can open it"):
        directory.read(digest)


def test_a_file_with_another_content_than_its_name_is_refused(tmp_path: Path) -> None:
    directory = RecipeDirectory(tmp_path / "recipes")
    digest = directory.write(CONTENT.pack())
    path = directory.path / f"{digest}.recipe"
    path.write_bytes(b"something else")
    with pytest.raises(ClusterError, match="another content"):
        directory.read(digest)
    path.unlink()
    path.symlink_to(__file__)
    with pytest.raises(ClusterError, match="cannot be read"):
        directory.read(digest)


def test_forgotten_recipes_are_removed_and_used_ones_stay(tmp_path: Path) -> None:
    directory = RecipeDirectory(tmp_path / "recipes")
    old, used = directory.write(b"old"), directory.write(b"used")
    for digest in (old, used):
        os.utime(directory.path / f"{digest}.recipe", (1, 1))
    assert directory.read(used) == b"used"
    new = directory.write(b"new")
    found = {file.name for file in directory.path.iterdir()}
    assert found == {f"{used}.recipe", f"{new}.recipe"}


@pytest.mark.parametrize("text", ["", "a", "a.", ".b", "a.b/c", "../x.y", "a.b.c"])
def test_a_name_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not name a recipe"):
        RecipeName.parse(text)


def test_the_content_of_another_release_is_refused() -> None:
    other = CONTENT.pack().replace(b"on Python", b"on Jython")
    with pytest.raises(ClusterError, match="Jython"):
        RecipeContent.unpack(other)
    with pytest.raises(ClusterError, match="cannot be read"):
        RecipeContent.unpack(b"\xc1")
    assert digest_of(other) != digest_of(CONTENT.pack())
