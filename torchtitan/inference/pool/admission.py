"""Whether an actor is what the run needs, which it says of itself before it gets any request."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torchtitan.config.job_config import Inference
from torchtitan.inference.actor_client import ActorClient, ActorError, Facts, Offers
from torchtitan.weight_sync.registry.state import differing


class Unfit(ActorError):
    """The actor is not what the run needs: another model, type, length, …"""


class Admission:
    """demands: what the actor has to be (joining.demands). is_ours: whether the run starts its process. write(kind,
    level, …) writes an event of this actor."""

    def __init__(self, config: Inference, demands: Facts, is_ours: bool, write: Callable[..., None]):
        self._config, self._demands, self._is_ours, self._write = config, demands, is_ours, write
        self._admitted = not demands

    def ask_again(self) -> None:
        """The process may be another one."""
        self._admitted = not self._demands

    async def check(self, client: ActorClient) -> None:
        """Compare what the actor says of itself with what the run needs, unless it is admitted.

        Raises:
            Unfit: it is something else.
            ActorError: it does not answer.
        """
        if self._admitted:
            return
        reads_weights = "weights" in self._demands
        timeout_s = self._config.startup_timeout_s if reads_weights else self._config.health_timeout_s
        found = await client.offers(timeout_s, reads_weights)
        if found is not None and (wrong := differing(self._demands, found.offers)):
            engine, version = found.offers.get("engine"), found.offers.get("version")
            named_engine = f" ({engine} {version})" if version else ""
            raise Unfit("offers", f"{client.url} cannot sample for this run: {'; '.join(wrong)}{named_engine}")
        self._admitted = True
        if not self._is_ours and (unknown := _unknown(found)):
            self._write("actor_not_checked", level=logging.WARNING, reason=unknown)


def _unknown(found: Offers | None) -> str:
    """What could not be compared, if anything."""
    if found is None:
        return "it does not say what it is (/offers)"
    if found.unverified:
        return f"its engine does not report {', '.join(found.unverified)}: its command line says so"
    return ""
