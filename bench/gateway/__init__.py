"""Gateway benchmark: throughput and latency beside a bare aiohttp hop, and streaming."""
