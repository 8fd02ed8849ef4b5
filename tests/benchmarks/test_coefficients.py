"""The benchmark ``coefficients``: what it compares, and a short run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import coefficients
from benchmarks.__main__ import parse
from penstock import native
from tests.support.jpegs import encode, picture

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason="needs the kernel")


def test_it_compares_bytes_of_the_same_crops(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number, kind in enumerate(("420", "444", "progressive")):
        (tmp_path / "a" / f"{number}.jpg").write_bytes(encode(picture(260, 300), kind))
    _, options = parse(["coefficients", "--data", str(tmp_path), "--rounds", "1"])
    result = coefficients.run(options)
    assert result.wrong == ()
    assert result.data["photographs"] == 2
    sizes = result.data["bytes"]
    assert 0 < sizes["packed"] < sizes["pixels"]
    assert set(result.data["seconds"]) == {row[0] for row in result.tables[0].rows}


def test_a_folder_without_photographs_is_an_error(tmp_path: Path) -> None:
    _, options = parse(["coefficients", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match="has no JPEGs"):
        coefficients.run(options)
