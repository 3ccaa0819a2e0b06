"""What the agents here have in common: asking their model, and standing at a barrier. Standard library only.

Agents are handed over as one text: `harness.agents.script` puts this in place of the line that imports from it.
"""

import json
import os
import socket
import time
import urllib.request


def ask(question):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": question}], "max_tokens": 4}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def pause_at(point):
    host, port = os.environ["BARRIER"].split(":")
    names = {"rollout": os.environ["KITESTRING_ROLLOUT"], "attempt": os.environ["KITESTRING_ATTEMPT"]}
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.settimeout(None)
                connection.sendall(json.dumps({"at": point, **names}).encode() + b"\n")
                if connection.recv(1):
                    return
        except OSError:
            time.sleep(0.1)  # the pod's way to the barrier is only just being made
