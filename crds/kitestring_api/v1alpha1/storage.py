"""Object storage: the only durable state of a run besides its resources."""

from pydantic import Field

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.references import ObjectReference
from kitestring_api.v1alpha1.scalars import Bucket, ObjectKey, Token, Url


class StorageCredentials(ApiModel):
    """Secrets with the keys accessKeyId and secretAccessKey, one for each part of a run's prefix.

    Gateway, agents and workers have none.
    """

    traces: ObjectReference | None = Field(None, description="Of the collector: puts below traces/.")
    agent: ObjectReference | None = Field(None, description="Of the collector of agents' own spans: puts below agent/.")
    weights: ObjectReference | None = Field(None, description="Of the policy servers: gets and lists below weights/.")
    trainer: ObjectReference | None = Field(
        None,
        description="Of the trainer: everything below state/, weights/ and checkpoints/; gets and lists below traces/.",
    )


class Storage(ApiModel):
    """A bucket of S3-compatible storage and the prefix in it under which runs are kept."""

    bucket: Bucket = Field(description="Name of the bucket; it must exist.")
    prefix: ObjectKey | None = Field(
        None, description="Prefix of all keys; the name of the run is put after it. Absent: none."
    )
    endpoint: Url | None = Field(
        None,
        description="URL of the service; absent: AWS S3 of the region. Where its certificate is of a CA of your own, "
        "name a file with that CA's in SSL_CERT_FILE by the templates of trainer, inference and traces.collector.",
    )
    region: Token | None = Field(
        None, description="Region of the bucket; absent: us-east-1, which services without regions take too."
    )
    credentials_secret_ref: ObjectReference | None = Field(
        None,
        description="Secret with the keys accessKeyId and secretAccessKey; required unless credentials names all four: "
        "the identity of a pod is not supported yet.",
    )
    credentials: StorageCredentials | None = Field(
        None, description="A Secret for each part of the prefix; one that is absent: credentialsSecretRef."
    )
