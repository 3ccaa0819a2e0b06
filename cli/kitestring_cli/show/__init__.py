"""`kitestring show`: one rollout as a reader sees it."""
