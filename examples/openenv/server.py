"""An OpenEnv server, with openenv's own package (0.10): say sevens, in three turns.

Every turn is told how many it had; the reward is their share of its characters.
"""

from __future__ import annotations

import argparse
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

TURNS = 3


class Said(Action):
    text: str


class Told(Observation):
    text: str = ""


class Sevens(Environment):  # type: ignore[type-arg]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Told:
        self._state = State(episode_id=episode_id, step_count=0)
        return Told(text="", reward=None, done=False)

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Told:
        self._state.step_count += 1
        sevens = action.text.count("7")
        reward = sevens / max(1, len(action.text))
        return Told(text=f"({sevens})", reward=reward, done=self._state.step_count == TURNS)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    app = create_app(Sevens, Said, Told, env_name="sevens", max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="warning")
