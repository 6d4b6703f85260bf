"""An agent worker in verifiers' own environment: messages as in worker.py. It needs none of the trainer's packages.

The set-up has {"taskset", "harness", "renderer", "model", "max_turns"}. Calls of the policy name their trace as the
session; the gateway records all those of an episode's key.
"""

from __future__ import annotations

import os
from typing import Any

from torchtitan.rollout.agents.worker import ABOUT, Agents
from torchtitan.rollout.workers.inside import run


class Taskset:
    """Tasks of verifiers, and what plays them."""

    def __init__(self, setup: dict[str, Any]):
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import default_harness_id, load_taskset, taskset_config_type

        self._vf, self._setup = vf, setup
        name = setup["taskset"]
        taskset = load_taskset(taskset_config_type(name).model_validate({"id": name}))
        if not taskset.bounded:
            raise ValueError(f"taskset {name!r} is infinite: name one whose tasks end")
        self._tasks = list(taskset)
        if not self._tasks:
            raise ValueError(f"taskset {name!r} has no tasks")
        self._harness = setup["harness"] or default_harness_id(name)

    async def play(self, message: dict[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError with the trace's last error, where it has one: nothing was played then."""
        vf, setup = self._vf, self._setup
        task = self._tasks[int(message["row"].get("task", message["index"])) % len(self._tasks)]
        # A key for each episode; verifiers reads it when the client is made.
        variable = f"TORCHTITAN_GATEWAY_KEY_{message['episode']}"
        os.environ[variable] = message["key"]
        client = vf.TrainClientConfig(
            base_url=message["base_url"], api_key_var=variable,
            renderer={"name": setup["renderer"]}, renderer_model_name=setup["model"],
        )  # fmt: skip
        config = vf.AgentConfig(
            model="policy", client=client, harness={"id": self._harness}, runtime=vf.SubprocessConfig(),
            max_turns=setup["max_turns"], sampling=vf.SamplingConfig(),
        )  # fmt: skip
        try:
            async with vf.make_agent(config) as agent:
                trace = await agent.run(task)
        finally:
            del os.environ[variable]
        if trace.has_error:
            raise RuntimeError(f"{trace.last_error.type}: {trace.last_error.message}")
        return {"reward": float(trace.reward)}


if __name__ == "__main__":
    run(lambda setup: (Agents(Taskset(setup).play), ABOUT))
