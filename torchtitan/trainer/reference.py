"""The policy that log-probs are compared with: that of the KL term, or a teacher."""

from __future__ import annotations

import contextlib
import copy

import torch

from torchtitan.config.job_config import JobConfig
from torchtitan.config.teachers import keeps_initial_adapters, teacher_config
from torchtitan.distributed.placement import ParallelDims, local_tensor
from torchtitan.models.decoder import Decoder
from torchtitan.models.lora import adapters_off, as_begun, weights
from torchtitan.models.parallelize import build_policy
from torchtitan.models.shape.costs import reference_on_host


def build_reference(config: JobConfig, dims: ParallelDims, policy: Decoder) -> Reference:
    """The reference for `policy`: the teacher of `config`, or itself with the adapters that it began with where those
    are all that is trained, or else a second one that begins as it does.

    A collective.
    """
    if config.job.stage == "distill" and config.distill.teacher:
        return ReferencePolicy(teacher_config(config), dims)
    if config.lora.trains_only_adapters:
        return OwnReference(policy, keeps_initial_adapters(config))
    return ReferencePolicy(config, dims)


class OwnReference:
    """The trained policy itself, with the adapters that it began with: copies of them (kept), or none."""

    follows = False

    def __init__(self, policy: Decoder, keeps_initial_adapters: bool):
        self.policy, self._keeps_initial_adapters = policy, keeps_initial_adapters

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block `policy` is the reference."""
        return as_begun(self.policy) if self._keeps_initial_adapters else adapters_off(self.policy)

    def follow(self, policy: Decoder) -> None:
        """What the policy began with does not change."""


class ReferencePolicy:
    """A second policy, laid out over the ranks as the trained one, without gradients.

    Begins with the weights of model.hf_assets_path, and the adapters of lora.adapter_path, also in a resumed run; one
    that follows is in the checkpoints.
    """

    def __init__(self, config: JobConfig, dims: ParallelDims):
        reference_config = copy.deepcopy(config)
        reference_config.training.enable_cpu_offload = reference_on_host(config)
        reference_config.activation_checkpoint.mode = "none"
        # No backward follows that would free what a forward has gathered; follow() needs each rank's own part.
        reference_config.parallelism.fsdp_reshard_after_forward = "always"
        if not config.lora.adapter_path:
            # The model that adapters were added to, in as many bits.
            reference_config.lora.rank = 0
        self.policy: Decoder = build_policy(reference_config, dims).eval().requires_grad_(False)
        self._decay = config.grpo.reference_ema_decay

    @property
    def follows(self) -> bool:
        """Whether its weights change."""
        return self._decay > 0

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block `policy` is the reference: here it always is."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def follow(self, policy: Decoder) -> None:
        """After a batch: w_ref ← decay · w_ref + (1 - decay) · w."""
        if not self.follows:
            return
        for reference_weight, policy_weight in zip(
            weights(self.policy).values(), weights(policy).values(), strict=True
        ):
            # Both are laid out alike, so every rank moves its own part.
            held, new = local_tensor(reference_weight), local_tensor(policy_weight)
            held.lerp_(new.to(held.device, held.dtype), 1 - self._decay)


Reference = OwnReference | ReferencePolicy
