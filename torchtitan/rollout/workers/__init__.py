"""Processes that run other people's code: rewards, tools, environments and agents."""
