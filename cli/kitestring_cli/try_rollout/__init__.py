"""`kitestring try`: one rollout of an agent, without a trainer."""
