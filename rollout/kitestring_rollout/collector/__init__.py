"""The built-in collector: OTLP over HTTP in, one durable object per request out."""
