"""Processes that run the user's code (rewards, environments, tools) with limits, and how they are talked to."""
