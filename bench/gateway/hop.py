"""The peer: the least that aiohttp does to pass a request on and a reply back. Reads both, looks at neither."""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
import uvloop
from aiohttp import web


async def _serve(upstream: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def unary(request: web.Request) -> web.Response:
            body = await request.read()
            async with session.post(
                upstream + request.path, data=body, headers={"Content-Type": "application/json"}
            ) as reply:
                return web.Response(body=await reply.read(), content_type="application/json")

        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{kind}/v1/chat/completions", unary)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        print(json.dumps({"listening": {"hop": f"http://127.0.0.1:{runner.addresses[0][1]}"}}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(uvloop.run(_serve(sys.argv[1])))
