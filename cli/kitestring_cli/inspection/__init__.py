"""`kitestring inspect`: how a run went, from what it has written down."""
