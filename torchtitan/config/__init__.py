"""The configuration of a job: TOML tables and command-line overrides become one JobConfig."""
