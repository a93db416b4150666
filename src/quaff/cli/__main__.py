from quaff.cli import main

main()
