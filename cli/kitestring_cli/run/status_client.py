"""The status route of a run's trainer."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from types import TracebackType

from kitestring_cli.run.folder import RunFolder
from kitestring_rollout.protocol.run_status import RunStatus


class StatusClient:
    """Reads GET /run/v1/status; while the trainer does not answer yet, or any more, there is none."""

    def __init__(self, url: str, folder: RunFolder) -> None:
        credential = folder.credential("queue").read_text().strip()
        self._request = urllib.request.Request(url, headers={"Authorization": f"Bearer {credential}"})  # noqa: S310
        # The loopback interface is never reached through a proxy.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._opener.close()

    def read(self) -> RunStatus | None:
        """The status now; None when the trainer cannot be reached."""
        try:
            with self._opener.open(self._request, timeout=2.0) as response:
                return RunStatus.model_validate_json(response.read())
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError):
            return None
