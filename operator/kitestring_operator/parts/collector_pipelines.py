"""The configs of the collector: calls into `traces/`, agents' own spans into `agent/`, acknowledged when durable.

The stock collector runs twice, once for each: it has one set of keys per process, and a flood of agents' spans must not
take the memory from the record of calls. The built-in one runs twice only where the keys differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kitestring_api import names
from kitestring_operator.observed import RunContext
from kitestring_operator.parts import credentials, pod
from kitestring_operator.parts.places import AGENT_COLLECTOR_FILE, COLLECTOR_FILE, EVERYWHERE
from kitestring_operator.parts.storage import store

AGENT_PORT = names.PORT_COLLECTOR + 1
"""Of the collector of agents' own spans, where it is a process of its own."""
HEALTH_PORT = 13133
AGENT_HEALTH_PORT = 13134

MAX_REQUEST_BYTES = 64 << 20

AGENT_STORAGE_FOLDER = f"{pod.SECRETS_FOLDER}/agent-storage"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One way through the collector."""

    name: str
    file: str
    port: int
    port_name: str
    health_port: int
    route: str
    prefix: str
    credential: str
    secret: str
    """With the keys of the storage."""
    storage_folder: str
    export_seconds: int
    """Less than its client waits."""


def kind(context: RunContext) -> Literal["contrib", "builtin"]:
    return context.spec.traces.collector.kind or context.settings.collector_kind


def is_apart(context: RunContext) -> bool:
    """Whether agents' own spans have a process of their own."""
    return kind(context) == "contrib" or context.storage.agent_secret != context.storage.traces_secret


def pipelines(context: RunContext) -> list[Pipeline]:
    """One for each process; one alone takes both kinds of spans."""
    calls = Pipeline(
        name="collector",
        file=COLLECTOR_FILE,
        port=names.PORT_COLLECTOR,
        port_name="otlp",
        health_port=HEALTH_PORT,
        route=names.ROUTE_OTLP_TRACES,
        prefix=names.PREFIX_TRACES,
        credential=credentials.COLLECTOR,
        secret=context.storage.traces_secret,
        storage_folder=pod.STORAGE_FOLDER,
        export_seconds=15,
    )
    agents = Pipeline(
        name="agent-collector",
        file=AGENT_COLLECTOR_FILE,
        port=AGENT_PORT,
        port_name="agent-otlp",
        health_port=AGENT_HEALTH_PORT,
        route=names.ROUTE_OTLP_AGENT_TRACES,
        prefix=names.PREFIX_AGENT,
        credential=credentials.AGENT,
        secret=context.storage.agent_secret,
        storage_folder=AGENT_STORAGE_FOLDER,
        export_seconds=6,
    )
    return [calls, agents] if is_apart(context) else [calls]


def configs(context: RunContext) -> Mapping[str, Mapping[str, Any]]:
    """The config of each process, by the name of its file."""
    make = _contrib if kind(context) == "contrib" else _builtin
    return {pipeline.file: make(context, pipeline) for pipeline in pipelines(context)}


def _builtin(context: RunContext, pipeline: Pipeline) -> dict[str, Any]:
    config: dict[str, Any] = {
        "listen": {"host": EVERYWHERE, "port": pipeline.port},
        "store": store(context, pipeline.storage_folder),
        "credential_file": f"{pod.KEYS_FOLDER}/{credentials.COLLECTOR}",
        "max_request_bytes": MAX_REQUEST_BYTES,
    }
    if pipeline.credential == credentials.AGENT or not is_apart(context):
        config["agent_credential_file"] = f"{pod.KEYS_FOLDER}/{credentials.AGENT}"
    return config


def _contrib(context: RunContext, pipeline: Pipeline) -> dict[str, Any]:
    """Without queue and batch processor: what is acknowledged is an object in storage, one for each request."""
    target = context.storage
    aws = target.endpoint == f"https://s3.{target.region}.amazonaws.com"
    uploader: dict[str, Any] = {
        "region": target.region,
        "s3_bucket": target.bucket,
        "s3_prefix": f"{target.prefix}/{pipeline.prefix.rstrip('/')}",
        "s3_partition_format": "%Y%m%d/%H%M",
        "s3_partition_timezone": "UTC",
        "unique_key_func_name": "uuidv7",
    }
    if not aws:
        uploader |= {
            "endpoint": target.endpoint,
            "s3_force_path_style": True,
            "disable_ssl": target.endpoint.startswith("http://"),
        }
    return {
        "receivers": {
            "otlp": {
                "protocols": {
                    "http": {
                        "endpoint": f"{EVERYWHERE}:{pipeline.port}",
                        "traces_url_path": pipeline.route,
                        "max_request_body_size": MAX_REQUEST_BYTES,
                        "auth": {"authenticator": "bearertokenauth"},
                    }
                }
            }
        },
        "processors": {
            "memory_limiter": {"check_interval": "1s", "limit_percentage": 80, "spike_limit_percentage": 20}
        },
        "exporters": {
            "awss3": {
                "marshaler": "otlp_proto",
                "timeout": f"{pipeline.export_seconds}s",
                "retry_on_failure": {
                    "enabled": True,
                    "initial_interval": "200ms",
                    "max_interval": "2s",
                    "max_elapsed_time": f"{pipeline.export_seconds}s",
                },
                "s3uploader": uploader,
            }
        },
        "extensions": {
            "bearertokenauth": {"filename": f"{pod.KEYS_FOLDER}/{pipeline.credential}"},
            "health_check": {"endpoint": f"{EVERYWHERE}:{pipeline.health_port}"},
        },
        "service": {
            "extensions": ["bearertokenauth", "health_check"],
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "processors": ["memory_limiter"], "exporters": ["awss3"]}},
        },
    }
