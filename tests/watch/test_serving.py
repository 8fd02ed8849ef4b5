"""The server of ``penstock watch``: read-only pages, for this machine only."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Iterator

import numpy as np
import pytest

import penstock as ps
from penstock import cli
from penstock.errors import PipelineError
from penstock.watch import site
from penstock.watch.live_directory import LiveDirectory
from penstock.watch.serving import PageServer
from penstock.watch.site import serve
from penstock.watch.view import View


def ask(
    server: PageServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


@pytest.fixture
def server(live: LiveDirectory) -> Iterator[PageServer]:
    view = View()
    view.look()
    page_server = serve(view, 0)
    yield page_server
    page_server.close()


def test_the_page_loads_nothing_from_other_sites(server: PageServer) -> None:
    for path in ("/", "/page.js", "/chart.js", "/style.css"):
        answer, body = ask(server, path)
        assert answer.status == 200
        assert b"https://" not in body
        # The SVG namespace is a URL that is never fetched.
        assert set(re.findall(rb"http://[^\"]+", body)) <= {b"http://www.w3.org/2000/svg"}
        assert "default-src 'none'" in (answer.headers["Content-Security-Policy"] or "")
    _, page = ask(server, "/")
    for named in re.findall(rb'(?:src|href)="([^"]+)"', page):
        if not named.startswith(b"data:"):
            assert ask(server, "/" + named.decode())[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_pages_are_read_only(server: PageServer, method: str) -> None:
    answer, _ = ask(server, "/", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_head_has_the_length_and_nothing_else(server: PageServer) -> None:
    whole, body = ask(server, "/")
    head, nothing = ask(server, "/", "HEAD")
    assert (head.status, nothing) == (200, b"")
    assert head.headers["Content-Length"] == whole.headers["Content-Length"] == str(len(body))


@pytest.mark.parametrize("path", ["/snapshot.json", "/metrics", "/"])
def test_foreign_host_names_are_refused(server: PageServer, path: str) -> None:
    port = server.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::1]:1"):
        assert ask(server, path, host=host)[0].status == 403
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", "LOCALHOST:99"):
        assert ask(server, path, host=host)[0].status == 200


def test_an_unknown_path_gets_the_list_of_pages(server: PageServer) -> None:
    answer, body = ask(server, "/../../etc/passwd")
    assert answer.status == 404
    assert b"/snapshot.json" in body


def test_the_server_listens_on_this_machine_only(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_view_is_served_as_json(live: LiveDirectory) -> None:
    view = View()
    server = serve(view, 0)
    try:
        with ps.from_dataset(np.arange(40.0)).batch(4).loader(workers=0, seed=0) as loader:
            next(iter(loader))
            view.look()
            data = json.loads(ask(server, "/snapshot.json?now")[1])
            metrics = ask(server, "/metrics")[1].decode()
        view.look()
        assert json.loads(ask(server, "/snapshot.json")[1])["loaders"] == []
    finally:
        server.close()
    (found,) = data["loaders"]
    assert (found["pid"], found["standing"]["batches"]) == (os.getpid(), 10)
    assert found["rates"]["stall"] <= 1
    assert data["node"] is None
    assert f'penstock_batches_total{{pid="{os.getpid()}",' in metrics


def test_a_taken_port_is_skipped_unless_it_was_asked_for(
    live: LiveDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PipelineError, match=f"127.0.0.1:{port}: .*Give another --port"):
            serve(View(), port)
        monkeypatch.setattr(site, "PORT", port)
        server = serve(View())
        assert port < server.port < port + site.PORTS_TRIED
        server.close()
        monkeypatch.setattr(site, "PORTS_TRIED", 1)
        with pytest.raises(PipelineError, match="cannot bind the web server to"):
            serve(View())


def test_watch_ends_with_ctrl_c_and_prints_no_error(live: LiveDirectory) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", "watch", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as watching:
        assert watching.stdout is not None
        line = re.match(r"Watching at http://127.0.0.1:(\d+)/ ", watching.stdout.readline())
        assert line is not None
        with socket.create_connection(("127.0.0.1", int(line[1])), timeout=60):
            watching.send_signal(signal.SIGINT)
            _, complaints = watching.communicate(timeout=60)
    assert (watching.returncode, complaints) == (0, "")


def test_open_opens_the_page_in_a_browser(
    live: LiveDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr("penstock.commands.watch.time.sleep", stop)
    assert cli.main(["watch", "--port", "0", "--open"]) == 0
    assert len(opened) == 1
    assert opened[0].startswith("http://127.0.0.1:")


def test_an_invalid_port_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["watch", "--port", "65536"])
    assert "not a port" in capsys.readouterr().err
