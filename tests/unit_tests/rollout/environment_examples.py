"""Environments and tools, friendly and hostile, for the workers that run them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Counter:
    """Counts what it is told; the word `bad` brings out what is bad about its subclasses."""

    def __init__(self) -> None:
        self.actions: list[str] = []
        self._hidden = object()
        self.unwritable = object()

    def reset(self, **row: Any) -> str:
        self.actions = []
        return f"<{row.get('name', '')}>"

    def step(self, action: str) -> tuple[Any, float, bool]:
        self.actions.append(action)
        if action.startswith("bad"):
            return self.bad(action), 0.0, False
        return f"{len(self.actions)}", 0.5, action == "end"

    def bad(self, action: str) -> Any:
        return None


class Kernel(Counter):
    """Has a process of its own, in a session of its own, from one episode to the next; and tells what is in a row."""

    def __init__(self) -> None:
        super().__init__()
        self._kernel = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

    def reset(self, **row: Any) -> str:
        return repr(row.get("image"))

    def bad(self, action: str) -> Any:
        return f"kernel: {self._kernel.poll()}"


class Talkative(Counter):
    def bad(self, action: str) -> Any:
        for number in range(20):
            setattr(self, f"numbers{number}", [1] * 21_000)


class Hangs(Counter):
    def bad(self, action: str) -> Any:
        while True:
            time.sleep(0.01)


class HangsAsleep(Counter):
    async def step(self, action: str) -> tuple[Any, float, bool]:  # type: ignore[override]
        await asyncio.sleep(1000 if action == "bad" else 0)
        return "", 1.0, True


def throw(error: BaseException) -> None:
    raise error


def behaving(bad: Callable[[], Any]) -> type[Counter]:
    """An environment that does this where it is told something bad."""
    return type("Behaving", (Counter,), {"bad": lambda self, action: bad()})


Raises, Cancels = (
    behaving(lambda error=error: throw(error))
    for error in (RuntimeError("no such move"), asyncio.CancelledError("of its own"))
)
Crashes, Eats = behaving(lambda: os._exit(3)), behaving(lambda: len(bytearray(1 << 33)))
Stops, NoText = behaving(lambda: next(iter(()))), behaving(object)
TooMuch = behaving(lambda: "much " * 2_000_000)


class Closes(Counter):
    def reset(self, mark: str = "", **row: Any) -> str:
        self.mark = Path(mark)
        return super().reset()

    def bad(self, action: str) -> Any:
        raise RuntimeError("no such move")

    def close(self) -> None:
        with self.mark.open("a") as file:
            file.write("closed")


class Prints(Counter):
    def bad(self, action: str) -> Any:
        for _ in range(10):
            sys.stdout.write("x" * (1 << 20))
            os.write(1, b"y" * (1 << 10))
        return "printed"


class Forks(Counter):
    """A child goes on as if it were the worker, and never ends."""

    def bad(self, action: str) -> Any:
        if os.fork() == 0:
            time.sleep(0.2)
            return "the child's"
        return "the parent's"


class Gym:
    """As gymnasium's environments are: no **kwargs, and tuples."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {"seen": action}, 1.0, False, action == "cut", {}


class Unfinished:
    """Returns something else than a step has to."""

    def reset(self, **row: Any) -> None: ...

    def step(self, action: str) -> Any:
        return {"two": ("seen", 1.0), "text": ("seen", 1.0, "false"), "none": ("seen", 1.0, None)}[action]


class Remote:
    """As OpenEnv's clients are: objects."""

    def reset(self, **row: Any) -> Any:
        return SimpleNamespace(observation="hello", reward=None, done=False)

    def step(self, action: str) -> Any:
        return SimpleNamespace(observation=[1, 2], reward=None, done=True)


class Shop:
    """Its public methods are tools, as in TRL."""

    def __init__(self) -> None:
        self.basket: list[str] = []

    def reset(self, **row: Any) -> None:
        self.basket = []

    def buy(self, what: str, pieces: int = 1) -> str:
        """Put something into the basket.

        Args:
            what: What to buy.
            pieces (int): How many of it,
        """
        self.basket += [what] * pieces
        return f"{len(self.basket)} things"

    async def look(self) -> list[str]:
        """See what is in the basket."""
        await asyncio.sleep(0)
        return self.basket

    @staticmethod
    def price(function: str) -> str:
        """What something costs, by a parameter whose name others have too."""
        return f"{function}: 3"

    def get_reward(self) -> float:
        return float(len(self.basket))

    def _private(self) -> str:
        return "no tool"


together = threading.Barrier(40)


def meets(row: dict[str, Any]) -> float:
    """An agent that goes on when all forty of them are there; one of them leaves."""
    together.wait(20.0)
    if row["leaves"]:
        sys.exit(3)
    return 1.0


async def _halved(row: dict[str, Any]) -> float:
    return row["number"] / 2


def wrapped(row: dict[str, Any]) -> Any:
    """An asynchronous agent that does not look like one, as a decorator makes it."""
    return _halved(row)


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    if city == "Atlantis":
        raise KeyError("it has sunk")
    return f"sunny in {city}"


def forecast(city: str) -> str:
    """The weather to come, from a service that wants a key.

    Args:
        city: Its name.
    """
    return os.environ["WEATHER_KEY"]


def half(number: float) -> str:
    """Half of a number.

    Args:
        number: Which one.
    """
    return str(number / 2)


async def async_calls(text: str) -> list[tuple[str, Any]]:
    return [("half", {"number": text})]


def decimal_calls(text: str) -> list[tuple[str, Any]]:
    return [("half", {"number": Decimal(text)})]


def untyped(city) -> str:  # type: ignore[no-untyped-def]
    """A tool without types."""
    return ""


def undocumented(city: str) -> str:
    return city


class NoEnvironment:
    def reset(self, **row: Any) -> None: ...


class Babel:
    """Answers with text that is hard on tokenizers: all of unicode, and what is spelled like special tokens."""

    def reset(self, name: int, **row: Any) -> str:
        self.random = random.Random(name)
        return self._text()

    def step(self, action: str) -> tuple[str, float, bool]:
        return self._text(), self.random.random(), self.random.random() < 0.15

    def _text(self) -> str:
        parts = [
            "<|im_end|>", "<|im_start|>", "<|im_start|>user", "<tool_call>", "\n", "ab", "\U0010fffe", "é", "漢", "🙂",
        ]  # fmt: skip
        letters = (
            chr(self.random.choice((97, 233, 0x4E00, 0x1F600, 0x10FFFF)) - self.random.randrange(30)) for _ in ".."
        )
        return "".join(self.random.choice([*parts, *letters]) for _ in range(self.random.randrange(6)))


class Struck(Babel):
    """Fails as its row says, in the one episode that takes the row's mark first."""

    def reset(self, name: int, fault: str = "", mark: str = "", **row: Any) -> str:
        self.fault, self.mark = fault, Path(mark)
        return super().reset(name)

    def step(self, action: str) -> tuple[str, float, bool]:
        if self.fault:
            with contextlib.suppress(FileExistsError):
                self.mark.touch(exist_ok=False)
                faults = {"raises": lambda: throw(RuntimeError("a fault")), "hangs": lambda: time.sleep(1000)}
                {**faults, "crashes": lambda: os._exit(3)}[self.fault]()
        return super().step(action)
