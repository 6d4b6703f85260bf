"""Checkpoints of a run: tensors with Distributed Checkpoint, everything else as JSON and bytes of our own.

Every rank writes and reads only its own shards; a checkpoint loads into any other layout. Nothing that is read back
is unpickled, but for Distributed Checkpoint's metadata, and that only from a list of harmless classes.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from torchtitan.config.job_config import Checkpoint as CheckpointConfig
from torchtitan.config.run_folders import CHECKPOINTS
from torchtitan.distributed import device
from torchtitan.distributed.offload import begin_host_copy
from torchtitan.distributed.placement import is_distributed, local_region
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_files import read_json
from torchtitan.models.shape.exports import ADAPTERS, WHOLE, export_path
from torchtitan.trainer.checkpoint_reader import CheckedReader
from torchtitan.trainer.optimizer import BatchLRScheduler
from torchtitan.trainer.origins import Origins
from torchtitan.trainer.run_dir import (
    begin_checkpoint,
    checkpoint_path,
    damage,
    describe_file,
    finish_checkpoint,
    other_checkpoint,
    prune_checkpoints,
    whole_steps,
)
from torchtitan.utils.dtypes import DTYPES
from torchtitan.utils.files import write_file

logger = logging.getLogger(__name__)

# Parts of parameter names that wrappers add (activation checkpointing, torch.compile).
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
_HOST = torch.device("cpu")
# A save that takes longer than this has lost a rank or its disk.
SAVE_TIMEOUT_S = 1800.0


def collect(
    policy: nn.Module, optimizer: torch.optim.Optimizer, rank: int, reference: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    """Live tensors by name: model.NAME, optimizer.NAME.KEY, reference.NAME (of a reference policy that changes) and
    random.RANK.DEVICE; sharing memory with the run's.

    Frozen parameters are not in here: they come from model.hf_assets_path and lora.adapter_path again. Nor are
    hyperparameters: a resumed run takes them from its configuration.
    """
    state: dict[str, torch.Tensor] = {}
    for name, parameter in _trained(policy).items():
        state[f"model.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                # The state of eight bits is of a rank's part alone, and only fits a rank that has the same one.
                part = ""
                if is_distributed(parameter) and not is_distributed(value) and value.dim() > 0:
                    bounds = [f"{held.start}:{held.stop}" for held in local_region(parameter)]
                    part = f"[{','.join(bounds)}]"
                state[f"optimizer.{name}.{key}{part}"] = value
    # The only buffers are those that a model cannot do without.
    state |= {f"model.{name}": buffer for name, buffer in policy.named_buffers()}
    if reference is not None:
        for name, tensor in [*reference.named_parameters(), *reference.named_buffers()]:
            state[f"reference.{name}"] = tensor.detach()
    state[f"random.{rank}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def _trained(policy: nn.Module) -> dict[str, nn.Parameter]:
    named = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    for wrapper in _WRAPPERS:
        named = {name.replace(wrapper, ""): parameter for name, parameter in named.items()}
    return named


def stage(state: dict[str, torch.Tensor], pinned: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies in host memory, which the run does not write to; a sharded tensor stays sharded.

    pinned: what earlier calls have allocated for tensors on a GPU.
    """
    staged: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not tensor.is_cuda:
            staged[name] = tensor.detach().clone()
            continue
        staged[name] = begin_host_copy(tensor.detach(), pinned, name)
    if any(tensor.is_cuda for tensor in state.values()):
        torch.cuda.current_stream().synchronize()
    return staged


def materialize_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state, so that it can be loaded into: a step with rate 0 and zero gradients."""
    if optimizer.state:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


@dataclass
class Restored:
    """What a checkpoint held besides the tensors."""

    version: int
    rollout: bytes | None = None
    """Finished rollouts that were not trained on yet; on rank 0 only"""


class Checkpointer:
    """Saves and restores policy, optimizer, scheduler and random state of one run.

    Create it on all ranks at the same point: with several ranks it makes a process group of its own, so that saves
    in the background never meet the collectives of training. All methods are called by all ranks alike.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: str | Path,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: BatchLRScheduler,
        reference: nn.Module | None = None,
        origins: Origins | None = None,
    ):
        """origins: what the run refers to but no checkpoint has; rank 0's is used."""
        self.config = config
        self.folder = Path(run_dir) / CHECKPOINTS
        self.policy = policy
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.reference = reference
        self.origins = origins
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if several else 0
        self._world_size = dist.get_world_size() if several else 1
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S)) if several else None
        self._pinned: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last_saved = -1

    def due(self, step: int) -> bool:
        """Whether the interval asks for a checkpoint after this step."""
        return self.config.enable and step > 0 and step % self.config.interval == 0

    def save(self, step: int, rollout: bytes | None = None) -> None:
        """Save the run as it is after `step`, which is also the version of its weights.

        With `checkpoint.async_mode = "async"` the tensors are copied and written in the background; a save that is
        still being written is waited for first. rollout: of rank 0 alone.

        Raises:
            UserError: this save, or the one in the background before it, could not be written.
        """
        self.wait()
        if step == self._last_saved:
            return
        state = collect(self.policy, self.optimizer, self.rank, self.reference)
        facts = {"version": step, "scheduler": self.scheduler.state_dict(), **self._adapters}
        if self.rank == 0 and self.origins is not None:
            facts["refers_to"] = self.origins.describe()
        # A tensor in most optimizers, and then saved with the others.
        counts = [values["step"] for values in self.optimizer.state.values() if isinstance(values.get("step"), int)]
        facts["optimizer_steps"] = max(counts, default=0)
        document = json.dumps(facts).encode()
        self._last_saved = step
        if self.config.async_mode == "async":
            staged = stage(state, self._pinned)
            self._thread = threading.Thread(
                target=self._write_guarded,
                args=(step, staged, document, rollout, device.device()),
                name="checkpoint",
                daemon=True,
            )
            self._thread.start()
        else:
            self._write_guarded(step, state, document, rollout)
            self.check()

    def wait(self, timeout_s: float = SAVE_TIMEOUT_S) -> None:
        """Wait until the save in the background is whole. Raises UserError if it failed or takes too long."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise UserError(
                    f"the checkpoint of step {self._last_saved} in {self.folder} was not written within "
                    f"{timeout_s:.0f} s: check the disk, and whether all ranks are still there"
                )
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what went wrong in a save that has ended, if anything did: a UserError where the disk did."""
        if self._error is not None and (self._thread is None or not self._thread.is_alive()):
            error, self._error = self._error, None
            self._last_saved = -1
            if not isinstance(error, (OSError, CheckpointException)):
                raise error  # another rank is gone, say: nothing that this one could explain
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            # Of a full disk torch's writer of archives may only say that its position is not the expected one.
            room = f" ({shutil.disk_usage(self.folder).free >> 20} MiB are free there)" if self.folder.is_dir() else ""
            raise UserError(f"the checkpoint in {self.folder}{room} could not be written: {cause}") from error

    def load(self, step: int = -1, policy_only: bool = False) -> Restored:
        """Restore the newest whole checkpoint, or the one of `step`, into policy, optimizer, scheduler and generators;
        with policy_only into the policy alone.

        Raises:
            UserError: there is no such checkpoint, or it cannot be read, or is of another model or of other adapters.
        """
        step = self._agree_on_step(step)
        path = checkpoint_path(self.folder, step)
        self._check_files(step)
        facts, reader, saved = self._read_facts(path)
        if not policy_only:
            materialize_optimizer(self.optimizer)
        stepped = {name.rpartition(".")[0] for name in saved if name.startswith("optimizer.")}
        for name, parameter in _trained(self.policy).items():
            if f"optimizer.{name}" not in stepped:  # it never had a gradient until then
                self.optimizer.state.pop(parameter, None)
        state = collect(self.policy, self.optimizer, self.rank, self.reference)
        if policy_only:
            state = {name: tensor for name, tensor in state.items() if name.startswith("model.")}
        random_state = {name: tensor for name, tensor in state.items() if name.startswith("random.")}
        if any(name not in saved for name in random_state):
            logger.warning("%s holds no random state for rank %d: the rank starts from training.seed", path, self.rank)
            state = {name: tensor for name, tensor in state.items() if name not in random_state}
        for name, tensor in state.items():
            size = getattr(saved.get(name), "size", None)
            if size is None and name.startswith("optimizer."):
                raise UserError(
                    f"{path} is of another optimizer, which has no {name}: resume with its optimizer.name"
                    + ", on as many ranks in the same layout (AdamW8bit quantises each rank's part)"
                    * name.endswith("]")
                )
            if size is None or tuple(size) != tuple(tensor.shape):
                found = "no such tensor" if size is None else f"shape {list(size)}"
                raise UserError(
                    f"{path} is of another model: {name} should have shape {list(tensor.shape)}, found {found}"
                )
        extra = [name for name in saved if name.startswith("model.") and name not in state]
        if extra:
            raise UserError(
                f"{path} is of another model, or of more adapters (lora.target_modules, lora.modules_to_save): "
                f"{extra[0]} was trained there, and this run does not have it"
            )
        # Shapes do not show these.
        for key, value in self._adapters.items():
            if (found := facts[key]) != value:
                raise UserError(
                    f"{path} holds adapters of lora.{key} = {found:g}, but this run has {value:g}: resume with "
                    f"lora.{key} = {found:g}, or start a new run"
                )
        try:
            (other, *_) = self._on_ranks(lambda: self._changed_origin(facts, policy_only))
        except OSError as error:
            raise UserError(f"{path} cannot be continued: {error}") from error
        if other:
            raise UserError(f"{path} cannot be continued: {other}")
        try:
            with torch.no_grad():
                self._distributed(state_dict_loader.load, state, storage_reader=reader)
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            raise UserError(f"{path} cannot be read ({reason!r}): {other_checkpoint(self.folder, step)}") from error
        if policy_only:
            return Restored(facts["version"])
        if all(name in state for name in random_state):
            torch.set_rng_state(state[f"random.{self.rank}.cpu"])
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(state[f"random.{self.rank}.cuda"])
        for values in self.optimizer.state.values():
            if isinstance(values.get("step"), int):
                values["step"] = facts["optimizer_steps"]
        self.scheduler.load_state_dict(facts["scheduler"])
        rollout_path = path / "rollout.bin"
        rollout = rollout_path.read_bytes() if self.rank == 0 and rollout_path.is_file() else None
        self._last_saved = step
        logger.info("restored step %d from %s", step, path)
        return Restored(facts["version"], rollout)

    def export_hf(self, step: int, assets_from: str | Path | None = None, end_token_ids: Sequence[int] = ()) -> Path:
        """Write the policy as a Hugging Face checkpoint directory `hf/step-N` in the run folder (collective).

        Low-rank adapters are merged there, and by themselves in `adapter/step-N`, in PEFT's format. end_token_ids: what
        ends its completions; of rank 0 alone.
        """
        from torchtitan.models.hf_checkpoint import checkpoint_dtype, export_policy, save_adapter

        directory = export_path(self.folder.parent, WHOLE, step)
        policy: Any = self.policy
        dtype = DTYPES.get(self.config.export_dtype) or checkpoint_dtype(policy)
        export_policy(policy, directory, assets_from=assets_from, dtype=dtype, end_token_ids=end_token_ids)
        logger.info("exported the policy after step %d to %s", step, directory)
        if getattr(self.policy, "lora", None) is not None:
            adapter = export_path(self.folder.parent, ADAPTERS, step)
            save_adapter(self.policy, adapter, base_model=str(assets_from or ""))  # type: ignore[arg-type]
            logger.info("its adapters alone are in %s", adapter)
        return directory

    @property
    def _adapters(self) -> dict[str, float]:
        """Keys of [lora] that decide what the adapters' values mean."""
        lora = getattr(self.policy, "lora", None)
        return {} if lora is None else {"base_bits": lora.base_bits, "alpha": lora.alpha}

    def describe_origins(self) -> None:
        """Read what a first save has to say of what the run refers to, which takes longer than a save may (collective).
        Raises UserError."""
        try:
            self._on_ranks(lambda: self.origins and bool(self.origins.describe()))
        except OSError as error:
            raise UserError(str(error)) from error

    def has(self, step: int) -> bool:
        """Whether there still is a whole checkpoint of `step`, as rank 0 sees the folder."""
        return bool(self._on_ranks(lambda: step in whole_steps(self.folder))[0])

    def _read_facts(self, path: Path) -> tuple[dict[str, Any], CheckedReader, Mapping[str, Any]]:
        """Read what a checkpoint says of itself and of its tensors. Raises UserError on all ranks if one cannot."""
        read: list[tuple[dict[str, Any], CheckedReader, Mapping[str, Any]]] = []

        def read_here() -> None:
            reader = CheckedReader(str(path))
            read.append((read_json(path / "state.json"), reader, reader.read_metadata().state_dict_metadata))

        try:
            self._on_ranks(read_here, all_ranks=True)
        except OSError as error:
            raise UserError(f"{path}: {error}") from error
        return read[0]

    def _changed_origin(self, facts: Mapping[str, Any], evaluates: bool) -> str:
        """What a checkpoint's run refers to that is another one here."""
        if self.origins is None:
            return ""
        return self.origins.problem(facts.get("refers_to", {}), self.folder.parent, evaluates)

    def _write_guarded(
        self,
        step: int,
        state: dict[str, torch.Tensor],
        document: bytes,
        rollout: bytes | None,
        where: torch.device = _HOST,
    ) -> None:
        """where: the device beside whose work this thread writes what is in host memory."""
        try:
            # torch's writer waits for the current stream at every megabyte: in a new thread it is the first GPU's, and
            # it would be behind the computation.
            device.use(where)
            with device.in_background(where):
                self._write(step, state, document, rollout)
        except (Exception, CheckpointException) as error:  # a BaseException of torch; check() raises it
            self._error = error

    def _write(self, step: int, state: dict[str, torch.Tensor], document: bytes, rollout: bytes | None) -> None:
        started = time.perf_counter()
        temporary = self.folder / f"step-{step}.tmp"
        self._on_ranks(lambda: self._begin(step, document, rollout))
        self._distributed(
            state_dict_saver.save, state, storage_writer=FileSystemWriter(str(temporary), sync_files=True)
        )
        described = self._on_ranks(lambda: self._describe(temporary), all_ranks=True)
        files = {name: file for of_rank in described for name, file in of_rank.items()}
        self._on_ranks(lambda: self._finish(step, files))
        if self.rank == 0:
            logger.info("checkpoint of step %d written in %.1f s", step, time.perf_counter() - started)

    def _begin(self, step: int, document: bytes, rollout: bytes | None) -> None:
        temporary = begin_checkpoint(self.folder, step)
        write_file(temporary / "state.json", document)
        if rollout is not None:
            write_file(temporary / "rollout.bin", rollout)

    def _describe(self, temporary: Path) -> dict[str, Any]:
        """Describe the files that this rank has written: its shards, and on rank 0 all that are no shards."""
        rank_prefix = f"__{self.rank}_"  # as Distributed Checkpoint names them
        files: dict[str, Any] = {}
        for file in temporary.iterdir():
            is_shared = not file.name.startswith("__")
            if file.name.startswith(rank_prefix) or (is_shared and self.rank == 0):
                files[file.name] = describe_file(file)
        return files

    def _finish(self, step: int, files: dict[str, Any]) -> None:
        finish_checkpoint(self.folder, step, files, ranks=self._world_size)
        prune_checkpoints(self.folder, self.config.keep_latest_k)

    def _check_files(self, step: int) -> None:
        """Read all files of a checkpoint, each on one rank. Raises UserError on all ranks where one is damaged."""
        path = checkpoint_path(self.folder, step)
        found = self._on_ranks(lambda: damage(path, self.rank, self._world_size), all_ranks=True)
        if problem := next(filter(None, found), ""):
            (advice, *_) = self._on_ranks(lambda: other_checkpoint(self.folder, step))
            raise UserError(f"{path} {problem}. To go on: {advice}")

    def _on_ranks(self, action: Callable[[], Any], all_ranks: bool = False) -> list[Any]:
        """Run an action on rank 0, or on all ranks. Returns every rank's result (None where it did not run).

        Raises an error on all ranks where it did not work on one: its own there, OSError on the others.
        """
        result, problem = None, None
        if all_ranks or self.rank == 0:
            try:
                result = action()
            except (OSError, UserError) as error:
                problem = error
        results: list[Any] = [(result, problem and str(problem))]
        if self._group is not None:
            results *= self._world_size
            dist.all_gather_object(results, (result, problem and str(problem)), group=self._group)
        if problem is not None:
            raise problem
        for rank, (_, failure) in enumerate(results):
            if failure:
                raise OSError(f"rank {rank}: {failure}")
        return [result for result, _ in results]

    def _distributed(self, operation: Callable[..., Any], state: dict[str, torch.Tensor], **arguments: Any) -> None:
        with warnings.catch_warnings():
            # Without a process group torch says on every call that it assumes a single process: so it is.
            warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process.*")
            operation(state, process_group=self._group, no_dist=self._group is None, **arguments)

    def _agree_on_step(self, step: int) -> int:
        """The step to load, as rank 0 sees the folder; −1 asks for the newest."""
        found = -1
        if self.rank == 0:
            steps = whole_steps(self.folder)
            if step in steps:
                found = step
            elif steps and step < 0:
                found = steps[-1]
        if self._group is not None:
            message = torch.tensor([found])
            dist.broadcast(message, 0, group=self._group)
            found = int(message.item())
        if found < 0:
            wanted = "whole checkpoint" if step < 0 else f"whole checkpoint of step {step}"
            raise UserError(f"there is no {wanted} in {self.folder}; whole steps there: {whole_steps(self.folder)}")
        return found
