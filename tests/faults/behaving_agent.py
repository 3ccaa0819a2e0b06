"""An agent whose task says how it behaves. Nothing but the standard library, so that it starts at once."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def call(text: str) -> str:
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
    }
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def post(url: str, body: str) -> int:
    """The status of a reward, as the agent sees it."""
    request = urllib.request.Request(url, data=body.encode(), headers={"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.02)


def main() -> None:  # noqa: PLR0912 - a branch for each behaviour
    task = json.loads(Path(os.environ["KITESTRING_TASK_FILE"]).read_text())
    behaviour = task["behaviour"]
    if behaviour == "silent":
        print("done")
        return
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "flood":
        line = b"x" * 65535 + b"\n"
        for _ in range(1600):  # 100 MB
            sys.stdout.buffer.write(line)
        return
    if behaviour == "reward":
        for value in task["bodies"]:
            print(value, post(os.environ["KITESTRING_BASE_URL"] + "/rewards", f'{{"value": {value}}}'))
        return
    if behaviour == "overflow":
        try:
            call("word " * 5000)
        except urllib.error.HTTPError as error:
            print(error.code, error.read().decode())
        return
    if behaviour == "orphans":
        for _ in range(3):
            subprocess.Popen(
                [
                    "setsid",
                    sys.executable,
                    "-c",
                    "import os, time\nif os.fork(): os._exit(0)\ntime.sleep(600)",
                    task["mark"],
                ]
            )
    for _ in range(task.get("calls", 1)):
        call("say something")
    if "signal" in task:  # tell the test that a call was made, and wait until it has done its worst
        Path(task["signal"] + "." + os.environ["KITESTRING_ATTEMPT"]).touch()
        wait_for(task["release"])
    if behaviour == "fail":
        print("I give up", file=sys.stderr)
        sys.exit(1)
    print("done")


main()
