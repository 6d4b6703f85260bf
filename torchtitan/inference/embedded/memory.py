"""Gives the memory of a policy's weights back, and takes it again; what was in it is lost."""

from __future__ import annotations

from torchtitan.models.decoder import Decoder
from torchtitan.models.fused_projections import fuse_again, take_apart


class DroppedWeights:
    """Made, it has freed all parameters of `policy`, which nobody may use before `take`. The parameters themselves
    stay, so whoever holds one has its new memory afterwards."""

    def __init__(self, policy: Decoder):
        self._policy = policy
        self._shapes = [(parameter, parameter.shape) for parameter in policy.parameters()]
        # Their storages cannot be shrunk in place: those that were read as numpy arrays refuse that.
        self._fused = take_apart(policy)
        for parameter, _ in self._shapes:
            parameter.data = parameter.data.new_empty(0)

    def take(self) -> None:
        """Memory as large as before, with anything in it."""
        for parameter, shape in self._shapes:
            parameter.data = parameter.data.new_empty(shape)
        fuse_again(self._policy, self._fused)
