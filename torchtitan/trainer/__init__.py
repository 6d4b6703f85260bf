"""The training loop's parts: what every rank does in a step, and rank 0's controller, which decides what comes next."""
