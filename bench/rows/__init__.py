"""Row benchmark: tokens of many-turn rollouts merged into rows and packed into a batch."""
