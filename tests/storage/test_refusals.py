"""What a server of another region answers: waiting does not mend it, and the message says what does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kitestring_rollout.storage import ObjectStore, S3StoreConfig, StoreRefused, StoreUnavailable, open_store
from kitestring_rollout.storage.s3_refusals import words

MALFORMED = (
    "<Error><Code>AuthorizationHeaderMalformed</Code><Message>The authorization header is malformed; the region "
    "'us-east-1' is wrong; expecting 'eu-central-1'</Message><Region>eu-central-1</Region></Error>"
)
REDIRECT = (
    "<Error><Code>PermanentRedirect</Code><Message>The bucket must be addressed using the specified endpoint.</Message>"
    "<Endpoint>runs.s3.eu-central-1.amazonaws.com</Endpoint></Error>"
)
PRESIGNED = (
    "<Error><Code>AuthorizationQueryParametersError</Code><Message>Error parsing the X-Amz-Credential parameter; the "
    "region 'us-east-1' is wrong; expecting 'eu-central-1'</Message></Error>"
)


@dataclass
class Answers:
    """A server whose answers to a method are all the same: status, body and headers."""

    url: str = ""
    of: dict[str, tuple[int, str, dict[str, str]]] = field(default_factory=dict)


@pytest.fixture
def answers() -> Iterator[Answers]:
    given = Answers()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, body, headers = given.of[self.command]
            data = b"" if self.command == "HEAD" else body.encode()
            self.send_response(status)
            for name, value in (
                {"Content-Type": "application/xml", "Content-Length": str(len(data))} | headers
            ).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    given.url = f"127.0.0.1:{server.server_address[1]}"
    yield given
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def store(answers: Answers, tmp_path: Path) -> ObjectStore:
    (tmp_path / "key").write_text("key")
    return open_store(
        S3StoreConfig(
            kind="s3",
            endpoint=answers.url,
            bucket="runs",
            secure=False,
            access_key_file=tmp_path / "key",
            secret_key_file=tmp_path / "key",
        )
    )


@pytest.mark.parametrize(("status", "body"), [(400, MALFORMED), (301, REDIRECT)])
def test_the_wrong_region_is_a_refusal(answers: Answers, store: ObjectStore, status: int, body: str) -> None:
    answers.of = dict.fromkeys(("GET", "PUT"), (status, body, {}))
    calls: tuple[Callable[[], object], ...] = (
        lambda: list(store.list("state/")),
        lambda: store.get("a"),
        lambda: store.put("a", b"x"),
    )
    for call in calls:
        with pytest.raises(
            StoreRefused, match=r"eu-central-1|addressed using.*name the bucket's own region and endpoint"
        ):
            call()


def test_a_region_that_only_a_header_names(answers: Answers, store: ObjectStore) -> None:
    answers.of = {"HEAD": (400, "", {"x-amz-bucket-region": "eu-central-1"})}
    with pytest.raises(StoreRefused, match=r"the bucket's region is eu-central-1, not us-east-1: set region to it$"):
        store.exists("a")


def test_a_conditional_put_says_why(answers: Answers, store: ObjectStore) -> None:
    answers.of = {"HEAD": (404, "", {}), "PUT": (400, PRESIGNED, {})}
    with pytest.raises(StoreRefused, match=r"AuthorizationQueryParametersError: .*expecting 'eu-central-1'"):
        store.put("a", b"x", if_absent=True)
    for status, body in ((503, "busy"), (400, "<Error><Code>RequestTimeout</Code></Error>")):
        answers.of["PUT"] = (status, body, {})
        with pytest.raises(StoreUnavailable) as raised:
            store.put("a", b"x", if_absent=True)
        assert not isinstance(raised.value, StoreRefused)


def test_what_may_pass_is_no_refusal(answers: Answers, store: ObjectStore) -> None:
    """Its own region in an answer, an error of the moment, a page of something else at that address."""
    own = {"x-amz-bucket-region": "us-east-1"}
    for answer in (
        (400, "<Error><Code>RequestTimeout</Code></Error>", own),
        (403, "<Error><Code>RequestTimeTooSkewed</Code></Error>", {}),
        (404, "<html/>", {"Content-Type": "text/html"}),
    ):
        answers.of = {"GET": answer}
        with pytest.raises(StoreUnavailable) as raised:
            store.get("a")
        assert not isinstance(raised.value, StoreRefused)


def test_a_certificate_that_nobody_knows_is_said_with_the_remedy() -> None:
    error = OSError(
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate"
    )
    assert words(error).endswith("SSL_CERT_FILE")
    assert words(OSError("connection refused")) == "connection refused"
