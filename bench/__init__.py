"""What the hot paths cost. `python -m bench` runs every row and checks the figures against the rows' `ranges.yaml`."""
