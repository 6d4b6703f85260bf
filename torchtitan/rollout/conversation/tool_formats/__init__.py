"""How families of models write calls of tools: one file for each format, and `registry.py`, which lists them.

A format is a class in a file of its own. To add one: derive from `ToolFormat` (or `TaggedFormat`), say what begins a
call and how one is read, and add an instance to `FORMATS` in registry.py. Its names in the configuration, in
`tool_parser = "auto"` and in the checks at the start come from there. The contract test in
tests/unit_tests/rollout/data/test_tool_formats.py holds for every registered format; add its way of writing a call.
"""
