"""The runtime of production, where only real sockets show what it does."""

from __future__ import annotations

import socket

from torchtitan.weight_sync.pull.handshake import ACTOR, Call, Identity
from torchtitan.weight_sync.pull.sockets import SocketRuntime


def test_a_port_at_which_no_server_listens_costs_a_call_and_not_the_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    runtime, reasons = SocketRuntime(), []
    identity = Identity.of("token", ACTOR, "actor-0")

    def again(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 3:
            runtime.stop()
        else:
            Call(runtime, address, identity, {}, lambda _channel, _fields: None, again)

    Call(runtime, address, identity, {}, lambda _channel, _fields: None, again)
    runtime.call_later(60.0, runtime.stop)
    runtime.run()
    assert len(reasons) == 3 and all("cannot connect" in reason for reason in reasons)
