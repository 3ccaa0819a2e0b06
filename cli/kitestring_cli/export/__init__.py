"""`kitestring export`: what a run recorded, as rows for other programs."""
