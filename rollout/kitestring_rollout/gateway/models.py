"""The models of a run and where each is served: as the configuration says, and as the trainer says later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from kitestring_rollout.gateway.config import GatewayConfig
from kitestring_rollout.gateway.errors import Refusal
from kitestring_rollout.traces.records import Json

REMEMBERED_ORDERS: Final = 65_536


@dataclass(slots=True, eq=False)
class Model:
    """A model by its name in the run. `servers` are OpenAI base URLs with their version."""

    name: str
    served_name: str
    servers: tuple[str, ...]
    trained: bool
    api_key: str | None = field(default=None, repr=False)
    _orders: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

    def servers_for(self, attempt: str) -> tuple[str, ...]:
        """All servers in the order to try: the calls of an attempt share a server's prefix cache.

        Each attempt ranks the servers by a draw of its own, so that attempts spread over them, and a server that comes
        or goes moves only those attempts that rank it first.
        """
        if len(self.servers) == 1:
            return self.servers
        order = self._orders.get(attempt)
        if order is None:
            if len(self._orders) >= REMEMBERED_ORDERS:
                self._orders.clear()
            order = tuple(sorted(self.servers, key=lambda server: hash((attempt, server))))
            self._orders[attempt] = order
        return order

    def serve_from(self, urls: Iterable[str]) -> None:
        """From now on these are its servers; base URLs without version. Calls in flight end where they are."""
        self.servers = tuple(f"{url.rstrip('/')}/v1" for url in urls)
        self._orders.clear()


class Models:
    """Looks models up by name or alias. `api_keys`: by frozen model."""

    def __init__(self, config: GatewayConfig, api_keys: dict[str, str]) -> None:
        self.trained: dict[str, Model] = {}
        self._by_name: dict[str, Model] = {}
        for policy in config.policies:
            model = Model(policy.name, policy.served_name or policy.name, (), trained=True)
            model.serve_from(policy.servers)
            self.trained[policy.name] = model
            for name in (policy.name, *policy.aliases):
                self._by_name[name] = model
        for frozen in config.frozen:
            model = Model(
                frozen.name,
                frozen.model,
                (frozen.url.rstrip("/"),),
                trained=False,
                api_key=api_keys.get(frozen.name),
            )
            for name in (frozen.name, *frozen.aliases):
                self._by_name[name] = model

    def __iter__(self) -> Iterator[Model]:
        """Each model once."""
        return iter(dict.fromkeys(self._by_name.values()))

    def named_in(self, body: Json) -> tuple[str, Model]:
        """The name that a request gives and the model it means; Refusal 400 or 404."""
        name: Any = body.get("model")
        return name, self.find(name)

    def find(self, name: Any) -> Model:
        """Refusal 400 when no name is given, 404 when there is no such model."""
        if not isinstance(name, str) or not name:
            raise Refusal(400, "model_missing", "the request names no model", param="model")
        model = self._by_name.get(name)
        if model is None:
            raise Refusal(
                404,
                "model_not_found",
                f"there is no model {name[:256]!r}; this run has: {', '.join(self._by_name)}",
                param="model",
            )
        return model

    def listing(self, created: int) -> bytes:
        """Body of GET /v1/models: policies, frozen models and their aliases."""
        data = [
            {"id": name, "object": "model", "created": created, "owned_by": "kitestring", "root": model.name}
            for name, model in self._by_name.items()
        ]
        return orjson.dumps({"object": "list", "data": data})

    def one(self, name: str, created: int) -> bytes:
        """Body of GET /v1/models/{name}."""
        model = self.find(name)
        return orjson.dumps(
            {"id": name, "object": "model", "created": created, "owned_by": "kitestring", "root": model.name}
        )
