"""Any program that speaks the OpenAI API plays against the policy, and every token that it got is trained as sampled.

`process.py` is the run's side: it starts the gateway, a process of its own, opens and ends sessions, and has engines
sample what it asks for. `server.py` has the routes, `calls.py` reads and writes the API's JSON and has what a session's
calls leave. `tokenizer.py`, beside this folder, makes tokens of messages.
"""
