"""An agent that asks its model and then does what its task says. Standard library only."""

import os
import sys

from asking import ask, pause_at

question = sys.stdin.read()
answer = ask(question)
if question == "stop at the barrier":
    pause_at("step-" + os.environ["KITESTRING_STEP"])
if question == "fill the memory":
    filled = []
    while True:
        filled.append(b"x" * (1 << 24))
print(answer)
