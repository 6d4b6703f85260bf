"""The second design of the weight sync: the trainer publishes, actors pull. No run uses it yet.

It stands beside the first one (coordinator, couriers, receivers) until it passes the same checks; then that one goes.
A registry says which versions there are and what each actor may pull, a shard server beside every rank answers pulls
from its slots, and a puller in every actor fetches the newest version, verifies every bucket and asks again for what
is damaged.
"""
