"""Models of the Hugging Face hub into folders. Unverified against the hub itself; tested against a stand-in."""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kitestring_api.errors import UserMistakeError
from kitestring_rollout.fetch.config import HuggingFaceSource
from kitestring_rollout.storage.scratch import remove_abandoned, scratch_beside

_WANTED: Final = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
"""What a model is loaded from; not the copies of its weights in other formats."""


class HubUnavailable(Exception):
    """The hub does not answer now, or broke off."""


def fetch_from_hub(source: HuggingFaceSource, to: Path, field: str) -> int:
    """Bring the model to folder `to`, which is not there; the bytes brought.

    Raises UserMistakeError naming `field`, HubUnavailable, OSError of the disk.
    """
    token = _token(source, field)
    remove_abandoned(to)
    with scratch_beside(to) as scratch:
        scratch.mkdir()
        if "HF_HOME" not in os.environ:  # the user's home folder may be read-only
            os.environ["HF_HOME"] = _home().name
        _download(source, token, scratch, field)
        shutil.rmtree(scratch / ".cache", ignore_errors=True)  # of the hub's client
        files = [path for path in scratch.rglob("*") if path.is_file()]
        if not any(path.suffix == ".safetensors" for path in files):
            raise UserMistakeError(f"{field}.id: {source.id} has no safetensors; name a model that has")
        return sum(path.stat().st_size for path in files)


@cache
def _home() -> TemporaryDirectory[str]:
    """Removed when the process ends; the hub's client reads the variable once."""
    return TemporaryDirectory(prefix="huggingface-")


def _token(source: HuggingFaceSource, field: str) -> str | None:
    if source.token_file is None:
        return None
    try:
        return source.token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserMistakeError(f"{field}.token_file: cannot read {source.token_file}: {error}") from error


def _download(source: HuggingFaceSource, token: str | None, folder: Path, field: str) -> None:
    try:
        # In the trainer's environment only, which has it for transformers.
        import httpx  # noqa: PLC0415
        from huggingface_hub import snapshot_download  # noqa: PLC0415
        from huggingface_hub.errors import (  # noqa: PLC0415
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415
    except ImportError as error:
        raise UserMistakeError(
            f"{field}: this environment has no huggingface_hub; run fetch in the trainer's image"
        ) from error
    disable_progress_bars()
    try:
        snapshot_download(
            source.id, revision=source.revision, local_dir=folder, token=token or False, allow_patterns=_WANTED
        )
    except GatedRepoError as error:
        raise UserMistakeError(
            f"{field}.id: {source.id} asks for consent: give it on the hub, and name a Secret with its token in "
            "tokenSecretRef"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserMistakeError(
            f"{field}.id: the hub has no model {source.id}, or the token may not read it; check both"
        ) from error
    except RevisionNotFoundError as error:
        raise UserMistakeError(f"{field}.revision: {source.id} has no revision {source.revision}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError) as error:
        raise HubUnavailable(f"the hub cannot serve {source.id}: {str(error).splitlines()[0]}") from error
