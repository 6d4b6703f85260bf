"""Parts of a run that know nothing of the algorithm: tokenizer, optimizer, checkpoints, metrics, report."""
