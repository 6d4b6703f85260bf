"""The gateway: any program that speaks a known API can use the policy, and its tokens are trained as sampled.

`gateway_process.py` is the run's side: it starts the gateway as a separate process, opens and ends sessions, and has
engines answer its requests. `server.py` has the routes. `calls.py` has calls and answers, whatever API they come by;
`dialects/` translates each API to them. `answer_reader.py` finds calls of tools in answers, with the user's own parser
in `parser_process.py`. `session.py` records the calls of a session. `../conversation/` renders messages as tokens.
"""
