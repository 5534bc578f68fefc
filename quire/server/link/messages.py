"""What passes between the server's process, engine processes and HTTP workers: msgpack of these
values, never pickle.

Token ids and numbers only; the one text that goes down is a grammar (inside the parameters) and
cache salts, the texts that come up are error messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from quire.observe.step_log import StepSummary
from quire.sampling_params import ResolvedTokens
from quire.step import FinishReason, Pooling, RequestUpdate

ErrorKind = Literal["invalid", "internal", "unavailable"]


class Resume(msgspec.Struct):
    """A request that another engine had begun and lost: it goes on where it was."""

    outputs: dict[str, tuple[int, ...]]
    """The tokens so far of its answers that are not complete, by their ids; the others are not
    made again.
    """
    age: float
    """Seconds since it was first added: its place in the queue is that of a request which came
    then.
    """


class AdapterFolder(msgspec.Struct, frozen=True):
    """An adapter by its name, and where it lies: engines read it when they need it."""

    name: str
    path: str


class AddRequest(msgspec.Struct, tag="add", omit_defaults=True):
    """Generate answers to a prompt. With several (params.n, best_of) their ids are `request_id/0`
    and so on.
    """

    request_id: str
    prompt: bytes
    """Its token ids, as `pack_tokens` writes them: a message passes two or three processes, and
    only the last of them needs them one by one.
    """
    params: dict[str, Any]
    """As `quire.observe.step_log.encode_params` writes them."""
    seed: int
    resolved: ResolvedTokens = msgspec.field(default_factory=ResolvedTokens)
    queue_timeout: float | None = None
    """Seconds after which it ends with "deadline" if it has not begun to run."""
    pooling: Pooling | None = None
    """For embeddings: no answer, but the prompt's hidden states pooled this way."""
    resume: Resume | None = None
    adapter: AdapterFolder | None = None

    @property
    def answer_ids(self) -> tuple[str, ...]:
        """The engine's ids of the answers that it is to make (as `make_requests` gives them)."""
        if self.resume is not None:
            return tuple(self.resume.outputs)
        count = self.params.get("best_of") or self.params.get("n", 1)
        if count == 1:
            return (self.request_id,)
        return tuple(f"{self.request_id}/{number}" for number in range(count))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return struct.unpack(f"<{self.num_prompt_tokens}i", self.prompt)


class Abort(msgspec.Struct, tag="abort"):
    """Nobody waits for these requests (all answers of each) any more."""

    request_ids: tuple[str, ...]


class End(msgspec.Struct, tag="end"):
    """An answer is complete, for a reason found outside of the engine: its text has come to a stop
    string.
    """

    request_id: str
    """The answer's."""
    reason: FinishReason = "stop"


class Describe(msgspec.Struct, tag="describe"):
    """Where a request's time went. Answered by `Described` with the same ticket."""

    ticket: int
    request_id: str


class Watch(msgspec.Struct, tag="watch"):
    """Somebody wants to see what the engine does (`Watched`), or nobody any more."""

    is_on: bool


class LoadAdapter(msgspec.Struct, tag="load_adapter"):
    """Read an adapter. Answered by `Described` with the same ticket: what it is, or an `error`."""

    ticket: int
    adapter: AdapterFolder


class UnloadAdapter(msgspec.Struct, tag="unload_adapter"):
    """Forget an adapter's name; requests that have it are answered to their end."""

    name: str


class Control(msgspec.Struct, tag="control"):
    """Something to be done between two steps. Answered by `Described` with the same ticket: what
    came of it, or an `error` with the `status` of the response that tells it.
    """

    ticket: int
    action: str
    """The name of a method of `quire.server.link.engine_control.EngineController`."""
    arguments: dict[str, Any] = {}


Command = AddRequest | Abort | End | Describe | Watch | LoadAdapter | UnloadAdapter | Control
"""What goes down: all that the engine is asked."""


class Loading(msgspec.Struct, tag="loading"):
    """The process is there, or has come further on its way to `Ready`: a sign of life."""


class Ready(msgspec.Struct, tag="ready", omit_defaults=True):
    """The model is loaded: what it is, and what it can take."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    """Blocks requests can use."""
    block_size: int
    policy: str
    fingerprint: str
    """Changes when the tokens of an answer might."""
    memory: dict[str, int] = {}
    """Bytes the engine process takes, by name."""
    bytes_per_block: int = 0
    """Of every block, whatever it holds."""
    window: int = 0
    """Tokens that the layers look back, if all of them have windows: of a prefix, the cache need
    not have more.
    """


class Refused(msgspec.Struct, array_like=True):
    """A request that was never added."""

    request_id: str
    message: str
    field: str | None
    kind: ErrorKind


class Updates(msgspec.Struct, tag="updates", omit_defaults=True):
    """What happened since the last message of this kind. Sent when something did, and regularly
    while there is work, so silence means trouble.
    """

    appended_request_ids: list[str] = []
    """Answers that gained tokens and nothing else, as most do in most steps. What `updates` says of
    them came after.
    """
    appended_token_ids: list[tuple[int, ...]] = []
    """What they gained."""
    updates: list[RequestUpdate] = []
    accepted: list[str] = []
    """Requests that were added, by their request_id."""
    refused: list[Refused] = []
    started: list[str] = []
    """Answers that left the queue."""
    cached: dict[str, int] = {}
    """For those: the tokens of their prompts that need not be computed."""
    steps: list[StepSummary] = []
    num_free_blocks: int = 0
    """Now, cached ones included."""
    memory: dict[str, int] = {}
    """Bytes the engine process takes, by name; from time to time."""
    blocks_stored: bytes = b""
    """Blocks that were cached, by the names of `quire.observe.cache_events`, if the engine was
    asked to tell them.
    """
    blocks_removed: bytes = b""
    """Blocks that are cached no longer."""
    weights_version: int | None = None
    """That of the weights, if it has changed."""

    @property
    def has_updates(self) -> bool:
        return bool(self.appended_request_ids or self.updates or self.weights_version is not None)

    def add_updates(self, updates: Iterable[RequestUpdate]) -> None:
        """Adds what requests gained, in order."""
        named = {update.request_id for update in self.updates}
        for update in updates:
            request_id = update.request_id
            if update.only_appends_tokens and request_id not in named:
                self.appended_request_ids.append(request_id)
                self.appended_token_ids.append(update.new_token_ids)
            else:
                named.add(request_id)
                self.updates.append(update)

    def all_updates(self) -> list[RequestUpdate]:
        """All of them, each written out."""
        return [
            *map(RequestUpdate, self.appended_request_ids, self.appended_token_ids),
            *self.updates,
        ]


class Described(msgspec.Struct, tag="described"):
    """The answer to `Describe`; None if nothing is known."""

    ticket: int
    record: dict[str, Any] | None


class Watched(msgspec.Struct, tag="watched"):
    """What happened in the last moments, for those who watch."""

    frame: bytes
    """JSON, as `quire.observe.live_view` makes it."""
    is_key: bool
    """It tells everything, not only what changed."""
    time: float
    """Of its last step."""
    is_past: bool = False
    """Later steps are known already: it is told for those who go back."""


class Fatal(msgspec.Struct, tag="fatal"):
    """The engine process ends itself."""

    message: str
    """For the log, or for whoever is starting the server."""
    is_users_fault: bool = False
    """A QuireError at the start (no such model, not enough memory): starting again won't help."""


Event = Loading | Ready | Updates | Described | Watched | Fatal
"""What comes up: all that the engine says."""


class EngineProcessConfig(msgspec.Struct):
    """The first message to an engine process."""

    model: str
    options: dict[str, Any]
    """Of `quire.config.EngineConfig`."""
    log_format: str = "human"
    log_level: str = "info"
    log_name: str = "engine"
    block_events: bool = False
    """Whether it tells which blocks it has cached."""


# Between the server's process and an HTTP worker: what a worker tells the engine and hears of it
# goes as above, and so does what else there is one of.


class WorkerConfig(msgspec.Struct):
    """The first message to a worker."""

    server: dict[str, Any]
    """As `quire.server.config.encode_config` writes it."""
    worker: int
    """Its number, from 1."""
    listener: int
    """The number of the listening socket."""
    folder: str
    """What all processes of the server share."""
    ready: Ready


class Listening(msgspec.Struct, tag="listening"):
    """The worker takes connections."""


class Store(msgspec.Struct, tag="store"):
    """Keep a response, which is written as its file is. Answered with nothing when it is kept."""

    response: bytes


class Recall(msgspec.Struct, tag="recall"):
    """A stored response, by its id or by an item it holds. Answered with its file."""

    owner: str
    response_id: str | None = None
    item_id: str | None = None


class Find(msgspec.Struct, tag="find"):
    """To a worker: the record of a request by one of its ids, asked for by this owner, or with None
    by anybody. Answered with its fields.
    """

    an_id: str
    owner: str | None


class Newest(msgspec.Struct, tag="newest"):
    """To a worker: the records of the last requests of this owner, or with None of anybody, newest
    first. Answered with a list of their fields.
    """

    count: int
    owner: str | None


class Ping(msgspec.Struct, tag="ping"):
    """To a worker: does it live? Answered with nothing."""


class Adapters(msgspec.Struct, tag="adapters"):
    """To a worker: all adapters that have a name now. Answered with nothing when requests that the
    worker takes from then on know them.
    """

    adapters: tuple[AdapterFolder, ...]


class Ask(msgspec.Struct, tag="ask"):
    """Answered by `Answer` with the same ticket."""

    ticket: int
    question: Store | Recall | Find | Newest | Ping | Adapters


class Answer(msgspec.Struct, tag="answer"):
    ticket: int
    value: Any = None


class EngineState(msgspec.Struct, tag="state"):
    """To a worker: how the engine is."""

    state: str
    ready: Ready | None


class Failed(msgspec.Struct, tag="failed"):
    """To a worker: a request is lost. What its client is told, as in an `ApiError`."""

    request_id: str
    status: int
    message: str
    kind: str
    field: str | None
    code: str | None
    retry_after: float | None


class Drain(msgspec.Struct, tag="drain"):
    """To a worker: take nobody in any more, and end when all requests have."""


FromWorker = Listening | AddRequest | Abort | End | Ask | Answer
ToWorker = EngineState | Updates | Failed | Ask | Answer | Drain


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_event: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
