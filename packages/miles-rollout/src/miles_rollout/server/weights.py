"""Weight routes: from a folder, over torch.distributed, and version labels."""

from __future__ import annotations

from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from miles_rollout.local.checkpoint import Checkpoint
from miles_rollout.local.engine import LocalEngine
from miles_rollout.local.errors import EngineError, RequestError
from miles_rollout.server.bodies import (
    DiskBody,
    DistributedBody,
    GroupBody,
    GroupNameBody,
    VersionBody,
    read_body,
    version_number,
)
from miles_rollout.server.distributed import BroadcastGroups, GroupAddress


async def update_weights_from_disk(request: Request) -> Response:
    """Install a Hugging Face folder, checked whole before anything is stored. Without a label: the next version."""
    body = await read_body(request, DiskBody)
    version = None if body.weight_version is None else version_number(body.weight_version)
    engine = _engine(request)
    checkpoint = await run_in_threadpool(Checkpoint, Path(body.model_path))
    await _abort_if(body.abort_all_requests, engine)
    if body.keep_pause and not engine.paused:
        await run_in_threadpool(engine.port.pause, "retract")
    installed = await run_in_threadpool(engine.port.install_checkpoint, checkpoint, version)
    stats = engine.stats()
    return _success(f"version {installed} installed", num_paused_requests=stats.waiting if stats.paused else 0)


async def update_weight_version(request: Request) -> Response:
    """Label the weights. Unlike SGLang, `abort_all_requests` is false unless asked for."""
    body = await read_body(request, VersionBody)
    engine = _engine(request)
    version = version_number(body.new_version)
    await _abort_if(body.abort_all_requests, engine)
    await run_in_threadpool(engine.port.relabel, version)
    return _success(f"weight version is {version}", new_version=str(version))


async def init_weights_update_group(request: Request) -> Response:
    body = await read_body(request, GroupBody)
    if body.backend != "gloo":
        raise RequestError(f"backend {body.backend!r} is not served by this engine: use gloo", code="unsupported_field")
    seat = GroupAddress(body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name)
    await run_in_threadpool(_groups(request).join, seat)
    return _success(f"group {body.group_name!r} formed: rank {body.rank_offset} of {body.world_size}")


async def destroy_weights_update_group(request: Request) -> Response:
    body = await read_body(request, GroupNameBody)
    await run_in_threadpool(_groups(request).leave, body.group_name)
    return _success(f"group {body.group_name!r} left")


async def update_weights_from_distributed(request: Request) -> Response:
    """Receive one bucket and store it; the engine must be paused. A label commits, as `update_weight_version` does."""
    body = await read_body(request, DistributedBody)
    version = None if body.weight_version is None else version_number(body.weight_version)
    engine, groups = _engine(request), _groups(request)
    await _abort_if(body.abort_all_requests, engine)
    try:
        staged = await run_in_threadpool(groups.receive, body.group_name, body.names, body.dtypes, body.shapes)
        await run_in_threadpool(engine.port.load_bucket, f"distributed:{body.group_name}", staged)
    except EngineError as error:
        # Earlier buckets of this update are stored already: no version has these bytes.
        if engine.port.uncommitted:
            await run_in_threadpool(engine.port.poison, f"an update broke off: {error}")
        raise
    if version is not None:
        await run_in_threadpool(engine.port.relabel, version)
    return _success(f"{len(body.names)} tensors stored")


async def refuse_pickled_tensors(_request: Request) -> Response:
    """`/update_weights_from_tensor` carries pickles."""
    raise RequestError(
        "update_weights_from_tensor carries pickled tensors, which this server does not read: "
        "use update_weights_from_disk or update_weights_from_distributed",
        code="pickle_refused",
    )


async def _abort_if(wanted: bool, engine: LocalEngine) -> None:
    if wanted:
        await engine.abort()


def _success(message: str, **extra: object) -> Response:
    return JSONResponse({"success": True, "message": message, **extra})


def _engine(request: Request) -> LocalEngine:
    engine: LocalEngine = request.app.state.engine
    return engine


def _groups(request: Request) -> BroadcastGroups:
    groups: BroadcastGroups = request.app.state.groups
    return groups
