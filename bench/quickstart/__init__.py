"""Quick-start benchmark: from nothing to a better policy."""
