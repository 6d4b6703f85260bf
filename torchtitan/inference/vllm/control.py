"""vLLM's admin routes, as an agent needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torchtitan.inference.agent.control import EngineError, EngineFacts, PauseMode
from torchtitan.inference.agent.http_control import AdminClient
from torchtitan.inference.client import Capabilities
from torchtitan.inference.types import Tag
from torchtitan.inference.vllm.dialect import DIALECT, PATH

DEFAULT_LABEL = "default"
# An engine that has nothing to finish says so within this time.
LEAST_WAIT_S = 1.0
# What is asked of the server besides generation; all of it is there since 0.32.
NEEDED = {
    PATH: "--enable-scale-out",
    "/pause": "the environment variable VLLM_SERVER_DEV_MODE=1",
    "/update_weights": "the environment variable VLLM_SERVER_DEV_MODE=1",
    "/weight_info": "a newer version (0.32 has it)",
}


class VLLMControl:
    """Administers the server at `url`; see agent.control.EngineControl.

    in_flight_kv: running requests keep their KV cache over a pause, or give it up and have it recomputed. timeout_s: of
    each order that names none. kept_tokens, sleeps: it runs with --return-sampling-mask, with --enable-sleep-mode (its
    routes do not tell, and without free nothing).
    """

    def __init__(
        self,
        url: str,
        token: str,
        timeout_s: float,
        in_flight_kv: Literal["keep", "recompute"],
        kept_tokens: bool = False,
        sleeps: bool = False,
    ):
        self.client = AdminClient(url, token)
        self.timeout_s = timeout_s
        self._keeps, self._kept_tokens, self._sleeps = in_flight_kv == "keep", kept_tokens, sleeps
        self.version = ""
        """What it says it is, after describe()"""

    def describe(self) -> EngineFacts:
        self.version = version = str(self._get("/version")["version"])
        routes = self._get("/openapi.json")["paths"]
        for route, how in NEEDED.items():
            if route not in routes:
                raise EngineError(f"vLLM {version} has no route {route}: it needs {how}")
        world_size = int(self._get("/get_world_size")["world_size"])
        capabilities = Capabilities(
            "vllm", version, score=True, kept_tokens=self._kept_tokens, sleep=self._sleeps and "/sleep" in routes
        )
        return EngineFacts(capabilities, world_size)

    def check_health(self, timeout_s: float) -> None:
        self.client.call("GET", "/health", timeout_s)
        # Answered by the engine's own loop, not by the HTTP server in front of it.
        self.client.call("GET", "/weight_info", timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> bool:
        clears = "false" if mode == "keep" and self._keeps else "true"
        try:
            self.client.call("POST", f"/pause?mode={mode}&clear_cache={clears}", timeout_s)
        except EngineError:
            if mode != "wait":
                raise
            return False
        return True

    def resume(self) -> None:
        self.client.call("POST", "/resume", self.timeout_s)

    def is_paused(self) -> bool:
        return bool(self._get("/is_paused")["is_paused"])

    def sleep(self, level: int, tags: Sequence[Tag], finish_s: float) -> bool:
        # By itself it would wait for what runs without an end, or drop that. What it has given back it passes over.
        if not self.pause("wait", max(finish_s, LEAST_WAIT_S)):
            return False
        self.client.call("POST", f"/sleep?level={level}&mode=keep", self.timeout_s)
        return True

    def drops_weights(self, level: int) -> bool:
        return level == 2

    def wake(self, tag: Tag) -> None:
        self.client.call("POST", f"/wake_up?tags={tag}", self.timeout_s)

    def reset_prefix_cache(self) -> None:
        done = self.client.call("POST", "/reset_prefix_cache", self.timeout_s)["success"]
        if not done and not self._keeps:
            raise EngineError("the prefix cache could not be reset")
        # Under "keep" running requests hold on to theirs. No other gets to see it: see the salt in dialect.py.

    def weights_label(self) -> str | None:
        label = self._get("/weight_info")["weight_version"]
        return None if label in (None, DEFAULT_LABEL) else str(label)

    def score(self, token_ids: list[int]) -> list[float]:
        call = DIALECT.score(token_ids)
        return DIALECT.scored(token_ids, self.client.call("POST", call.path, self.timeout_s, call.body)).log_probs

    def order(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """POST to an admin route. Raises EngineError."""
        return self.client.call("POST", path, self.timeout_s if timeout_s is None else timeout_s, body)

    def _get(self, path: str) -> dict[str, Any]:
        data = self.client.call("GET", path, self.timeout_s)
        if not isinstance(data, dict):
            raise EngineError(f"{path} did not answer with a JSON object")
        return data
