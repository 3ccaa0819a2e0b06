"""Parts of a run killed, stopped and cut off: every planned rollout still ends once, and nothing incomplete counts."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from local_run import LocalRun, audit, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

Start = Callable[..., LocalRun]


def gated(tmp_path: Path) -> tuple[list[dict[str, object]], Path, Callable[[], list[Path]]]:
    """Tasks whose agents make a call and then wait: (tasks, file that releases them, agents that wait)."""
    signals = tmp_path / "signals"
    signals.mkdir()
    release = tmp_path / "release"
    tasks = [{"behaviour": "call", "signal": str(signals / str(i)), "release": str(release)} for i in range(2)]
    return tasks, release, lambda: list(signals.iterdir())


@pytest.mark.parametrize("part", ["gateway", "collector", "worker-0", "policy-server"])
def test_a_part_killed_in_mid_step_costs_no_rollout(start_run: Start, tmp_path: Path, part: str) -> None:
    tasks, release, waiting = gated(tmp_path)
    run = start_run(tasks, group_size=2)
    wait_until(lambda: len(waiting()) == 4, "four agents in mid-rollout")
    victim = run.part(part)
    victim.send_signal(signal.SIGKILL)
    run.part(part, besides=victim.pid)
    release.touch()
    result = run.wait()
    assert result["phase"] == "Succeeded", result
    assert audit(run.store(), 1) == {"Succeeded": 4}
    run.assert_no_process_left()


def test_an_attempt_cut_off_between_call_and_export_never_looks_complete(start_run: Start, tmp_path: Path) -> None:
    """The collector stands still, so the gateway holds unexported spans when it is killed."""
    tasks, release, waiting = gated(tmp_path)
    run = start_run(tasks, group_size=2)
    collector = run.part("collector")
    gateway = run.part("gateway")
    run.part("worker-0")
    collector.suspend()
    wait_until(lambda: len(waiting()) == 4, "four agents in mid-rollout")
    first = {path.suffix[1:] for path in waiting()}
    gateway.send_signal(signal.SIGKILL)
    collector.resume()
    release.touch()
    result = run.wait()
    assert result["phase"] == "Succeeded", result
    assert audit(run.store(), 1) == {"Succeeded": 4}
    commit = json.loads(run.store().get("state/commits/t000001.json"))
    assert not first & {rollout["attempt"] for rollout in commit["rollouts"]}, "cut-off attempts are lost"


def test_a_killed_trainer_goes_on_where_it_was(start_run: Start, tmp_path: Path) -> None:
    tasks, release, waiting = gated(tmp_path)
    quick = [{"behaviour": "call"} for _ in range(2)]
    run = start_run([*quick, *tasks], group_size=1, pool={"rolloutsPerWorker": 2})
    wait_until(lambda: len(waiting()) == 2, "the slow agents in mid-rollout")
    finished = wait_until(lambda: _finished(run), "the quick rollouts to be durable")
    run.part("trainer").send_signal(signal.SIGKILL)
    assert run.wait()["phase"] == "Failed"
    run.assert_no_process_left()
    release.touch()
    again = LocalRun(tmp_path, [], resume=run.folder)
    result = again.wait()
    again.assert_no_process_left()
    assert result["phase"] == "Succeeded", result
    assert audit(run.store(), 1) == {"Succeeded": 4}
    commit = json.loads(run.store().get("state/commits/t000001.json"))
    assert finished <= {rollout["attempt"] for rollout in commit["rollouts"]}, "finished rollouts are not run again"


def _finished(run: LocalRun) -> set[str] | None:
    from kitestring_rollout.traces.attempts import ProvenAttempt
    from kitestring_rollout.traces.reader import read_attempts

    found = {attempt.attempt for attempt in read_attempts(run.store()) if isinstance(attempt, ProvenAttempt)}
    return found if len(found) == 2 else None


def test_ctrl_c_ends_every_process(start_run: Start, tmp_path: Path) -> None:
    tasks, _, waiting = gated(tmp_path)
    run = start_run(tasks, group_size=2)
    wait_until(lambda: len(waiting()) == 4, "four agents in mid-rollout")
    assert len(run.processes()) >= 9, "five parts and four agents"
    run.process.send_signal(signal.SIGINT)
    out, err = run.process.communicate(timeout=60)
    assert run.process.returncode == 130, err
    assert json.loads(out)["reason"] == "Interrupted"
    assert "Traceback" not in err
    run.assert_no_process_left()


def test_kill_9_of_the_parent_ends_every_process(start_run: Start, tmp_path: Path) -> None:
    tasks, _, waiting = gated(tmp_path)
    run = start_run(tasks, group_size=2)
    wait_until(lambda: len(waiting()) == 4, "four agents in mid-rollout")
    assert len(run.processes()) >= 9
    run.process.kill()
    run.process.communicate(timeout=60)
    run.assert_no_process_left()


def test_a_part_that_cannot_start_again_ends_the_run_with_its_words(start_run: Start, tmp_path: Path) -> None:
    tasks, _, waiting = gated(tmp_path)
    run = start_run(tasks, group_size=2, pool={"limits": {"seconds": 600}})
    wait_until(lambda: len(waiting()) == 4, "four agents in mid-rollout")
    policy = run.part("policy-server")
    configuration = run.folder / "config" / "policy-server.json"
    config = json.loads(configuration.read_text())
    config["model"] = str(tmp_path / "gone")
    configuration.write_text(json.dumps(config))
    policy.send_signal(signal.SIGKILL)
    out, err = run.process.communicate(timeout=100)
    assert run.process.returncode == 2, "the user can mend it"
    assert "policy-server" in err and "gone" in err
    assert json.loads(out)["phase"] == "Failed"
    assert not [p for p in psutil.Process().children(recursive=True) if str(run.folder) in " ".join(p.cmdline())]
