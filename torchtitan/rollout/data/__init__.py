"""What a turn of the policy means: its thought, its answer, and its calls of tools.

`marks.py` has the text in which a turn is read, `thoughts.py` the one definition of thought and answer, which rewards,
environments and the gateway share, and `tool_formats/` one file for each way of writing calls.
"""
