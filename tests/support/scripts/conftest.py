"""The scripts in this directory are run by tests, and contain no tests themselves."""

collect_ignore_glob = ["*.py"]
