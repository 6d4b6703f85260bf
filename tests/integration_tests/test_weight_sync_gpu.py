"""What only a GPU shows: pinned copies beside the computation, the fence, CUDA IPC, and NCCL between two GPUs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from benchmarks.weight_sync.scenarios.gpu import LateStream
from tests.checksums import sum_checksum_numpy
from tests.integration_tests.test_pulling import Job
from tests.patience import PATIENCE_S
from torchtitan.distributed.checksum import sum_checksum
from torchtitan.weight_sync.memory.slots import LiveSlots
from torchtitan.weight_sync.trainer import publisher as publisher_module
from torchtitan.weight_sync.trainer.publisher import Publisher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two GPUs (NCCL has one per member of a communicator), torch sees {torch.cuda.device_count()}",
)


def wait_until_ready(publisher: Publisher, serial: int) -> torch.Tensor:
    live, deadline = LiveSlots(publisher.slots.state_words), time.monotonic() + PATIENCE_S
    while serial not in live.filled():
        assert time.monotonic() < deadline, "the fence was never reached"
        time.sleep(0.005)
    index, _ = live.filled()[serial]
    return publisher.memory[index]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_hold_what_a_plain_cast_gives(on_device: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "SCRATCH_BYTES", 1 << 16)  # several parts, and parameters cut into pieces
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator) for shape in ((257, 129), (7,), (50000,), ())]
    parameters = {f"p{index}": value.cuda() for index, value in enumerate(values)}
    publisher = Publisher(parameters, rank=0, dtype=dtype, num_slots=2, bucket_bytes=1 << 16, on_device=on_device)
    publisher.reserve()
    publisher.snapshot(0, 1)
    slot = wait_until_ready(publisher, 1)
    assert slot.is_cuda == on_device and (on_device or slot.is_pinned())
    for value, shard in zip(values, publisher.layout.ranks[0], strict=True):
        expected = value.to(getattr(torch, dtype))
        held = slot[shard.byte_offset :][: expected.numel() * expected.element_size()].cpu()
        assert torch.equal(held, expected.reshape(-1).view(torch.uint8))
    publisher.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_only_the_fence_keeps_a_late_copy_whole(on_device: bool) -> None:
    whole = []
    for drops_hold in (False, True):
        parameter = torch.zeros(1 << 20, device=torch.device("cuda", 0))
        publisher = Publisher(
            {"p": parameter},
            rank=0,
            dtype="bfloat16",
            num_slots=2,
            bucket_bytes=1 << 20,
            on_device=on_device,
            stream=LateStream(parameter.device, drops_hold),
        )
        parameter.fill_(5)
        publisher.reserve()
        publisher.snapshot(0, 1)
        publisher.fence()
        parameter.fill_(-1.0)
        assert not LiveSlots(publisher.slots.state_words).filled(), "the trainer waited for the copy"
        whole.append(bool((wait_until_ready(publisher, 1).view(torch.bfloat16) == 5).all()))
        publisher.close()
    assert whole == [True, False]


def test_checksums_of_device_and_host_agree() -> None:
    for length in (1, 6, 4 * (1 << 14) * 65 + 6, 1 << 22):
        data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
        assert sum_checksum(data.cuda()) == sum_checksum(data) == sum_checksum_numpy(data.numpy().tobytes())


def play(folder: Path, transport: str, where: str) -> None:
    """Actors that stage on a device: a damaged bucket, and one that freezes half-way and goes on."""
    job = Job(folder, transport=transport, device="cuda", chunk_bytes=16 * 1024)
    try:
        assert job.publication.publisher.layout.checksum == "sum"
        healthy = job.actor("actor-0", "corrupt:phase=receive,version=1,bucket=2,times=2", where)
        victim = job.actor("actor-1", "freeze:phase=receive,version=2,bucket=5", where)
        for _ in range(2):
            job.publish()
            job.served_by(healthy, victim)
        for _ in range(4):
            job.publish()
            job.served_by(healthy)
        assert victim.newest() < 2
        victim.signal(signal.SIGCONT)
        job.served_by(victim)
    finally:
        job.close()


def test_ipc_between_processes_on_one_gpu(tmp_path: Path) -> None:
    play(tmp_path, "ipc", "cuda:0")


def test_ipc_into_staging_memory_of_the_host(tmp_path: Path) -> None:
    play(tmp_path, "ipc", "cpu")


@needs_two
def test_ipc_between_processes_on_two_gpus(tmp_path: Path) -> None:
    play(tmp_path, "ipc", "cuda:1")


@needs_two
def test_nccl_between_two_gpus(tmp_path: Path) -> None:
    play(tmp_path, "nccl", "cuda:1")
