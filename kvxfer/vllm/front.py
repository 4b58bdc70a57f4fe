"""A front end for engines that stream: it hands each request to a prefill and a decode engine at once.

    python -m kvxfer.vllm.front --port 8000 --prefill http://HOST:8100 tcp://HOST:5600 --decode http://HOST:8200

The least that does it, and an example for routers: engines take turns, nothing is retried, and nobody's health is
looked at. What clients say of kv_transfer_params is not passed on.

Imports aiohttp, which vLLM brings, and nothing of kvxfer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import aiohttp
from aiohttp import web

_log = logging.getLogger("kvxfer.vllm.front")

PATHS = ("/v1/completions", "/v1/chat/completions")


class Front:
    """`prefill`: pairs of an engine's HTTP address and the one at which its scheduler's connector listens."""

    def __init__(self, prefill: list[tuple[str, str]], decode: list[str]) -> None:
        self._prefill: Iterator[tuple[str, str]] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._client: aiohttp.ClientSession

    def application(self) -> web.Application:
        """Answers completions and `/health`."""
        app = web.Application(client_max_size=1 << 26)
        app.cleanup_ctx.append(self._connect)
        app.add_routes([web.post(path, self.complete) for path in PATHS])
        app.router.add_get("/health", lambda _: web.Response())
        return app

    async def _connect(self, app: web.Application) -> Any:
        # A connection that lies idle may be closed by the engine just as it is used again.
        fresh = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=fresh) as self._client:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Decode's answer, as it comes. When it ends, or the client leaves, both engines are left alone."""
        body = await request.json()
        (prefill, endpoint), decode = next(self._prefill), next(self._decode)
        stream = uuid.uuid4().hex
        computing = asyncio.create_task(self._compute(request, prefill, for_prefill(body, stream)))
        try:
            async with self._post(request, decode, for_decode(body, stream, endpoint)) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectionError as error:
            return web.json_response({"error": {"message": f"decode engine: {error}"}}, status=502)
        finally:
            computing.cancel()

    async def _compute(self, request: web.Request, prefill: str, body: dict[str, Any]) -> None:
        """Have the prompt computed. Whatever goes wrong, decode's engine learns it, or waits for its deadline."""
        try:
            async with self._post(request, prefill, body) as answer:
                if answer.status != 200:
                    _log.warning("%s: %d %s", prefill, answer.status, (await answer.text())[:500])
                await answer.read()
        except aiohttp.ClientError as error:
            _log.warning("%s: %s", prefill, error)

    def _post(self, request: web.Request, engine: str, body: dict[str, Any]) -> Any:
        passed_on = {name: value for name, value in request.headers.items() if name.lower() == "authorization"}
        return self._client.post(engine + request.path, json=body, headers=passed_on)


def for_prefill(body: dict[str, Any], stream: str) -> dict[str, Any]:
    """A client's request, as the prefill engine gets it: one token, in one piece."""
    changed = {name: value for name, value in body.items() if name not in ("stream_options", "max_completion_tokens")}
    return changed | {
        "max_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "kvxfer_stream": {"id": stream}},
    }


def for_decode(body: dict[str, Any], stream: str, endpoint: str) -> dict[str, Any]:
    """A client's request, as the decode engine gets it. `endpoint` is where prefill's connector listens."""
    key = {"id": stream, "prefill": endpoint}
    return body | {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True, "kvxfer_stream": key}}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="kvxfer.vllm.front", description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs=2, action="append", required=True, metavar=("URL", "ENDPOINT"))
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    prefill = [(url.rstrip("/"), endpoint) for url, endpoint in options.prefill]
    front = Front(prefill, [url.rstrip("/") for url in options.decode])
    web.run_app(
        front.application(),
        host=options.host,
        port=options.port,
        handler_cancellation=True,
        print=None,
        access_log=None,
    )


if __name__ == "__main__":
    main()
