"""`kitestring run`: the parts of a run as supervised processes of this machine."""
