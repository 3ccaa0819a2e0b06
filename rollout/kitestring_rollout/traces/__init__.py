"""Traces of rollouts: records, their encoding as OpenTelemetry spans, acknowledged export, and reading back."""
