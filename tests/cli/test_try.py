"""kitestring try: one rollout against an endpoint, as a process of its own (it ends all of its descendants)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from kitestring_api.errors import UserMistakeError
from kitestring_cli.try_rollout.endpoint import find_endpoint
from tests.cli.conftest import Command
from tests.cli.openai_server import OpenAIServer, calls, says, serving

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator" / "agent.py"

ASK = """
import json, os, sys, urllib.request
def ask(messages, **more):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
question = [{"role": "user", "content": sys.stdin.read()}]
"""
"""Beginning of agents that need nothing but the standard library."""


def write_files(folder: Path, agent: str | Path, **pool: Any) -> Path:
    """A run and its pool, whose agent is a script, or the text of one."""
    script = [str(agent)] if isinstance(agent, Path) else ["-c", agent]
    documents = [
        {
            "apiVersion": "kitestring.dev/v1alpha1",
            "kind": "RolloutPool",
            "metadata": {"name": "agents"},
            "spec": {
                "replicas": 3,
                "template": {"spec": {"containers": [{"name": "agent", "command": [sys.executable, *script]}]}},
                "agentProtocol": {
                    "task": {"from": "stdin", "format": "text", "field": "question"},
                    "output": {"from": "stdout"},
                },
                "reward": {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer"}},
                "limits": {"seconds": 60, "calls": 8, "tokens": 4000},
                **pool,
            },
        },
        {
            "apiVersion": "kitestring.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "run"},
            "spec": {
                "policies": [
                    {"name": "policy", "model": {"path": "./nowhere"}, "lora": {"rank": 8}, "toolParser": "hermes"}
                ],
                "tasks": {
                    "train": {
                        "inline": [
                            {"question": "How many in 12 dozen?", "answer": "Answer: 144"},
                            {"question": "And in 2?", "answer": "Answer: 24"},
                        ]
                    },
                    "validation": {"path": "./no/such/tasks.jsonl"},
                    "hiddenFields": ["answer"],
                },
                "rollouts": {"poolRef": {"name": "agents"}},
                "storage": {"bucket": "elsewhere", "credentialsSecretRef": {"name": "of-the-cluster"}},
                "trainer": {"gpusPerNode": 8},
                "inference": {"gpusPerReplica": 1},
                "steps": 10,
            },
        },
    ]
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def try_it(files: Path, *arguments: object, key: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    environment |= {"COLUMNS": "100"} | ({"OPENAI_API_KEY": key} if key else {})
    command = [sys.executable, "-m", "kitestring_cli", "try", str(files), *map(str, arguments)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env=environment, cwd=files.parent
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def endpoint() -> Iterator[OpenAIServer]:
    with serving(OpenAIServer()) as server:
        yield server


def test_an_agent_against_an_endpoint_that_reports_no_ids(endpoint: OpenAIServer, tmp_path: Path) -> None:
    endpoint.replies = [calls('{"expression": "12*12"}'), says("Answer: 144")]
    done = try_it(write_files(tmp_path, CALCULATOR), "--endpoint", endpoint.url)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "task 0  question: How many in 12 dozen?"
    assert lines[1] == f"tiny at {endpoint.url}, as policy"
    said = [line[2:] for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert said == [
        "tools: calculator",
        "system     Use the calculator. Reply with Answer: <integer>",
        "user       How many in 12 dozen?",
        'assistant  → calculator({"expression": "12*12"})',
        "tool       144",
        "assistant  Answer: 144",
        "output     Answer: 144",
    ]
    text = " ".join(done.stdout.split())
    assert "Succeeded reward 1 (builtin)" in text
    assert "scorer exactMatch against 'Answer: 144' (field answer)" in text
    assert "rows 2 calls to a model that reports no token ids: no rows; by its messages, each call goes on" in text
    assert "limits calls 2 of 8, tokens" in text
    assert "warning" not in text
    assert [request["model"] for request in endpoint.requests] == ["tiny", "tiny"]
    assert not {"return_token_ids", "logprobs", "return_weight_versions"} & set(endpoint.requests[0])
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]


def test_rows_from_an_endpoint_that_reports_ids(endpoint: OpenAIServer, tmp_path: Path) -> None:
    endpoint.replies = [calls('{"expression": "2*12"}'), says("Answer: 24")]
    endpoint.owner, endpoint.ids = "vllm", True
    done = try_it(write_files(tmp_path, CALCULATOR), "--endpoint", endpoint.url, "--task", "1", "--output", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["task"], found["class"], found["reward"]) == (1, "Succeeded", 1.0)
    rows = found["rows"]
    assert rows["sentence"] == "2 replies → 1 row: your agent's contexts extend each other"
    tool = len(b"<tool>24</><assistant>")
    replies = [len(b'[["calculator", "{\\"expression\\": \\"2*12\\"}"]]</>'), len(b"Answer: 24</>")]
    assert (rows["rows"], rows["trained"], rows["masked"]) == (1, sum(replies), tool)
    assert [call["sampling"]["temperature"] for call in found["attempt"]["calls"]] == [1, 1]
    assert found["warnings"] == []


def test_contexts_that_do_not_extend_each_other(endpoint: OpenAIServer, tmp_path: Path) -> None:
    endpoint.owner, endpoint.ids = "vllm", True
    agent = ASK + "ask(question); print(ask([{'role': 'system', 'content': 'Again.'}, *question])['content'])"
    done = try_it(write_files(tmp_path, agent), "--endpoint", endpoint.url, "--output", "json")
    found = json.loads(done.stdout)
    assert found["rows"]["rows"] == 2
    assert found["rows"]["sentence"].startswith(
        "2 replies → 2 rows: your agent's contexts do not extend each other; call 2 departs from call 1 at token 1 of"
    )
    assert done.returncode == 0  # a reward of 0 is a reward
    assert found["reward"] == 0.0


def test_the_policy_itself(tmp_path: Path) -> None:
    """Without an endpoint, a policy server is started for it."""
    from tests.policy_server.tiny_policy import make_policy

    model = make_policy(tmp_path / "nowhere")
    agent = ASK + "print(ask(question, max_tokens=4)['content'])"
    arguments = ("--set", "spec.inference.backend=cpu", "--set", "spec.inference.gpusPerReplica=0", "--output", "json")
    done = try_it(write_files(tmp_path, agent), *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (said,) = found["attempt"]["calls"]
    assert (said["trained"], said["outcome"], said["model"]) == (True, "ok", "policy")
    assert found["rows"]["sentence"] == "1 reply → 1 row"
    assert found["rows"]["trained"] == said["completion_tokens"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [model.name, "run.yaml"]


JUDGE = """
import json, os
from http.server import BaseHTTPRequestHandler, HTTPServer
class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"reward": 7 if asked["hidden"]["answer"] in asked["output"] else 0}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Judge).serve_forever()
"""


def test_a_scorer_of_the_pools_own(endpoint: OpenAIServer, tmp_path: Path) -> None:
    scorer = {"image": "judge:1", "command": [sys.executable, "-c"], "args": [JUDGE]}
    files = write_files(
        tmp_path, ASK + "ask(question); print('Answer: 144')", reward={"source": "scorer", "scorer": scorer}
    )
    done = try_it(files, "--endpoint", endpoint.url, "--output", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["class"], found["reward"], found["reward_source"]) == ("Succeeded", 7, "scorer")
    assert found["scorer"].startswith(f"scorer {sys.executable} -c")


def test_a_scorer_that_cannot_start(endpoint: OpenAIServer, tmp_path: Path) -> None:
    scorer = {"image": "judge:1", "command": [sys.executable, "-c", "raise SystemExit('no model here')"]}
    files = write_files(tmp_path, ASK, reward={"source": "scorer", "scorer": scorer})
    done = try_it(files, "--endpoint", endpoint.url)
    assert done.returncode != 0
    assert "no model here" in done.stderr


def test_an_agent_that_fails(endpoint: OpenAIServer, tmp_path: Path) -> None:
    agent = ASK + "print('thinking', flush=True); ask(question); raise ValueError('no \\x1b[31mplan')"
    done = try_it(write_files(tmp_path, agent), "--endpoint", endpoint.url)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "AgentFailed no reward exit code 1: ValueError: no [31mplan scorer exactMatch" in text
    assert "last lines of the agent's output and errors" in done.stdout
    assert "  ValueError: no \\x1b[31mplan" in done.stdout.splitlines()
    assert "call 1  policy, not trained  ok" in done.stdout


def test_an_agent_that_asks_for_another_model(endpoint: OpenAIServer, tmp_path: Path) -> None:
    agent = ASK + "os.environ['OPENAI_MODEL'] = 'gpt-4o'; ask(question)"
    done = try_it(write_files(tmp_path, agent), "--endpoint", endpoint.url)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "1 requests were refused before they counted as calls" in text
    assert "of another name than policy" in text
    assert "rows no call, so nothing to train on: the agent never called a model" in text
    assert endpoint.requests == []


def test_an_endpoint_that_fails(endpoint: OpenAIServer, tmp_path: Path) -> None:
    endpoint.status = 500
    done = try_it(write_files(tmp_path, ASK + "ask(question)"), "--endpoint", endpoint.url)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "AgentFailed" in text
    assert "warning call 1 failed" in text


def test_an_agent_that_cannot_start(endpoint: OpenAIServer, tmp_path: Path) -> None:
    files = write_files(tmp_path, ASK, agentProtocol={"preload": ["no_such_module"]})
    done = try_it(files, "--endpoint", endpoint.url)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: the agent cannot start")
    assert "no_such_module" in done.stderr


def test_a_key_goes_to_the_endpoint_and_not_to_the_agent(endpoint: OpenAIServer, tmp_path: Path) -> None:
    endpoint.key = "the-users-key"
    agent = ASK + "ask(question); print(os.environ)"
    done = try_it(write_files(tmp_path, agent), "--endpoint", endpoint.url, "--output", "json", key="the-users-key")
    assert done.returncode == 0, done.stderr
    assert endpoint.keys == [None, "the-users-key", "the-users-key"]
    assert "the-users-key" not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_try_leaves_nothing(endpoint: OpenAIServer, tmp_path: Path, number: signal.Signals) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    agent = f"""
import os, subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(pipe)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
child.wait()
"""
    files = write_files(tmp_path, agent)
    command = [sys.executable, "-m", "kitestring_cli", "try", str(files), "--endpoint", endpoint.url]
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    pids = [int(pid) for pid in pipe.read_text().split()]
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert errors.strip() == ""
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--task", "2"], "--task 2: spec.tasks inline has rows 0 to 1"),
        (["--model", "a"], "--model names a model of --endpoint, which is not given"),
        (["--endpoint", "127.0.0.1:80"], "--endpoint 127.0.0.1:80: no URL; write e.g. http://127.0.0.1:8000/v1"),
        (["--endpoint", "http://127.0.0.1:1/v1"], "cannot be reached: [Errno 111] Connection refused; start it, or"),
        (["--set", "spec.nonsense=1"], "spec.nonsense: unknown field"),
        ([], "spec.policies[0].model.path: found"),
    ],
)
def test_mistakes(
    kitestring: Command, tmp_path: Path, endpoint: OpenAIServer, arguments: list[str], error: str
) -> None:
    complete = not arguments or arguments[0] in ("--endpoint", "--model")
    given = arguments if complete else [*arguments, "--endpoint", endpoint.url]
    said = kitestring("try", write_files(tmp_path, ASK), *given)
    assert (said.code, said.out) == (2, "")
    assert error in said.err


def test_no_files(kitestring: Command) -> None:
    said = kitestring("try")
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: no FILES given")


def test_torch_is_not_needed() -> None:
    code = "import kitestring_cli.try_rollout.command, sys; print({'torch', 'transformers', 'verl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --- the endpoint ---


def test_an_endpoint_is_asked_what_it_serves(endpoint: OpenAIServer) -> None:
    found = find_endpoint(endpoint.url, None, "unused")
    assert (found.url, found.model, found.reports_ids) == (endpoint.url, "tiny", False)
    assert endpoint.keys == [None]
    assert find_endpoint(endpoint.url.removesuffix("/v1") + "/", "other", None).url == endpoint.url
    endpoint.owner = "vllm"
    assert find_endpoint(endpoint.url, None, None).reports_ids


def test_a_server_that_wants_a_key_is_called_as_a_stranger(endpoint: OpenAIServer) -> None:
    """Policy servers are called without one, so its ids cannot be had."""
    endpoint.owner, endpoint.key = "vllm", "k"
    found = find_endpoint(endpoint.url, None, "k")
    assert (found.reports_ids, found.api_key) == (False, "k")
    assert "k" not in repr(found).replace("api_key", "")[20:]


def test_an_endpoint_without_a_list_of_models(endpoint: OpenAIServer) -> None:
    endpoint.models = None
    with pytest.raises(UserMistakeError, match="lists no models; name one with --model"):
        find_endpoint(endpoint.url, None, None)
    assert find_endpoint(endpoint.url, "mine", None).model == "mine"


@pytest.mark.parametrize(
    ("models", "key", "given", "error"),
    [
        (["a", "b"], None, None, "serves 2 models, name one with --model: a, b"),
        ([], None, None, "serves 0 models"),
        (list("abcdefgh"), None, None, "a, b, c, d, e, f, …"),
        (["a"], "k", None, "wants an API key; set OPENAI_API_KEY"),
        (["a"], "k", "wrong", "refuses the key in OPENAI_API_KEY (401)"),
    ],
)
def test_endpoints_that_do_not_do(
    endpoint: OpenAIServer, models: list[str], key: str | None, given: str | None, error: str
) -> None:
    endpoint.models, endpoint.key = models, key
    with pytest.raises(UserMistakeError) as raised:
        find_endpoint(endpoint.url, None, given)
    assert error in str(raised.value)
