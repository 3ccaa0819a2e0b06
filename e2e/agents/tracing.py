"""An agent that asks its model, sends a span of its own, and is right every other time. Standard library only."""

import os
import sys
import urllib.request

from asking import ask


def field(number, value):
    """A field of a Protocol Buffers message, of less than 128 bytes."""
    return bytes([number << 3 | 2, len(value)]) + value


question = sys.stdin.read()
ask(question)
span = field(1, os.urandom(16)) + field(2, os.urandom(8)) + field(5, b"look up")
request = urllib.request.Request(
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] + "/v1/traces",
    field(1, field(2, field(2, span))),
    {"Content-Type": "application/x-protobuf"},
)
urllib.request.urlopen(request, timeout=30).close()
print(question if int(os.environ["KITESTRING_ROLLOUT"][-1]) % 2 else "I do not know")
