"""The page in a real browser: no errors, all plots are shown, and all text is readable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.diagnose.analyze.test_page import page
from tests.support.browser import CHROMIUM, Browser, browser
from tests.support.reports import bound_by, rich

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

PLOTS = """
[...document.querySelectorAll("svg.plot")].map(plot => {
  const box = plot.getBoundingClientRect();
  return [plot.id, box.width, box.height, plot.querySelectorAll("text").length];
})
"""

# The background of a text is the nearest opaque one; for text in plots that is its figure. Tooltips
# are left out.
CONTRASTS = """
(() => {
  const part = value => {
    value /= 255;
    return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    throw new Error("nothing behind " + element.outerHTML);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const words = walker.currentNode.textContent.trim();
    const element = walker.currentNode.parentElement;
    if (!words || ["SCRIPT", "title"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const ink = element.closest("svg") ? style.fill : style.color;
    const pair = [light(numbers(ink)), light(behind(element))].sort((a, b) => b - a);
    found.push([words, (pair[0] + 0.05) / (pair[1] + 0.05), parseFloat(style.fontSize)]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(rich()))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_loads_without_an_error_or_a_request(
    chromium: Browser, written: Path, scheme: str
) -> None:
    chromium.open(written, scheme)
    assert chromium.run("document.readyState") == "complete"
    assert chromium.complaints == []
    assert chromium.asked == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1180), ("dark", 1180), ("light", 360)])
def test_every_plot_has_a_size_and_text(
    chromium: Browser, written: Path, scheme: str, width: int
) -> None:
    chromium.open(written, scheme, width=width)
    found: list[list[Any]] = chromium.run(PLOTS)
    assert [plot[0] for plot in found] == [
        "plot-epoch",
        "plot-operations",
        "plot-cache",
        "plot-cores",
        "plot-batches",
        "plot-waits",
    ]
    for name, wide, high, words in found:
        assert wide > 0.7 * min(width, 450), name
        assert high > 80, name
        assert words >= 4, name


@pytest.mark.parametrize("bound", ["compute", "prep", "fetch"])
def test_all_text_contrasts_with_its_background(
    chromium: Browser, tmp_path: Path, bound: str
) -> None:
    path = tmp_path / "report.html"
    path.write_text(page(bound_by(bound)))
    for scheme in ("light", "dark"):
        chromium.open(path, scheme)
        found = chromium.run(CONTRASTS)
        assert len(found) > 80
        assert [(scheme, *text) for text in found if text[1] < 4.5] == []


def test_light_and_dark_have_different_colours(chromium: Browser, written: Path) -> None:
    colours = []
    for scheme in ("light", "dark"):
        chromium.open(written, scheme)
        colours.append(chromium.run("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]


def test_the_page_fits_the_width_of_a_phone(chromium: Browser, written: Path) -> None:
    chromium.open(written, "light", width=360, height=760)
    assert chromium.run("document.documentElement.scrollWidth") <= 360


def test_texts_in_plots_do_not_overlap(chromium: Browser, written: Path) -> None:
    chromium.open(written, "light")
    script = """
    [...document.querySelectorAll("svg.plot")].flatMap(plot => {
      const words = [...plot.querySelectorAll("text")];
      const boxes = words.map(word => word.getBoundingClientRect());
      return words.flatMap((word, i) => words.slice(i + 1).flatMap((other, j) => {
        const a = boxes[i], b = boxes[i + 1 + j];
        const meet = a.left < b.right - 1 && b.left < a.right - 1 &&
          a.top < b.bottom - 5 && b.top < a.bottom - 5;
        return meet ? [[plot.id, word.textContent, other.textContent]] : [];
      }));
    })
    """
    assert chromium.run(script) == []


def test_the_button_copies_the_code(chromium: Browser, written: Path) -> None:
    chromium.open(written, "light")
    script = """
    (async () => {
      let copied = null;
      Object.defineProperty(navigator, "clipboard", {
        value: { writeText: async text => { copied = text; } }, configurable: true });
      document.querySelector("button.copy").click();
      await new Promise(done => setTimeout(done, 0));
      return [copied, document.querySelector("button.copy").textContent];
    })()
    """
    assert chromium.run(script) == ['cache="5.5GB"', "Copied"]
    assert chromium.complaints == []
