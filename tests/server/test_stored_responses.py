"""Responses that are kept, so that a client may go on with one by its id."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.errors import QuireError
from quire.server.stored.files import ResponseFiles
from quire.server.stored.store import (
    OwnResponses,
    ResponseStore,
    StoredResponse,
    StoreLimits,
)
from tests.late_import import LateModule
from tests.server.conftest import SCRIPTED_ENGINE
from tests.server.harness import Server, error_of, wait_for

RESPONSES = "/v1/responses"
openai: Any = LateModule("openai")


def make(
    store: ResponseStore, name: str, owner: str = "me", previous: str | None = None, size: int = 10
) -> None:
    output = [{"type": "message", "id": f"msg_{name}", "role": "assistant", "content": "x" * size}]
    items = msgspec.json.encode(
        [{"type": "message", "id": f"in_{name}", "role": "user", "content": "y"}]
    )
    body = {"id": name, "created_at": store._clock(), "status": "completed", "output": output}
    store.of(owner).put(body, items, [f"msg_{name}", f"in_{name}"], previous)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_least_recently_used_makes_room(clock: Clock) -> None:
    store = ResponseStore(StoreLimits(3, 10**6, 60), clock=clock)
    me = store.of("me")
    for name in "abc":
        make(store, name)
    assert me.get("a") is not None  # used again
    make(store, "d")
    assert [name for name in "abcd" if me.get(name)] == ["a", "c", "d"]
    assert set(me.items(["msg_b"])) == set()
    assert set(me.items(["msg_a", "in_d"])) == {"in_a", "msg_a", "in_d", "msg_d"}
    clock.now += 61
    assert [name for name in "acd" if me.get(name)] == []
    make(store, "e")
    assert (len(store._responses), len(store._by_item)) == (1, 2)


def test_bytes_are_bounded(clock: Clock) -> None:
    store = ResponseStore(StoreLimits(100, 50_000, 60), clock=clock)
    for number in range(30):
        make(store, str(number), size=5000)
        assert store._num_bytes <= 50_000
    make(store, "huge", size=60_000)
    assert (store.of("me").get("huge"), store._num_bytes, store._by_item) == (None, 0, {})


def test_nobody_sees_what_belongs_to_others(clock: Clock) -> None:
    store = ResponseStore(StoreLimits(100, 10**6, 60), clock=clock)
    make(store, "a", "me")
    other = store.of("other")
    assert (other.get("a"), other.items(["msg_a"]), other.delete("a")) == (None, {}, False)
    make(store, "b", "other", previous="a")
    assert other.chain("b") == ([], "a")
    assert store.of("me").delete("a")
    assert store.of("me").get("a") is None


def test_items_that_several_responses_hold(clock: Clock) -> None:
    """An item that later calls refer to is theirs too: it stays as long as any of them does."""
    for first, last in (("a", "b"), ("b", "a")):
        store = ResponseStore(StoreLimits(100, 10**6, 60), clock=clock)
        make(store, "a")
        body = {"id": "b", "created_at": clock(), "status": "completed", "output": []}
        item = {"type": "message", "id": "msg_a", "role": "assistant", "content": "x"}
        me = store.of("me")
        me.put(body, msgspec.json.encode([item]), ["msg_a"], None)
        assert me.delete(first)
        assert "msg_a" in me.items(["msg_a"])
        assert me.delete(last)
        assert (me.items(["msg_a"]), store._by_item) == ({}, {})


def test_a_conversation_by_references_is_read_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Vercel's AI SDK has them: each call refers to all answers so far."""
    store = ResponseStore(StoreLimits(100, 10**6, 60), clock=clock)
    me = store.of("me")
    ids: list[str] = []
    for number in range(20):
        inputs = [
            {"type": "message", "id": one, "role": "assistant", "content": one} for one in ids
        ]
        ids.append(f"msg_{number}")
        output = [{"type": "message", "id": ids[-1], "role": "assistant", "content": ids[-1]}]
        body = {"id": f"r{number}", "created_at": clock(), "status": "completed", "output": output}
        me.put(body, msgspec.json.encode(inputs), ids, None)
    reads = []
    read = StoredResponse.output
    monkeypatch.setattr(
        StoredResponse, "output", lambda self: [reads.append(self.id), *read(self)][1:]
    )
    found = me.items(ids)
    assert [found[one]["content"] for one in ids] == ids
    assert reads == ["r19"]


def test_a_folder_survives_a_restart(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "kept"
    limits = StoreLimits(3, 10**6, 60)
    store = ResponseStore(limits, ResponseFiles(folder), clock)
    for name in "abcd":
        make(store, name, previous="a" if name == "d" else None)
    store.of("me").delete("b")
    with pytest.raises(QuireError, match="another server"):
        ResponseFiles(folder)
    store.close()
    files = sorted(folder.glob("*.response"))
    assert len(files) == 2
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in folder.iterdir())
    files[0].write_bytes(files[0].read_bytes()[:50])
    (folder / "half.unfinished").write_bytes(b"{")
    (folder / "link.response").symlink_to("/etc/hostname")
    again = ResponseStore(limits, ResponseFiles(folder), clock)
    kept = [name for name in "abcd" if again.of("me").get(name)]
    assert len(kept) == 1
    again.close()
    assert len(list(folder.glob("*.response"))) - (folder / "link.response").is_symlink() == 1
    assert not list(folder.glob("*.unfinished"))
    clock.now += 100
    late = ResponseStore(limits, ResponseFiles(folder), clock)
    late.close()
    assert (
        late.of("me").get(kept[0]),
        [one for one in folder.glob("*.response") if not one.is_symlink()],
    ) == (
        None,
        [],
    )


def test_a_folder_that_fails_costs_nobody_an_answer(tmp_path: Path, clock: Clock) -> None:
    folder = tmp_path / "kept"
    store = ResponseStore(StoreLimits(3, 10**6, 60), ResponseFiles(folder), clock)
    for one in folder.iterdir():
        one.unlink()
    folder.rmdir()
    make(store, "a")
    store.close()
    make(store, "b")
    assert store.of("me").delete("a")
    assert store.of("me").get("b") is not None
    with pytest.raises(QuireError, match="can't be used"):
        ResponseFiles(Path("/proc/nowhere"))


# Through the server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored") / "responses"


@pytest.fixture(scope="module")
def keeping(scripted_model: str, folder: Path) -> Iterator[Server]:
    """With two keys and a folder."""
    with start(scripted_model, store=str(folder)) as server:
        yield server


def start(model: str, **fields: Any) -> Server:
    names = {"served_model_names": ["scripted"], "api_keys": ["mine", "yours"]}
    return Server(model=model, engine=SCRIPTED_ENGINE, **names, **fields)


def client_of(server: Server, key: str = "mine") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def test_conversations_by_id(keeping: Server, folder: Path, scripted_model: str) -> None:
    with client_of(keeping) as client, client_of(keeping, "yours") as stranger:
        first = client.responses.create(
            model="scripted", input="hi", instructions="Be short.", temperature=0
        )
        second = client.responses.create(
            model="scripted", input="@weather", previous_response_id=first.id, temperature=0
        )
        assert second.previous_response_id == first.id
        turns: Any = [
            {"role": "user", "content": "hi"},
            *first.output,
            {"role": "user", "content": "@weather"},
        ]
        whole = client.responses.create(model="scripted", input=turns, temperature=0, store=False)
        assert second.usage is not None
        assert whole.usage is not None
        # The instructions of an earlier response are not carried over.
        assert second.usage.input_tokens == whole.usage.input_tokens
        assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
        items = client.responses.input_items.list(second.id, order="asc").data
        assert [item.type for item in items] == ["message"] * 3
        page = client.responses.input_items.list(second.id, limit=1)
        assert page.has_more
        assert page.data[0].id == items[-1].id
        assert len(list(client.responses.input_items.list(second.id, limit=1))) == 3  # page by page
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)
        for call in (
            stranger.responses.retrieve,
            stranger.responses.delete,
            stranger.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError, match="no stored response"):
                call(first.id)
        with pytest.raises(openai.BadRequestError, match="the whole conversation") as caught:
            stranger.responses.create(model="scripted", input="hi", previous_response_id=first.id)
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            stranger.responses.create(
                model="scripted", input=[{"type": "item_reference", "id": first.output[0].id}]
            )  # type: ignore[list-item]
        client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match=f"{first.id}', which it goes on with"):
            client.responses.create(model="scripted", input="hi", previous_response_id=second.id)
        kept = client.responses.create(model="scripted", input="hi")
    keeping.__exit__(None, None, None)
    assert len(list(folder.glob("*.response"))) >= 2
    assert b"mine" not in b"".join(one.read_bytes() for one in folder.glob("*.response"))
    with start(scripted_model, store=str(folder)) as again, client_of(again) as client:
        assert client.responses.retrieve(kept.id).id == kept.id
        answer = client.responses.create(
            model="scripted", input="and?", previous_response_id=kept.id
        )
        assert answer.output_text == "Hello, this is a scripted model."


def test_streams_are_stored_however_they_end(scripted: Server) -> None:
    events = list(scripted.stream(RESPONSES, {"input": "hi"}))
    done = events[-1]["response"]
    assert scripted.get(f"{RESPONSES}/{done['id']}").json() == done
    broken = scripted.stream(
        RESPONSES, {"input": "@long", "ignore_eos": True, "max_output_tokens": 3500}
    )
    begun = next(broken)["response"]
    for _ in range(4):
        next(broken)
    # it is stored when it is over
    assert scripted.get(f"{RESPONSES}/{begun['id']}").status_code == 404
    broken.close()  # type: ignore[attr-defined]
    wait_for(
        lambda: scripted.get(f"{RESPONSES}/{begun['id']}").status_code == 200,
        "the end to be stored",
    )
    cancelled = scripted.get(f"{RESPONSES}/{begun['id']}").json()
    assert (cancelled["status"], cancelled["output"][0]["status"]) == ("cancelled", "incomplete")
    message = error_of(
        scripted.post(RESPONSES, {"input": "on", "previous_response_id": begun["id"]}), 400
    )
    assert "is cancelled: send the conversation as input" in message
    reference = {"type": "item_reference", "id": cancelled["output"][0]["id"]}
    going_on = scripted.post(
        RESPONSES, {"input": [reference, {"role": "user", "content": "Go on."}]}
    )
    assert going_on.status_code == 200, going_on.text
    failed = scripted.stream_to_deadline(
        RESPONSES, {"input": "hi", "min_tokens": 15000}, deadline=0.02
    )
    assert failed[-1]["type"] == "error"
    kept = scripted.get(f"{RESPONSES}/{failed[0]['response']['id']}").json()
    assert (kept["status"], kept["error"]["code"]) == ("failed", "deadline_exceeded")


def test_what_is_incomplete_can_be_gone_on_with(scripted: Server) -> None:
    cut = scripted.post(RESPONSES, {"input": "@long", "max_output_tokens": 3}).json()
    assert cut["status"] == "incomplete"
    assert (
        scripted.post(RESPONSES, {"input": "Go on.", "previous_response_id": cut["id"]}).status_code
        == 200
    )


def test_stored_responses_hold_no_logprobs(scripted: Server) -> None:
    scored = scripted.post(RESPONSES, {"input": "hi", "top_logprobs": 3}).json()
    kept = scripted.get(f"{RESPONSES}/{scored['id']}").json()
    assert scored["output"][0]["content"][0]["logprobs"]
    assert kept["output"][0]["content"][0]["logprobs"] == []
    assert error_of(scripted.get(f"{RESPONSES}/{scored['id']}?stream=true"), 400, "stream")
    ignored = scripted.get(f"{RESPONSES}/{scored['id']}?include[]=reasoning.encrypted_content")
    assert ignored.headers["x-quire-ignored"] == "include[]"


def test_with_storing_off_the_message_says_what_to_send(small_model: str) -> None:
    engine = {"kv_cache_memory": "4MiB", "max_model_len": 256, "dtype": "float32"}
    with Server(model=small_model, engine=engine, stored_responses=0) as server:
        made = server.post(RESPONSES, {"input": "hi", "store": True, "max_output_tokens": 2})
        assert (made.json()["store"], made.headers["x-quire-ignored"]) == (False, "store")
        assert server.get(f"{RESPONSES}/{made.json()['id']}").status_code == 404
        silent = server.post(RESPONSES, {"input": "hi", "max_output_tokens": 2})
        assert "x-quire-ignored" not in silent.headers
        for fields, status in (
            ({"input": "on", "previous_response_id": made.json()["id"]}, 400),
            ({"input": [{"id": made.json()["output"][0]["id"]}]}, 404),
        ):
            message = error_of(server.post(RESPONSES, fields), status)
            assert "this server stores no responses: send the items themselves" in message


def test_chains_are_bounded(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    from quire.errors import InvalidRequestError
    from quire.server.api import response_items

    store = ResponseStore(StoreLimits(100, 10**6, 60), clock=clock)
    make(store, "a")
    make(store, "b", previous="a")
    me: OwnResponses = store.of("me")
    assert len(response_items._recalled("b", me)) == 4
    monkeypatch.setattr(response_items, "MAX_RECALLED", 1000)
    with pytest.raises(InvalidRequestError, match="send the conversation as input"):
        response_items._recalled("b", me)
