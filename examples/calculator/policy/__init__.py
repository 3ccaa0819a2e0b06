"""How the small policy of the calculator example is made: `make_policy.py` is the command."""
