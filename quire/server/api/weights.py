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
from quire.server.api.body import Body
from quire.server.errors import ApiError
from quire.server.guard.auth import seen_by
from quire.server.guard.connection import body_schema, read_body
from quire.server.http_responses import JsonResponse
from quire.server.link.engine_client import EngineClient, unavailable
from quire.server.service import GenerationService, get_service
from quire.step import PauseMode

logger = logging.getLogger(__name__)
router = APIRouter(tags=["vLLM"])

_SECONDS = 600.0
"""For files to be read, or the weights' memory to be given back or taken."""
_NCCL_FIELDS = ("master_address", "master_port", "rank_offset", "world_size")


class InitRequest(Body):
    """POST /init_weight_transfer_engine."""

    init_info: dict[str, Any]
    """`backend`: disk or shared_memory."""


class StartRequest(Body):
    """POST /start_weight_update."""

    is_checkpoint_format: bool = True


class UpdateInfo(Body):
    """Where tensors lie."""

    backend: Literal["disk", "shared_memory", "nccl", "ipc"] | None = None
    """By default the one that the last init named."""
    path: str | None = Field(None, min_length=1, max_length=4096)
    """With disk: a folder in --weights-dir, or a .safetensors file."""
    name: str | None = Field(None, min_length=1, max_length=250)
    """With shared_memory: a safetensors file there."""
    names: list[str] | None = Field(None, max_length=100_000)
    dtype_names: list[str] | None = Field(None, max_length=100_000)
    shapes: list[list[int]] | None = Field(None, max_length=100_000)
    packed: bool | None = None


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
    """How many processes have weights."""
    config = get_service(request).config
    size = int(config.engine.get("tensor_parallel_size", 1))
    return JsonResponse({"world_size": size * config.replicas if include_dp else size})


@router.post("/init_weight_transfer_engine", openapi_extra=body_schema(InitRequest))
async def init_weight_transfer_engine(request: Request) -> Response:
    """Says how tensors will come: `init_info.backend` is disk or shared_memory."""
    service, _ = _administered(request)
    info = (await read_body(request, InitRequest)).init_info
    is_nccl = any(name in info for name in _NCCL_FIELDS)
    backend = _backend(info.get("backend", "nccl" if is_nccl else "disk"), "init_info.backend")
    request.app.state.weights_backend = backend
    if backend == "disk" and service.config.weights_folder is None:
        raise InvalidRequestError("init_info.backend", "disk needs a server with --weights-dir")
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
    """Names files of the update that was begun. They are checked now and read when it is finished."""
    service, engine = _administered(request)
    info = (await read_body(request, UpdateRequest)).update_info
    default = getattr(request.app.state, "weights_backend", "disk")
    backend = _backend(info.backend or default, "update_info.backend")
    wanted, other = ("path", "name") if backend == "disk" else ("name", "path")
    path = getattr(info, wanted)
    for name in (other, "names", "dtype_names", "shapes", "packed"):
        if getattr(info, name) is not None:
            raise InvalidRequestError(
                f"update_info.{name}",
                f"goes with another backend than {backend}, which wants {wanted}",
            )
    if path is None:
        raise InvalidRequestError(f"update_info.{wanted}", f"is missing: {backend} needs it")
    folder = service.config.weights_folder
    if backend == "disk" and folder is None:
        raise InvalidRequestError("update_info.path", "needs a server with --weights-dir")
    root = None if folder is None else str(folder)
    found = await engine.control("add_files", _SECONDS, backend=backend, folder=root, path=path)
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


def _backend(name: Any, field: str) -> str:
    if name in ("disk", "shared_memory"):
        return str(name)
    shown = repr(name)[:100]
    raise ApiError(
        501,
        f"{field}: {shown} is not supported; there are disk and shared_memory",
        field=field,
        code="unsupported",
    )


async def _state(request: Request) -> dict[str, Any]:
    _, engine = _administered(request)
    return await engine.control("state", 30.0)


def _done(status: str, found: dict[str, Any]) -> Response:
    return JsonResponse({"status": status, **found})


def _administered(request: Request) -> tuple[GenerationService, EngineClient]:
    """For those who may change what is served: holders of an admin key; where there are no keys,
    clients on this machine.
    """
    service = get_service(request)
    config = service.config
    is_allowed = seen_by(request.scope) is None if config.api_keys else not config.is_public
    if not is_allowed:
        raise ApiError(403, "this needs an admin key (--admin-key)", code="admin_key_needed")
    for name, count in (("--http-workers", config.http_workers), ("--replicas", config.replicas)):
        if count > 1:
            raise ApiError(
                501,
                f"one engine is paused or updated, not those of {name} {count}",
                code="unsupported",
            )
    if not service.client.engines:
        raise unavailable()
    return service, service.client.engines[0]
