"""Which answers of an S3 server waiting does not mend, and what does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_CREDENTIALS: Final = "use credentials that have the rights for it"
_BUCKET: Final = "name a bucket that is there"
_PLACE: Final = "name the bucket's own region and endpoint"

_REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "AccessDenied": _CREDENTIALS,
        "AccountProblem": _CREDENTIALS,
        "AllAccessDisabled": _CREDENTIALS,
        "InvalidAccessKeyId": _CREDENTIALS,
        "NotSignedUp": _CREDENTIALS,
        "SignatureDoesNotMatch": _CREDENTIALS,
        "NoSuchBucket": _BUCKET,
        "InvalidBucketName": _BUCKET,
        "AuthorizationHeaderMalformed": f"{_PLACE}, and check the access key",
        "AuthorizationQueryParametersError": f"{_PLACE}, and check the access key",
        "IllegalLocationConstraintException": _PLACE,
        "PermanentRedirect": _PLACE,
    }
)
_REGION_HEADER: Final = "x-amz-bucket-region"


def remedy(code: str | None, headers: Mapping[str, str], region: str) -> str | None:
    """What mends this error; None: it may pass. `headers`: of the answer. `region`: the one that was asked by.

    AWS names the bucket's region in a header, also where its answer is to HEAD and has no code.
    """
    there = headers.get(_REGION_HEADER)
    if there is not None and there != region:
        return f"the bucket's region is {there}, not {region}: set region to it"
    return _REMEDIES.get(code or "")


def words(error: Exception) -> str:
    """What went wrong on the way to the server, with the remedy for what no server answers to."""
    said = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        said += "; where the server's certificate is of a CA of your own, name a file with that CA's in SSL_CERT_FILE"
    return said
