"""An agent's request as it goes to the model server: rules for sampling, refused fields, what is always asked for."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitestring_rollout.gateway.config import Sampling
from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.gateway.models import Model
from kitestring_rollout.gateway.request import CallRules, Prepared, prepare, read_body
from kitestring_rollout.gateway.sampling import RULES
from kitestring_rollout.traces.encoder import CallEncoder
from kitestring_rollout.traces.records import Api, AttemptIdentity, CallRecord

TRAINED = Model("policy", "served", ("http://x/v1",), trained=True)
FROZEN = Model("judge", "big-judge", ("http://y/v1",), trained=False)
MESSAGES = [{"role": "user", "content": "hi"}]


def made(
    body: dict[str, Any],
    *,
    api: Api = "chat",
    model: Model = TRAINED,
    mode: str = "train",
    media: tuple[str, ...] = (),
    room: int = 1_000_000,
    **sampling: Any,
) -> tuple[dict[str, Any], Prepared]:
    whole = {"model": "policy", **({"messages": MESSAGES} if api == "chat" else {"prompt": "hi"}), **body}
    prepared = prepare(whole, api, model, mode, CallRules(Sampling(**sampling), media), room=room)
    return orjson.loads(prepared.payload), prepared


def refused(body: dict[str, Any], **options: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        made(body, **options)
    return caught.value


NONCONFORMING: dict[str, Any] = {
    "temperature": 0.2,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100},
    "logits_processors": ["x"],
    "vllm_xargs": {"a": 1},
    "thinking_token_budget": 100,
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "min_tokens": 3,
    "ignore_eos": True,
    "use_beam_search": True,
    "best_of": 4,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
    "structural_tag": {"type": "structural_tag"},
    "tool_choice": "required",
}


def test_the_table_above_has_every_rule() -> None:
    assert NONCONFORMING.keys() == {"temperature", *RULES}


@pytest.mark.parametrize("field", NONCONFORMING)
def test_nonconforming_sampling_is_replaced_and_named(field: str) -> None:
    sent, prepared = made({field: NONCONFORMING[field]}, temperature=0.7)
    assert prepared.nonconforming == (field,)
    assert sent.get(field) == {"temperature": 0.7, "top_p": 1, "top_k": -1}.get(field)


@pytest.mark.parametrize("field", NONCONFORMING)
def test_nonconforming_sampling_is_refused_where_the_run_says_so(field: str) -> None:
    refusal = refused({field: NONCONFORMING[field]}, nonconforming="refuse")
    assert (refusal.status, refusal.code, refusal.param) == (400, "nonconforming_sampling", field)


CONFORMING: dict[str, list[Any]] = {
    "temperature": [0.7, None],
    "top_p": [1, 1.0, None],
    "top_k": [-1, 0, None],
    "min_p": [0, 0.0],
    "presence_penalty": [0],
    "frequency_penalty": [0.0],
    "repetition_penalty": [1.0],
    "logit_bias": [{}, None],
    "min_tokens": [0],
    "ignore_eos": [False],
    "response_format": [{"type": "text"}],
    "tool_choice": ["auto", "none"],
    "stop": ["x", ["x", "y"]],
    "seed": [7],
    "n": [2],
    "max_tokens": [5],
    "max_completion_tokens": [5],
    "parallel_tool_calls": [True],
    "user": ["me"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in CONFORMING.items() for value in values]
)
def test_conforming_values_pass_in_a_run_that_refuses_others(field: str, value: Any) -> None:
    sent, prepared = made({field: value}, temperature=0.7, nonconforming="refuse")
    assert prepared.nonconforming == ()
    if field in (
        "stop",
        "seed",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "tool_choice",
        "user",
        "parallel_tool_calls",
    ):
        assert sent[field] == value


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("train", (0.7, 1, -1)),
        ("validation-sampled", (0.7, 1, -1)),
        ("validation-greedy", (0, 1, -1)),
        ("try", (0.3, 0.5, None)),
    ],
)
def test_each_mode_samples_as_it_must(mode: str, expected: tuple[Any, Any, Any]) -> None:
    sent, _ = made({"temperature": 0.3, "top_p": 0.5}, mode=mode, temperature=0.7)
    assert (sent["temperature"], sent["top_p"], sent.get("top_k")) == expected


def test_several_greedy_choices_are_the_best_token_each() -> None:
    sent, _ = made({"n": 2}, mode="validation-greedy")
    assert (sent["temperature"], sent["top_k"], sent["n"]) == (1, 1, 2)


def test_ids_logprobs_versions_and_usage_are_always_asked_for() -> None:
    sent, prepared = made({"stream": True})
    assert sent["logprobs"] is True and sent["return_token_ids"] is True and sent["return_weight_versions"] is True
    assert sent["stream_options"] == {"include_usage": True} and sent["model"] == "served"
    assert not (prepared.asked.logprobs or prepared.asked.token_ids or prepared.asked.usage)
    sent, prepared = made({}, api="completions")
    assert sent["logprobs"] == 0 and not prepared.asked.logprobs


def test_what_the_agent_asked_for_is_kept() -> None:
    sent, prepared = made(
        {
            "logprobs": True,
            "top_logprobs": 3,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    assert sent["top_logprobs"] == 3 and prepared.asked.logprobs and prepared.asked.token_ids and prepared.asked.usage
    sent, prepared = made({"logprobs": 0}, api="completions")
    assert sent["logprobs"] == 0 and prepared.asked.logprobs


def test_the_cap_of_tokens() -> None:
    assert made({}, max_tokens=50)[0]["max_completion_tokens"] == 50
    assert made({"max_tokens": 80}, max_tokens=50)[0]["max_tokens"] == 50
    assert made({"max_tokens": 8}, max_tokens=50)[0]["max_tokens"] == 8
    assert made({}, api="completions", max_tokens=50)[0]["max_tokens"] == 50
    assert made({}, model=FROZEN, max_tokens=50)[0].keys() == {"model", "messages"}


def test_a_frozen_model_is_asked_as_the_agent_asked() -> None:
    body = {"temperature": 0.1, "logit_bias": {"1": 1}, "priority": 3}
    sent, prepared = made(body, model=FROZEN)
    assert sent == {"model": "big-judge", "messages": MESSAGES, **body}
    assert prepared.nonconforming == ()


@pytest.mark.parametrize(
    "body",
    [
        {"echo": True},
        {"prompt_logprobs": 1},
        {"priority": 5},
        {"kv_transfer_params": {}, "cache_salt": "x"},
        {"n": 0},
        {"n": 1000},
        {"n": "2"},
        {"stream": "yes"},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"tools": {"a": 1}},
        {"tools": ["x"]},
    ],
)
def test_malformed_and_unsupported_requests_are_400(body: dict[str, Any]) -> None:
    assert refused(body).status == 400


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, "a"], {"a": 1}, [1.5]])
def test_a_completions_prompt_is_one_text_or_one_list_of_ids(prompt: Any) -> None:
    assert refused({"prompt": prompt}, api="completions").param == "prompt"


@pytest.mark.parametrize(("prompt", "sent"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2])])
def test_prompts_that_are_one(prompt: Any, sent: Any) -> None:
    assert made({"prompt": prompt}, api="completions")[0]["prompt"] == sent


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("data:image/png;base64,AAAA", True),
        ("https://images.example/a.png", True),
        ("http://IMAGES.example:8080/a.png", True),
        ("https://other.example/a.png", False),
        ("https://images.example@other.example/a.png", False),
        ("https://other.example\\@images.example/a.png", False),
        ("https://images.example.other/", False),
        ("file:///etc/passwd", False),
        ("http://169.254.169.254/latest/meta-data", False),
        ("//images.example/a.png", False),
        ("ftp://images.example/a.png", False),
        ("http://[::1/", False),
        (" https://images.example/a.png", False),
        ("https://images.exam\nple/a.png", False),
        ("https://ımages.example/a.png", False),
    ],
)
@pytest.mark.parametrize("model", [TRAINED, FROZEN])
@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url"])
def test_remote_media_are_refused_unless_their_host_is_allowed(
    url: str, allowed: bool, model: Model, kind: str
) -> None:
    for value in (url, {"url": url}):
        body = {"messages": [{"role": "user", "content": [{"type": kind, kind: value}]}]}
        if allowed:
            made(body, model=model, media=("images.example",))
        else:
            assert refused(body, model=model, media=("images.example",)).code == "remote_media_refused"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff\xfe", b"[" * 2000]
)
def test_bodies_that_are_no_json_object_are_400(raw: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read_body(raw)
    assert caught.value.code == "invalid_json"


def test_a_body_that_could_be_read_but_not_written_again_is_refused() -> None:
    for depth, fine in ((150, True), (250, False), (900, False)):
        body = read_body(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
        if fine:
            made(body)
        else:
            assert refused(body).code == "invalid_json"


IDENTITY = AttemptIdentity("run", "r", "0190d3c5-0000-7000-8000-000000000001", "g", 0, 1, "train", "0" * 16)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=12,
)
NAMES = st.sampled_from(
    [
        "role",
        "content",
        "tool_calls",
        "tool_call_id",
        "name",
        "parts",
        "type",
        "text",
        "image_url",
        "kitestring.raw",
        "id",
        "function",
    ]
)
MESSAGE = st.dictionaries(NAMES, JSON | st.lists(st.dictionaries(NAMES, JSON, max_size=4), max_size=2), max_size=5)


@settings(suppress_health_check=[HealthCheck.too_slow])  # of the machine, when other tests take it
@given(
    st.lists(MESSAGE, min_size=1, max_size=3),
    st.dictionaries(
        st.sampled_from([*NONCONFORMING, "seed", "n", "stop", "max_tokens", "tools", "stream_options"]),
        JSON,
        max_size=4,
    ),
    st.sampled_from([TRAINED, FROZEN]),
)
def test_whatever_an_agent_sends_is_refused_or_can_be_recorded(
    messages: list[dict[str, Any]], fields: dict[str, Any], model: Model
) -> None:
    body = read_body(orjson.dumps({**fields, "model": "policy", "messages": messages}))
    try:
        prepared = prepare(body, "chat", model, "train", CallRules(Sampling()), room=1_000_000)
    except Refusal as refusal:
        assert refusal.status == 400
        return
    record = CallRecord(
        identity=IDENTITY,
        seq=1,
        api="chat",
        model=model.name,
        requested_model="policy",
        trained=model.trained,
        outcome="failed",
        started_unix_nano=1,
        ended_unix_nano=2,
        sampling=prepared.sampling,
        nonconforming=prepared.nonconforming,
        messages=prepared.messages,
        tools=prepared.tools,
    )
    CallEncoder(IDENTITY).encode(record)


@pytest.mark.parametrize("model", [TRAINED, FROZEN])
@pytest.mark.parametrize(
    "body",
    [
        {"chat_template": "{{ 1/0 }}"},
        {"chat_template_kwargs": {"chat_template": "{% for a in range(10**9) %}{% endfor %}"}},
        {"chat_template_kwargs": {"documents": []}},
        {"chat_template_kwargs": {"enable_thinking": False, "tools": []}},
    ],
)
def test_an_agent_brings_no_template(body: dict[str, Any], model: Model) -> None:
    refusal = refused(body, model=model)
    assert (refusal.status, refusal.code, refusal.param) == (400, "unsupported_parameter", next(iter(body)))


def test_variables_of_the_model_s_template_pass() -> None:
    sent, _ = made({"chat_template": None, "chat_template_kwargs": {"enable_thinking": False}})
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert refused({"chat_template_kwargs": "x"}).param == "chat_template_kwargs"


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", ["a"] * 5), ("stop", "x" * 257), ("stop", ["a", "x" * 257]), ("stop_token_ids", [1] * 129)],
)
def test_stops_are_bounded(api: Api, field: str, value: Any) -> None:
    refusal = refused({field: value}, api=api)
    assert (refusal.status, refusal.param) == (400, field)


def test_stops_within_the_bounds_pass() -> None:
    sent, _ = made({"stop": ["x" * 256] * 4, "stop_token_ids": [1] * 128})
    assert (len(sent["stop"]), len(sent["stop_token_ids"])) == (4, 128)


@pytest.mark.parametrize(
    ("model", "asked", "room", "sent", "reserve"),
    [
        (FROZEN, {"max_tokens": 500, "n": 4}, 1000, {"max_tokens": 250, "n": 4}, 1000),
        (FROZEN, {"max_tokens": 500, "n": 4}, 3, {"max_tokens": 1, "n": 3}, 3),
        (FROZEN, {"max_tokens": 500, "max_completion_tokens": 7}, 100, {"max_completion_tokens": 7}, 7),
        (FROZEN, {"max_tokens": 500}, 10_000, {"max_tokens": 500}, 500),
        (FROZEN, {}, 100, {"max_completion_tokens": 100}, 100),
        (FROZEN, {}, 10_000, {"max_completion_tokens": None}, 1024),
        (FROZEN, {"max_tokens": 5}, 0, {"max_tokens": 1}, 1),
        (TRAINED, {"max_tokens": 500, "n": 2}, 100, {"max_tokens": 50, "n": 2}, 100),
        (TRAINED, {}, 100, {"max_completion_tokens": None}, 100),
        (TRAINED, {"max_tokens": 5, "n": 2}, 1000, {"max_tokens": 5}, 10),
    ],
)
def test_what_a_call_may_generate_is_bounded_by_what_is_left(
    model: Model, asked: dict[str, Any], room: int, sent: dict[str, Any], reserve: int
) -> None:
    found, prepared = made(asked, model=model, room=room)
    assert ({field: found.get(field) for field in sent}, prepared.reserve) == (sent, reserve)


def test_every_sample_of_a_completion_counts() -> None:
    found, prepared = made({"best_of": 20, "max_tokens": 100}, model=FROZEN, api="completions", room=1000)
    assert (found["max_tokens"], prepared.reserve) == (50, 1000)


@pytest.mark.parametrize("n", [0, 129, "2", 1.5, True])
def test_the_number_of_choices_is_bounded_for_every_model(n: Any) -> None:
    assert refused({"n": n}, model=FROZEN).param == "n"
