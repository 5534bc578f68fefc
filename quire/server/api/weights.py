"""POST /pause, /resume, /sleep, /wake_up, /reset_prefix_cache, /init_weight_transfer_engine,
/start_weight_update, /update_weights, /finish_weight_update, GET /is_paused, /is_sleeping,
/weight_info and /get_world_size: what vLLM's development mode has for trainers, with its fields;
for administrators.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import Field

from quire.errors import InvalidRequestError
from quire.parallel.packs import PACKED_BYTES
from quire.server.api.body import Body, body_schema
from quire.server.api.endpoint import read_body
from quire.server.errors import ApiError
from quire.server.guard.auth import seen_by
from quire.server.http_responses import JsonResponse
from quire.server.link.engine_client import Engines
from quire.server.service import GenerationService, get_service
from quire.step import PauseMode

logger = logging.getLogger(__name__)
router = APIRouter(tags=["vLLM"])

_SECONDS = 600.0
"""For files to be read, or the weights' memory to be given back or taken."""
_GROUP_FIELDS = ("master_address", "master_port", "rank_offset", "world_size", "timeout_seconds")


_GROUP_SECONDS = 120.0
"""For a trainer's group to come together, and for each broadcast."""
_SECONDS_OF_TRANSFER = 3600.0
_MOST_TENSORS = 100_000

_Count = Annotated[int, Field(ge=1, le=2**40)]


class InitInfo(Body):
    """How tensors will come."""

    backend: Literal["disk", "shared_memory", "gloo", "nccl"] | None = None
    """By default a trainer's group, if it is described, else disk."""
    master_address: str | None = Field(None, min_length=1, max_length=255)
    """Where the trainer, rank 0 of a process group, has opened a TCPStore."""
    master_port: int | None = Field(None, ge=1, le=65535)
    rank_offset: int | None = Field(None, ge=1, le=10_000)
    """The rank of the first engine."""
    world_size: int | None = Field(None, ge=2, le=10_000)
    timeout_seconds: float | None = Field(None, gt=0, le=600)
    """For the group to come together, and for each broadcast: 120 by default."""


class InitRequest(Body):
    """POST /init_weight_transfer_engine."""

    init_info: InitInfo


class StartRequest(Body):
    """POST /start_weight_update."""

    is_checkpoint_format: bool = True


class UpdateInfo(Body):
    """Where tensors lie, or what will be broadcast."""

    backend: Literal["disk", "shared_memory", "gloo", "nccl"] | None = None
    """By default the one that the last init named."""
    path: str | None = Field(None, min_length=1, max_length=4096)
    """With disk: a folder in --weights-dir, or a .safetensors file."""
    name: str | None = Field(None, min_length=1, max_length=250)
    """With shared_memory: a safetensors file there."""
    names: list[str] | None = Field(None, min_length=1, max_length=_MOST_TENSORS)
    """With gloo and nccl: what is broadcast, in this order."""
    dtype_names: list[str] | None = Field(None, max_length=_MOST_TENSORS)
    shapes: list[Annotated[list[_Count], Field(max_length=8)]] | None = Field(
        None, max_length=_MOST_TENSORS
    )
    packed: bool | None = None
    """Several tensors in one broadcast, until they are more than `packed_buffer_size_bytes`."""
    packed_buffer_size_bytes: int | None = Field(None, ge=1, le=2**40)
    packed_num_buffers: int | None = Field(None, ge=1, le=1000)
    """Of the trainer: here one is enough."""


_GROUPS = ("gloo", "nccl")
_FIELDS_OF = {
    "disk": ("path",),
    "shared_memory": ("name",),
    **dict.fromkeys(
        _GROUPS,
        (
            "names",
            "dtype_names",
            "shapes",
            "packed",
            "packed_buffer_size_bytes",
            "packed_num_buffers",
        ),
    ),
}
"""What an update says with each backend; the first must be there."""


class UpdateRequest(Body):
    """POST /update_weights."""

    update_info: UpdateInfo


class FinishRequest(Body):
    """POST /finish_weight_update."""

    weight_version: int | str | None = None
    """A whole number, higher than all before; by default one more."""
    abort: bool = False
    """Forget the update: the weights stay."""


@router.post("/pause")
async def pause(
    request: Request,
    mode: Annotated[PauseMode, Query()] = "abort",
    wait_for_inflight_requests: Annotated[bool, Query()] = False,
    clear_cache: Annotated[bool, Query()] = True,
) -> Response:
    """Has nobody computed until /resume, so that weights can be replaced. Requests that have begun
    end (`abort`), are computed to their end first (`wait`), or stay (`keep`); others wait.
    """
    service, engine = _administered(request)
    mode = "wait" if wait_for_inflight_requests else mode
    found = await engine.control("pause", service.config.request_seconds, mode=mode)
    if clear_cache and mode != "keep":
        found = await engine.control("reset_prefix_cache", _SECONDS)
    return _done("paused", found)


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Ends a pause."""
    _, engine = _administered(request)
    return _done("resumed", await engine.control("resume", _SECONDS))


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Whether the engine is paused."""
    found = await _state(request)
    return JsonResponse({"is_paused": found["is_paused"]})


@router.post("/sleep")
async def sleep(
    request: Request,
    level: Annotated[int, Query(ge=1, le=2)] = 1,
    mode: Annotated[PauseMode, Query()] = "abort",
) -> Response:
    """Gives the memory of cache and weights back, until /wake_up; requests are refused meanwhile.
    At level 1 weights are kept in host memory, at level 2 they are read from files again.
    """
    service, engine = _administered(request)
    seconds = service.config.request_seconds + _SECONDS
    return _done("asleep", await engine.control("sleep", seconds, level=level, mode=mode))


@router.post("/wake_up")
async def wake_up(
    request: Request, tags: Annotated[list[str] | None, Query(max_length=10)] = None
) -> Response:
    """Takes the memory again."""
    _, engine = _administered(request)
    if tags is not None and {*tags} != {"weights", "kv_cache"}:
        raise InvalidRequestError("tags", "weights and cache wake up together: leave it out")
    return _done("awake", await engine.control("wake_up", _SECONDS))


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Whether the engine sleeps."""
    found = await _state(request)
    return JsonResponse({"is_sleeping": found["is_sleeping"]})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forgets all cached prefixes; refused while requests run that no pause has stopped."""
    _, engine = _administered(request)
    return _done("reset", await engine.control("reset_prefix_cache", _SECONDS))


@router.get("/weight_info")
async def weight_info(request: Request) -> Response:
    """The version of the weights: 0 as loaded."""
    found = await _state(request)
    return JsonResponse({"weight_version": found["weights_version"]})


@router.get("/get_world_size")
async def get_world_size(request: Request, include_dp: Annotated[bool, Query()] = True) -> Response:
    """How many processes receive weights: one for each engine, which passes them on to its others."""
    return JsonResponse({"world_size": get_service(request).config.replicas if include_dp else 1})


@router.post("/init_weight_transfer_engine", openapi_extra=body_schema(InitRequest))
async def init_weight_transfer_engine(request: Request) -> Response:
    """Says how tensors will come: `init_info.backend` is disk, shared_memory, or gloo or nccl, where
    this waits until a trainer's process group has come together.
    """
    service, engine = _administered(request)
    info = (await read_body(request, InitRequest)).init_info
    has_group = any(getattr(info, name) is not None for name in _GROUP_FIELDS)
    backend = info.backend or ("auto" if has_group else "disk")
    is_group = backend in (*_GROUPS, "auto")
    for name in _GROUP_FIELDS:
        if (getattr(info, name) is not None) != is_group and name != "timeout_seconds":
            what = "is missing" if is_group else f"goes with {' or '.join(_GROUPS)}, not {backend}"
            raise InvalidRequestError(f"init_info.{name}", what)
    if backend == "disk" and service.config.weights_folder is None:
        raise InvalidRequestError("init_info.backend", "disk needs a server with --weights-dir")
    if is_group:
        seconds = info.timeout_seconds or _GROUP_SECONDS
        found = await engine.control(
            "join_group",
            seconds + _SECONDS,
            address=info.master_address,
            port=info.master_port,
            rank=info.rank_offset,
            world_size=info.world_size,
            backend=backend,
            timeout=seconds,
        )
        backend = found["backend"]
    request.app.state.weights_backend = backend
    return JsonResponse({"message": "Weight transfer initialized", "backend": backend})


@router.post("/start_weight_update", openapi_extra=body_schema(StartRequest))
async def start_weight_update(request: Request) -> Response:
    """Begins an update; there is one at a time, and it is forgotten after ten minutes of silence."""
    _, engine = _administered(request)
    body = await read_body(request, StartRequest) if await request.body() else StartRequest()
    if not body.is_checkpoint_format:
        raise InvalidRequestError("is_checkpoint_format", "must be true: names as in checkpoints")
    return _done("started", await engine.control("start_update", _SECONDS))


@router.post("/update_weights", openapi_extra=body_schema(UpdateRequest))
async def update_weights(request: Request) -> Response:
    """Adds to the update that was begun: files, or what a trainer broadcasts now. Answers when all is
    in the host's memory.
    """
    service, engine = _administered(request)
    info = (await read_body(request, UpdateRequest)).update_info
    default: str = getattr(request.app.state, "weights_backend", "disk")
    backend: str = info.backend or default
    own = _FIELDS_OF[backend]
    for name in sorted(UpdateInfo.model_fields.keys() - {"backend", *own}):
        if getattr(info, name) is not None:
            raise InvalidRequestError(
                f"update_info.{name}",
                f"goes with another backend than {backend}, which wants {own[0]}",
            )
    if getattr(info, own[0]) is None:
        raise InvalidRequestError(f"update_info.{own[0]}", f"is missing: {backend} needs it")
    if backend in _GROUPS:
        return _taken(await engine.control("receive", _SECONDS_OF_TRANSFER, **_announced(info)))
    folder = service.config.weights_folder
    if backend == "disk" and folder is None:
        raise InvalidRequestError("update_info.path", "needs a server with --weights-dir")
    root = None if folder is None else str(folder)
    path = getattr(info, own[0])
    return _taken(
        await engine.control("add_files", _SECONDS, backend=backend, folder=root, path=path)
    )


def _announced(info: UpdateInfo) -> dict[str, Any]:
    """What a trainer is about to broadcast."""
    names, dtypes, shapes = info.names or [], info.dtype_names, info.shapes
    for field, values in (("dtype_names", dtypes), ("shapes", shapes)):
        if values is None or len(values) != len(names):
            raise InvalidRequestError(
                f"update_info.{field}", f"must have one entry for each of {len(names)} names"
            )
    packed_bytes = None
    if info.packed:
        packed_bytes = info.packed_buffer_size_bytes or PACKED_BYTES
    elif info.packed_buffer_size_bytes is not None or info.packed_num_buffers is not None:
        raise InvalidRequestError("update_info.packed", "must be true where buffers are named")
    return {"names": names, "dtypes": dtypes, "shapes": shapes, "packed_bytes": packed_bytes}


def _taken(found: dict[str, Any]) -> Response:
    return JsonResponse({"message": "Weights taken", **found})


@router.post("/finish_weight_update", openapi_extra=body_schema(FinishRequest))
async def finish_weight_update(request: Request) -> Response:
    """Replaces the weights by those of the update, between two steps: refused while requests run
    that no pause has stopped. Whatever is wrong leaves the old ones.
    """
    _, engine = _administered(request)
    body = await read_body(request, FinishRequest) if await request.body() else FinishRequest()
    version = body.weight_version
    if isinstance(version, str):
        if not version.isascii() or not version.isdigit() or len(version) > 18:
            raise InvalidRequestError("weight_version", "must be a whole number")
        version = int(version)
    found = await engine.control("finish_update", _SECONDS, version=version, abort=body.abort)
    return _done("forgotten" if body.abort else "finished", found)


async def _state(request: Request) -> dict[str, Any]:
    _, engine = _administered(request)
    return await engine.control("state", 30.0)


def _done(status: str, found: dict[str, Any]) -> Response:
    return JsonResponse({"status": status, **found})


def _administered(request: Request) -> tuple[GenerationService, Engines]:
    """For those who may change what is served: holders of an admin key; where there are no keys,
    clients on this machine.
    """
    service = get_service(request)
    config = service.config
    is_allowed = seen_by(request.scope) is None if config.api_keys else not config.is_public
    if not is_allowed:
        raise ApiError(403, "this needs an admin key (--admin-key)", code="admin_key_needed")
    return service, service.client
