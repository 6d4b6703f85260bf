"""The disk transport against what it stands on: seconds of plain requests ÷ seconds of ours, for the same bytes.

Needs the extra `remote` and moto[server].

    s3_put_ratio, s3_get_ratio    aiobotocore's put_object and get_object, one bucket after the other, ÷ SlotFiles.write
                                  and read_parts, with the threads that they have, on moto's server on this machine
    folder_read_ratio             readinto of an open file ÷ read_parts, both with xxh3, from the page cache
    delta_bytes_ratio             bytes that an actor reads of a delta version ÷ what tcp sends of it

Plain and ours take turns, and ratios are medians over the turns. moto's server is slow: it shows what our part adds to
a request, not what a store can do.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from benchmarks import common
from benchmarks.weight_sync.harness import Option, Run
from benchmarks.weight_sync.job import EPOCH
from tests.moto_server import moto_server
from torchtitan.distributed.boxes import Box
from torchtitan.weight_sync.memory.delta import encode, shortest
from torchtitan.weight_sync.memory.layout_tables import ParameterEntry, ParameterTable, ShardTable
from torchtitan.weight_sync.memory.manifest import Layout
from torchtitan.weight_sync.memory.transfer import READERS
from torchtitan.weight_sync.transports.disk import SlotFiles, read_parts
from torchtitan.weight_sync.transports.stores import Objects, store_of

BUCKET = 16 << 20
BARS = {
    "s3_put_ratio": (">=", 0.8), "s3_get_ratio": (">=", 0.8), "folder_read_ratio": (">=", 0.9),
    "delta_bytes_ratio": ("<=", 1.01),
}  # fmt: skip
OPTIONS = {
    "buckets": Option(4, "of 16 MB, in the object store; four times as many in the folder", quick=1),
    "repeats": Option(5, quick=1),
}


class Rank:
    """A rank's snapshots in a store, and an actor that reads them."""

    def __init__(self, url: str, buckets: int, whole_every: int = 1):
        size = buckets * BUCKET
        table = ParameterTable.of([ParameterEntry("w", "bfloat16", (size // 2,))])
        self.layout = Layout(BUCKET, table, (ShardTable.of(table, [(0, Box((0,), (size // 2,)))]),))
        self.store = store_of(url)
        self.files = SlotFiles(self.store, EPOCH, 0, 1, self.layout, whole_every)
        self.staging = memoryview(bytearray(size))

    def write(self, serial: int, memory: memoryview) -> None:
        self.files.write(0, serial, serial, memory, lambda: None)

    def read(self, held: int | None = None) -> int:
        """All buckets, verified as an actor does; how many bytes that were."""

        def bucket(start: int) -> int:
            reference, target = self.files.refer(0, start, start + BUCKET), self.staging[start : start + BUCKET]
            parts = shortest(reference["parts"], BUCKET, held)
            read_parts(self.store, parts, reference["element"], target)
            xxhash.xxh3_128_hexdigest(target)
            return sum(part[3] for part in parts)

        starts = range(0, len(self.staging), BUCKET)
        # As an actor's threads do.
        with ThreadPoolExecutor(READERS) as pool:
            return sum((pool.map if isinstance(self.store, Objects) else map)(bucket, starts))


def object_store(buckets: int, repeats: int) -> dict[str, float]:
    """Plain requests and ours."""
    from aiobotocore.session import get_session

    with moto_server() as address:
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {**keys, "FSSPEC_S3_ENDPOINT_URL": address}
        Objects("s3://bucket")._files.mkdir("bucket")
        rank, data = Rank("s3://bucket/weights", buckets), os.urandom(buckets * BUCKET)
        loop = asyncio.new_event_loop()
        client = loop.run_until_complete(get_session().create_client("s3", endpoint_url=address).__aenter__())

        async def put() -> None:
            for number in range(buckets):
                body = data[number * BUCKET : (number + 1) * BUCKET]
                await client.put_object(Bucket="bucket", Key=f"plain/{number}", Body=body)

        async def get() -> None:
            for number in range(buckets):
                found = await client.get_object(Bucket="bucket", Key=f"plain/{number}")
                xxhash.xxh3_128_hexdigest(await found["Body"].read())

        rank.write(1, memoryview(data))
        loop.run_until_complete(put())
        seconds = common.interleaved(
            {
                "plain put": lambda: common.timed(lambda: loop.run_until_complete(put())),
                "our put": lambda: common.timed(lambda: rank.write(1, memoryview(data))),
                "plain get": lambda: common.timed(lambda: loop.run_until_complete(get())),
                "our get": lambda: common.timed(rank.read),
            },
            repeats,
        )
        assert rank.staging == data
        loop.run_until_complete(client.__aexit__(None, None, None))
        loop.close()
    return {
        "s3_put_ratio": common.median_ratio(seconds["plain put"], seconds["our put"]),
        "s3_get_ratio": common.median_ratio(seconds["plain get"], seconds["our get"]),
    }


def local_folder(folder: Path, buckets: int, repeats: int) -> dict[str, float]:
    """A local folder, and the bytes of a delta."""
    generator = np.random.default_rng(0)
    rank = Rank(str(folder), buckets, whole_every=10)
    values = generator.integers(0, 1 << 16, buckets * BUCKET // 2, dtype=np.uint16)
    old = memoryview(values.tobytes())
    rank.write(1, old)
    path = next(folder.glob("*/*/model.safetensors"))

    def plain() -> None:
        with path.open("rb") as file:
            file.seek(path.stat().st_size - len(old))
            for start in range(0, len(old), BUCKET):
                file.readinto(rank.staging[start : start + BUCKET])
                xxhash.xxh3_128_hexdigest(rank.staging[start : start + BUCKET])

    seconds = common.interleaved(
        {"plain": lambda: common.timed(plain), "ours": lambda: common.timed(rank.read)}, repeats
    )
    values[generator.integers(0, len(values), len(values) // 30)] += 1
    new = memoryview(values.tobytes())
    rank.write(2, new)
    read, sent = rank.read(held=1), 0
    assert rank.staging == new
    for start in range(0, len(new), BUCKET):
        sent += len(encode(new[start : start + BUCKET], old[start : start + BUCKET], 2) or new[:BUCKET])
    ratio = common.median_ratio(seconds["plain"], seconds["ours"])
    return {"folder_read_ratio": ratio, "delta_bytes_ratio": read / sent}


def measure(run: Run) -> dict[str, float]:
    buckets, repeats = run.options.buckets, run.options.repeats
    return {**local_folder(run.folder, 4 * buckets, 2 * repeats), **object_store(buckets, repeats)}
