"""Environments, tools and agents of the user: what their programs look like, and the worker processes that run them.

Two kinds of class, each without constructor arguments and with `reset(**row)`:

- with `step(action)`: it gets the text of a turn and returns (observation, reward, done), as gymnasium's or an OpenEnv
  client's do too;
- without: its other public methods are tools, typed and with docstrings, as TRL has it.

Either may have `get_reward()`. Agents are programs with a loop of their own, which ask the policy through the gateway:
functions, commands, verifiers. See docs/environments.md.
"""
