"""The APIs that programs speak: one file for each, and `registry.py`, which lists them.

To add one: derive from `Dialect` (dialect.py), translate its requests and answers, and add an instance to `DIALECTS` in
registry.py. The server's routes come from there. `request_fields.py` has what several APIs share, and `token_ids.py`
the route for programs that render messages themselves.
"""
