"""Where the objects of a run lie, and which Secret opens which part of them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kitestring_api.errors import UserMistakeError
from kitestring_api.v1alpha1 import TrainingRunSpec
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext, StorageTarget
from kitestring_operator.settings import Settings

AWS_REGION = "us-east-1"


def storage_target(settings: Settings, name: str, uid: str, spec: TrainingRunSpec) -> StorageTarget:
    """The storage that the run names, or the installation's. Raises UserMistakeError where there is neither."""
    run = identity.run_id(name, uid)
    given = spec.storage
    if given is None:
        default = settings.default_storage
        if default is None:
            raise UserMistakeError(
                "spec.storage: found nothing, and the installation has no default storage; name a bucket and a Secret "
                "with its keys, or set defaultStorage in the values of the chart"
            )
        own = identity.storage_name(name)
        secrets = dict.fromkeys(("traces", "agent", "weights", "trainer"), own)
        place = (default.bucket, default.prefix, default.endpoint, default.region)
    else:
        secrets = {}
        for part in ("traces", "agent", "weights", "trainer"):
            reference = getattr(given.credentials, part, None) or given.credentials_secret_ref
            if reference is None:
                raise UserMistakeError(
                    f"spec.storage.credentials.{part}: found nothing, and no credentialsSecretRef; name a Secret with "
                    "the keys accessKeyId and secretAccessKey in one of them"
                )
            secrets[part] = reference.name
        place = (given.bucket, given.prefix, given.endpoint, given.region)
    bucket, prefix, endpoint, region = place
    region = region or AWS_REGION
    return StorageTarget(
        bucket=bucket,
        prefix="/".join(part for part in ((prefix or "").strip("/"), run) if part),
        endpoint=endpoint or f"https://s3.{region}.amazonaws.com",
        region=region,
        traces_secret=secrets["traces"],
        agent_secret=secrets["agent"],
        weights_secret=secrets["weights"],
        trainer_secret=secrets["trainer"],
    )


def storage_secret(context: RunContext) -> Manifest | None:
    """The keys of the installation's storage, for the run's pods; None where the run names its own storage."""
    if context.spec.storage is not None:
        return None
    keys = context.settings.storage_keys
    assert keys is not None, "settings with a default storage are loaded with its keys"
    data = {
        "accessKeyId": keys.access_key_id.get_secret_value(),
        "secretAccessKey": keys.secret_access_key.get_secret_value(),
    }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": identity.metadata(context, identity.storage_name(context.name)),
        "type": "Opaque",
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
    }


def s3_address(endpoint: str, region: str, field: str) -> dict[str, Any]:
    """How the config files of our parts say it: `endpoint` without a scheme, `secure` for HTTPS. `field`: that of it.

    Raises UserMistakeError for a path, which a service of buckets cannot have.
    """
    url = urlsplit(endpoint)
    if url.path.strip("/") or url.query or url.username:
        raise UserMistakeError(
            f"{field}: found {endpoint}; allowed: http(s)://host or http(s)://host:port; what comes after the host "
            "belongs into the prefix or key"
        )
    return {"endpoint": url.netloc, "region": region, "secure": url.scheme == "https"}


def endpoint_field(context: RunContext) -> str:
    """Where a user says at which URL the run's storage is."""
    if context.spec.storage is not None:
        return "spec.storage.endpoint"
    return "defaultStorage.endpoint in the values of the installation's chart"


def store(context: RunContext, folder: str) -> Mapping[str, Any]:
    """The run's part of the storage, opened with the keys in `folder`, as every part's config has it."""
    target = context.storage
    return s3_address(target.endpoint, target.region, endpoint_field(context)) | {
        "kind": "s3",
        "bucket": target.bucket,
        "prefix": target.prefix,
        "access_key_file": f"{folder}/accessKeyId",
        "secret_key_file": f"{folder}/secretAccessKey",
    }
