"""The commands of the CLI, one file each; see ``penstock.cli.Command``."""
