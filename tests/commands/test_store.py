"""``penstock store``: lists, verifies and clears stores, and keeps those in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import cli, config
from penstock.commands.store import age, listed, verified
from penstock.store import LmdbStore, RunDir, memory_store
from penstock.store.catalogue import Leftover, Proof, StoreInfo, on_disk
from penstock.store.ledger import Ledger, Provenance

MB = 1_000_000

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of disk stores, with two in it, and an empty memory file system."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_SHM_DIR", str(tmp_path / "shm"))
    monkeypatch.setattr(config, "SMALL_SHM", 0)
    (tmp_path / "shm").mkdir()
    place = tmp_path / "stores"
    fill(place / "aaaa1111")
    fill(place / "bbbb2222")
    yield place
    RunDir.current().close()


def fill(place: Path) -> None:
    store = LmdbStore(place, budget=100 * MB, identity=place.name, persistent=True)
    assert all(store.put_many([(key, bytes([key]) * 20_000) for key in range(20)]))
    store.close()


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*words: object) -> tuple[int, str, str]:
        code = cli.main(["store", *map(str, words)])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return ask


HOLD = """
import sys
from pathlib import Path
from penstock.store import LmdbStore
place = Path(sys.argv[1])
store = LmdbStore(place, budget=10**8, identity=place.name, persistent=True)
store.open()
print("ready", flush=True)
sys.stdin.read()
store.close()
"""


@pytest.fixture
def user(stores: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the first store open."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(stores / "aaaa1111")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate()


def test_the_list_has_every_store(stores: Path, ask: Ask) -> None:
    code, shown, _ = ask("list")
    assert code == 0
    assert f"on disk, {stores}" in shown
    assert [line.split()[:3] for line in shown.splitlines()[2:4]] == [
        ["aaaa1111", "cache", "20"],
        ["bbbb2222", "cache", "20"],
    ]
    assert shown.splitlines()[-1].startswith("2 stores, ")


def test_the_list_can_be_printed_as_json(
    stores: Path, ask: Ask, user: subprocess.Popen[str]
) -> None:
    code, shown, _ = ask("list", "--json")
    found = json.loads(shown)
    assert code == 0
    assert [store["identity"] for store in found["stores"]] == ["aaaa1111", "bbbb2222"]
    assert [store["users"] for store in found["stores"]] == [[user.pid], []]
    assert list(found["stores"][0]) == [
        "place",
        "where",
        "identity",
        "kind",
        "samples",
        "nbytes",
        "last_use",
        "in_use",
        "users",
        "void",
        "record",
    ]
    assert found["leftovers"] == []


def test_with_a_place_no_other_stores_are_touched(stores: Path, ask: Ask, tmp_path: Path) -> None:
    fill(tmp_path / "kept" / "cccc3333")
    _, shown, _ = ask("list", "--place", tmp_path / "kept")
    assert "cccc3333" in shown
    assert "aaaa1111" not in shown
    assert ask("clear", "--all", "--place", tmp_path / "kept")[0] == 0
    assert names(tmp_path / "kept") == []
    assert names(stores) == ["aaaa1111", "bbbb2222"]


def test_a_missing_place_is_named(stores: Path, ask: Ask) -> None:
    code, _, complaint = ask("list", "--place", "/nowhere/at/all")
    assert code == 1
    assert "--place /nowhere/at/all is not a directory" in complaint


def test_intact_stores_verify(stores: Path, ask: Ask) -> None:
    code, shown, _ = ask("verify")
    assert code == 0
    assert [line.rpartition(": ")[2] for line in shown.splitlines()] == [
        "20 values, all intact"
    ] * 2


def test_a_damaged_value_makes_verify_fail(stores: Path, ask: Ask) -> None:
    data = stores / "bbbb2222" / "data.mdb"
    content = bytearray(data.read_bytes())
    content[content.index(bytes([7]) * 20_000) + 10_000] = 8
    data.write_bytes(content)
    code, shown, _ = ask("verify")
    assert code == 1
    assert "all intact" in shown.splitlines()[0]
    assert "1 of 20 values damaged" in shown.splitlines()[1]
    assert ask("verify", "aaaa")[0] == 0


def test_a_store_is_cleared_by_the_first_characters_of_its_fingerprint(
    stores: Path, ask: Ask
) -> None:
    code, shown, _ = ask("clear", "aaaa1")
    assert code == 0
    assert names(stores) == ["bbbb2222"]
    removed, freed = shown.splitlines()
    assert removed.startswith("removed  aaaa1111")
    size = removed.split("  ")[2]
    assert freed == f"freed {size}"


def test_all_stores_are_cleared_except_those_in_use(
    stores: Path, ask: Ask, user: subprocess.Popen[str]
) -> None:
    code, shown, _ = ask("clear", "--all")
    assert code == 0
    assert f"kept     aaaa1111  in use by process {user.pid}" in shown
    assert names(stores) == ["aaaa1111"]
    assert ask("verify")[1].count("all intact") == 1


def test_clearing_a_store_in_use_by_name_fails(
    stores: Path, ask: Ask, user: subprocess.Popen[str]
) -> None:
    code, shown, _ = ask("clear", "aaaa")
    assert code == 1
    assert f"in use by process {user.pid}" in shown
    assert "freed 0 B" in shown
    assert names(stores) == ["aaaa1111", "bbbb2222"]


def test_with_an_age_recently_used_stores_are_kept(stores: Path, ask: Ask) -> None:
    for name in ("state.json", "data.mdb"):
        os.utime(stores / "aaaa1111" / name, (1000, 1000))
    assert ask("clear", "--all", "--older-than", "7d")[0] == 0
    assert names(stores) == ["bbbb2222"]


@pytest.mark.parametrize("words", [[], ["aaaa", "--all"]])
def test_clearing_needs_either_a_fingerprint_or_all(
    stores: Path, ask: Ask, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ask("clear", *words)
    assert ended.value.code == 2
    assert "name the fingerprints to remove, or give --all" in capsys.readouterr().err
    assert names(stores) == ["aaaa1111", "bbbb2222"]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "the fingerprint '' is too short"),
        ("zzzz", "no store has the fingerprint 'zzzz'"),
        ("aaaa", "several fingerprints begin with 'aaaa': aaaa1111, aaaa9999"),
    ],
)
def test_a_fingerprint_that_matches_no_single_store_removes_nothing(
    stores: Path, ask: Ask, name: str, complaint: str
) -> None:
    fill(stores / "aaaa9999")
    code, shown, errors = ask("clear", "bbbb", name)
    assert (code, shown) == (1, "")
    assert complaint in errors
    assert names(stores) == ["aaaa1111", "aaaa9999", "bbbb2222"]


LEAVE = """
import os, signal
from penstock import config
config.SMALL_SHM = 0
from penstock.store import memory_store
memory_store(10**8, shared=True).put_many([(0, bytes(100_000))])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_dead_processes_are_cleared_and_live_stores_kept(
    stores: Path, ask: Ask, tmp_path: Path
) -> None:
    mine = RunDir.current().path
    # No process has it open at the moment, but its process may open it again.
    store = memory_store(MB, shared=True)
    store.put_many([(0, b"mine")])
    store.close()
    subprocess.run([sys.executable, "-c", LEAVE], check=False)
    assert len(names(mine.parent)) == 2
    assert "left in memory by dead processes" in ask("list")[1]
    assert ask("clear", "aaaa")[0] == 0
    assert len(names(mine.parent)) == 2
    code, shown, _ = ask("clear", "--all")
    assert code == 0
    assert shown.count("removed  left in memory") == 1
    assert names(mine.parent) == [mine.name]
    assert store.get_many([0]) == [b"mine"]


@pytest.mark.parametrize("text", ["", "7", "d", "7 days", "-1h", "1m"])
def test_a_text_that_is_not_an_age_is_a_usage_error(
    stores: Path, ask: Ask, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ask("clear", "--all", f"--older-than={text}")
    assert ended.value.code == 2
    assert "is not an age; write 90min, 12h, 7d or 2w" in capsys.readouterr().err
    assert names(stores) == ["aaaa1111", "bbbb2222"]


def test_ages_have_a_number_and_a_unit() -> None:
    assert [age(text) for text in ("30s", "90min", "1.5h", "7d", "2W")] == [
        30.0,
        5_400.0,
        5_400.0,
        604_800.0,
        1_209_600.0,
    ]


INFO = StoreInfo(
    place=Path("/home/me/.cache/penstock/stores/3f2a9c01be7755aa"),
    where="disk",
    identity="3f2a9c01be7755aa",
    kind="cache",
    samples=48_000,
    nbytes=5_100 * MB,
    last_use=1_000.0,
    in_use=False,
)


def test_the_list_shows_place_kind_size_and_last_use() -> None:
    memory = Path("/dev/shm/penstock-1000")
    used = StoreInfo(
        memory / "run-7-abc" / "0f", "memory", "0f", "", None, 2 * MB, 9e3, True, (7, 8, 9, 10)
    )
    left = Leftover(memory / "run-5-def", 200 * MB)
    assert listed([INFO, used], [left], now=1_000.0 + 2 * 86_400) == [
        "on disk, /home/me/.cache/penstock/stores",
        "  fingerprint   kind   samples    size  last use",
        "  3f2a9c01be77  cache   48,000  5.1 GB  2 days ago",
        "",
        "in memory, /dev/shm/penstock-1000",
        "  fingerprint  kind  samples    size  last use",
        "  0f           ?           ?  2.0 MB  now       in use by process 7, 8, 9, ...",
        "",
        "left in memory by dead processes: penstock store clear --all removes it",
        "  /dev/shm/penstock-1000/run-5-def  200.0 MB",
        "",
        "2 stores, 1 left behind, 5.3 GB",
    ]


def test_an_empty_list_says_so() -> None:
    assert listed([], [], 0.0) == ["No stores found."]


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (Proof(48_000, 0), "48,000 values, all intact"),
        (Proof(48_000, 3), "3 of 48,000 values damaged; they are prepared again"),
        (Proof(5, 0, "its index is damaged (x)"), "its index is damaged (x); the store is emptied"),
    ],
)
def test_the_result_of_verifying_is_one_line(proof: Proof, words: str) -> None:
    assert words in verified(INFO, proof)


# What is known of a thing, and policies.


@pytest.fixture
def recorded(stores: Path) -> Provenance:
    """The first store with a record, and packed shards from which it was made."""
    packed = stores.parent / "packed"
    packed.mkdir()
    ledger = Ledger(clock=lambda: 1000.0)
    ledger.note(Provenance("packed", "eeee5555", str(packed), origin="/photos"), 7.0)
    made = Provenance(
        "cache",
        "aaaa1111",
        str(stores / "aaaa1111"),
        origin=str(packed),
        data="0123456789abcdef",
        made_by=("TarSource", ".map(resize(size=64))", ".cache(1.0 GB, where='disk')"),
    )
    use = ledger.begin(made)
    assert use is not None
    ledger.end(made.key, use, hits=300, saved=90.0, cost=0.3)
    return made


def test_show_draws_the_ancestry_and_lists_the_uses(recorded: Provenance, ask: Ask) -> None:
    code, shown, _ = ask("show", "aaaa")
    assert code == 0
    size = config.show_size(next(one.nbytes for one in on_disk() if one.identity == "aaaa1111"))
    lines = shown.splitlines()
    assert lines[0] == "cache aaaa1111"
    assert f"  data      {recorded.origin} (identity 0123456789ab)" in lines
    assert "  saved     1 min 30 s of workers in 300 hits, 300.00 ms each" in lines
    start = lines.index("ancestry")
    assert lines[start + 1 : start + 7] == [
        "  /photos",
        "  └─ packed eeee5555, 0 B",
        f"     └─ cache aaaa1111, {size}  <- this",
        "          TarSource",
        "          .map(resize(size=64))",
        "          .cache(1.0 GB, where='disk')",
    ]
    assert lines[-1].split()[2] == str(os.getpid())
    assert "made by  not known" in ask("show", "bbbb")[1]


def test_du_adds_up_by_kind_and_by_data(recorded: Provenance, ask: Ask) -> None:
    _, shown, _ = ask("du")
    rows = [line.split() for line in shown.splitlines()]
    size = config.show_size(sum(one.nbytes for one in on_disk()))
    assert ["cache", "2", *size.split(), "0", "B", "0", "B", "1", "min", "30", "s"] in rows
    assert ["/photos", "1", "0", "B", "0", "B", "0", "B", "0.00", "s"] in rows
    assert f"{size} in all" in shown


def test_a_pinned_store_is_not_cleared_unless_it_is_named(
    recorded: Provenance, stores: Path, ask: Ask
) -> None:
    assert ask("pin", "aaaa1111")[1].startswith("pinned  aaaa1111")
    assert "pinned" in ask("list")[1]
    assert ask("clear", "--all")[0] == 0
    assert names(stores) == ["aaaa1111"]
    assert (stores.parent / "packed").is_dir()
    ask("pin", "--off", "aaaa1111")
    ask("clear", "--all")
    assert names(stores) == []
    assert [one.made.identity for one in Ledger().records().values()] == ["eeee5555"]


def test_what_has_no_record_cannot_be_pinned(stores: Path, ask: Ask) -> None:
    code, _, error = ask("pin", "bbbb2222")
    assert code == 1
    assert "bbbb2222 is not in the ledger" in error


def test_packed_shards_are_not_cleared(recorded: Provenance, ask: Ask) -> None:
    code, shown, _ = ask("clear", "eeee5555")
    assert code == 1
    assert "packed shards; remove" in shown


def test_a_policy_is_set_shown_and_carried_out(
    recorded: Provenance, stores: Path, ask: Ask, user: subprocess.Popen[str]
) -> None:
    _, shown, _ = ask("policy", "--budget", "0", "--unused", "none")
    assert [line.split()[:2] for line in shown.splitlines()] == [
        ["budget", "0"],
        ["unused", "none"],
        ["age", "none"],
        ["obsolete", "7"],
    ]
    assert ask("policy")[1] == shown
    _, shown, _ = ask("collect", "--dry-run")
    assert "would remove  bbbb2222" in shown
    assert names(stores) == ["aaaa1111", "bbbb2222"]
    _, shown, _ = ask("collect")
    assert "removed  bbbb2222" in shown
    assert names(stores) == ["aaaa1111"]  # ``user`` has it open
    assert ask("collect")[1] == "freed 0 B\n"
