from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from kitestring_trainer import checkpoints, metrics
from kitestring_trainer.driver import run
from kitestring_trainer.metrics import MetricsFile, finite
from tests.trainer.world import World

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> set[str]:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_key_is_documented_and_every_documented_key_exists(world: World) -> None:
    world.start_workers()
    run(world.config(spec__steps=1), world.announce)
    (line,) = world.metrics()
    assert set(line) == documented()


def test_a_collecting_step(world: World) -> None:
    world.start_workers()
    run(world.config(spec__steps=1), world.announce)
    (line,) = world.metrics()
    expected: dict[str, Any] = {
        "reward_mean": pytest.approx(1 / 3),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "groups_counted": 2,
        "groups_without_spread": 0,
        "rollouts_counted": 6,
        "rollouts_by_class": {"Succeeded": 6},
        "calls_total": 6,
        "calls_per_rollout": 1.0,
        "prompt_tokens": 18,
        "completion_tokens": 12,
        "completion_tokens_per_rollout": 2.0,
        "rows": 6,
        "rows_per_rollout": 1.0,
        "replies_cut_share": 0.0,
        "entropy_nats": None,
        "updates": 0,
    }
    assert {key: line[key] for key in expected} == expected
    assert sum(line["seconds"].values()) == pytest.approx(line["step_seconds"], rel=0.05)


def test_json_has_no_nan() -> None:
    assert finite({"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}, "e": "x"}) == {
        "a": None,
        "b": [None, 1.0],
        "c": {"d": None},
        "e": "x",
    }


def test_going_back_drops_later_steps_and_half_a_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.rewind(3)
    for step in (0, 1, 2, 3):
        file.append({"step": step, "reward_mean": 0.5} if step else {"step": 0, "validation": []})
    with (tmp_path / "metrics.jsonl").open("a") as half:
        half.write('{"step": 4, "rew')
    file.rewind(2)
    file.append({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"step":0,"validation":[]}',
        '{"step":1,"reward_mean":0.5}',
        '{"step":2,"reward_mean":0.5}',
        '{"step":3}',
    ]
    assert file.has_step(2) and not file.has_step(3) and not file.has_step(0)


def test_what_the_index_and_the_figures_say_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power they must not name what is gone, nor lack what was committed."""
    flushed: list[str] = []
    for module in (checkpoints, metrics):
        monkeypatch.setattr(module, "flush", lambda path: flushed.append(path.name))
    file = metrics.MetricsFile(tmp_path / "metrics.jsonl")
    file.append({"step": 1})
    file.rewind(1)
    assert flushed == ["metrics.jsonl", "metrics.part", tmp_path.name]
    flushed.clear()
    checkpoints.Checkpoints(tmp_path, keep=1).rewind(0)
    assert flushed == [".checkpoints.json.part", tmp_path.name]


def test_figures_that_a_death_cost_are_made_from_the_traces(world: World) -> None:
    world.start_workers()
    whole = run(world.config(spec__steps=1), world.announce)
    (line,) = world.metrics()
    (world.folder / "run" / "metrics.jsonl").unlink()
    world.listening.clear()
    result = run(world.config(spec__steps=1, resume=True), world.announce)
    (made,) = world.metrics()
    assert made == {key: line[key] for key in made}
    assert made["prompt_tokens"] > 0 and made["calls_total"] == 6
    assert result.tokens == whole.tokens
