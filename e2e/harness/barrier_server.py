"""The program of a barrier, in its pod: standard library only. One JSON object in, one out, for each connection."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


class BarrierServer:
    """Holds whoever stands at a point until that is opened. Who goes away is not there any more."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._standing: dict[str, list[dict[str, Any]]] = {}
        self._changed = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """`{"at": point, …}`, `{"until": count, "point": point}` or `{"open": point}`."""
        try:
            if line := await reader.readline():  # a probe says nothing
                answer = await self._answer(json.loads(line), reader)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async def _answer(self, said: dict[str, Any], reader: asyncio.StreamReader) -> object:
        if "at" in said:
            return await self._stand(said["at"], said, reader)
        if "open" in said:
            async with self._changed:
                self._open.add(said["open"])
                self._changed.notify_all()
            return {}
        there = self._standing.setdefault(said["point"], [])
        async with self._changed:
            await self._changed.wait_for(lambda: len(there) >= said["until"])
            return there

    async def _stand(self, point: str, said: dict[str, Any], reader: asyncio.StreamReader) -> object:
        there = self._standing.setdefault(point, [])
        gone = asyncio.create_task(reader.read())
        async with self._changed:
            there.append(said)
            self._changed.notify_all()
        opened = asyncio.create_task(self._until_open(point))
        await asyncio.wait({gone, opened}, return_when=asyncio.FIRST_COMPLETED)
        for task in (gone, opened):
            task.cancel()
        async with self._changed:
            there.remove(said)
            self._changed.notify_all()
        return {}

    async def _until_open(self, point: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: point in self._open)


async def _main() -> None:
    server = await asyncio.start_server(BarrierServer().serve, "0.0.0.0", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
