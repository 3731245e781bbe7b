"""The command `raggedfsdp`. Nothing here imports torch before a command runs, so that `--help` is immediate."""
