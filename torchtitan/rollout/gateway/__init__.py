"""The gateway: any program that speaks the OpenAI API can use the policy, and its tokens are trained as sampled.

`process.py` is the run's side: it starts the gateway as a separate process, opens and ends sessions, and has engines
answer its requests. `server.py` has the routes. `calls.py` reads and writes the API's JSON and records the calls of a
session. `../tokenizer.py` renders messages as tokens.
"""
