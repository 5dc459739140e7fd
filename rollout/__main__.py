"""``python -m rollout``: the same command line as ``zerodrift``."""

from rollout.cli import main

main()
