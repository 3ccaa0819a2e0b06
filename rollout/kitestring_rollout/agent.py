"""For agents that reward themselves: `from kitestring_rollout.agent import reward`. Standard library only.

Any language does the same: POST {"value": 0.5} to $KITESTRING_BASE_URL/rewards.
"""

from __future__ import annotations

import json
import os
import sys

_BASE_URL = "KITESTRING_BASE_URL"
_SECONDS = 30.0


def reward(value: float, name: str = "reward") -> bool:
    """Posts a reward for this rollout; True when it was accepted.

    Outside a run it does nothing and returns False, so that it may stay in the agent. A reward that is refused (no
    finite number, posted twice, not asked for by the pool) returns False and says why on standard error; an agent
    should not fail for it. The reward of the rollout is the one named `reward`.
    """
    base = os.environ.get(_BASE_URL)
    if not base:
        return False
    import urllib.error  # noqa: PLC0415 (outside a run this costs nothing)
    import urllib.request  # noqa: PLC0415

    body = json.dumps({"value": value, "name": name}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base}/rewards", data=body, headers=headers, method="POST")  # noqa: S310
    # The gateway is near: a proxy for the world outside is not asked.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        sys.stderr.write(f"kitestring: reward refused: HTTP {error.code}: {error.read(500).decode(errors='replace')}\n")
        return False
    except OSError as error:
        sys.stderr.write(f"kitestring: reward not delivered: {error}\n")
        return False
    return True
