"""`python -m kitestring_cli` is `kitestring`."""

from kitestring_cli.main import main

main()
