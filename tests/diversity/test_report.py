"""The diversity report of a pipeline: counts, rows, warnings, the table and the drawing."""

from __future__ import annotations

import re
import warnings
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock import Pipeline
from penstock.diversity import Diversity
from penstock.diversity.outcomes import count_outcomes
from penstock.diversity.theorem import share, unique
from penstock.errors import PipelineError
from penstock.operation import ArraySpec
from penstock.source import Source
from penstock.stops.refurbish import Refurbish

image, audio = ps.image, ps.audio


class Squares(Source):
    """A source that states that its images are 32 x 32."""

    def __len__(self) -> int:
        return 10

    def read(self, indices: Any) -> list[Any]:
        return [(np.zeros((32, 32, 3), np.uint8), 0) for _ in indices]

    def fields(self) -> Any:
        return {0: ArraySpec.of((32, 32, 3), np.uint8), 1: ArraySpec.of((), np.int64)}


def files() -> Pipeline:
    return ps.from_files(["a.jpg", "b.jpg"], [0, 1]).map(image.decode())


def refurbished(pipeline: Pipeline, place: int, reuse: Any = 3) -> Pipeline:
    stops = pipeline.stops
    return replace(pipeline, stops=(*stops[:place], Refurbish(reuse), *stops[place:]))


def photographs() -> Pipeline:
    return (
        files()
        .map(image.rand_augment(2, 9))
        .map(image.resize(256))
        .map(image.random_resized_crop(224))
        .map(image.random_flip())
        .map(image.normalize())
    )


def outcomes(pipeline: Pipeline, shape: Any = None) -> dict[str, float | None]:
    return {
        part.name: part.outcomes for part in count_outcomes(pipeline, shape).parts if part.random
    }


def test_every_split_below_a_random_map_has_a_row_for_every_reuse() -> None:
    d = photographs().diversity(60)
    assert [(row.below, row.reuse) for row in d.rows] == [
        (name, reuse)
        for name in ("rand_augment", "random_resized_crop", "random_flip")
        for reuse in (1, 2, 3, 4, 5)
    ]
    assert [part.name for part in d.parts] == [
        "source",
        "decode",
        "rand_augment",
        "resize",
        "random_resized_crop",
        "random_flip",
        "normalize",
    ]
    assert d.splits == (3, 5, 6)
    assert (d.split, d.reuse, d.epochs) == (None, None, 60)
    assert not any(row.here for row in d.rows)


def test_rows_apply_the_theorem_to_the_maps_above_and_below() -> None:
    d = photographs().diversity(60)
    crop = 49.0
    for row in d.of(3):
        assert row.unique == pytest.approx(unique(529, crop * 2, row.reuse, 60))
        assert row.share == pytest.approx(share(529, crop * 2, row.reuse, 60))
        assert row.strength == pytest.approx(np.log(crop * 2) / np.log(529 * crop * 2))
        assert not row.weak
    for row in d.of(5):
        assert row.share == pytest.approx(share(529 * crop, 2, row.reuse, 60))
        assert row.weak
    assert [row.strength for row in d.of(6)] == [0.0] * 5
    assert d.standard == pytest.approx(d.of(3)[0].unique)


@pytest.mark.parametrize("place", [2, 3])
def test_the_pipelines_own_split_and_reuse_are_marked(place: int) -> None:
    d = refurbished(photographs(), place, 4).diversity()
    assert (d.split, d.reuse) == (3, 4)
    assert [(row.split, row.reuse) for row in d.rows if row.here] == [(3, 4)]
    assert re.findall(r"%\*", str(d)) == ["%*"]
    assert "* this pipeline" in str(d)


def test_a_reuse_beyond_five_gets_rows_of_its_own() -> None:
    d = refurbished(photographs(), 2, 8).diversity()
    assert [row.reuse for row in d.of(3)] == [1, 2, 3, 4, 5, 8]
    assert [row.here for row in d.of(3)] == [False] * 5 + [True]


def test_a_reuse_that_is_not_fixed_yet_marks_nothing() -> None:
    d = refurbished(photographs(), 2, "auto").diversity()
    assert (d.split, d.reuse) == (3, None)
    assert not any(row.here for row in d.rows)
    assert "not fixed" in str(d)


def test_refurbish_above_everything_random_costs_nothing() -> None:
    d = refurbished(photographs(), 1).diversity()
    assert d.split == 0
    assert [row.share for row in d.of(0)] == [pytest.approx(1.0)] * 5
    assert "the source" in str(d)


def test_the_warning_of_a_weak_final_part_names_the_maps_to_move() -> None:
    with pytest.warns(UserWarning, match=r"Move random_resized_crop below refurbish\(\)") as caught:
        refurbished(photographs(), 4).diversity()
    assert "only 0.06" in str(caught[0].message)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="Move random_resized_crop and random_flip below"):
        refurbished(photographs(), 5).diversity()


def test_crop_and_flip_are_too_weak_for_three_layers_of_rand_augment() -> None:
    """The limit can be reached: it would not be if each box of a photograph counted."""
    road = files().map(image.rand_augment(3)).refurbish(2)
    with pytest.warns(UserWarning, match="Move rand_augment below") as caught:
        road.map(image.random_resized_crop(224)).map(image.random_flip()).diversity()
    assert "only 0.33 of the variety" in str(caught[0].message)


def test_a_strong_final_part_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refurbished(photographs(), 2).diversity()
        photographs().diversity()


def test_shapes_stated_by_the_source_are_used() -> None:
    squares = Pipeline(Squares()).map(image.random_crop(32, padding=4)).map(image.random_flip())
    d = squares.diversity()
    assert outcomes(squares) == {"random_crop": 49.0, "random_flip": 2.0}
    assert d.taken == ""
    # A shape that the source states takes precedence over the one given.
    assert outcomes(squares, (100, 100, 3))["random_crop"] == 49.0


def test_unstated_shapes_are_assumed_to_be_typical_and_the_report_says_so() -> None:
    crop = image.random_crop(372)
    assert outcomes(files().map(crop)) == {"random_crop": 4.0 * 7.0}
    assert outcomes(files().map(crop), (374, 373, 3)) == {"random_crop": 6.0}
    text = str(files().map(crop).diversity())
    assert "assumed shape of a sample: (375, 500, 3), a typical photograph;" in text
    assert "assumed shape" not in str(files().map(crop).diversity(shape=(374, 373, 3)))
    arrays = ps.from_dataset([np.zeros((64, 64, 3), np.uint8)])
    assert outcomes(arrays.map(crop)) == {"random_crop": 4.0 * 7.0}


def test_shapes_are_followed_from_map_to_map() -> None:
    one = files().map(image.resize((100, 120))).map(image.random_crop(100))
    assert outcomes(one) == {"random_crop": 7.0}
    grey = ps.from_files(["a.png"]).map(image.decode("gray")).map(image.color_jitter(0.4, 0.4, 0.4))
    assert outcomes(grey) == {"color_jitter": 7.0**2}
    two = Pipeline(Squares()).map(np.ascontiguousarray, on=0, random=False)
    assert outcomes(two.map(image.random_crop(16))) == {"random_crop": 49.0}


def test_sound_and_spectrograms_have_typical_shapes_too() -> None:
    sounds = (
        ps.from_files(["a.wav"]).map(audio.decode()).map(audio.random_crop(seconds=4, rate=16_000))
    )
    assert outcomes(sounds) == {"random_crop": 7.0}
    bands = sounds.map(audio.mel_spectrogram(16_000, hop=160)).map(audio.spec_augment())
    expected = audio.spec_augment().visible_outcomes((1, 80, 401))
    assert outcomes(bands)["spec_augment"] == expected
    own = ps.from_dataset([np.zeros((1, 80, 30), np.float32)]).map(audio.spec_augment())
    assert outcomes(own) == {"spec_augment": audio.spec_augment().visible_outcomes((1, 80, 1000))}
    assert "a spectrogram of ten seconds" in str(own.diversity())
    # A callable of the user turned a waveform into a spectrogram.
    made = sounds.map(np.abs, random=False).map(audio.spec_augment())
    assert outcomes(made)["spec_augment"] == audio.spec_augment().visible_outcomes((1, 80, 1000))


def test_a_typical_shape_that_does_not_fit_leaves_the_outcomes_unknown() -> None:
    large = files().map(image.random_crop(600))
    assert outcomes(large) == {"random_crop": None}
    assert "? random_crop: outcomes unknown" in str(large.diversity())
    with pytest.raises(PipelineError, match=r"shape=\(300, 300, 3\)\) does not fit: .*too small"):
        large.diversity(shape=(300, 300, 3))
    assert outcomes(large, (700, 700, 3)) == {"random_crop": 49.0}


def shaken(x: Any, rng: Any) -> Any:
    return x


class Stating:
    """A user's random callable that states its number of outcomes."""

    def __init__(self, outcomes: Any) -> None:
        self.outcomes = outcomes
        self.__name__ = "stating"

    def __call__(self, x: Any, rng: Any) -> Any:
        return x


def test_a_users_random_callable_has_unknown_outcomes_that_count_as_one() -> None:
    p = files().map(image.random_flip()).map(shaken).map(image.rand_augment(1))
    d = p.diversity(30)
    assert outcomes(p) == {"random_flip": 2.0, "shaken": None, "rand_augment": 23.0}
    assert d.unknown == ("shaken",)
    assert [row.share for row in d.of(3)] == [share(2, 23, r, 30) for r in (1, 2, 3, 4, 5)]
    text = str(d)
    assert re.search(r"^shaken +\?$", text, re.MULTILINE)
    assert "? x 23" in text
    assert "? shaken: outcomes unknown, counted as one" in text


def test_a_users_random_callable_may_state_its_outcomes() -> None:
    assert outcomes(files().map(Stating(12))) == {"stating": 12.0}
    by_shape = files().map(Stating(lambda shape: shape[0] * 2))
    assert outcomes(by_shape) == {"stating": 750.0}
    assert outcomes(by_shape, (40, 40, 3)) == {"stating": 80.0}
    resized = files().map(image.resize((10, 20))).map(Stating(lambda shape: shape[1]))
    assert outcomes(resized) == {"stating": 20.0}
    squares = Pipeline(Squares()).map(Stating(lambda shape: shape[0]), on=0)
    assert outcomes(squares) == {"stating": 32.0}
    anything = ps.from_dataset([1, 2]).map(Stating(lambda shape: 5 if shape is None else 6))
    assert outcomes(anything) == {"stating": 5.0}


@pytest.mark.parametrize("wrong", [0, -3, float("nan"), float("inf"), "many", lambda shape: None])
def test_invalid_outcomes_are_an_error(wrong: Any) -> None:
    with pytest.raises(PipelineError, match=r"stating\.outcomes is .*a number of 1 or more"):
        files().map(Stating(wrong)).diversity()


def test_unknown_outcomes_below_the_split_give_no_warning() -> None:
    p = files().map(image.rand_augment(4)).map(shaken).map(image.random_flip())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        d = refurbished(p, 2).diversity()
    assert not d.of(3)[0].weak
    with pytest.warns(UserWarning, match="Move rand_augment below"):
        refurbished(
            files().map(shaken).map(image.rand_augment(4)).map(image.random_flip()), 3
        ).diversity()


def test_a_dataset_that_augments_by_itself_is_a_random_part() -> None:
    class Augmenting:
        outcomes = 7

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return np.zeros((8, 8, 3), np.uint8)

    p = ps.from_dataset(Augmenting()).map(image.random_flip())
    assert outcomes(p) == {"source": 7.0, "random_flip": 2.0}
    assert p.diversity().of(1)[1].share == share(7, 2, 2, 90)
    plain = ps.from_dataset(Augmenting(), random=False).map(image.random_flip())
    assert outcomes(plain) == {"random_flip": 2.0}
    stream = ps.from_dataset(lambda: iter([np.zeros((8, 8, 3), np.uint8)])).map(image.random_flip())
    assert outcomes(stream) == {"random_flip": 2.0}


def test_a_pipeline_without_randomness_says_so() -> None:
    d = files().map(image.resize(32)).diversity()
    assert d.rows == ()
    assert d.standard == 1.0
    assert str(d) == "Nothing in this pipeline is random: every epoch sees the same samples."
    assert "Nothing on this road is random" in drawing(d)


@pytest.mark.parametrize("epochs", [0, -1, 1.5, True, "90"])
def test_epochs_must_be_a_whole_number(epochs: Any) -> None:
    with pytest.raises(PipelineError, match="epochs is"):
        photographs().diversity(epochs)


@pytest.mark.parametrize("shape", [(), (0, 5, 3), 7, ("a",)])
def test_an_invalid_shape_is_an_error(shape: Any) -> None:
    with pytest.raises(PipelineError, match="shape is"):
        photographs().diversity(shape=shape)


def test_the_text_is_a_table_and_a_plot() -> None:
    squares = Pipeline(Squares()).map(image.random_crop(32, padding=4)).map(image.random_flip())
    with pytest.warns(UserWarning, match="random_crop"):
        d = refurbished(squares, 1, 2).diversity(20)
    assert str(d).splitlines()[:19] == [
        "Standard training sees 18.2 versions of a sample in 20 epochs",
        "",
        "random       outcomes",
        "random_crop        49",
        "random_flip         2",
        "",
        "   split below  |A_P|  |A_F|  strength       x1      x2      x3      x4      x5",
        "a  random_crop     49      2      0.15!  100.0%   77.0%*  61.0%   49.6%   41.3%",
        "b  random_flip     98      1      0.00!  100.0%   52.5%   35.6%   26.9%   21.6%",
        "",
        " 100% | ab",
        "  90% |",
        "  80% |     a",
        "  70% |",
        "  60% |         a",
        "  50% |      b      a",
        "  40% |          b      a",
        "  30% |              b",
        "  20% |                  b",
    ]


def test_a_share_below_1_is_never_shown_as_100_percent() -> None:
    d = Diversity(2, (), ())
    p = Pipeline(Squares()).map(image.rand_augment(2)).map(Stating(1e4))
    text = str(p.diversity(90))
    shares = [row.share for row in p.diversity(90).of(2)]
    assert 0.999 < shares[1] < 1.0
    assert "99.9%" in text
    assert d.splits == ()


def drawing(d: Diversity) -> str:
    text = d._repr_svg_()
    ET.fromstring(text)
    return text


def test_the_drawing_is_one_file_without_references(tmp_path: Path) -> None:
    d = refurbished(photographs().map(shaken, name="<own & only>"), 2).diversity()
    d.svg(tmp_path / "d.svg")
    text = (tmp_path / "d.svg").read_text()
    assert text == drawing(d)
    assert re.findall(r"(?:href|src|url\(|@import)", text) == []
    assert text.count("<text") > 10
    assert "prefers-color-scheme: dark" in text
    # One line for each split, a dot for each row, a ring for the row of the pipeline itself.
    assert text.count('class="line ') == 4
    assert text.count('class="fill ') == 20
    assert text.count('class="ring"') == 1
    assert "&lt;own &amp; only&gt; (strength 0.00)" in text


@pytest.mark.parametrize("outcomes", [2.0, 1.0001], ids=["spread", "all at the bottom"])
def test_labels_of_the_drawing_do_not_touch_and_lie_in_it(outcomes: float) -> None:
    p = files().map(Stating(1e9))
    for _ in range(23):
        p = p.map(Stating(outcomes))
    root = ET.fromstring(p.diversity()._repr_svg_())
    high = float(root.attrib["height"])
    labels = [
        float(text.attrib["y"])
        for text in root.iter("{http://www.w3.org/2000/svg}text")
        if "(strength" in (text.text or "")
    ]
    assert len(labels) == 24
    gaps = np.diff(sorted(labels))
    assert gaps.min() >= 17.9
    assert min(labels) > 60
    assert max(labels) < high - 8


def test_styles_of_the_drawing_stay_within_it() -> None:
    text = drawing(photographs().diversity())
    style = text.split("<style>")[1].split("</style>")[0]
    for rule in re.findall(r"([^{}]+)\{[^{}]*\}", style):
        selectors = rule.split("@media (prefers-color-scheme: dark)")[-1].strip()
        assert all(part.strip().startswith(".diversity") for part in selectors.split(",")), rule
