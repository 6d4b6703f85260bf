"""Whether a shard server should hand a slot's file to the kernel: os.sendfile ÷ sending from the mapped memory.

One process sends a version that lies in a memfd, as slots do, to each of N receivers, one thread for all of them, as a
shard server has it. Each receiver is a process that takes the bytes into its tensors' memory and checksums them, as an
actor does. The sockets, pieces and checksum are those of the weight synchronisation; there are no frames.

    sender_cpu_ratio_N     processor time of the sending process, sendfile ÷ mapped memory
    receiver_cpu_ratio_N   of all receivers
    all_cpu_ratio_N        of both together
    wall_ratio_N           seconds until the last receiver has a version

Medians over turns. Over loopback a receiver of sendfile reads the page cache's pages instead of a socket's buffer; with
a network card between them it would not.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import statistics
import sys
import time
from typing import Any

import xxhash

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.processes import Child, say
from torchtitan.weight_sync.wire.sockets import PIECE_BYTES, SEND_BYTES

BARS: common.Bars = {}
OPTIONS = {
    "megabytes": Option(256, "of a version", quick=16),
    "receivers": Option([1, 4, 16], "how many at once, one measurement for each", type=int, count=3),
    "repeats": Option(9, quick=2),
}
BUCKET_BYTES = 16 << 20


def send(arguments: dict[str, Any]) -> None:
    """In a child: sends its file to all receivers whenever it is told how, each its next piece in turn."""
    size, count = arguments["bytes"], arguments["receivers"]
    file = os.memfd_create("slot")
    os.ftruncate(file, size)
    mapped = memoryview(mmap.mmap(file, size))
    mapped[:] = os.urandom(1 << 20) * (size >> 20)
    connections = []
    with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
        say({"port": listener.getsockname()[1]})
        for _ in range(count):
            connections.append(listener.accept()[0])
            connections[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    say({"ready": True})
    for line in sys.stdin:
        start, cpu = time.monotonic(), time.process_time()
        for position, connection in itertools.product(range(0, size, SEND_BYTES), connections):
            end = min(position + SEND_BYTES, size)
            if "sendfile" in line:
                while position < end:
                    position += os.sendfile(connection.fileno(), file, position, end - position)
            else:
                connection.sendall(mapped[position:end])
        say({"start": start, "cpu_s": time.process_time() - cpu})


def receive(arguments: dict[str, Any]) -> None:
    """In a child: takes version after version into memory that has been touched."""
    target = memoryview(bytearray(b"x" * arguments["bytes"]))
    with socket.create_connection(("127.0.0.1", arguments["port"])) as connection:
        while True:
            cpu = time.process_time()
            for bucket in range(0, len(target), BUCKET_BYTES):
                checksum, filled, end = xxhash.xxh3_128(), bucket, min(bucket + BUCKET_BYTES, len(target))
                while filled < end:
                    count = connection.recv_into(target[filled : min(filled + PIECE_BYTES, end)])
                    if count == 0:
                        return
                    checksum.update(target[filled : filled + count])
                    filled += count
            say({"end": time.monotonic(), "cpu_s": time.process_time() - cpu})


def figures_of(run: Run, count: int) -> dict[str, float]:
    """With so many receivers."""
    size = run.options.megabytes << 20
    sender = Child(send, {"bytes": size, "receivers": count})
    run.closing.callback(sender.close)
    port = sender.answer()["port"]
    receivers = [Child(receive, {"bytes": size, "port": port}) for _ in range(count)]
    for receiver in receivers:
        run.closing.callback(receiver.close)
    sender.answer()
    taken: dict[str, list[tuple[float, float, float]]] = {"sendfile": [], "mapped": []}

    def turn(how: str) -> float:
        sender.tell({"how": how})
        sent, received = sender.answer(), [receiver.answer() for receiver in receivers]
        wall = max(answer["end"] for answer in received) - sent["start"]
        taken[how].append((sent["cpu_s"], sum(answer["cpu_s"] for answer in received), wall))
        return wall

    common.interleaved({"sendfile": lambda: turn("sendfile"), "mapped": lambda: turn("mapped")}, run.options.repeats)
    for child in (sender, *receivers):
        child.close()
    median = {}
    for how, turns in taken.items():
        median[how] = [statistics.median(column) for column in zip(*turns[1:], strict=True)]
    (sender_s, receivers_s, wall_s), (mapped_sender_s, mapped_receivers_s, mapped_wall_s) = median.values()
    gigabytes = size * count / 1e9
    return {
        f"sender_cpu_ratio_{count}": sender_s / mapped_sender_s,
        f"receiver_cpu_ratio_{count}": receivers_s / mapped_receivers_s,
        f"all_cpu_ratio_{count}": (sender_s + receivers_s) / (mapped_sender_s + mapped_receivers_s),
        f"wall_ratio_{count}": wall_s / mapped_wall_s,
        f"mapped_cpu_s_per_gb_{count}": (mapped_sender_s + mapped_receivers_s) / gigabytes,
    }


def measure(run: Run) -> dict[str, float]:
    figures: dict[str, float] = {}
    for count in run.options.receivers:
        common.progress(f"{count} receivers")
        figures |= figures_of(run, count)
    return figures
