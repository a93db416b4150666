"""`python -m quaff` is the command line."""

from quaff.cli import main

main()
