"""Values that the chart refuses, and what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

BY_SCHEMA = {
    "replicas=0": "at '/replicas': minimum: got 0, want 1",
    "replica=3": "additional properties 'replica' not allowed",
    "images.pullPolicy=Sometimes": "at '/images/pullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'",
    "images.prefix=registry.example.com": "at '/images/prefix': 'registry.example.com' does not match pattern",
    "namespaces={Team_A}": "at '/namespaces/0': 'Team_A' does not match pattern",
    "defaultStorage.endpoint=minio:9000": "at '/defaultStorage/endpoint': 'minio:9000' does not match pattern",
    "defaultStorage.endpoint=http://s3.test/a": "at '/defaultStorage/endpoint': 'http://s3.test/a' does not match",
    "defaultStorage.prefix=team a": "at '/defaultStorage/prefix': 'team a' does not match pattern",
    "defaultStorage.existingSecret=Keys": "at '/defaultStorage/existingSecret': 'Keys' does not match pattern",
    "settings.collectorKind=jaeger": "at '/settings/collectorKind': value must be one of 'contrib', 'builtin'",
    "settings.leaseSeconds=1": "at '/settings/leaseSeconds': minimum: got 1, want 3",
    "settings.defaultTemplates.agent.spec=x": "additional properties 'agent' not allowed",
    "seaweedfs.persistence.size=big": "at '/seaweedfs/persistence/size': 'big' does not match pattern",
}

BY_TEMPLATE = {
    ("defaultStorage.bucket=runs",): (
        'defaultStorage.bucket: found "runs" and no keys; '
        "set defaultStorage.existingSecret, or accessKeyId and secretAccessKey"
    ),
    ("defaultStorage.bucket=runs", "defaultStorage.accessKeyId=a"): (
        'defaultStorage.bucket: found "runs" and no keys; '
        "set defaultStorage.existingSecret, or accessKeyId and secretAccessKey"
    ),
    ("defaultStorage.bucket=runs", "defaultStorage.existingSecret=keys", "defaultStorage.accessKeyId=a"): (
        'defaultStorage.existingSecret: found "keys", and accessKeyId or secretAccessKey too; use one of the two'
    ),
    ("defaultStorage.bucket=runs", "defaultStorage.existingSecret=keys", "seaweedfs.enabled=true"): (
        "seaweedfs.enabled: found true, and defaultStorage.bucket is set; use one of the two"
    ),
    ("defaultStorage.endpoint=https://s3.example.com", "seaweedfs.enabled=true"): (
        "seaweedfs.enabled: found true, and defaultStorage.endpoint is set; use one of the two"
    ),
    ("defaultStorage.existingSecret=keys",): (
        "defaultStorage.bucket: found nothing, and defaultStorage.existingSecret is set; "
        "name the bucket, or set none of them"
    ),
    ("serviceAccount.create=false",): (
        "serviceAccount.name: found nothing, and serviceAccount.create is false; "
        "name the ServiceAccount that the operator is to use"
    ),
}


@pytest.mark.parametrize(("setting", "message"), BY_SCHEMA.items(), ids=BY_SCHEMA)
def test_the_schema_refuses(refusal: Callable[..., str], setting: str, message: str) -> None:
    assert message in refusal(setting)


@pytest.mark.parametrize(("settings", "message"), BY_TEMPLATE.items(), ids=map(" ".join, BY_TEMPLATE))
def test_the_templates_refuse_what_contradicts_itself(
    refusal: Callable[..., str], settings: tuple[str, ...], message: str
) -> None:
    assert message in refusal(*settings)
