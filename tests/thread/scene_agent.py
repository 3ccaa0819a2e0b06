"""An agent whose task names the scene that it plays. It writes down what it saw, for the tests to compare.

An ordinary client of OpenAI's API: of Kitestring it reads the environment that any agent gets. The `user` of a request
is its label, by which the tests find it again at the policy server.
"""

import http.client
import json
import os
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import hostile
from openai import APIStatusError, OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]
UNTIL = 20
"""Tries for what the policy does about every second time."""


class Notes:
    """What this agent saw, in the order of its calls."""

    def __init__(self, scene):
        self.attempt = os.environ["KITESTRING_ATTEMPT"]
        self._labels = 0
        self.seen = {
            "scene": scene,
            "attempt": self.attempt,
            "rollout": os.environ["KITESTRING_ROLLOUT"],
            "environment": dict(os.environ),
            "descriptors": hostile.own_descriptors(),
            "calls": [],
            "refusals": [],
        }

    def label(self, wish=""):
        """`wish` asks something of the proxy before the policy server."""
        self._labels += 1
        return f"{self.attempt}#{self._labels}{wish}"

    def call(self, label, model, received, headers=(), *, asked=(), delivered=True, replay=False):
        self.seen["calls"].append(
            {
                "label": label,
                "model": model,
                "received": received,
                "headers": dict(headers),
                "asked": list(asked),
                "delivered": delivered,
                "replay": replay,
            }
        )

    def refused(self, what, status, code, headers=()):
        self.seen["refusals"].append({"what": what, "status": status, "code": code, "headers": dict(headers)})

    def write(self):
        path = Path(os.environ["EVIDENCE"]) / f"{self.attempt}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.seen))
        part.replace(path)


class Agent:
    def __init__(self, notes):
        self.notes = notes
        self.client = OpenAI()
        self.model = os.environ["OPENAI_MODEL"]

    def chat(self, messages, *, label=None, asked=(), replay=False, **arguments):
        """A whole reply, or None when the call was refused."""
        label = label or self.notes.label()
        model = arguments.pop("model", self.model)
        create = self.client.chat.completions.with_raw_response.create
        try:
            raw = create(model=model, messages=messages, user=label, **arguments)
        except APIStatusError as error:
            self.notes.refused(model, error.status_code, error.code, error.response.headers)
            return None
        self.notes.call(label, model, [raw.http_response.text], raw.headers, asked=asked, replay=replay)
        return raw.parse()

    def stream(self, messages, *, label=None, asked=(), replay=False, **arguments):
        label = label or self.notes.label()
        create = self.client.chat.completions.with_raw_response.create
        raw = create(model=self.model, messages=messages, user=label, stream=True, **arguments)
        chunks = list(raw.parse())
        received = [chunk.to_json() for chunk in chunks]
        self.notes.call(label, self.model, received, raw.headers, asked=asked, replay=replay)
        return chunks

    def complete(self, prompt, **arguments):
        label = self.notes.label()
        create = self.client.completions.with_raw_response.create
        raw = create(model=self.model, prompt=prompt, user=label, **arguments)
        if arguments.get("stream"):
            self.notes.call(label, self.model, [chunk.to_json() for chunk in raw.parse()], raw.headers)
        else:
            self.notes.call(label, self.model, [raw.http_response.text], raw.headers)


def user(text):
    return {"role": "user", "content": text}


def turns(agent, _):
    """A conversation with tools."""
    messages = [user("48 boxes?")]
    for turn in range(3):
        message = agent.chat(messages, tools=TOOLS, max_tokens=32).choices[0].message
        if message.tool_calls:
            messages.append(message.model_dump(exclude_unset=True))
            messages += [{"role": "tool", "tool_call_id": c.id, "content": str(turn)} for c in message.tool_calls]
        else:
            messages += [{"role": "assistant", "content": (message.content or "")[:8]}, user("so?")]
    for _ in range(UNTIL):
        if agent.chat([user("12 boxes?")], tools=TOOLS, max_tokens=48).choices[0].message.tool_calls:
            return


def streams(agent, _):
    agent.stream([user("a")], max_tokens=24, stream_options={"include_usage": True}, asked=["usage"])
    agent.stream([user("b")], max_tokens=24, n=2)
    agent.complete("c d e", stream=True, n=2, max_tokens=16)
    for _ in range(UNTIL):
        chunks = agent.stream([user("48 boxes?")], tools=TOOLS, max_tokens=48)
        if any(choice.delta.tool_calls for chunk in chunks for choice in chunk.choices):
            return


def choices(agent, _):
    agent.chat([user("a")], n=2, max_tokens=24, seed=7, stop=["\n"])
    agent.complete("c d e", n=2, max_tokens=16)
    agent.complete([70, 71, 72], max_tokens=16)
    agent.chat([user("b")], max_tokens=8, logprobs=True, top_logprobs=2, asked=["logprobs"])
    agent.stream([user("b")], max_tokens=8, logprobs=True, asked=["logprobs"])
    agent.chat(
        [user("c")], max_tokens=8, extra_body={"return_token_ids": True}, asked=["prompt_token_ids", "token_ids"]
    )
    agent.chat([user("d")], max_tokens=8, model="gpt-4o-mini")


def together(agent, _):
    """Calls at the same time."""
    labels = [agent.notes.label() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda label: agent.chat([user("e")], label=label, max_tokens=16), labels))


def repeats(agent, _):
    """What a client does that did not see its reply: the same request once more."""
    for call in (agent.chat, agent.stream):
        label, key = agent.notes.label(), {"Idempotency-Key": agent.notes.label()}
        call([user("f")], label=label, max_tokens=12, n=2, extra_headers=key)
        call([user("f")], label=label, max_tokens=12, n=2, extra_headers=key, replay=True)
    label = agent.notes.label()
    agent.chat([user("g")], label=label, max_tokens=12)
    agent.chat([user("g")], label=label, max_tokens=12, replay=True, extra_headers={"X-Stainless-Retry-Count": "1"})
    for _ in range(2):  # without a sign of a retry they are two samples
        agent.chat([user("h")], max_tokens=12)


def leaves(agent, _):
    """Goes away in the middle of a stream, then from a reply that it does not fetch."""
    while not leave(agent):
        pass
    label = agent.notes.label()
    large = {"messages": [user("j")], "max_tokens": 128, "n": 12, "logprobs": True, "top_logprobs": 20, "user": label}
    connection = send(agent, large, narrow=True)
    connection.sock.recv(1)  # the reply has begun, and is far larger than what fits into the buffers on its way
    agent.notes.call(label, agent.model, [], delivered=False)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()

    agent.chat([user("k")], max_tokens=8)


def leave(agent):
    """True when the stream was left in its middle; a reply without text has none."""
    label = agent.notes.label(":hold")
    connection = send(agent, {"messages": [user("i")], "max_tokens": 200, "stream": True, "user": label})
    response = connection.getresponse()
    received = []
    for line in response:
        if line.startswith(b"data: {"):
            received.append(line.decode().removeprefix("data: "))
        if len(received) == 2 or line.startswith(b"data: ["):
            break
    left = json.loads(received[1])["choices"][0]["delta"].get("content") not in {None, ""}
    agent.notes.call(label, agent.model, received, response.getheaders(), delivered=not left)
    response.close()
    connection.close()
    return left


def send(agent, body, *, narrow=False):
    base = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(base.hostname, base.port, timeout=60)
    if narrow:
        connection.sock = socket.socket()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        connection.sock.connect((base.hostname, base.port))
    headers = {"Content-Type": "application/json"}
    connection.request("POST", base.path + "/chat/completions", json.dumps({"model": agent.model, **body}), headers)
    return connection


def samples(agent, _):
    """Asks for other sampling than training assumes."""
    agent.chat([user("l")], max_tokens=16, temperature=0)
    agent.stream([user("l")], max_tokens=16, top_p=0.5)
    agent.chat([user("l")], max_tokens=16, temperature=0.3, presence_penalty=1.5, extra_body={"top_k": 3})
    agent.chat([user("l")], max_tokens=16, temperature=1, top_p=1)


def update(agent, _):
    """A reply in whose middle the weights change."""
    for _ in range(8):
        chunks = agent.stream(
            [user("m")], label=agent.notes.label(":update"), max_tokens=220, n=8,
            extra_body={"return_weight_versions": True}, asked=["weight_versions"],
        )  # fmt: skip
        ends = [choice.to_dict() for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        if any(len({span["version"] for span in end["weight_versions"]}) > 1 for end in ends):
            return


def judge(agent, _):
    """Asks the judge about the policy's reply until the judge's tokens are used up."""
    reply = agent.chat([user("n")], max_tokens=8).choices[0].message.content
    for model in ("judge", "gpt-judge", "judge", "judge", "gpt-judge"):
        agent.chat([user(f"score: {reply}")], model=model, temperature=0, max_tokens=5)
    agent.chat([user("o")], max_tokens=8)


def spans(agent, _):
    """Instrumented with OpenTelemetry as it comes, and lying about who it is."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    agent.chat([user("p")], max_tokens=8)
    forged = {"kitestring.run": "forged", "kitestring.rollout": "forged", "kitestring.attempt": "forged"}
    os.environ["OTEL_RESOURCE_ATTRIBUTES"] += ",kitestring.rollout=forged,kitestring.reward=forged,team=red"
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("agent", attributes={"kitestring.mode": "forged"})
    above = TraceContextTextMapPropagator().extract({"traceparent": os.environ["TRACEPARENT"]})
    proof = {"kitestring.proof": "1:c:forged:1:forged", "kitestring.payload": "forged"}
    with tracer.start_as_current_span("look up", above, attributes={**forged, **proof, "tool": "calculator"}) as span:
        span.add_event("found", {**forged, "kitestring.reward": 9.0, "rows": 3})
    agent.notes.seen["flushed"] = provider.force_flush()
    provider.shutdown()


def gate(agent, task):
    """Keeps the run going until the tests have looked at it."""
    agent.chat([user("q")], max_tokens=8)
    Path(f"{task['signal']}.{agent.notes.attempt}").touch()
    while not Path(task["release"]).exists():
        time.sleep(0.02)
    agent.chat([user("r")], max_tokens=8)


def attack(agent, task):
    """Tries what it must not; then works like any other."""
    agent.chat([user("s")], max_tokens=8)
    hostile.attack(agent.notes, json.loads(os.environ["TARGETS"]), task)
    agent.chat([user("t")], max_tokens=8)


SCENES = {
    scene.__name__: scene
    for scene in (
        turns, streams, choices, together, repeats, leaves, samples, update, judge, spans, gate, attack,
    )
}  # fmt: skip


def main():
    task = json.loads(Path(os.environ["KITESTRING_TASK_FILE"]).read_text())
    notes = Notes(task["scene"])
    notes.seen["task"] = task
    try:
        SCENES[task["scene"]](Agent(notes), task)
    finally:
        notes.write()
    print("done")


if __name__ == "__main__":
    sys.exit(main())
