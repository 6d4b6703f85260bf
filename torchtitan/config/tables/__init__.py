"""The tables of a configuration, by subject; the string under a field is its documentation."""
