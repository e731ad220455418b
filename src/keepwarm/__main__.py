"""`python -m keepwarm` is the same as `keepwarm`: worker processes are started this way."""

from keepwarm.cli.main import main

main()
