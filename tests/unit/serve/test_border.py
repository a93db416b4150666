"""Who may enter, and what a refusal looks like, before any model is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.unit.serve.asgi import JSON, Caller, calling

from quaff.serve.app import host_name, make_app
from quaff.serve.service import Service
from quaff.serve.settings import Settings

SETTINGS = Settings("tiny", body_bytes=1000)
KEY = replace(SETTINGS, api_key="secret")


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Iterator[Caller]:
    with calling(make_app(Service(getattr(request, "param", SETTINGS)))) as caller:
        yield caller


with_key = pytest.mark.parametrize("call", [KEY], indirect=True)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/props", "/v1/chat/completions"])
def test_while_the_model_loads_everything_is_503(call: Caller, path: str) -> None:
    answer = call("POST" if "chat" in path else "GET", path, b"{}")
    assert answer.status == 503 and answer.json["error"]["type"] == "overloaded_error"
    assert int(answer.headers["retry-after"]) > 0


def test_metrics_are_there_from_the_start(call: Caller) -> None:
    answer = call("GET", "/metrics")
    assert answer.status == 200 and b"quaff:num_requests_running" in answer.body


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/unknown", "/v1/models/", "/../../etc/passwd", "/v1/models/../../etc/passwd"])
def test_unknown_paths_are_404_in_shape(call: Caller, path: str) -> None:
    answer = call("GET", path)
    assert answer.status in (404, 503) and answer.json["error"]["type"] in ("not_found_error", "overloaded_error")


def test_anthropics_paths_have_its_shape(call: Caller) -> None:
    answer = call("GET", "/v1/messages/none")
    assert answer.status == 404 and answer.json["type"] == "error"
    assert answer.json["error"].keys() == {"type", "message"} and answer.headers["request-id"].startswith("req_")


def test_a_wrong_method_is_405_and_says_which_is_right(call: Caller) -> None:
    answer = call("GET", "/v1/chat/completions")
    assert answer.status == 405 and answer.headers["allow"] == "POST"
    assert answer.json["error"]["type"] == "invalid_request_error"


def test_every_answer_has_an_id_of_its_own(call: Caller) -> None:
    first, second = (call("GET", "/health").headers["x-request-id"] for _ in range(2))
    assert first != second and first.startswith("req_")


@with_key
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "secre"}, {"authorization": "Basic secret"}])
def test_without_the_key_nothing_is_answered(call: Caller, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics", "/nowhere"):
        answer = call("GET", path, headers=JSON | headers)
        assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key"
    assert call("GET", "/health", headers=JSON | headers).status == 503


@with_key
@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret"},
        {"authorization": "bearer  secret"},
        {"x-api-key": "secret"},
        {"authorization": "Bearer secret", "x-api-key": "another server's"},
        {"authorization": "Bearer another server's", "x-api-key": "secret"},
    ],
)
def test_with_the_key_one_comes_in_under_any_name(call: Caller, headers: dict[str, str]) -> None:
    assert call("GET", "/metrics", headers={"host": "models.example:80", **headers}).status == 200


@pytest.mark.parametrize("call", [replace(SETTINGS, api_key="schlüssel")], indirect=True)
def test_a_key_is_compared_by_its_bytes(call: Caller) -> None:
    assert call("GET", "/metrics", headers={"x-api-key": "schlüssel"}).status == 200
    assert call("GET", "/metrics", headers={"x-api-key": "schlussel"}).status == 401


@pytest.mark.parametrize(
    "host, status", [("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:8080", 200), ("evil.example:8080", 403), ("", 403)]
)
def test_without_a_key_a_local_server_answers_to_local_names_only(call: Caller, host: str, status: int) -> None:
    assert call("GET", "/metrics", headers={"host": host}).status == status


@pytest.mark.parametrize("header, name", [("a.b:1", "a.b"), ("A", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), (":80", "")])
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


def test_no_answer_lets_other_sites_read_it(call: Caller) -> None:
    answer = call("GET", "/metrics", headers=JSON | {"origin": "https://evil.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)
