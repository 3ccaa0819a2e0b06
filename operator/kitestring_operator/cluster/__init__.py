"""The cluster as the operator sees it: requests, their errors, and the cache of what was seen."""
