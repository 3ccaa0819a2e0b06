"""References to other objects: Secrets, ConfigMaps, pools, volumes, buckets."""

from pydantic import Field

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.scalars import Bucket, Key, Name, ObjectKey, Path, Token, Url


class ObjectReference(ApiModel):
    """Another object in the same namespace."""

    name: Name = Field(description="Name of the object, in the namespace of this one.")


class KeyReference(ApiModel):
    """One key of a Secret or ConfigMap in the same namespace."""

    name: Name = Field(description="Name of the Secret or ConfigMap.")
    key: Key = Field(description="Key in it.")


class VolumePath(ApiModel):
    """A path on a PersistentVolumeClaim."""

    claim_name: Name = Field(description="Name of the PersistentVolumeClaim, in the namespace of the run.")
    path: Path = Field(description="Path on the volume, relative to its root.")


class BucketObject(ApiModel):
    """An object, or all objects under a prefix, in S3-compatible storage."""

    bucket: Bucket = Field(description="Name of the bucket.")
    key: ObjectKey = Field(description="Key of the object; for a model, the prefix (folder) that holds its files.")
    endpoint: Url | None = Field(
        None,
        description="URL of the service; absent: AWS S3 of the region. Where its certificate is of a CA of your own, "
        "name a file with that CA's in SSL_CERT_FILE by trainer.template (init container fetch).",
    )
    region: Token | None = Field(
        None, description="Region of the bucket; absent: us-east-1, which services without regions take too."
    )
    credentials_secret_ref: ObjectReference | None = Field(
        None,
        description="Secret with the keys accessKeyId and secretAccessKey; required: the identity of a pod is not "
        "supported yet.",
    )
