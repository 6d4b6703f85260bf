"""vLLM's admin routes, as an agent needs them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from torchtitan.inference.agent.control import EngineControl, EngineError, EngineFacts, PauseMode
from torchtitan.inference.client import Capabilities
from torchtitan.inference.types import Tag
from torchtitan.inference.vllm.dialect import PATH

# An engine that has nothing to finish says so within this time.
LEAST_WAIT_S = 1.0
# What is asked of the server besides generation; all of it is there since 0.32.
NEEDED = {
    PATH: "--enable-scale-out",
    "/pause": "the environment variable VLLM_SERVER_DEV_MODE=1",
    "/update_weights": "the environment variable VLLM_SERVER_DEV_MODE=1",
    "/weight_info": "a newer version (0.32 has it)",
}


class VLLMControl(EngineControl):
    """kept_tokens, sleeps, repacks_heads: it runs with --return-sampling-mask, with --enable-sleep-mode (its routes do
    not tell, and without free nothing), with our worker extension. looks: its workers look at their weights."""

    label_route = "/weight_info"

    def __init__(
        self,
        url: str,
        token: str,
        timeout_s: float,
        in_flight_kv: Literal["keep", "recompute"],
        kept_tokens: bool = False,
        sleeps: bool = False,
        repacks_heads: bool = False,
        looks: bool = False,
    ):
        super().__init__(url, token, timeout_s, in_flight_kv)
        self._kept_tokens, self._sleeps, self._repacks_heads, self._looks = kept_tokens, sleeps, repacks_heads, looks
        self.version = ""
        """What it says it is, after describe()"""

    def describe(self) -> EngineFacts:
        self.version = version = str(self.ask("/version")["version"])
        routes = self.ask("/openapi.json")["paths"]
        for route, how in NEEDED.items():
            if route not in routes:
                raise EngineError(f"vLLM {version} has no route {route}: it needs {how}")
        world_size = int(self.ask("/get_world_size")["world_size"])
        capabilities = Capabilities(
            "vllm", version, score=True, kept_tokens=self._kept_tokens, digest=self._looks,
            sleep=self._sleeps and "/sleep" in routes,
        )  # fmt: skip
        return EngineFacts(capabilities, world_size)

    def check_health(self, timeout_s: float) -> None:
        self.client.call("GET", "/health", timeout_s)
        # Answered by the engine's own loop, not by the HTTP server in front of it.
        self.ask("/weight_info", timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        clears = "false" if mode == "keep" and self.keeps_cache else "true"
        try:
            self.order(f"/pause?mode={mode}&clear_cache={clears}", timeout_s=timeout_s)
        except EngineError:
            if mode != "wait":
                raise
            return False
        return True

    def resume(self) -> None:
        self.order("/resume")

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        # By itself it would wait for what runs without an end, or drop that. What it has given back it passes over.
        if not self.pause("wait", max(finish_s, LEAST_WAIT_S)):
            return False
        self.order(f"/sleep?level={level}&mode=keep")
        return True

    def drops_weights(self, level: int) -> bool:
        return level == 2

    def wake(self, tag: Tag) -> None:
        self.order(f"/wake_up?tags={tag}")

    def reset_prefix_cache(self) -> None:
        done = self.client.call("POST", "/reset_prefix_cache", self.timeout_s)["success"]
        if not done and not self.keeps_cache:
            raise EngineError("the prefix cache could not be reset")
        # Under "keep" running requests hold on to theirs. No later one gets to see it: see PrefixKeyMiddleware.

    def read_files(self, folder: Path, label: str) -> None:
        self._call_workers("reload_weights", {"weights_path": str(folder)})
        if self._repacks_heads:
            # A server that runs already may go on computing with the old head where that is packed, as on CPUs.
            self._call_workers("torchtitan_repack", {})
        self.order("/update_weight_version", {"new_version": label})

    def _call_workers(self, method: str, arguments: dict[str, str]) -> None:
        self.order("/collective_rpc", {"method": method, "kwargs": arguments, "timeout": self.timeout_s})
