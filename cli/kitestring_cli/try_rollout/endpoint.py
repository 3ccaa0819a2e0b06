"""The OpenAI-compatible endpoint of `--endpoint`: what it serves, and whether it reports token ids."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kitestring_api.errors import UserMistakeError

SECONDS: Final = 5.0
REPORT_IDS: Final = ("vllm", "kitestring")
"""`owned_by` of servers that report token ids, log-probabilities and versions when they are asked to."""
_SHOWN = 6


@dataclass(frozen=True)
class Endpoint:
    """`url` ends in the version (`/v1`)."""

    url: str
    model: str
    reports_ids: bool
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Listing:
    url: str
    models: Sequence[str]
    owners: frozenset[str]
    needed_key: bool


def find_endpoint(url: str, model: str | None, api_key: str | None) -> Endpoint:
    """Ask the endpoint for its models, without the key where that suffices. Raises UserMistakeError."""
    if not url.startswith(("http://", "https://")):
        raise UserMistakeError(f"--endpoint {url}: no URL; write e.g. http://127.0.0.1:8000/v1")
    listing = _listing(url.rstrip("/"), api_key)
    if listing is None:
        if model is None:
            raise UserMistakeError(f"--endpoint {url}: lists no models; name one with --model")
        return Endpoint(url.rstrip("/"), model, False, api_key)
    if model is None and len(listing.models) != 1:
        shown = ", ".join(listing.models[:_SHOWN]) + (", …" if len(listing.models) > _SHOWN else "")
        raise UserMistakeError(f"--endpoint {url}: serves {len(listing.models)} models, name one with --model: {shown}")
    # Policy servers are called without a key (they are not reachable from outside a run).
    reports_ids = bool(listing.owners.intersection(REPORT_IDS)) and not listing.needed_key
    return Endpoint(listing.url, model or listing.models[0], reports_ids and listing.url.endswith("/v1"), api_key)


def _listing(url: str, api_key: str | None) -> _Listing | None:
    """What GET /models says; None when the endpoint has no such route."""
    for base in (url, f"{url}/v1") if not url.endswith("/v1") else (url,):
        for key in dict.fromkeys((None, api_key)):
            answer = _get(f"{base}/models", key)
            if isinstance(answer, int) and answer in (401, 403):
                if key is None and api_key is None:
                    raise UserMistakeError(f"--endpoint {url}: wants an API key; set OPENAI_API_KEY")
                if key is not None:
                    raise UserMistakeError(f"--endpoint {url}: refuses the key in OPENAI_API_KEY ({answer})")
                continue
            if isinstance(answer, dict) and isinstance(answer.get("data"), list):
                cards = [card for card in answer["data"] if isinstance(card, dict) and isinstance(card.get("id"), str)]
                owners = frozenset(str(card.get("owned_by")) for card in cards)
                return _Listing(base, [card["id"] for card in cards], owners, key is not None)
            break
    return None


def _get(url: str, key: str | None) -> dict[str, Any] | int | None:
    """The JSON object there, the status of a refusal, or None for anything else. Raises UserMistakeError."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    # As the gateway calls it: without a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=SECONDS) as reply:
            answer = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserMistakeError(
            f"--endpoint {url}: cannot be reached: {reason}; start it, or correct the URL"
        ) from error
    return answer if isinstance(answer, dict) else None


def overrides_for(documents: Sequence[tuple[str, dict[str, Any]]], endpoint: Endpoint | None) -> Iterator[str]:
    """`--set` arguments that leave of a TrainingRun what one rollout needs. `documents`: (kind, data)."""
    runs = [data for kind, data in documents if kind == "TrainingRun"]
    spec = runs[0].get("spec") if len(runs) == 1 else None
    if not isinstance(spec, dict):
        return
    yield 'spec.trainer={"backend": "collect", "device": "cpu"}'
    yield "spec.storage=null"
    yield "spec.validation.every=0"
    if isinstance(spec.get("tasks"), dict):
        yield "spec.tasks.validation=null"
    if endpoint is None:
        return
    yield 'spec.inference={"backend": "cpu"}'
    policies = spec.get("policies")
    if not isinstance(policies, list) or not all(isinstance(policy, dict) for policy in policies):
        return
    place = next((index for index, policy in enumerate(policies) if policy.get("train", True)), 0)
    yield f"spec.policies={json.dumps([_served(policies[place], endpoint), *policies[:place], *policies[place + 1 :]])}"


def _served(policy: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The policy as a model that the endpoint serves."""
    kept: dict[str, Any] = {name: policy[name] for name in ("name", "aliases") if name in policy}
    return {**kept, "train": False, "endpoint": {"url": endpoint.url, "model": endpoint.model}}
