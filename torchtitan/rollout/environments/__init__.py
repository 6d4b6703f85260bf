"""The user's environments, tools and agents: their interfaces, and the worker processes that run them.

An environment is a class without constructor arguments and with `reset(**row)`, of one of two kinds:

- With `step(action)`: the method gets the text of a turn and returns (observation, reward, done). The return values of
  gymnasium and of OpenEnv clients are accepted, too.
- Without it: the other public methods are tools, with type annotations and docstrings, as in TRL.

Both kinds may have `get_reward()`. Agents are programs with their own loop, which reach the policy through the gateway:
functions, commands or verifiers. See docs/environments.md.
"""

from __future__ import annotations

# What is said of an environment or a tool that cannot be one: before a run from its source (data/own_code.py), and by
# the worker from the object.
NO_RESET = "it has no method reset(self, **row)"
NO_DOCSTRING = "it needs a docstring, from which the policy learns what it does"


def no_type(parameter: str) -> str:
    """Return what is said of a tool with a parameter that has no type."""
    return f"parameter {parameter} needs a type annotation"
