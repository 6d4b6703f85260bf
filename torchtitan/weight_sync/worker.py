"""A worker of an actor: it receives, verifies and holds a part of the weights, and applies when its leader says so.

    worker = Worker(leader, "actor-0", 1, epoch, token, apply, boxes)       in every worker's process
    worker.start()

    Receiver(coordinator, "actor-0", epoch, token, apply, workers=2)    the leader's; its workers_address is `leader`

boxes: parameter name -> the part (layout_tables.Box) that this worker holds, whatever the trainer's own layout. The
leader's `apply` has the engine stand still and calls `staged.apply_on_workers()`, which has every worker call its own
`apply` with the tensors of its boxes. Where one of them fails the whole actor is poisoned; a worker that is lost makes
the actor leave, and join again when it is back.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan.weight_sync.applying import ApplyFunction
from torchtitan.weight_sync.layout_tables import Box
from torchtitan.weight_sync.receiver import Receiver
from torchtitan.weight_sync.states.receiver import Served


class Worker(Receiver):
    """A receiver for which the leader stands in for the coordinator. leader: `host:port`; worker: 0, 1, …"""

    def __init__(
        self,
        leader: str,
        actor: str,
        worker: int,
        epoch: str,
        token: str,
        apply: ApplyFunction,
        boxes: Mapping[str, Box] | None,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        served: Served | None = None,
        retry_for_s: float = 60.0,
        where: str = "cpu",
    ):
        super().__init__(
            leader,
            actor,
            epoch,
            token,
            apply,
            host=host,
            advertised_host=advertised_host,
            served=served,
            retry_for_s=retry_for_s,
            where=where,
            boxes=boxes,
            worker=worker,
        )
