"""The sidecar before a stand-in for vLLM: what passes, what does not, and which weights answer as which version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from kitestring_api.errors import UserMistakeError
from kitestring_rollout.policy_sidecar.process import running
from kitestring_rollout.policy_sidecar.versions import Versions
from kitestring_rollout.storage import ObjectStore
from kitestring_rollout.storage.published_weights import CURRENT, set_current
from tests.policy_sidecar.conftest import Pod

MakePod = Callable[..., Awaitable[Pod]]


# --- the start ------------------------------------------------------------------------------------------------------


async def test_the_server_starts_on_the_first_weights_once_they_are_whole(make_pod: MakePod) -> None:
    pod = await make_pod()
    await pod.engine.kill()
    pod.store.delete(CURRENT)
    async with pod.sidecar():
        assert (await pod.get("/startup"))[0] == 503
        assert (await pod.get("/health"))[0] == 200
        assert not pod.folder.joinpath("initial").exists()
        pod.publish("1.0")

        async def started() -> bool:
            return (await pod.get("/startup"))[0] == 200

        await pod.until(started)
        assert (pod.folder / "initial" / "weights").read_text() == "w1.0"
        assert (await pod.get("/ready"))[1] == {"status": "the server is away"}
        assert (await pod.complete())[0] == 503
        await pod.engine.start()
        await pod.ready()
        assert (await pod.complete())[1]["choices"][0]["text"] == "w1.0 w1.0"
    assert not [path for path in pod.folder.iterdir() if path.name.startswith(".")]


async def test_no_call_reaches_weights_that_are_not_of_the_run(make_pod: MakePod) -> None:
    """The server is up on what it was started with; what it would generate is of no version."""
    pod = await make_pod()
    pod.store.delete(CURRENT)
    async with pod.sidecar():
        assert (await pod.complete())[0] == 503
        pod.publish("1.0")
        await pod.ready()
    assert not [body for body in pod.engine.bodies if body.get("max_tokens") == 2]


async def test_a_push_while_the_first_weights_come_leaves_no_link_to_nothing(
    make_pod: MakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await make_pod()
    await pod.engine.kill()  # it starts on the link
    begun, go_on, bring = threading.Event(), threading.Event(), Versions.bring

    def slow(self: Versions, store: ObjectStore, version: str) -> None:
        begun.set()
        go_on.wait(20)
        bring(self, store, version)

    monkeypatch.setattr(Versions, "bring", slow)
    async with pod.sidecar():
        await asyncio.to_thread(begun.wait, 20)
        pod.publish("1.1")
        pushing = asyncio.create_task(pod.push("1.1"))
        await pod.until(lambda: _is(pod, "1.1"))
        go_on.set()
        await pod.until(lambda: _linked(pod))
        assert (pod.folder / "initial").resolve(strict=True).name == "1.0"
        assert (await pushing)[0] == 503
        await pod.engine.start()
        await pod.ready()
    assert pod.engine.weights == "w1.1"


async def _is(pod: Pod, current: str) -> bool:
    return pod.keeper.current == current


async def _linked(pod: Pod) -> bool:
    return pod.keeper.linked


async def test_mistakes_of_the_config_are_said_in_one_line(make_pod: MakePod, tmp_path: Path) -> None:
    pod = await make_pod()
    (tmp_path / "file").write_text("")
    for changes, said in (
        ({"credential_file": str(tmp_path / "nowhere")}, "credential_file: cannot read"),
        ({"folder": str(tmp_path / "file")}, "folder: "),
        ({"listen": {"port": pod.engine.port}}, f"listen.port: 127.0.0.1:{pod.engine.port} is taken"),
    ):
        with pytest.raises(UserMistakeError, match=said):
            async with running(pod.config(**changes)):
                pass


# --- what passes ----------------------------------------------------------------------------------------------------


OTHER_ROUTES = [
    "/pause?mode=abort",
    "/resume",
    "/is_paused",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/sleep",
    "/v1/load_lora_adapter",
    "/tokenize",
    "/inference/v1/generate",
    "/v1/completions/../../pause",
    "/v1/completions/%2e%2e/%2e%2e/pause",
    "//pause",
    "/v1/completions%3f/../../resume",
    "/",
]


async def test_no_other_route_of_the_server_can_be_reached(pod: Pod) -> None:
    def reached() -> list[str]:
        return [asked for asked in pod.engine.asked if asked not in ("GET /health", "GET /metrics")]

    before = len(reached())
    for path in OTHER_ROUTES:
        for method in ("GET", "POST", "PUT", "DELETE"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(pod.url.rpartition(":")[2]))
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
            writer.write(head.encode())
            assert int((await reader.read()).split()[1]) in (404, 405), (method, path)
            writer.close()
    assert reached()[before:] == []


async def test_the_clients_headers_stay_outside(pod: Pod) -> None:
    """Neither may a client say whose version it got, nor does the server see credentials."""
    async with pod.http.post(
        f"{pod.url}/v1/completions?x=1",
        json={"max_tokens": 1},
        headers={"Authorization": "Bearer agent", "X-Kitestring-Policy-Version": "9.9"},
    ) as reply:
        assert reply.status == 200
        assert "X-Kitestring-Policy-Version" not in reply.headers
    assert pod.engine.asked.count("POST /v1/completions") == 2  # and the sidecar's own question
    assert not [asked for asked in pod.engine.asked if "x=1" in asked]


async def test_what_the_server_says_of_itself_passes(pod: Pod) -> None:
    assert (await pod.get("/v1/models"))[1]["data"] == [{"id": "policy"}]
    assert "process_start_time_seconds" in (await pod.get("/metrics"))[1]
    assert (await pod.get("/weight_info"))[1] == {"weight_version": "1.0"}
    assert (await pod.get("/server/health"))[0] == 200
    pod.engine.problems["/health"] = [503]
    assert (await pod.get("/server/health"))[0] == 503
    assert (await pod.get("/health"))[0] == 200


async def test_a_stream_passes_chunk_by_chunk(pod: Pod) -> None:
    pod.engine.go_on.clear()
    async with pod.http.post(f"{pod.url}/v1/completions", json={"stream": True}) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert await asyncio.wait_for(reply.content.readany(), 5) == b"data: 0 w1.0\n\n"
        pod.engine.go_on.set()
        assert (await reply.content.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_the_generation(pod: Pod, stream: bool) -> None:
    pod.engine.go_on.clear()
    call = asyncio.ensure_future(pod.complete(stream=stream))
    await asyncio.wait_for(pod.engine.arrived.wait(), 5)
    call.cancel()
    await asyncio.wait_for(pod.engine.aborted.wait(), 5)


async def test_a_stream_that_breaks_is_seen_to_break(pod: Pod) -> None:
    pod.engine.go_on.clear()
    async with pod.http.post(f"{pod.url}/v1/completions", json={"stream": True}) as reply:
        await asyncio.wait_for(reply.content.readany(), 5)
        await pod.engine.kill()
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.content.read()


async def test_a_call_whose_server_dies_is_503(pod: Pod) -> None:
    pod.engine.go_on.clear()
    call = asyncio.ensure_future(pod.complete())
    await asyncio.wait_for(pod.engine.arrived.wait(), 5)
    await pod.engine.kill()
    status, body, _ = await call
    assert (status, body["error"]["code"]) == (503, 503)
    assert (await pod.complete())[0] == 503
    assert (await pod.get("/v1/models"))[0] == 503
    assert (await pod.get("/health"))[0] == 200


async def test_errors_of_the_server_pass(pod: Pod) -> None:
    pod.engine.problems["/v1/completions"] = [400]
    status, body, _ = await pod.complete()
    assert (status, body["error"]["message"]) == (400, "told to fail")


async def test_a_body_over_the_bound_is_refused(make_pod: MakePod) -> None:
    pod = await make_pod()
    async with pod.sidecar(max_body_bytes=1000):
        await pod.ready()
        async with pod.http.post(f"{pod.url}/v1/completions", data=b"x" * 2000) as reply:
            assert reply.status == 413


# --- new weights ----------------------------------------------------------------------------------------------------


async def test_a_push_is_served_and_old_versions_go(pod: Pod) -> None:
    epoch = (await pod.status())["epoch"]
    for number in range(1, 4):
        version = f"1.{number}"
        pod.publish(version)
        assert await pod.push(version) == (200, {"version": version, "epoch": epoch})
        assert (await pod.status()) == {"version": version, "epoch": epoch, "current": version}
        (choice,) = (await pod.complete())[1]["choices"]
        assert choice["text"] == f"w{version} w{version}"
        assert {span["version"] for span in choice["weight_versions"]} == {version}
        assert (await pod.get("/ready"))[0] == 200
    assert {path.name for path in pod.folder.iterdir()} == {"1.2", "1.3", "initial"}
    assert (pod.folder / "initial").readlink() == Path("1.3")
    assert await pod.push("1.3") == (200, {"version": "1.3", "epoch": epoch})  # asked again: nothing to do
    assert pod.engine.asked.count("POST /collective_rpc") == 4


async def test_a_call_in_flight_is_kept_and_says_which_version_made_what(pod: Pod) -> None:
    pod.engine.go_on.clear()
    call = asyncio.ensure_future(pod.complete())
    await asyncio.wait_for(pod.engine.arrived.wait(), 5)
    pod.publish("1.1")
    assert (await pod.push("1.1"))[0] == 200
    pod.engine.go_on.set()
    (choice,) = (await call)[1]["choices"]
    assert choice["text"] == "w1.0 w1.1"
    assert [span["version"] for span in choice["weight_versions"]] == ["1.0", "1.1"]
    assert "POST /pause?mode=keep" in pod.engine.asked


async def test_a_server_that_tells_no_versions_gets_new_weights_between_calls(old_pod: Pod) -> None:
    """Then the header says the version of the whole reply."""
    pod = old_pod
    assert (await pod.complete())[2] == "1.0"
    pod.engine.go_on.clear()
    first = asyncio.ensure_future(pod.complete())
    await asyncio.wait_for(pod.engine.arrived.wait(), 5)
    pod.publish("1.1")
    push = asyncio.ensure_future(pod.push("1.1"))

    async def held() -> bool:
        return pod.keeper.gate.held

    await pod.until(held)
    second = asyncio.ensure_future(pod.complete())

    async def waits() -> bool:
        return pod.keeper.gate.waiting == 1

    await pod.until(waits)
    assert not (first.done() or push.done() or second.done())
    assert pod.engine.asked.count("POST /collective_rpc") == 1  # that of the start
    pod.engine.go_on.set()
    assert (await push)[0] == 200
    for call, version in ((first, "1.0"), (second, "1.1")):
        status, body, header = await call
        assert (status, header) == (200, version)
        assert body["choices"][0]["text"] == f"w{version} w{version}"
    assert (await pod.get("/weight_info"))[1] == {"weight_version": "1.1"}


async def test_only_the_trainer_may_change_weights(pod: Pod) -> None:
    pod.publish("1.1")
    assert (await pod.push("1.1", credential="guess"))[0] == 401
    async with pod.http.get(f"{pod.url}/kitestring/v1/weights") as reply:
        assert reply.status == 401
    assert "w1.1" not in pod.engine.weights


@pytest.mark.parametrize("version", ["", "../x", "initial", "a/b", ".hidden", "x" * 200])
async def test_a_version_that_is_none_is_refused(pod: Pod, version: str) -> None:
    status, body = await pod.push(version)
    assert (status, body["reason"]) == (400, "InvalidBody")


async def test_torn_weights_are_never_loaded(pod: Pod) -> None:
    pod.publish("1.1")
    pod.store.put("weights/1.1/weights", b"other bytes")
    status, body = await pod.push("1.1")
    assert (status, body["reason"]) == (422, "WeightsTorn")
    assert (await pod.complete())[1]["choices"][0]["text"] == "w1.0 w1.0"
    assert (await pod.get("/ready"))[0] == 503
    assert not (pod.folder / "1.1").exists()
    pod.publish("1.1")
    assert (await pod.push("1.1"))[0] == 200
    await pod.ready()


async def test_a_version_that_is_gone_from_storage(pod: Pod) -> None:
    pod.publish("1.1")
    pod.store.delete("weights/1.1/manifest.json")
    status, body = await pod.push("1.1")
    assert (status, body["reason"]) == (404, "UnknownVersion")


async def test_current_ahead_of_the_push_wins(make_pod: MakePod) -> None:
    """The push of a trainer that was replaced meanwhile."""
    pod = await make_pod()
    async with pod.sidecar(takeover_seconds=0):
        await pod.ready()
        pod.publish("1.1")
        pod.publish("2.0")
        status, body = await pod.push("1.1")
        assert (status, body["reason"]) == (409, "NotCurrent")
        await pod.ready()
        assert (await pod.status())["version"] == "2.0"


async def test_a_trainer_that_was_replaced_cannot_point_back(pod: Pod, caplog: pytest.LogCaptureFixture) -> None:
    """It was frozen between its look at the incarnations and its word; the name of a version decides."""
    pod.publish("1.1")
    pod.publish("10.1")
    assert (await pod.push("10.1"))[0] == 200
    set_current(pod.store, "1.1")
    status, body = await pod.push("1.1")
    assert (status, body["reason"]) == (409, "NotCurrent")
    served = await pod.status()
    assert (served["version"], served["current"]) == ("10.1", "10.1")
    assert "version 1.1 is current in storage, of a trainer that was replaced: ignored" in caplog.text
    assert (await pod.get("/ready"))[0] == 200
    pod.publish("10.2")
    assert (await pod.push("10.2"))[0] == 200
    assert pod.engine.weights == "w10.2"


async def test_a_pod_that_comes_to_a_file_that_points_back_takes_the_trainers_word(make_pod: MakePod) -> None:
    pod = await make_pod()
    pod.publish("2.1")
    set_current(pod.store, "1.0")
    async with pod.sidecar():
        await pod.ready()
        assert (await pod.status())["version"] == "1.0"
        assert (await pod.push("2.1"))[0] == 200
        await pod.ready()
        served = await pod.status()
        assert (served["version"], served["current"], pod.engine.weights) == ("2.1", "2.1", "w2.1")


async def test_a_current_version_that_nobody_tells_of_is_loaded(make_pod: MakePod) -> None:
    """Its trainer died before it told. First the bytes come, and the trainer has its time."""
    pod = await make_pod()
    async with pod.sidecar(takeover_seconds=0.3):
        await pod.ready()
        pod.publish("1.1")

        async def fetched() -> bool:
            return (pod.folder / "1.1").exists()

        await pod.until(fetched)
        assert pod.engine.weights == "w1.0"
        assert (await pod.get("/ready"))[0] == 503
        assert (await pod.complete())[0] == 200
        await pod.ready()
        assert pod.engine.weights == "w1.1"


async def test_pushes_that_overtake_each_other_end_at_the_current_one(pod: Pod) -> None:
    pushes = []
    for number in range(1, 8):
        pod.publish(f"1.{number}")
        pushes.append(asyncio.ensure_future(pod.push(f"1.{number}")))
        await asyncio.sleep(0)
    statuses = [status for status, _ in await asyncio.gather(*pushes)]
    assert statuses[-1] == 200
    assert set(statuses) <= {200, 409}
    assert (await pod.status())["version"] == "1.7"
    assert pod.engine.weights == "w1.7"


async def test_a_trainer_that_goes_away_in_mid_push_leaves_no_half(pod: Pod) -> None:
    pod.engine.go_on.clear()
    pod.publish("1.1")
    push = asyncio.ensure_future(pod.push("1.1"))
    await asyncio.sleep(0.01)
    push.cancel()
    await pod.ready()
    pod.engine.go_on.set()
    assert (await pod.complete())[1]["choices"][0]["text"] == "w1.1 w1.1"


# --- what breaks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tells_start", [True, False])
@pytest.mark.parametrize("versions", [True, False])
async def test_a_restarted_server_is_brought_back(make_pod: MakePod, tells_start: bool, versions: bool) -> None:
    """It serves its first weights again, under a version that is none of ours: no call gets there before the reload."""
    pod = await make_pod(tells_start=tells_start, knows_versions=versions, tells_versions=versions)
    async with pod.sidecar():
        await pod.ready()
        pod.publish("1.1")
        epoch = (await pod.push("1.1"))[1]["epoch"]
        await pod.engine.kill()
        await pod.not_ready()
        assert await pod.status() == {"version": None, "epoch": None, "current": "1.1"}
        assert (await pod.push("1.1"))[1]["reason"] == "ServerAway"
        await pod.engine.start()
        seen: set[tuple[int, str]] = set()
        while (await pod.get("/ready"))[0] != 200:
            status, body, _ = await pod.complete()
            seen.add((status, body["choices"][0]["text"] if status == 200 else ""))
        assert seen <= {(503, ""), (200, "w1.1 w1.1")}
        assert (await pod.complete())[1]["choices"][0]["text"] == "w1.1 w1.1"
        assert (await pod.status())["epoch"] not in (epoch, None)


async def test_a_server_that_was_restarted_unseen_is_found(make_pod: MakePod) -> None:
    """Down and up between two looks: the start time of its process tells."""
    pod = await make_pod()
    async with pod.sidecar(poll_seconds=0.2):
        await pod.ready()
        await pod.engine.kill()
        await pod.engine.start()

        async def reloaded() -> bool:
            return pod.engine.weights == "w1.0"

        await pod.until(reloaded)


@pytest.mark.parametrize("route", ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"])
async def test_a_load_that_fails_halfway_lets_no_call_through_and_is_tried_again(pod: Pod, route: str) -> None:
    pod.publish("1.1")
    pod.engine.problems[route] = [500]
    status, body = await pod.push("1.1")
    assert (status, body["reason"]) == (503, "LoadFailed")
    assert (await pod.complete())[0] in (200, 503)
    await pod.ready()
    assert (await pod.complete())[1]["choices"][0]["text"] == "w1.1 w1.1"


async def test_weights_that_the_server_refuses_leave_it_as_it_was(make_pod: MakePod) -> None:
    pod = await make_pod()
    async with pod.sidecar(takeover_seconds=600):
        await pod.ready()
        pod.publish("1.1")
        pod.engine.problems["/collective_rpc"] = [400]
        status, body = await pod.push("1.1")
        assert (status, body["reason"]) == (422, "ServerRefused")
        assert "told to fail" in body["error"]
        assert (await pod.complete())[1]["choices"][0]["text"] == "w1.0 w1.0"
        assert (await pod.get("/ready"))[0] == 503


async def test_a_sidecar_that_is_restarted_finds_the_server_as_it_left_it(make_pod: MakePod) -> None:
    pod = await make_pod()
    async with pod.sidecar():
        await pod.ready()
        pod.publish("1.1")
        epoch = (await pod.push("1.1"))[1]["epoch"]
    loads = pod.engine.asked.count("POST /collective_rpc")
    async with pod.sidecar():
        await pod.ready()
        assert (await pod.status())["epoch"] == epoch
        assert (await pod.complete())[1]["choices"][0]["text"] == "w1.1 w1.1"
    assert pod.engine.asked.count("POST /collective_rpc") == loads


@pytest.mark.parametrize("versions", [True, False])
async def test_a_sidecar_that_died_in_mid_load_loads_again(make_pod: MakePod, versions: bool) -> None:
    pod = await make_pod(knows_versions=versions, tells_versions=versions)
    async with pod.sidecar():
        await pod.ready()
    async with pod.http.post(f"{pod.engine.url}/pause?mode=keep") as reply:
        assert reply.status == 200
    pod.engine.weights = "half"
    async with pod.sidecar():
        await pod.ready()
        assert (await pod.complete())[1]["choices"][0]["text"] == "w1.0 w1.0"


async def test_what_an_earlier_process_left_on_the_disk_is_verified(make_pod: MakePod) -> None:
    pod = await make_pod()
    async with pod.sidecar():
        await pod.ready()
    (pod.folder / "1.0" / "weights").write_bytes(b"")
    (pod.folder / ".1.0.part-x").mkdir()
    async with pod.sidecar():
        await pod.ready()
    assert (pod.folder / "1.0" / "weights").read_text() == "w1.0"


async def test_storage_that_is_away_changes_nothing(pod: Pod) -> None:
    (pod.root / "store").rename(pod.root / "away")
    status, body = await pod.push("1.1")
    assert (status, body["reason"]) == (503, "StoreUnavailable")
    assert (await pod.get("/ready"))[0] == 200
    assert (await pod.complete())[0] == 200
    (pod.root / "away").rename(pod.root / "store")
    pod.publish("1.1")
    assert (await pod.push("1.1"))[0] == 200
