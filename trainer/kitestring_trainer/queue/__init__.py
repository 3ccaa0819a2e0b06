"""The rollout queue: the only place that opens and closes attempts.

`state.py` is the protocol as a pure state machine; `service.py` speaks it over HTTP, `gateways.py` to the gateways,
`closing.py` turns the end of an agent into a closed attempt, `proofs.py` waits for its proof in object storage.
"""
