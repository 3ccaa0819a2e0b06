"""Make the small policy of the calculator example: a tokenizer and a warm-started Llama of 0.25 M parameters."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from policy.recipe import STEPS, Recipe
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from word_problems import VARIANTS, Variant

HERE = Path(__file__).parent
SOURCES = (HERE / "make_policy.py", HERE / "word_problems.py", HERE / "agent.py")
MARKER = "made-by.json"
KNOWS: dict[Variant, str] = {
    "ci": "a warm start that knows the tool protocol, but has the habit of guessing instead of using its tool",
    "full": "a warm start that knows the tool protocol, but not which operation a question needs",
}
CARD = """# The small policy of the calculator example

{knows}. Learning the rest is what the training run is for. Made by `make_policy.py` ({steps} steps of supervised
training on generated conversations, seed {seed}); a Llama of 0.25 M parameters, of no use for anything else.
"""


def stamp(recipe: Recipe) -> str:
    """What the marker file holds: the recipe, and a hash of the scripts that followed it."""
    digest = hashlib.sha256()
    for path in (*SOURCES, *sorted((HERE / "policy").glob("*.py"))):
        digest.update(path.read_bytes())
    return json.dumps({"recipe": asdict(recipe), "sources": digest.hexdigest()}, indent=2) + "\n"


def is_made(folder: Path, recipe: Recipe) -> bool:
    marker = folder / MARKER
    return marker.exists() and marker.read_text(encoding="utf-8") == stamp(recipe)


def is_foreign(folder: Path) -> bool:
    """Whether there is something that this script did not make, and must not replace."""
    if folder.is_dir():
        return any(folder.iterdir()) and not (folder / MARKER).exists()
    return folder.exists()


def make(folder: Path, recipe: Recipe) -> None:
    """Make the policy in `folder`, whole or not at all. One that this script made earlier is replaced."""
    from policy.warm_start import make_policy  # noqa: PLC0415 -- seconds of imports, spared when nothing is to do

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        with progress(recipe.steps) as report:
            make_policy(made, recipe, report)
        card = CARD.format(knows=KNOWS[recipe.variant].capitalize(), steps=recipe.steps, seed=recipe.seed)
        (made / "README.md").write_text(card, encoding="utf-8")
        (made / MARKER).write_text(stamp(recipe), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    console = Console()
    if not console.is_terminal:
        yield lambda step, loss: print_step(step, steps, loss)
        return
    columns = (
        TextColumn("warm start"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("warm start", total=steps, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


def print_step(step: int, steps: int, loss: float) -> None:
    if step % 50 == 0 or step == steps:
        print(f"warm start: step {step} of {steps}, loss {loss:.3f}", flush=True)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    knows = "; ".join(f"{variant}: {what}" for variant, what in KNOWS.items())
    parser.add_argument("--variant", choices=VARIANTS, default="ci", help=knows)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=positive, help="of the warm start (default: 350 for ci, 900 for full)")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "model", metavar="FOLDER")
    options = parser.parse_args(arguments)
    recipe = Recipe(options.variant, options.seed, options.steps or STEPS[options.variant], options.threads)
    folder: Path = options.out.resolve()
    if is_made(folder, recipe):
        print(f"{folder} is up to date: {KNOWS[recipe.variant]}")
        return
    if is_foreign(folder):
        parser.error(f"--out {folder} exists and was not made by this script: remove it, or name another folder")
    started = time.monotonic()
    print(f"Making a small policy, {KNOWS[recipe.variant]}", flush=True)
    make(folder, recipe)
    print(f"{folder} made in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
