"""Shows Penstock at work in two minutes, on a plain training script that is not edited.

The script, demo_train.py, waits for its data. It is analysed, run again with the remedy, and the
measured gain stands beside the predicted one. Then four such jobs run at once, each for itself and
sharing. The accelerator is simulated by a sleep; files, augmentation and model are real.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from penstock.config import cores

Image = NDArray[np.uint8]
EXTENSIONS = (".jpg", ".jpeg")
WIDTH, HEIGHT = 500, 375
COLOURS = {"circles": (220, 70, 50), "frames": (240, 220, 60), "squares": (60, 90, 220)}
SCRIPT = Path(__file__).resolve().with_name("demo_train.py")
JOBS = 4

EPOCH = re.compile(r"^epoch \d+: ([\d,.]+) images/s", re.MULTILINE)
GAIN = re.compile(r"([\d.]+) times as fast")
COMMAND = re.compile(r"^\s*penstock run (.*?)-- ")
"""The command of a remedy, as an analysis prints it below the gain."""

console = Console(highlight=False)
cv2.setNumThreads(0)  # threads of the demo write the files in parallel


def photo(shape: str, seed: int) -> Image:
    """Sky, shapes, texture at several scales and noise: as costly to decode as a photograph."""
    rng = np.random.default_rng(seed)
    top, bottom = rng.uniform(40, 215, (2, 1, 1, 3))
    sky = top + (bottom - top) * np.linspace(0, 1, HEIGHT).reshape(-1, 1, 1)
    image = np.repeat(sky.astype(np.float32), WIDTH, axis=1)
    for _ in range(8):
        colour = (COLOURS[shape] + rng.normal(0, 30, 3)).tolist()
        x, y, size = (int(n) for n in rng.uniform((0, 0, 30), (WIDTH, HEIGHT, 80)))
        if shape == "circles":
            cv2.circle(image, (x, y), size, colour, -1)
        else:
            thickness = 20 if shape == "frames" else -1
            cv2.rectangle(image, (x - size, y - size), (x + size, y + size), colour, thickness)
    for step, strength in ((40, 18), (8, 12), (3, 9)):
        rough = rng.standard_normal((HEIGHT // step, WIDTH // step, 3), np.float32) * strength
        image += cv2.resize(rough, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    image += rng.standard_normal((HEIGHT, WIDTH, 1), np.float32) * 9
    return np.asarray(np.clip(image, 0, 255), np.uint8)


def write_photos(folder: Path, count: int) -> None:
    """Write JPEG files in one folder for each class, like ImageNet."""
    shapes = list(COLOURS)

    def write(number: int) -> None:
        shape = shapes[number % len(shapes)]
        data = simplejpeg.encode_jpeg(photo(shape, number), quality=91, colorsubsampling="420")
        (folder / shape / f"{number:05}.jpg").write_bytes(data)

    for shape in shapes:
        (folder / shape).mkdir()
    with ThreadPoolExecutor(cores()) as threads:
        made = threads.map(write, range(count))
        for _ in track(made, f"generating {count:,} JPEG files", total=count, console=console):
            pass


@contextmanager
def photos(given: Path | None, count: int, keep: bool) -> Iterator[Path]:
    """The folder to train on: the user's, or a temporary one that is removed at the end."""
    if given is not None:
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    try:
        write_photos(folder, count)
        yield folder
    finally:
        if keep:
            console.print(f"The files are in {folder}.")
        else:
            shutil.rmtree(folder)


def stand_ins(place: Path) -> dict[str, str]:
    """Environment variables with which programs can import torchvision.

    Its compiled operators may not fit the installed torch. Transforms need none of them, and the
    import needs two of them to exist: a ``sitecustomize`` defines these.
    """
    probe = [sys.executable, "-c", "import torchvision"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return {}
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        """
import sys


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define("torchvision::" + operator, schema)


sys.meta_path.insert(0, Finder())
"""
    )
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        probe, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        raise SystemExit(f"torchvision, which the script of the demo uses, fails: {reason}")
    return variables


def speed(output: str) -> float:
    """Images per second of a run of the script, without its first epoch, which starts workers.

    >>> speed("epoch 1: 90 images/s, loss 1.00\\nepoch 2: 200 images/s, loss 0.50\\n")
    200.0
    """
    epochs = [float(value.replace(",", "")) for value in EPOCH.findall(output)]
    if not epochs:
        raise ValueError("the script has printed no epoch")
    later = epochs[1:] or epochs
    return len(later) / sum(1 / value for value in later)


def remedy(report: str) -> tuple[float, list[str]] | None:
    """The gain of the best remedy that trains on the same batches without an edit, and its options.

    ``None`` if the analysis names no such remedy.

    >>> remedy("a loader: 4.50 times as fast (9/s)\\n    penstock run --native -- python train.py")
    (4.5, ['--native'])
    """
    gain = None
    for line in report.splitlines():
        found, command = GAIN.search(line), COMMAND.search(line)
        if found is not None:
            gain = float(found[1])
        if command is not None and gain is not None:
            words = shlex.split(command[1])
            if not {"--echo", "--share", "--reuse"} & set(words):
                return gain, words
    return None


class Demo:
    """The programs that the demo starts, with their environment."""

    def __init__(self, place: Path, words: Sequence[str]) -> None:
        self.place = place
        self.script = [sys.executable, str(SCRIPT), *words]
        self.variables = {
            **os.environ,
            **stand_ins(place / "stand-ins"),
            "PENSTOCK_RUNTIME_DIR": str(place / "node"),  # apart from jobs of the user
        }

    def command(self, words: Sequence[str], *, epochs: int) -> list[str]:
        """The script, below ``penstock WORDS --`` if there are words."""
        script = [*self.script, "--epochs", str(epochs)]
        return [sys.executable, "-m", "penstock", *words, "--", *script] if words else script

    def show(self, words: Sequence[str]) -> None:
        line = ["penstock", *words, "--"] if words else []
        console.print(f"[bold]$ {shlex.join([*line, 'python', 'train.py'])}[/bold]")

    def run(self, *words: str, epochs: int) -> str:
        """Run the script, pass its output on, and return it."""
        self.show(words)
        with subprocess.Popen(
            self.command(words, epochs=epochs),
            env=self.variables,
            cwd=self.place,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            lines = []
            for line in process.stdout or ():
                lines.append(line)
                console.print("  " + line.rstrip("\n"), markup=False, soft_wrap=True)
        if process.returncode:
            raise SystemExit(f"the command above has failed, with exit code {process.returncode}")
        return "".join(lines)

    def run_jobs(self, *words: str, epochs: int) -> float:
        """Run several jobs at once; images per second of all of them together."""
        self.show(words)
        command = self.command(words, epochs=epochs)
        processes = [
            subprocess.Popen(
                [*command, "--lr", f"{0.001 * 2**number:g}"],
                env=self.variables,
                cwd=self.place,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(JOBS)
        ]
        rates = []
        for number, process in enumerate(processes):
            output, errors = process.communicate()
            if process.returncode:
                raise SystemExit(f"job {number} has failed:\n{errors}")
            rates.append(speed(output))
        console.print(
            f"  {JOBS} jobs with other learning rates: {', '.join(f'{r:,.0f}' for r in rates)} "
            f"images/s; {sum(rates):,.0f} together"
        )
        return sum(rates)

    def stop(self) -> None:
        """End the node that the jobs have shared."""
        command = [sys.executable, "-m", "penstock", "stop", "--now"]
        subprocess.run(command, env=self.variables, capture_output=True, check=False)


def tell(demo: Demo, seconds: float, epochs: int) -> None:
    """The story, one chapter after the other."""
    console.rule("1. A plain training script")
    plain = speed(demo.run(epochs=epochs))

    console.rule("2. Why does it wait?")
    report = demo.run("analyze", "--seconds", f"{seconds:g}", "--output", "report", epochs=10_000)
    best = remedy(report)
    gain, words = best or (None, ["--native"])

    console.rule("3. The remedy, without an edit")
    ours = speed(demo.run("run", *words, epochs=2 * epochs))

    console.rule(f"4. {JOBS} jobs on the same data")
    each = demo.run_jobs(epochs=2)
    shared = demo.run_jobs("run", "--native", "--share", "demo", epochs=2 * epochs)

    console.rule("Result")
    table = Table("", "images/s", "times as fast", "predicted")
    table.add_row("the script as it is", f"{plain:,.0f}", "1.00", "")
    promised = "-" if gain is None else f"{gain:.2f}"
    table.add_row(
        " ".join(["penstock run", *words]), f"{ours:,.0f}", f"{ours / plain:.2f}", promised
    )
    table.add_row(f"{JOBS} jobs as they are, together", f"{each:,.0f}", "1.00", "")
    table.add_row(f"{JOBS} jobs with --share", f"{shared:,.0f}", f"{shared / each:.2f}", "")
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="your own images, in one folder for each class")
    parser.add_argument("--keep", action="store_true", help="do not delete the generated files")
    parser.add_argument("--images", type=int, default=1024, help="number of files to generate")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the plain script")
    parser.add_argument("--seconds", type=float, default=30, help="time for the analysis")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="workers of the script's loader")
    parser.add_argument(
        "--step", type=float, default=20, help="simulated accelerator, ms per batch"
    )
    args = parser.parse_args()
    began = time.monotonic()
    with (
        photos(args.data, args.images, args.keep) as folder,
        tempfile.TemporaryDirectory(prefix="penstock-demo-", ignore_cleanup_errors=True) as place,
    ):
        files = [path for path in folder.glob("*/**/*") if path.suffix.lower() in EXTENSIONS]
        if len(files) < 4 * args.batch:
            parser.error(
                f"{folder} has {len(files)} JPEG files. Give a folder with one folder for each "
                f"class, and at least {4 * args.batch} JPEG files (four batches of --batch)."
            )
        for path in files:  # every run finds the files in the page cache
            path.read_bytes()
        console.print(
            f"{SCRIPT.name} trains on {len(files):,} JPEG files, in batches of {args.batch}, with "
            f"{args.workers} workers on {cores()} cores. Its accelerator is simulated by a sleep "
            f"of {args.step:g} ms per batch."
        )
        words = [str(folder.resolve()), "--batch", str(args.batch), "--step", f"{args.step:g}"]
        demo = Demo(Path(place), [*words, "--workers", str(args.workers)])
        try:
            tell(demo, args.seconds, args.epochs)
        finally:
            demo.stop()
    console.print(f"The demo took {time.monotonic() - began:.0f} s.")
    if os.getloadavg()[0] > 2 * cores():
        console.print("Other programs keep this machine busy, so the figures are unreliable.")


if __name__ == "__main__":
    main()
