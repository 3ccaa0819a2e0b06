"""Beside a policy server: the only listener on the pod's address, and what keeps the server's weights current."""
