"""From the calls of finished rollouts to the rows of an update: pure functions on plain data.

The order is fixed: calls → transitions → credit → rows → advantages over whole groups → mini-batches with weights.
Nothing is dropped before the advantages are known, so a dropped row never changes its group's baseline.
"""
