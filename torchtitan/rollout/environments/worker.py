"""An environment worker process: messages as in workers/inside.py, any number of episodes side by side.

The set-up has {"factory", "tools", "parser", "longest"}; it answers with what there is: {"steps", "rewards", "tools"}.
Messages have {"episode": number, "do": …} with

    reset   {"row"}     {"text": added to the prompt}
    act     {"text"}    {"messages", "reward", "done", "calls", "errors"}
    finish              {"reward", "attributes"}
    drop    (no reply)  the episode is over

and every reply may be {"error": text} instead.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

from torchtitan.rollout.environments.programs import Instance, Program
from torchtitan.rollout.workers.inside import run


class Host:
    """The episodes of this process."""

    def __init__(self, program: Program, longest: int):
        self._program, self._longest = program, longest
        self._episodes: dict[int, Instance] = {}
        self._idle: list[Instance] = []
        """An instance is built once and reset often"""

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        episode, do = message["episode"], message["do"]
        try:
            if do == "reset":
                self._episodes[episode] = self._idle.pop() if self._idle else Instance(self._program, self._longest)
                return {"text": await self._episodes[episode].reset(message["row"])}
            instance = self._episodes[episode]
            if do == "act":
                return await instance.act(message["text"])
            result = await instance.finish()
            self._idle.append(self._episodes.pop(episode))
            return result
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # of user code
            traceback.print_exc()
            self.drop(episode)
            return {"error": f"{type(error).__name__}: {error}"}

    def drop(self, episode: int) -> None:
        """Forget an episode and its instance; what that may still be doing is left to it."""
        if (instance := self._episodes.pop(episode, None)) is not None:
            instance.close()


def load(setup: dict[str, Any]) -> tuple[Host, dict[str, Any]]:
    program = Program(setup["factory"], setup["tools"], setup["parser"])
    return Host(program, setup["longest"]), program.about


if __name__ == "__main__":
    run(load)
