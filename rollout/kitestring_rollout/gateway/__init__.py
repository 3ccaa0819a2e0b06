"""The gateway: the only way from an agent to a model. Captures every call of an attempt; see docs/gateway.md."""
