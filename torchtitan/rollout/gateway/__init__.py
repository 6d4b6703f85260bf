"""The gateway: any program that speaks a known API can use the policy, and its tokens are trained as sampled.

`process.py` is the run's side: it starts the gateway as a separate process, opens and ends sessions, and has engines
answer its requests. `server.py` has the routes. `calls.py` has calls and answers, whatever API they come by;
`chat_completions.py`, `messages.py` and `responses.py` translate three APIs to them. `session.py` records the calls of
a session. `../tokenizer.py` renders messages as tokens.
"""
