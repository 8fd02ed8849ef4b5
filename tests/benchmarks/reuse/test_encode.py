"""The benchmark ``encode``: its codecs, its costs, and the check for exactness."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.reuse import encode
from benchmarks.reuse.encode import NOT_KEPT, Codec, codecs, measure

pytest.importorskip("simplejpeg")
pytest.importorskip("pyarrow")


def photographs(place: Path, count: int) -> Path:
    import simplejpeg

    noise = np.random.default_rng(0).integers(0, 256, (count, 12, 16, 3), dtype=np.uint8)
    for number, small in enumerate(noise):
        folder = place / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        smooth = small.repeat(9, axis=0).repeat(9, axis=1)
        (folder / f"{number}.jpg").write_bytes(simplejpeg.encode_jpeg(smooth, 90))
    return place


def test_the_benchmark_runs_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, kept = photographs(tmp_path / "data", 4), tmp_path / "encode.json"
    arguments = ["--data", str(data), "--samples", "3", "--rounds", "1", "--json", str(kept)]
    assert main(["encode", *arguments]) == 0
    said = capsys.readouterr().out
    assert "3 photographs, decoded;" in said
    assert NOT_KEPT.split(":")[0] in said
    found = json.loads(kept.read_text())["data"]
    assert [work["images"] for work in found.values()] == [3, 3]
    for work in found.values():
        costs = work["ways"]
        assert list(costs) == [codec.title for codec in codecs()]
        sizes = [costs[title]["nbytes"] for title in ("raw", "lossless", "jpeg:90")]
        assert max(sizes) == sizes[0] > 100 * 100 * 3
        exact = {title for title, cost in costs.items() if cost["worst"] == 0}
        assert exact >= {"raw", "lossless"}
        assert "jpeg" not in exact


def test_a_codec_that_is_not_exact_but_claims_to_be_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dark = Codec("dark", lambda image: image, lambda kept, shape: kept // 2)
    monkeypatch.setattr(encode, "codecs", lambda: [encode.penstock_codec("raw"), dark])
    data = photographs(tmp_path, 2)
    assert main(["encode", "--data", str(data), "--rounds", "1"]) == 1
    assert "dark changed pixels, but claims to be exact" in capsys.readouterr().out


def test_costs_are_means_and_the_worst_error_of_all() -> None:
    images = [np.zeros((2, 5, 3), np.uint8), np.full((4, 5, 3), 100, np.uint8)]
    half = Codec("half", lambda image: image[:1], lambda kept, shape: np.resize(kept // 2, shape))
    cost = measure(images, [half], rounds=2)["half"]
    assert (cost.nbytes, cost.mean, cost.worst) == (15, 25, 50)
    assert min(cost.encode, cost.decode) >= 0
