"""Worker benchmark: what it adds to an agent in time and memory."""
