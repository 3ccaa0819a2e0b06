"""An agent whose task says how it behaves, by the number of the rollout in its group or by the step.

Standard library only.
"""

import json
import os
import sys

from asking import pause_at

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
