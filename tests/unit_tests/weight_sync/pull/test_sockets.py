"""The runtime of production, where only real sockets show what it does."""

from __future__ import annotations

import socket
import threading

from tests.patience import PATIENCE_S
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


def test_connection_that_breaks_while_it_is_made_is_one_failure() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    runtime, reasons, on = SocketRuntime(), [], threading.Event()

    def dial() -> None:
        Call(runtime, address, Identity(ACTOR, "a", "k"), {}, lambda *_: None, failed)
        listener.close()  # with the connection in its backlog: it is reset

    def failed(reason: str) -> None:
        reasons.append(reason)
        runtime.call_later(0.05, on.set)

    runtime.post(dial)
    thread = threading.Thread(target=runtime.run)
    thread.start()
    assert on.wait(PATIENCE_S), "the loop has ended"
    runtime.stop()
    thread.join(PATIENCE_S)
    assert len(reasons) == 1 and "reset" in reasons[0]


def test_every_thread_for_work_begins_as_told() -> None:
    begun: list[str] = []
    runtime, done = SocketRuntime(lambda: begun.append(threading.current_thread().name)), threading.Semaphore(0)
    for lane in ("checksums", "fetch", "checksums"):
        runtime.work(lane, lambda: None, lambda _result, _error: done.release())
    thread = threading.Thread(target=runtime.run)
    thread.start()
    assert all(done.acquire(timeout=PATIENCE_S) for _ in range(3))
    runtime.stop()
    thread.join(PATIENCE_S)
    assert sorted(begun) == ["checksums", "fetch"]
