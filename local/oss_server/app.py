"""The server as an ASGI application, with the routes by which tests steer it."""

import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from local.oss_server.auth import Authenticator, Credential
from local.oss_server.context import Settings
from local.oss_server.faults import Fault, FaultBoard
from local.oss_server.gateway import Gateway
from local.oss_server.multipart import MIN_PART_SIZE
from local.oss_server.records import BucketRecord
from local.oss_server.request import bucket_of_host
from local.oss_server.stats import Stats
from local.oss_server.storage import Storage

ADMIN_HEADER = "x-admin-token"
_ADMIN_PATHS = ("/_faults", "/_stats")  # no bucket may be called that


def create_app(
    root: Path,
    credentials: Mapping[str, str | Credential],
    *,
    buckets: Iterable[str] = (),
    region: str = "cn-hangzhou",
    min_part_size: int = MIN_PART_SIZE,
    admin_token: str = "",
    clock: Callable[[], float] = time.time,
) -> Starlette:
    """Return the application.

    Args:
        root: folder of everything kept; made if missing, found again after a restart.
        credentials: access key id to its secret or ``Credential``; read at each request, so it may change later.
        buckets: buckets to make if they are not there.
        region: that V4 signatures must name.
        min_part_size: bytes every part of a multipart upload but the last must have.
        admin_token: opens ``/_faults`` and ``/_stats`` to requests with that ``x-admin-token``; empty closes them.
        clock: the server's time in Unix seconds, for signatures and modification times.

    Returns:
        The application; ``state.faults`` is its ``FaultBoard`` and ``state.stats`` its ``Stats``.
    """
    storage = Storage(root)
    for name in buckets:
        storage.create_bucket(BucketRecord(name, clock()))
    faults, stats = FaultBoard(), Stats()
    settings = Settings(region=region, min_part_size=min_part_size, admin_token=admin_token)
    gateway = Gateway(storage, Authenticator(credentials, region, clock), settings, faults, stats, clock)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        storage.close()

    app = Starlette(lifespan=lifespan)
    app.state.faults, app.state.stats = faults, stats
    # Not a route: a route's pattern would miss keys with a newline.
    app.router.default = _front(gateway, _admin(settings, faults, stats))
    return app


def _front(gateway: ASGIApp, admin: ASGIApp) -> ASGIApp:
    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        is_admin = scope["path"] in _ADMIN_PATHS and not bucket_of_host(host)
        await (admin if is_admin else gateway)(scope, receive, send)

    return front


def _admin(settings: Settings, faults: FaultBoard, stats: Stats) -> ASGIApp:
    async def post_faults(request: Request) -> Response:
        try:
            document = json.loads(await request.body())
            posted = [Fault.from_json(item) for item in (document if isinstance(document, list) else [document])]
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"ids": [faults.add(fault) for fault in posted]}, 201)

    async def handle_faults(request: Request) -> Response:
        if request.method == "POST":
            return await post_faults(request)
        if request.method == "DELETE":
            faults.clear()
            return Response(status_code=204)
        return JSONResponse({"faults": faults.state()})

    async def handle_stats(_request: Request) -> Response:
        return JSONResponse(stats.state())

    router = Router(
        [
            Route("/_faults", handle_faults, methods=["GET", "POST", "DELETE"]),
            Route("/_stats", handle_stats, methods=["GET"]),
        ]
    )

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        given = Request(scope).headers.get(ADMIN_HEADER, "")
        allowed = settings.admin_token and hmac.compare_digest(given.encode(), settings.admin_token.encode())
        refusal = JSONResponse({"error": f"{ADMIN_HEADER} is missing or wrong"}, 403)
        await (router if allowed else refusal)(scope, receive, send)

    return guarded
