"""An agent that asks its model, stops at a barrier in the midst of its rollout, and asks again.

The first rollout of each group does not stop. The point is called after the step, in a validation after its mode too.
Standard library only.
"""

import os
import sys

from asking import ask, pause_at

question = sys.stdin.read()
answer = ask(question)
if not os.environ["KITESTRING_ROLLOUT"].endswith("-000"):
    mode = os.environ["KITESTRING_MODE"]
    pause_at(("step-" if mode == "train" else mode + "-") + os.environ["KITESTRING_STEP"])
    answer = ask(question)
print(answer)
