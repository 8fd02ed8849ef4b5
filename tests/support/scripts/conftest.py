"""These scripts are run by tests, as users would run them, and are none themselves."""

collect_ignore_glob = ["*.py"]
