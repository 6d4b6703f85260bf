"""What is queued on a GPU's streams happens in the right order, on streams that run as late as the program allows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests import late_streams
from tests.late_streams import CUDA, Factories, LateTensor, current_stream, on_device, others_may_wait, run_all
from tests.patience import PATIENCE_S, until
from tests.unit_tests.inference.test_digest import hashed
from torchtitan.distributed import device
from torchtitan.distributed.offload import OptimizerOffload
from torchtitan.inference.engines.vllm import live_check
from torchtitan.inference.engines.vllm.direct import Mailbox
from torchtitan.inference.engines.vllm.live_check import Comparison, LiveWeightChecker, answers, look_before_steps
from torchtitan.trainer.checkpoint import stage
from torchtitan.weight_sync.memory.device_slots import copy_from_device
from torchtitan.weight_sync.memory.slots import LiveSlots
from torchtitan.weight_sync.memory.staging import ExpectedChecksums, StagedTensors, StagedVersion, Staging
from torchtitan.weight_sync.trainer.plan import Placed, PlacedParameter, plan_rank
from torchtitan.weight_sync.trainer.publisher import Publisher


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    late_streams.pretend(monkeypatch)
    # On a busy machine a look would need several moments.
    monkeypatch.setattr(live_check, "CHECK_SECONDS", PATIENCE_S)
    yield
    others_may_wait.set()
    run_all()
    device.device.cache_clear()
    device._background_stream.cache_clear()


# Publisher


class Trainer:
    """A parameter on the device, whose every step adds 1, and its publisher."""

    def __init__(self, on_device: bool):
        self.weight = LateTensor(torch.zeros(6, 4))
        with Factories():
            self.publisher = Publisher(
                {"w": self.weight}, rank=0, dtype="bfloat16", num_slots=2, bucket_bytes=1 << 10, on_device=on_device
            )
        run_all()

    def step(self) -> None:
        self.weight.add_(1.0)

    def publish(self, version: int) -> None:
        assert self.publisher.reserve() is not None
        self.publisher.snapshot(version, version)

    def published(self, version: int) -> list[float]:
        """What a reader finds in the version's slot as soon as it is said to be filled."""
        live = LiveSlots(self.publisher.slots.state_words)
        until(lambda: version in live.filled())
        slot = live.filled()[version][0]
        memory = self.publisher.memory[slot]
        held = memory.held if isinstance(memory, LateTensor) else memory
        return held[: 6 * 4 * 2].view(torch.bfloat16).unique().tolist()


@pytest.fixture(params=[False, True], ids=["host slots", "device slots"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    made = Trainer(request.param)
    yield made
    others_may_wait.set()
    made.publisher.close()


def test_a_snapshot_holds_what_was_queued_before_it_and_is_ready_when_it_does(trainer: Trainer) -> None:
    trainer.step()
    trainer.publish(1)
    assert trainer.published(1) == [1.0]


def test_a_step_behind_the_fence_does_not_change_a_snapshot_that_is_late(trainer: Trainer) -> None:
    others_may_wait.clear()
    trainer.step()
    trainer.publish(1)
    trainer.publisher.fence()
    trainer.step()
    run_all()  # the computation comes first wherever nothing holds it
    others_may_wait.set()
    assert trainer.published(1) == [1.0]
    trainer.publish(2)
    assert trainer.published(2) == [2.0]


def test_a_snapshot_that_waits_for_its_copy_holds_up_neither_the_thread_nor_the_stream(trainer: Trainer) -> None:
    others_may_wait.clear()
    trainer.step()
    before = current_stream()._ran
    trainer.publish(1)
    trainer.publisher.fence()
    trainer.step()
    assert current_stream()._ran == before
    assert not LiveSlots(trainer.publisher.slots.state_words).filled()


# Offload and checkpoints


def make_optimizer() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(LateTensor(torch.zeros(5)))
    return parameter, torch.optim.AdamW([parameter], lr=0.1, foreach=False)


def moments(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    return [value for name, value in sorted(optimizer.state[parameter].items()) if name != "step"]


def steps(offload: bool, count: int = 3) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The moments as whoever reads them between two steps finds them, and the parameter at the end."""
    parameter, optimizer = make_optimizer()
    if offload:
        OptimizerOffload(optimizer).between_steps()
    found = []
    for step in range(count):
        parameter.grad = on_device(torch.arange(5.0) + step)
        with Factories():
            optimizer.step()
        parameter.grad.fill_(99.0)  # the device goes on
        for moment in moments(optimizer, parameter):
            assert isinstance(moment, LateTensor) != offload
            found.append(moment.cpu().clone())
    return found, parameter.data.cpu()


def test_optimizer_state_that_has_left_the_device_is_there_when_step_returns_and_comes_back() -> None:
    (moved, weight), (stayed, expected) = steps(True), steps(False)
    assert all(torch.equal(*pair) for pair in zip(moved, stayed, strict=True)) and torch.equal(weight, expected)


def test_a_checkpoint_holds_what_was_queued_before_it_and_nothing_later() -> None:
    parameter = LateTensor(torch.zeros(4))
    pinned: dict[str, torch.Tensor] = {}
    for value in (1.0, 2.0):
        parameter.fill_(value)
        staged = stage({"a": parameter}, pinned)
        parameter.fill_(99.0)
        assert staged["a"].tolist() == [value] * 4


# Copies and receives


def test_memory_of_another_process_is_in_its_place_when_the_copy_returns() -> None:
    opened, target = on_device(torch.arange(8, dtype=torch.uint8)), bytearray(8)
    late_streams.pin(torch.frombuffer(target, dtype=torch.uint8))
    copy_from_device(opened, memoryview(target))
    assert list(target) == list(range(8))


def test_background_work_does_not_wait_for_the_computation() -> None:
    compute, source, target = current_stream(), on_device(torch.ones(4)), LateTensor(torch.zeros(4))
    source.add_(0.0)
    before = compute._ran
    with device.in_background(CUDA):
        target.copy_(source)
        device.finish_background(CUDA)
    assert compute._ran == before and target.held.tolist() == [1.0] * 4


def test_what_the_compute_stream_has_queued_is_done_when_it_is_finished() -> None:
    tensor = LateTensor(torch.zeros(2))
    tensor.add_(3.0)
    with device.in_background(CUDA):
        device.finish_compute(CUDA)
    assert tensor.held.tolist() == [3.0, 3.0]


def test_a_synchronized_device_has_nothing_left_and_a_fence_says_when_it_is_reached() -> None:
    tensor = LateTensor(torch.zeros(2))
    tensor.add_(3.0)
    fence = device.fence(CUDA)
    tensor.add_(1.0)
    assert not fence.done()
    fence.wait()
    assert tensor.held.tolist() == [3.0, 3.0] and fence.done()
    device.synchronize(CUDA)
    assert tensor.held.tolist() == [4.0, 4.0]


# Applying


def make_staged(version: int, weight: torch.Tensor, on_gpu: bool = True) -> tuple[StagedVersion, Staging]:
    """A version of one weight that is staged, on the device or on the host, with its proof."""
    placed = PlacedParameter("w", Placed(tuple(weight.shape)))
    layout = plan_rank([placed], 0, "float32", 1 << 10)
    with Factories():
        staging = Staging(layout, "cuda" if on_gpu else "cpu")
    staging.tensors["w"].copy_(weight)
    run_all()
    proof = ExpectedChecksums(layout, hashed(layout, {"w": weight}), lambda: True)
    return StagedVersion("e", version, f"d{version}", staging.tensors, proof=proof), staging


def test_staging_memory_on_the_device_is_handed_back_once_the_engine_has_copied_it() -> None:
    staged, staging = make_staged(1, torch.full((2, 3), 1.0))
    mailbox, model = Mailbox(), LateTensor(torch.zeros(2, 3))

    def pull() -> None:
        mailbox.offer(staged, PATIENCE_S, PATIENCE_S)
        # Of the next version, on a stream of its own.
        with device.in_background(CUDA):
            staging.tensors["w"].fill_(2.0)
            device.finish_background(CUDA)

    puller = threading.Thread(target=pull)
    puller.start()
    found = mailbox.load(("e", 1, "d1"), lambda version: model.copy_(version.tensors["w"]), CUDA, PATIENCE_S)
    puller.join(PATIENCE_S)
    assert found is staged and not puller.is_alive()
    device.synchronize(CUDA)
    assert model.held.tolist() == [[1.0] * 3] * 2


# A look at the weights in use


class Graphs:
    """An engine on the device that replays what it has captured: no step calls its forward."""

    checker: LiveWeightChecker | None = None

    def __init__(self, weight: torch.Tensor):
        self.weight = LateTensor(weight.clone())
        self.forwards = 0
        captured = partial(torch.mv, self.weight, on_device(torch.ones(weight.shape[1])))
        self._replay = captured

    def forward(self) -> None:
        self.forwards += 1

    def execute_model(self, _scheduled: object) -> float:
        return float(self._replay()[0])

    def compare(self, tensors: StagedTensors) -> Iterator[Comparison]:
        for live, wanted in zip(self.weight, tensors["w"], strict=True):
            yield Comparison("w", (live == wanted).all())


def test_versions_are_verified_in_an_engine_whose_graphs_replay_every_step() -> None:
    class Worker(Graphs):
        pass

    weight, torn = torch.arange(12.0).reshape(3, 4), list[int]()
    look_before_steps(Worker, lambda worker: worker.checker)
    engine = Worker(weight)
    assert engine.execute_model(None) == 6.0  # where no version is verified
    engine.checker = checker = LiveWeightChecker(
        1, lambda _epoch, version, _reason, _count: torn.append(version), engine.compare, CUDA, lambda _status: None
    )
    for version in range(1, 6):
        engine.weight.copy_(weight + version)
        if version == 3:
            engine.weight[2, 1].zero_()
        checker.applied(make_staged(version, weight + version, on_gpu=False)[0])
        for _ in range(3 if version == 4 else 10):
            # No step reads the fourth's results, and the fifth finds them there.
            if version == 4:
                checker.check_some()
            else:
                assert engine.execute_model(None) == 6.0 + 4 * version
    assert (checker.status.matched, checker.status.version, torn, checker.status.unfinished) == (4, 5, [3], 0)
    assert not engine.forwards


def test_a_look_on_the_device_queues_its_comparisons_and_waits_for_none() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    engine, torn = Graphs(weight), list[str]()
    found: list[Any] = []
    checker = LiveWeightChecker(
        1, lambda _epoch, _version, reason, _count: torn.append(reason), engine.compare, CUDA,
        lambda status: found.append((status.version, status.matched, status.mismatched, status.unfinished)),
    )  # fmt: skip
    before = current_stream()._ran
    checker.applied(make_staged(1, weight, on_gpu=True)[0])
    run_all()
    before = current_stream()._ran
    for _ in range(20):
        checker.check_some()
    assert current_stream()._ran == before and not found
    run_all()
    checker.check_some()
    assert found == [(1, 1, 0, 0)] and not torn
    # One value of the second row is not what was sent.
    engine.weight[1, 2].fill_(7.0)
    checker.applied(make_staged(2, weight, on_gpu=False)[0])
    checker.check_some()
    run_all()
    checker.check_some()
    assert found[-1] == (1, 1, 1, 0) and "compute with w" in torn[0]
    # What the next version replaces was not verified, and that is counted.
    checker.applied(make_staged(3, weight)[0])
    checker.applied(make_staged(4, weight)[0])
    assert found[-1] == (1, 1, 1, 1)


def test_what_comes_into_place_of_a_version_is_not_judged_as_that_version() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    engine, torn = Graphs(weight), list[int]()
    checker = LiveWeightChecker(
        1, lambda _epoch, version, _reason, _count: torn.append(version), engine.compare, CUDA, lambda _status: None
    )

    def verified() -> tuple[int | None, int, int]:
        return checker.status.version, checker.status.matched, checker.status.unfinished

    # A second version comes before anything was compared, and only half of it.
    checker.applied(make_staged(1, weight, on_gpu=False)[0])
    checker.replacing()
    engine.weight[0].fill_(9.0)
    for _ in range(3):
        checker.check_some()
        run_all()
    assert verified() == (None, 0, 1) and not torn
    # What was compared before the next version came has been verified.
    engine.weight.copy_(weight)
    checker.applied(make_staged(3, weight, on_gpu=False)[0])
    checker.check_some()
    checker.replacing()
    engine.weight.copy_(weight + 1)
    run_all()
    checker.applied(make_staged(4, weight + 1, on_gpu=False)[0])
    assert verified() == (3, 1, 1) and not torn


class Devices(TorchDispatchMode):
    """The devices of all that operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {leaf.device.type for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_is_asked_for_its_weight_gives_each_element_of_it(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 3 * live_check.ROWS + 7, generator=torch.Generator().manual_seed(0)).to(dtype)

    def parts_alike(held: torch.Tensor) -> list[bool]:
        return [bool(found) for found in answers(lambda rows: torch.nn.functional.linear(rows, held), weight)]

    assert parts_alike(weight) == [True] * 4
    for column in (0, live_check.ROWS, weight.shape[1] - 1):
        other = weight.clone()
        other[5, column] *= 1.01
        assert parts_alike(other) == [part != column // live_check.ROWS for part in range(4)]


def test_a_layer_on_a_device_is_asked_with_nothing_from_the_host() -> None:
    """An index on the host would be copied to the device, which the host would wait for."""
    wanted = torch.empty(48, 2 * live_check.ROWS_ON_DEVICE + 7, device="meta")
    with Devices() as devices:
        assert len(list(answers(lambda rows: rows @ wanted.T, wanted))) == 3
    assert devices.seen == {"meta"}


def test_a_version_of_which_nothing_could_be_compared_is_not_verified(caplog: pytest.LogCaptureFixture) -> None:
    checker = LiveWeightChecker(
        1, lambda *_: pytest.fail("torn"), lambda _: iter([Comparison("w", None)]), CUDA, lambda _status: None
    )
    checker.applied(make_staged(1, torch.zeros(2, 3))[0])
    for _ in range(3):
        checker.check_some()
        run_all()
    assert (checker.status.matched, checker.status.unfinished) == (0, 1)
    assert "version 1 were not verified: nothing that the engine holds" in caplog.text
