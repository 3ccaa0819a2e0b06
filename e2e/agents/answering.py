"""The smallest agent: asks the model once and prints what it says."""

import sys

from asking import ask

print(ask(sys.stdin.read()))
