"""Checks before a run starts: validation of the whole configuration, and a plan of what the run will do."""
