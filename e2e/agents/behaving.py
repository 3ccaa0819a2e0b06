"""An agent whose task says how it behaves, by the number of the rollout in its group or by the step.

Standard library only.
"""

import json
import os
import socket
import sys
import time


def pause_at(point):
    host, port = os.environ["BARRIER"].split(":")
    rollout = os.environ["KITESTRING_ROLLOUT"]
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.settimeout(None)
                connection.sendall(json.dumps({"at": point, "rollout": rollout}).encode() + b"\n")
                if connection.recv(1):
                    return
        except OSError:
            time.sleep(0.1)  # the pod's network is only just being made


task = json.loads(sys.argv[1])
behaviours = task["do"]
in_group, step = int(os.environ["KITESTRING_ROLLOUT"].rsplit("-", 1)[1]), int(os.environ["KITESTRING_STEP"]) - 1
behaviour = behaviours[(step if task.get("by") == "step" else in_group) % len(behaviours)]
if behaviour == "fail":
    sys.exit("I give up")
if behaviour == "hog":
    hoard = bytearray(1 << 30)
    hoard[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * len(hoard[:: os.sysconf("SC_PAGE_SIZE")])
if behaviour == "stop":
    pause_at("stop")
sys.stdout.write(task["text"])
