"""The command line of the benchmarks: names, options and error messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, main, parse


def test_help_lists_every_benchmark_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    for name, benchmark in BENCHMARKS.items():
        assert f"{name} " in said
        assert benchmark.line in said


def test_an_unknown_benchmark_is_an_error_that_lists_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["overheads"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "'overheads'" in said
    assert all(name in said for name in BENCHMARKS)


@pytest.mark.parametrize("name", ["load", "randaugment", "cache"])
def test_benchmarks_of_photographs_have_no_default_folder(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([name])
    assert "--data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["overhead", "--rounds", "0"], "whole number of at least 1"),
        (["overhead", "--seconds", "soon"], "number above 0"),
        (["overhead", "--seconds", "-1"], "number above 0"),
        (["load", "--data", "/nowhere/at/all"], "is not a folder"),
        (["memory", "--epochs", "-2"], "whole number of at least 1"),
        (
            ["overhead", "--peers", "torch,grian"],
            "no peer 'grian' in this benchmark; there are: torch, grain",
        ),
        (["overhead", "--chart", "out.gif"], "one of .svg, .png"),
    ],
)
def test_invalid_arguments_are_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_options_reach_the_benchmark(tmp_path: Path) -> None:
    chosen, options = parse(
        ["load", "--data", str(tmp_path), "--rounds", "2", "--seconds", "1.5", "--samples", "9"]
    )
    assert chosen.name == "load"
    assert (options.data, options.rounds, options.seconds, options.samples) == (tmp_path, 2, 1.5, 9)
    _, options = parse(["memory", "--epochs", "7", "--items", "100"])
    assert (options.epochs, options.items) == (7, 100)


@pytest.mark.parametrize(
    ("given", "peers"),
    [
        ([], ("torch", "grain")),
        (["--peers", "all"], ("torch", "grain")),
        (["--peers", "grain, torch"], ("grain", "torch")),
        (["--peers", "grain"], ("grain",)),
        (["--peers", "none"], ()),
    ],
)
def test_peers_are_chosen_by_name(given: list[str], peers: tuple[str, ...]) -> None:
    _, options = parse(["overhead", *given])
    assert options.peers == peers
