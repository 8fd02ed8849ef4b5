"""Messages of ``penstock run``: every one reaches stderr once, however a script logs."""

from __future__ import annotations

import io
import logging
import logging.config
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock import inject
from penstock.cli import main
from penstock.errors import PipelineError
from penstock.inject import Process
from penstock.inject.messages import CommandLog, LoaderOutcome, LoaderReporter, loaders, summary

NAME = "penstock.run.test"


@pytest.fixture
def log() -> Iterator[CommandLog]:
    """A log with its own logger. The configuration of all other logging is restored."""
    disabled = logging.root.manager.disable
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    before = [
        (one, one.level, one.propagate, one.disabled, [(h, h.level) for h in one.handlers])
        for one in loggers
    ]
    yield CommandLog(NAME)
    logging.disable(disabled)
    for name in (NAME, "penstock"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate, logger.disabled = True, False
        logger.setLevel(logging.NOTSET)
    for logger, level, propagate, was_disabled, handlers in before:
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, was_disabled
        logger.handlers[:] = [handler for handler, _ in handlers]
        for handler, its_level in handlers:
            handler.setLevel(its_level)


def basic_config(stream: io.StringIO) -> None:
    logging.basicConfig(stream=stream, level=logging.DEBUG, force=True)


def dict_config(stream: io.StringIO) -> None:
    handler = {"class": "logging.StreamHandler", "stream": stream}
    root = {"handlers": ["all"], "level": "DEBUG"}
    logging.config.dictConfig({"version": 1, "handlers": {"all": handler}, "root": root})


def dict_config_of_the_parent(stream: io.StringIO) -> None:
    handler = {"class": "logging.StreamHandler", "stream": stream}
    parent = {"penstock": {"handlers": ["all"], "level": "ERROR"}}
    logging.config.dictConfig({"version": 1, "handlers": {"all": handler}, "loggers": parent})


def silence_all(stream: io.StringIO) -> None:
    basic_config(stream)
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL)
        logger.propagate = True
        for handler in logger.handlers:
            handler.setLevel(logging.CRITICAL)


def remove_handlers(stream: io.StringIO) -> None:
    basic_config(stream)
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def disable(stream: io.StringIO) -> None:
    basic_config(stream)
    logging.disable(logging.CRITICAL)


CONFIGURATIONS = [
    basic_config,
    dict_config,
    dict_config_of_the_parent,
    silence_all,
    remove_handlers,
    disable,
]


@pytest.mark.parametrize("configure", CONFIGURATIONS)
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_message_is_printed_once_however_the_script_configures_logging(
    configure: Callable[[io.StringIO], None],
    level: int,
    log: CommandLog,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    log.write(level, "before")
    configure(stream)
    log.write(level, "after, 100%")
    assert capfd.readouterr().err == "penstock: before\npenstock: after, 100%\n"
    assert "before" not in stream.getvalue()
    assert "after" not in stream.getvalue()


def test_the_logging_of_the_script_is_left_alone(log: CommandLog) -> None:
    stream = io.StringIO()
    basic_config(stream)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    log.write(logging.INFO, "message")
    assert (root.handlers, root.level) == (handlers, level)
    logging.getLogger("script").warning("its own")
    assert stream.getvalue().endswith("its own\n")


def test_a_handler_of_the_script_on_our_logger_gets_the_messages(
    log: CommandLog, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    logging.getLogger(NAME).addHandler(logging.StreamHandler(stream))
    log.write(logging.INFO, "message")
    assert stream.getvalue() == "message\n"
    assert capfd.readouterr().err == "penstock: message\n"


def test_messages_follow_a_replaced_stderr(
    log: CommandLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.write(logging.INFO, "first")
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stderr", replaced)
    log.write(logging.INFO, "second")
    assert replaced.getvalue() == "penstock: second\n"


# Outcomes.


class Dist:
    """``torch.distributed`` in a script without ranks."""

    def is_available(self) -> bool:
        return False


class FakeLoader:
    """The attributes of a torch loader that a message needs."""

    _auto_collation = False
    sampler = range(3)
    dataset = (1, 2, 3)


def test_the_last_outcome_of_a_loader_counts(tmp_path: Any) -> None:
    reporter = LoaderReporter(Dist(), 0, str(tmp_path))
    loader, other = FakeLoader(), FakeLoader()
    for failed, why in ((loader, "first"), (other, "other"), (loader, "last")):
        reporter.not_upgraded(failed, PipelineError(why))
    assert [(outcome.number, outcome.why) for outcome in loaders(tmp_path)] == [
        (1, "last"),
        (2, "other"),
    ]


def test_the_summary_says_how_many_loaders_were_upgraded() -> None:
    whole = LoaderOutcome(1, 1, "DataLoader 1", ("2 threads",))
    partial = LoaderOutcome(1, 2, "DataLoader 2", ("2 threads",), ("--cache: why",))
    unchanged = LoaderOutcome(1, 3, "DataLoader 3", why="why")
    assert summary([whole]) == "1 of 1 DataLoaders upgraded."
    assert summary([whole, unchanged]) == "1 of 2 DataLoaders upgraded; the reasons are above."
    assert summary([whole, partial, unchanged]) == (
        "2 of 3 DataLoaders upgraded, 1 of them without some of the given options; the reasons "
        "are above."
    )
    assert "iterated no torch DataLoader" in summary([])


def test_a_machine_without_rank_0_leaves_the_summary_to_that_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher, rank = Process(1, ("torchrun",), 0), Process(2, ("train.py",), 1)
    monkeypatch.setattr(inject, "launch", lambda command, variables: 0)
    for reached, said in (([launcher, rank], "rank 0 says"), ([launcher], "iterated no torch")):
        monkeypatch.setattr(inject, "processes", lambda place, found=reached: found)
        assert main(["run", "--", "torchrun", "train.py"]) == 0
        assert said in capsys.readouterr().err
