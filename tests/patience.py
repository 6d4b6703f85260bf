"""How long a test waits for what has to come."""

# Only a failure takes so long. On two busy cores and a cold disk, starting a few processes has taken 40 s.
PATIENCE_S = 120.0
