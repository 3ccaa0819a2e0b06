"""Where the objects of a run lie, and which Secret opens which part of them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kitestring_api.errors import UserMistakeError
from kitestring_api.v1alpha1 import TrainingRunSpec
from kitestring_api.v1alpha1.storage import Storage
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext, StorageTarget
from kitestring_operator.settings import DefaultStorage, Settings

AWS_REGION = "us-east-1"


class Place(NamedTuple):
    """Where the objects of a run lie."""

    bucket: str
    prefix: str
    endpoint: str
    """URL."""
    region: str

    def is_as(self, other: Place) -> bool:
        """Whether both are the same, in whatever words."""
        return self.has_bucket_of(other) and (self.prefix, self.region) == (other.prefix, other.region)

    def has_bucket_of(self, other: Place) -> bool:
        """Whether the same keys open both."""
        one, two = urlsplit(self.endpoint), urlsplit(other.endpoint)
        return (one.scheme, one.netloc, self.bucket) == (two.scheme, two.netloc, other.bucket)


def storage_target(
    settings: Settings, name: str, uid: str, spec: TrainingRunSpec, kept: Place | None = None
) -> StorageTarget:
    """The storage that the run names, or the installation's. Raises UserMistakeError where there is neither.

    `kept`: where a run that has started began: it stays there, also when the installation's storage is another since.
    """
    run = identity.run_id(name, uid)
    given = spec.storage
    if given is None:
        place = _of_installation(settings, run)
        if kept is not None and not (place is not None and place.is_as(kept)):
            place = kept
        if place is None:
            raise UserMistakeError(
                "spec.storage: found nothing, and the installation has no default storage; name a bucket and a Secret "
                "with its keys, or set defaultStorage in the values of the chart"
            )
        own = identity.storage_name(name)
        secrets = dict.fromkeys(("traces", "agent", "weights", "trainer"), own)
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
        place = _place(given, run)
    return StorageTarget(
        bucket=place.bucket,
        prefix=place.prefix,
        endpoint=place.endpoint,
        region=place.region,
        traces_secret=secrets["traces"],
        agent_secret=secrets["agent"],
        weights_secret=secrets["weights"],
        trainer_secret=secrets["trainer"],
    )


def _of_installation(settings: Settings, run: str) -> Place | None:
    return None if settings.default_storage is None else _place(settings.default_storage, run)


def _place(given: Storage | DefaultStorage, run: str) -> Place:
    region = given.region or AWS_REGION
    return Place(
        bucket=given.bucket,
        prefix="/".join(part for part in ((given.prefix or "").strip("/"), run) if part),
        endpoint=given.endpoint or f"https://s3.{region}.amazonaws.com",
        region=region,
    )


def storage_secret(context: RunContext) -> Manifest | None:
    """The keys of the installation's storage, for the run's pods; None where the run names its own storage.

    None also where the installation's is another than at the start of the run: its keys open nothing of this one.
    """
    if context.spec.storage is not None:
        return None
    target, default = context.storage, _of_installation(context.settings, context.run_id)
    place = Place(target.bucket, target.prefix, target.endpoint, target.region)
    if default is None or not default.has_bucket_of(place):
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


def place_of(store: Mapping[str, Any]) -> Place:
    """The place that `store` wrote into a config. Raises KeyError."""
    scheme = "https" if store["secure"] else "http"
    return Place(store["bucket"], store["prefix"], f"{scheme}://{store['endpoint']}", store["region"])


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
