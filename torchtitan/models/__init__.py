"""Policies: one decoder definition, Hugging Face checkpoints in and out, parallelism."""
