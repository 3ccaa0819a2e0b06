"""What the operator costs: a process of its own, against an API server in this one that holds everything in memory."""
